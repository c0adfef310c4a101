"""The page of all cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from .cells import CORE, EXCLUDED, FACTORS, MESHES, Cell, all_pairs
from .judge import FLOOR, JUDGED_STEPS, STEPS, TOLERANCES
from .zoo import MODELS

HEAD = """# Models over meshes and options

Unmodified models of `transformers`, small ones of each family, as [`parallelize`](train-a-model.md) makes them, against
one plain process with the same weights and the whole batch. Written by `nox -s models`:

```
nox -s models                          # all cells; goes on where a run was stopped
nox -s models -- --shard 2/4           # a part, for several machines; copy their files of runs/models together
nox -s models -- 'llama tp2'           # cells that have these words
nox -s models -- --failed --simplify   # those that failed, each with the fewest options that fail
```

{count} cells have all {pairs} pairs of values of model, mesh and options that go together; {core} more are part of
`nox -s tests`. A cell is {steps} steps of SGD with momentum and clipped gradients, each with another batch, and then
one of AdamW. Weights that libraries set to zero or one are random, so that a bias which is added once per rank shows.

- **Gradients**, per parameter and before clipping, at steps {judged}: the norm of the difference relative to the
  gradient's own (at least to {floor} of that of all together), and None exactly where one device has None. Allowed:
  {tolerances}.
- **Norm**: what `clip_grad_norm_` returns, each step. **Loss**: of the whole batch, each step.
- **AdamW**: parameters after its step. It hides a wrong scale of gradients: it shows that states and updates work.
- float64 is so throughout: norms, softmax and delta rules for which `transformers` asks for float32 get float64.
- bfloat16 is `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`, against a process that
  computes in bfloat16. Six times the distance of that process from float32 is allowed where that is more, at most a
  quarter.
- The auxiliary loss of routers is part of the loss where a family has it, but for plain tensors of several data ranks:
  there it is that of each rank's rows ([batches](train-a-model.md#batches)).

The judge is tested by what it must find: half a gradient, one times tp, a dropped auxiliary loss, one token
too many on one rank.

"""


def report(cells: Sequence[Cell], results: Mapping[Cell, Mapping[str, Any]]) -> str:
    """The page, in Markdown."""
    limits = [f"{t.gradient:g} in {name} (norm {t.norm:g}, loss {t.loss:g})" for name, t in TOLERANCES.items()]
    page = HEAD.format(
        count=len(cells), pairs=len(all_pairs()), core=len(CORE), steps=STEPS,
        judged=" and ".join(map(str, JUDGED_STEPS)), floor=FLOOR, tolerances=", ".join(limits),
    )  # fmt: skip
    seconds = sum(result["seconds"] for result in results.values())
    right = sum(not result["problems"] for result in results.values())
    wrong, left = len(results) - right, len(cells) - len(results)
    page += (
        f"**{right} of {len(cells)} cells are right, {wrong} fail, {left} have not run.** Torch "
        f"{torch.__version__.split('+')[0]}, transformers {transformers.__version__}, gloo ranks on the CPU. "
        f"The cells took {seconds / 60:.0f} minutes.\n\n"
    )
    parts = (_by_model_and_mesh(cells, results), _failures(cells, results), _all(cells, results), _excluded())
    return page + "\n".join(line for part in parts for line in part)


def headline(problem: str) -> str:
    """The line of a problem that says what it is: of a traceback, the one with the error."""
    lines = [line for line in problem.strip().splitlines() if line[:1].strip()]
    return lines[-1].replace("`", "'")[:300]


def _mark(result: Mapping[str, Any] | None) -> str:
    return "not run" if result is None else "**fails**" if result["problems"] else "right"


def _by_model_and_mesh(cells: Sequence[Cell], results: Mapping[Cell, Mapping[str, Any]]) -> list[str]:
    lines = ["## By model and mesh", "", f"| model | {' | '.join(MESHES)} |", "|---" * (1 + len(MESHES)) + "|"]
    for model in MODELS:
        marks = []
        for mesh in MESHES:
            found = [_mark(results.get(cell)) for cell in cells if (cell.model, cell.mesh) == (model, mesh)]
            counts = [f"{found.count(mark)} {mark}" for mark in ("right", "**fails**", "not run") if mark in found]
            marks.append(", ".join(counts) or "-")
        lines.append(f"| {model} | {' | '.join(marks)} |")
    return [*lines, ""]


def _failures(cells: Sequence[Cell], results: Mapping[Cell, Mapping[str, Any]]) -> list[str]:
    failed = [cell for cell in cells if cell in results and results[cell]["problems"]]
    if not failed:
        return []
    lines = ["## What fails", ""]
    for cell in failed:
        problems = results[cell]["problems"]
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        lines.append(f"- `{cell.title}`: `{headline(problems[0])}`{more}")
    return [*lines, ""]


def _all(cells: Sequence[Cell], results: Mapping[Cell, Mapping[str, Any]]) -> list[str]:
    lines = [
        "## All cells", "",
        "Spread over tp besides layers: activations along the `sequence`, logits (`loss`), `both` or `neither`.",
        "", f"| {' | '.join(FACTORS)} | gradients | norm | loss | AdamW | |", "|---" * (len(FACTORS) + 5) + "|",
    ]  # fmt: skip
    for cell in cells:
        result = results.get(cell)
        numbers = ["", "", "", ""]
        if result is not None and "gradient" in result:
            numbers = [f"{result[name]:.0e}" for name in ("gradient", "norm", "loss", "adamw")]
        lines.append(f"| {' | '.join((*cell.values(), *numbers, _mark(result)))} |")
    return [*lines, ""]


def _excluded() -> list[str]:
    return ["## What does not go together", "", *(f"- {reason}" for reason in EXCLUDED), ""]
