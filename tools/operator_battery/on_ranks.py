"""The ranks' side: the cases of one function, each compared with plain torch on the whole tensors."""

from __future__ import annotations

import cmath
import linecache
import os
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from hyper_parallel import DTensor, MissingOpError, RedistributionError, redistribute_policy
from hyper_parallel.testing import make, mesh_of
from hyper_parallel.testing.placing import piece_of
from hyper_parallel.testing.progress import busy_with

from .layouts import Placements, one_axis, shown, two_axes
from .samples import operators, samples_of, title_of

VERDICTS = ("right", "refused", "no rule", "wrong", "raw error", "hang")
"""From best to worst."""
TOLERANCE = {"rtol": 1e-7, "atol": 1e-9}
_TOLERANCES = dict.fromkeys((torch.float64, torch.complex128), TOLERANCE)
_TOLERANCES |= {low: {"rtol": 2e-2, "atol": 1e-2} for low in (torch.bfloat16, torch.float16, torch.complex32)}
_SINGLE = {"rtol": 1e-4, "atol": 1e-5}


@dataclass(frozen=True)
class Verdict:
    """How one case ended; ``text`` says what was wrong."""

    case: str
    kind: str
    text: str = ""


@dataclass(frozen=True)
class Case:
    """One call of one sample: ``policy`` is that of redistribution, ``form`` the function's or its in-place form's."""

    sample: int
    mesh: tuple[int, ...]
    placements: Placements
    policy: str
    form: str = "function"


@dataclass(frozen=True)
class Choice:
    """What is run of each function. ``only`` is a pattern of the cases' titles, ``dtype`` a name (``complex128``)."""

    samples: int
    policies: tuple[str, ...]
    axes: tuple[int, ...]
    only: str
    dtype: str | None = None


class RanksParted(Exception):
    """The ranks took different ways through a case."""


def run_function(title: str, choice: Choice, skip: Collection[str]) -> list[Verdict]:
    """This rank's verdicts on the cases of a function but those in ``skip``.

    Raises:
        RanksParted: in a case some ranks wait for others that do not come.
    """
    (op,) = [op for op in operators("") if title_of(op) == title]
    samples = samples_of(op, choice.samples, choice.dtype and getattr(torch, choice.dtype))
    verdicts: list[Verdict] = []
    for case in _cases(op, samples, choice):
        name = title_of_case(title, case)
        if name in skip or not re.search(choice.only, name):
            continue
        busy_with(name)
        verdict = judge(op, samples[case.sample], case)
        if verdict is not None:
            verdicts.append(Verdict(name, *verdict))
            check_that_all_are_here(verdicts[-1])
    return verdicts


def title_of_case(function: str, case: Case) -> str:
    """``linalg.norm#3 4: S(0) auto``, ``clamp_#0 2x2: S(0),S(1) R,R partial``."""
    mesh = "x".join(map(str, case.mesh))
    function += "_" if case.form == "in-place" else ""
    return f"{function}#{case.sample} {mesh}: {shown(case.placements)} {case.policy}"


def _cases(op: Any, samples: dict[int, Any], choice: Choice) -> Iterator[Case]:
    meshes = {1: ((dist.get_world_size(),), one_axis), 2: ((2, 2), two_axes)}
    for place, sample in samples.items():
        tensors = _Call(op.op, sample).tensors
        for axes in choice.axes:
            mesh, layouts = meshes[axes]
            for placements in layouts(tensors):
                for policy in choice.policies:
                    yield Case(place, mesh, placements, policy)
        if op.inplace_variant is not None and not sample.broadcasts_input and isinstance(sample.input, torch.Tensor):
            for placements in one_axis(tensors):
                yield Case(place, meshes[1][0], placements, choice.policies[0], "in-place")


