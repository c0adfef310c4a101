"""Where the shards of a tensor are after a reshape by global sizes.

A reshape splits dims into factors and joins factors to dims: ``(6, 4) -> (2, 12)`` is ``(6, 4) -> (2, 3, 4) ->
(2, 12)``. A mesh axis that cuts a dim cuts its outermost factor, or, when the axes before it have left one row of that
to each rank, the next one. A cut of the outermost factor of a dim is a plain shard of the dim, and a cut of an inner
one cuts every section that the factors outside it make: a :class:`PackedShard`. Cuts are at the same places before and
after only where the chunks are the same, which decides about uneven sizes too.

Dims of size 1 are factors of nothing: a shard of one goes to another, and where there is none the rank that holds the
elements has the value of a pending sum, to which the others add nothing.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import PackedShard, Partial, Placement, Replicate, Shard


@dataclass(frozen=True)
class Cut:
    """One mesh axis along one dim, or along a factor of it.

    Attributes:
        axis: the mesh axis.
        parts: number of ranks along it.
        sections: lengths of the sections that are cut each on its own, when they are packed.
    """

    axis: int
    parts: int
    sections: tuple[int, ...] | None = None

    def of(self, lengths: set[int], inner: set[int]) -> set[int] | None:
        """Lengths of the pieces of rows of which a rank may have any of ``lengths``.

        None where the pieces are others once each row is seen as some of ``inner`` elements.
        """
        counted = Counter(lengths if self.sections is None else self.sections)
        for n in counted:
            if any(-(-n * each // self.parts) != -(-n // self.parts) * each for each in inner):
                return None
        if self.sections is None:
            return {c for n in lengths for c in _chunks(n, self.parts)}
        pieces = ([count * c for c in _chunks(n, self.parts)] for n, count in counted.items())
        return set(map(sum, zip(*pieces, strict=True)))


def _chunks(size: int, parts: int) -> list[int]:
    """Sizes of the pieces of ``torch.chunk``, empty ones included."""
    step = -(-size // parts)
    return [max(min(step, size - i * step), 0) for i in range(parts)]


Cuts = list[Cut]
"""The mesh axes that cut one dim or factor, outermost first."""


def _inner(lengths: Sequence[set[int]]) -> set[int]:
    """How many elements a rank may hold of one row, when it holds any of ``lengths`` of each factor inside."""
    return {math.prod(some) for some in itertools.product(*lengths)}


def split_cuts(cuts: Cuts, factors: Sequence[int]) -> list[Cuts] | None:
    """Those of each factor of a dim; None where the pieces end between the rows of a factor."""
    lengths = [{n} for n in factors]
    found: list[Cuts] = [[] for _ in factors]
    for cut in cuts:
        if cut.sections is None:
            at = 0
            while at < len(factors) - 1 and lengths[at] <= {0, 1}:
                at += 1
            if cut.parts == 1:  # an axis of one rank cuts nothing, so it stays beside the one before
                at = max((index for index, own in enumerate(found) if own), default=0)
        else:
            at = _factor_of_sections(cut.sections, factors)
            row = math.prod(factors[1:])
            if at == 0 and any(n % row for n in cut.sections):
                return None
            # Sections of a row's elements, or, from an inner factor, rows themselves.
            cut = replace(cut, sections=tuple(n // row for n in cut.sections) if at == 0 else None)
        pieces = cut.of(lengths[at], _inner(lengths[at + 1 :]))
        if pieces is None:
            return None
        lengths[at] = pieces
        found[at].append(cut)
    return found


def _factor_of_sections(sections: tuple[int, ...], factors: Sequence[int]) -> int:
    """The factor that is one section, when all before it together number the sections; else the outermost one."""
    if len(set(sections)) == 1:
        rows = list(itertools.accumulate(factors[:-1], operator.mul))
        if len(sections) in rows:
            return rows.index(len(sections)) + 1
    return 0


def join_cuts(cuts: Sequence[Cuts], factors: Sequence[int]) -> Cuts | None:
    """Those of the dim that the factors make together; None where no placement has its pieces."""
    lengths = [{n} for n in factors]
    plain: list[tuple[int, Cut]] = []
    packed: Cuts = []
    alone = True  # whether each rank has one row of all factors outside, so that a cut goes on where theirs ended
    for at, own in enumerate(cuts):
        row = math.prod(factors[at + 1 :])
        if own and (not alone or own[0].sections is not None):
            if (len(own) > 1 and not alone) or any(cuts[at + 1 :]):
                return None
            rows = math.prod(factors[:at])
            sections = own[0].sections or (factors[at],)
            pieces = own[0].of(lengths[at], {row})
            if pieces is None:
                return None
            lengths[at] = pieces
            packed = [replace(own[0], sections=tuple(n * row for n in sections) * rows)]
            own = own[1:]
        plain += [(at, cut) for cut in own]
        left = {factors[at]}
        for cut in own:
            left = {c for n in left for c in _chunks(n, cut.parts)}
        alone = alone and left <= {0, 1}
    for at, cut in plain:
        pieces = cut.of(lengths[at], _inner(lengths[at + 1 :]))
        if pieces is None:
            return None
        lengths[at] = pieces
    return packed + [cut for _, cut in plain]


def regrouped(cuts: Sequence[Cuts], old: Sequence[int], new: Sequence[int]) -> list[Cuts] | None:
    """Those of the dims ``new``, which hold the elements of the dims ``old``; None where they do not fit. No size is
    1."""
    if len(old) == len(new) == 1:
        return list(cuts)
    factors = _common_factors(old, new, cuts) or _common_factors(old, new, ())
    if factors is None:  # (6, 4) -> (4, 6): by the flat dim
        flat = join_cuts(cuts, old)
        return None if flat is None else split_cuts(flat, new)
    split: list[Cuts] = []
    for own, parts in zip(cuts, _runs(factors, old), strict=True):
        found = split_cuts(own, parts)
        if found is None:
            return None
        split += found
    joined = []
    for parts in _runs(factors, new):
        dim = join_cuts(split[: len(parts)], parts)
        if dim is None:
            return None
        split = split[len(parts) :]
        joined.append(dim)
    return joined


def _common_factors(old: Sequence[int], new: Sequence[int], cuts: Sequence[Cuts]) -> list[int] | None:
    """Sizes of which both the old and the new dims are made, and the equal sections of packed ones; None when there are
    none."""
    bounds = {1, *itertools.accumulate(old, operator.mul), *itertools.accumulate(new, operator.mul)}
    for at, own in enumerate(cuts):
        if own and own[0].sections is not None and len(set(own[0].sections)) == 1:
            bounds.add(math.prod(old[:at]) * len(own[0].sections))
    pairs = list(itertools.pairwise(sorted(bounds)))
    return None if any(b % a for a, b in pairs) else [b // a for a, b in pairs]


def _runs(factors: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """The factors of each size."""
    rest = iter(factors)
    found = []
    for size in sizes:
        run = [next(rest)]
        while math.prod(run) < size:
            run.append(next(rest))
        found.append(run)
    return found


def dim_groups(old: Sequence[int], new: Sequence[int]) -> Iterable[tuple[slice, slice]]:
    """Smallest runs of old and new dims that hold the same elements: ``[2, 12] -> [2, 3, 4]`` is ``[0:1], [0:1]`` and
    ``[1:2], [1:3]``. No size is 0 or 1."""
    i = j = 0
    while i < len(old):
        a, b, left, right = i, j, old[i], new[j]
        while left != right:
            if left < right:
                i += 1
                left *= old[i]
            else:
                j += 1
                right *= new[j]
        i, j = i + 1, j + 1
        yield slice(a, i), slice(b, j)


def reshaped_layout(layout: Layout, old: tuple[int, ...], new: tuple[int, ...], lost: Partial) -> tuple[Layout, Layout]:
    """Output layout of a reshape, and the layout that its input must have (the same where the shards fit).

    Args:
        lost: what is pending on the axes that shard a dim of size 1, when the result has none.
    """
    if 0 in old:
        return _of_no_elements(layout, old, new), layout
    found: dict[int, Cuts] = {}
    drop: list[int] = []
    many_old, many_new = ([d for d, n in enumerate(sizes) if n != 1] for sizes in (old, new))
    for a, b in dim_groups([old[d] for d in many_old], [new[d] for d in many_new]):
        sources, results = many_old[a], many_new[b]
        if not any(layout.shard_order[d] for d in sources):
            continue
        placed = regrouped([_cuts(layout, d) for d in sources], [old[d] for d in sources], [new[d] for d in results])
        if placed is None:
            drop += [axis for d in sources for axis in layout.shard_order[d]]
        else:
            found.update(zip(results, placed, strict=True))
    if drop:
        target = layout.with_placements(dict.fromkeys(drop, Replicate()))
        return reshaped_layout(target, old, new, lost)[0], target
    placements: list[Placement] = list(layout.placements)
    ones = [d for d, n in enumerate(old) if n == 1 and layout.shard_order[d]]
    for d, result in zip(ones, _places_of_ones(ones, old, new), strict=True):
        if result is None:
            placements = [lost if a in layout.shard_order[d] else p for a, p in enumerate(placements)]
        else:
            found[result] = [replace(cut, sections=None) for cut in _cuts(layout, d)]
    order: list[tuple[int, ...]] = [()] * len(new)
    for d, cuts in found.items():
        order[d] = tuple(cut.axis for cut in cuts)
        for cut in cuts:
            placements[cut.axis] = Shard(d) if cut.sections is None else PackedShard(d, cut.sections)
    return layout.with_order(tuple(placements), tuple(order)), layout


def _cuts(layout: Layout, dim: int) -> Cuts:
    placed = ((a, layout.placements[a]) for a in layout.shard_order[dim])
    return [Cut(a, layout.mesh_shape[a], p.sections if isinstance(p, PackedShard) else None) for a, p in placed]


def _places_of_ones(dims: Sequence[int], old: Sequence[int], new: Sequence[int]) -> list[int | None]:
    """For each of these old dims of size 1 the nearest new one that is still free, as seen from the larger dims."""

    def before(sizes: Sequence[int], dim: int) -> int:
        return sum(n != 1 for n in sizes[:dim])

    free = [d for d, n in enumerate(new) if n == 1]
    found: list[int | None] = []
    for dim in dims:
        nearest = min(free, key=lambda d: (abs(before(new, d) - before(old, dim)), abs(d - dim)), default=None)
        found.append(nearest)
        if nearest is not None:
            free.remove(nearest)
    return found


def _of_no_elements(layout: Layout, old: Sequence[int], new: Sequence[int]) -> Layout:
    """Without elements every rank has all of them: what does not begin or end alike may be Replicate."""
    leading = _alike(old, new)
    trailing = min(_alike(old[::-1], new[::-1]), len(old) - leading, len(new) - leading)
    mapping = [
        d if d < leading else d + len(new) - len(old) if d >= len(old) - trailing else None for d in range(len(old))
    ]
    gone = {a: Replicate() for d, to in enumerate(mapping) if to is None for a in layout.shard_order[d]}
    return layout.with_placements(gone).move_dims(mapping, len(new))


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many elements two sequences have in common at their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
