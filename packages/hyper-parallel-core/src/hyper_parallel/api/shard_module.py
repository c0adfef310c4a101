"""shard_module: lay out a module's parameters and its boundaries from a plan, its code unmodified."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.api.module_boundary import Boundary, map_dtensors
from hyper_parallel.api.replace_forward import replicate_plain_inside
from hyper_parallel.sharding.layout import Layout, as_layout
from hyper_parallel.sharding.mesh import DeviceMesh, mesh_info
from hyper_parallel.sharding.placements import Placement
from hyper_parallel.sharding.sharding_plan import ShardingPlan
from hyper_parallel.tensor.distribute import as_parameter, distribute_tensor, replicate_rest
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.tensor.given_memory import local_of
from hyper_parallel.tensor.replaced_parameters import replaces_parameters
from hyper_parallel.utils.structures import change_values

__all__ = ["ShardingPlan", "shard_module"]


def shard_module(
    model: nn.Module,
    mesh_or_plan: DeviceMesh | ShardingPlan | Mapping[str, Any],
    plan: ShardingPlan | Mapping[str, Any] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Shard a module in place and return it.

    Two forms::

        shard_module(model, mesh, ShardingPlan(plan={"*.q_proj.weight": [Replicate(), Shard(0)]}))
        shard_module(model, {"forward": {"input": (x,), "mlp.gate.input": (y,), "output": z},
                             "parameter": {"weight": w}})          # Layouts, which carry their mesh

    Parameters that no name of the plan means become Replicate. Inside the model's forward plain tensors (buffers,
    masks, position ids) count as Replicate. At world size 1 the model is returned as it is.

    Args:
        model: the module; its parameters may be on the meta device.
        mesh_or_plan: the mesh, or a plan of Layouts.
        plan: the plan, when the mesh comes first.
        src_data_rank: rank along every mesh axis whose parameters count (see ``distribute_tensor``); None: each
            rank's own.

    Raises:
        TypeError: the plan is of another kind.
        ValueError: a name means no parameter or module (near misses are listed); a layout does not fit.
    """
    mesh, sharding = _normalise(mesh_or_plan, plan)
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError("shard_module: call torch.distributed.init_process_group() first")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return model
    mesh = mesh or _mesh_of(sharding)
    with replaces_parameters([model], "shard_module"):
        _shard_parameters(model, mesh, sharding.plan, src_data_rank)
        replicate_rest(model, mesh, src_data_rank=src_data_rank, buffers=False)
    modules = dict(model.named_modules())
    inputs = _by_module(modules, sharding.input_plan, "input")
    outputs = _by_module(modules, sharding.output_plan, "output")
    local = _local_outputs(modules, sharding.return_local_tensor)
    for name, module in modules.items():
        if name in inputs:
            module.register_forward_pre_hook(_input_hook(name, module, mesh, inputs[name]), with_kwargs=True)
        if name in outputs:
            module.register_forward_hook(_output_hook(mesh, outputs[name]))
        if name in local:
            module.register_forward_hook(
                lambda mod, args, out: map_dtensors(out, lambda t: local_of(t.reduce_partial()))
            )
        # Modules with children, not only the root: activation checkpointing calls them again, outside the root's
        # forward.
        if name == "" or next(module.children(), None) is not None:
            replicate_plain_inside(module)
    info = mesh_info(mesh)
    # Ranks along an axis called "tp" work on the same batch by convention; what others hold no name tells.
    others = tuple(n for n, s in zip(info.names, info.shape, strict=True) if s > 1 and n != "tp")
    if others:
        model.register_forward_pre_hook(_check_entry(others, inputs.get("")), with_kwargs=True, prepend=True)
    return model


# -- plans --------------------------------------------------------------------------------------------------------


def _normalise(first: Any, second: Any) -> tuple[DeviceMesh | None, ShardingPlan]:
    mesh = first if isinstance(first, DeviceMesh) else None
    plan = second if mesh is not None else first
    if mesh is None and second is not None:
        raise TypeError(f"shard_module(model, mesh, plan): the mesh is a {type(first).__name__}")
    if isinstance(plan, ShardingPlan):
        return mesh, plan
    if isinstance(plan, Mapping):
        unknown = set(plan) - {"forward", "parameter"}
        if unknown:
            raise ValueError(f'a dict plan has the keys "forward" and "parameter", got {sorted(unknown)}')
        forward = plan.get("forward", {})
        for key in forward:
            if key.rpartition(".")[2] not in ("input", "output"):
                raise ValueError(
                    f'"forward" has keys that end in "input" or "output", such as "mlp.gate.input"; got {key!r}'
                )
        return mesh, ShardingPlan(
            plan=plan.get("parameter", {}),
            input_plan={k: v for k, v in forward.items() if k.rpartition(".")[2] == "input"},
            output_plan={k: v for k, v in forward.items() if k.rpartition(".")[2] == "output"},
        )
    raise TypeError(f"shard_module takes a ShardingPlan or a dict plan, got {type(plan).__name__}")


def _layouts(value: Any) -> Iterable[Layout]:
    if isinstance(value, Layout):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _layouts(v)
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from _layouts(v)


def _mesh_of(plan: ShardingPlan) -> DeviceMesh:
    for layout in _layouts([plan.plan, plan.input_plan, plan.output_plan]):
        return layout.bind().mesh
    raise ValueError("no mesh: use Layouts in the plan, or shard_module(model, mesh, plan)")


def matcher(pattern: str) -> re.Pattern[str]:
    """A dotted glob: ``*``, ``?``, ``[a-z]`` and ``[!a]`` within one component, ``**`` over several."""
    return re.compile(re.sub(r"\*\*|\[!?[^\]]+\]|.", lambda found: _matching_one(found[0]), pattern) + r"\Z")


