"""What the unit tests of layouts, rules and the dispatcher share."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyper_parallel import init_device_mesh


@pytest.fixture(scope="module")
def mesh():
    """A mesh of 2 by 2 ranks of which this process is the first; collectives do nothing, so values are right only where
    nothing is communicated."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    dist.destroy_process_group()
