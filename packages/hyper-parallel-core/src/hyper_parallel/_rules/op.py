"""DistributedOp: the interface between an operator's rule and the dispatcher.

Three phases: ``preprocess`` binds the arguments (every call), ``infer_layout`` checks and decides (cached),
``get_expand_impl`` gives the function that runs on the local tensors. Most operators need less: a line in a YAML table,
or a :class:`~hyper_parallel._rules.strategy.StrategyOp` that lists legal placements.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from hyper_parallel import _wiring
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.utils.structures import rebuilt

__all__ = ["DistributedOp", "FunctionOp", "OpSummary", "without_registering"]


class _Constructing(threading.local):
    """How this thread constructs rules."""

    registers = True


_constructing = _Constructing()


@contextmanager
def without_registering() -> Iterator[None]:
    """While a table's entry makes its rule, the constructor has no side effect: the entry itself is registered."""
    before, _constructing.registers = _constructing.registers, False
    try:
        yield
    finally:
        _constructing.registers = before


@dataclass(frozen=True)
class OpSummary:
    """What the table of operators (docs/ops.md) says about a rule.

    Attributes:
        shards: which dims may be sharded, and what a shard leaves.
        pending: what becomes of a pending sum.
        communicates: what the operator communicates inside, forward ``|`` backward.
        whole: which inputs have to be whole, and why.
    """

    shards: str
    pending: str = "reduced first"
    communicates: str = "none"
    whole: str = ""


class DistributedOp:
    """The rule of one operator. Constructing one registers it under ``op_name``.

    A subclass overrides :meth:`infer_layout`, and where the operator communicates or changes its arguments
    :meth:`get_expand_impl`. The older two-argument form ``infer_layout(layouts, extra_args)``, which returns a
    Layout or a tuple of them, is accepted and gives the same result.

    Attributes:
        op_name: name under which it is registered; a bare name stands for every torch function of that name.
        cache_expand: set to True when the closure of :meth:`get_expand_impl` reads only the cache values: it is then
            made once per cache entry instead of on every call.
        allow_partial_inputs: whether a pending reduction may enter the operator. Otherwise it is reduced first, or an
            error under the strict policy.
        summary: what the table of operators says about the rule; None: what its docstring says.
        one_mesh: whether all inputs must be on one mesh; False for operators on lists of unrelated tensors.
    """

    cache_expand: bool = False
    allow_partial_inputs: bool = False
    one_mesh: bool = True
    summary: OpSummary | None = None

    def __init__(self, op_name: str, **params: Any) -> None:
        if params:
            raise TypeError(f"{type(self).__name__} of op {op_name!r} takes no parameters {sorted(params)}")
        self.op_name = op_name
        if _constructing.registers:
            _wiring.op_constructed(self)

    # -- the three phases -----------------------------------------------------------------------------------------

    def preprocess(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Bind and normalise the arguments; runs on every call and checks nothing.

        Returns:
            ``(local_args, local_kwargs, cache_values)``; the cache values are a flat tuple with the layout of every
            DTensor and the value of every other argument, in order.
        """
        values: list[Any] = []
        local_args = tuple(_local_form(a, values) for a in args)
        local_kwargs = {name: _local_form(value, values) for name, value in kwargs.items()}
        return local_args, local_kwargs, tuple(values)

    def infer_layout(self, cache_values: Any) -> tuple[tuple[Any, ...], Any]:
        """Check the inputs and give the outputs' layouts; pure, and cached.

        Returns:
            ``((layout of each tensor output, ...), extra)``; ``extra`` is handed to :meth:`get_expand_impl`.

        Raises:
            ValueError: when the operator does not support these layouts.
        """
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define infer_layout")

    def get_expand_impl(
        self, func: Callable[..., Any], infer_result: Any, cache_values: Any
    ) -> Callable[..., Any] | None:
        """The function to run on the local tensors in place of ``func``; None when ``func`` itself is right."""
        return None

    # -- helpers --------------------------------------------------------------------------------------------------

    def infer(self, cache_values: Any) -> tuple[tuple[Any, ...], Any]:
        """:meth:`infer_layout` in whichever of its two forms the class defines."""
        if not self._is_old_form():
            return self.infer_layout(cache_values)
        layouts = tuple(v for v in cache_values if isinstance(v, Layout))
        extra = [v for v in cache_values if not isinstance(v, Layout)]
        result = self.infer_layout(layouts, extra)  # type: ignore[call-arg]
        return ((result,) if isinstance(result, Layout) or result is None else tuple(result)), None

    @classmethod
    @cache
    def _is_old_form(cls) -> bool:
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(cls.infer_layout).parameters.values()
        # self, layouts, extra_args
        return sum(p.kind in positional and p.default is p.empty for p in parameters) == 3

    def _check_partial_inputs(self, layouts: Sequence[Any]) -> None:
        """Raise ValueError when a layout holds a pending reduction."""
        for index, layout in enumerate(layouts):
            if isinstance(layout, Layout) and layout.is_partial():
                raise ValueError(
                    f"{self.op_name}: input {index} has a pending reduction ({layout}), which this operator cannot "
                    "use: call .reduce_partial() on it first"
                )


def _local_form(value: Any, values: list[Any]) -> Any:
    """An argument with local tensors in the place of DTensors; what the cache needs of it is appended to ``values``."""
    if isinstance(value, _wiring.dtensor_type()):
        values.append(value.layout)
        return value._resolve()
    if isinstance(value, (list, tuple)):
        return rebuilt(value, (_local_form(v, values) for v in value))
    values.append(value)
    return value


class FunctionOp(DistributedOp):
    """A rule written as one Python function of DTensors, run on every call and not cached.

    For functions that are others in sequence, that read a value out of a tensor, or that change no layout at all.

    Attributes:
        writes_out: whether :meth:`run` writes the tensors of ``out=``. Otherwise it does not see them, and what it
            returns is written into them.
    """

    writes_out: bool = False

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of ``func(*args, **kwargs)``; some arguments are DTensors, the others are as the user passed
        them."""
        raise NotImplementedError(f"{type(self).__name__} of op {self.op_name!r} must define run")
