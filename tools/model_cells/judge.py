"""What a training step gave, and whether it is what one device gives.

Gradients are judged, per parameter and before clipping, by the norm of the difference; SGD moves the parameters, which
hides no wrong scale. After the steps that judge, one of AdamW shows that an optimizer with states works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

STEPS = 3
JUDGED_STEPS = (1, 3)
MAX_NORM = 1.0


@dataclass(frozen=True)
class Tolerance:
    """Largest differences, relative to the size of what is compared.

    Attributes:
        gradient: of a parameter; also of its value after AdamW.
        loss, norm: of the loss, and of the norm that clipping found.
    """

    gradient: float
    loss: float
    norm: float


TOLERANCES = {
    "float32": Tolerance(gradient=1e-5, loss=1e-6, norm=1e-6),
    "float64": Tolerance(gradient=1e-10, loss=1e-12, norm=1e-11),
    "bfloat16": Tolerance(gradient=2e-2, loss=2e-3, norm=2e-2),
}
FLOOR = 1e-3
"""Of the norm of all gradients: one that is smaller is judged as if it were that large. A gradient that is zero but for
rounding has no relative error."""


@dataclass(frozen=True)
class Rounding:
    """Relative differences, as in `Tolerance`; of gradients by step and name."""

    gradients: dict[int, dict[str, float]]
    loss: float
    norm: float


@dataclass
class Trace:
    """What was seen in training.

    Attributes:
        losses, norms: of the whole batch at each step; norms as clipping found them.
        gradients: by step, those of `JUDGED_STEPS`, before clipping; None where a parameter has none.
        after_adamw: parameters after one more step, of AdamW.
        rounding: how far it alone may take each of these; None: it is no matter.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[int, dict[str, torch.Tensor | None]] = field(default_factory=dict)
    after_adamw: dict[str, torch.Tensor] = field(default_factory=dict)
    rounding: Rounding | None = None


