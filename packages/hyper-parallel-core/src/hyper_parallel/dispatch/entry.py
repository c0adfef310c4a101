"""What serves one torch function: the rule, what of its arguments counts, and the plans made so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel._rules.op import DistributedOp
from hyper_parallel._rules.strategy import LayoutOp
from hyper_parallel.dispatch.cache_key import kinds_by_value
from hyper_parallel.dispatch.plan_cache import PlanCache


class DispatchEntry:
    """One torch function and the rule that serves it, with the plans made so far."""

    __slots__ = (
        "by_value",
        "cache",
        "flag_at",
        "func",
        "grad_placements",
        "inplace",
        "name",
        "op",
        "plans",
        "use_reduced",
    )

    def __init__(self, func: Callable[..., Any], op: DistributedOp, name: str) -> None:
        self.func, self.op, self.name = func, op, name
        generic = not isinstance(op, LayoutOp)
        # Which numbers can change a layout.
        self.by_value = kinds_by_value(generic or op.scalars_matter, not generic and op.floats_matter)  # type: ignore[attr-defined]
        self.inplace = is_inplace(name)
        self.flag_at = flag_position(func)
        # A view must be of the tensor itself, so that writes reach it.
        self.use_reduced = not self.inplace and not generic and not op.makes_views  # type: ignore[attr-defined]
        self.grad_placements: Any = None  # a DFunction's own word on its inputs' gradients
        self.plans = PlanCache()
        self.cache = self.plans.young  # what a warm call looks into

    def remember(self, key: Any, plan: Any) -> None:
        """Keep a plan for calls with this key."""
        self.plans.remember(key, plan)

    def recall(self, key: Any) -> Any:
        """A plan that the cache has not, but that was made some time ago; None where it was dropped since."""
        return self.plans.recall(key)


def is_inplace(name: str) -> bool:
    """Whether a torch function of this name writes its first argument: ``add_``, ``__iadd__``."""
    if name.startswith("__"):
        return (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")) or name == "__setitem__"
    return name.endswith("_")


def flag_position(func: Callable[..., Any]) -> int | None:
    """Position of an ``inplace`` argument, as functions of ``torch.nn.functional`` have."""
    code = getattr(func, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names.index("inplace") if "inplace" in names else None


def is_asked(args: Sequence[Any], kwargs: dict[str, Any], position: int) -> bool:
    """Whether a call with an ``inplace`` argument is to write its first one."""
    return bool(args[position] if len(args) > position else kwargs.get("inplace"))