class _Call:
    """A sample's call with its tensor arguments taken out."""

    def __init__(self, function: Callable[..., Any], sample: Any, in_place: bool = False) -> None:
        self.function, self.in_place, self.sample = function, in_place, sample
        leaves, self.structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.leaves = leaves
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], pytree.TreeSpec, list[torch.Tensor | None]]:
        """Outputs, their structure, and the gradients of the tensors, for the same random cotangents each time."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        first, args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        torch.manual_seed(0)
        out = self.function(first.clone() if self.in_place else first, *args, **kwargs)
        outputs, structure = pytree.tree_flatten(out)
        # Some results are unique up to a sign or a phase; the database says what of them is.
        roots = pytree.tree_leaves(self.sample.output_process_fn_grad(out))
        roots = [root for root in roots if isinstance(root, torch.Tensor) and root.requires_grad]
        generator = torch.Generator().manual_seed(1)
        seeds = [torch.randn(root.shape, generator=generator, dtype=root.dtype) for root in roots]
        if roots:
            torch.autograd.backward(roots, seeds)
        return outputs, structure, [t.grad for t in tensors]


def judge(op: Any, sample: Any, case: Case) -> tuple[str, str] | None:
    """Kind and text of this rank's verdict; None where plain torch does not take the call."""
    in_place = case.form == "in-place"
    call = _Call(op.inplace_variant if in_place else op.op, sample, in_place)
    plain = [t.detach().clone().requires_grad_(t.requires_grad) for t in call.tensors]
    try:
        expected = call(plain)
    except Exception:
        return None
    mesh = mesh_of(case.mesh)
    pairs = zip(call.tensors, case.placements, strict=True)
    leaves = [make(t, mesh, p, requires_grad=t.requires_grad) for t, p in pairs]
    try:
        with redistribute_policy(case.policy):  # type: ignore[arg-type]
            got = call(leaves)
        problem = _difference(got, expected, leaves, plain)
    except Exception as error:
        return kind_of(error), f"{type(error).__name__}: {error}"
    return ("right", "") if problem is None else ("wrong", problem)


def kind_of(error: Exception) -> str:
    """A refusal is an error of our classes, or raised by a line of ours; everything else escaped us."""
    if isinstance(error, MissingOpError):
        return "no rule"
    if isinstance(error, RedistributionError):
        return "refused"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = f"{os.sep}hyper_parallel" in frame.filename
    raised = "raise" in linecache.getline(frame.filename, frame.lineno or 0)
    lost = "Timed out" in str(error) or "Connection closed" in str(error)
    return "hang" if lost else "refused" if ours and raised else "raw error"


def _difference(got: Any, expected: Any, leaves: Sequence[DTensor], plain: Sequence[torch.Tensor]) -> str | None:
    if got[1] != expected[1]:
        return f"the result has the structure {got[1]}, plain torch gives {expected[1]}"
    problems = [compare(f"output {i}", *pair) for i, pair in enumerate(zip(got[0], expected[0], strict=True))]
    problems += [compare(f"gradient {i}", *pair) for i, pair in enumerate(zip(got[2], expected[2], strict=True))]
    # Statistics may be updated, everything else must be as before.
    problems += [compare(f"input {i} after", *pair) for i, pair in enumerate(zip(leaves, plain, strict=True))]
    return next((problem for problem in problems if problem is not None), None)


def compare(label: str, got: Any, want: Any) -> str | None:
    if not isinstance(want, torch.Tensor):
        if label.startswith("gradient") and got is not None and not got.full_tensor().any():
            return None
        same = type(got) is type(want) and (_close(got, want) if isinstance(want, (float, complex)) else got == want)
        return None if same else f"{label} is {got!r}, not {want!r}"
    if got is None:
        return None if not want.any() else f"{label} is missing"
    if not isinstance(got, DTensor):
        return f"{label} is a {type(got).__name__}, not a DTensor"
    for name in ("shape", "dtype", "requires_grad"):
        if getattr(got, name) != getattr(want, name):
            return f"{label}: {name} is {getattr(got, name)}, not {getattr(want, name)}"
    want = want.detach()
    if got.layout.is_partial():
        local = got.full_tensor().detach()
    else:
        local, want = got.to_local().detach(), piece_of(want, got.layout)
    try:
        torch.testing.assert_close(local, want, equal_nan=True, **_TOLERANCES.get(want.dtype, _SINGLE))
    except AssertionError as error:
        return f"{label}: {' '.join(str(error).split())}"
    return None


def _close(got: complex, want: complex) -> bool:
    return cmath.isclose(got, want, rel_tol=TOLERANCE["rtol"]) or (got != got and want != want)


def check_that_all_are_here(mine: Verdict) -> None:
    """Meet the other ranks after a case, in a group that no collective of the case uses.

    Raises:
        RanksParted: they did not come; ``str()`` is the case's title, a line break, and what this rank saw.
    """
    try:
        if mine.kind == "hang":
            raise TimeoutError(mine.text)
        dist.barrier(group=mesh_of((1, dist.get_world_size())).get_group("tp"))
    except Exception as error:
        raise RanksParted(f"{mine.case}\n{mine.text or error}") from None
