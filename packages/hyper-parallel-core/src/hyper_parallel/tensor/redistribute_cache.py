"""A DTensor in another layout, with what has been computed for it already.

Two things are remembered, each while the data does not change: the forms of a tensor that were computed
(:class:`RememberedForm`; q, k and v projections that share one input make one collective), and what a tensor was
redistributed from (:class:`Origin`; a gathered tensor that is used as varying has one reduce-scatter as its backward).

Writes that nobody sees (:mod:`hyper_parallel.tensor.given_memory`) must not meet a form from before them:

* A form that differs in the gradient only is a view, and shows every write.
* Another form of a *leaf* ends with the call of the parallelised module that made it; outside of such a call none is
  kept. No step of an optimizer has to be noticed.
* Another form of an *activation* ends with the call that made it too. Outside of calls it stays. It ends when the user
  is given the memory of the activation or its own.
"""

from __future__ import annotations

import torch

from hyper_parallel.comm.redistribute import PLAIN, How, Redistribution, move_of, moved, target_spec
from hyper_parallel.context import state
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.placements import is_replicate
from hyper_parallel.sharding.spec import Spec
from hyper_parallel.tensor.autograd_bridge import InFlight
from hyper_parallel.tensor.dtensor import DTensor, wrap
from hyper_parallel.tensor.given_memory import Gifts, is_given, is_leaf_memory, memory_of

__all__ = ["convert", "form_of", "reduced_form", "remember", "remembered"]


def convert(tensor: DTensor, spec: Spec, how: How | None = None) -> DTensor:
    """The tensor in another spec of the same shape; itself when nothing changes."""
    old, casts = tensor._spec, how is not None and how.dtypes is not None
    if spec is old and not casts:
        return tensor
    local = tensor._local if tensor._pending is None else tensor._resolve()
    origin = tensor._origin
    if (
        origin is not None
        and old.layout is spec.layout
        and not casts
        and torch.is_grad_enabled()
        and origin.is_current(local)
    ):
        # Used as varying after a redistribution: one node from where it came from, with the value we have already.
        how = How(value=local.detach())
        local, move = origin.local, move_of(origin.move.src, (spec.layout, spec.varying), old.shape, old.memory_order)
    else:
        move = old.moves.get(spec) or _move_between(old, spec)
    local_result = moved(local, move, PLAIN if how is None else how)
    result = wrap(local_result, spec)
    if how is not None and how.pending is not None:
        result._pending = InFlight(how.pending, result._pending)
    if move.src[0] is not move.dst[0] and local_result.requires_grad and not casts:
        result._origin = Origin(local, move, local_result)
    return result


def _move_between(old: Spec, new: Spec) -> Redistribution:
    src, dst = (old.layout, old.varying), (new.layout, new.varying)
    move = old.moves[new] = move_of(src, dst, old.shape, old.memory_order)
    return move


class Origin:
    """What a tensor was redistributed from: a later use as varying starts from there, unless one of the two changed."""

    __slots__ = ("local", "move", "versions")

    def __init__(self, local: torch.Tensor, move: Redistribution, result: torch.Tensor) -> None:
        self.local, self.move = local, move
        self.versions = (local._version, result._version)

    def is_current(self, result: torch.Tensor) -> bool:
        """Whether neither was written to since."""
        return self.local.requires_grad and self.versions == (self.local._version, result._version)

    def completed(self, result: torch.Tensor) -> None:
        """The result arrived, which counted as a write to it."""
        self.versions = (self.versions[0], result._version)


