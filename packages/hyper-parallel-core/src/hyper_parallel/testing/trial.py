"""One sample call on one mesh: the cases to run, the verdict of the ranks, and the smallest case that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel._rules.matching import Row
from hyper_parallel.sharding.placements import PackedShard, Partial, Shard
from hyper_parallel.testing.checking import Outcome
from hyper_parallel.testing.drawing import InputSpace, drawn, smallest
from hyper_parallel.testing.failures import RanksFailed, RanksTimedOut
from hyper_parallel.testing.inputs import Sample
from hyper_parallel.testing.layouts import Case, Placed
from hyper_parallel.testing.placing import mesh_names
from hyper_parallel.testing.reproduction import reproduction, title

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

SHOWN = 8
"""Failing cases named in one report."""
_POLICIES = ("strict", "partial", "auto")


class ConformanceError(AssertionError):
    """An operator's rule does not agree with plain torch. ``str()`` lists the cases, and a program for the smallest."""


@dataclass(frozen=True)
class Failure:
    """What is wrong with one case or several.

    Attributes:
        case, policy: the first one.
        lines: what was found there.
        error: an exception that was no refusal, instead.
        count: number of cases.
        titles: some of them.
    """

    case: Case
    policy: str
    lines: list[str]
    error: RanksFailed | None = None
    count: int = 1
    titles: Sequence[str] = ()


