"""Tensors given by name mean the same in any order, the first one and NumPy's names included."""

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


# name -> functions of one tensor [5, 6], called by name
BY_NAME = {
    "softmax": lambda x: torch.softmax(input=x, dim=0),
    "log_softmax": lambda x: torch.log_softmax(x, axis=0),
    "logsumexp": lambda x: torch.logsumexp(input=x, dim=0),
    "sum": lambda x: torch.sum(a=x, axis=0, keepdims=True),
    "mean": lambda x: x.mean(axis=(0, 1), keepdims=True),
    "prod": lambda x: torch.prod(input=x, dim=0),
    "amax": lambda x: torch.amax(axis=0, input=x),
    "argmax": lambda x: torch.argmax(input=x),
    "max": lambda x: torch.max(input=x, axis=0, keepdims=True).values,
    "var": lambda x: torch.var(input=x, unbiased=False),
    "cumsum": lambda x: torch.cumsum(input=x, axis=0),
    "cummax": lambda x: torch.cummax(axis=0, input=x).values,
    "topk": lambda x: torch.topk(input=x, k=2, axis=0).values,
    "sort": lambda x: torch.sort(input=x, dim=0).values,
    "flip": lambda x: torch.flip(input=x, dims=(0,)),
    "roll": lambda x: torch.roll(input=x, shifts=2, dims=0),
    "tril": lambda x: torch.tril(input=x, diagonal=1),
    "tile": lambda x: torch.tile(input=x, dims=(2, 1)),
    "repeat": lambda x: x.repeat(repeats=(2, 1)),
    "repeat_interleave": lambda x: torch.repeat_interleave(input=x, repeats=2, axis=0),
    "nonzero": lambda x: torch.nonzero(input=x),
    "index_put": lambda x: torch.index_put(values=x.new_ones(()), indices=(x[:, 0] > 0.5,), input=x),
    "histc": lambda x: torch.histc(input=x.detach(), bins=4),
    "chunk": lambda x: torch.chunk(input=x, chunks=2, dim=0)[1],
    "unbind": lambda x: torch.unbind(input=x, axis=0)[2],
    "narrow": lambda x: torch.narrow(input=x, dim=0, start=1, length=3),
    "select": lambda x: torch.select(input=x, dim=0, index=3),
    "cat": lambda x: torch.cat(tensors=(x, x), axis=1),
    "flatten": lambda x: torch.flatten(input=x),
    "unsqueeze": lambda x: torch.unsqueeze(input=x, dim=0),
    "broadcast_to": lambda x: torch.broadcast_to(input=x, size=(2, 5, 6)),
    "swapaxes": lambda x: torch.swapaxes(x, axis0=0, axis1=1),
    "diagonal": lambda x: torch.diagonal(input=x),
    "diff": lambda x: torch.diff(input=x, axis=0),
    "trapezoid": lambda x: torch.trapezoid(x, x=x.detach(), axis=0),
    "matmul": lambda x: torch.matmul(x1=x, x2=x.t()),
    "where": lambda x: torch.where(condition=x > 0.5, input=x, other=0.0),
    "batch_norm": lambda x: torch.batch_norm(
        input=x, weight=None, bias=None, running_mean=None, running_var=None, training=True, momentum=0.1, eps=1e-5,
        cudnn_enabled=False,
    ),
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", BY_NAME)
def test_the_first_one_by_name_and_numpys_names(name):
    function = BY_NAME[name]
    torch.manual_seed(0)
    value = rand(5, 6)
    plain = value.clone().requires_grad_()
    want = function(plain)
    if want.requires_grad:
        want.square().sum().backward()
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Replicate(), Shard(0), Shard(1)):
        x = distribute_tensor(value, mesh, [placement]).requires_grad_()
        with redistribute_policy("auto"):
            found = function(x)
            torch.testing.assert_close(found.full_tensor(), want)
            if want.requires_grad:
                found.square().sum().backward()
                torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.ranks(2)
def test_positions_of_repeats_by_name():
    repeats = distribute_tensor(torch.tensor([2, 0, 1]), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert torch.repeat_interleave(repeats=repeats).tolist() == [0, 0, 2]
