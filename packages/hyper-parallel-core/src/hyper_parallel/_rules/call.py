"""One call of an operator as its rule sees it: specs in the place of DTensors, arguments by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch

from hyper_parallel import torch_compat
from hyper_parallel.context import Mode
from hyper_parallel.errors import RedistributionError
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.mesh import MeshInfo
from hyper_parallel.sharding.spec import Spec
from hyper_parallel.utils.function_names import name_of_served
from hyper_parallel.utils.structures import rebuilt

_MISSING = object()
# What PyTorch's native functions let NumPy's users write (numpy_compatibility_arg_names in its python_arg_parser.cpp).
_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}


class Signature:
    """Parameter names of an operator, e.g. ``"input, dim, index, *, out=None"``; ``=value`` marks optional ones.

    A literal ``*name`` takes the remaining positional arguments as a tuple (``view(*shape)``); ``**name`` lets keyword
    arguments pass that the rule does not know.
    """

    def __init__(self, text: str) -> None:
        self.names: list[str] = []
        self.parameters: list[str] = []
        self.keyword_only: list[str] = []
        self.rest: str | None = None
        self.open = False
        target = self.names
        for part in filter(None, (p.strip() for p in text.split(","))):
            name = part.split("=")[0].strip()
            if name.startswith("**"):
                self.open = True
                continue
            if name == "*":
                target = self.keyword_only
            elif name.startswith("*"):
                self.rest, target = name[1:], self.keyword_only
            else:
                target.append(name)
            self.parameters.append(name.removeprefix("*"))

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name; what was not passed is absent.

        Raises:
            TypeError: for too many positional arguments or an unknown keyword.
        """
        bound = dict(zip(self.names, args, strict=False))
        extra = tuple(args[len(self.names) :])
        if self.rest is not None:
            # `view(2, 3)` and `view((2, 3))` mean the same.
            bound[self.rest] = tuple(extra[0]) if len(extra) == 1 and isinstance(extra[0], (tuple, list)) else extra
        elif extra:
            raise TypeError(f"takes {len(self.names)} positional arguments ({', '.join(self.names)}), got {len(args)}")
        known = {*self.names, *self.keyword_only, *([self.rest] if self.rest else ())}
        for name, value in kwargs.items():
            if name not in known and not self.open:
                raise TypeError(f"got an unexpected keyword argument {name!r}")
            bound[name] = value
        return bound

    def with_own_names(self, func: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of a call of ``func`` with the names of this signature: ``dim`` for NumPy's ``axis``."""
        if not isinstance(func, (BuiltinFunctionType, MethodDescriptorType)):
            return kwargs
        others = (_NUMPY_NAMES.keys() & kwargs.keys()).difference(self.parameters)
        return {_NUMPY_NAMES[n] if n in others else n: v for n, v in kwargs.items()} if others else kwargs

    def as_read(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]] | None:
        """The arguments of a call of ``func`` as rules read them: the first one by position, the others by the names of
        this signature, in its order. None where they are so."""
        named = self.with_own_names(func, kwargs)
        if not args and self.names and self.names[0] in named and name_of_served(func) is None:
            first, *_ = self.names
            args, named = (named[first],), {name: value for name, value in named.items() if name != first}
        ordered = self.in_order(named) or named
        return None if ordered is kwargs else (args, ordered)

    def in_order(self, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The keyword arguments in the operator's order; None where its tensors are in it.

        Rules know tensors by their position, which is the order written.
        """
        given = [name for name, value in kwargs.items() if isinstance(value, (torch.Tensor, list, tuple))]
        if len(given) < 2:
            return None
        place = {name: at for at, name in enumerate(self.parameters)}
        ordered = sorted(given, key=lambda name: place.get(name, len(place)))
        return None if ordered == given else {name: kwargs[name] for name in (*ordered, *kwargs)}


class Call:
    """What a rule may look at: global shapes, dtypes, placements, and arguments. Never local shapes: they differ by
    rank.

    Attributes:
        func: the torch function.
        name: its readable name.
        inputs: spec of every tensor argument, in the order written (lists flattened).
        needs_grad: which inputs need a gradient (all False when gradients are off).
        args, kwargs: the arguments with specs in the place of tensors.
        mode: policy in force.
        info: the mesh that all inputs share.
        inplace: whether the call writes its first argument.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Spec],
        needs_grad: list[bool],
        mode: Mode,
        signature: Signature | None,
        inplace: bool,
    ) -> None:
        self.func, self.name, self.args, self.kwargs = func, name, args, kwargs
        self.inputs, self.needs_grad, self.mode, self.inplace = inputs, needs_grad, mode, inplace
        self._signature = signature
        self._bound: dict[str, Any] | None = None
        self._meta_result: Any = _MISSING
        self.info: MeshInfo = inputs[0].layout.info

    @property
    def bound(self) -> dict[str, Any]:
        """Arguments by name, per the rule's signature."""
        if self._bound is None:
            if self._signature is None:
                raise TypeError(f"the rule of {self.name} declares no signature, so its arguments have no names")
            try:
                self._bound = self._signature.bind(self.args, self.kwargs)
            except TypeError as error:
                raise TypeError(f"{self.name}() {error}") from None
        return self._bound

    def meta_result(self, func: Callable[..., Any] | None = None) -> Any:
        """What the call returns on meta tensors: global shapes, strides, dtypes, and whether outputs are views."""
        if func is not None and func is not self.func:
            return _on_meta(func, self.args, self.kwargs)
        if self._meta_result is _MISSING:
            self._meta_result = _on_meta(self.func, self.args, self.kwargs)
        return self._meta_result

    def output_shapes(self) -> list[tuple[int, ...]]:
        """Global shapes of the tensors that the call returns."""
        result = self.meta_result()
        return [tuple(t.shape) for t in (result if isinstance(result, (tuple, list)) else (result,))]

    def arg(self, name: str, default: Any = None) -> Any:
        """An argument by name; ``default`` when it was not passed."""
        return self.bound.get(name, default)

    def numbers(self, name: str, default: Any = None) -> Any:
        """An argument of numbers by name, for which PyTorch takes a tensor too.

        Raises:
            NeedsValue: when it is a tensor; the rule lets this pass, and is asked again with what the tensor holds.
        """
        value = self.arg(name, default)
        if isinstance(value, Ref):
            raise NeedsValue(value.index)
        return value

    def check_name(self, name: str) -> None:
        """Raise TypeError when the rule's signature has no such parameter: a misspelt one would count as Replicate."""
        if self._signature is None or name not in self._signature.parameters:
            known = "no signature" if self._signature is None else ", ".join(self._signature.parameters)
            raise TypeError(f"the rule of {self.name} lays out {name!r}, which it does not take; it has {known}")

    def index(self, name: str) -> int | None:
        """Position in ``inputs`` of a tensor argument; None when it is absent or no tensor."""
        value = self.bound.get(name, _MISSING)
        if not isinstance(value, Ref):
            return None
        return value.index

    def position(self, name: str) -> int:
        """Position in ``inputs`` of a tensor argument that must be there.

        Raises:
            TypeError: when it is absent or no tensor.
        """
        index = self.index(name)
        if index is None:
            raise TypeError(f"{self.name}: argument {name!r} must be a tensor")
        return index

    def spec(self, name: str) -> Spec:
        """Spec of a tensor argument by name."""
        return self.inputs[self.position(name)]

    def dim(self, name: str = "dim", ndim: int | None = None, default: int | None = None) -> int | None:
        """A dimension argument as a non-negative number.

        Raises:
            IndexError: when it is out of range.
        """
        value = self.arg(name, default)
        return None if value is None else normal_dim(value, self.inputs[0].layout.ndim if ndim is None else ndim)


