"""``as_strided``: a view by strides in memory, where a DTensor's pieces have the same memory as the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hyper_parallel import Layout, Strategy, StrategyOp
from hyper_parallel.rules import Call, OpSummary, S, Solution, fit_rank, local_shape, pending_rows


class AsStrided(StrategyOp):
    """``as_strided(size, stride)``.

    A sharded dim stays when it is the outermost in memory, the view has it with its size and stride, and the other
    dims of the view stay inside one step of it: the chunks of each sequence of a batch, say.
    """

    summary = OpSummary(
        "the outermost dim in memory, where the view keeps it whole",
        pending="passes, of any kind",
        whole="dims that the strides cut anew: their elements lie in other places in a piece than in the whole",
    )

    signature = "input, size, stride, storage_offset=None"
    makes_views = True

    def strategies(self, call: Call) -> Iterable[Strategy]:
        kept = self._kept(call)
        if kept is not None:
            yield Strategy([S(kept[0])], S(kept[1]))
        yield from pending_rows(call)

    def solve(self, call: Call) -> Solution:
        if call.arg("storage_offset") is not None:
            raise ValueError(
                f"{call.name}: storage_offset counts from the start of a storage, which a DTensor has none of; take "
                "the part first, as in x[start:].as_strided(size, stride)"
            )
        solution = super().solve(call)
        solution.is_view = True
        return solution

    def local_function(
        self, call: Call, targets: Sequence[Layout], outputs: Sequence[Layout]
    ) -> Callable[..., Any] | None:
        (shape,), own = call.output_shapes(), call.inputs[0].stride
        output = fit_rank(outputs[0], len(shape))
        size = local_shape(output, shape, output.info.my_coordinate())
        stride, name = tuple(call.arg("stride")), call.name

        def local(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if x.numel() and any(n > 1 and a != b for n, a, b in zip(x.shape, x.stride(), own, strict=True)):
                raise ValueError(
                    f"{name}: this rank's piece lies in memory with strides {x.stride()}, and the view is cut from a "
                    f"tensor with strides {own}; call contiguous() on the tensor first"
                )
            return x.as_strided(size, stride)

        return local

    @staticmethod
    def _kept(call: Call) -> tuple[int, int] | None:
        """The outermost dim in memory, and which one of the view it is."""
        spec, size, stride = call.inputs[0], tuple(call.arg("size")), tuple(call.arg("stride"))
        steps = [s if n > 1 else 0 for n, s in zip(spec.shape, spec.stride, strict=True)]
        outer = max(range(len(steps)), key=lambda d: steps[d], default=None)
        if outer is None:
            return None
        pairs = list(zip(size, stride, strict=True))
        own = (spec.shape[outer], spec.stride[outer])
        if own not in pairs:
            return None
        at = pairs.index(own)
        within = 1 + sum((n - 1) * s for i, (n, s) in enumerate(pairs) if i != at)
        inside = 1 + sum((n - 1) * s for d, (n, s) in enumerate(zip(spec.shape, steps, strict=True)) if d != outer)
        return (outer, at) if max(within, inside) <= own[1] else None
