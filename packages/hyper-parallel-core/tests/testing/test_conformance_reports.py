"""What the conformance kit says of a wrong rule: first the case, the smallest one, with a program that shows it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hyper_parallel import Strategy
from hyper_parallel._rules.call import Solution
from hyper_parallel._rules.strategy import LayoutOp, S
from hyper_parallel.testing import ConformanceError, OpConformance, RanksFailed, check_op, sample, tensor
from hyper_parallel.testing.checking import check_cases
from hyper_parallel.testing.function_operators import StrategyFunctionOp, distributed

SRC = Path(__file__).parents[2] / "src"
ONE = ((2,),)


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], S(0))])
def raises_on_shards(x):
    if x.shape[0] == 1:
        raise RuntimeError("cannot take a single row")
    return x * 2


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], S(0))])
def transposed_in_place(x):
    return x.t().contiguous()


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], S(0))])
def ends_the_process(x):
    if torch.distributed.is_initialized() and len(x) == 3:
        os._exit(3)
    return x * 2


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], S(0))])
def never_returns(x):
    if torch.distributed.is_initialized() and len(x) == 3:
        time.sleep(100)
    return x * 2


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (raises_on_shards, tensor(3), r"rank 1: RuntimeError: cannot take a single row\n"),
        (transposed_in_place, tensor(4, 3), r"rank 0: output 0 \(S\(0\)\): the local tensor has shape \(3, 2\)"),
        (ends_the_process, tensor(5), "rank 0: the process ended with exit code 3"),
        (never_returns, tensor(5), r"rank.* did not return within 8 s.*in never_returns"),
    ],
    ids=["raises", "wrong piece", "dies", "hangs"],
)
def test_case_that_does_not_end_comes_first_in_the_report(ranks, function, given, message):
    """The case, what was wrong, the traceback or the stacks, and a program: also where a rank died or hangs."""
    case = r"  mesh 2, policy strict, input 0: S\(0\).*\[a listed strategy\]\n *"

    def impatient(n, fn, *args):
        return ranks(n, fn, *args, timeout=8 if (fn, function) == (check_cases, never_returns) else 120)

    with pytest.raises(RanksFailed, match=f"(?s)^{case}{message}.*print\\(dist.get_rank\\(\\), x0.grad\\)$"):
        check_op(impatient, function, given, meshes=ONE)


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0), S(0)], S(0))])
def has_one_input(x):
    return x * 2


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], (S(0), S(0)))])
def has_one_result(x):
    return x * 2


@pytest.mark.parametrize(
    ("function", "message"),
    [(has_one_input, "but the call has 1 tensor inputs"), (has_one_result, "but the call has 1 results")],
)
def test_strategy_of_another_length_is_found(ranks, function, message):
    with pytest.raises(RanksFailed, match=rf"the rule of {function.__name__} lists Strategy.*, {message}"):
        check_op(ranks, function, tensor(4), meshes=ONE)


class KeepsLayout(LayoutOp):
    def solve(self, call):
        layout = call.inputs[0].layout
        if layout.is_partial():
            layout = layout.replicated()
        return Solution([layout], [layout])


@distributed(KeepsLayout)
def cumsum_rows(x):
    return x.cumsum(1)


def test_failure_names_the_smallest_layout(ranks):
    """Wrong wherever dim 1 is sharded: the rest of the layout is shrunk away."""
    with pytest.raises(ConformanceError) as caught:
        check_op(ranks, cumsum_rows, tensor(4, 6), meshes=((2, 2),))
    report = str(caught.value)
    assert "mesh, [Replicate(), Shard(1)])" in report, report
    assert "requires_grad" not in report[report.index("# torchrun") :]


@distributed(StrategyFunctionOp, rows=lambda call: [Strategy([S(0)], S(0))])
def scaled(x):
    return x / x.shape[0]


class Scaled(OpConformance):
    op = scaled
    samples = (sample(tensor(2, low=1, high=1.0001)),)


def test_reproduction_runs_as_printed(ranks, tmp_path):
    """Saved beside the test and started as its first line says, it shows the wrong value."""
    with pytest.raises(pytest.fail.Exception) as caught:
        Scaled().test_layouts(ranks, (0, (2,), True), None)
    report = str(caught.value)
    program = [line.removeprefix("    ") for line in report[report.index("# torchrun") :].split("\n\n")[0].splitlines()]
    (tmp_path / "reproduce.py").write_text("\n".join(program))
    command = program[0].removeprefix("# torchrun ").split()
    path = os.pathsep.join([str(SRC), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # One device gives 0.5, and half of that gradient.
    assert "local=tensor([1.00" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("DTensor(shape=(2,)") == 4, done.stdout


def operator_with_fake(name, fake):
    operator = torch.library.custom_op(
        f"conformance_of_the_kit::{name}", lambda x: x * x, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operator.register_fake(fake)
    StrategyFunctionOp(
        f"torch.ops.conformance_of_the_kit.{name}",
        rows=lambda call: [Strategy([S(d)], S(d)) for d in range(call.inputs[0].layout.ndim)],
    )
    return operator


right_fake = operator_with_fake("right", torch.empty_like)
flat_fake = operator_with_fake("flat", lambda x: x.new_empty(x.shape[0]))
long_fake = operator_with_fake("long", lambda x: x.new_empty(x.shape[0] + 1, x.shape[1]))


def with_right_fake(x):
    return right_fake(x)


def with_flat_fake(x):
    return flat_fake(x)


def with_long_fake(x):
    return long_fake(x)


def test_operator_with_a_right_register_fake_passes(ranks):
    check_op(ranks, with_right_fake, tensor(4, 3, grad=False), meshes=ONE)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (with_flat_fake, "float32[4]"),
        (with_long_fake, "float32[5, 3]"),
    ],
)
def test_wrong_register_fake_is_named_as_the_cause(ranks, function, said):
    with pytest.raises((ConformanceError, RanksFailed)) as caught:
        check_op(ranks, function, tensor(4, 3, grad=False, dtype=torch.float32), meshes=ONE)
    assert (
        f"the cause: on meta tensors, from which the engine has global shapes, the function gives {said}, on real ones "
        "float32[4, 3]: correct what torch.library.register_fake registers for it"
    ) in str(caught.value)
