"""Process groups end when they are destroyed, whatever is still in variables, and what was on them is then refused.

A gloo group that outlives ``destroy_process_group`` can abort the process at its exit.
"""

import subprocess
import sys
import textwrap

START = """
import sys, weakref
import torch, torch.distributed as dist
rank, stores, starts = int(sys.argv[1]), sys.argv[2], iter("abc")
def start():
    dist.init_process_group("gloo", store=dist.FileStore(stores + next(starts), 2), rank=rank, world_size=2)
def destroy():
    groups = [weakref.ref(group) for group in dist.distributed_c10d._world.pg_map]
    dist.destroy_process_group()
    return [group() for group in groups]
def refused(function, *args):
    try:
        function(*args)
    except RuntimeError as error:
        assert str(error).startswith("the process groups of this mesh are gone: "), error
    else:
        raise AssertionError("not refused")
start()
"""

EVERYTHING = """
from hyper_parallel import (
    CommTrace, Layout, Replicate, Shard, collectives, distribute_tensor, fully_shard, init_device_mesh, shard_module
)
layout = Layout((2,), ("tp",))
mlp = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 4))
weights = {"0.weight": layout("tp", "None"), "0.bias": layout("tp"), "2.weight": layout("None", "tp")}
shard_module(mlp, {"parameter": weights, "forward": {"output": layout("None", "None")}})
loss = mlp(torch.randn(3, 4)).square().mean()
loss.backward()

net = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
optimizer = torch.optim.AdamW([*net.parameters(), *mlp.parameters()])
net(torch.randn(3, 4)).sum().backward()
optimizer.step()

first, equal = (init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")) for _ in range(2))
x = distribute_tensor(torch.arange(6.0), first, [Shard(0), Replicate()])
y = distribute_tensor(torch.arange(6.0), equal["dp"], [Shard(0)]).redistribute(placements=[Replicate()])
total = collectives.all_reduce(torch.ones(2), dist.new_group([0, 1]))
"""


def on_two_ranks(tmp_path, *code):
    """Run a script on two new processes, which must both end well."""
    script = tmp_path / "script.py"
    script.write_text("".join(map(textwrap.dedent, code)))
    command = [sys.executable, "-W", "ignore", str(script)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)


def test_no_group_outlives_its_destruction(tmp_path):
    on_two_ranks(
        tmp_path,
        START,
        EVERYTHING,
        """
        from torch.distributed.nn import functional  # one of those who hold the default group
        assert functional.all_reduce.__defaults__[-1] is dist.group.WORLD
        assert len(first._pg_registry) == 2  # another
        left = destroy()
        assert len(left) > 2 and not any(left), left
        assert torch.equal(x.to_local(), torch.arange(6.0)[3 * rank : 3 * rank + 3])  # what needs no group still works
        """,
    )


def test_after_another_start_nothing_of_the_first_is_used(tmp_path):
    on_two_ranks(
        tmp_path,
        START,
        EVERYTHING,
        """
        whole = lambda tensor: tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()
        assert torch.equal(whole(x), torch.arange(6.0))
        assert not any(destroy())
        refused(whole, x)
        refused(distribute_tensor, torch.arange(6.0), first, [Shard(0), Replicate()])

        start()
        dist.new_group([1, 0])  # has the name that another group had
        refused(whole, x)  # its plan was used before
        refused(lambda: x.redistribute(placements=[Shard(0), Shard(0)]).sum().item())  # a new plan
        refused(distribute_tensor, torch.arange(6.0), first, [Shard(0), Replicate()])

        again = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        with CommTrace() as trace:
            z = distribute_tensor(torch.arange(6.0), again, [Shard(0), Replicate()])
            assert z.device_mesh is again and torch.equal(whole(z), torch.arange(6.0))
        assert trace.counts["all_gather"] == 1, trace
        assert torch.equal(collectives.all_reduce(torch.ones(2), dist.group.WORLD), torch.full((2,), 2.0))
        torch.manual_seed(0)
        fresh = torch.nn.Linear(4, 6)
        expected = fresh(torch.ones(3, 4))
        shard_module(fresh, {"parameter": {"weight": layout("tp", "None"), "bias": layout("tp")}})  # the same layout
        torch.testing.assert_close(fresh(torch.ones(3, 4)).full_tensor(), expected)
        assert not any(destroy())
        """,
    )
