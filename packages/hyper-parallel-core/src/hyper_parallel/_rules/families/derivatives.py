"""What an operator's own backward promises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For a ``backward`` that is not differentiable itself: with ``create_graph=True`` it raises.

    PyTorch's ``once_differentiable`` raises only when the incoming gradient needs one, and else takes the saved tensors
    for constants, which gives wrong second derivatives.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "this operator over a sharded dimension has no second derivative (create_graph=True): redistribute its "
                "input to Replicate along that dimension first"
            )
        return backward(ctx, *grads)

    return checked
