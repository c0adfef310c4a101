"""parallelize_module: apply styles to the modules that a plan names."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor.parallel import ParallelStyle as TorchStyle

from hyper_parallel import DeviceMesh, DTensor, ShardingPlan, shard_module
from hyper_parallel.rules import (
    check_first_inputs,
    matching,
    mesh_info,
    replaces_parameters,
    replicate_plain_inside,
    torch_compat,
)
from hyper_parallel_tp.plans.known import known_plan
from hyper_parallel_tp.plans.late_adapters import explain_late_adapters
from hyper_parallel_tp.plans.transformers import style_of
from hyper_parallel_tp.styles.style import ParallelStyle

__all__ = ["parallelize_module"]

Plan = ParallelStyle | Mapping[str, Any] | ShardingPlan


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
    check_inputs: bool = True,
) -> nn.Module:
    """Parallelise a module over a 1-D mesh, in place, and return it.

    Parameters that no style names stay as they are; a tied parameter that one style spreads is spread in every place.
    Inside the module's forward plain tensors that meet DTensors count as Replicate.

    Args:
        module: the module; its parameters may be on the meta device.
        device_mesh: a 1-D mesh, such as ``mesh["tp"]`` of a larger one; by default the mesh whose ``with`` block the
            call is in.
        parallelize_plan: a style for the module itself; or a mapping from names of submodules to styles, or to
            mappings of the same kind. ``*`` in a name stands for one component or a part of one (``?`` and ``[0-9]``
            for a character), ``**`` for any number of them; ``""`` is the module itself. Or a :class:`ShardingPlan`.
            None: the model's own plan, where a plugin or ``transformers`` knows one
            (:mod:`hyper_parallel_tp.plans.known`), also inside the wrapper of ``peft``; else a warning, and nothing is
            done.
        src_data_rank: rank along the mesh whose parameters count: they are scattered and broadcast to the others. None:
            each rank uses what it has.
        check_inputs: compare the token ids, masks and other whole numbers that ``module`` is called with over the mesh,
            in its first forward and in the first one after each change between training and evaluation. Ranks that are
            dealt different batches would compute on a mixture of them, and nothing else tells. One all-reduce of 16
            bytes each time. See :func:`hyper_parallel.require_same_inputs` for a check of every call.

    Raises:
        ValueError: the mesh has several dims; a name means no submodule (near misses are listed); a parameter is
            spread over another mesh already (``fully_shard`` comes after this function).
        TypeError: the module or the plan is of another kind.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"parallelize_module takes an nn.Module, got {type(module).__name__}")
    mesh = _one_dimensional(device_mesh)
    _refuse_sharded(module, mesh)
    planned, plan = module, parallelize_plan
    if plan is None:
        planned = _inside_adapters(module)
        plan = known_plan(planned, mesh)
    if plan is None:
        warnings.warn(
            f"parallelize_module: no plan was given and none is known for {type(planned).__name__}; nothing is done",
            stacklevel=2,
        )
        return module
    with replaces_parameters([module], "parallelize_module"):
        if isinstance(plan, ShardingPlan):
            shard_module(planned, mesh, plan, src_data_rank=src_data_rank)
        else:
            _apply_styles(module, list(_styled(planned, plan)), mesh, src_data_rank)  # a mistake changes nothing
    if check_inputs:
        check_first_inputs(module, mesh)
    return module


def apply_plan(
    model: nn.Module, base: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]
) -> list[nn.Module]:
    """Apply the styles of one axis to a model with the names of ``base``, which adapters may be around.

    Returns:
        The modules that got a style.
    """
    chosen = list(_styled(base, plan))
    _apply_styles(model, chosen, mesh, src_data_rank=None if _is_on_meta(model) else 0)
    check_first_inputs(model, mesh)
    return [module for module, _ in chosen]


def _is_on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _apply_styles(
    module: nn.Module, chosen: list[tuple[nn.Module, ParallelStyle]], mesh: DeviceMesh, src_data_rank: int | None
) -> None:
    for target, style in chosen:
        with _ties_kept(module):
            style = copy.copy(style)
            style.src_data_rank = src_data_rank
            style.apply(target, mesh)
    explain_late_adapters(module)
    for part in module.modules():
        # Modules with children, not only the root: activation checkpointing calls them again by themselves.
        if part is module or next(part.children(), None) is not None:
            replicate_plain_inside(part)


