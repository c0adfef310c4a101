"""A plain function as an operator with a rule of its own: to try a rule, or the kit, without an op pack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from hyper_parallel._rules.call import Call
from hyper_parallel._rules.strategy import Strategy, StrategyOp
from hyper_parallel.torch_compat import pytree


def distributed(kind: Callable[..., Any], **params: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function an operator that DTensors reach, with a rule of class ``kind``.

    Args:
        kind: class of the rule; called with the operator's name and ``params``.

    Example::

        @distributed(Elementwise, linear="each")
        def twice(x):
            return x * 2
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def operator(*args: Any, **kwargs: Any) -> Any:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if has_torch_function(tensors):
                return handle_torch_function(operator, tensors, *args, **kwargs)
            return function(*args, **kwargs)

        kind(f"{function.__module__}.{function.__qualname__}", **params)
        return operator

    return decorate


class StrategyFunctionOp(StrategyOp):
    """Strategies given as a function of the call; further keywords become attributes of the rule."""

    def __init__(self, op_name: str, *, rows: Callable[[Call], Iterable[Strategy]], **attributes: Any) -> None:
        super().__init__(op_name)
        self.rows = rows
        for name, value in attributes.items():
            setattr(self, name, value)

    def strategies(self, call: Call) -> Iterable[Strategy]:
        return self.rows(call)
