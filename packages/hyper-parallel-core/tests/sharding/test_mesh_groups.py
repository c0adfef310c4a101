"""Process groups over several axes, or over a part of one: made by their members alone."""

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import DeviceMesh, init_device_mesh
from hyper_parallel.sharding.mesh import mesh_info


@pytest.mark.ranks(4)
def test_groups_of_ranks_that_are_in_unequally_many_others():
    """torch names a group after how many this process has; rank 0 has one more here than the others."""
    dist.new_group([0], use_local_synchronization=True)
    info = mesh_info(init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")))
    for group in (info.group((1, 2)), info.part_of_group((0, 1), 2), info.part_of_group((1,), 2), info.group((0, 2))):
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=group.group)
        assert total == sum(dist.get_process_group_ranks(group.group))


@pytest.mark.ranks(4)
def test_a_mesh_of_some_ranks_before():
    some = DeviceMesh("cpu", [0, 1], mesh_dim_names=("stage",))
    info = mesh_info(init_device_mesh("cpu", (4,), mesh_dim_names=("all",)))
    if some.get_coordinate() is not None:
        mesh_info(some).part_of_group((0,), 1)
    assert info.part_of_group((0,), 2).size == 2