def _one_dimensional(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        mesh = _current_mesh()
    info = mesh_info(mesh)
    if info.ndim != 1:
        raise ValueError(
            f"parallelize_module works on a 1-D mesh, got {info!r}; slice the axis to parallelise over, such as "
            f"mesh[{info.names[-1]!r}]"
        )
    return mesh


def _current_mesh() -> DeviceMesh:
    try:
        return torch_compat.current_mesh()
    except RuntimeError as error:
        raise ValueError(
            "parallelize_module was given no mesh and is called in no `with mesh:` block; pass one, such as "
            "parallelize_module(model, mesh['tp'], plan)"
        ) from error


def _inside_adapters(module: nn.Module) -> nn.Module:
    """The model that ``peft`` wrapped, whose names its plan has."""
    unwrap = getattr(module, "get_base_model", None)
    return module if unwrap is None else unwrap()


def _refuse_sharded(module: nn.Module, mesh: DeviceMesh) -> None:
    """Only plain parameters, or those that an earlier call put on this mesh."""
    ours = mesh_info(mesh)
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and parameter.layout.info is ours:
            continue
        if isinstance(parameter, (DTensor, TorchDTensor)):
            raise ValueError(
                f"parallelize_module: parameter {name!r} is spread over the mesh {parameter.device_mesh} already. "
                "Tensor parallelism comes first: parallelize_module(model, mesh['tp'], plan), then "
                "fully_shard(model, mesh=mesh['dp'])"
            )


def _styled(module: nn.Module, plan: Any, prefix: str = "") -> Iterator[tuple[nn.Module, ParallelStyle]]:
    """The modules that a plan means, in its order, each with its style."""
    if isinstance(plan, ParallelStyle):
        yield module, plan
        return
    if not isinstance(plan, Mapping):
        raise _no_plan(plan, prefix)
    modules = dict(module.named_modules(remove_duplicate=False))
    for pattern, style in plan.items():
        if not isinstance(pattern, str):
            raise TypeError(f"the names in a plan are strings, such as 'layers.*.mlp', got {pattern!r}")
        done: set[nn.Module] = set()
        for name in [""] if pattern == "" else matching(pattern, [n for n in modules if n], "module"):
            if modules[name] not in done:
                done.add(modules[name])
                yield from _styled(modules[name], style, ".".join(filter(None, (prefix, pattern))))


def _no_plan(given: Any, name: str) -> TypeError:
    where = f" for {name!r}" if name else ""
    got, hint = type(given).__name__, ""
    if isinstance(given, type) and issubclass(given, ParallelStyle):
        got, hint = f"the class {given.__name__}", f"; make a style of it: {given.__name__}()"
    elif isinstance(given, TorchStyle) and type(given).__module__.startswith("torch."):
        got, hint = f"PyTorch's {got}", f"; import that of this library: from hyper_parallel import {got}"
    elif isinstance(given, TorchStyle):
        hint = ", a style of PyTorch's kind; derive it from hyper_parallel.ParallelStyle, and rename _apply to apply"
    elif isinstance(given, str):
        got, hint = f"the word {given!r}", _instead_of(given)
    return TypeError(
        f"parallelize_module{where} takes a ParallelStyle or a mapping from module names to styles, got {got}{hint}"
    )


def _instead_of(word: str) -> str:
    """What to write in the place of a word: those of ``transformers`` are known."""
    if word == "auto":
        return "; the model's own plan is used where none is given"
    style = style_of(word)
    if style is None:
        return "; a style is an object, such as ColwiseParallel()"
    default = vars(type(style)())
    changed = [f"{k}={v!r}" for k, v in vars(style).items() if v != default[k] and k != "use_local_output"]
    return f"; the style for that is {type(style).__name__}({', '.join(changed)})"


@contextmanager
def _ties_kept(module: nn.Module) -> Iterator[None]:
    """A parameter that several modules share is replaced in all of them when one of them gets another."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((owner, name))
    yield
    for parameter, shared in places.items():
        new = [owner._parameters[name] for owner, name in shared]
        replacement = next((p for p in new if p is not parameter), parameter)
        if len(shared) > 1 and replacement is not parameter:
            for owner, name in shared:
                owner._parameters[name] = replacement
