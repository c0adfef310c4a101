"""Names of modules before they moved into folders, and files that were written then."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hyper_parallel import Layout, PackedShard, Shard, ShardingPlan
from hyper_parallel._old_paths import MOVED

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_name_gives_the_module_itself(old):
    new = importlib.import_module(f"hyper_parallel.{MOVED[old]}")
    assert importlib.import_module(f"hyper_parallel.{old}") is new
    assert new.__spec__.name == new.__name__ == f"hyper_parallel.{MOVED[old]}"


@pytest.mark.parametrize("old", ["dtensor", "families.views", "op_table", "checkpoint.blocks", "registry", "comm"])
def test_an_old_name_works_as_the_first_import_of_a_program(old):
    code = f"import hyper_parallel.{old}; from hyper_parallel.{old} import *; print('there')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("there\n", "")


def test_attributes_of_the_package_that_are_no_module_are_still_asked_of_plugins():
    import hyper_parallel

    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = hyper_parallel.no_such_name


@pytest.mark.ranks(1)
def test_files_written_before_load():
    saved = torch.load(DATA / "saved_before_the_folders.pt", weights_only=False)
    tensor, layout, plan = saved["tensor"], saved["layout"], saved["plan"]
    assert torch.equal(tensor.full_tensor(), torch.arange(6.0).view(2, 3))
    assert (tensor.placements, tensor.layout) == ((Shard(0),), layout)
    assert isinstance(layout, Layout)
    assert isinstance(plan, ShardingPlan)
    assert plan.plan == {"w": [Shard(0)]}
    assert saved["packed"] == PackedShard(0, (2, 4))


@pytest.mark.ranks(1)
def test_tensors_written_before_load_without_running_code():
    saved = torch.load(DATA / "tensor_saved_before_the_folders.pt", weights_only=True)
    assert torch.equal(saved["tensor"].full_tensor(), torch.arange(6.0).view(2, 3))
