"""An operator alone, on one device: its gradient against differences, and what torch.library asks of a custom operator.

On a mesh an operator is compared with itself on one device. What is wrong there is wrong on the mesh alike, and would
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hyper_parallel.testing.inputs import Sample
from hyper_parallel.torch_compat import OpOverload, OpOverloadPacket, pytree

_EXACT = (torch.float64, torch.complex128)
# Of torch itself, which tests them.
_NAMESPACES = ("aten", "prims", "prim", "c10d", "_c10d_functional", "quantized", "torch_attn")
_CHECKS = ("test_schema", "test_autograd_registration")  # a wrong fake is told by the cases, with what it says


def wrong_alone(func: Callable[..., Any], sample: Sample) -> str | None:
    """What is wrong with an operator on plain tensors; None where nothing is.

    Only what somebody wrote beside PyTorch is judged: operators registered with ``torch.library``, and every
    ``autograd.Function``. PyTorch tests its own.

    Args:
        func: the operator.
        sample: the call; what its author declared to be no subject of these checks is left out.
    """
    leaves = [v.detach().clone().requires_grad_(w) for v, w in zip(sample.values(), sample.wants_grad(), strict=True)]
    args, kwargs = sample.arguments([leaf.clone() for leaf in leaves])
    with _CustomCalls() as recorder:
        results = pytree.tree_leaves(func(*args, **kwargs))
    problems = [] if sample.no_opcheck else list(_failures(recorder.calls))[:1]
    if not sample.no_gradcheck and (recorder.calls or _has_own_backward(results)):
        problems.append(_wrong_gradient(func, sample) or "")
    return "\n".join(filter(None, problems)) or None


def _has_own_backward(results: Sequence[Any]) -> bool:
    """Whether there is an ``autograd.Function`` among what made these."""
    waiting: list[Any] = [r.grad_fn for r in results if isinstance(r, torch.Tensor)]
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        if issubclass(type(node), torch.autograd.function.BackwardCFunction):
            return True
        seen.add(node)
        waiting.extend(before for before, _ in node.next_functions)
    return False


def _wrong_gradient(func: Callable[..., Any], sample: Sample) -> str | None:
    """Where the gradient is not the limit of differences (``torch.autograd.gradcheck``); inputs in double precision."""
    values = sample.values()
    wanted = [w and v.dtype in _EXACT and v.numel() > 0 for w, v in zip(sample.wants_grad(), values, strict=True)]
    if not any(wanted):
        return None

    def differentiable(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)  # an operator that draws numbers draws the same ones again
        args, kwargs = sample.arguments([leaf.clone() for leaf in leaves])
        results = pytree.tree_leaves(func(*args, **kwargs))
        return tuple(r for r in results if isinstance(r, torch.Tensor) and r.requires_grad and r.dtype in _EXACT)

    leaves = [v.detach().clone().requires_grad_(w) for v, w in zip(values, wanted, strict=True)]
    if not differentiable(*leaves):
        return None
    try:
        # The fast mode compares one random projection, which costs two calls whatever the sizes.
        torch.autograd.gradcheck(differentiable, leaves, fast_mode=True, check_undefined_grad=False)
    except RuntimeError as error:
        first = next(line for line in str(error).splitlines() if line.strip())
        return (
            f"on one device, before any layout: the gradient is not that of the values (gradcheck: {first})\n"
            "  fix: the operator's own backward; or, where it is not meant to be that, "
            "sample(...).options(no_gradcheck='the reason')"
        )
    return None


class _CustomCalls(TorchFunctionMode):
    """Notes the calls of operators that somebody registered with torch.library."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        overload = func.default if isinstance(func, OpOverloadPacket) and func.overloads() == ["default"] else func
        if isinstance(overload, OpOverload) and overload.namespace not in _NAMESPACES:
            self.calls.append((overload, *pytree.tree_map(_as_given, (args, dict(kwargs or {})))))
        return func(*args, **(kwargs or {}))


def _as_given(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _failures(calls: Sequence[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]]) -> Iterator[str]:
    """What ``torch.library.opcheck`` says of these calls."""
    for overload, args, kwargs in calls:
        said = torch.library.opcheck(overload, args, kwargs, test_utils=_CHECKS, raise_exception=False)
        for check, outcome in said.items():
            if outcome != "SUCCESS":
                first = next((line for line in str(outcome).splitlines() if line.strip()), "")
                yield (
                    f"on one device, before any layout: torch.library.opcheck of {overload} fails {check}: {first}\n"
                    "  fix: what is registered for the operator; or, where it is not meant to hold, "
                    "sample(...).options(no_opcheck='the reason')"
                )
