"""require_same_inputs: ranks that share a model and are given different batches are told, before they compute."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommTrace,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
    require_same_inputs,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(8, 4), nn.Linear(4, 6)

    def forward(self, ids, extra=None, **more):
        return self.out(self.table(ids))


@dataclass
class Packed:
    lengths: torch.Tensor


def parallel():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(Model(), mesh, {"out": ColwiseParallel()}), mesh


IDS = torch.tensor([[1, 2, 3]])


@pytest.mark.ranks(2)
def test_other_values_shapes_or_dtypes_raise_on_every_rank():
    model, mesh = parallel()
    require_same_inputs(model, mesh)
    rank = dist.get_rank()
    for mine in (IDS if rank else IDS.flip(1), IDS if rank else IDS[:, :2], IDS if rank else IDS.int()):
        with pytest.raises(ValueError, match=r"(?s)^the batch of Model differs by rank:.*argument 0 int.*fix: give"):
            model(mine)
    with pytest.raises(ValueError, match=r"more\['mask'\]\[1\] float32\[\] with checksum"):
        model(IDS, more={"mask": [IDS, torch.tensor(float(rank))]})
    with pytest.raises(ValueError, match=r"extra float32\[1\] with checksum"):
        model(IDS, extra=Packed(torch.ones(1) * rank))
    with pytest.raises(ValueError, match="extra bool"):
        model(IDS, extra=torch.tensor([True, bool(rank)]))


@pytest.mark.ranks(2)
def test_same_batches_cost_one_small_all_reduce_until_the_check_is_removed():
    model, mesh = parallel()
    with CommTrace() as before:
        want = model(IDS)
    handle = require_same_inputs(model, mesh)
    # What is no plain tensor is not looked at.
    spread = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with CommTrace() as checked:
        got = model(IDS, extra=spread, number=dist.get_rank())
    assert torch.equal(got, want)
    assert len(checked.events) == len(before.events) + 1
    assert checked.nbytes == before.nbytes + 16
    handle.remove()
    model(IDS if dist.get_rank() else IDS.flip(1))


@pytest.mark.ranks(4)
def test_other_data_ranks_may_have_other_batches():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Model(), mesh["tp"], {"out": ColwiseParallel()})
    require_same_inputs(model, mesh["tp"])
    model(IDS + mesh.get_local_rank("dp"))
    with pytest.raises(ValueError, match="differs by rank"):
        model(IDS + mesh.get_local_rank("tp"))


@pytest.mark.ranks(2)
def test_a_laid_out_batch_passes():
    model, mesh = parallel()
    require_same_inputs(model, mesh)
    model(distribute_tensor(IDS, mesh, [Replicate()]))


def ids_of_rank():
    return IDS if dist.get_rank() else IDS.flip(1)


@pytest.mark.ranks(2)
def test_parallelize_module_checks_the_first_forward_by_itself():
    model, _ = parallel()
    with pytest.raises(ValueError, match=r"(?s)^the batch of Model differs by rank:.*check_inputs=False"):
        model(ids_of_rank())


@pytest.mark.ranks(2)
def test_the_first_forward_after_each_change_of_mode_is_checked_and_no_other():
    model, _ = parallel()
    model(IDS)
    model(ids_of_rank())  # not the first
    with pytest.raises(ValueError, match="differs by rank"):
        model.eval()(ids_of_rank())
    with pytest.raises(ValueError, match="differs by rank"), torch.no_grad():
        model(ids_of_rank())
    with torch.no_grad():
        model(ids_of_rank())
    with pytest.raises(ValueError, match="differs by rank"):
        model.train()(IDS, mask=IDS.bool() if dist.get_rank() else None)


@pytest.mark.ranks(2)
def test_the_check_can_be_left_out_and_compares_whole_numbers_only():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(Model(), mesh, {"out": ColwiseParallel()}, check_inputs=False)
    model(ids_of_rank())
    model, _ = parallel()
    model(IDS, extra=torch.randn(2, generator=torch.Generator().manual_seed(dist.get_rank())))


@pytest.mark.ranks(2)
def test_no_trace_counts_the_check_by_itself():
    model, _ = parallel()
    with CommTrace() as trace:
        model(IDS)
    assert trace.counts == {}
