"""Conformance: an operator's rule against plain torch, on every kind of layout, forward and backward.

    class TestSoftmax(OpConformance):
        op = F.softmax
        samples = [sample(tensor(4, 6), dim=-1), sample(tensor(5, 3, 1), dim=0)]

The author gives the operator and sample calls on global tensors. The kit derives the rest and runs it on real gloo
ranks: layouts of every input (Replicate, every Shard, pending sums, both orders of two axes on one dim, PackedShard;
all combinations when few, otherwise drawn by hypothesis), each under the default policy (it must work, or be refused
with the standard error) and under ``auto`` (it must work); gradients for all inputs or some, varying inputs, transposed
memory; and, for a rule made of strategies, every strategy exactly as listed. Compared are values, gradients and their
layouts, dtype, shape and strides, global and local, which results are inputs or share memory with them, whether a
second call finds the first one's plan, and whether a third one sees that the inputs changed. What fails is shrunk to
the smallest case that fails, and printed as a program.

On a mesh an operator is compared with itself. So what is not PyTorch's own (an ``autograd.Function``, an operator of
``torch.library``) is judged alone too, once per sample: by ``torch.autograd.gradcheck`` and ``torch.library.opcheck``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from hyper_parallel._rules.matching import Row
from hyper_parallel.testing.case_runner import OpUnderTest
from hyper_parallel.testing.checking import Outcome, check_cases, listed_rows
from hyper_parallel.testing.failures import RanksFailed
from hyper_parallel.testing.inputs import MaxCollectives, Sample, Unsupported, sample
from hyper_parallel.testing.layouts import Case
from hyper_parallel.testing.one_device import wrong_alone
from hyper_parallel.testing.trial import ConformanceError, Trial

Ranks = Callable[..., list[Any]]
ConformanceCase = tuple[int, tuple[int, ...], bool]
"""Which sample, on which mesh, and whether a failure is unexpected, so that its smallest case is wanted."""
MESHES = ((2,), (4,), (2, 2))
MAX_LAYOUTS = 32


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
        max_layouts: cases per sample and mesh, strategies not counted; pytest's ``--max-layouts`` may lower it.
        unsupported: given the layouts of the tensor inputs, whether a ValueError is required.
        max_collectives: how often each collective may run in the forward under the default policy (what is not named
            may not run), or a function that says so for given layouts: ``at_most(all_reduce=2)`` adds what carries out
            pending inputs.
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
        # pytest collects only what the operator has. A base class in between may have had less.
        for name, has in (("test_inplace", cls.inplace is not None), ("test_out", cls.out)):
            if not has:
                setattr(cls, name, None)
            elif getattr(cls, name) is None:
                setattr(cls, name, getattr(OpConformance, name))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test id per sample and mesh."""
        if "conformance_case" not in metafunc.fixturenames:
            return
        cls = type(self)
        _check_declarations(cls)
        ids = _unique([s.id for s in cls.samples])
        given, names = [], []
        for index, one in enumerate(cls.samples):
            for mesh in cls.meshes:
                name = f"{ids[index]}-{'x'.join(map(str, mesh))}"
                names.append(name)
                reason = one.gap or next((r for p, r in cls.gaps.items() if fnmatchcase(name, p)), None)
                marks = () if reason is None else (pytest.mark.xfail(reason=reason, strict=True),)
                given.append(pytest.param((index, mesh, reason is None), id=name, marks=marks))
        for pattern in cls.gaps:
            if not any(fnmatchcase(name, pattern) for name in names):
                pytest.fail(f"{cls.__name__}.gaps: {pattern!r} is none of {', '.join(names)}", pytrace=False)
        metafunc.parametrize("conformance_case", given)

    def test_layouts(self, ranks: Ranks, conformance_case: ConformanceCase, most_layouts: int | None) -> None:
        """The operator on all layouts."""
        self._check(ranks, *conformance_case, most_layouts, "layouts")

    def test_inplace(self, ranks: Ranks, conformance_case: ConformanceCase, most_layouts: int | None) -> None:
        """The in-place form: identity, layout, value, gradient."""
        self._check(ranks, *conformance_case, most_layouts, "inplace")

    def test_out(self, ranks: Ranks, conformance_case: ConformanceCase, most_layouts: int | None) -> None:
        """The ``out=`` form: identity, layout, value."""
        self._check(ranks, *conformance_case, most_layouts, "out")

    def _check(
        self, ranks: Ranks, index: int, mesh: tuple[int, ...], shrinks: bool, most: int | None, form: str
    ) -> None:
        cls = type(self)
        limit = cls.max_layouts if most is None else min(most, cls.max_layouts)
        one = cls.samples[index]
        given = (cls, index, one.values(), mesh)
        trial = Trial(
            cls.op, cls, one, mesh, form, limit,
            rows=lambda: ranks(_world(mesh), _rows_of_class, *given)[0],
            run=lambda cases: ranks(_world(mesh), _check_class, *given, cases, form),
            shrinks=shrinks,
        )  # fmt: skip
        failure = ""
        try:
            if form == "layouts" and mesh == cls.meshes[0]:
                _check_alone(cls.reference or cls.op, one)
            trial.check()
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
    op = declared or OpUnderTest(func)
    _check_alone(op.on_plain, one)
    for mesh in meshes:
        given = (one, one.values(), mesh)
        Trial(
            func, None, one, mesh, "layouts", max_layouts,
            rows=partial(_rows_of_op, ranks, op, given),
            run=partial(_check_op, ranks, op, given),
        ).check()  # fmt: skip


