"""Operators whose strategies are a list in the YAML table that names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hyper_parallel._rules.call import Call
from hyper_parallel._rules.op import OpSummary
from hyper_parallel._rules.strategy import S, Strategy, StrategyOp
from hyper_parallel.sharding.placements import Partial, Placement, Replicate

__all__ = ["Listed"]


class Listed(StrategyOp):
    """An operator that runs as it is on each rank's piece; the table lists which dims may be sharded together.

        grid_sample:
          distributed_op_module: hyper_parallel._rules.families.listed
          distributed_op_class: Listed
          params:
            signature: "input, grid, mode=bilinear, padding_mode=zeros, align_corners=None"
            rows:
              - {input: 0, grid: 0, out: 0}   # images are independent
              - {input: 1, out: 1}            # channels too; the whole grid on every rank

    Args:
        signature: parameter names of the function.
        rows: per strategy the sharded dim of each tensor argument, and as ``out`` that of the output (a list for
            several), or ``sum`` (a pending sum). Negative dims count from the end. A row that names an argument that
            was not passed leaves it out.
        outputs: number of outputs.
        whole: for the table of operators, which inputs have to be whole, and why.
    """

    def __init__(
        self, op_name: str, *, signature: str, rows: Sequence[Mapping[str, Any]], outputs: int = 1, whole: str = ""
    ) -> None:
        self.signature = signature
        super().__init__(op_name)
        self.rows, self.outputs = rows, outputs
        together = ("; ".join(f"{n} {d}" for n, d in row.items() if n != "out") for row in rows)
        self.summary = OpSummary(f"dims {' or '.join(together)}", whole=whole)

    def num_outputs(self, call: Call) -> int:
        return self.outputs

    def strategies(self, call: Call) -> Iterable[Strategy]:
        ranks = (
            [len(shape) for shape in call.output_shapes()] if any(_from_end(row["out"]) for row in self.rows) else []
        )
        for row in self.rows:
            inputs: dict[str, Placement] = {}
            for name, dim in row.items():
                if name != "out" and call.index(name) is not None:
                    inputs[name] = S(dim if dim >= 0 else len(call.spec(name).shape) + dim)
            given = row["out"] if isinstance(row["out"], list) else [row["out"]] * self.outputs
            yield Strategy(inputs, [_output(out, ranks[i] if ranks else 0) for i, out in enumerate(given)])


def _from_end(out: Any) -> bool:
    return any(isinstance(o, int) and o < 0 for o in (out if isinstance(out, list) else [out]))


def _output(out: Any, ndim: int) -> Placement:
    if isinstance(out, int):
        return S(out if out >= 0 else ndim + out)
    if out == "sum":
        return Partial()
    if out == "whole":
        return Replicate()
    raise TypeError(f"a row's 'out' is a dim, 'sum' or 'whole', not {out!r}")
