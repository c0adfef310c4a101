"""Which torch functions an op name means, and what a function that arrives in ``__torch_function__`` is called.

A **bare** name such as ``add`` means every public function of that name: ``torch.add``, ``torch.Tensor.add``, those of
``torch.nn.functional`` and ``torch.special``; and by itself its in-place form ``add_`` and its operators (``a + b``,
``a += b``). ``out=`` needs no name: it is an argument of the same function. A bare name of a property (``T``) or of a
special method (``__getitem__``) means torch.Tensor's.

A **dotted** name means exactly one function: ``torch.nn.functional.linear``, ``Tensor.T``, ``torch.ops.acme.swiglu``,
``torch_npu.npu_rms_norm``, or the ``apply`` of an ``autograd.Function`` (see ``registry.autograd_functions``). With a
colon, ``package.module:function``, it means a global of a module in plain Python (see ``registry.module_functions``).
Nothing is imported to find it: as long as nobody has imported the module, nobody can call the function.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

Function = Callable[..., Any]

# The attribute of a replaced ``apply`` that says which name rules know it by.
SERVED_NAME = "_serves_dtensors_as"

# Operators of Tensor that call the function with the arguments in the same order. Reflected forms are here only where
# the operands may change places: ``1 / a`` arrives as ``Tensor.__rdiv__(a, 1)``, where the rule of ``div`` would take
# the divisor for the dividend. Such a form is an op of its own, with the bare name ``__rdiv__``.
_OPERATORS: dict[str, tuple[str, ...]] = {
    "abs": ("__abs__",),
    "add": ("__add__", "__radd__", "__iadd__"),
    "bitwise_and": ("__and__", "__rand__", "__iand__"),
    "bitwise_left_shift": ("__lshift__", "__ilshift__"),
    "bitwise_not": ("__invert__",),
    "bitwise_or": ("__or__", "__ror__", "__ior__"),
    "bitwise_right_shift": ("__rshift__", "__irshift__"),
    "bitwise_xor": ("__xor__", "__rxor__", "__ixor__"),
    "div": ("__truediv__", "__itruediv__", "__div__", "__idiv__"),
    "eq": ("__eq__",),
    "floor_divide": ("__floordiv__", "__ifloordiv__"),
    "ge": ("__ge__",),
    "getitem": ("__getitem__",),
    "gt": ("__gt__",),
    "le": ("__le__",),
    "lt": ("__lt__",),
    "matmul": ("__matmul__", "__imatmul__"),
    "mul": ("__mul__", "__rmul__", "__imul__"),
    "ne": ("__ne__",),
    "neg": ("__neg__",),
    "positive": ("__pos__",),
    "pow": ("__pow__", "__ipow__"),
    "remainder": ("__mod__", "__imod__"),
    "rsub": ("__rsub__",),
    "setitem": ("__setitem__",),
    "sub": ("__sub__", "__isub__"),
}

# Functions of torch.nn.functional whose namesake in torch (or on Tensor) takes other arguments: torch.embedding swaps
# the first two, torch.kl_div has a number for the reduction, Tensor.unfold is another operation altogether. A bare
# name means the documented one.
_FUNCTIONAL_ONLY = frozenset(
    {
        "batch_norm",
        "binary_cross_entropy_with_logits",
        "cosine_embedding_loss",
        "ctc_loss",
        "embedding",
        "embedding_bag",
        "hinge_embedding_loss",
        "instance_norm",
        "kl_div",
        "margin_ranking_loss",
        "poisson_nll_loss",
        "triplet_margin_loss",
        "unfold",
    }
)


def is_dotted(name: str) -> bool:
    """Whether ``name`` means exactly one function."""
    return "." in name


def is_module_function(name: str) -> bool:
    """Whether ``name`` means a function in plain Python, which is replaced in its module."""
    return ":" in name


def automatic_names(name: str) -> tuple[str, ...]:
    """The bare names that the bare name ``name`` covers by itself: its in-place form and its operators."""
    in_place = () if name.endswith("_") else (f"{name}_",)
    return (*in_place, *_OPERATORS.get(name, ()))


def base_names(name: str) -> tuple[str, ...]:
    """The bare names that cover ``name`` by themselves: ``add`` for ``add_`` and ``__iadd__``."""
    bases = [base for base, forms in _OPERATORS.items() if name in forms]
    if name.endswith("_") and not name.startswith("__"):
        bases.append(name[:-1])
    return tuple(bases)


def bare_functions(name: str) -> list[Function]:
    """The torch functions of this bare name, without its automatic forms."""
    import torch
    import torch.nn.functional as F

    from hyper_parallel.torch_compat import private_functions

    if name.startswith("__"):
        homes: tuple[Any, ...] = (torch.Tensor,)  # modules and classes have special methods too
    elif name in _FUNCTIONAL_ONLY:
        homes = (F,)
    else:
        homes = (torch, torch.Tensor, F, torch.special)
    functions = _attributes(homes, name)
    # These come last, because a namesake in torch can mean something else: torch.linalg.diagonal has other defaults
    # than torch.diagonal, and the private module holds the inner halves of many functions of torch.nn.functional.
    return functions or _attributes((private_functions()[0], torch.linalg, torch.fft), name)


def dotted_function(name: str) -> Function | None:
    """The function of this dotted name, or None while its module is not imported or does not have it."""
    parts = (f"torch.{name}" if name.startswith("Tensor.") else name).replace(":", ".").split(".")
    owner: Any = None
    used = 0
    for length in range(len(parts) - 1, 0, -1):
        owner = sys.modules.get(".".join(parts[:length]))
        if owner is not None:
            used = length
            break
    for part in parts[used:]:
        owner = getattr(owner, part, None)
    return _callable_form(owner)


def lookup_forms(function: Function) -> Iterator[Function]:
    """What to look up for a function that arrived: itself, then the packet of an operator overload."""
    yield function
    packet = getattr(function, "overloadpacket", None)
    if packet is not None:
        yield packet


def name_of_served(function: Any) -> str | None:
    """The name in rules of an ``apply`` that was replaced; None for every other function."""
    return getattr(function, SERVED_NAME, None)


def aten_binding(function: Function) -> Function | None:
    """The function of PyTorch's Python layer that an operator of ``torch.ops.aten`` is, with the same arguments: of
    ``aten.add_.Tensor`` torch.Tensor's ``add_``, of ``aten.silu`` that of ``torch._C._nn``. None where there is none.
    """
    import torch

    from hyper_parallel.torch_compat import private_functions

    packet: Any = [*lookup_forms(function)][-1]
    namespace, _, name = getattr(packet, "_qualified_op_name", "").partition("::")
    if namespace != "aten":
        return None
    overloads = [function] if hasattr(function, "overloadpacket") else [getattr(packet, o) for o in packet.overloads()]
    homes = (torch, torch.Tensor, *private_functions())
    return next((f for f in _attributes(homes, name) if all(_takes_arguments_of(f, o) for o in overloads)), None)


def _takes_arguments_of(function: Function, overload: Any) -> bool:
    """Whether a function takes the arguments of an overload in its order; only those written in Python may not."""
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return all(a.name == name for a, name in zip(overload._schema.arguments[1:], named[1:], strict=False))


def display_name(function: Function) -> str:
    """The name under which a user knows a function: ``torch.nn.functional.linear``, ``torch.Tensor.T.__get__``."""
    name = getattr(function, "__name__", None) or repr(function)
    if isinstance(function, types.MethodWrapperType):  # the getter or setter of a property
        return f"torch.Tensor.{getattr(function.__self__, '__name__', '?')}.{name}"
    if isinstance(function, types.MethodDescriptorType | types.WrapperDescriptorType):
        return f"torch.Tensor.{name}"
    if hasattr(function, "_qualified_op_name"):
        return f"torch.ops.{function._qualified_op_name.replace('::', '.')}"
    if hasattr(function, "overloadpacket"):
        return f"torch.ops.{function!s}"
    import torch
    import torch.nn.functional as F

    for home in (torch, F, torch.special, torch.linalg, torch.fft, torch.Tensor):
        # Some functions carry their home in front of their name: torch.linalg.norm is linalg_norm.
        short = home.__name__.rpartition(".")[2]
        for attribute in (name, name.removeprefix(f"{short}_")):
            if getattr(home, attribute, None) is function:
                return f"torch.Tensor.{attribute}" if home is torch.Tensor else f"{home.__name__}.{attribute}"
    module = getattr(function, "__module__", None)
    return f"{module}.{getattr(function, '__qualname__', name)}" if module else name


def _attributes(homes: tuple[Any, ...], name: str) -> list[Function]:
    found: list[Function] = []
    for home in homes:
        function = _callable_form(getattr(home, name, None))
        if function is not None and function not in found:
            found.append(function)
    return found


def _callable_form(attribute: Any) -> Function | None:
    """What arrives in ``__torch_function__`` when ``attribute`` is called or, if it is a property, read."""
    if isinstance(attribute, property | types.GetSetDescriptorType):
        return attribute.__get__
    if isinstance(attribute, type | types.ModuleType) or not callable(attribute):
        return None
    return attribute
