"""Conformance: an operator's rule against plain torch, on every kind of layout, forward and backward.

    class TestSoftmax(OpConformance):
        op = F.softmax
        samples = [sample(tensor(4, 6), dim=-1), sample(tensor(5, 3, 1), dim=0)]

The author gives the operator and sample calls on global tensors. The kit derives the rest and runs it on real gloo
ranks: layouts of every input (Replicate, every Shard, pending sums, both orders of two axes on one dim, PackedShard;
all combinations when few, otherwise a seeded choice), each under the default policy (it must work, or be refused with
the standard error) and under ``auto`` (it must work); gradients for all inputs or some, varying inputs, transposed
memory; and, for a rule made of strategies, every strategy exactly as listed. Compared are values, gradients and their
layouts, dtype, global and local shape, and whether a second call finds the first one's plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import pytest
import torch

from hyper_parallel.testing.case_runner import OpUnderTest
from hyper_parallel.testing.checking import Outcome, check_layouts
from hyper_parallel.testing.failures import RanksFailed
from hyper_parallel.testing.inputs import MaxCollectives, Sample, Unsupported, sample
from hyper_parallel.testing.layouts import Case, draw_cases
from hyper_parallel.testing.placing import mesh_names
from hyper_parallel.testing.reproduction import reproduction, title

Ranks = Callable[..., list[Any]]
MESHES = ((2,), (4,), (2, 2))
MAX_LAYOUTS = 32
SHOWN = 8
"""Failing cases listed in one report."""


class ConformanceError(AssertionError):
    """An operator's rule does not agree with plain torch. ``str()`` lists the cases, and a program for the first."""


