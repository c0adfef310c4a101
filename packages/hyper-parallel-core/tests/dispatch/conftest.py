"""Counters of what the dispatcher does in a call."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.dispatch import dispatcher, rewriting


class CountingCache(dict):
    """A cache of plans that counts how often it is asked."""

    lookups = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.lookups += 1
        return super().get(key, default)


class Counter:
    """Look-ups and new plans of a function, since the last time that :meth:`of` was called for it."""

    def __init__(self) -> None:
        self.plans_made = 0

    def of(self, operator: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Look-ups and new plans of one call."""
        entry = dispatcher.known_rule(operator)
        if entry is None:  # the first call of all finds the rule
            dispatcher._rules[operator] = entry = dispatcher.rule_of(operator)
        before = self.plans_made
        entry.plans.young = entry.cache = counting = CountingCache(entry.plans.young)
        operator(*args, **kwargs)
        return counting.lookups, self.plans_made - before


@pytest.fixture
def counter(monkeypatch):
    found = Counter()
    make_plan = rewriting.make_plan

    def counted(*args: Any) -> Any:
        found.plans_made += 1
        return make_plan(*args)

    monkeypatch.setattr(rewriting, "make_plan", counted)
    return found
