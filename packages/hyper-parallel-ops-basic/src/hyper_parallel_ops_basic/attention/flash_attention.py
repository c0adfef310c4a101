"""Flash attention: the functions of the package ``flash_attn`` (versions 2 and 3) and ``torch.nn.attention.varlen``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hyper_parallel import Layout, Placement, Strategy
from hyper_parallel.rules import Call, OpSummary, R, S, zeros_from
from hyper_parallel_ops_basic.attention.kernel_attention import (
    Arguments,
    AttentionForm,
    Change,
    KernelAttention,
    end_of_keys,
)
from hyper_parallel_ops_basic.attention.scaled_dot_product import gathering

__all__ = ["FlashAttention", "VarlenAttention"]


class FlashAttention(KernelAttention):
    """``flash_attn_func``, ``flash_attn_varlen_func`` and their packed forms, by the ``apply`` inside of them.

    Query ``[batch, queries, heads, E]`` or, with the tokens of all sequences in one dim, ``[tokens, heads, E]``; key
    and value alike, or packed in a dim before the heads. Results: the output, and where ``return_softmax`` asks for
    them the logarithms of the softmax's sums, ``[batch, heads, queries]`` or ``[heads, tokens]``, and in version 2 the
    pattern of dropout.

    Args:
        query, keys: names of the arguments; of packed ones there are fewer.
        lengths: names of the places where the packed sequences of queries, and of keys, start; none where each sample
            is one sequence.
        statistics: number of results beside the output that ``return_softmax`` asks for.
    """

    summary = OpSummary(
        "samples, heads (grouped ones too; key and value heads alike, or whole), queries, tokens of packed sequences",
        communicates=(
            "keys sharded like the queries: an all-gather of keys and one of values | 2 reduce-scatters; sharded "
            "starts of sequences: an all-gather; else none"
        ),
        whole="features; keys of whole queries; queries in one tensor with their keys, with `attention_chunk`, or with "
        "`alibi_slopes` where they see keys behind their own place (the kernel counts slopes from the last key); "
        "tokens of packed sequences under a window that looks ahead (sequences that are cut and others would need "
        "different windows); everything with dropout, which the kernel draws on its own, with paged keys or scales of "
        "float8",
    )

    signature = (
        "q, k, v, kv, qkv, cu_seqlens, cu_seqlens_q, cu_seqlens_k, dropout_p, causal, window_size, alibi_slopes, "
        "return_softmax, attention_chunk, num_heads_q, max_seqlen, max_seqlen_q, max_seqlen_k, **others"
    )
    # Further tensors that are understood.
    beside_them: tuple[str, ...] = ("alibi_slopes", "max_seqlen", "max_seqlen_q", "max_seqlen_k")
    floats_matter = True  # whether there is dropout

    def __init__(
        self,
        op_name: str,
        *,
        query: str = "q",
        keys: Sequence[str] = ("k", "v"),
        lengths: Sequence[str] = (),
        statistics: int = 2,
    ) -> None:
        super().__init__(op_name)
        self.query, self.keys, self.lengths, self.statistics = query, tuple(keys), tuple(lengths), statistics
        self.uncounted = self.lengths  # no rank computes other gradients because these are sharded

    # -- how the call is written ----------------------------------------------------------------------------------

    def form(self, call: Call) -> AttentionForm | None:
        understood = (self.query, *self.keys, *self.lengths, *self.beside_them)
        if _drops(call) or sum(call.index(name) is not None for name in understood) < len(call.inputs):
            return None
        heads = call.spec(self.query).shape[-2]
        return AttentionForm(
            self.query,
            self.keys,
            batch=None if self.lengths else 0,
            rows=None if not self.keys or not self._may_be_cut(call) else 0 if self.lengths else 1,
            heads=None if call.arg("num_heads_q") is not None else -2,  # those of queries and keys are in one dim
            counts=(heads, call.spec(self.keys[0]).shape[-2] if self.keys else heads),
        )

    def _may_be_cut(self, call: Call) -> bool:
        """Whether a part of the queries can do with the keys up to some place and a window of its own."""
        if call.arg("attention_chunk"):
            return False
        if _window(call)[1] == 0:
            return True
        return call.index("alibi_slopes") is None and (not self.lengths or max(_window(call)) < 0)

    def beside(self, call: Call, part: str) -> dict[str, Placement]:
        index = call.index("alibi_slopes")
        if index is None:
            return {}
        ndim = len(call.inputs[index].shape)  # [heads] or [batch, heads]
        dims = {"heads": ndim - 1} | ({"batch": 0} if ndim == 2 else {})
        return {"alibi_slopes": S(dims[part])} if part in dims else {}

    def localised(self, call: Call) -> Callable[[Arguments, int, int], None]:
        before, behind = _window(call)
        if self.lengths:
            return lambda given, start, stop: self._cut_sequences(given, start, stop, looks_back=behind == 0)
        keys = call.spec(self.keys[0]).shape[1]
        ahead = keys - call.spec(self.query).shape[1]  # the last query sees the last key

        def cut_keys(given: Arguments, start: int, stop: int) -> None:
            own = stop + ahead  # behind the place of the last query
            end = keys if behind < 0 else min(max(own + behind, 0), keys)
            for name in self.keys if end < keys else ():
                given[name] = given[name][:, :end]
            moved = end - own
            if moved > 0 and "window_size" in given:  # the last query now lies beside a key further behind
                given["window_size"] = (before + moved if before >= 0 else -1, behind - moved if behind >= 0 else -1)

        return cut_keys

    def _cut_sequences(self, given: Arguments, start: int, stop: int, looks_back: bool) -> None:
        """Sequences that lie outside of the tokens ``start`` to ``stop`` become empty."""
        of_queries, of_keys = (given[name] for name in self.lengths)
        given[self.lengths[0]] = of_queries.clamp(start, stop) - start
        if looks_back:
            # Where they are the same, nobody waits for the device to read them.
            end = stop if of_queries is of_keys else end_of_keys(of_queries.tolist(), of_keys.tolist(), stop)
            given[self.lengths[1]] = of_keys.clamp(max=end)
            given.update({name: given[name][:end] for name in self.keys})

    # -- starts of sequences that are sharded ---------------------------------------------------------------------

    def strategies(self, call: Call, by_head: bool = True) -> Iterable[Strategy]:
        """Small, and read whole by every rank: with any row they may be sharded, and are gathered."""
        starts = [name for name in self.lengths if self._is_sharded(call, name)]
        rows = [*super().strategies(call, by_head)]
        if starts and self.form(call) is not None:
            rows.append(Strategy({}, [R] * self.num_outputs(call)))
            gathered = dict.fromkeys(starts, S(0))
            rows += [replace(row, inputs={**row.inputs, **gathered}) for row in rows]  # type: ignore[dict-item]
        return rows

    @staticmethod
    def _is_sharded(call: Call, name: str) -> bool:
        return call.index(name) is not None and bool(call.spec(name).layout.shard_order[0])

    def changes(self, call: Call, form: AttentionForm, targets: Sequence[Layout]) -> list[Change]:
        gathers = {}
        for name in filter(lambda name: call.index(name) is not None, self.lengths):
            layout = targets[call.position(name)]
            if axes := frozenset(layout.shard_order[0]):
                gathers[name] = gathering(layout, axes, tuple(call.spec(name).shape))

        def gather_starts(given: Arguments) -> None:
            whole: dict[int, torch.Tensor] = {}
            for name, gather in gathers.items():
                starts = given[name]
                if id(starts) not in whole:  # often those of queries and keys are one tensor, and have to remain it
                    whole[id(starts)] = gather(starts)
                given[name] = whole[id(starts)]

        rest = super().changes(call, form, targets)
        return [gather_starts, *rest] if gathers else rest

    # -- results --------------------------------------------------------------------------------------------------

    def num_outputs(self, call: Call) -> int:
        return 1 + self.statistics * bool(call.arg("return_softmax"))

    def outputs(self, call: Call, part: str) -> Sequence[Placement]:
        parts = ("rows", "heads") if self.lengths else ("batch", "rows", "heads")
        d = parts.index(part)
        of_sums = {"rows": len(parts) - 1, "heads": len(parts) - 2}.get(part, d)
        return [S(d), S(of_sums), R][: self.num_outputs(call)]

    def output_shapes(self, call: Call) -> Sequence[tuple[int, ...]] | None:
        if _drops(call) and self.num_outputs(call) > 2:
            return None
        query, value = (call.spec(name).shape for name in (self.query, [self.query, *self.keys][-1]))
        return self._shapes(call, query, value)

    def _shapes(self, call: Call, query: Sequence[int], value: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes of the results, global or local, from those of queries and values."""
        rows = tuple(query[: 1 if self.lengths else 2])
        heads = call.arg("num_heads_q") or query[-2]
        return [(*rows, heads, value[-1]), (*rows[:-1], heads, rows[-1]), (0,)][: self.num_outputs(call)]

    def nothing(self, call: Call, given: Arguments) -> Any:
        query, value = (given[name] for name in (self.query, [self.query, *self.keys][-1]))
        tensors = [query, *(x for x in given.values() if isinstance(x, torch.Tensor))]
        results = [zeros_from(shape, *tensors) for shape in self._shapes(call, query.shape, value.shape)]
        return tuple(x.float() if i == 1 else x for i, x in enumerate(results)) if len(results) > 1 else results[0]


