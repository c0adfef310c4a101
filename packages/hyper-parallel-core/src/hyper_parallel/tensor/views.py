"""Results that share memory with another tensor on one device: views here too, or redistributed copies.

A copy is written to all the same: what was written is carried to the tensor that it shows. While a copy lives nothing
else may write to that tensor, as the copy would not change with it. Where neither holds the write is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hyper_parallel.context import redistribute_policy
from hyper_parallel.tensor.dtensor import DTensor


def root_of(tensor: DTensor) -> DTensor:
    """The DTensor of which this one is a view; itself when it is none."""
    return tensor if tensor._base_dtensor is None else tensor._base_dtensor


def note_view(view: DTensor, base: Any) -> None:
    """Whose view a view is."""
    if not isinstance(base, DTensor):
        return
    root = base if base._base_dtensor is None else base._base_dtensor
    view._base_dtensor = root
    if len(root._views) % 64 == 0:  # a parameter is transposed again and again
        root._views = [other for other in root._views if other() is not None]
    root._views.append(weakref.ref(view))


def note_copies(copies: Sequence[DTensor], base: Any, name: str, write: Callable[[int, DTensor], None] | None) -> None:
    """That the results of function ``name`` are copies, of parts of ``base`` that do not overlap, where one device has
    views.

    Args:
        write: called with the position of a result and the result, writes it to ``base``; None where it cannot be.
    """
    siblings = object() if len(copies) > 1 else None
    for position, copy in enumerate(copies):
        copy._copied_by, copy._siblings = name, siblings
        if not isinstance(base, DTensor):
            continue
        copy._copy_of = root_of(base)
        copy._shows = None if write is None else partial(write, position)
        source: DTensor | None = copy._copy_of
        while source is not None:  # a copy of a copy would on one device be a view of the first tensor too
            source._copies = [*(other for other in source._copies if other() is not None), weakref.ref(copy)]
            source = source._copy_of


def has_copies(tensor: DTensor) -> bool:
    """Whether a write to it has to be carried, or is refused: on one device it shares memory with a tensor of which it
    is a redistributed copy here, or that is one of it."""
    root = root_of(tensor)
    return root._copied_by is not None or any(copy() is not None for copy in root._copies)


def _carried_to(root: DTensor) -> list[DTensor]:
    """The tensor itself, and those to which a write to it is carried, one after the other."""
    found = [root]
    while found[-1]._shows is not None and found[-1]._copy_of is not None:
        found.append(found[-1]._copy_of)
    return found


def refuse_lost_write(root: DTensor, carried: bool) -> None:
    """Raise RuntimeError where a write would not be seen by all that share the memory on one device.

    Args:
        root: what is written, itself no view.
        carried: whether :func:`carry` follows.
    """
    written = _carried_to(root) if carried else [root]
    siblings = {id(tensor._siblings) for tensor in written if tensor._siblings is not None}
    for copy in (ref() for tensor in written for ref in tensor._copies):
        if copy is not None and id(copy._siblings) not in siblings and not any(copy is tensor for tensor in written):
            raise RuntimeError(
                f"in-place write to a tensor of which {copy._copied_by}() gave a redistributed copy, which on one "
                "device is a view and would change with it: redistribute the tensor before the view is taken, "
                "clone() the view, or drop it before the write"
            )
    name = written[-1]._copied_by
    if name is not None:
        raise RuntimeError(
            f"in-place write to the result of {name}(), which here is a redistributed copy and not a view: the write "
            "would be lost. Redistribute the tensor before the view is taken, or clone() the result if only the copy "
            "is to change"
        )


def assign(target: DTensor, index: Any, value: DTensor, write: Callable[[], None]) -> None:
    """``target[index] = value``, done by ``write``, where ``value`` is a redistributed copy.

    ``target[index] += 1`` is a read, a write to what was read, and this. :func:`carry` has brought that write to
    ``target`` already, by an assignment of its own, for which the copy is not among those of ``target``.

    A copy of another part of ``target`` may be assigned while it lives: it would not change, as PyTorch copies nothing
    from a tensor to itself where the parts overlap.
    """
    if _is_part(target, index, value) and any(ref() is value for ref in root_of(target)._copies):
        return
    with _without_copies(_carried_to(value)[1:], only=value):
        write()


def _is_part(target: DTensor, index: Any, value: DTensor) -> bool:
    """Whether a copy is what ``target[index]`` gave."""
    if value._shows is None:
        return False
    func, args, *_ = value._shows.args  # of the carry_write that note_copies got, which begin with the call
    return func is torch.Tensor.__getitem__ and args[0] is target and _is_same_index(index, args[1])


def _is_same_index(index: Any, other: Any) -> bool:
    if isinstance(index, tuple) and isinstance(other, tuple):
        return len(index) == len(other) and all(a is b for a, b in zip(index, other, strict=True))
    return index is other


@contextmanager
def _without_copies(sources: Sequence[DTensor], only: DTensor | None = None) -> Iterator[None]:
    """For a while these tensors do not know of their copies, or of only one of them."""
    before = [source._copies for source in sources]
    for source, copies in zip(sources, before, strict=True):
        source._copies = () if only is None else [ref for ref in copies if ref() is not only]
    try:
        yield
    finally:
        for source, copies in zip(sources, before, strict=True):
            source._copies = copies


def carry(copy: DTensor) -> None:
    """Write a copy that was written to where it is shown; on one device it is a view of that."""
    if copy._shows is None:
        return
    # refuse_lost_write has looked at the copies.
    with _without_copies(_carried_to(copy)[1:]), redistribute_policy("auto"):
        copy._shows(copy)
