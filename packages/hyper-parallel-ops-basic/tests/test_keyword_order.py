"""Tensors given by name mean the same in any order, whatever their layouts."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh, redistribute_policy


def rand(*shape):
    return torch.rand(*shape, dtype=torch.float64)


def ints(*shape):
    return torch.randint(0, 4, shape)


# name -> function, its tensors in its order
CASES = {
    "gather": (partial(torch.gather, dim=1), lambda: {"input": rand(4, 4), "index": ints(4, 4)}),
    "index_select": (partial(torch.index_select, dim=0), lambda: {"input": rand(4, 4), "index": ints(4)}),
    "take_along_dim": (partial(torch.take_along_dim, dim=0), lambda: {"input": rand(4, 4), "indices": ints(4, 4)}),
    "scatter_add": (
        partial(torch.scatter_add, dim=0),
        lambda: {"input": rand(4, 4), "index": ints(4, 4), "src": rand(4, 4)},
    ),
    "index_add": (
        partial(torch.index_add, dim=0),
        lambda: {"input": rand(4, 4), "index": ints(4), "source": rand(4, 4)},
    ),
    "masked_scatter": (
        torch.masked_scatter,
        lambda: {"input": rand(4, 4), "mask": rand(4, 4) > 0.5, "source": rand(16)},
    ),
    "slice_scatter": (partial(torch.slice_scatter, start=1), lambda: {"input": rand(4, 4), "src": rand(3, 4)}),
    "embedding": (F.embedding, lambda: {"input": ints(4, 4), "weight": rand(4, 4)}),
    "nll_loss": (F.nll_loss, lambda: {"input": rand(4, 4), "target": ints(4)}),
    "conv2d": (F.conv2d, lambda: {"input": rand(4, 4, 5, 5), "weight": rand(4, 4, 3, 3), "bias": rand(4)}),
    "group_norm": (partial(F.group_norm, num_groups=2), lambda: {"input": rand(4, 4), "weight": rand(4)}),
    "addcmul": (torch.addcmul, lambda: {"input": rand(4, 4), "tensor1": rand(4), "tensor2": rand(4, 1)}),
    "addmm": (torch.addmm, lambda: {"input": rand(4), "mat1": rand(4, 4), "mat2": rand(4, 4)}),
    "searchsorted": (
        torch.searchsorted,
        lambda: {"sorted_sequence": rand(4, 4).sort().values, "input": rand(4, 4)},
    ),
}


def leaf(tensor):
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_reversed(name):
    function, tensors = CASES[name]
    torch.manual_seed(0)
    values = tensors()
    plain = {key: leaf(value.clone()) for key, value in values.items()}
    want = function(**plain)
    if want.requires_grad:
        want.sum().backward()
    mesh = init_device_mesh("cpu", (2,))
    choices = [[Replicate(), *map(Shard, range(min(2, value.ndim)))] for value in values.values()]
    for placements in product(*choices):
        spread = {
            key: leaf(distribute_tensor(value, mesh, [placement]))
            for (key, value), placement in zip(values.items(), placements, strict=True)
        }
        with redistribute_policy("auto"):
            found = function(**dict(reversed(spread.items())))
            torch.testing.assert_close(found.full_tensor(), want)
            if want.requires_grad:
                found.sum().backward()
        for key, tensor in spread.items():
            if tensor.requires_grad and want.requires_grad:
                torch.testing.assert_close(tensor.grad.full_tensor(), plain[key].grad)
