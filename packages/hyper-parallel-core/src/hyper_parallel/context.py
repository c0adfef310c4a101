"""Switches that hold inside a ``with`` block: what to do when inputs do not match, and how to treat plain tensors.

They are kept per thread, nest, and are restored when the block raises.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from hyper_parallel import torch_compat

__all__ = ["SkipDTensorDispatch", "implicit_replication", "redistribute_policy"]

Policy = Literal["partial", "auto", "strict"]


@dataclass(frozen=True, eq=False)
class Mode:
    """The switches in force. Equal modes are the same object, so a mode is a cheap part of a cache key."""

    policy: Policy = "partial"
    replicate_plain: bool = False
    skip: bool = False


_modes: dict[tuple[object, ...], Mode] = {}


def _interned(mode: Mode) -> Mode:
    return _modes.setdefault((mode.policy, mode.replicate_plain, mode.skip), mode)


class _State(threading.local):
    mode: Mode = _interned(Mode())
    # Stands for the outermost call of a parallelised module that runs; None outside of such calls.
    call: _ModuleCall | None = None


state = _State()


class _Switched:
    """Context manager with some switches changed; it may be entered again and again, nested too."""

    __slots__ = ("changes", "outer")

    def __init__(self, **changes: object) -> None:
        self.changes = changes
        self.outer: list[Mode] = []

    def __enter__(self) -> None:
        outer = state.mode
        self.outer.append(outer)
        state.mode = _with(outer, *self.changes.items())

    def __exit__(self, *error: object) -> None:
        state.mode = self.outer.pop()


@cache
def _with(mode: Mode, *changes: tuple[str, object]) -> Mode:
    return _interned(replace(mode, **dict(changes)))  # type: ignore[arg-type]


def redistribute_policy(policy: Policy) -> AbstractContextManager[None]:
    """What happens when an operator's inputs match none of its strategies.

    Args:
        policy: ``"partial"`` (the default everywhere) reduces a pending sum that an operator needs and raises for every
            other mismatch; ``"auto"`` redistributes, cheapest first; ``"strict"`` raises always. Steps that need no
            communication (Replicate to Shard or Partial) are taken in all three.

    It holds in the thread that enters it. The backward on accelerators has threads of its own, so a block around
    ``backward()`` does not reach the forward that activation checkpointing runs again there: put the block inside of
    the function that is checkpointed.

    Raises:
        ValueError: for any other word.
    """
    if policy not in ("partial", "auto", "strict"):
        raise ValueError(f"redistribute_policy takes 'partial', 'auto' or 'strict', got {policy!r}")
    return _Switched(policy=policy)


def implicit_replication() -> AbstractContextManager[None]:
    """Inside, and in every backward, a plain tensor that meets a DTensor counts as Replicate: all ranks must hold the
    same."""
    return _Switched(replicate_plain=True)


def SkipDTensorDispatch() -> AbstractContextManager[None]:
    """Inside, DTensors act as their local tensors: operators run on the local pieces and return plain tensors."""
    return _Switched(skip=True)


@contextmanager
def module_call() -> Iterator[None]:
    """The call of a parallelised module. What is computed of its parameters for it, it keeps until it returns; calls
    inside of it are part of it."""
    caller = object()
    open_call(caller)
    try:
        yield
    finally:
        close_call(caller)


class _ModuleCall:
    __slots__ = ("caller",)

    def __init__(self, caller: object) -> None:
        self.caller = caller


def open_call(caller: object, *_: Any) -> None:
    """Begin the call of a parallelised module, if none runs; also as a forward pre-hook."""
    if state.call is None:
        state.call = _ModuleCall(caller)


def close_call(caller: object, *_: Any) -> None:
    """End the call that ``caller`` began; also as a forward hook."""
    if state.call is not None and state.call.caller is caller:
        state.call = None


def in_backward() -> bool:
    """Whether the autograd engine runs this: an operator's backward, a hook, or a forward that is computed again."""
    return torch_compat.current_task() >= 0
