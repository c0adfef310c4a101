"""Which cells there are: every two values of model, mesh and options together, in few cells.

What cannot go together is named here with its reason, and printed in the report.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from .zoo import MODELS

MESHES: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "dp_shard4": {"dp_shard": 4},
    "dp_shard2-tp2": {"dp_shard": 2, "tp": 2},
    "dp_replicate2-tp2": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
    "ep2-dp_shard2": {"dp_shard": 2, "ep": 2},
    "ep2-tp2": {"tp": 2, "ep": 2},
}
"""Degrees by name; ep takes its ranks from dp_shard or tp."""


@dataclass(frozen=True)
class Cell:
    """One case.

    Attributes:
        model: a key of the zoo.
        mesh: a key of `MESHES`.
        spread: what is sharded over tp besides the layers: ``"both"`` activations along the sequence and logits,
            ``"sequence"``, ``"loss"``, ``"neither"``; ``"-"`` without tp.
        batch: a kind of batch.
        form: ``"plain"`` tensors of each data rank, or ``"dtensor"``.
        checkpointing: of `parallelize`.
        dtype: ``"float32"``, ``"float64"`` throughout, or ``"bfloat16"`` as mixed precision.
        experts: form in which experts are computed; ``"-"`` where there are none.
        lora: ``"lora"`` adapters on all linear layers, or ``"-"``.
    """

    model: str
    mesh: str
    spread: str = "both"
    batch: str = "plain"
    form: str = "plain"
    checkpointing: str = "none"
    dtype: str = "float32"
    experts: str = "-"
    lora: str = "-"

    @property
    def title(self) -> str:
        return " ".join(self.values())

    def values(self) -> tuple[str, ...]:
        return tuple(asdict(self).values())

    @property
    def degrees(self) -> Mapping[str, int]:
        return MESHES[self.mesh]

    @property
    def ranks(self) -> int:
        return self.data_ranks * self.degrees.get("tp", 1)

    @property
    def data_ranks(self) -> int:
        return self.degrees.get("dp_shard", 1) * self.degrees.get("dp_replicate", 1)


FACTORS: dict[str, tuple[str, ...]] = {
    "model": tuple(MODELS),
    "mesh": tuple(MESHES),
    "spread": ("both", "neither", "sequence", "loss", "-"),
    "batch": ("plain", "padding", "uneven", "images"),
    "form": ("plain", "dtensor"),
    "checkpointing": ("none", "full", "selective"),
    "dtype": ("float32", "float64", "bfloat16"),
    "experts": ("eager", "batched_mm", "grouped_mm", "-"),
    "lora": ("-", "lora"),
}


def _has(values: Mapping[str, str], what: str) -> bool | None:
    """Whether the model has something; None where no model is chosen yet."""
    return getattr(MODELS[values["model"]], what) if "model" in values else None


EXCLUDED: dict[str, Callable[[Mapping[str, str]], bool]] = {
    "a model without experts has no ep axis, and no form of experts": lambda v: (
        _has(v, "experts") is False and ("ep2" in v.get("mesh", "") or v.get("experts", "-") != "-")
    ),
    "a model with experts computes them in some form": lambda v: (
        v.get("experts") == "-" and (bool(_has(v, "experts")) or "ep2" in v.get("mesh", ""))
    ),
    "a model of text takes no images": lambda v: _has(v, "images") is False and v.get("batch") == "images",
    "without tp nothing but parameters is spread": lambda v: (
        "mesh" in v and "spread" in v and ("tp" in v["mesh"]) == (v["spread"] == "-")
    ),
    "with one data rank a batch is plain": lambda v: (
        v.get("mesh") in ("tp2", "tp4", "ep2-tp2") and v.get("form") == "dtensor"
    ),
    "torch has no grouped matrix product in float64": lambda v: (
        v.get("experts") == "grouped_mm" and v.get("dtype") == "float64"
    ),
    "the rounding of a delta rule is larger than float32's tolerance: float64 shows whether it is rounding": lambda v: (
        bool(_has(v, "recurrent")) and v.get("dtype") == "float32"
    ),
}
"""Reasons, and whether values (of all factors, or of some) are excluded by them."""


def excluded(values: Mapping[str, str]) -> str | None:
    """Why these values cannot go together, or None."""
    return next((reason for reason, applies in EXCLUDED.items() if applies(values)), None)


def possible(values: Mapping[str, str]) -> bool:
    """Whether some cell has these values."""
    if excluded(values):
        return False
    left = [name for name in FACTORS if name not in values]
    if not left:
        return True
    return any(possible({**values, left[0]: value}) for value in FACTORS[left[0]])


def pairs_of(values: Mapping[str, str]) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    yield from itertools.combinations([(name, values[name]) for name in FACTORS], 2)


def all_pairs() -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Every pair of values that some cell can have."""
    return [
        ((first, a), (second, b))
        for first, second in itertools.combinations(FACTORS, 2)
        for a in FACTORS[first]
        for b in FACTORS[second]
        if possible({first: a, second: b})
    ]


