"""A failing case as a program that its author can paste and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.sharding.placements import PackedShard, Partial, Placement, Shard
from hyper_parallel.testing.inputs import Sample, TensorInput
from hyper_parallel.testing.layouts import Case, Placed
from hyper_parallel.torch_compat import pytree
from hyper_parallel.utils.function_names import display_name

_HEADER = """\
# torchrun --nproc-per-node {world} reproduce.py
import torch
import torch.distributed as dist
from hyper_parallel import PackedShard, Partial, Replicate, Shard, init_device_mesh, redistribute_policy
from hyper_parallel.testing import make, tensor
{op_import}
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", {shape}, mesh_dim_names={names})"""

_BACKWARD = """\
outs = [o for o in torch.utils._pytree.tree_leaves(out) if isinstance(o, torch.Tensor) and o.requires_grad]
torch.manual_seed(0)
torch.autograd.backward(outs, [torch.randn(o.shape, dtype=o.dtype) for o in outs])"""


def reproduction(
    func: Callable[..., Any],
    owner: type | None,
    sample: Sample,
    mesh: tuple[tuple[int, ...], tuple[str, ...]],
    case: Case,
    policy: str,
) -> str:
    """Source of a program that runs one case.

    Args:
        owner: the test class whose ``op`` the function is, if any; it names functions that have no name of their own.
        mesh: shape and axis names.
        policy: the redistribute policy.
    """
    shape, names = mesh
    op_import, op_name = _op_source(func, owner)
    world = 1
    for size in shape:
        world *= size
    lines = [_HEADER.format(world=world, op_import=op_import, shape=shape, names=names)]
    given: list[_Source] = []
    for index, (value, placed) in enumerate(zip(sample.tensors, case.inputs, strict=True)):
        lines.append(f"x{index} = {_make_source(value, index, placed)}")
        given.append(_Source(f"x{index}"))
    args, kwargs = sample.arguments(given)
    shown = [_source(a) for a in args] + [f"{name}={_source(value)}" for name, value in kwargs.items()]
    lines.append(f"with redistribute_policy({policy!r}):")
    lines.append(f"    out = {op_name}({', '.join(shown)})")
    lines.append("print(dist.get_rank(), out)")
    wanted = [f"x{index}.grad" for index, placed in enumerate(case.inputs) if placed.grad]
    if wanted:
        lines += [_BACKWARD, f"print(dist.get_rank(), {', '.join(wanted)})"]
    return "\n".join(lines)


class _Source:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _source(value: Any) -> str:
    return repr(pytree.tree_map(lambda leaf: _Source(str(leaf)) if isinstance(leaf, torch.dtype) else leaf, value))


def _op_source(func: Callable[..., Any], owner: type | None) -> tuple[str, str]:
    name = display_name(func)
    if name.startswith("torch.") and "<" not in name and not (owner is not None and name.startswith("torch.ops.")):
        return "", name  # an operator of torch.ops is there only when its module is imported, which the test does
    if owner is not None:
        return f"from {owner.__module__.rpartition('.')[2]} import {owner.__name__}", f"{owner.__name__}.op"
    module, _, short = name.rpartition(".")
    # The dotted names that pytest gives to test modules are no packages.
    return f"from {module.rpartition('.')[2]} import {short}" if module else "", short


def _make_source(value: TensorInput | torch.Tensor, index: int, placed: Placed) -> str:
    if isinstance(value, TensorInput):
        text = value.expression(index)
    else:
        text = f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    if placed.transposed and len(value.shape) > 1:
        text += ".movedim(-1, 0).contiguous().movedim(0, -1)"
    parts = [text, "mesh", f"[{', '.join(map(placement_source, placed.placements))}]"]
    if placed.shard_order:
        parts.append(f"shard_order={placed.shard_order}")
    if placed.varying:
        parts.append(f"varying={placed.varying}")
    if placed.grad:
        parts.append("requires_grad=True")
    if any(isinstance(p, Partial) for p in placed.placements):
        parts.append(f"seed={index}")
    return f"make({', '.join(parts)})"


def placement_source(placement: Placement) -> str:
    """A placement as Python source."""
    if isinstance(placement, PackedShard):
        return f"PackedShard({placement.dim}, {placement.sections})"
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    if isinstance(placement, Partial):
        return "Partial()" if placement.reduce_op == "sum" else f"Partial({placement.reduce_op!r})"
    return "Replicate()"


def title(mesh_shape: Sequence[int], case: Case, policy: str) -> str:
    """One line that says which case it is."""
    inputs = "; ".join(f"input {i}: {placed}" for i, placed in enumerate(case.inputs))
    strategy = " [a listed strategy]" if case.outputs is not None else ""
    return f"mesh {'x'.join(map(str, mesh_shape))}, policy {policy}, {inputs}{strategy}"
