"""The runner of random programs: what is wrong with an operator is found, and what is right passes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hyper_parallel import DTensor, RedistributionError, Shard
from hyper_parallel.testing.layouts import Placed

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # for `tools`


def one_off(x):
    return x + 1 if isinstance(x, DTensor) else x.clone()


def other_gradient(x):
    return x.detach() + 2 * x - 2 * x.detach() if isinstance(x, DTensor) else x.clone()


def raw(x):
    return {}[x] if isinstance(x, DTensor) else x.clone()


def refusing(x):
    if isinstance(x, DTensor):
        raise RedistributionError("not so")
    return x.clone()


FUNCTIONS = {
    torch.sin: ("right", ""),
    one_off: ("wrong", "after 1 steps: value 1: "),
    other_gradient: ("wrong", "after 1 steps: gradient 0: "),
    raw: ("raw error", "KeyError: "),
    refusing: ("refused", ""),
}


def judged(function):
    from tools.random_programs.on_ranks import judge
    from tools.random_programs.operations import Step
    from tools.random_programs.programs import Program

    x = torch.arange(5.0, dtype=torch.float64).reshape(5, 1)
    program = Program((x,), (Placed((Shard(0),)),), (Step("function($0)", (0,), function),))
    return judge(program, (2,), "partial", 0)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_verdicts(ranks, function):
    kind, text = FUNCTIONS[function]
    for found in ranks(2, judged, function):
        assert found[0] == kind
        assert found[1].startswith(text)


def test_every_rank_draws_the_same_program_and_some_programs_write():
    from tools.random_programs.programs import draw_program

    drawn = [str(draw_program(seed, 1 + seed % 2, 8)) for seed in range(20)]
    assert drawn == [str(draw_program(seed, 1 + seed % 2, 8)) for seed in range(20)]
    assert len(set(drawn)) == 20
    assert any("_($" in text for text in drawn)


def test_a_few_programs_equal_one_device():
    command = [sys.executable, "-m", "tools.random_programs", "--count", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert " right" in done.stdout
