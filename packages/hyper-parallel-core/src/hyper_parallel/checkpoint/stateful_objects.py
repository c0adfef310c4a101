"""Objects with ``state_dict`` and ``load_state_dict`` in what is saved and loaded. One that fails on one rank fails the
save or load on all, which would wait for this rank otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful

__all__ = ["NothingToLoad", "NothingToSave", "StateDictError", "given_back", "taken"]


class StateDictError(Exception):
    """An object of this rank could not give its state dict, or load one. Its text travels to the other ranks, which
    may not be able to unpickle the error itself."""


def taken(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], StateDictError | None]:
    """The state dict with those of its objects in their places; or what to tell the other ranks, which wait for this
    one in the collectives of the save or load."""
    content: dict[str, Any] = {}
    for name, value in state_dict.items():
        try:
            content[name] = value.state_dict() if isinstance(value, Stateful) else value
        except Exception as error:
            return {}, _failed("state_dict()", name, value, error)
    return content, None


def given_back(state_dict: dict[str, Any], content: Mapping[str, Any]) -> StateDictError | None:
    """Put what was loaded where it was asked for."""
    for name, value in list(state_dict.items()):
        if not isinstance(value, Stateful):
            state_dict[name] = content[name]
            continue
        try:
            value.load_state_dict(content[name])
        except Exception as error:
            return _failed("load_state_dict()", name, value, error)
    return None


def _failed(method: str, name: str, value: Any, error: Exception) -> StateDictError:
    told = StateDictError(f"{method} of {name!r}, a {type(value).__name__}, raised {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


class NothingToSave(DefaultSavePlanner):
    """Tells the other ranks why this one has nothing to save."""

    def __init__(self, failure: Exception) -> None:
        super().__init__()
        self.failure = failure

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        raise self.failure


class NothingToLoad(DefaultLoadPlanner):
    """Tells the other ranks why this one has nothing to load to."""

    def __init__(self, failure: Exception) -> None:
        super().__init__()
        self.failure = failure

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        raise self.failure
