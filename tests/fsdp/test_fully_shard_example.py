"""``examples/fully_sharded.py``: an unmodified model of ``transformers`` learns what it learns on one device."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "fully_sharded.py"


def run_example(*arguments):
    return runpy.run_path(str(EXAMPLE))["main"](arguments)


@pytest.mark.parametrize("tp", [1, 2])
def test_losses_are_those_of_one_device(ranks, tp):
    assert max(ranks(4, run_example, "--tp", str(tp), "--steps", "4", timeout=240)) < 1e-5
