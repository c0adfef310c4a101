"""The operators, on ordinary tensors; nothing here knows of sharding. A real pack would call its kernels here."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


@torch.library.custom_op("hyper_parallel_swiglu::silu_mul", mutates_args=())
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, of tensors of one shape; like most kernels it writes a contiguous result."""
    return (F.silu(gate) * up).contiguous()


@torch.library.custom_op("hyper_parallel_swiglu::swiglu", mutates_args=())
def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up[..., 2 * h]``, whose first half is the gate; gives a contiguous ``[..., h]``."""
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) * up).contiguous()


@torch.library.custom_op("hyper_parallel_swiglu::swiglu_backward", mutates_args=())
def swiglu_backward(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """The gradient of ``gate_up``; the sigmoid is computed anew instead of kept."""
    gate, up = gate_up.chunk(2, -1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    return torch.cat([grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu], -1).contiguous()


@silu_mul.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(up, memory_format=torch.contiguous_format)


@swiglu.register_fake
def _(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@swiglu_backward.register_fake
def _(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _silu_mul_gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = ctx.saved_tensors
    sigmoid = gate.sigmoid()
    return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


def _swiglu_gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return swiglu_backward(grad.contiguous(), *ctx.saved_tensors)


silu_mul.register_autograd(_silu_mul_gradients, setup_context=_save_inputs)
swiglu.register_autograd(_swiglu_gradient, setup_context=_save_inputs)
