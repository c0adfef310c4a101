"""What a training run shows and leaves behind: a progress bar, a JSON log and a plot of the loss."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

_SMALLEST_SHOWN = 1e-8  # of a difference, in the plot: a logarithmic axis has no place for zero


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Collectives and their bytes are those of one rank."""

    step: int
    loss: float
    tokens_per_second: float
    collectives: int
    collective_bytes: int


@dataclass(frozen=True)
class Comparison:
    """This run's losses against the one-rank run's, step by step from the first."""

    reference_losses: list[float]
    max_difference: float
    tolerance: float

    @property
    def equal(self) -> bool:
        """Whether no loss differs by more than the tolerance. A NaN never does."""
        return self.max_difference <= self.tolerance


class ProgressBar:
    """A bar on the terminal; rank 0's only, the other ranks show nothing."""

    def __init__(self, title: str, first: int, total: int, *, shown: bool) -> None:
        self._bar = tqdm(desc=title, initial=first, total=total, unit="step", disable=not shown)

    def show(self, record: StepRecord) -> None:
        """Advance by one step."""
        communication = f"{record.collectives} calls {_readable(record.collective_bytes)}"
        self._bar.set_postfix_str(
            f"loss {record.loss:.3f}, {record.tokens_per_second:,.0f} tokens/s, comm/step {communication}",
            refresh=False,
        )
        self._bar.update()

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._bar.close()


def write_log(path: Path, run: dict[str, Any], records: list[StepRecord], comparison: Comparison | None) -> None:
    """Write the JSON log: ``run`` (settings and versions), one entry per step, and the comparison if there was one."""
    log = {"schema": 1, "run": run, "steps": [asdict(record) for record in records], "comparison": None}
    if comparison is not None:
        log["comparison"] = asdict(comparison) | {"equal": comparison.equal}
    path.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")


def plot_loss(path: Path, title: str, records: list[StepRecord], comparison: Comparison | None) -> None:
    """Write a PNG: the loss by step and, below it, how far it is from the one-rank run's."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    steps = [record.step for record in records]
    losses = [record.loss for record in records]
    rows = 1 if comparison is None else 2
    figure, axes = pyplot.subplots(
        rows, 1, sharex=True, squeeze=False, figsize=(7, 3 + 1.5 * rows), height_ratios=[3, 1][:rows]
    )
    top = axes[0, 0]
    top.plot(steps, losses, label=title)
    top.set_ylabel("loss (nats per byte)")
    if comparison is not None:
        top.plot(steps, comparison.reference_losses, "--", label="reference: one rank, plain PyTorch")
        bottom = axes[1, 0]
        pairs = zip(losses, comparison.reference_losses, strict=True)
        bottom.plot(steps, [max(abs(a - b), _SMALLEST_SHOWN) for a, b in pairs])
        bottom.axhline(comparison.tolerance, color="grey", linestyle=":")
        bottom.annotate("allowed", (steps[0], comparison.tolerance), color="grey", va="bottom")
        bottom.set_yscale("log")
        bottom.set_ylim(_SMALLEST_SHOWN / 2, max(comparison.max_difference, comparison.tolerance) * 10)
        bottom.set_ylabel("difference")
    top.legend()
    axes[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _readable(count: int) -> str:
    for unit in ("B", "kB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} MB"
