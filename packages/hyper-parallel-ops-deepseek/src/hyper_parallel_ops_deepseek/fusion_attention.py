"""``npu_fusion_attention``: batch and heads sharded, with the number of heads of this rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hyper_parallel.call import Call, Solution
from hyper_parallel.families.over_axes import global_indices
from hyper_parallel.layout import Layout
from hyper_parallel.op import OpSummary
from hyper_parallel.placements import PackedShard, Placement
from hyper_parallel.strategy import R, S, Strategy, StrategyOp

from .reference import npu_fusion_attention

__all__ = ["FusionAttention"]

_QKV = ("query", "key", "value")


class FusionAttention(StrategyOp):
    """``npu_fusion_attention`` with any ``input_layout``.

    - Batch: with the masks that have one. Not with sequence lengths, which are those of the whole batch.
    - Heads: those of key and value go along where every rank gets whole groups; otherwise, where heads are a dim of
      their own, key and value stay whole and each rank takes what its query heads need.
    - Queries, with the rows of the masks, where the masks say all; the kernel counts the rows of a causal mode itself.
    - With dropout only whole tensors: the kernel draws on its own, and not what one device would draw.
    """

    summary = OpSummary(
        "samples with their masks, heads (grouped ones too; key and value heads alike, or whole), queries with their "
        "rows of the masks",
        whole="keys and values: a softmax goes over all of them; queries of causal modes and bands, which the kernel "
        "counts from the first or last of all; samples and queries with sequence lengths; everything with dropout, "
        "which the kernel draws on its own",
    )

    signature = (
        "query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0, "
        "keep_prob=1.0, pre_tockens=2147483647, next_tockens=2147483647, inner_precise=0, prefix=None, "
        "actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False, "
        "softmax_layout=, sink=None"
    )
    floats_matter = True  # whether there is dropout

    def __init__(self, op_name: str, *, by_head: bool = True) -> None:
        super().__init__(op_name)
        self.by_head = by_head

    def solve(self, call: Call) -> Solution:
        solution = super().solve(call)
        query, key = (solution.targets[call.position(name)] for name in _QKV[:2])
        d = head_dim(call.arg("input_layout"))
        if key.shard_order[d] and not self._whole_groups(call, query.shard_order[d]):
            # Chosen axis by axis, more of them than the heads allow together.
            without = copy.copy(self)
            without.by_head = False
            return without.solve(call)
        return solution

    @staticmethod
    def _whole_groups(call: Call, axes: Iterable[int]) -> bool:
        """Whether every rank of these axes gets the key heads of its query heads, when both are sharded."""
        letters = call.arg("input_layout")
        ways = math.prod(call.info.shape[a] for a in axes)
        heads, groups = head_counts(call, letters)
        return ("N" in letters and heads == groups) or heads % ways == groups % ways == 0

    def num_outputs(self, call: Call) -> int:
        return 4

    def strategies(self, call: Call) -> Iterable[Strategy]:
        if call.arg("keep_prob", 1.0) < 1:
            return
        letters = call.arg("input_layout")
        if "B" in letters and call.arg("actual_seq_qlen") is None and call.arg("prefix") is None:
            d = letters.index("B")
            yield Strategy(dict.fromkeys(_QKV, S(d)) | self._masks(call, 0), [S(d), S(0), S(0), R])
        if "S" in letters and self._by_masks_alone(call):
            d = letters.index("S")
            queries = call.spec("query").shape[d]
            yield Strategy({"query": S(d)} | self._masks(call, -2, queries), [S(d), S(2), S(2), R])
        if self.by_head:
            yield from self._head_rows(call, letters)

    @staticmethod
    def _by_masks_alone(call: Call) -> bool:
        """Whether which keys a query sees does not depend on its place among the queries."""
        every = max(call.spec(name).shape[call.arg("input_layout").index("S")] for name in _QKV[:2])
        bands = (call.arg(name, every) for name in ("pre_tockens", "next_tockens"))
        mode = call.arg("sparse_mode", 0)
        lengths = (call.arg(name) for name in ("actual_seq_qlen", "actual_seq_kvlen", "prefix", "padding_mask"))
        return all(n is None for n in lengths) and (mode == 1 or (mode == 0 and min(bands) >= every))

    def _masks(self, call: Call, d: int, size: int | None = None) -> dict[str, Placement]:
        """Masks ``[batch, heads, queries, keys]`` follow where they are not broadcast; those of queries and keys alone
        have no batch nor heads."""
        found = {name: call.index(name) for name in ("pse", "atten_mask")}
        shapes = {name: call.inputs[i].shape for name, i in found.items() if i is not None}
        own = {name: (d % len(shape), shape) for name, shape in shapes.items() if d < 0 or len(shape) == 4}
        return {name: S(at) for name, (at, shape) in own.items() if shape[at] != 1 and size in (None, shape[at])}

    def _head_rows(self, call: Call, letters: str) -> Iterable[Strategy]:
        d = head_dim(letters)
        specs = [call.spec(name) for name in _QKV]
        axes = {a for spec in specs for a in spec.layout.shard_order[d]}
        if any(isinstance(spec.layout.placements[a], PackedShard) for spec in specs for a in axes):
            return
        masks = self._masks(call, 1) | ({"sink": S(0)} if call.index("sink") is not None else {})
        outputs = [S(d), S(1), S(1), R]
        if self._whole_groups(call, axes):
            yield Strategy(dict.fromkeys(_QKV, S(d)) | masks, outputs)
        elif "N" in letters and not any(spec.layout.shard_order[d] for spec in specs[1:]):
            yield Strategy({"query": S(d), **masks}, outputs)

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if all(layout.is_replicated() for layout in targets):
            return None
        letters = call.arg("input_layout")
        query, key = (targets[call.position(name)] for name in ("query", "key"))
        d, shape = head_dim(letters), tuple(call.spec("query").shape)
        heads, groups = head_counts(call, letters)
        takes_heads = bool(query.shard_order[d]) and not key.shard_order[d]
        func, arguments = call.func, self.arguments

        def local(*args: Any, **kwargs: Any) -> Any:
            given = arguments.bind(args, kwargs)
            given["head_num"] = heads * given["query"].shape[d] // shape[d]
            if takes_heads:
                own = global_indices(query, shape, d, given["query"].device) // (heads // groups)
                given |= {name: given[name].index_select(d, own) for name in ("key", "value")}
            # Kernels do not take nothing; the definition does.
            return (func if given["query"].numel() else npu_fusion_attention)(**given)

        return local


def head_dim(letters: str) -> int:
    """The dim of the heads, or of heads times features."""
    return letters.index("N" if "N" in letters else "H")


def head_counts(call: Call, letters: str) -> tuple[int, int]:
    """Heads of query, and of key and value."""
    d, heads = head_dim(letters), int(call.arg("head_num"))
    query, key = call.spec("query").shape[d], call.spec("key").shape[d]
    return heads, key if "N" in letters else key * heads // query