class OpConformance:
    """Base of a test class for one operator. Its tests are named ``test_layouts[sample-mesh]``.

    Attributes:
        op: the function as users call it, or any function of tensors that uses it.
        samples: calls on global tensors, made by ``sample``.
        reference: what it must equal on plain tensors; ``op`` itself by default.
        inplace: name of the Tensor method that is its in-place form, or a function that returns its first argument;
            tested by ``test_inplace`` with the same samples.
        out: whether it takes ``out=``; tested by ``test_out``.
        meshes: shapes of the meshes, of one or two axes.
        max_layouts: cases per sample and mesh, strategies not counted.
        unsupported: given the layouts of the tensor inputs, whether a ValueError is required.
        max_collectives: how often each collective may run in the forward under the default policy, or a function that
            says so for given layouts; what is not named may not run.
        gaps: known failures: patterns of test ids (``"5x3-*-2x2"``) and the reason. They are strict xfails.
        rtol, atol: tolerances; by default 1e-9 for float64, 1e-5 for float32, 2e-2 below.
    """

    op: ClassVar[Callable[..., Any]]
    samples: ClassVar[Sequence[Sample]] = ()
    reference: ClassVar[Callable[..., Any] | None] = None
    inplace: ClassVar[str | Callable[..., Any] | None] = None
    out: ClassVar[bool] = False
    meshes: ClassVar[Sequence[tuple[int, ...]]] = MESHES
    max_layouts: ClassVar[int] = MAX_LAYOUTS
    unsupported: ClassVar[Unsupported | None] = None
    max_collectives: ClassVar[MaxCollectives | None] = None
    gaps: ClassVar[Mapping[str, str]] = {}
    rtol: ClassVar[float | None] = None
    atol: ClassVar[float | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # pytest collects only what the operator has.
        if cls.inplace is None:
            cls.test_inplace = None  # type: ignore[assignment]
        if not cls.out:
            cls.test_out = None  # type: ignore[assignment]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test id per sample and mesh."""
        if "conformance_case" not in metafunc.fixturenames:
            return
        cls = type(self)
        ids = _unique([s.id for s in cls.samples])
        given = []
        for index, one in enumerate(cls.samples):
            for mesh in cls.meshes:
                name = f"{ids[index]}-{'x'.join(map(str, mesh))}"
                reason = one.gap or next((r for p, r in cls.gaps.items() if fnmatchcase(name, p)), None)
                marks = () if reason is None else (pytest.mark.xfail(reason=reason, strict=True),)
                given.append(pytest.param((index, mesh), id=name, marks=marks))
        metafunc.parametrize("conformance_case", given)

    def test_layouts(self, ranks: Ranks, conformance_case: tuple[int, tuple[int, ...]]) -> None:
        """The operator on all layouts."""
        self._check(ranks, *conformance_case, "layouts")

    def test_inplace(self, ranks: Ranks, conformance_case: tuple[int, tuple[int, ...]]) -> None:
        """The in-place form: identity, layout, value, gradient."""
        self._check(ranks, *conformance_case, "inplace")

    def test_out(self, ranks: Ranks, conformance_case: tuple[int, tuple[int, ...]]) -> None:
        """The ``out=`` form: identity, layout, value."""
        self._check(ranks, *conformance_case, "out")

    def _check(self, ranks: Ranks, index: int, mesh: tuple[int, ...], form: str) -> None:
        cls = type(self)
        one = cls.samples[index]
        values = one.values()
        cases = cases_of(one, mesh, cls.max_layouts, form)
        failure = ""
        try:
            outcomes = ranks(_world(mesh), _check_class, cls, index, values, mesh, cases, form)
            judge(outcomes, cls.op, cls, one, mesh)
        except (RanksFailed, ConformanceError) as error:
            failure = str(error)  # which says more than a traceback of this process
        if failure:
            pytest.fail(failure, pytrace=False)


def check_op(
    ranks: Ranks,
    func: Callable[..., Any],
    /,
    *args: Any,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    max_layouts: int = MAX_LAYOUTS,
    declared: OpUnderTest | None = None,
    **kwargs: Any,
) -> None:
    """Check ``func`` on one sample call, inside a test: ``check_op(ranks, F.softmax, tensor(4, 6), dim=0)``.

    Args:
        ranks: the fixture of that name.
        func: a module-level function (ranks find it by name).
        declared: what :class:`OpConformance` has as attributes, as ``OpUnderTest(func, rtol=1e-3)``.

    Raises:
        ConformanceError: when the rule does not agree with plain torch.
        RanksFailed: when the operator raises something that is no refusal.
    """
    one = sample(*args, **kwargs)
    for mesh in meshes:
        cases = cases_of(one, mesh, max_layouts, "layouts")
        op = declared or OpUnderTest(func)
        judge(
            ranks(_world(mesh), check_layouts, op, one, one.values(), mesh, cases, max_layouts), func, None, one, mesh
        )


def cases_of(one: Sample, mesh: tuple[int, ...], limit: int, form: str) -> list[Case]:
    """The layouts to try for a sample; drawn here, so that all ranks have the same."""
    shapes = [tuple(t.shape) for t in one.tensors]
    floating = [t.dtype.is_floating_point or t.dtype.is_complex for t in one.tensors]
    wants = one.wants_grad() if form != "out" else [False] * len(shapes)
    return draw_cases(shapes, floating, wants, len(mesh), limit, f"{one.id} {mesh} {form}")


def judge(
    outcomes: Sequence[Outcome], func: Callable[..., Any], owner: type | None, one: Sample, mesh: tuple[int, ...]
) -> None:
    """Raise ConformanceError when some rank saw a problem."""
    seen: dict[tuple[Case, str], dict[str, list[int]]] = {}
    for rank, outcome in enumerate(outcomes):
        for problem in outcome.problems:
            seen.setdefault((problem.case, problem.policy), {}).setdefault(problem.text, []).append(rank)
    if not seen:
        return
    lines = [f"{len(seen)} of {outcomes[0].ran} layouts are wrong for {one.id}"]
    for (case, policy), texts in list(seen.items())[:SHOWN]:
        lines.append(f"* {title(mesh, case, policy)}")
        lines += [f"    rank {','.join(map(str, ranks))}: {text}" for text, ranks in texts.items()]
    (case, policy), _ = next(iter(seen.items()))
    program = reproduction(func, owner, one, (mesh, mesh_names(mesh)), case, policy)
    lines += ["", "The first one as a program:", "", *("    " + line for line in program.splitlines())]
    raise ConformanceError("\n".join(lines))


def _check_class(
    owner: type[OpConformance],
    index: int,
    values: Sequence[torch.Tensor],
    mesh: tuple[int, ...],
    cases: Sequence[Case],
    form: str,
) -> Outcome:
    """On a rank: functions come with the class, which is found by name, so that they need not be sent."""
    func, reference = owner.op, owner.reference
    if form == "inplace":
        func, reference = _inplace_form(owner.inplace), None
    op = OpUnderTest(func, reference, owner.unsupported, owner.max_collectives, owner.rtol, owner.atol)
    return check_layouts(op, owner.samples[index], values, mesh, cases, owner.max_layouts, form)


def _inplace_form(inplace: str | Callable[..., Any] | None) -> Callable[..., Any]:
    if callable(inplace):
        return inplace
    assert inplace is not None
    return lambda target, *args, **kwargs: getattr(target, inplace)(*args, **kwargs)


def _world(mesh: Sequence[int]) -> int:
    return mesh[0] * mesh[-1] if len(mesh) == 2 else mesh[0]


def _unique(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names)]
