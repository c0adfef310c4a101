"""Forward and backward of one Llama-like decoder layer with tensor and sequence parallelism, tp=4, on fake ranks.

Beside it: the plain module of one rank's size, the same with the bare collectives, that with the thinnest wrapper that
Python allows around every tensor (the floor of any design in which a tensor knows its global shape), our TP styles, and
torch's with the same plan; with plain tensors between the blocks, and with DTensors. Aims: at most 1.6x the plain
module (aim 1.4), and 1.25x plain plus collectives.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import interleaved, start_fake_ranks, table
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import parallel as torch_styles

import hyper_parallel
from hyper_parallel import (
    CommTrace,
    DTensor,
    Replicate,
    Shard,
    ShardingPlan,
    init_device_mesh,
    shard_module,
)
from hyper_parallel.sharding.spec import TensorMeta
from hyper_parallel.tensor.wrapper import new_wrapper

TP, HIDDEN, HEADS, TOKENS, BATCH = 4, 64, 4, 16, 2
HEAD = HIDDEN // HEADS


class Attention(nn.Module):
    """Causal attention; the head count follows the projections, so that it works on whole tensors and on one rank's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens = x.shape[:2]
        q, k, v = (p(x).view(batch, tokens, -1, HEAD).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(batch, tokens, -1))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as `transformers` writes it."""
    a, b = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, width, bias=False), nn.Linear(HIDDEN, width, bias=False)
        self.down = nn.Linear(width, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """``parts``: how many ranks share the projections."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(HIDDEN // parts), Mlp(4 * HIDDEN // parts)
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class BareGather(torch.autograd.Function):
    """All-gather of the sequence forward, reduce-scatter backward: what it takes, and nothing else."""

    @staticmethod
    def forward(ctx, x):
        return gather(x)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad)


class BareScatter(torch.autograd.Function):
    """Reduce-scatter of the sequence forward, all-gather backward."""

    @staticmethod
    def forward(ctx, x):
        return reduce_scatter(x)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad)


def gather(x: torch.Tensor) -> torch.Tensor:
    stacked = x.new_empty(TP * x.shape[0], *x.shape[1:])
    dist.all_gather_single(stacked, x.contiguous())
    return torch.cat(stacked.chunk(TP), 1)


def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] // TP, x.shape[2])
    dist.reduce_scatter_single(out, torch.cat(x.chunk(TP, 1)))
    return out


class BareSum(torch.autograd.Function):
    """Identity forward, all-reduce backward: a norm's weight on a sequence shard."""

    @staticmethod
    def forward(ctx, weight):
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class BareNorm(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, BareSum.apply(self.weight), self.eps)


class BareLayer(Layer):
    """One rank's size, sequence shards outside and collectives at the boundaries, by hand."""

    def __init__(self, parts):
        super().__init__(parts)
        self.norm1, self.norm2 = BareNorm(HIDDEN), BareNorm(HIDDEN)

    def forward(self, x, cos, sin):
        x = x + BareScatter.apply(self.attention(BareGather.apply(self.norm1(x)), cos, sin))
        return x + BareScatter.apply(self.mlp(BareGather.apply(self.norm2(x))))