def _check_alone(func: Callable[..., Any], one: Sample) -> None:
    """Raise ConformanceError where the operator is wrong without any layout."""
    wrong = wrong_alone(func, one)
    if wrong is not None:
        raise ConformanceError(f"{one.id} is wrong\n{wrong}")


def _rows_of_op(ranks: Ranks, op: OpUnderTest, given: tuple[Any, ...]) -> list[Row]:
    rows: list[Row] = ranks(_world(given[-1]), listed_rows, op.func, *given)[0]
    return rows


def _check_op(ranks: Ranks, op: OpUnderTest, given: tuple[Any, ...], cases: Sequence[Case]) -> list[Outcome]:
    return ranks(_world(given[-1]), check_cases, op, *given, cases)


# -- on a rank: functions come with the class, which is found by name, so that they need not be sent ------------------


def _rows_of_class(
    owner: type[OpConformance], index: int, values: Sequence[torch.Tensor], mesh: tuple[int, ...]
) -> list[Row]:
    return listed_rows(owner.op, owner.samples[index], values, mesh)


def _check_class(
    owner: type[OpConformance],
    index: int,
    values: Sequence[torch.Tensor],
    mesh: tuple[int, ...],
    cases: Sequence[Case],
    form: str,
) -> Outcome:
    func, reference = owner.op, owner.reference
    if form == "inplace":
        func, reference = _inplace_form(owner.inplace), None
    op = OpUnderTest(func, reference, owner.unsupported, owner.max_collectives, owner.rtol, owner.atol)
    return check_cases(op, owner.samples[index], values, mesh, cases, form)


def _check_declarations(cls: type[OpConformance]) -> None:
    if not hasattr(cls, "op"):
        pytest.fail(f"{cls.__name__} has no op: give the function that it tests", pytrace=False)
    samples = cls.samples
    if isinstance(samples, Sample) or not samples or not all(isinstance(s, Sample) for s in samples):
        pytest.fail(
            f"{cls.__name__}.samples must list calls, as in (sample(tensor(4, 6), dim=0),), got {samples!r}",
            pytrace=False,
        )


def _inplace_form(inplace: str | Callable[..., Any] | None) -> Callable[..., Any]:
    if callable(inplace):
        return inplace
    assert inplace is not None
    return lambda target, *args, **kwargs: getattr(target, inplace)(*args, **kwargs)


def _world(mesh: Sequence[int]) -> int:
    return mesh[0] * mesh[-1] if len(mesh) == 2 else mesh[0]


def _unique(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names)]
