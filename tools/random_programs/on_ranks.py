"""The ranks' side: programs on DTensors, each compared with the same program on plain tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hyper_parallel import redistribute_policy
from hyper_parallel.testing import make, mesh_of
from hyper_parallel.testing.progress import busy_with

from ..operator_battery.on_ranks import Verdict, check_that_all_are_here, compare, kind_of
from .operations import beside
from .programs import Program, draw_program, execute

REFUSALS = ("refused", "no rule")


@dataclass(frozen=True)
class Choice:
    """What is run of each seed: with which redistribute policies, and how many steps."""

    policies: tuple[str, ...]
    length: int


def run_seeds(seeds: Iterable[int], choice: Choice, skip: Collection[str]) -> list[Verdict]:
    """This rank's verdicts on the programs of these seeds but those in ``skip``."""
    verdicts = []
    for seed in seeds:
        mesh_shape = (2, 2) if seed % 2 else (dist.get_world_size(),)
        program = draw_program(seed, len(mesh_shape), choice.length)
        for policy in choice.policies:
            name = f"{seed} {policy}"
            if name in skip:
                continue
            busy_with(name)
            kind, text = judge(program, mesh_shape, policy, seed)
            verdicts.append(Verdict(name, kind, f"{text}\n{program}" if text else ""))
            check_that_all_are_here(verdicts[-1])
    return verdicts


def cotangent(value: torch.Tensor, number: int) -> torch.Tensor:
    """Fixed weights for one value of a program."""
    generator = torch.Generator().manual_seed(number)
    weights = torch.empty(tuple(value.shape), dtype=torch.float64).uniform_(-1, 1, generator=generator)
    return beside(value, weights.to(value.dtype))


def judge(program: Program, mesh_shape: tuple[int, ...], policy: str, seed: int) -> tuple[str, str]:
    """Kind and text of this rank's verdict. A program is cut where a step is refused, and what comes before judged."""
    mesh = mesh_of(mesh_shape)
    steps, refusal = len(program.steps), ""
    while True:
        plain = [t.clone().requires_grad_() for t in program.leaves]
        try:
            expected = execute(program, plain, steps, cotangent)
        except RuntimeError:  # a write to what the backward needs
            return "no program", ""
        pairs = zip(program.leaves, program.placed, strict=True)
        leaves = [
            make(t, mesh, p.placements, shard_order=p.shard_order, requires_grad=True, seed=seed) for t, p in pairs
        ]
        try:
            with redistribute_policy(policy):  # type: ignore[arg-type]
                values = execute(program, leaves, steps, cotangent)
        except Exception as error:
            kind = kind_of(error)
            if kind not in REFUSALS:
                return kind, f"{type(error).__name__}: {error}"
            refusal, steps = refusal or kind, steps - 1
            if steps < 0:
                return kind, ""
            continue
        break
    problems = [compare(f"value {i}", *pair) for i, pair in enumerate(zip(values, expected, strict=True))]
    grads = [(got.grad, want.grad) for got, want in zip(leaves, plain, strict=True)]
    problems += [compare(f"gradient {i}", *pair) for i, pair in enumerate(grads)]
    problem = next((p for p in problems if p is not None), None)
    return ("wrong", f"after {steps} steps: {problem}") if problem is not None else (refusal or "right", "")
