"""One all-reduce for the gradients of several replicated parameters, in the place of one each.

Where ranks see different activations (norms under sequence parallel), each has a partial contribution to the gradient
of a parameter that all hold whole, and these are summed. The varying forms of such parameters
(:mod:`hyper_parallel.tensor.redistribute_cache`) are made by one autograd node here, which the engine runs when the
gradients of all of them have come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hyper_parallel.comm import primitives as comm
from hyper_parallel.comm import trace as comm_trace
from hyper_parallel.comm.redistribute import move_of, moved, target_spec
from hyper_parallel.sharding.mesh import MeshInfo
from hyper_parallel.sharding.placements import is_replicate
from hyper_parallel.tensor.dtensor import DTensor, wrap
from hyper_parallel.tensor.redistribute_cache import form_of, remember

__all__ = ["join_gradients"]


def join_gradients(parameters: Iterable[DTensor], axis: str) -> None:
    """Let the gradients of parameters that are Replicate over a mesh axis be summed over it together.

    It changes nothing where a parameter is used in a way that gives every rank the whole gradient; the others share one
    all-reduce per backward, which runs when the last of their gradients has come. To be called before the parameters
    are used, at the beginning of each call of the module that holds them; the same parameters on all ranks.

    Args:
        parameters: DTensors; those that are not Replicate over the axis, or need no gradient, are passed over.
        axis: name of the mesh axis.
    """
    if not torch.is_grad_enabled():
        return
    together: dict[Any, list[DTensor]] = {}
    for parameter in parameters:
        info = parameter.layout.info
        if not parameter.requires_grad or axis not in info.names:
            continue
        index = info.names.index(axis)
        if is_replicate(parameter.placements[index]) and index not in parameter.spec.varying:
            together.setdefault((info, index, parameter.dtype), []).append(parameter)
    for (info, index, _), members in together.items():
        if len(members) > 1:
            _join(members, info, index)


def _join(members: Sequence[DTensor], info: MeshInfo, index: int) -> None:
    specs = [target_spec(p.spec, p.layout, p.spec.varying | {index}) for p in members]
    if all(form_of(p, s) is not None for p, s in zip(members, specs, strict=True)):
        return
    locals_ = [p._resolve() for p in members]
    joined = _Joint.apply(
        info, index, members[0].dtype, [(p.spec, s) for p, s in zip(members, specs, strict=True)], *locals_
    )
    for parameter, spec, local in zip(members, specs, joined, strict=True):
        remember(parameter, wrap(local, spec))


class _Joint(torch.autograd.Function):
    """Identities whose gradients are summed over one mesh axis, in one buffer."""

    @staticmethod
    def forward(ctx: Any, info: MeshInfo, index: int, dtype: torch.dtype, specs: Any, *locals_: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.info, ctx.index, ctx.specs = info, index, specs
        ctx.shapes, ctx.like = [local.shape for local in locals_], locals_[0].detach().new_empty(0)
        ctx.where = comm_trace.user_line() if comm_trace._active else None
        return tuple(local.view_as(local) for local in locals_)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        group = ctx.info.group((ctx.index,))
        if torch.is_grad_enabled():  # for second derivatives, each by the differentiable way
            return (None, None, None, None, *map(_summed, grads, ctx.specs))
        # Who got none says so: a rank's part of the network may have used what another's did not.
        counts = ctx.like.new_tensor([grad is not None for grad in grads])
        filled = [
            grad if grad is not None else ctx.like.new_zeros(shape)
            for grad, shape in zip(grads, ctx.shapes, strict=True)
        ]
        buffer = torch.cat([counts, *(grad.reshape(-1) for grad in filled)])
        if comm_trace._active:
            with comm_trace.described(f"gradients of {len(grads)} parameters", ctx.where, "backward", ctx.info.names):
                comm.all_reduce(buffer, group)
        else:
            comm.all_reduce(buffer, group)
        counts, *parts = buffer.split([len(grads), *(shape.numel() for shape in ctx.shapes)])
        sums: list[torch.Tensor | None] = [part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True)]
        if any(grad is None for grad in grads):  # read only then: a device has to be waited for
            sums = [part if count > 0 else None for part, count in zip(sums, counts.tolist(), strict=True)]
        return (None, None, None, None, *sums)


def _summed(grad: torch.Tensor | None, specs: Any) -> torch.Tensor | None:
    if grad is None:
        return None
    before, after = specs
    return moved(grad, move_of((before.layout, before.varying), (after.layout, after.varying), before.shape).back)
