"""One operator call on one layout, compared with plain torch on the global tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from hyper_parallel.comm.trace import CommTrace
from hyper_parallel.context import redistribute_policy
from hyper_parallel.dispatch.dispatcher import plans_made
from hyper_parallel.errors import RedistributionError
from hyper_parallel.sharding.mesh import DeviceMesh
from hyper_parallel.sharding.placements import short
from hyper_parallel.sharding.stated import difference
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.testing.aliasing import Alias, aliases, wrong_aliases
from hyper_parallel.testing.findings import Findings
from hyper_parallel.testing.inputs import MaxCollectives, Sample, Unsupported
from hyper_parallel.testing.layouts import Case
from hyper_parallel.testing.other_values import halve_in_place, halved
from hyper_parallel.testing.placing import make, piece_of
from hyper_parallel.testing.progress import busy_with
from hyper_parallel.testing.reproduction import title
from hyper_parallel.testing.strategy_rows import CallRecorder, not_taken
from hyper_parallel.torch_compat import pytree

Policy = Literal["partial", "auto", "strict"]

# (rtol, atol) where PyTorch's own defaults suit one device only: sums are taken in another order here.
_TOLERANCES = {torch.float64: (1e-9, 1e-10), torch.complex128: (1e-9, 1e-10), torch.float32: (1e-5, 1e-5)}


@dataclass(frozen=True)
class OpUnderTest:
    """An operator and what its author declares about it; see :class:`~hyper_parallel.testing.OpConformance`."""

    func: Callable[..., Any]
    reference: Callable[..., Any] | None = None
    unsupported: Unsupported | None = None
    max_collectives: MaxCollectives | None = None
    rtol: float | None = None
    atol: float | None = None

    def on_plain(self, *args: Any, **kwargs: Any) -> Any:
        """The operator on one device."""
        return (self.reference or self.func)(*args, **kwargs)

    def tolerances(self, dtypes: Iterable[torch.dtype]) -> tuple[float, float]:
        """``rtol`` and ``atol`` for a result of inputs of these dtypes."""
        known = [_TOLERANCES.get(d, (2e-2, 1e-2)) for d in dtypes if d.is_floating_point or d.is_complex]
        rtol, atol = max(known, default=(0.0, 0.0))
        return rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol


@dataclass
class Expected:
    """What one device gives: outputs (flattened), random gradients for them, the gradients of the inputs, the inputs
    after the call, and what each output is to each input."""

    outputs: list[Any]
    structure: pytree.TreeSpec
    seeds: list[torch.Tensor | None]
    grads: list[torch.Tensor | None]
    inputs: list[torch.Tensor]
    aliases: list[list[Alias]]


class CaseRunner:
    """Runs one case. Problems that only some ranks may see go to ``findings``; they are never raised."""

    def __init__(
        self,
        op: OpUnderTest,
        sample: Sample,
        values: Sequence[torch.Tensor],
        mesh: DeviceMesh,
        case: Case,
        findings: Findings,
    ) -> None:
        self.op, self.sample, self.mesh, self.case, self.findings = op, sample, mesh, case, findings
        self.policy: Policy = "partial"
        self.refused = False
        self.layouts = [p.layout(mesh, v.ndim) for p, v in zip(case.inputs, values, strict=True)]
        self.values, self.expected = self._expected(values)
        results = [o for o in self.expected.outputs if isinstance(o, torch.Tensor)]
        self.rtol, self.atol = op.tolerances(t.dtype for t in (*values, *results))

    def run(self) -> None:
        """Under the default policy, and under ``auto`` as far as that can differ; a listed strategy under ``strict``.

        Under ``strict`` nothing may be redistributed, also where that would be cheaper in the end.
        """
        if self.case.outputs is not None:
            self._run_policy("strict")
            return
        first = self._run_policy("partial")
        self.refused = first is None
        self._run_policy("auto", like=first)

    def call(self, func: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        """The sample's call with these tensors, plain or distributed."""
        args, kwargs = self.sample.arguments(tensors)
        return func(*args, **kwargs)

    def may_refuse(self, error: ValueError) -> bool:
        """Whether the operator may refuse the case's layouts in this way."""
        if self.case.outputs is not None or self.policy == "auto":
            return False
        return isinstance(error, RedistributionError) and "\n  fix: " in str(error)

    # -- one device -----------------------------------------------------------------------------------------------

    def _expected(self, values: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Expected]:
        """Values as they lie in memory, and the result; contiguous when the operator itself needs it (``view``)."""
        turned = [_transposed(v) if p.transposed else v for v, p in zip(values, self.case.inputs, strict=True)]
        with suppress(RuntimeError):
            return turned, self._on_one_device(turned)
        return list(values), self._on_one_device(values)

    def _on_one_device(self, values: Sequence[torch.Tensor]) -> Expected:
        leaves = [v.detach().clone().requires_grad_(p.grad) for v, p in zip(values, self.case.inputs, strict=True)]
        outputs, structure = pytree.tree_flatten(self.call(self.op.on_plain, leaves))
        generator = torch.Generator().manual_seed(2000)
        seeds = [torch.randn(o.shape, generator=generator, dtype=o.dtype) if _has_grad(o) else None for o in outputs]
        return Expected(
            [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs],
            structure,
            seeds,
            _gradients(outputs, seeds, leaves),
            [leaf.detach() for leaf in leaves],
            aliases(outputs, leaves),
        )

    # -- on the mesh ----------------------------------------------------------------------------------------------

    def leaves(self) -> list[DTensor]:
        """Fresh leaf DTensors of the case."""
        return [
            make(v, self.mesh, layout, varying=p.varying, requires_grad=p.grad, seed=i)
            for i, (v, layout, p) in enumerate(zip(self.values, self.layouts, self.case.inputs, strict=True))
        ]

    def _run_policy(self, policy: Policy, like: list[Any] | None = None) -> list[Any] | None:
        """One run with all comparisons; the outputs' specs, or None when the operator refused.

        Args:
            like: specs that an earlier run gave; where they come out again, the gradients were checked then.
        """
        self.policy = policy
        busy_with(title(self.mesh.shape, self.case, policy))
        leaves = self.leaves()
        must_refuse = self._declared_unsupported()
        recorder = CallRecorder()
        with redistribute_policy(policy), CommTrace() as trace:
            try:
                with recorder if self.case.outputs is not None else nullcontext():
                    result = self.call(self.op.func, leaves)
            except ValueError as error:
                if not must_refuse and not self.may_refuse(error):
                    self.note(self._wrong_refusal(error))
                    self.note(self.wrong_on_meta())
                return None
            if must_refuse:
                self.note("the layouts are declared unsupported, yet the operator took them")
                return []
            if self.case.outputs is not None:
                self.note(not_taken(recorder, leaves, self.case.outputs))
        self._check_inputs(leaves)
        if policy == "partial":
            self._check_collectives(trace)
        outputs = self._fitting_outputs(result)
        if outputs is None:
            self.note(self.wrong_on_meta())
            return []
        for text in wrong_aliases(outputs, leaves, self.expected.aliases):
            self.note(text)
        specs = [o._spec if isinstance(o, DTensor) else None for o in outputs]
        if specs != like:
            self._check_gradients(outputs, leaves)
            if policy != "auto":
                with redistribute_policy(policy):
                    self._check_cache(leaves, outputs)
        return specs

    def _fitting_outputs(self, result: Any) -> list[Any] | None:
        """The outputs of a call; None when their structure or their values are not those of one device."""
        outputs = self._compare_structure(result)
        if outputs is None:
            return None
        fits = True
        for index, (got, want) in enumerate(zip(outputs, self.expected.outputs, strict=True)):
            fits &= self.compare(f"output {index}", got, want, self.expected.seeds[index] is not None)
        return outputs if fits else None

    def _check_inputs(self, leaves: Sequence[DTensor]) -> None:
        """Inputs are as after the call on one device: most are unchanged, statistics may be updated."""
        for index, (leaf, after) in enumerate(zip(leaves, self.expected.inputs, strict=True)):
            if not leaf.layout.is_partial():
                label = f"input {index} after the call, this rank's piece"
                self.note(self._difference(label, leaf._local.detach(), piece_of(after, leaf.layout)))

    def _wrong_refusal(self, error: ValueError) -> str:
        if self.case.outputs is not None:
            return f"the inputs are laid out for a listed strategy, yet it was refused: {error}"
        if self.policy == "auto":
            return f"refused, although redistribution is allowed: {type(error).__name__}: {error}"
        return (
            f"a refusal must be the standard RedistributionError (see hyper_parallel._rules.call.refuse), got {error!r}"
        )

    def _compare_structure(self, result: Any) -> list[Any] | None:
        outputs, structure = pytree.tree_flatten(result)
        if structure == self.expected.structure:
            return outputs
        self.note(f"the result has the structure {structure}, plain torch gives {self.expected.structure}")
        return None

    def compare(self, label: str, got: Any, want: Any, needs_grad: bool = False) -> bool:
        """Note every difference between a result and that of one device.

        Returns:
            Whether the two are of one kind: DTensor, global shape, dtype, requires_grad. Ranks cannot differ on this.
        """
        if not isinstance(want, torch.Tensor):
            if type(got) is not type(want) or got != want:
                self.note(f"{label} is {got!r}, plain torch gives {want!r}")
            return True
        if not isinstance(got, DTensor):
            self.note(f"{label} is a {type(got).__name__}, expected a DTensor")
            return False
        facts = {
            "global shape": (tuple(got.shape), tuple(want.shape)),
            "dtype": (got.dtype, want.dtype),
            "requires_grad": (got.requires_grad, needs_grad),
        }
        if not self._same(label, facts):
            return False
        if _steps(got) != _steps(want) and not self._is_meta_stride(want, got):
            self.note(f"{label}: global stride is {_steps(got)}, expected {_steps(want)}")
        self._compare_values(label, got, want)
        return True

    def _is_meta_stride(self, want: torch.Tensor, got: DTensor) -> bool:
        """Whether PyTorch itself gives an output this stride, on tensors without data: its kernels do not all agree."""
        index = next((i for i, output in enumerate(self.expected.outputs) if output is want), None)
        if index is None:
            return False
        outputs = self._on_meta(self.op.on_plain)
        return outputs is not None and _steps(outputs[index]) == _steps(got)

    def _on_meta(self, func: Callable[..., Any]) -> list[Any] | None:
        """The outputs on tensors without data; None where the function needs the values."""
        values = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta") for v in self.values]
        with torch.no_grad(), suppress(RuntimeError, TypeError, ValueError):
            return pytree.tree_leaves(self.call(func, values))
        return None

    def wrong_on_meta(self) -> str | None:
        """That the function says something else on meta tensors, which tell the engine the global shapes."""
        said, given = map(_described, (self._on_meta(self.op.func), self.expected.outputs))
        if said is None or said == given:
            return None
        return (
            f"the cause: on meta tensors, from which the engine has global shapes, the function gives {said}, on real "
            f"ones {given}: correct what torch.library.register_fake registers for it"
        )

    def _same(self, label: str, facts: dict[str, tuple[Any, Any]]) -> bool:
        for name, (mine, right) in facts.items():
            if mine != right:
                self.note(f"{label}: {name} is {mine}, expected {right}")
        return all(mine == right for mine, right in facts.values())

    def _compare_values(self, label: str, got: DTensor, want: torch.Tensor) -> None:
        layout, local = got.layout, got._resolve().detach()
        shown = f"{label} ({','.join(map(short, layout.placements))})"
        wrong = difference(local, got._spec)
        self.note(None if wrong is None else f"{shown}: the local tensor has {wrong}")
        fits = tuple(local.shape) == got._spec.local_shape and local.dtype is got.dtype
        # Comparing this rank's piece needs no communication, and finds replicas that differ.
        piece = piece_of(want, layout)
        shown += ", this rank's piece"
        if layout.is_partial():
            # The other ranks may find nothing wrong with theirs, and count on this one's term.
            term = local.clone() if fits else torch.zeros_like(piece)  # a view of an input changes with it
            judge = partial(self._judge_reduced, self.policy, shown, piece)
            self.findings.when_reduced(layout, term, judge)
        elif fits:
            self.note(self._difference(shown, local, piece))

    def _judge_reduced(self, policy: Policy, label: str, want: torch.Tensor, got: torch.Tensor) -> None:
        self.findings.note(self.case, policy, self._difference(label, got, want))

    def _difference(self, label: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
        """Where two plain tensors of one shape differ by more than rounding; None when nowhere."""
        exact = not (want.is_floating_point() or want.is_complex())
        wrong = got != want if exact else ~torch.isclose(got, want, self.rtol, self.atol, equal_nan=True)
        if not wrong.any():
            return None
        index = tuple(int(i) for i in wrong.nonzero()[0])
        pair = f"{got[index].item()}, expected {want[index].item()}"
        return f"{label}: {int(wrong.sum())} of {want.numel()} values differ, e.g. at {index}: {pair}"

    def _check_gradients(self, outputs: Sequence[Any], leaves: Sequence[DTensor]) -> None:
        roots = [(o, s) for o, s in zip(outputs, self.expected.seeds, strict=True) if s is not None]
        if not roots:
            return
        torch.autograd.backward([o for o, _ in roots], [s for _, s in roots])
        for index, (leaf, want) in enumerate(zip(leaves, self.expected.grads, strict=True)):
            if self.case.inputs[index].grad:
                self._compare_gradient(index, leaf, want)

    def _compare_gradient(self, index: int, leaf: DTensor, want: torch.Tensor | None) -> None:
        label = f"gradient of input {index}"
        if leaf.grad is None:
            if want is not None and want.any():
                self.note(f"{label} is missing")
            # Other ranks may have one, and a pending gradient is compared by all together.
            leaf._local.grad = torch.zeros_like(leaf._local)
        self.compare(label, leaf.grad, torch.zeros_like(self.values[index]) if want is None else want)

    def _check_cache(self, leaves: Sequence[DTensor], before: Sequence[Any]) -> None:
        """A second call of the same kind must find the plan of the first, and give the same."""
        if any(leaf.layout.is_partial() for leaf in leaves):
            # A sum that the first call carried out enters this one in reduced form, so other terms may come out.
            before = pytree.tree_leaves(self.call(self.op.func, leaves))
        plans = plans_made()
        again = pytree.tree_leaves(self.call(self.op.func, leaves))
        if (more := plans_made() - plans) != 0:
            self.note(f"the same call a second time made {more} new plans")
        for index, (a, b) in enumerate(zip(before, again, strict=True)):
            if isinstance(a, DTensor):
                label = f"output {index} of a second identical call"
                problem = self._difference(label, b._resolve().detach(), a._resolve().detach())
                if problem is not None and self._changes_inputs():
                    problem += "; the call changes its inputs, on one device too"
                self.note(problem)

        if not self._changes_inputs():
            halve_in_place(leaves)
            want = self.call(self.op.on_plain, halved(self.values, self.layouts))
            pairs = zip(*map(pytree.tree_leaves, (self.call(self.op.func, leaves), want)), strict=True)
            for index, (mine, right) in enumerate(pairs):
                if isinstance(mine, DTensor) and mine.shape == right.shape:
                    self._compare_values(f"output {index} of a call after the inputs were halved in place", mine, right)

    def _changes_inputs(self) -> bool:
        pairs = zip(self.expected.inputs, self.values, strict=True)
        return any(self._difference("", after, before) is not None for after, before in pairs)

    # -- what the author declared ---------------------------------------------------------------------------------

    def _declared_unsupported(self) -> bool:
        declared = (self.op.unsupported, self.sample.unsupported)
        return any(d is not None and d(self.layouts) for d in declared)

    def _check_collectives(self, trace: CommTrace) -> None:
        for declared in (self.op.max_collectives, self.sample.max_collectives):
            if declared is None:
                continue
            limit = declared if isinstance(declared, Mapping) else declared(self.layouts)
            for name, count in trace.phase("forward").items():
                if count > limit.get(name, 0):
                    self.note(f"{count} {name} in the forward, declared at most {limit.get(name, 0)}\n{trace}")

    def note(self, text: str | None) -> None:
        """Keep a problem for the report."""
        self.findings.note(self.case, self.policy, text)


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    """The stride as far as it means something: that of a dim with one element, or of an empty tensor, is arbitrary."""
    sizes = tuple(tensor.shape)
    return tuple(step if size > 1 and 0 not in sizes else 0 for step, size in zip(tensor.stride(), sizes, strict=True))


def _described(outputs: Sequence[Any] | None) -> str | None:
    """Dtypes and shapes of the tensors among some outputs."""
    if outputs is None:
        return None
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)


def _has_grad(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and output.requires_grad


def _gradients(
    outputs: Sequence[Any], seeds: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    roots = [o for o, s in zip(outputs, seeds, strict=True) if s is not None]
    if roots:
        torch.autograd.backward(roots, [s for s in seeds if s is not None])
    return [leaf.grad for leaf in leaves]


def _transposed(value: torch.Tensor) -> torch.Tensor:
    """The same values with the last dim outermost in memory."""
    return value if value.ndim < 2 else value.movedim(-1, 0).contiguous().movedim(0, -1)
