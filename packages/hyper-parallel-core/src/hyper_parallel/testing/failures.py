"""What a test sees when a function run on several ranks does not return on all of them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True)
class RankFailure:
    """One rank's exception, as text: the object itself may not survive the trip between processes.

    Attributes:
        type_name: qualified name of the exception class, e.g. ``"ValueError"``; ``"died"`` for a process that ended.
        message: ``str(exception)``.
        traceback: the formatted traceback, without the frames of the worker.
    """

    type_name: str
    message: str
    traceback: str


class CaseFailed(AssertionError):
    """A case of the conformance kit ended in an exception that is no refusal, its ``__cause__``. ``str()`` names the
    case, what had been found before, and the exception."""


def described(error: BaseException) -> RankFailure:
    """An exception as text, without the frames of the kit that led to the author's code."""
    shown = error.__cause__ or error if isinstance(error, CaseFailed) else error
    text = "".join(traceback.format_exception(type(shown), shown, _without_own_frames(shown.__traceback__)))
    name, module = type(error).__qualname__, type(error).__module__
    return RankFailure(name if module == "builtins" else f"{module}.{name}", str(error), text)


def _without_own_frames(frames: TracebackType | None) -> TracebackType | None:
    own = os.path.dirname(__file__)
    inner = frames
    while inner is not None and os.path.dirname(inner.tb_frame.f_code.co_filename) == own:
        inner = inner.tb_next
    # An error of the kit itself has only own frames, and then they are what the reader needs.
    return inner if inner is not None else frames


class RanksFailed(AssertionError):
    """At least one rank raised or died. ``failures`` maps its number to a `RankFailure`; ``str()`` shows them all."""

    def __init__(self, world_size: int, failures: Mapping[int, RankFailure], note: str = "") -> None:
        self.world_size = world_size
        self.failures = dict(failures)
        self.note = note
        super().__init__(self._describe())

    def texts(self) -> list[str]:
        """What the ranks said, and what was found out about those that did not answer."""
        return [*(failure.message for failure in self.failures.values()), self.note]

    def within(self, before: str, after: str) -> RanksFailed:
        """The same error with text around what it says."""
        self.args = ("\n".join(filter(None, [before, str(self), after])),)
        return self

    def _describe(self) -> str:
        # Ranks that failed alike are shown once: four copies of one traceback hide what is different.
        ranks_by_text: dict[str, list[int]] = {}
        for rank, failure in sorted(self.failures.items()):
            ranks_by_text.setdefault(failure.traceback, []).append(rank)
        parts = [f"{len(self.failures)} of {self.world_size} ranks failed"]
        parts += [f"--- {name_ranks(ranks)} ---\n{text.rstrip()}" for text, ranks in ranks_by_text.items()]
        if self.note:
            parts.append(self.note)
        return "\n".join(parts)


class RanksTimedOut(RanksFailed):
    """Not all ranks returned in time. ``stacks`` maps the number of each late rank to its thread stacks, as text."""

    def __init__(self, world_size: int, timeout: float, stacks: Mapping[int, str], finished: list[int]) -> None:
        self.stacks = dict(stacks)
        parts = [f"{name_ranks(sorted(stacks))} of {world_size} did not return within {timeout:g} s and were stopped"]
        if finished:
            parts.append(f"{name_ranks(sorted(finished))} had returned")
        parts += [f"--- rank {rank} was here ---\n{text.rstrip()}" for rank, text in sorted(stacks.items())]
        self._text = "\n".join(parts)
        super().__init__(world_size, {})

    def texts(self) -> list[str]:
        return list(self.stacks.values())

    def _describe(self) -> str:
        return self._text


class RanksSkipped(Exception):
    """A rank asked for a skip (``pytest.skip``, ``unittest.SkipTest``); the text is its reason."""


class NotSendableError(TypeError):
    """A function, or one of its arguments, cannot be sent to another process."""


def name_ranks(ranks: list[int]) -> str:
    """``rank 3`` or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
