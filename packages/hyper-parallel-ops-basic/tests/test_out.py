"""The ``out=`` form of functions of every kind of rule: the given DTensors are written, and keep their layouts."""

import pytest
import torch
from torch.utils import _pytree as pytree

from hyper_parallel import Replicate, Shard, redistribute_policy
from hyper_parallel.testing import make, mesh_of

SQUARE = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
OTHER = SQUARE.flip(0).contiguous()
PLANES = SQUARE.abs().view(2, 3, 6)
IDS = torch.tensor([4, 0, 2, 2])
CALLS = {
    "add": (torch.add, SQUARE, OTHER),
    "clamp": (lambda x, **out: torch.clamp(x, -0.5, 0.5, **out), SQUARE),
    "where": (lambda x, y, **out: torch.where(x > y, x, y, **out), SQUARE, OTHER),
    "sum": (lambda x, **out: torch.sum(x, 0, **out), SQUARE),
    "mean": (lambda x, **out: torch.mean(x, 1, **out), SQUARE),
    "max": (lambda x, **out: torch.max(x, 0, **out), SQUARE),
    "logsumexp": (lambda x, **out: torch.logsumexp(x, 0, **out), SQUARE),
    "cumsum": (lambda x, **out: torch.cumsum(x, 0, **out), SQUARE),
    "cummax": (lambda x, **out: torch.cummax(x, 0, **out), SQUARE),
    "sort": (lambda x, **out: torch.sort(x, 0, **out), SQUARE),
    "topk": (lambda x, **out: torch.topk(x, 2, **out), SQUARE),
    "quantile": (lambda x, **out: torch.quantile(x, 0.3, 0, **out), SQUARE),
    "vector_norm": (torch.linalg.vector_norm, SQUARE),
    "cat": (lambda x, y, **out: torch.cat((x, y), **out), SQUARE, OTHER),
    "stack": (lambda x, y, **out: torch.stack((x, y), **out), SQUARE, OTHER),
    "tril": (torch.tril, SQUARE),
    "gather": (lambda x, i, **out: torch.gather(x, 0, i, **out), SQUARE, IDS.view(2, 2)),
    "index_select": (lambda x, i, **out: torch.index_select(x, 0, i, **out), SQUARE, IDS),
    "index_add": (lambda x, i, y, **out: torch.index_add(x, 0, i, y, **out), SQUARE, IDS, OTHER[:4]),
    "masked_select": (torch.masked_select, SQUARE, SQUARE > 0),
    "nonzero": (torch.nonzero, SQUARE > 0),
    "searchsorted": (torch.searchsorted, SQUARE.sort().values, OTHER),
    "matmul": (torch.matmul, SQUARE, OTHER),
    "addmm": (torch.addmm, SQUARE, SQUARE, OTHER),
    "linalg.inv": (torch.linalg.inv, SQUARE),
    "fft": (torch.fft.fft, SQUARE),
    "diag": (torch.diag, SQUARE),
    "take": (torch.take, SQUARE, IDS),
    "kron": (torch.kron, SQUARE, OTHER),
    "histc": (lambda x, **out: torch.histc(x, 5, -1, 1, **out), SQUARE),
    "histogram": (lambda x, **out: torch.histogram(x, 5, **out), SQUARE),
    "bernoulli": (torch.bernoulli, torch.sigmoid(SQUARE)),
    "multinomial": (lambda x, **out: torch.multinomial(x, 3, **out), SQUARE.abs()),
    "normal": (torch.normal, SQUARE, SQUARE.abs()),
    "native_batch_norm": (
        lambda x, **out: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5, **out), PLANES,
    ),
}  # fmt: skip


@pytest.mark.ranks(4)
@pytest.mark.parametrize("of_out", [Replicate(), Shard(0)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_given_tensors_are_written(name, of_out):
    function, *values = CALLS[name]
    torch.manual_seed(0)
    plain = function(*values)
    wants, structure = pytree.tree_flatten(plain)
    mesh = mesh_of((4,))
    inputs = [make(value, mesh, [Shard(0)]) for value in values]
    given = [make(torch.zeros_like(want), mesh, [of_out if want.ndim else Replicate()]) for want in wants]
    layouts = [out.layout for out in given]
    torch.manual_seed(0)
    with redistribute_policy("auto"):
        found = function(*inputs, out=pytree.tree_unflatten(given, structure))
    for got, out, layout, want in zip(pytree.tree_leaves(found), given, layouts, wants, strict=True):
        assert got is out
        assert out.layout is layout
        torch.testing.assert_close(out.full_tensor(), want)
