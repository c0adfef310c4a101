"""ParallelDims: the degrees, and the ranks that end up on one axis."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from hyper_parallel import ParallelDims


def members(dims, axes):
    mesh = dims.get_mesh(axes)
    return mesh.mesh.tolist()


def meshes():
    dims = ParallelDims(dp_replicate=1, cp=2, tp=2, ep=2)
    assert dims.dp_shard == 1
    return {
        axes: members(dims, axes)
        for axes in ("tp", "cp", "fsdp", "batch", "loss", "ep", "dp_shard", ("fsdp", "tp"), ("efsdp", "ep"))
    }


def test_every_axis_has_its_ranks(ranks):
    found = ranks(4, meshes)
    assert [f["tp"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [f["cp"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [f["fsdp"] for f in found] == [f["cp"] for f in found]
    assert [f["loss"] for f in found] == [f["cp"] for f in found]
    assert [f["ep"] for f in found] == [f["tp"] for f in found]
    assert [f["batch"] for f in found] == [f["dp_shard"] for f in found] == [[0], [1], [2], [3]]
    assert all(f["fsdp", "tp"] == f["efsdp", "ep"] == [[0, 1], [2, 3]] for f in found)


@pytest.mark.ranks(4)
def test_one_axis_is_one_mesh_however_it_is_asked_for():
    dims = ParallelDims(dp_shard=2, tp=2)
    assert dims.get_mesh("tp") == dims.get_mesh(("fsdp", "tp"))["tp"]
    assert dims.get_mesh("pp").size() == 1
    assert dims.sizes()["batch"] == 2


@pytest.mark.ranks(4)
def test_what_is_refused():
    dims = ParallelDims(tp=4)
    with pytest.raises(ValueError, match=r"unknown axes \['tensor'\]; the axes go together as"):
        dims.get_mesh("tensor")
    with pytest.raises(ValueError, match=r"\('fsdp', 'cp'\) overlap"):
        dims.get_mesh(("fsdp", "cp"))
    assert dist.get_world_size() == 4


def test_degrees():
    dims = ParallelDims(dp_replicate=2, cp=2, tp=4, pp=2, world_size=64)
    assert dims.dp_shard == 2
    assert dims.seq_len_divisor == 16
    assert dims.non_data_parallel_size == 16
    assert ParallelDims(tp=4, world_size=4).seq_len_divisor == 4
    for given, said in {
        (
            ("tp", 3),
        ): r"\(tp=3\) needs a multiple of 3 ranks, and there are 8: .*per-node=3\), or .* product divides 8$",
        (("tp", 16),): r"\(tp=16\) needs a multiple of 16 ranks, and there are 8: .*per-node=16\)",
        (("dp_shard", 2), ("tp", 3)): r"\(dp_shard=2, tp=3\) needs 6 ranks, and there are 8: .* product divides 8$",
        (("dp_shard", 2), ("tp", 2)): r"\(dp_shard=2, tp=2\) needs 4 ranks, and there are 8: .*, or give dp_shard=4$",
    }.items():
        with pytest.raises(ValueError, match=rf"ParallelDims{said}"):
            ParallelDims(**dict(given), world_size=8)
    with pytest.raises(ValueError, match="degrees are at least 1"):
        ParallelDims(tp=0, world_size=8)
    with pytest.raises(ValueError, match="ep=3 does not divide"):
        ParallelDims(tp=4, ep=3, world_size=8)
