"""``npu_fusion_attention``: samples, heads and queries sharded, with the number of heads of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel import Layout, Placement
from hyper_parallel.rules import Call, OpSummary, R, S
from hyper_parallel_ops_basic.attention.kernel_attention import Arguments, AttentionForm, Change, KernelAttention
from hyper_parallel_ops_deepseek.attention_band import Band, row_dim
from hyper_parallel_ops_deepseek.reference import npu_fusion_attention

__all__ = ["FusionAttention"]


class FusionAttention(KernelAttention):
    """``npu_fusion_attention`` with any ``input_layout``.

    With dropout only whole tensors: the kernel draws on its own, and not what one device would draw.
    """

    summary = OpSummary(
        "samples with their masks, heads (grouped ones too; key and value heads alike, or whole), queries with their "
        "rows of the masks (sparse_mode 0 and 1) or the keys up to the last that they see (2 to 4), tokens of packed "
        "sequences that see all keys or none behind their own place",
        communicates=(
            "keys sharded like the queries: an all-gather of keys and one of values | 2 reduce-scatters; else none"
        ),
        whole="features; keys of whole queries; queries where some see no key under sparse_mode 3 or 4 (they get the "
        "mean of all values), with a compressed pse (which has the last rows only), with prefixes or padding_mask; "
        "packed tokens with pse or with a mask of sparse_mode 0 or 1 (whose rows are counted in each sequence), under "
        "sparse_mode 2 with not as many keys as queries, or under a band that looks ahead (sequences that are cut and "
        "others would need different bands); samples with sequence lengths or prefixes; everything with dropout, which "
        "the kernel draws on its own",
    )

    signature = (
        "query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0, "
        "keep_prob=1.0, pre_tockens=2147483647, next_tockens=2147483647, inner_precise=0, prefix=None, "
        "actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False, "
        "softmax_layout=, sink=None"
    )
    floats_matter = True  # whether there is dropout

    def form(self, call: Call) -> AttentionForm | None:
        if call.arg("keep_prob", 1.0) < 1:
            return None
        letters, count = call.arg("input_layout"), int(call.arg("head_num"))
        query, key = call.spec("query").shape, call.spec("key").shape
        fused = "N" not in letters
        heads = letters.index("H" if fused else "N") - len(letters)
        whole_batch = "B" not in letters or call.arg("actual_seq_qlen") is not None or call.arg("prefix") is not None
        return AttentionForm(
            "query",
            ("key", "value"),
            batch=None if whole_batch else letters.index("B"),
            rows=row_dim(letters) if self._may_be_cut(call) else None,
            heads=heads,
            counts=(count, key[heads] * count // query[heads] if fused else key[heads]),
            fused=fused,
        )

    @staticmethod
    def _may_be_cut(call: Call) -> bool:
        """Whether a part of the queries can do with its rows of the masks, or with a band of its own."""
        letters, lengths = call.arg("input_layout"), [call.arg(f"actual_seq_{name}len") for name in ("q", "kv")]
        packed, band = "T" in letters, Band.of(call)
        if any(call.arg(name) is not None for name in ("prefix", "padding_mask")):
            return False
        if any((given is not None) != packed for given in lengths):
            return False
        bias = None if call.index("pse") is None else call.spec("pse").shape[-2]
        if packed:
            return bias is None and band.fits_sequences(masked=call.arg("atten_mask") is not None)
        # A compressed pse has the last rows of all.
        return bias in (None, 1, *band.queries) and band.fits_samples()

    def beside(self, call: Call, part: str) -> dict[str, Placement]:
        """Masks ``[batch, heads, queries, keys]`` follow where they are not broadcast; those of queries and keys alone
        have no batch nor heads."""
        found = {name: call.index(name) for name in ("pse", "atten_mask")}
        shapes = {name: call.inputs[i].shape for name, i in found.items() if i is not None}
        if part == "rows":
            queries = call.spec("query").shape[row_dim(call.arg("input_layout"))]
            if Band.of(call).by_place:
                shapes.pop("atten_mask", None)  # the mask that the kernel wants then is the same for all
            return {name: S(len(shape) - 2) for name, shape in shapes.items() if shape[-2] == queries != 1}
        d = ("batch", "heads").index(part)
        masks: dict[str, Placement] = {n: S(d) for n, shape in shapes.items() if len(shape) == 4 and shape[d] != 1}
        return masks | ({"sink": S(0)} if part == "heads" and call.index("sink") is not None else {})

    def num_outputs(self, call: Call) -> int:
        return 4

    def outputs(self, call: Call, part: str) -> Sequence[Placement]:
        letters = call.arg("input_layout")
        letter = {"batch": "B", "rows": letters[row_dim(letters)], "heads": "N" if "N" in letters else "H"}[part]
        statistics = ("rows", "heads") if "T" in letters else ("batch", "heads", "rows")
        of_them = S(statistics.index(part))
        return [S(letters.index(letter)), of_them, of_them, R]

    def localised(self, call: Call) -> Callable[[Arguments, int, int], None]:
        letters, band = call.arg("input_layout"), Band.of(call)
        d = row_dim(letters)

        def cut(given: Arguments, start: int, stop: int) -> None:
            end = (band.cut_sequences if "T" in letters else band.cut_samples)(given, start, stop)
            for name in ("key", "value") if band.by_place else ():
                given[name] = given[name].narrow(d, 0, end)
            if band.by_place and given.get("pse") is not None:
                given["pse"] = given["pse"][..., :end]

        return cut

    def changes(self, call: Call, form: AttentionForm, targets: Sequence[Layout]) -> list[Change]:
        assert form.heads is not None
        heads, whole = form.heads, call.spec("query").shape[form.heads]

        def count_heads(given: Arguments) -> None:
            given["head_num"] = form.counts[0] * given["query"].shape[heads] // whole

        return [*super().changes(call, form, targets), count_heads]

    def nothing(self, call: Call, given: Arguments) -> Any:
        return npu_fusion_attention(**given)  # the definition
