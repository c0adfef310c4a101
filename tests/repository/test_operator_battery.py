"""The battery (``nox -s battery``) tells right from refused, wrong and raw, and runs PyTorch's samples."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hyper_parallel import DTensor, MissingOpError, RedistributionError, Shard

ROOT = Path(__file__).parents[2]
pytest.importorskip("expecttest", reason="torch.testing._internal, which has the samples, imports it")
sys.path.insert(0, str(ROOT))  # here and on the ranks


def one_off(x):
    return x + 1 if isinstance(x, DTensor) else x


def other_gradient(x):
    return x.detach() + 2 * x - 2 * x.detach() if isinstance(x, DTensor) else x


def raw(x):
    return {}[x] if isinstance(x, DTensor) else x


def refusing(x):
    if isinstance(x, DTensor):
        raise RedistributionError("not so")
    return x


def without_rule(x):
    if isinstance(x, DTensor):
        raise MissingOpError("no rule")
    return x


FUNCTIONS = {
    torch.sin: ("right", ""),
    one_off: ("wrong", "output 0: "),
    other_gradient: ("wrong", "gradient 0: "),
    raw: ("raw error", "KeyError: "),
    refusing: ("refused", "RedistributionError: not so"),
    without_rule: ("no rule", "MissingOpError: "),
}


def judged(function):
    from tools.operator_battery.on_ranks import Case, judge

    x = torch.arange(5.0, dtype=torch.float64).reshape(5, 1).requires_grad_()
    sample = SimpleNamespace(input=x, args=(), kwargs={}, output_process_fn_grad=lambda out: out)
    return judge(SimpleNamespace(op=function), sample, Case(0, (2,), ((Shard(0),),), "partial"))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_verdicts(ranks, function):
    kind, text = FUNCTIONS[function]
    for found in ranks(2, judged, function):
        assert found[0] == kind
        assert found[1].startswith(text)


def test_samples_of_pytorch():
    command = [sys.executable, "-m", "tools.operator_battery", "^cumsum$", "--samples", "2", "--threads"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "1 functions, " in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("auto ")]
    right, *others = map(int, row.split()[1:])
    assert right > 5
    assert others == [0, 0, 0, 0, 0]
