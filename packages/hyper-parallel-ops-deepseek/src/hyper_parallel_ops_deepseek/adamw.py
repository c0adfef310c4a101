"""``npu_apply_adam_w``: the rule of PyTorch's fused optimizer steps, for one parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.rules import Signature
from hyper_parallel_ops_basic.optimizer.foreach import FusedStep

__all__ = ["ApplyAdamW"]

_SIGNATURE = Signature(
    "beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon, grad, max_grad_norm=None, amsgrad=False, "
    "maximize=False, *, out"
)


class ApplyAdamW(FusedStep):
    """Writes ``out = (parameter, first moment, second moment)``; the gradient takes the parameter's layout."""

    writes_out = True

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = _SIGNATURE.bind(args, kwargs)
        largest = given.get("max_grad_norm")
        lists = [[tensor] for tensor in (*given["out"], given["grad"], *([] if largest is None else [largest]))]
        local_lists = self.local_lists(func, lists)
        parameter, first, second, grad, *rest = (tensors[0] for tensors in local_lists)
        local = {"grad": grad, "out": (parameter, first, second)} | ({"max_grad_norm": rest[0]} if rest else {})
        numbers = [given[name] for name in _SIGNATURE.names[:7]]
        named = {name: value for name, value in given.items() if name not in _SIGNATURE.names[:7]}
        func(*numbers, **named | local)
        self.count_writes(lists[1:3], local_lists[1:3])
        return given["out"]
