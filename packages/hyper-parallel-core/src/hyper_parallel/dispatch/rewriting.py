"""What is done to the arguments of a call until a plan fits them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel._rules.call import NeedsValue
from hyper_parallel.context import state
from hyper_parallel.dispatch.arguments import lifted, with_value
from hyper_parallel.dispatch.cross_mesh import on_mesh
from hyper_parallel.dispatch.entry import DispatchEntry, is_asked
from hyper_parallel.dispatch.in_place import write_as_terms, write_back
from hyper_parallel.dispatch.plan import Plan, make_plan
from hyper_parallel.dispatch.redistribute_inputs import changed, changed_at_places, with_reduced_forms
from hyper_parallel.errors import RedistributionError
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.tensor.in_place import reduce_in_place


class Rewriting:
    """A call for which the first look-up found no plan that is ready.

    Attributes:
        args, kwargs: the arguments as they are now.
        source: the first argument as the user gave it, of which the result may be a view.
        copied: whether a redistributed copy is in the place of ``source``.
        before: the plan whose changes were applied; what it decided holds.
        result: of a call that was served without a plan.
    """

    __slots__ = ("args", "before", "copied", "kwargs", "result", "rule", "source")

    def __init__(self, rule: DispatchEntry, args: Sequence[Any], kwargs: dict[str, Any] | None) -> None:
        self.rule, self.args, self.kwargs = rule, args, kwargs or {}
        self.source = args[0] if args else None
        self.copied = False
        self.before: Plan | None = None
        self.result: Any = None

    def step(self, plan: Plan | None, lookup: Any, local_args: list[Any], local_kwargs: Any) -> Plan | None:
        """Rewrite the arguments once: of the steps below, the first that applies.

        Args:
            plan: what the look-up found.
            lookup: its key; None where a plain tensor is in the way.
            local_args, local_kwargs: the local forms of the arguments; changed with them where that is known to fit.

        Returns:
            the plan that fits now; None when the arguments have to be looked up again, or ``result`` is there.
        """
        if lookup is None:
            self._lift_plain_tensors()
            return None
        if plan is None:
            plan = self.rule.recall(lookup)
        if plan is None and self.kwargs and self._name_as_read():
            return None
        if (self.rule.use_reduced if plan is None else plan.pending) and self._use_reduced_forms():
            return None
        if plan is None:
            plan = self._make_plan(lookup)
        if plan is None or (plan.mesh is None and plan.changes is None):
            return plan
        if plan.mesh is not None:
            self.args, self.kwargs = on_mesh(self.args, self.kwargs, plan.mesh)
            return None
        return self._redistribute(plan, local_args, local_kwargs)

    def found(self, plan: Plan) -> None:
        """Remember the plan that fits after the changes, so that the next call takes it without a second look-up."""
        if self.before is not None and self.before.places is not None and plan.ready:
            self.before.then = plan

    def _lift_plain_tensors(self) -> None:
        self.args, self.kwargs = lifted(self.rule.name, self.rule.op, self.args, self.kwargs)
        self.source = self.args[0] if self.args else None

    def _name_as_read(self) -> bool:
        """Give the arguments the names and the order in which rules read them; False where they have them."""
        arguments = self.rule.op.arguments  # type: ignore[attr-defined]
        read = arguments.as_read(self.rule.func, self.args, self.kwargs)
        if read is None:
            return False
        if not self.args:
            self.source = next(iter(read[0]), None)
        self.args, self.kwargs = read
        return True

    def _use_reduced_forms(self) -> bool:
        """Take pending sums in the form in which they were reduced before; False where there is none, or where one
        would be written."""
        if self.before is not None or (self.rule.flag_at is not None and self._writes_first()):
            return False
        reduced = with_reduced_forms(self.args, self.kwargs)
        if reduced is None:
            return False
        self.args, self.kwargs = reduced
        return True

    def _make_plan(self, lookup: Any) -> Plan | None:
        """A new plan, remembered; None where the rule asks for other arguments, or the target is written without."""
        solution = None if self.before is None else self.before.solution
        try:
            plan = make_plan(self.rule, self.args, self.kwargs, solution)
        except NeedsValue as need:
            self.args, self.kwargs = with_value(self.args, self.kwargs, need.index)
            return None
        except RedistributionError:
            if not self.rule.inplace or not self._write_another_way():
                raise
            return None
        self.rule.remember(lookup, plan)
        return plan

    def _write_another_way(self) -> bool:
        """What is pending in a target that does not fit is carried out, or else what is to be written is written as
        terms; False where neither is possible or allowed."""
        target = self.args[0]
        if state.mode.policy == "strict" or not isinstance(target, DTensor):
            return False
        if reduce_in_place(target):
            self.before = None  # what was decided was for the target as it was
            return True
        self.result = write_as_terms(self.rule, self.args, self.kwargs)
        return self.result is not None

    def _redistribute(self, plan: Plan, local_args: list[Any], local_kwargs: Any) -> Plan | None:
        """Apply the changes of a plan; the plan after them, where it is known."""
        if self.rule.flag_at is not None and self._writes_first() and any(i == 0 for i, _, _ in plan.changes or ()):
            self.result = write_back(self.rule.func, self.args, self.kwargs, self.rule.flag_at)
            return None
        self.copied = self.copied or plan.is_view
        if plan.places is None:
            self.args, self.kwargs = changed(self.args, self.kwargs, plan, self.rule.inplace)
        else:
            self.args, self.kwargs = changed_at_places(plan, self.args, self.kwargs, local_args, local_kwargs)
            if plan.then is not None:
                return plan.then
        self.before = plan
        return None

    def _writes_first(self) -> bool:
        """Whether a call of a function with an ``inplace`` argument is to write its first one."""
        return is_asked(self.args, self.kwargs, self.rule.flag_at)  # type: ignore[arg-type]
