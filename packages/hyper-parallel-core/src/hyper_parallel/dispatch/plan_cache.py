"""The plans of all functions, kept within one number of bytes; the least recently used go first.

A warm call is one look-up in a plain dictionary and leaves no trace, so nobody notes which plans are used. Instead
there are two generations. New plans go into the young one. When it has filled half of the bytes, the young generation
becomes the old one, and what was old is dropped. A plan that is asked for and is old becomes young again: what is used
between two such turns stays.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

__all__ = ["PlanBudget", "PlanCache", "default_budget"]

LIMIT = 64 * 2**20
# A plan with its solution, specs and closures: the Python objects take 1 KB; the meta tensors of new specs come on top.
_PLAN = 3072
_PART_OF_KEY = 48


class PlanCache:
    """The plans of one function.

    Attributes:
        made: plans ever made; one that is recalled is not made again.
    """

    __slots__ = ("__weakref__", "budget", "made", "old", "young")

    def __init__(self, budget: PlanBudget | None = None) -> None:
        self.budget = budget or default_budget
        self.made = 0
        self.young: dict[Any, Any] = {}  # the same dictionary for ever, for whoever looks up in it directly
        self.old: dict[Any, Any] = {}

    def recall(self, key: Any) -> Any:
        """An old plan, which becomes young again; None where there is none."""
        plan = self.old.pop(key, None)
        if plan is not None:
            self._keep(key, plan)
        return plan

    def remember(self, key: Any, plan: Any) -> None:
        """Keep a new plan for calls with this key."""
        self.made += 1
        self._keep(key, plan)

    def _keep(self, key: Any, plan: Any) -> None:
        self.budget.spend(self, size_of(key))
        self.young[key] = plan

    def turn(self) -> None:
        """The young generation becomes the old one."""
        self.old = self.young.copy()
        self.young.clear()


class PlanBudget:
    """What the plans of several functions take together.

    Attributes:
        limit: bytes that both generations may take.
        spent: bytes that the young one takes.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.spent = 0
        self._caches: weakref.WeakSet[PlanCache] = weakref.WeakSet()

    def spend(self, cache: PlanCache, size: int) -> None:
        """Count a new plan, after making room for it where there is none."""
        if self.spent + size > self.limit // 2:
            for each in list(self._caches):
                each.turn()
            self.spent = 0
        self._caches.add(cache)
        self.spent += size


def size_of(key: Any) -> int:
    """Bytes that a plan takes with its key, about."""
    return _PLAN + sys.getsizeof(key) + _PART_OF_KEY * len(key)


default_budget = PlanBudget()