class RememberedForm:
    """A tensor in another layout, computed once.

    What decides whether it is current is the same on all ranks: a write counts on each of them
    (:func:`hyper_parallel.tensor.in_place.before_write`), also on those that hold nothing of what is written, and
    whether it is a view follows from the layouts.
    """

    __slots__ = (
        "call", "gifts", "grad", "is_view", "memory", "needed", "of_leaf", "offset", "own", "result", "spec", "version",
    )  # fmt: skip

    def __init__(self, tensor: DTensor, result: DTensor, of_leaf: bool) -> None:
        local = tensor._local
        self.result, self.spec, self.grad = result, tensor._spec, torch.is_grad_enabled()
        self.needed, self.version, self.own = local.requires_grad, local._version, result._local._version
        self.memory, self.offset = memory_of(local), local.storage_offset()
        self.is_view = result._spec.layout is tensor._spec.layout
        self.of_leaf, self.call, self.gifts = of_leaf, state.call, -1

    def is_current(self, tensor: DTensor) -> bool:
        """Whether it is what would be computed now."""
        local = tensor._local
        return (
            self.spec is tensor._spec
            and self.grad == torch.is_grad_enabled()
            and self.needed == local.requires_grad
            and self.version == local._version
            and self.own == self.result._local._version
            and self.memory is not None
            and self.memory is local.untyped_storage()
            and self.offset == local.storage_offset()
            and (self.is_view or self._is_ours())
        )

    def _is_ours(self) -> bool:
        """Whether nobody can have written to the tensor, or to this form, without our seeing it."""
        if self.call is not None and self.call is not state.call:
            return False
        if self.gifts != Gifts.count:
            if (not self.of_leaf and is_given(self.memory)) or is_given(memory_of(self.result._local)):
                return False
            self.gifts = Gifts.count
        return True

    def completed(self) -> None:
        """The result arrived, which counted as a write to it."""
        self.own = self.result._local._version


def remembered(
    tensor: DTensor, layout: Layout, varying: frozenset[int] | None = None, *, in_flight: bool = False
) -> DTensor:
    """As :func:`convert`, computed once per tensor while its data does not change.

    Args:
        tensor: the tensor.
        layout: the layout wanted.
        varying: axes on which the gradient is wanted in terms; None keeps what there is.
        in_flight: return while a collective is running; the first use waits.
    """
    local = tensor._resolve()
    old = tensor._spec
    if local.is_inference():  # has no version that would tell of writes
        return convert(tensor, target_spec(old, layout, varying))
    if varying is None:
        varying = frozenset(a for a in old.varying if is_replicate(layout.placements[a]))
    memo = tensor._memo
    if memo is None:
        memo = tensor._memo = {}
    key = (id(layout), varying, torch.is_grad_enabled(), local.requires_grad)
    form: RememberedForm | None = memo.get(key)
    if form is not None and form.is_current(tensor):
        return form.result
    spec = target_spec(old, layout, varying)
    if spec is old:
        return tensor
    result = convert(tensor, spec, How(want_pending=True) if in_flight else None)
    if result._local.is_inference():
        return result
    of_leaf = is_leaf_memory(tensor)
    if of_leaf and state.call is None and layout is not old.layout:
        return result
    memo[key] = form = RememberedForm(tensor, result, of_leaf)
    if isinstance(result._pending, InFlight):
        result._pending.form = form
    if old.layout.is_partial() and not layout.is_partial() and layout.shard_order == old.layout.shard_order:
        tensor._reduced = form
    return result


def form_of(tensor: DTensor, spec: Spec) -> DTensor | None:
    """The form of a tensor in another spec, where one is remembered and current."""
    form = None if tensor._memo is None else tensor._memo.get(_key(tensor, spec))
    return form.result if form is not None and form.is_current(tensor) else None


def remember(tensor: DTensor, result: DTensor) -> None:
    """Keep a form of a tensor that differs in its gradient type only, as :func:`remembered` would."""
    if tensor._memo is None:
        tensor._memo = {}
    tensor._memo[_key(tensor, result._spec)] = RememberedForm(tensor, result, is_leaf_memory(tensor))


def _key(tensor: DTensor, spec: Spec) -> tuple[int, frozenset[int], bool, bool]:
    return id(spec.layout), spec.varying, torch.is_grad_enabled(), tensor._resolve().requires_grad


def reduced_form(tensor: DTensor) -> DTensor:
    """A pending reduction that was carried out once, in its reduced form while that is current; else the tensor
    itself."""
    form = tensor._reduced
    return tensor if form is None or not form.is_current(tensor) else form.result
