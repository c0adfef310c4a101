"""Operators along the dim that is sharded, unevenly: nothing is refused, and only what has to change rank travels.

Every case runs under the strict policy, which forbids any redistribution; value and gradient equal those of one device.
"""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh, redistribute_policy
from hyper_parallel.comm.trace import CommTrace

MOVED = {"all_to_all": 1}
DEALT = {"all_to_all": 2}
SUMMED, TWO_SUMS = {"all_reduce": 1}, {"all_reduce": 2}
FREE: dict[str, int] = {}
IDS = torch.tensor([4, 0, 2, 2])
PLACES = torch.tensor([[4, 0, 2, 2, 9, 8], [1, 1, 2, 0, 5, 7]])
MASK = torch.tensor([True, False, False, True, True, True, False, True, False, True])


def whole(x, value):
    return DTensor.from_local(value, x.device_mesh, [Replicate()]) if isinstance(x, DTensor) else value


def ids(x):
    return whole(x, IDS)


def places(x):
    return whole(x, PLACES)


def rows(x, *shape):
    return whole(x, torch.linspace(0.0, 1.0, shape[0] * shape[1], dtype=torch.float64).view(shape))


def mask(x):
    """Sharded without communication."""
    if not isinstance(x, DTensor):
        return MASK
    return DTensor.from_local(MASK, x.device_mesh, [Replicate()]).redistribute(placements=[Shard(0)])


def changed_in_parts(x):
    x = x.clone()
    x[3] += 1
    x[4:6] = 2.0
    return x


def changed_rows(x):
    x = x.clone()
    x[2:] -= 1
    return x


# function of a tensor [10, 6] sharded by rows; collectives forward and backward
CASES = {
    "flip": (lambda x: x.flip(0), MOVED, MOVED),
    "roll": (lambda x: x.roll(3, 0), MOVED, MOVED),
    "pad": (lambda x: F.pad(x, (0, 0, 2, 1), value=1.5), MOVED, MOVED),
    "pad columns": (lambda x: F.pad(x, (1, 2)), FREE, FREE),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), MOVED, MOVED),
    "tile": (lambda x: x.tile(2, 1), FREE, FREE),
    "slice": (lambda x: x[2:9], MOVED, MOVED),
    "step": (lambda x: x[::2], MOVED, MOVED),
    "int": (lambda x: x[3], FREE, FREE),
    "list": (lambda x: x[[1, 8]], FREE, FREE),
    "ids": (lambda x: x[ids(x)], FREE, FREE),
    "mask": (lambda x: x[mask(x)], {"all_gather": 1, "all_to_all": 1}, MOVED),
    "index_select": (lambda x: x.index_select(0, ids(x)), FREE, FREE),
    "gather": (lambda x: x.gather(0, places(x)), FREE, FREE),
    "take_along_dim": (lambda x: torch.take_along_dim(x, places(x), 0), FREE, FREE),
    "scatter_add": (lambda x: x.scatter_add(0, places(x), rows(x, 2, 6)), FREE, FREE),
    "scatter_reduce": (lambda x: x.scatter_reduce(0, places(x), rows(x, 2, 6), "amax"), FREE, FREE),
    "index_copy": (lambda x: x.index_copy(0, whole(x, torch.tensor([8, 1])), rows(x, 2, 6)), FREE, FREE),
    "parts in place": (changed_in_parts, SUMMED, SUMMED),
    "rows in place": (changed_rows, DEALT, DEALT),
    "split": (lambda x: x.split([3, 5, 2])[1], MOVED, MOVED),
    "chunk": (lambda x: x.chunk(3)[0], MOVED, MOVED),
    "unbind": (lambda x: x.unbind()[4], {"all_gather": 1}, FREE),
    "cat": (lambda x: torch.cat([x, x]), FREE, FREE),
    "vstack": (lambda x: torch.vstack([x, x]), FREE, FREE),
    "stack": (lambda x: torch.stack([x, x]), FREE, FREE),
    "triu": (lambda x: x.triu(), FREE, FREE),
    "masked_fill": (lambda x: x.masked_fill(x.detach() > 0, 0.5), FREE, FREE),
    "where": (lambda x: torch.where(x.detach() > 0, x, 0.5), FREE, FREE),
    "einsum": (lambda x: torch.einsum("ij,ik->jk", x, x), FREE, FREE),
    "var": (lambda x: x.var(0), TWO_SUMS, SUMMED),
    "logsumexp": (lambda x: x.logsumexp(0), TWO_SUMS, FREE),
    "norm of order 1": (lambda x: torch.linalg.vector_norm(x, 1, 0), SUMMED, FREE),
    "norm of order -1": (lambda x: torch.linalg.vector_norm(x, -1, 0), SUMMED, FREE),
    "norm of order 3": (lambda x: torch.linalg.vector_norm(x, 3, 0), SUMMED, FREE),
    "norm of order inf": (lambda x: torch.linalg.vector_norm(x, torch.inf, 0), SUMMED, SUMMED),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), FREE, FREE),
    "kl_div": (lambda x: F.kl_div(x, x.detach() ** 2), FREE, FREE),
    "huber_loss": (lambda x: F.huber_loss(x, x.detach() * 2), FREE, FREE),
    "kthvalue": (lambda x: x.kthvalue(3, 0).values, {"all_to_all": 1, "all_gather": 2}, MOVED),
    "cummin": (lambda x: x.cummin(0).values, {"all_gather": 2}, {"reduce_scatter": 1}),
    "min": (lambda x: x.min(0).values, TWO_SUMS, FREE),
    "index_put": (lambda x: x.index_put((ids(x),), torch.tensor(1.0, dtype=x.dtype)), FREE, FREE),
    "index_add": (lambda x: x.index_add(0, ids(x), x.new_zeros(4, 6)), FREE, FREE),
    "unfold": (lambda x: x.unfold(0, 3, 2), MOVED, MOVED),
    "diff": (lambda x: x.diff(dim=0), MOVED, MOVED),
    "diagonal": (lambda x: x.diagonal(), FREE, FREE),
    "tril": (lambda x: x.tril(), FREE, FREE),
    "sort": (lambda x: x.sort(0).values, {"all_to_all": 3}, DEALT),
    "median": (lambda x: x.median(0).values, {"all_to_all": 1, "all_gather": 2}, MOVED),
    "topk": (lambda x: x.topk(3, 0).values, {"all_gather": 1}, FREE),
    "quantile": (lambda x: x.quantile(0.3, 0), {"all_to_all": 1, "all_gather": 1}, MOVED),
    "cumsum": (lambda x: x.cumsum(0), {"all_gather": 1}, {"reduce_scatter": 1}),
    "cumprod": (lambda x: x.cumprod(0), {"all_gather": 1}, {"reduce_scatter": 1}),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), {"all_gather": 1}, {"reduce_scatter": 1}),
    "cummax": (lambda x: x.cummax(0).values, {"all_gather": 2}, {"reduce_scatter": 1}),
    "fft": (lambda x: torch.fft.fft(x, dim=0).abs(), DEALT, DEALT),
    "max_pool": (lambda x: F.max_pool1d(x.t().unsqueeze(0), 2), MOVED, MOVED),
    "avg_pool": (lambda x: F.avg_pool1d(x.t().unsqueeze(0), 3, 2, 1), MOVED, MOVED),
    "interpolate": (lambda x: F.interpolate(x.t().unsqueeze(0), size=7, mode="linear"), MOVED, MOVED),
    "group_norm": (lambda x: F.group_norm(x.t().unsqueeze(0), 3), TWO_SUMS, TWO_SUMS),
    "keys": (
        lambda x: F.scaled_dot_product_attention(x.detach()[:, :4].new_ones(2, 6), x, x),
        TWO_SUMS,
        SUMMED,
    ),
    "keys and queries": (
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        {"all_gather": 2},
        {"reduce_scatter": 2},
    ),
}


