"""What windows that slide along a sharded dim read of the neighbours' elements: the halo."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hyper_parallel import Layout
from hyper_parallel.rules import NOTHING, ExchangePlan, dim_intervals, indices_of

__all__ = ["Window"]


@dataclass(frozen=True)
class Window:
    """A kernel, or a pool, along one dim.

    Attributes:
        kernel: number of elements that it reads.
        stride: how far one window is from the next.
        dilation: how far one element of a window is from the next.
        pads: number of positions before the first element and behind the last one.
        ceil: whether a last window may reach beyond the padding.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    pads: tuple[int, int] = (0, 0)
    ceil: bool = False

    @property
    def reach(self) -> int:
        """From the first element of a window to the last one."""
        return self.dilation * (self.kernel - 1) + 1

    def count(self, size: int) -> int:
        """Number of windows over ``size`` elements."""
        steps = (size + sum(self.pads) - self.reach) / self.stride
        count = (math.ceil if self.ceil else math.floor)(steps) + 1
        starts_outside = self.ceil and (count - 1) * self.stride >= size + self.pads[0]
        return count - 1 if starts_outside else count

    def without_padding(self) -> Window:
        """For elements that have it already."""
        return Window(self.kernel, self.stride, self.dilation)

    def under(self, start: int, stop: int, size: int) -> torch.Tensor:
        """The positions, of ``size``, from the first one of window ``start`` to the last one of window ``stop - 1``;
        ``NOTHING`` in the padding."""
        read = torch.arange(start * self.stride, (stop - 1) * self.stride + self.reach) - self.pads[0]
        return torch.where((read >= 0) & (read < size), read, NOTHING)

    def starts(self, output: Layout, size: int, dim: int) -> torch.Tensor:
        """The first position, in the tensor of ``size``, of each window of this rank; negative in the padding."""
        held = dim_intervals(output, self._sizes(output, size, dim), dim, output.info.my_coordinate())
        return indices_of(held) * self.stride - self.pads[0]

    def halo(self, layout: Layout, output: Layout, size: int, dim: int, fill: float = 0) -> ExchangePlan:
        """From the elements that each rank holds to those under its windows, padding included.

        Args:
            layout: of the tensor.
            output: of the result, whose ``dim`` is sharded by the same axes, plainly.
            size: of the tensor's ``dim``.
            fill: value of the padding.
        """

        def wanted(coordinate: tuple[int, ...]) -> torch.Tensor:
            windows = dim_intervals(output, self._sizes(output, size, dim), dim, coordinate)
            return self.under(*windows[0], size) if windows else torch.arange(0)

        return ExchangePlan.along(layout, size, dim, wanted, fill)

    def _sizes(self, output: Layout, size: int, dim: int) -> tuple[int, ...]:
        return tuple(self.count(size) if d == dim else 1 for d in range(output.ndim))
