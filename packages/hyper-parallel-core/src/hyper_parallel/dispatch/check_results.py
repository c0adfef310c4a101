"""Checks made while a program runs: local tensors are what DTensors state, remembered forms what they would be now.

With ``HYPER_PARALLEL_CHECK=1`` in the environment they are made in the whole program, with :func:`check_results` in a
block. They are put into the places that they watch and taken out again, so a program without them pays nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hyper_parallel import _wiring
from hyper_parallel.comm import primitives
from hyper_parallel.comm.redistribute import Redistribution, describe, move_of, moved
from hyper_parallel.comm.trace import described
from hyper_parallel.context import state
from hyper_parallel.errors import ResultCheckError
from hyper_parallel.sharding.spec import Spec
from hyper_parallel.sharding.stated import difference
from hyper_parallel.tensor.autograd_bridge import InFlight
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.tensor.redistribute_cache import Origin, RememberedForm
from hyper_parallel.utils.structures import tensors_of

__all__ = ["check_results"]

VARIABLE = "HYPER_PARALLEL_CHECK"


@contextmanager
def check_results() -> Iterator[None]:
    """Inside, verify on every rank that DTensors are what they say; for finding out which operator is at fault.

    After each operator the local tensors of its results, and of what it was given, must have the shape, stride and
    dtype that their DTensors state. That needs no communication: the error is raised on the ranks that see it.

    Each time when a form of a tensor that was computed before (gathered, reduced, in another placement) is used again,
    it is computed anew, and must be the same. That costs what the form saved, and one all-reduce of a number, so that
    the error is raised on every rank of the mesh. It finds data that was changed behind PyTorch's back: by a kernel
    that raises no version counter, or through a pointer.

    The block holds for all threads of the process, and all ranks have to enter it alike. ``HYPER_PARALLEL_CHECK=1`` in
    the environment does the same for a whole program.

    Raises:
        ResultCheckError: from the operator, with its name, the layouts, what was stated and what came.
    """
    _wiring.load_dispatcher()  # it gives DTensor the function that is watched

    _install()
    try:
        yield
    finally:
        _remove()


def for_the_whole_program() -> None:
    """Make the checks from now on where the environment asks for them."""
    if os.environ.get(VARIABLE) == "1":
        _install()


_lock = threading.Lock()
_before: list[tuple[type, str, Any]] = []  # what was in the places that are watched
_depth = 0


def _install() -> None:
    global _depth
    with _lock:
        _depth += 1
        if _depth > 1:
            return
        places: list[tuple[type, str, Callable[[Any], Any]]] = [
            (DTensor, "__torch_function__", _with_checked_results),
            (RememberedForm, "is_current", _with_checked_form),
            (Origin, "is_current", _with_checked_origin),
        ]
        for owner, name, checked in places:
            _before.append((owner, name, owner.__dict__[name]))
            setattr(owner, name, checked(owner.__dict__[name]))


def _remove() -> None:
    global _depth
    with _lock:
        _depth -= 1
        while _before and _depth == 0:
            setattr(*_before.pop())


# -- results ------------------------------------------------------------------------------------------------------


def _with_checked_results(torch_function: Any) -> Any:
    call = torch_function.__func__

    def checked(cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = call(cls, func, types, args, kwargs)
        if not state.mode.skip:
            _check(func, "a result", result, (args, kwargs))
            _check(func, "an argument, after the call,", [list(args), kwargs], (args, kwargs))
        return result

    return classmethod(checked)


def _check(func: Any, what: str, value: Any, given: Any) -> None:
    for tensor in tensors_of(value):
        if not isinstance(tensor, DTensor) or isinstance(tensor._pending, InFlight):
            continue
        wrong = difference(tensor._local, tensor._spec)
        if wrong is not None:
            name = getattr(func, "__name__", None) or str(func)
            lines = [f"{name}: the local tensor of {what} has {wrong}", f"  it is {_said(tensor._spec)}"]
            lines += [f"  the call was given {_said(t._spec)}" for t in tensors_of(given) if isinstance(t, DTensor)]
            lines += [
                f"  fix: if the rule of {name} is yours, let it return hyper_parallel.rules.as_stated(local, spec)"
            ]
            raise ResultCheckError("\n".join(lines), op_name=name, layouts=[tensor.layout])


def _said(spec: Spec) -> str:
    return (
        f"{tuple(spec.shape)} of {str(spec.dtype).removeprefix('torch.')} with stride {spec.stride}, {spec.layout}; "
        f"here {spec.local_shape}"
    )


# -- remembered forms ---------------------------------------------------------------------------------------------


def _with_checked_form(is_current: Any) -> Any:
    def checked(form: RememberedForm, tensor: DTensor) -> bool:
        current: bool = is_current(form, tensor)
        if current:
            old, new = tensor._spec, form.result._spec
            move = move_of((old.layout, old.varying), (new.layout, new.varying), old.shape, old.memory_order)
            _compare(tensor._resolve(), move, form.result._resolve())
        return current

    return checked


def _with_checked_origin(is_current: Any) -> Any:
    def checked(origin: Origin, result: torch.Tensor) -> bool:
        current: bool = is_current(origin, result)
        if current:
            _compare(origin.local, origin.move, result)
        return current

    return checked


def _compare(source: torch.Tensor, move: Redistribution, form: torch.Tensor) -> None:
    """Raise, on every rank of the mesh, where what was remembered on one of them is not what would come now."""
    if source.is_meta:
        return
    layout = move.src[0]
    info = layout.info
    change = f"{describe(layout)} -> {describe(move.dst[0])}"
    with torch.no_grad(), described(f"check of {change}"):
        anew = moved(source.detach(), move)
        stale = torch.tensor(int(not _same(anew, form.detach())), device=info.default_device())
        everyone = info.group(tuple(range(info.ndim)))
        if everyone.size > 1:
            primitives.all_reduce(stale, everyone, "max")
    if int(stale):
        raise ResultCheckError(
            f"a remembered form ({change}) of a tensor of shape {tuple(move.shape)}, {layout}, is not what would be "
            "computed now: the data of one of the two was changed where PyTorch's version counter does not see it\n"
            "  fix: let what writes it be an operator of PyTorch, or call forget_forms() on the tensor after the write",
            op_name="redistribute",
            layouts=[layout, move.dst[0]],
        )


def _same(anew: torch.Tensor, form: torch.Tensor) -> bool:
    """Whether two results of one redistribution are equal, up to sums in another order."""
    if anew.shape != form.shape or anew.dtype is not form.dtype:
        return False
    if not (anew.is_floating_point() or anew.is_complex()):
        return torch.equal(anew, form)
    near = 16 * torch.finfo(anew.dtype).eps
    largest = float(anew.abs().nan_to_num(0, 0, 0).max()) if anew.numel() else 0.0
    return torch.allclose(anew, form, rtol=near, atol=near * largest, equal_nan=True)