def run_all():
    mesh = init_device_mesh("cpu", (4,))
    found, wrong = {}, []
    for name, (function, _, _) in CASES.items():
        torch.manual_seed(0)
        value = torch.randn(10, 6, dtype=torch.float64)
        plain = value.clone().requires_grad_()
        wanted = function(plain)
        weights = torch.randn_like(wanted)
        (wanted * weights).sum().backward()
        x = distribute_tensor(value, mesh, [Shard(0)]).requires_grad_()
        with redistribute_policy("strict"), CommTrace() as forward:
            out = function(x)
        with CommTrace() as backward:
            out.backward(weights)
        found[name] = dict(forward.counts), dict(backward.counts)
        if not torch.allclose(out.full_tensor(), wanted) or not torch.allclose(x.grad.full_tensor(), plain.grad):
            wrong.append(name)
    return found, wrong


def test_only_what_has_to_change_rank_travels(ranks):
    for found, wrong in ranks(4, run_all):
        assert wrong == []
        assert found == {name: (forward, backward) for name, (_, forward, backward) in CASES.items()}


@pytest.mark.ranks(4)
def test_sizes_that_only_the_data_tells_are_the_same_on_all_ranks():
    mesh = init_device_mesh("cpu", (4,))
    value = torch.tensor([0, 3, 0, 0, 1, 2, 3, 0, 0, 1])
    x = distribute_tensor(value, mesh, [Shard(0)])
    with CommTrace() as trace:
        found = x.nonzero()
    assert dict(trace.counts) == {"all_gather": 1, "all_to_all": 1}
    assert found.shape == (5, 1)
    assert found.placements == (Shard(0),)
    with CommTrace() as trace:
        values, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    assert dict(trace.counts) == {"all_gather": 2, "all_reduce": 1}
    assert values.full_tensor().tolist() == [0, 1, 2, 3]
    assert counts.full_tensor().tolist() == [5, 2, 1, 2]
    assert inverse.placements == (Shard(0),)
