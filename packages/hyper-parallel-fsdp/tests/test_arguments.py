"""What ``fully_shard`` reads from its mesh and refuses: roles of axes, groups of ranks, errors that say what to do."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import DTensor, Replicate, Shard, init_device_mesh
from hyper_parallel.sharding.mesh import mesh_info
from hyper_parallel_fsdp import HSDPModule, fully_shard
from hyper_parallel_fsdp.checks import check_device_of
from hyper_parallel_fsdp.roles import MeshRoles, mesh_roles

ROLES = {
    ("fsdp",): MeshRoles(shard=(0,)),
    ("dp_replicate", "fsdp_shard", "tp"): MeshRoles(shard=(1,), replicate=(0,), model=(2,)),
    ("dp", "fsdp_shard"): MeshRoles(shard=(1,), replicate=(0,)),
    ("dp",): MeshRoles(shard=(0,)),
    ("anything",): MeshRoles(shard=(0,)),
    ("tp",): MeshRoles(model=(0,)),
    ("dp_replicate",): MeshRoles(replicate=(0,)),
    ("a", "b"): MeshRoles(shard=(1,), replicate=(0,)),
    ("dp", "fsdp"): MeshRoles(shard=(1,), replicate=(0,)),
    ("dp", "tp"): MeshRoles(shard=(0,), model=(1,)),
    ("dp_shard", "cp", "tp"): MeshRoles(shard=(0, 1), model=(2,)),
    ("dp_replicate", "fsdp", "ep"): MeshRoles(shard=(1,), replicate=(0,), expert=(2,)),
}


def mesh_named(names):
    return init_device_mesh("cpu", (4,) + (1,) * (len(names) - 1), mesh_dim_names=names)


@pytest.mark.ranks(4)
def test_roles_by_name():
    for names, roles in ROLES.items():
        assert mesh_roles(mesh_info(mesh_named(names))) == roles, names
    nameless = init_device_mesh("cpu", (2, 2))
    assert mesh_roles(mesh_info(nameless)) == MeshRoles(shard=(1,), replicate=(0,))
    with pytest.raises(ValueError, match=r"\['pp'\] have no known use"):
        mesh_roles(mesh_info(mesh_named(("pp", "fsdp"))))
    with pytest.raises(ValueError, match="name them"):
        mesh_roles(mesh_info(mesh_named(("a", "b", "c"))))


def tensor_parallel(mesh, placement):
    net = nn.Linear(8, 8, bias=False)
    local = net.weight.detach().chunk(2)[mesh.get_local_rank()] if placement == Shard(0) else net.weight.detach()
    net.weight = nn.Parameter(DTensor.from_local(local.clone(), mesh, [placement]))
    return net


# mesh, placement over ep or tp, enable_param_shard: reduction, ranks to scatter over, ranks to all-reduce over
CASES = {
    "fsdp": (("fsdp",), None, None, ("reduce_scatter",), "fsdp", ""),
    "hsdp": (("dp_replicate", "fsdp"), None, None, ("reduce_scatter", "all_reduce"), "fsdp", "dp_replicate"),
    "ddp": (("dp_replicate", "fsdp"), None, False, ("all_reduce",), "", "dp_replicate fsdp"),
    "dp and tp": (("fsdp", "tp"), Shard(0), None, ("reduce_scatter",), "fsdp", ""),
    "dp and tp, replicated": (("fsdp", "tp"), Replicate(), None, ("reduce_scatter",), "fsdp", ""),
    "expert": (("fsdp", "ep"), Shard(0), None, ("reduce_scatter",), "fsdp", ""),
    "beside experts": (("fsdp", "ep"), Replicate(), None, ("reduce_scatter", "all_reduce"), "fsdp", "ep"),
    "tp only": (("tp",), Shard(0), None, (), "", ""),
    "tp only, told": (("tp",), Replicate(), False, (), "", ""),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", CASES)
def test_groups_of_a_parameter(case):
    names, placement, enable, reduction, scatter, reduce = CASES[case]
    mesh = init_device_mesh("cpu", (4,) if len(names) == 1 else (2, 2), mesh_dim_names=names)
    if placement is None:
        net = nn.Linear(8, 8, bias=False)
    elif len(names) == 1:
        piece = nn.Linear(8, 2 if placement == Shard(0) else 8, bias=False).weight.detach()
        net = nn.Linear(8, 8, bias=False)
        net.weight = nn.Parameter(DTensor.from_local(piece, mesh, [placement]))
    else:
        net = tensor_parallel(mesh[names[1]], placement)
    fully_shard(net, mesh=mesh, enable_param_shard=enable)
    (param,) = net.hsdp_params.values()
    assert param.groups.reduction == reduction
    for info, axes in ((param.sharded_group_info, scatter.split()), (param.unsharded_group_info, reduce.split())):
        assert info.axes == tuple(axes)
        here = mesh.get_coordinate()
        index = tuple(slice(None) if n in axes else here[i] for i, n in enumerate(names))
        assert list(info.ranks) == mesh.mesh[index].flatten().tolist()
        assert info.group is None or dist.get_process_group_ranks(info.group.group) == list(info.ranks)
    assert (param.rank_size, param.dp_size) == (
        param.sharded_group_info.rank_size * param.unsharded_group_info.rank_size,
        param.rank_size // param.shard_size,
    )
    assert param.sharded.layout.mesh_dim_names == names
    for name, held in zip(names, param.sharded.placements, strict=True):
        assert isinstance(held, Shard) == (name in scatter.split() or (name in ("tp", "ep") and placement == Shard(0)))


@pytest.mark.ranks(4)
def test_tensor_parallel_mesh_of_a_larger_one_reduces_over_the_rest():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = tensor_parallel(mesh["tp"], Shard(0))
    fully_shard(net, mesh=mesh["tp"])
    param = net.hsdp_params["weight"]
    assert param.groups.reduction == ("all_reduce",)
    assert param.unsharded_group_info.axes == ("dp",)
    assert param.sharded.placements == (Replicate(), Shard(0))


@pytest.mark.ranks(4)
def test_all_reduce_over_tensor_parallel_ranks_only_on_request():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    net = nn.Linear(3, 2)
    net.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Replicate()]))
    fully_shard(net, mesh=mesh)
    assert net.hsdp_params["bias"].groups.reduction == ()
    net.set_gradient_average_axes(["tp"])
    assert net.hsdp_params["bias"].unsharded_group_info.ranks == (0, 1, 2, 3)
    sharded = nn.Linear(3, 8)
    sharded.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]))
    fully_shard(sharded, mesh=mesh)
    sharded.set_gradient_average_axes(["tp"])
    assert sharded.hsdp_params["weight"].groups.reduction == ()
    plain = nn.Linear(3, 2)
    fully_shard(plain, mesh=mesh)
    plain.set_gradient_average_axes(["tp"])
    plain(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    torch.testing.assert_close(plain.weight.grad.to_local(), torch.full((2, 3), 1.5))
    with pytest.raises(ValueError, match=r"\['xp'\]"):
        net.set_gradient_average_axes(["xp"])


@pytest.mark.ranks(4)
def test_fully_sharded_and_tensor_parallel_on_one_dim_uneven():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    whole = torch.arange(7.0 * 3).view(7, 3)
    net = nn.Linear(3, 7, bias=False)
    local = whole.chunk(2)[mesh.get_local_rank("tp")]
    net.weight = nn.Parameter(DTensor.from_local(local.clone(), mesh["tp"], [Shard(0)], shape=(7, 3)))
    fully_shard(net, mesh=mesh["fsdp"])
    weight = net.weight
    assert weight.layout.alias_tensor_map == (("tp", "fsdp"), "None")
    assert weight.placements == (Shard(0), Shard(0))
    torch.testing.assert_close(weight.detach().full_tensor(), whole)
    net.unshard()
    assert net.weight.layout.mesh_dim_names == ("tp",)
    assert net.weight.placements == (Shard(0),)
    assert torch.equal(net.weight.to_local(), local)
    net.reshard()
    assert net.weight is weight


@pytest.mark.ranks(2)
def test_the_module_is_an_hsdp_module():
    net = nn.Sequential(nn.Linear(2, 2))
    assert fully_shard(net) is net
    assert isinstance(net, HSDPModule)
    assert isinstance(net, nn.Sequential)
    assert type(net).__name__ == "FSDPSequential"
    from hyper_parallel import FSDPModule

    assert FSDPModule is HSDPModule
    assert isinstance(fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)]), list)


@pytest.mark.ranks(2)
def test_wrong_arguments():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    net = nn.Linear(2, 2)
    fully_shard(net)
    with pytest.raises(ValueError, match="is wrapped already"):
        fully_shard(net)
    with pytest.raises(ValueError, match="wrap its members"):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match="none of the mesh axes"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, enable_param_shard=True)
    with pytest.raises(ValueError, match="empty list"):
        fully_shard([])
    for wrong in (3, 0, -1, "yes", 0.5):
        with pytest.raises(ValueError, match="True, False, None or a divisor of the 2 shards, got"):
            fully_shard(nn.Linear(2, 2), reshard_after_forward=wrong)
    with pytest.warns(UserWarning, match="reshard_after_forward=1 keeps the parameters whole"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward=1)
    for wrong in (2, None):
        with pytest.raises(ValueError, match="set_reshard_after_forward takes True or False, got"):
            net.set_reshard_after_forward(wrong)
    with pytest.raises(ValueError, match=r"Shard\(dim=2\).* 'weight' of 2 dimensions"):
        fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda p: Shard(2))
    with pytest.raises(ValueError, match="must be positive"):
        net.set_gradient_divide_factor(0)
    with pytest.raises(TypeError, match="before fully_shard"):
        __import__("copy").deepcopy(net)


@pytest.mark.ranks(4)
def test_parameters_on_meshes_that_do_not_belong_together():
    net = tensor_parallel(init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "tp"))["tp"], Shard(0))
    with pytest.raises(ValueError, match=r"'weight' is on mesh tp=2.*slice both from one mesh"):
        fully_shard(net, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",)))
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    net = nn.Linear(8, 8)
    net.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"'weight' has Shard\(dim=0\) on data axis 'fsdp' already"):
        fully_shard(net, mesh=mesh)


def test_parameters_on_another_device():
    meta = torch.empty(2, device="meta")
    check_device_of("weight", meta, torch.device("cuda", 0))

    class OnOne:
        device = torch.device("cuda", 1)

    for device in (torch.device("cuda", 0), torch.device("cpu")):
        with pytest.raises(ValueError, match=f"'weight' is on cuda:1, .*{device}"):
            check_device_of("weight", OnOne(), device)


@pytest.mark.ranks(2)
def test_parameters_that_change_after_wrapping():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(net)
    x = torch.ones(1, 2)
    net[0].extra = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"'0.extra' was added to FSDPSequential after fully_shard"):
        net(x)
    del net[0].extra
    before = net[1].weight
    net[1].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"'1.weight' was replaced by a plain parameter of shape \(2, 2\)"):
        net(x)
    net[1].weight = before
    net(x)
    net[1].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"'1.weight' was replaced by a plain parameter of shape \(2, 2\)"):
        net(x)
    del net[1].weight
    with pytest.raises(RuntimeError, match=r"'1.weight' was removed"):
        net(x)
    # Another DTensor with the same layout may take its place, as load_state_dict(assign=True) does.
    net[1].weight = nn.Parameter(DTensor.from_local(torch.full((1, 2), 3.0), before.layout))
    out = net(x)
    out.sum().backward()
    assert net[1].weight.grad is not None


@pytest.mark.ranks(2)
def test_optimizer_from_before_wrapping():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fully_shard(net)
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="'weight' of Linear was replaced by fully_shard"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_optimizer_from_before_an_assigned_state():
    net = fully_shard(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    net(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'weight' was replaced by load_state_dict\(assign=True\) or another"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_parameters_left_on_the_meta_device():
    with torch.device("meta"):
        net = nn.Linear(3, 2)
    fully_shard(net)
    with pytest.raises(RuntimeError, match=r"'weight' is on the meta device: call model.to_empty"):
        net(torch.ones(1, 3))


@pytest.mark.ranks(2)
def test_tied_over_two_wrapped_modules():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    fully_shard(net[0])
    with pytest.raises(ValueError, match=r"'weight' is tied to 'weight'.*fully_shard\(\[first, second\]\)"):
        fully_shard(net[1])


@pytest.mark.ranks(2)
def test_ignored_parameters_stay_plain():
    net = nn.Linear(2, 2)
    fully_shard(net, ignored_params={net.bias})
    assert not isinstance(net.bias, DTensor)
    net(torch.ones(1, 2)).sum().backward()
    assert isinstance(net.weight.grad, DTensor)
    assert not isinstance(net.bias.grad, DTensor)


@pytest.mark.ranks(2)
def test_both_kinds_of_batch():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x, y):
            return x

    net = Two()
    fully_shard(net, mesh=mesh)
    plain = torch.ones(2)
    placed = DTensor.from_local(plain, mesh, [Shard(0)])
    with pytest.raises(
        ValueError, match=r"a DTensor over the data axes \['fsdp'\].*and a plain tensor of shape \(2,\)"
    ):
        net(plain, placed)
    net(placed, torch.tensor(1.0))  # a number is the same everywhere
    with pytest.raises(ValueError, match="the first batch came as DTensors over the data axes, this one as plain"):
        net(plain, plain)


@pytest.mark.ranks(4)
def test_equal_slices_of_different_meshes():
    whole = torch.arange(24.0).view(8, 3)
    meshes = [
        init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp")),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")),
    ]
    for mesh in (*meshes, *reversed(meshes)):
        net = nn.Linear(3, 8, bias=False)
        local = whole.chunk(2)[mesh.get_local_rank("tp")]
        net.weight = nn.Parameter(DTensor.from_local(local.clone(), mesh["tp"], [Shard(0)]))
        fully_shard(net, mesh=mesh[mesh.mesh_dim_names[-2]])
        assert net.weight.layout.mesh_dim_names == mesh.mesh_dim_names[-2:]
        assert torch.equal(net.weight.detach().full_tensor(), whole)
