"""Memory that code outside of this library may write without our seeing it.

Autograd's version counter tells of writes by operators. It does not tell of a fused optimizer kernel, a collective, a
write through ``.data``, NumPy, DLPack or a pointer; so what was computed of a tensor is kept (see
:mod:`hyper_parallel.tensor.redistribute_cache`) by who can reach its memory, not only by its version:

* a leaf (a parameter, a buffer, what ``from_local`` and ``distribute_tensor`` took) belongs to its owner;
* of any other tensor the memory is ours, until the user is given it.

Notes are made on memory and not on tensors, as views and detached tensors share it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.sharding.placements import Placement
    from hyper_parallel.tensor.dtensor import DTensor

__all__ = ["Gifts", "is_given", "is_leaf_memory", "local_of", "memory_of", "note_given", "note_leaf"]

# Set by nn.Parameter and nn.Buffer.
_REGISTERED = frozenset(["_is_param", "_is_buffer"])

_leaves: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
_given: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def memory_of(local: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor, as the object that all who share it get; None where it is not one piece (sparse)."""
    try:
        return local.untyped_storage()
    except NotImplementedError:
        return None


def note_leaf(local: torch.Tensor) -> None:
    """That a tensor was made by its owner, who may hold its memory in other ways."""
    memory = memory_of(local)
    if memory is not None:
        _leaves.add(memory)


class Gifts:
    """``count`` tells how often the user was given memory, so that who has looked need not look again."""

    count = 0


def note_given(local: torch.Tensor) -> None:
    """That the user was given a tensor, and may write to it from now on."""
    memory = memory_of(local)
    if memory is not None:
        _given.add(memory)
        Gifts.count += 1


def is_given(memory: torch.UntypedStorage | None) -> bool:
    """Whether the user was given this memory."""
    return memory is None or memory in _given


def is_leaf_memory(tensor: DTensor) -> bool:
    """Whether a tensor is a leaf that has an owner, or shares the memory of one."""
    local = tensor._local
    if (local.requires_grad and local.is_leaf) or not _REGISTERED.isdisjoint(tensor.__dict__):
        return True
    return memory_of(local) in _leaves


def local_of(tensor: DTensor, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """This rank's piece for an operator or style of this library, connected to the autograd graph.

    As :meth:`DTensor.to_local`, but the user is not given the memory: what was computed of the tensor in other layouts
    stays. Whoever calls this neither writes to the piece other than by torch operators, nor hands it to code of users
    as more than the plain tensor that a style passes on.
    """
    return tensor._piece(grad_placements)