class NeedsValue(Exception):
    """A rule decides by what a tensor argument holds: the dispatcher reads it, and asks again with numbers instead.

    Attributes:
        index: the argument's position in :attr:`Call.inputs`.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class Ref:
    """The place of a tensor in a call's arguments: ``inputs[index]``."""

    __slots__ = ("index", "spec")

    def __init__(self, index: int, spec: Spec) -> None:
        self.index, self.spec = index, spec

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.spec.shape

    @property
    def dtype(self) -> Any:
        """Element type."""
        return self.spec.dtype


@dataclass
class Solution:
    """What a rule decides for one call.

    Attributes:
        targets: layout that each input must have; the dispatcher redistributes.
        outputs: layout of each tensor output, or None for an output that is no DTensor.
        local: runs in place of the function on the local arguments; None for the function itself.
        invariant: per mesh axis, inputs that stay invariant there: they are used only after the operator's own
            reduction.
        reduced: per output, mesh axes over which the operator itself reduced (the output is equal on all ranks, and so
            is its gradient).
        uncounted: inputs read only for dtype, device or shape.
        is_view: whether the output shares memory with the first input.
        copies: whether it does so on one device but not here: a write to it is carried to the input, or refused.
        shapes: global shape of each output where the rule knows it (cheap); None: found with meta tensors.
        meta: computes the outputs' global shapes on meta tensors; None for the function itself.
    """

    targets: list[Layout]
    outputs: list[Layout | None]
    local: Callable[..., Any] | None = None
    invariant: Sequence[frozenset[int]] = ()
    reduced: tuple[frozenset[int], ...] | None = None
    uncounted: frozenset[int] = frozenset()
    is_view: bool = False
    copies: bool = False
    shapes: Sequence[tuple[int, ...]] | None = None
    meta: Callable[..., Any] | None = None

    def is_invariant(self, axis: int, index: int) -> bool:
        """Whether input ``index`` stays invariant on a mesh axis."""
        return bool(self.invariant) and index in self.invariant[axis]


def _on_meta(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    # Whoever watches operators, as selective checkpointing does, is not to see this one: it is not computed again.
    with torch.no_grad(), torch_compat.outside_of_dispatch_modes():
        named = {name: _as_meta(value) for name, value in kwargs.items()}
        if "device" in named:
            named["device"] = "meta"
        return func(*_as_meta(args), **named)


def _as_meta(value: Any) -> Any:
    if isinstance(value, Ref):
        return value.spec.meta
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return rebuilt(value, (_as_meta(v) for v in value))
    return value


def normal_dim(dim: int, ndim: int) -> int:
    """``dim`` counted from the front.

    Raises:
        IndexError: when it is out of range, as PyTorch does.
    """
    limit = max(ndim, 1)
    if not -limit <= dim < limit:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-limit}, {limit - 1}], but got {dim})")
    return dim % limit


def refuse(call: Call, why: str, fix: str, strategies: Sequence[str] = ()) -> RedistributionError:
    """The standard one-screen error for inputs that an operator cannot take."""
    lines = [f"{call.name}: {why}"]
    for index, spec in enumerate(call.inputs):
        lines.append(f"  input {index}: shape {tuple(spec.shape)}, {spec.layout}")
    lines.append(f"  fix: {fix}")
    layouts = [spec.layout for spec in call.inputs]
    return RedistributionError("\n".join(lines), op_name=call.name, layouts=layouts, strategies=strategies)
