"""Pictures of a layout: which rank holds which block of a tensor. Nothing here communicates.

    print(visualize(x))        # text, in a terminal
    visualize(x)               # an SVG, as the last line of a notebook cell
    visualize(layout, (8, 6))  # a layout that no tensor has yet

Every dimension is cut wherever some rank's piece begins or ends, so uneven, empty and packed pieces show as they are.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import Partial, is_partial, is_replicate, short
from hyper_parallel.sharding.shard_ranges import Box, box, length
from hyper_parallel.tensor.dtensor import DTensor

__all__ = ["LayoutPicture", "visualize"]

MAX_WIDTH = 100
"""Columns that a text picture may take; beyond it the table of blocks is shown instead."""

_COLOURS = 12


def visualize(tensor: DTensor | Layout, shape: Sequence[int] | None = None) -> LayoutPicture:
    """Show which rank holds which block.

    Args:
        tensor: a DTensor, or a Layout together with ``shape``. The process group is not needed for a Layout that was
            made from a mesh's shape and names.
        shape: global shape, for a Layout only.

    Returns:
        A picture: ``str()`` of it is text, a notebook shows it as SVG.

    Raises:
        TypeError: for anything else, or a shape where none belongs.
        ValueError: when the layout is for another number of dimensions.
    """
    if isinstance(tensor, DTensor):
        if shape is not None:
            raise TypeError("visualize takes shape= together with a Layout only; a DTensor has its own")
        return LayoutPicture(tensor.layout, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if not isinstance(tensor, Layout):
        raise TypeError(f"visualize takes a DTensor, or a Layout and a shape; got {type(tensor).__name__}")
    if shape is None:
        raise TypeError("visualize of a Layout needs the global shape: visualize(layout, (8, 6))")
    if tensor.ndim != len(shape):
        raise ValueError(f"{tensor} is for a tensor of {max(tensor.ndim, 0)} dimensions, the shape is {tuple(shape)}")
    return LayoutPicture(tensor, tuple(shape), "tensor")


@dataclass(frozen=True)
class _Cell:
    """A block of the picture's two dimensions, and the ranks that hold it."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    ranks: tuple[int, ...]


