"""Arguments that DTensor's makers share with PyTorch's, by default and refused."""

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import DTensor, Replicate, Shard
from hyper_parallel.testing import mesh_of

FACTORIES = {
    "zeros": lambda **o: hp.zeros(5, 3, **o),
    "ones": lambda **o: hp.ones((5, 3), **o),
    "empty": lambda **o: hp.empty(5, 3, **o),
    "full": lambda **o: hp.full((5, 3), 2.0, **o),
    "rand": lambda **o: hp.rand(5, 3, **o),
    "randn": lambda **o: hp.randn(5, 3, **o),
    "arange": lambda **o: hp.arange(5, **o),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", FACTORIES)
def test_factories_take_the_layout_of_memory_and_the_mesh_of_the_block(name):
    make, mesh = FACTORIES[name], mesh_of((4,))
    x = make(layout=torch.strided, dtype=torch.float64, device_mesh=mesh, placements=[Shard(0)])
    assert (x.placements, x.dtype) == ((Shard(0),), torch.float64)
    with pytest.raises(ValueError, match=r"layout=torch.sparse_coo: a DTensor's memory is torch.strided"):
        make(layout=torch.sparse_coo, device_mesh=mesh)
    with mesh:
        here = make(requires_grad=name != "arange", dtype=torch.float32)
    assert (here.device_mesh, here.placements) == (mesh, (Replicate(),))
    with pytest.raises(ValueError, match="device_mesh is missing"):
        make()


@pytest.mark.ranks(4)
def test_what_is_distributed_lies_whole_on_the_mesh_of_the_block_by_default():
    mesh, value = mesh_of((2, 2)), torch.arange(15.0).view(5, 3)
    with mesh:
        made = [hp.distribute_tensor(value), DTensor.from_local(value)]
        model = hp.distribute_module(nn.Linear(3, 4))
    made += [hp.distribute_tensor(value, mesh), DTensor.from_local(value, mesh), model.weight]
    for x in made:
        assert x.device_mesh == mesh
        assert x.placements == (Replicate(), Replicate())
    assert torch.equal(made[0].full_tensor(), value)
    assert torch.equal(made[1].full_tensor(), value)
    for call in (
        lambda: hp.distribute_tensor(value),
        lambda: DTensor.from_local(value),
        lambda: hp.distribute_module(nn.Linear(3, 4)),
    ):
        with pytest.raises(ValueError, match=r"device_mesh is missing, and there is no `with mesh:` block"):
            call()
