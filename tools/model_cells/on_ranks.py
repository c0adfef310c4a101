"""A cell: the model on one process, and over its mesh on several."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from .cells import Cell
from .float64 import float64_throughout
from .judge import TOLERANCES, Trace, Verdict, judge, rounding_of, train
from .zoo import MODELS, batch_of

_SPREAD = {
    "both": {"sequence_parallel": True, "loss_parallel": True},
    "sequence": {"sequence_parallel": True, "loss_parallel": False},
    "loss": {"sequence_parallel": False, "loss_parallel": True},
    "neither": {"sequence_parallel": False, "loss_parallel": False},
    "-": {},
}


def build(cell: Cell) -> torch.nn.Module:
    """The model of a cell, whole. Its own dtype is float32, also where products are computed in bfloat16."""
    dtype = torch.float64 if cell.dtype == "float64" else torch.float32
    model = MODELS[cell.model].build(dtype, None if cell.experts == "-" else cell.experts)
    if cell.lora == "-":
        return model
    import peft

    torch.manual_seed(1)  # weights of adapters are random, none of them zero
    inside = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear and name != "lm_head"]
    adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules=inside, init_lora_weights=False)
    adapted = peft.get_peft_model(model, adapters).to(dtype)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data *= 0.1
    return adapted


def _has_one_auxiliary_loss(cell: Cell) -> bool:
    """Whether routers judge the whole batch: data ranks with plain tensors have each a loss of their own rows."""
    return cell.form == "dtensor" or cell.data_ranks == 1


def _inputs(cell: Cell, step: int, auxiliary: bool) -> dict[str, Any]:
    """The whole batch, and the arguments that every call of the model has.

    Args:
        auxiliary: whether the routers' loss is part of the model's, where it has one.
    """
    batch: dict[str, Any] = dict(batch_of(cell.batch, step))
    if cell.dtype == "float64" and "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].double()
    if MODELS[cell.model].auxiliary:
        batch["output_router_logits"] = auxiliary
    return batch


def _precision(cell: Cell) -> contextlib.AbstractContextManager[None]:
    return float64_throughout() if cell.dtype == "float64" else contextlib.nullcontext()


@functools.lru_cache(maxsize=16)
def _reference(cell: Cell, auxiliary: bool) -> Trace:
    with _precision(cell):
        model = build(cell)
        low = copy.deepcopy(model) if cell.dtype == "bfloat16" else None

        def backward(step: int) -> float:
            inputs = {**_inputs(cell, step, auxiliary), "use_cache": False}
            if low is not None:
                return _in_low_precision(model, low, inputs)
            loss = model(**inputs).loss
            loss.backward()
            return float(loss.detach())

        return train(model, backward, torch.nn.utils.clip_grad_norm_)


def _in_low_precision(model: torch.nn.Module, low: torch.nn.Module, inputs: dict[str, Any]) -> float:
    """Forward and backward of a copy with parameters in bfloat16; the gradients go to those that it was made of."""
    pairs = list(zip(low.parameters(), model.parameters(), strict=True))
    for copied, parameter in pairs:
        copied.data, copied.grad = parameter.detach().bfloat16(), None
    pictures = {name: value.bfloat16() for name, value in inputs.items() if name == "pixel_values"}
    loss = low(**{**inputs, **pictures}).loss
    loss.backward()
    for copied, parameter in pairs:
        parameter.grad = None if copied.grad is None else copied.grad.float()
    return float(loss.detach())


def reference(cell: Cell) -> Trace:
    """What one plain process gives for the whole batch. Computed once for all cells that differ in the mesh only.

    For bfloat16 it says how far its own rounding takes each gradient from that of float32.
    """
    alone = Cell(cell.model, "-", batch=cell.batch, dtype=cell.dtype, experts=cell.experts, lora=cell.lora)
    auxiliary = _has_one_auxiliary_loss(cell)
    trace = _reference(alone, auxiliary)
    if cell.dtype == "bfloat16" and trace.rounding is None:
        trace.rounding = rounding_of(trace, _reference(replace(alone, dtype="float32"), auxiliary))
    return trace


def run_cell(cell: Cell, want: Trace, fault: Callable[[torch.nn.Module], None] | None = None) -> dict[str, Any]:
    """Train over the mesh of a cell, and judge; every rank calls it, and rank 0's answer counts.

    Args:
        want: what one process gives.
        fault: something wrong to do to the model, for tests of the judge.

    Returns:
        The fields of a `Verdict`, ``warned`` and ``seconds``.
    """
    from hyper_parallel import (
        DTensor,
        MixedPrecisionPolicy,
        ParallelDims,
        clip_grad_norm_,
        parallelize,
        shard_batch,
    )
    from hyper_parallel.registry import default_registry

    default_registry().find(torch.Tensor.float)  # functions are listed by name before names change for float64
    start = time.monotonic()
    dims = ParallelDims(**cell.degrees)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = low if cell.dtype == "bfloat16" else None

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    with _precision(cell), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model = parallelize(
            build(cell), dims, checkpointing=cell.checkpointing, mp_policy=policy, **_SPREAD[cell.spread]
        )
        if fault is not None:
            fault(model)

        def backward(step: int) -> float:
            inputs = _inputs(cell, step, _has_one_auxiliary_loss(cell))
            batch = shard_batch(inputs, dims, as_dtensor=cell.form == "dtensor")
            loss = model(**batch).loss
            loss.backward()
            value = whole(loss.detach()).clone()
            if cell.form == "plain":  # each data rank has a mean of its own
                dist.all_reduce(value)
                value /= dist.get_world_size()
            return float(value)

        got = train(model, backward, clip_grad_norm_, whole)
    verdict: Verdict = judge(got, want, TOLERANCES[cell.dtype])
    noted = sorted({str(w.message).split("\n")[0] for w in warned if issubclass(w.category, UserWarning)})
    return {**verdict.as_dict(), "warned": noted, "seconds": round(time.monotonic() - start, 2)}
