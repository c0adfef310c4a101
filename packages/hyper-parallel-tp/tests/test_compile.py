"""torch.compile of parallelised blocks: they run as they are, and fullgraph=True says why it cannot be."""

from __future__ import annotations

import pytest
import torch
from tp_models import Block, check_gradients, twins

from hyper_parallel import ColwiseParallel, RowwiseParallel, init_device_mesh, parallelize_module


def parallel_block():
    model, twin = twins(Block)
    split, join = ColwiseParallel(), RowwiseParallel()
    plan = {"attention.[qkv]": split, "attention.o": join, "mlp.[gu]*": split, "mlp.down": join}
    return parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan), twin


@pytest.mark.ranks(2)
def test_a_compiled_block_gives_the_numbers_of_one_device():
    torch._dynamo.reset()
    model, twin = parallel_block()
    x = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        out, want = compiled(x.requires_grad_() * 1), twin(x)
        torch.testing.assert_close(out, want)
    out.pow(2).sum().backward()
    want.pow(2).sum().backward()
    check_gradients(model, twin)


@pytest.mark.ranks(2)
def test_fullgraph_is_refused():
    torch._dynamo.reset()
    model, _ = parallel_block()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"cannot trace DTensors of hyper_parallel.*fullgraph=True"):
        compiled(torch.randn(2, 4, 8, dtype=torch.float64))
