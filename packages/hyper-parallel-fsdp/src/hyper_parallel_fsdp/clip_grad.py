"""Gradient clipping over parameters on different meshes and in different layouts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hyper_parallel import DTensor, comm
from hyper_parallel.placements import is_shard

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
        ranks. One all-reduce for each set of mesh axes that shards a parameter; all ranks must call it.

    Raises:
        RuntimeError: the norm is nan or inf, with ``error_if_nonfinite``.
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm_type, max_norm = float(norm_type), float(max_norm)
    if norm_type <= 0:
        raise ValueError(f"clip_grad_norm_: norm_type must be positive (inf for the maximum), got {norm_type}")
    total: torch.Tensor | None = None
    locals_: list[torch.Tensor] = []
    for group, device, grads in _by_group(given):
        locals_ += grads
        part = _power_sum(grads, norm_type, device, foreach is not False)
        if group is not None:
            comm.all_reduce(part, group, "max" if norm_type == torch.inf else "sum")
        if total is None:
            total = part
        else:
            part = part.to(total.device)
            total = torch.maximum(total, part) if norm_type == torch.inf else total + part
    if total is None:
        return torch.tensor(0.0)
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


def _by_group(parameters: list[torch.Tensor]) -> list[tuple[Any, torch.device, list[torch.Tensor]]]:
    """The local gradients by the ranks over which their parameter is sharded, with these ranks' group and device; in
    the same order on all ranks.

    A rank with an empty piece, or without a gradient where another rank has one, takes part all the same.
    """
    found: dict[Any, tuple[Any, torch.device, list[torch.Tensor]]] = {}
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            key, group = None, None
            grad = parameter.grad
        else:
            layout = parameter.layout
            axes = tuple(a for a, p in enumerate(layout.placements) if is_shard(p) and layout.mesh_shape[a] > 1)
            group = layout.info.group(axes) if axes else None
            key = None if group is None else (id(layout.info), axes)
            grad = parameter.to_local().grad
        grads = found.setdefault(key, (group, parameter.device, []))[2]
        if grad is not None:
            grads.append(grad)
    return [entry for entry in found.values() if entry[0] is not None or entry[2]]


def _power_sum(grads: list[torch.Tensor], p: float, device: torch.device, foreach: bool) -> torch.Tensor:
    """The sum of the p-th powers of all absolute values (their maximum for inf), in float32 at least."""
    pieces = [g for g in grads if g.numel()]
    if not pieces:
        return torch.zeros((), dtype=torch.float32, device=device)
    wide = torch.float64 if any(g.dtype is torch.float64 for g in pieces) else torch.float32
    norms = (
        torch._foreach_norm(pieces, p, dtype=wide)
        if foreach
        else [torch.linalg.vector_norm(g, p, dtype=wide) for g in pieces]
    )
    stacked = torch.stack([n.to(device) for n in norms])
    return stacked.max() if p == torch.inf else stacked.pow(p).sum()