class PlainLayer(Layer):
    """One rank's size without any communication: norms on the sequence shard, projections on the whole sequence."""

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x).repeat(1, TP, 1), cos, sin)[:, : TOKENS // TP]
        return x + self.mlp(self.norm2(x).repeat(1, TP, 1))[:, : TOKENS // TP]


class Thin(torch.Tensor):
    """A wrapper that is entered, unwrapped, called and wrapped: no layouts, no gradient types, no cache."""

    __slots__ = ("_local_tensor", "_spec")
    shape_of_all = SimpleNamespace(
        tensor_meta=TensorMeta(torch.Size((BATCH, TOKENS, HIDDEN)), (TOKENS * HIDDEN, HIDDEN, 1), torch.float32)
    )

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        local = [
            a._local_tensor
            if a.__class__ is Thin
            else tuple([t._local_tensor for t in a])
            if a.__class__ is tuple and a[0].__class__ is Thin
            else a
            for a in args
        ]
        return thin(func(*local, **kwargs) if kwargs else func(*local))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} reached the wrapper")


Thin.shape = property(lambda self: self._spec.tensor_meta.shape)


def thin(local: torch.Tensor) -> torch.Tensor:
    return new_wrapper(Thin, local, Thin.shape_of_all, local.requires_grad)


class ThinLayer(BareLayer):
    """BareLayer with every tensor in a thin wrapper."""

    def forward(self, x, cos, sin):
        x = thin(x)
        whole = thin(BareGather.apply(self.norm1(x)._local_tensor))
        x = x + thin(BareScatter.apply(self.attention(whole, cos, sin)._local_tensor))
        whole = thin(BareGather.apply(self.norm2(x)._local_tensor))
        x = x + thin(BareScatter.apply(self.mlp(whole)._local_tensor))
        return x._local_tensor


def ours(mesh) -> nn.Module:
    """The whole layer by a plan."""
    sequence, whole = [Shard(1)], [Replicate()]
    column, row = [Shard(0)], [Shard(1)]
    plan = ShardingPlan(
        plan={
            "attention.[qkv].weight": column,
            "attention.o.weight": row,
            "mlp.gate.weight": column,
            "mlp.up.weight": column,
            "mlp.down.weight": row,
        },
        input_plan={"attention": (whole, None, None), "mlp": (whole,)},
        output_plan={"attention": sequence, "mlp": sequence},
    )
    return shard_module(Layer(), mesh, plan, src_data_rank=None)


def styled(styles, mesh, plain: bool) -> nn.Module:
    """The whole layer by parallel styles, torch's or ours. Between the projections are plain tensors, the styles'
    default; ``plain``: also in the residual stream."""
    sequence, whole = Shard(1), Replicate()
    gather = (sequence, None, None), (whole, None, None)
    return styles.parallelize_module(
        Layer(),
        mesh,
        {
            "norm1": styles.SequenceParallel(),
            "norm2": styles.SequenceParallel(),
            "attention": styles.PrepareModuleInput(input_layouts=gather[0], desired_input_layouts=gather[1]),
            "attention.q": styles.ColwiseParallel(),
            "attention.k": styles.ColwiseParallel(),
            "attention.v": styles.ColwiseParallel(),
            "attention.o": styles.RowwiseParallel(output_layouts=sequence, use_local_output=plain),
            "mlp": styles.PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
            "mlp.gate": styles.ColwiseParallel(),
            "mlp.up": styles.ColwiseParallel(),
            "mlp.down": styles.RowwiseParallel(output_layouts=sequence, use_local_output=plain),
        },
        src_data_rank=None,
    )


def stepper(layer, x, cos, sin):
    """One forward and backward; a constant gradient, so that no loss is timed."""
    out = layer(x, cos, sin)
    seed = torch.ones_like(out)

    def step() -> None:
        layer(x, cos, sin).backward(seed)

    return step


def main() -> None:
    warnings.filterwarnings("ignore")
    start_fake_ranks(TP)
    mesh = init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))
    cos, sin = torch.randn(TOKENS, HEAD), torch.randn(TOKENS, HEAD)
    local = torch.randn(BATCH, TOKENS // TP, HIDDEN, requires_grad=True)
    x = DTensor.from_local(local, mesh, [Shard(1)])
    layer = ours(mesh)
    contenders = {
        "plain": stepper(PlainLayer(TP), local, cos, sin),
        "plain + collectives": stepper(BareLayer(TP), local, cos, sin),
        "thin wrapper + coll.": stepper(ThinLayer(TP), local, cos, sin),
        "ours": stepper(layer, x.detach().requires_grad_(), cos, sin),
        "ours, styles": stepper(styled(hyper_parallel, mesh, True), local, cos, sin),
        "ours, styles, DTensors": stepper(styled(hyper_parallel, mesh, False), x.detach().requires_grad_(), cos, sin),
    }
    # In a run of their own: after the slowest the next one finds the processor's caches cold.
    theirs = {
        **{name: contenders[name] for name in ("plain", "plain + collectives")},
        "torch, styles": stepper(styled(torch_styles, mesh, True), local, cos, sin),
        "torch, styles, DTensors": stepper(
            styled(torch_styles, mesh, False),
            TorchDTensor.from_local(local.detach(), mesh, [Shard(1)]).requires_grad_(),
            cos,
            sin,
        ),
    }
    times = [interleaved(contenders, calls=2, blocks=350), interleaved(theirs, calls=2, blocks=60)]
    with CommTrace() as trace:
        contenders["ours"]()
    rows = [
        [name, us / 1000, us / best["plain"], us / best["plain + collectives"]]
        for best in times
        for name, us in best.items()
    ]
    table(
        "Decoder layer, forward + backward (hidden 64, 16 tokens, batch 2, tp=4)",
        ["", "ms", "of plain", "of plain+coll."],
        rows,
    )
    print("collectives of ours:", dict(trace.counts))
    with CommTrace() as trace:
        contenders["ours, styles"]()
    print("with styles:", dict(trace.counts))


if __name__ == "__main__":
    main()
