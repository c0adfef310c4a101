"""Which keys the queries of ``npu_fusion_attention`` see by their place, and how a part of the queries says it.

``sparse_mode`` counts the places from the first query and key, or from the last, of those that the kernel is given. A
part of the queries therefore counts from its last one, with the keys that end where that one sees no further.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from hyper_parallel.rules import Call
from hyper_parallel_ops_basic.attention.kernel_attention import Arguments, end_of_keys
from hyper_parallel_ops_deepseek.reference import left_out

__all__ = ["Band", "row_dim"]

DEFAULT, AS_IT_IS, UPPER_LEFT, LOWER_RIGHT, BAND = range(5)
"""The values of ``sparse_mode``: a mask and a band from the upper left, a mask, causal, causal, a band."""
NO_LIMIT = 2147483647


@dataclass(frozen=True)
class Band:
    """The keys from ``before`` tokens before a query's own place to ``after`` tokens behind it.

    Attributes:
        mode: the ``sparse_mode`` in effect.
        before, after: may be negative.
        queries, keys: how many there are, of each sequence; all samples have the same.
    """

    mode: int
    before: int
    after: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @classmethod
    def of(cls, call: Call) -> Band:
        """That of a call of ``npu_fusion_attention``."""
        d = row_dim(call.arg("input_layout"))
        queries, keys = (
            tuple(b - a for a, b in pairwise([0, *(call.arg(ends) or [call.spec(name).shape[d]])]))
            for name, ends in (("query", "actual_seq_qlen"), ("key", "actual_seq_kvlen"))
        )
        mode, before, after = (
            call.arg(name, default)
            for name, default in (("sparse_mode", DEFAULT), ("pre_tockens", NO_LIMIT), ("next_tockens", NO_LIMIT))
        )
        if call.arg("atten_mask") is None or (mode == DEFAULT and min(before, after) >= max(*queries, *keys)):
            mode = AS_IT_IS
        elif mode == UPPER_LEFT and queries == keys:
            mode = LOWER_RIGHT
        if mode in (UPPER_LEFT, LOWER_RIGHT):
            before, after = NO_LIMIT, 0
        return cls(mode, before, after, queries, keys)

    @property
    def by_place(self) -> bool:
        """Whether the places alone say what is seen, and the mask is the kernel's pattern for all of them."""
        return self.mode not in (DEFAULT, AS_IT_IS)

    def some_see_nothing(self) -> bool:
        """Whether places leave a query without keys: it gets the mean of all values, and so needs them all."""
        if self.mode not in (LOWER_RIGHT, BAND):
            return False
        ahead = min(k - q for q, k in zip(self.queries, self.keys, strict=True))
        return self.before < max(0, -self.after) or ahead + self.after < 0

    # -- samples ------------------------------------------------------------------------------------------------------

    def fits_samples(self) -> bool:
        """Whether queries of samples may be cut."""
        return self.mode <= BAND and not self.some_see_nothing()

    def cut_samples(self, given: Arguments, start: int, stop: int) -> int:
        """Makes of a call's arguments those of queries ``start`` to ``stop``; returns where the keys of these end."""
        (queries,), (keys,) = self.queries, self.keys
        if self.mode == DEFAULT:
            given.update(self._counted_from(start, stop - start, keys, given["atten_mask"]))
        if not self.by_place:
            return keys
        own = stop + (0 if self.mode == UPPER_LEFT else keys - queries)  # behind the place of the last query
        end = min(max(own + self.after, 0), keys)
        before, after = self.before - (own - end), self.after + (own - end)
        if self.mode == BAND or after:
            given.update(sparse_mode=BAND, pre_tockens=min(before, NO_LIMIT), next_tockens=min(after, NO_LIMIT))
        else:
            given["sparse_mode"] = LOWER_RIGHT
        return end

    def _counted_from(self, start: int, rows: int, keys: int, mask: torch.Tensor) -> Arguments:
        """The band counted from query ``start``, as part of the mask where it begins behind that query's place: how far
        behind is limited by what the kernel takes."""
        before, after = self.before - start, min(self.after + start, NO_LIMIT)
        if before >= 0:
            return {"pre_tockens": before, "next_tockens": after}
        whole = left_out(rows, keys, mask, (before, after), DEFAULT, mask.device)
        return {"atten_mask": whole, "sparse_mode": AS_IT_IS}

    # -- packed sequences ---------------------------------------------------------------------------------------------

    def fits_sequences(self, masked: bool) -> bool:
        """Whether packed tokens may be cut: the last sequence of a part loses queries and as many keys."""
        if min(*self.queries, *self.keys) < 0:  # an end of 0 behind others: a sequence that takes no part
            return False
        if not self.by_place:
            return not masked
        return self.mode in (LOWER_RIGHT, BAND) and self.after == 0 and not self.some_see_nothing()

    def cut_sequences(self, given: Arguments, start: int, stop: int) -> int:
        """:meth:`cut_samples` for tokens; sequences outside of these become empty."""
        rows, columns = given["actual_seq_qlen"], given["actual_seq_kvlen"]
        given["actual_seq_qlen"] = [min(max(n, start), stop) - start for n in rows]
        if not self.by_place:
            return columns[-1]
        end = end_of_keys([0, *rows], [0, *columns], stop)
        given.update(actual_seq_kvlen=[min(n, end) for n in columns], sparse_mode=self.mode)
        return end


def row_dim(letters: str) -> int:
    """The dim of the queries, or of the tokens of all sequences."""
    return letters.index("T" if "T" in letters else "S")