class VarlenAttention(FlashAttention):
    """``torch.nn.attention.varlen.varlen_attn``, by the operator inside of it: ``[tokens, heads, E]``. Results: the
    output, the logarithms of the softmax's sums ``[heads, tokens]``, and a random state that nobody uses."""

    signature = (
        "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size, enable_gqa, seqused_k, "
        "block_table, num_splits"
    )
    beside_them = ()

    def __init__(self, op_name: str) -> None:
        super().__init__(op_name, query="query", keys=("key", "value"), lengths=("cu_seq_q", "cu_seq_k"))

    def num_outputs(self, call: Call) -> int:
        return 3

    def _shapes(self, call: Call, query: Sequence[int], value: Sequence[int]) -> list[tuple[int, ...]]:
        return [*super()._shapes(call, query, value)[:2], (2,)]

    def nothing(self, call: Call, given: Arguments) -> Any:
        *results, state = super().nothing(call, given)
        return *results, torch.zeros(state.shape, dtype=torch.uint64, device=state.device)


def _drops(call: Call) -> bool:
    return call.arg("dropout_p", 0.0) > 0


def _window(call: Call) -> tuple[int, int]:
    """How many keys before and behind its own place a query sees; negative: all."""
    before, behind = call.arg("window_size") or (-1, -1)
    return before, 0 if call.arg("causal") or call.arg("is_causal") else behind