@dataclass(frozen=True)
class Trial:
    """A sample call on a mesh, in one form.

    Attributes:
        func, owner: the operator, and the test class that names it, if any.
        limit: number of drawn cases.
        rows: asks the ranks for the operator's strategies.
        run: runs cases on the ranks.
        shrinks: whether to look for the smallest failing case.
    """

    func: Callable[..., Any]
    owner: type | None
    sample: Sample
    mesh: tuple[int, ...]
    form: str
    limit: int
    rows: Callable[[], list[Row]]
    run: Callable[[Sequence[Case]], list[Outcome]]
    shrinks: bool = True

    def check(self) -> None:
        """Run every listed strategy (on two axes ``limit // 2`` pairs of them) and up to ``limit`` other cases.

        Raises:
            ConformanceError: some rank saw a problem.
            RanksFailed: an exception that is no refusal.
        """
        rows = self.rows() if self.form == "layouts" else []
        combinations = joint_rows(rows, len(self.mesh))
        space = self._space()
        listed = [self._of_rows(combination) for combination in combinations]
        if len(self.mesh) > 1 and len(combinations) > self.limit // 2:
            listed = drawn(self._of_any(combinations), max(1, self.limit // 2), self._seed)
        cases = [*listed, *space.cases(self.limit, self._seed)]
        if not rows:  # what is drawn need not shard anything, and then the rule is not judged at all
            cases = list(dict.fromkeys([*cases, *space.sharded_cases()]))
        failure = self._attempt(cases)
        if failure is None:
            return
        small = None
        if self.shrinks and not isinstance(failure.error, RanksTimedOut):
            small = self._smallest(space.strategy() if failure.case.outputs is None else self._of_any(combinations))
        found = small or failure
        program = reproduction(
            self.func, self.owner, self.sample, (self.mesh, mesh_names(self.mesh)), found.case, found.policy
        )
        lines = ["", "as a program, to save beside the test:", "", *("    " + line for line in program.splitlines())]
        if found.error is not None:
            raise found.error.within("\n".join(found.lines), "\n".join(lines))
        first = f"{failure.count} of {len(cases)} cases are wrong for {self.sample.id}"
        which = "the smallest that hypothesis finds" if small else "the first"
        raise ConformanceError("\n".join([f"{first}; {which}:", *found.lines, *lines, "", *failure.titles]))

    @property
    def _seed(self) -> str:
        return f"{self.sample.id} {self.mesh} {self.form}"

    def _space(self) -> InputSpace:
        tensors = self.sample.tensors
        wants = tuple(wants and self.form != "out" for wants in self.sample.wants_grad())
        pending = tuple(t.dtype.is_floating_point or t.dtype.is_complex for t in tensors)
        return InputSpace(tuple(tuple(t.shape) for t in tensors), pending, wants, len(self.mesh))

    def _of_rows(self, rows: Sequence[Row]) -> Case:
        """The inputs as the strategies want them, and the outputs that they promise."""
        only_sums = all(not isinstance(p, Partial) or p.reduce_op == "sum" for row in rows for p in row.inputs)
        inputs = (
            Placed(tuple(row.inputs[i] for row in rows), grad=wants and only_sums)
            for i, wants in enumerate(self.sample.wants_grad())
        )
        return Case(tuple(inputs), tuple(zip(*(row.outputs for row in rows), strict=True)))

    def _of_any(self, combinations: Sequence[Sequence[Row]]) -> SearchStrategy[Case]:
        from hypothesis import strategies as st

        return st.sampled_from(combinations).map(self._of_rows)

    def _attempt(self, cases: Sequence[Case]) -> Failure | None:
        try:
            outcomes = self.run(cases)
        except RanksFailed as error:
            known = {title(self.mesh, case, policy): (case, policy) for case in cases for policy in _POLICIES}
            # A rank that waits for a stuck one may be ahead of it: the earliest case is the one at fault.
            said = {line for text in error.texts() for line in text.splitlines()}
            name = next((name for name in known if name in said), None)
            if name is None:
                raise
            return Failure(*known[name], _lines_of(error, name), error)
        seen: dict[tuple[Case, str], dict[str, list[int]]] = {}
        for rank, outcome in enumerate(outcomes):
            for problem in outcome.problems:
                seen.setdefault((problem.case, problem.policy), {}).setdefault(problem.text, []).append(rank)
        if not seen:
            return None
        case, policy = next(iter(seen))
        lines = []
        for which in seen:
            if which[0] == case:
                lines.append(f"  {title(self.mesh, *which)}")
                lines += [f"    rank {','.join(map(str, ranks))}: {text}" for text, ranks in seen[which].items()]
        titles = [f"wrong too: {title(self.mesh, *which)}" for which in list(seen)[1:SHOWN]]
        return Failure(case, policy, lines, None, len({case for case, _ in seen}), titles)

    def _smallest(self, strategy: SearchStrategy[Case]) -> Failure | None:
        found: dict[Case, Failure] = {}

        def fails(case: Case) -> bool:
            try:
                failure = self._attempt([case])
            except RanksTimedOut:
                return False  # one such is enough
            if failure is not None:
                found[case] = failure
            return failure is not None

        case = smallest(strategy, fails, self._seed)
        return None if case is None else found[case]


def _lines_of(error: RanksFailed, name: str) -> list[str]:
    """What the ranks say about the case of this title."""
    seen: dict[str, list[int]] = {}
    for rank, failure in sorted(error.failures.items()):
        first, _, text = failure.message.partition("\n")
        if first == name:
            seen.setdefault(text.replace("\n", "\n            "), []).append(rank)
    return [f"  {name}", *(f"    rank {','.join(map(str, ranks))}: {text}" for text, ranks in seen.items())]


def joint_rows(rows: Sequence[Row], mesh_ndim: int) -> list[tuple[Row, ...]]:
    """One strategy per mesh axis, in all combinations that there are."""
    if mesh_ndim == 1:
        return [(row,) for row in rows]
    return [(a, b) for a in rows for b in rows if _can_join(a, b)]


def _can_join(a: Row, b: Row) -> bool:
    """Whether there is such a layout: one kind of pending reduction per tensor, a packed shard only outermost."""
    for x, y in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True):
        if isinstance(x, Partial) and isinstance(y, Partial) and x != y:
            return False
        if isinstance(x, Shard) and isinstance(y, PackedShard) and x.dim == y.dim:
            return False
    return True
