"""DFunction: an ``autograd.Function`` that also takes DTensors.

Its ``forward`` and ``backward`` always see plain local tensors; a DistributedOp says how the outputs are laid out::

    class Scale(DFunction):
        _op_name = "scale"

        @staticmethod
        def forward(ctx, x, factor): ...
        @staticmethod
        def backward(ctx, grad): ...

    Scale.apply(dtensor, 2.0)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from hyper_parallel.dispatch.dispatcher import dispatch
from hyper_parallel.dispatch.find_rule import register_function
from hyper_parallel.errors import MissingOpError
from hyper_parallel.sharding.placements import Placement
from hyper_parallel.tensor.dtensor import DTensor

__all__ = ["DFunction"]


class DFunction(torch.autograd.Function):
    """An autograd function whose ``forward`` and ``backward`` see this rank's local tensors.

    Plain tensors take PyTorch's own path. With a DTensor anywhere in the arguments the :class:`DistributedOp`
    registered under ``_op_name`` gives the outputs' layouts, and inputs that every rank uses for different work are
    converted so that their gradients are summed.

    Attributes:
        _op_name: name of the registered DistributedOp.
        grad_placements: optional; per tensor input, the placements (one per mesh axis) of the gradient that
            ``backward`` returns for it, or None for the rule's own. Say ``Replicate()`` where ``backward`` reduces by
            itself.

    Raises:
        ValueError: ``apply`` with a DTensor on a class without ``_op_name``.
        MissingOpError: no DistributedOp is registered under ``_op_name``.
    """

    _op_name: ClassVar[str | None] = None
    grad_placements: ClassVar[Sequence[Sequence[Placement] | None] | None] = None

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run the function; keyword arguments are those of ``forward``."""
        if kwargs:
            args = _positional(cls, args, kwargs)
        if not any(_has_dtensor(a) for a in args):
            return super().apply(*args)
        if "_plain_apply" not in cls.__dict__:
            if cls._op_name is None:
                raise ValueError(
                    f"{cls.__name__}.apply got a DTensor, but the class has no _op_name: set it to the name of the "
                    "registered DistributedOp that says how the outputs are laid out"
                )
            cls._plain_apply = register_function(  # type: ignore[attr-defined]
                _plain(super().apply), cls._op_name, cls.grad_placements
            )
        try:
            return dispatch(cls.__dict__["_plain_apply"], args, None)
        except MissingOpError as error:
            if error.op_name != cls._op_name:
                raise
            raise _without_op(cls, error) from None


def _without_op(function: Any, error: MissingOpError) -> MissingOpError:
    name = function._op_name
    return MissingOpError(
        f"{function.__name__}.apply got a DTensor, and no DistributedOp is registered under its _op_name {name!r}, to "
        f"say how the outputs are laid out\n  construct one before the call, which registers it: YourOp({name!r}); or "
        f"correct _op_name\n  {error}",
        op_name=name,
    )


def _plain(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A function object of its own for each class: the dispatcher's table is keyed by it."""

    def plain_apply(*args: Any) -> Any:
        return apply(*args)

    return plain_apply


def _positional(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    signature = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    try:
        bound = signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{cls.__name__}.apply: {error}") from None
    bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(
            f"{cls.__name__}.forward has keyword-only parameters {sorted(bound.kwargs)}; make them positional"
        )
    return bound.args[1:]


def _has_dtensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_dtensor(v) for v in value)
    return isinstance(value, DTensor)
