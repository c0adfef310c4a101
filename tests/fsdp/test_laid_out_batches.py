"""An unmodified model with the plan that transformers has for it and ``fully_shard``, fed a batch laid out over dp."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from hyper_parallel import (
    Replicate,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "fully_sharded.py"


@pytest.mark.ranks(4, timeout=200)
@pytest.mark.parametrize("tp", [None, 1, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_three_steps_equal_those_of_one_device(tp, checkpointing):
    plain = runpy.run_path(str(EXAMPLE))["make_model"]()
    model = copy.deepcopy(plain)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if tp is None:  # fully_shard alone
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    else:
        mesh = init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids = torch.randint(0, 50, (8, 16), generator=generator)
        batch = distribute_tensor(ids, mesh, [Shard(0), Replicate()][: mesh.ndim], src_data_rank=None)
        loss, expected = model(input_ids=batch, labels=batch).loss, plain(input_ids=ids, labels=ids).loss
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-5, atol=1e-6)
        for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), reference.grad, rtol=1e-4, atol=1e-6)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1.0), rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