def pairwise() -> list[Cell]:
    """Cells in which every possible pair of values occurs, the same in every process."""
    wanted = dict.fromkeys(all_pairs())
    used: dict[tuple[str, str], int] = {}
    found = []
    while wanted:
        (first, a), (second, b) = next(iter(wanted))
        values = _fill({first: a, second: b}, wanted, used)
        for pair in pairs_of(values):
            wanted.pop(pair, None)
        for item in values.items():
            used[item] = used.get(item, 0) + 1
        found.append(Cell(**values))
    return found


def _fill(
    given: dict[str, str],
    wanted: Mapping[tuple[tuple[str, str], tuple[str, str]], None],
    used: Mapping[tuple[str, str], int],
) -> dict[str, str]:
    """Give each other factor the value that has most pairs to cover, of these the one that is used least."""
    values = dict(given)
    for name in FACTORS:
        if name in values:
            continue
        best = None
        for place, value in enumerate(FACTORS[name]):
            if not possible({**values, name: value}):
                continue
            new = sum(
                (((name, value), other) in wanted) or ((other, (name, value)) in wanted) for other in values.items()
            )
            rank = (-new, used.get((name, value), 0), place)
            best = min(best or (rank, value), (rank, value))
        assert best is not None
        values[name] = best[1]
    return values


CORE = (
    Cell("llama", "tp2", "both", "padding"),
    Cell("qwen3", "dp_shard2-tp2", "both", "uneven", checkpointing="full", lora="lora"),
    Cell("qwen3_moe", "ep2-dp_shard2", "-", "padding", "dtensor", experts="grouped_mm"),
    Cell("qwen3_next", "dp_shard2-tp2", "both", dtype="float64", experts="eager"),
    Cell("qwen3_5", "tp4", "both", "uneven", checkpointing="selective", dtype="float64"),
    Cell("qwen3_5_vl", "dp_replicate2-tp2", "loss", "images", dtype="float64"),
    Cell("qwen3_5_moe_vl", "ep2-tp2", "both", "images", dtype="float64", experts="batched_mm"),
    Cell("qwen3_vl_moe", "dp_shard4", "-", "images", "dtensor", experts="grouped_mm"),
    Cell("deepseek_v3", "tp4", "sequence", dtype="bfloat16", experts="batched_mm"),
    Cell("deepseek_v32", "dp_shard2-tp2", "both", "uneven", experts="grouped_mm"),
    Cell("deepseek_v4", "tp2", "both", "padding", checkpointing="full", experts="eager"),
    Cell("gpt_oss", "ep2-tp2", "both", lora="lora", experts="grouped_mm"),
)
"""A cell of most models, with every mesh and option among them: for each run of the tests."""


def simpler(cell: Cell) -> Iterator[Cell]:
    """The cell with one option after the other put to its default, for finding the one that matters."""
    plain = Cell(cell.model, cell.mesh)
    defaults = {
        "spread": "both" if "tp" in cell.mesh else "-",
        "batch": plain.batch,
        "form": plain.form,
        "checkpointing": plain.checkpointing,
        "dtype": "float64" if cell.experts != "grouped_mm" else "float32",
        "experts": "batched_mm" if cell.experts != "-" else "-",
        "lora": plain.lora,
    }
    for name, value in defaults.items():
        changed = replace(cell, **{name: value})
        if changed != cell and excluded(asdict(changed)) is None:
            yield changed