def train(
    model: torch.nn.Module,
    backward: Callable[[int], float],
    clip: Callable[..., torch.Tensor],
    whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> Trace:
    """Train a model, and note what is judged.

    Args:
        backward: forward and backward of a step; returns the loss of the whole batch.
        clip: `clip_grad_norm_`.
        whole: gives a gradient or a parameter as one device has it.
    """
    trace = Trace()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sgd = torch.optim.SGD(trained, lr=0.02, momentum=0.9)
    adamw = torch.optim.AdamW(trained, lr=1e-3, eps=1e-3, weight_decay=0.1)
    for step in range(1, STEPS + 2):
        loss = backward(step)
        if step in JUDGED_STEPS:
            trace.gradients[step] = {
                name: None if parameter.grad is None else whole(parameter.grad).detach().clone()
                for name, parameter in model.named_parameters()
            }
        norm = clip(model.parameters(), MAX_NORM)
        trace.losses.append(loss)
        trace.norms.append(float(whole(norm)))
        optimizer = sgd if step <= STEPS else adamw
        optimizer.step()
        optimizer.zero_grad()
    trace.after_adamw = {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    return trace


@dataclass
class Verdict:
    """How far two traces are apart.

    Attributes:
        problems: what is beyond its tolerance, worst first; empty: all is right.
        gradient, norm, loss, adamw: largest relative differences.
        worst: the parameter whose gradient is furthest off.
    """

    problems: list[str]
    gradient: float
    norm: float
    loss: float
    adamw: float
    worst: str = ""

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


MOST_ROUNDING = 0.25
"""What rounding may excuse at most: half a gradient is off by 0.5."""


def rounding_of(low: Trace, high: Trace) -> Rounding:
    """How far apart two ways to round may be: six times as far as a low precision is from a higher one on one device,
    up to `MOST_ROUNDING`."""

    def limit(off: float) -> float:
        return min(6 * off, MOST_ROUNDING)

    gradients = {step: _differences(low.gradients[step], high.gradients[step])[0] for step in JUDGED_STEPS}
    return Rounding(
        {step: {name: limit(error) for name, error in off.items()} for step, off in gradients.items()},
        limit(max(_relative(low.losses, high.losses))),
        limit(max(_relative(low.norms, high.norms))),
    )


def judge(got: Trace, want: Trace, tolerance: Tolerance) -> Verdict:
    """Compare with one device.

    Where rounding alone takes a gradient further than the tolerance (`rounding_of`), it may be off by as much: another
    order of sums rounds otherwise.
    """
    rounding = want.rounding or Rounding({step: {} for step in JUDGED_STEPS}, 0.0, 0.0)
    problems: list[tuple[float, str]] = []
    largest, worst = 0.0, ""
    for step in JUDGED_STEPS:
        off, missing = _differences(got.gradients[step], want.gradients[step])
        limits = {name: max(tolerance.gradient, limit) for name, limit in rounding.gradients[step].items()}
        problems += [(float("inf"), f"step {step}: {text}") for text in missing]
        problems += [
            (
                error,
                f"step {step}: gradient of {name} is off by {error:.1e}, {limits.get(name, tolerance.gradient):.1e} is "
                f"allowed{_ratio(got, want, step, name)}",
            )
            for name, error in off.items()
            if not error <= limits.get(name, tolerance.gradient)
        ]
        for name, error in off.items():
            if not error <= largest:
                largest, worst = error, name
    norm, norm_problems = _numbers("clipped norm", got.norms, want.norms, max(tolerance.norm, rounding.norm))
    loss, loss_problems = _numbers("loss", got.losses, want.losses, max(tolerance.loss, rounding.loss))
    after, missing = _differences(got.after_adamw, want.after_adamw)
    adamw = max(after.values(), default=0.0)
    problems += norm_problems + loss_problems + [(float("inf"), f"after AdamW: {text}") for text in missing]
    if not adamw <= tolerance.gradient:
        name = max(after, key=lambda key: after[key])
        problems.append((adamw, f"after AdamW: {name} is off by {adamw:.1e}"))
    problems.sort(key=lambda problem: -problem[0])
    return Verdict([text for _, text in problems], largest, norm, loss, adamw, worst)


def _differences(
    got: Mapping[str, torch.Tensor | None], want: Mapping[str, torch.Tensor | None]
) -> tuple[dict[str, float], list[str]]:
    """Relative differences by name, and what is there on one side only."""
    missing = [f"{name} is a parameter on one side only" for name in got.keys() ^ want.keys()]
    missing += [f"{name}: None on {_side(got, name)} only" for name in _common(got, want) if _differ(got, want, name)]
    sizes = {name: float(value.double().norm()) for name, value in want.items() if value is not None}
    floor = FLOOR * sum(size**2 for size in sizes.values()) ** 0.5
    off = {}
    for name, size in sizes.items():
        value, wanted = got.get(name), want[name]
        if value is None or wanted is None:
            continue
        if value.shape != wanted.shape:
            missing.append(f"{name} has shape {tuple(value.shape)}, on one device {tuple(wanted.shape)}")
            continue
        off[name] = float((value.double() - wanted.double()).norm()) / max(size, floor, 1e-300)
    return off, missing


def _common(got: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    return [name for name in want if name in got]


def _differ(got: Mapping[str, Any], want: Mapping[str, Any], name: str) -> bool:
    return (got[name] is None) != (want[name] is None)


def _side(got: Mapping[str, Any], name: str) -> str:
    return "the ranks" if got[name] is None else "one device"


def _ratio(got: Trace, want: Trace, step: int, name: str) -> str:
    """By which factor a gradient is too large, where it is a plain factor: that tells what is wrong."""
    value, wanted = got.gradients[step][name], want.gradients[step][name]
    assert value is not None
    assert wanted is not None
    value, wanted = value.double().flatten(), wanted.double().flatten()
    factor = float(value @ wanted) / max(float(wanted @ wanted), 1e-300)
    rest = float((value - factor * wanted).norm()) / max(float(value.norm()), 1e-300)
    return f" (it is {factor:.4g} times what it should be)" if rest < 1e-2 and abs(factor - 1) > 1e-2 else ""


def _relative(got: list[float], want: list[float]) -> list[float]:
    return [abs(a - b) / max(abs(b), 1e-300) for a, b in zip(got, want, strict=True)]


def _numbers(what: str, got: list[float], want: list[float], tolerance: float) -> tuple[float, list[tuple[float, str]]]:
    errors = _relative(got, want)
    problems = [
        (error, f"step {step}: {what} is {a:.9g}, on one device {b:.9g}")
        for step, (error, a, b) in enumerate(zip(errors, got, want, strict=True), start=1)
        if not error <= tolerance
    ]
    return max(errors), problems
