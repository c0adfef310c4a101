"""``npu_fusion_attention``: samples, heads and queries sharded, with the number of heads of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import gt
from typing import Any

from hyper_parallel.call import Call
from hyper_parallel.layout import Layout
from hyper_parallel.op import OpSummary
from hyper_parallel.placements import Placement
from hyper_parallel.strategy import R, S
from hyper_parallel_ops_basic.kernel_attention import Arguments, Change, Form, KernelAttention, end_of_keys

from .reference import npu_fusion_attention

__all__ = ["FusionAttention"]

_LOWER_RIGHT = 3  # sparse_mode in which the last query sees the last key, and nobody sees further than its place


class FusionAttention(KernelAttention):
    """``npu_fusion_attention`` with any ``input_layout``.

    With dropout only whole tensors: the kernel draws on its own, and not what one device would draw.
    """

    summary = OpSummary(
        "samples with their masks, heads (grouped ones too; key and value heads alike, or whole), queries with their "
        "rows of the masks, queries and packed tokens that see all keys or those up to their own place (sparse_mode 3)",
        communicates=(
            "keys sharded like the queries: an all-gather of keys and one of values | 2 reduce-scatters; else none"
        ),
        whole="features; keys of whole queries; queries of other causal modes and bands, which the kernel counts from "
        "the first or last of all; samples with sequence lengths; everything with dropout, which the kernel draws on "
        "its own",
    )

    signature = (
        "query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0, "
        "keep_prob=1.0, pre_tockens=2147483647, next_tockens=2147483647, inner_precise=0, prefix=None, "
        "actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False, "
        "softmax_layout=, sink=None"
    )
    floats_matter = True  # whether there is dropout

    def form(self, call: Call) -> Form | None:
        if call.arg("keep_prob", 1.0) < 1:
            return None
        letters, count = call.arg("input_layout"), int(call.arg("head_num"))
        query, key = call.spec("query").shape, call.spec("key").shape
        fused = "N" not in letters
        heads = letters.index("H" if fused else "N") - len(letters)
        whole_batch = "B" not in letters or call.arg("actual_seq_qlen") is not None or call.arg("prefix") is not None
        return Form(
            "query",
            ("key", "value"),
            batch=None if whole_batch else letters.index("B"),
            rows=_row_dim(letters) if self._may_be_cut(call) else None,
            heads=heads,
            counts=(count, key[heads] * count // query[heads] if fused else key[heads]),
            fused=fused,
        )

    @staticmethod
    def _may_be_cut(call: Call) -> bool:
        """Whether a part of the queries can do with its rows of the masks, or with the keys up to some place."""
        letters, mode = call.arg("input_layout"), call.arg("sparse_mode", 0)
        packed, masks = "T" in letters, [call.arg(name) is not None for name in ("pse", "atten_mask")]
        lengths = [call.arg(name) is not None for name in ("actual_seq_qlen", "actual_seq_kvlen")]
        if any(call.arg(name) is not None for name in ("prefix", "padding_mask")) or any(lengths) != packed:
            return False
        counts = [call.spec(name).shape[_row_dim(letters)] for name in ("query", "key")]
        if mode == _LOWER_RIGHT:  # the mask that the kernel wants then is the same for all
            return not masks[0] and not _some_see_nothing(call, counts)
        longest = max(counts)
        bands = [call.arg(name, longest) for name in ("pre_tockens", "next_tockens")]
        return (mode == 1 or (mode == 0 and min(bands) >= longest)) and not (packed and any(masks))

    def beside(self, call: Call, part: str) -> dict[str, Placement]:
        """Masks ``[batch, heads, queries, keys]`` follow where they are not broadcast; those of queries and keys alone
        have no batch nor heads."""
        found = {name: call.index(name) for name in ("pse", "atten_mask")}
        shapes = {name: call.inputs[i].shape for name, i in found.items() if i is not None}
        if part == "rows":
            queries = call.spec("query").shape[_row_dim(call.arg("input_layout"))]
            own = call.arg("sparse_mode", 0) != _LOWER_RIGHT
            return {name: S(len(shape) - 2) for name, shape in shapes.items() if own and shape[-2] == queries != 1}
        d = ("batch", "heads").index(part)
        masks: dict[str, Placement] = {n: S(d) for n, shape in shapes.items() if len(shape) == 4 and shape[d] != 1}
        return masks | ({"sink": S(0)} if part == "heads" and call.index("sink") is not None else {})

    def num_outputs(self, call: Call) -> int:
        return 4

    def outputs(self, call: Call, part: str) -> Sequence[Placement]:
        letters = call.arg("input_layout")
        letter = {"batch": "B", "rows": letters[_row_dim(letters)], "heads": "N" if "N" in letters else "H"}[part]
        statistics = ("rows", "heads") if "T" in letters else ("batch", "heads", "rows")
        of_them = S(statistics.index(part))
        return [S(letters.index(letter)), of_them, of_them, R]

    def localised(self, call: Call) -> Callable[[Arguments, int, int], None]:
        letters, looks_back = call.arg("input_layout"), call.arg("sparse_mode", 0) == _LOWER_RIGHT
        d = _row_dim(letters)
        ahead = call.spec("key").shape[d] - call.spec("query").shape[d]  # the last query sees the last key

        def cut(given: Arguments, start: int, stop: int) -> None:
            end = stop + ahead
            if "T" in letters:  # sequences outside of these tokens become empty
                rows, columns = given["actual_seq_qlen"], given["actual_seq_kvlen"]
                end = end_of_keys([0, *rows], [0, *columns], stop)
                given["actual_seq_qlen"] = [min(max(n, start), stop) - start for n in rows]
                given["actual_seq_kvlen"] = [min(n, end) for n in columns] if looks_back else columns
            for name in ("key", "value") if looks_back else ():
                given[name] = given[name].narrow(d, 0, max(end, 0))

        return cut

    def changes(self, call: Call, form: Form, targets: Sequence[Layout]) -> list[Change]:
        assert form.heads is not None
        heads, whole = form.heads, call.spec("query").shape[form.heads]

        def count_heads(given: Arguments) -> None:
            given["head_num"] = form.counts[0] * given["query"].shape[heads] // whole

        return [*super().changes(call, form, targets), count_heads]

    def nothing(self, call: Call, given: Arguments) -> Any:
        return npu_fusion_attention(**given)  # the definition


def _some_see_nothing(call: Call, counts: Sequence[int]) -> bool:
    """Whether a sequence has more queries than keys: the first of them get the mean of all its values."""
    ends = [call.arg(name) or [n] for name, n in zip(("actual_seq_qlen", "actual_seq_kvlen"), counts, strict=True)]
    queries, keys = ([b - a for a, b in pairwise([0, *n])] for n in ends)
    return any(map(gt, queries, keys))


def _row_dim(letters: str) -> int:
    """The dim of the queries, or of the tokens of all sequences."""
    return letters.index("T" if "T" in letters else "S")
