"""What of torch is changed, when, and that ``hyper-parallel doctor`` says so."""

import subprocess
import sys

import pytest

from hyper_parallel import torch_compat

STATE = """
import importlib, torch
from torch.distributed.checkpoint import state_dict  # imports some of the functions by name
from hyper_parallel.torch_compat import CHANGES
def value(where):
    parts = where.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
            break
        except ImportError:
            continue
    for part in parts[length:]:
        found = getattr(found, part)
    if where.endswith(".VariableBuilder"):  # Dynamo's view of types
        return list(found._type_dispatch_impl(True))
    return list(found) if isinstance(found, (list, set)) else found
before = [value(change.where) for change in CHANGES]
"""


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", STATE + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_everything_changes_nothing_in_torch():
    code = """
import hyper_parallel, hyper_parallel.rules, hyper_parallel.testing, hyper_parallel.checkpoint
assert hyper_parallel.DTensor
print(before == [value(change.where) for change in CHANGES])
"""
    assert python(code).strip() == "True"


def test_the_first_mesh_makes_each_change_that_is_listed_once():
    code = """
import torch.distributed as dist
from hyper_parallel import DTensor, Replicate, distribute_tensor, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(2):
    distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
after = [value(change.where) for change in CHANGES]
assert all(a != b for a, b in zip(after, before)), after
assert [v.count(DTensor) for v in after if isinstance(v, list) and DTensor in v] == [1, 1, 1]
assert any("hyper_parallel" in str(v) for v in after if isinstance(v, list))
dist.destroy_process_group()
print("changed")
"""
    assert python(code).strip() == "changed"


def test_every_name_is_there_and_says_what_it_is():
    for name in torch_compat.__all__:
        assert getattr(torch_compat, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'FileSystemReader'"):
        _ = torch_compat.FileSystemReader