def _matching_one(token: str) -> str:
    """What stands for one token of a glob."""
    if len(token) > 2:  # characters in brackets
        inside = token[1:-1].replace("\\", r"\\")
        return f"[^.{inside[1:]}]" if inside[0] == "!" else f"[{inside}]"
    return {"**": ".*", "*": "[^.]*", "?": "[^.]"}.get(token) or re.escape(token)


def matching(pattern: str, names: Sequence[str], what: str) -> list[str]:
    """The names that a glob means.

    Raises:
        ValueError: when there is none; near misses are listed.
    """
    found = [n for n in names if matcher(pattern).match(n)]
    if not found:
        near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.5)
        hint = (
            f"did you mean {', '.join(map(repr, near))}?"
            if near
            else f"the {what}s are {', '.join(map(repr, names[:8]))} ..."
        )
        raise ValueError(f"the plan's {pattern!r} means no {what} of the model; {hint}")
    return found


def _shard_parameters(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any], src: int | None) -> None:
    named: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    wanted: dict[str, Any] = {}
    for pattern, layout in plan.items():
        for name in matching(pattern, list(named), "parameter"):
            wanted[name] = layout
    done: dict[int, tuple[str, Any]] = {}
    by_identity: dict[int, list[str]] = {}
    for name, parameter in named.items():
        by_identity.setdefault(id(parameter), []).append(name)
    for name, layout in wanted.items():
        parameter = named[name]
        if isinstance(parameter, DTensor):
            raise ValueError(f"parameter {name!r} is a DTensor already; shard_module distributes plain modules")
        target = as_layout(layout if isinstance(layout, Layout) else mesh, layout, parameter.ndim)
        if id(parameter) in done:
            first, sharded = done[id(parameter)]
            if sharded.layout is not target:
                raise ValueError(f"{name!r} and {first!r} are one tied parameter but have two layouts in the plan")
            continue
        sharded = as_parameter(distribute_tensor(parameter, target, src_data_rank=src), parameter)
        done[id(parameter)] = (name, sharded)
        for alias in by_identity[id(parameter)]:  # tied parameters stay tied
            owner, _, leaf = alias.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = sharded


def _by_module(modules: Mapping[str, nn.Module], plan: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in plan.items():
        pattern = key[: -len(suffix) - 1] if key.endswith("." + suffix) else "" if key == suffix else key
        for name in [""] if pattern == "" else matching(pattern, list(modules), "module"):
            found[name] = value
    return found


def _local_outputs(modules: Mapping[str, nn.Module], given: bool | Iterable[str]) -> set[str]:
    if isinstance(given, bool):
        return {""} if given else set()
    return {name for pattern in given for name in (matching(pattern, list(modules), "module") if pattern else [""])}


# -- hooks --------------------------------------------------------------------------------------------------------


def _input_hook(name: str, module: nn.Module, mesh: DeviceMesh, declared: Any) -> Callable[..., Any]:
    Hooked = tuple[tuple[Any, ...], dict[str, Any]]
    if isinstance(declared, Mapping):
        named = {key: Boundary(layout, mesh, module) for key, layout in declared.items()}

        def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
            unknown = set(named) - set(kwargs)
            if unknown:
                raise ValueError(
                    f"module {name!r}: the plan lays out inputs {sorted(unknown)}, called with {sorted(kwargs)}"
                )
            return args, {k: named[k](v) if k in named else v for k, v in kwargs.items()}

        return by_name
    several = isinstance(declared, (tuple, list)) and not _is_placements(declared)
    placed = [Boundary(layout, mesh, module) for layout in (declared if several else [declared])]

    def by_position(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hooked:
        if len(placed) > len(args):
            raise ValueError(
                f"module {name!r}: the plan lays out {len(placed)} positional inputs, called with {len(args)} and "
                f"keywords {sorted(kwargs)}; use a mapping from argument names"
            )
        return (*(place(a) for place, a in zip(placed, args, strict=False)), *args[len(placed) :]), kwargs

    return by_position


def _output_hook(mesh: DeviceMesh, declared: Any) -> Callable[..., Any]:
    several = isinstance(declared, (tuple, list)) and not _is_placements(declared)
    # One layout for the usual (hidden_states, ...) means the first.
    changes = [_placing(Boundary(layout, mesh)) for layout in (declared if several else [declared])]
    return lambda module, args, output: change_values(module, output, changes, "the plan")


def _placing(boundary: Boundary) -> Callable[[nn.Module, Any], Any]:
    return lambda module, value: boundary(value)


def _is_placements(value: Any) -> bool:
    return bool(value) and all(isinstance(p, Placement) for p in value)


def _check_entry(axes: tuple[str, ...], declared: Any) -> Callable[..., Any]:
    """Refuse plain inputs without a declared layout: along ``axes`` each rank may have another part of the batch, which
    must not count as Replicate."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        covered = set(declared) if isinstance(declared, Mapping) else set()
        positional = (
            len(declared) if isinstance(declared, (tuple, list)) and not _is_placements(declared) else bool(declared)
        )
        loose = [f"positional {i}" for i, a in enumerate(args) if _is_plain(a) and (covered or i >= positional)]
        loose += [k for k, v in kwargs.items() if _is_plain(v) and k not in covered]
        if loose:
            raise ValueError(
                f"{type(module).__name__}: plain tensor inputs ({', '.join(loose)}) on a mesh with other axes than "
                f"'tp': {axes}. Is it this rank's part of the batch, or the same on all ranks? Pass a DTensor "
                "(DTensor.from_local(x, mesh, placements), distribute_tensor) or name its layout in the plan's inputs"
            )

    return hook


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.ndim > 0
