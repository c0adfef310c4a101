"""Linear algebra and Fourier transforms: the matrix dims, or those transformed, are whole; others may be sharded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import (
    Call,
    OpSummary,
    S,
    WholeDims,
    broadcast_shape,
    normal_dim,
    shard_if_full,
    tensors_of,
    zeros_from,
)


class OfMatrices(StrategyOp):
    """A function of batches of matrices ``[..., n, m]``; the batch dims, broadcast together, may be sharded.

    Every element of an inverse or a factor depends on all elements of the matrix, so that a matrix that is sharded
    itself has to be redistributed.

    Args:
        outputs: number of outputs, all with the same batch dims.
        vector: whether a second argument with one dim less is a batch of vectors (``linalg.solve``).
        ranks: dims of each tensor argument beside the batch; those not named have 2.
    """

    summary = OpSummary(
        "batch dims",
        whole="the matrices: every element of the result depends on all of theirs",
    )

    def __init__(self, op_name: str, *, outputs: int = 1, vector: bool = False, ranks: Sequence[int] = ()) -> None:
        super().__init__(op_name)
        self.outputs, self.vector, self.ranks = outputs, vector, ranks

    def num_outputs(self, call: Call) -> int:
        return self.outputs

    def strategies(self, call: Call) -> Iterable[Strategy]:
        batches = self.batches(call)
        batch = broadcast_shape(batches)
        for d in range(len(batch)):
            yield Strategy([shard_if_full(b, d, batch) for b in batches], S(d))

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        if self.outputs > 1 or not any(axes for target in targets for axes in target.shard_order):
            return None
        func = call.func

        def local(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = func(*args, **kwargs)
            # Of no matrices some kernels give no gradient, which other ranks wait for.
            return out if out.numel() else zeros_from(out.shape, *tensors_of((args, kwargs)))

        return local

    def batches(self, call: Call) -> list[tuple[int, ...]]:
        """The batch dims of each tensor."""
        shapes = [tuple(spec.shape) for spec in call.inputs]
        vectors = self.vector and len(shapes) > 1 and len(shapes[1]) in (1, len(shapes[0]) - 1)
        ranks = (1 if vectors and i == 1 else r for i, r in enumerate([*self.ranks, *[2] * len(shapes)]))
        return [shape[: len(shape) - rank] for shape, rank in zip(shapes, ranks, strict=False)]


class MatrixValues(WholeDims):
    """Numbers of one matrix, or of each of a batch: ``svdvals``, ``det`` ...

    Matrices that are sharded themselves are dealt out to the ranks, each of which works on whole ones.

    Args:
        outputs: number of outputs.
    """

    summary = OpSummary(
        "every dim",
        communicates="sharded matrices: 1 all-to-all of whole ones, dealt out to the ranks, 1 all-gather of results "
        "| 1 all-to-all",
    )

    def __init__(self, op_name: str, *, outputs: int = 1) -> None:
        signature = "A, *rest, driver, p, tol, atol, rtol, hermitian, UPLO"
        super().__init__(op_name, signature=signature, outputs=outputs, folds=True)

    def whole_dims(self, call: Call) -> tuple[int, ...]:
        ndim = len(call.inputs[0].shape)
        return ndim - 2, ndim - 1

    def on_lines(self, call: Call) -> Callable[..., Any]:
        func = call.func
        return lambda matrices, given: func(matrices, *given.pop("rest", ()), **given)


class ConditionNumber(MatrixValues):
    """``linalg.cond``, which of no matrices gives what requires no gradient."""

    kernels_need_lines = True

    def on_lines(self, call: Call) -> Callable[..., Any]:
        cond = super().on_lines(call)
        return lambda matrices, given: (
            cond(matrices, given) if len(matrices) else _of_nothing(lambda one: cond(one, given), matrices)
        )


def _of_nothing(func: Callable[[torch.Tensor], torch.Tensor], lines: torch.Tensor) -> torch.Tensor:
    """A function of no lines, by kernels that need some: the result has the shape of theirs, and joins the graph."""
    out, nothing = func(lines.new_ones((1, *lines.shape[1:])))[:0], lines.sum()
    return out + (nothing.real if nothing.is_complex() and not out.is_complex() else nothing)


class Fourier(WholeDims):
    """``fft`` and its relatives along some dims; sharded ones are made whole by dealing the lines out (one all-to-all
    each way).

    Args:
        rank: how many dims are transformed: 1 (``fft``), 2 (``fft2``), or 0 for those named, else all (``fftn``).
    """

    summary = OpSummary(
        "every dim",
        communicates="sharded transformed dim: 1 all-to-all each way | the same",
    )

    kernels_need_lines = True

    def __init__(self, op_name: str, *, rank: int = 1) -> None:
        signature = "input, n=None, dim=-1, norm=None" if rank == 1 else "input, s=None, dim=None, norm=None"
        super().__init__(op_name, signature=signature)
        self.rank = rank

    def _given(self, call: Call) -> tuple[int, ...]:
        """The transformed dims in the order of the call."""
        ndim, dim = len(call.inputs[0].shape), call.arg("dim")
        if self.rank == 1:
            return (normal_dim(-1 if dim is None else dim, ndim),)
        if dim is None:
            size = call.arg("s")
            dim = (-2, -1) if self.rank == 2 else range(-len(size), 0) if size is not None else range(ndim)
        return tuple(normal_dim(d, ndim) for d in ((dim,) if isinstance(dim, int) else dim))

    def whole_dims(self, call: Call) -> tuple[int, ...]:
        return tuple(sorted(self._given(call)))

    def on_lines(self, call: Call) -> Callable[..., Any]:
        func, whole = call.func, self.whole_dims(call)
        places = tuple(1 + whole.index(d) for d in self._given(call))

        dim: dict[str, Any] = {"dim": places[0] if self.rank == 1 else places}

        def transform(lines: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
            some = functools.partial(func, **given | dim)
            return some(lines) if len(lines) else _of_nothing(some, lines)

        return transform
