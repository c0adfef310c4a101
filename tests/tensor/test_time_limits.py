"""Every process group has the time limit that the user gave to ``init_process_group``: a rank that stops does not keep
the others waiting for torch's half an hour."""

import subprocess
import sys
import textwrap

RANK = """
import sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from hyper_parallel import Layout, Replicate, Shard, all_reduce, distribute_tensor, fully_shard, init_device_mesh
from hyper_parallel.sharding.mesh import mesh_info
from hyper_parallel.sharding.time_limit import users_limit

rank, LIMIT = int(sys.argv[1]), timedelta(seconds=int(sys.argv[3]))
store = dist.FileStore(sys.argv[2], 4)
dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=LIMIT)
def limit_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout
assert users_limit() == LIMIT
"""

STATES = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
infos = [mesh_info(m) for m in (mesh, mesh["tp"], mesh["dp"], mesh["dp", "tp"]._flatten("all"))]
layout = Layout((2, 2, 1), ("a", "b", "c"))("a", "b")
infos.append(layout.info)
three = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("x", "y", "z"))
infos.append(mesh_info(three["x", "y"]))
net = fully_shard(torch.nn.Linear(4, 4), mesh=mesh["dp"])
for info in infos:
    for axes in [(a,) for a in range(info.ndim)] + [(a, b) for a in range(info.ndim) for b in range(a + 1, info.ndim)]:
        assert limit_of(info.group(axes).group) == LIMIT, (info, axes, limit_of(info.group(axes).group))
assert limit_of(net.weight.layout.info.group((0,)).group) == LIMIT
mine = dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=77))  # what the user says of one group holds for it
all_reduce(torch.ones(2), mine)
assert limit_of(mine) == timedelta(seconds=77)
again = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))  # an equal one
mesh_info(again)
assert limit_of(again.get_group("dp")) == LIMIT
dist.barrier()
dist.destroy_process_group()
"""

STOPS = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
over_dp = lambda: all_reduce(torch.ones(2), (mesh, "dp"))
over_tp = lambda: distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)]).full_tensor()
over_dp(), over_tp()
if rank == 3:
    time.sleep(600)
began = time.monotonic()
try:
    [over_tp, over_dp, over_tp][rank]()  # ranks 1 and 2 need rank 3
    print("done", flush=True)
except RuntimeError as error:
    print("told after", round(time.monotonic() - began), "s", flush=True)
"""


def ranks_of(tmp_path, limit, *code):
    script = tmp_path / "script.py"
    script.write_text("".join(map(textwrap.dedent, code)))
    command = [sys.executable, "-W", "ignore", str(script)]
    return [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), str(limit)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]


def ended(ranks):
    """What the ranks have said; none of them is left running."""
    try:
        return [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_every_group_has_the_users_limit(tmp_path):
    ranks = ranks_of(tmp_path, 99, RANK, STATES)
    said = ended(ranks)
    assert [rank.returncode for rank in ranks] == [0] * 4, "\n".join(error for _, error in said)


def test_a_rank_that_stops_does_not_keep_the_others_waiting(tmp_path):
    *ranks, stopped = ranks_of(tmp_path, 20, RANK, STOPS)
    try:
        said = [out.split()[:2] for out, _ in ended(ranks)]
    finally:
        stopped.kill()
        stopped.communicate()
    assert said[1:] == [["told", "after"]] * 2, said