class LayoutPicture:
    """What :func:`visualize` returns.

    Attributes:
        layout: the layout shown.
        shape: the global shape.
        blocks: per rank, the global indices it holds: one list of intervals per dimension.
    """

    def __init__(self, layout: Layout, shape: tuple[int, ...], what: str) -> None:
        self.layout, self.shape, self._what = layout, shape, what
        coordinates = itertools.product(*(range(size) for size in layout.mesh_shape))
        self.blocks: dict[int, Box] = {
            rank: box(layout, shape, coordinate) for rank, coordinate in zip(layout.ranks, coordinates, strict=True)
        }
        self._sharded = [d for d, axes in enumerate(layout.shard_order) if axes]
        self._rows, self._columns = self._picture_dims()

    # -- text -----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        grid = self._text_grid() if self._is_drawable() else None
        return "\n".join([self._title(), *self._notes(), "", *(self._table() if grid is None else grid)])

    __repr__ = __str__

    def _title(self) -> str:
        mesh = " x ".join(f"{n}={s}" for n, s in zip(self.layout.mesh_dim_names, self.layout.mesh_shape, strict=True))
        return f"{self._what}{list(self.shape)} on {mesh}"

    def _notes(self) -> list[str]:
        """One line per mesh axis, and what a picture cannot show."""
        lines = []
        for name, placement in zip(self.layout.mesh_dim_names, self.layout.placements, strict=True):
            if isinstance(placement, Partial):
                lines.append(f"  {name}: {short(placement)}, ranks hold terms of a pending {placement.reduce_op}")
            elif is_replicate(placement):
                lines.append(f"  {name}: R, ranks hold copies")
            else:
                lines.append(f"  {name}: {short(placement)}, ranks hold slices of dim {placement.dim}")  # type: ignore[attr-defined]
        for dim, axes in enumerate(self.layout.shard_order):
            if len(axes) > 1:
                names = ", then ".join(self.layout.mesh_dim_names[a] for a in axes)
                lines.append(f"  dim {dim} is cut by {names}")
        if empty := [rank for rank, held in self.blocks.items() if not all(map(length, held))]:
            lines.append(f"  nothing on rank {_listed(empty)}")
        return lines

    def _text_grid(self) -> list[str] | None:
        """Boxes; None when they would be too wide."""
        rows, columns = self._cuts(self._rows), self._cuts(self._columns)
        cells = {(c.rows, c.columns): _listed(c.ranks) for c in self._cells()}
        spans = list(itertools.pairwise(columns))
        widths = [max(len(cells[r, s]) for r in itertools.pairwise(rows)) + 2 for s in spans]
        widths = [max(w, len(str(s[0])) + 1) for w, s in zip(widths, spans, strict=True)]
        margin = len(f"dim {self._rows} ") + len(str(rows[-1])) + 1 if self._rows is not None else 2
        if margin + sum(widths) + len(widths) + 2 > MAX_WIDTH:
            return None
        line = "+".join(["", *("-" * w for w in widths), ""])
        lines = []
        if self._columns is not None:
            marks = "".join(f"{s[0]:<{w + 1}}" for w, s in zip(widths, spans, strict=True)) + str(columns[-1])
            lines = [f"{'':{margin}}dim {self._columns}", f"{'':{margin}}{marks}"]
        label = "" if self._rows is None else f"dim {self._rows}"
        for start, stop in itertools.pairwise(rows):
            lines.append(
                f"{label if not start else '':<{margin - len(str(rows[-1])) - 1}}{self._mark(start, rows)} {line}"
            )
            texts = [f" {cells[(start, stop), s]:<{w - 1}}" for w, s in zip(widths, spans, strict=True)]
            lines.append(f"{'':{margin}}|{'|'.join(texts)}|")
        lines.append(f"{'':{margin - len(str(rows[-1])) - 1}}{self._mark(rows[-1], rows)} {line}")
        return lines

    def _mark(self, position: int, rows: Sequence[int]) -> str:
        return f"{position if self._rows is not None else '':>{len(str(rows[-1]))}}"

    def _table(self) -> list[str]:
        header = ("RANK", *(f"DIM {d}" for d in range(len(self.shape))), "LOCAL SHAPE")
        rows = [header]
        for rank, held in self.blocks.items():
            ranges = [",".join(f"{a}:{b}" for a, b in intervals) or "-" for intervals in held]
            rows.append((str(rank), *ranges, str(list(map(length, held)))))
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]

    # -- notebook -------------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{html.escape(note.strip())}</li>" for note in self._notes())
        if not self._is_drawable():
            body = f"<pre>{html.escape(chr(10).join(self._table()))}</pre>"
        else:
            body = self.svg()
        return f"<div><b>{html.escape(self._title())}</b><ul>{notes}</ul>{body}</div>"

    def svg(self, width: int = 420, height: int = 260) -> str:
        """The picture as SVG, blocks in proportion to their sizes; ``width`` and ``height`` in pixels.

        Raises:
            ValueError: when more than two dimensions are sharded, or there is no element to show.
        """
        if not self._is_drawable():
            why = "it has no elements" if 0 in self.shape else f"dims {self._sharded} are sharded, a picture has two"
            raise ValueError(f"no picture of {self._title()}: {why}; str() gives the table of blocks")
        left, top = 56, 34
        rows, columns = self._cuts(self._rows), self._cuts(self._columns)
        if self._rows is None:
            height = 56
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 24}" height="{top + height + 20}" '
            'font-family="sans-serif" font-size="12">'
        ]
        if any(map(is_partial, self.layout.placements)):
            parts.append(_HATCH)

        def x(column: int) -> float:
            return left + width * column / max(columns[-1], 1)

        def y(row: int) -> float:
            return top + height * row / max(rows[-1], 1)

        for cell in self._cells():
            x0, x1, y0, y1 = x(cell.columns[0]), x(cell.columns[1]), y(cell.rows[0]), y(cell.rows[1])
            where = ", ".join(
                f"dim {dim} {span[0]}:{span[1]}"
                for dim, span in ((self._rows, cell.rows), (self._columns, cell.columns))
                if dim is not None
            )
            rect = f'x="{x0:.1f}" y="{y0:.1f}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}" stroke="#555"'
            parts.append(f"<g><title>rank {_listed(cell.ranks)}: {where or 'everything'}</title>")
            parts.append(f'<rect {rect} fill="{_colour(cell.ranks)}"/>')
            if any(map(is_partial, self.layout.placements)):
                parts.append(f'<rect {rect} fill="url(#pending)"/>')
            middle = f'x="{(x0 + x1) / 2:.1f}" y="{(y0 + y1) / 2:.1f}" text-anchor="middle" dominant-baseline="middle"'
            parts.append(f"<text {middle}>{_listed(cell.ranks)}</text></g>")
        if self._columns is not None:
            parts += [f'<text x="{x(c):.1f}" y="{top - 6}" text-anchor="middle">{c}</text>' for c in columns]
            parts.append(f'<text x="{left}" y="{top - 20}">dim {self._columns}</text>')
        if self._rows is not None:
            parts += [f'<text x="{left - 6}" y="{y(r) + 4:.1f}" text-anchor="end">{r}</text>' for r in rows]
            parts.append(f'<text x="4" y="{top + height + 16}">dim {self._rows}</text>')
        return "".join([*parts, "</svg>"])

    # -- geometry -------------------------------------------------------------------------------------------------

    def _is_drawable(self) -> bool:
        """Whether two dimensions are enough for a picture, and there is something in it."""
        return len(self._sharded) <= 2 and 0 not in self.shape

    def _picture_dims(self) -> tuple[int | None, int | None]:
        """The dims drawn downwards and across: all that are sharded, and the last ones to fill up."""
        whole = [d for d in reversed(range(len(self.shape))) if d not in self._sharded]
        chosen = sorted([*self._sharded, *whole][:2])
        if len(chosen) == 2:
            return chosen[0], chosen[1]
        return None, chosen[0] if chosen else None

    def _cuts(self, dim: int | None) -> list[int]:
        """Where a piece begins or ends along a dim."""
        if dim is None:
            return [0, 1]
        ends = {0, self.shape[dim]}
        for held in self.blocks.values():
            ends.update(itertools.chain.from_iterable(held[dim]))
        return sorted(ends)

    def _cells(self) -> Iterable[_Cell]:
        for rows in itertools.pairwise(self._cuts(self._rows)):
            for columns in itertools.pairwise(self._cuts(self._columns)):
                ranks = tuple(
                    rank
                    for rank, held in self.blocks.items()
                    if _holds(held, self._rows, rows) and _holds(held, self._columns, columns)
                )
                yield _Cell(rows, columns, ranks)


def _holds(held: Box, dim: int | None, span: tuple[int, int]) -> bool:
    return dim is None or any(start <= span[0] and span[1] <= stop for start, stop in held[dim])


def _listed(ranks: Sequence[int]) -> str:
    """``0-3,6``: runs of ranks in short."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}-{b}" for a, b in runs)


def _colour(ranks: Sequence[int]) -> str:
    hue = (min(ranks, default=0) * 360 * 5 // _COLOURS) % 360
    return f"hsl({hue},60%,{82 if ranks else 97}%)"


_HATCH = (
    '<defs><pattern id="pending" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line x1="0" y1="0" x2="0" y2="8" stroke="#777" stroke-width="1"/></pattern></defs>'
)
