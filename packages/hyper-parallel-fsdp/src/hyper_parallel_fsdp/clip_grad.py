"""Gradient clipping over parameters on different meshes and in different layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from hyper_parallel import DTensor
from hyper_parallel.rules import MeshInfo, is_shard, local_of, primitives

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for parameters that are sharded differently, DTensors and plain ones in one
    list.

    Args:
        parameters: whose gradients are scaled in place. Plain ones count as equal on all ranks.
        max_norm: largest total norm that is left as it is.
        norm_type: p of the norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: raise, on every rank, when the total norm is nan or inf.
        foreach: use the foreach forms of the functions; default: yes.

    Returns:
        The norm of all gradients together before clipping, as one device has it: a plain 0-dim tensor, equal on all
        ranks. One all-reduce for each mesh that is no part of another parameter's; all ranks must call it.

    Raises:
        RuntimeError: the norm is nan or inf, with ``error_if_nonfinite``.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm_type, max_norm = float(norm_type), float(max_norm)
    if norm_type <= 0:
        raise ValueError(f"clip_grad_norm_: norm_type must be positive (inf for the maximum), got {norm_type}")
    parts: list[torch.Tensor] = []
    locals_: list[torch.Tensor] = []
    for mesh, by_axes in _by_mesh(given).items():
        locals_ += (grad for each in by_axes.values() for grad in each.grads)
        parts.append(_norm_over_mesh(mesh, by_axes, norm_type, foreach is not False))
    if not parts:
        return torch.tensor(0.0)
    total = _together([part.to(parts[0].device) for part in parts], norm_type)
    norm = total if norm_type == torch.inf else total.pow(1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {float(norm)}, so it cannot be clipped; pass "
            "error_if_nonfinite=False to scale by it all the same"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if foreach is not False:
        by_kind: dict[Any, list[torch.Tensor]] = {}
        for grad in locals_:
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        for (device, _), grads in by_kind.items():
            torch._foreach_mul_(grads, scale.to(device))
    else:
        for grad in locals_:
            grad.mul_(scale.to(grad.device))
    return norm


class _ShardedGradients:
    """The local gradients of the parameters that are sharded over the same axes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.dtype = device, torch.float32
        self.grads: list[torch.Tensor] = []

    def add(self, grad: torch.Tensor | None, dtype: torch.dtype) -> None:
        # The dtype of the parameters counts, also where this rank has an empty piece or no gradient: all ranks reduce
        # in the same one.
        if dtype in (torch.float64, torch.complex128):
            self.dtype = torch.float64
        if grad is not None:
            self.grads.append(grad)


def _by_mesh(parameters: list[torch.Tensor]) -> dict[MeshInfo | None, dict[tuple[int, ...], _ShardedGradients]]:
    """The local gradients by mesh (None: equal on all ranks) and by the mesh axes that shard their parameter, in the
    same order on all ranks. Parameters on a part of another one's mesh count as on that."""
    meshes = list(dict.fromkeys(p.layout.info for p in parameters if isinstance(p, DTensor)))
    larger = {m: next((o for o in meshes if o is not m and o.axes_beyond(m) is not None), m) for m in meshes}
    found: dict[MeshInfo | None, dict[tuple[int, ...], _ShardedGradients]] = {}
    for parameter in parameters:
        mesh: MeshInfo | None = None
        axes: tuple[int, ...] = ()
        grad = parameter.grad
        if isinstance(parameter, DTensor):
            layout, grad = parameter.layout, local_of(parameter).grad
            names = [n for n, p in zip(layout.mesh_dim_names, layout.placements, strict=True) if is_shard(p)]
            wide = larger[layout.info]
            axes = tuple(sorted(a for a in map(wide.axis, names) if wide.shape[a] > 1))
            mesh = wide if axes else None
        by_axes = found.setdefault(mesh, {})
        by_axes.setdefault(axes, _ShardedGradients(parameter.device)).add(grad, parameter.dtype)
    return found


def _norm_over_mesh(
    mesh: MeshInfo | None, by_axes: dict[tuple[int, ...], _ShardedGradients], p: float, foreach: bool
) -> torch.Tensor:
    """The sum of p-th powers of gradients on one mesh (their maximum for inf), in one all-reduce over all axes that
    shard one of them: what is equal on some of these axes counts once, in equal parts."""
    if mesh is None:
        return _together([_power_sum(each.grads, p, each.device, each.dtype, foreach) for each in by_axes.values()], p)
    device = mesh.default_device()  # its group may not work on host memory, where shards can be
    over = tuple(sorted({a for axes in by_axes for a in axes}))
    parts = []
    for axes, each in by_axes.items():
        part = _power_sum(each.grads, p, device, each.dtype, foreach)
        copies = math.prod(mesh.shape[a] for a in over if a not in axes)
        parts.append(part if p == torch.inf else part / copies)
    total = _together(parts, p)
    primitives.all_reduce(total, mesh.group(over), "max" if p == torch.inf else "sum")
    return total


def _together(parts: list[torch.Tensor], p: float) -> torch.Tensor:
    if len({part.dtype for part in parts}) > 1:
        parts = [part.double() for part in parts]
    stacked = torch.stack(parts)
    return stacked.max() if p == torch.inf else stacked.sum()


def _power_sum(
    grads: list[torch.Tensor], p: float, device: torch.device, dtype: torch.dtype, foreach: bool
) -> torch.Tensor:
    """The sum of the p-th powers of all absolute values (their maximum for inf)."""
    norms: list[torch.Tensor] = []
    for wanted in (dtype, None):  # a complex one has its own, real one
        pieces = [g for g in grads if g.numel() and g.is_complex() == (wanted is None)]
        if foreach and pieces:
            norms += torch._foreach_norm(pieces, p, dtype=wanted)
        else:
            norms += [torch.linalg.vector_norm(g, p, dtype=wanted) for g in pieces]
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    stacked = torch.stack([n.to(device, dtype) for n in norms])
    return stacked.max() if p == torch.inf else stacked.pow(p).sum()
