"""One training step of a tensor-parallel SwiGLU layer, compared with one device.

torchrun --nproc-per-node 2 training_step.py
"""

import torch
import torch.distributed as dist

from hyper_parallel import CommTrace, PackedShard, Replicate, Shard, SwiGLU, distribute_tensor, init_device_mesh

HIDDEN, WIDTH = 16, 24


def train(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A step of SGD; the loss before it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def main() -> None:
    """Train both, compare, count."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plain, sharded = SwiGLU(HIDDEN, WIDTH), SwiGLU(HIDDEN, WIDTH)
    x = torch.randn(8, HIDDEN)
    for name, placement in (("gate_up", PackedShard(0, (WIDTH, WIDTH))), ("down", Shard(1))):
        weight = distribute_tensor(getattr(plain, name).weight.detach(), mesh, [placement])
        getattr(sharded, name).weight = torch.nn.Parameter(weight)

    expected = train(plain, x)
    batch = distribute_tensor(x, mesh, [Replicate()])
    with CommTrace() as trace:
        loss = train(sharded, batch)
    torch.testing.assert_close(loss.full_tensor(), expected)
    for name in ("gate_up", "down"):
        torch.testing.assert_close(getattr(sharded, name).weight.full_tensor(), getattr(plain, name).weight)
    assert trace.counts["all_reduce"] == 1, str(trace)
    if dist.get_rank() == 0:
        print(f"trained on {dist.get_world_size()} ranks, loss {expected:.4f}, {dict(trace.phase('forward'))}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
