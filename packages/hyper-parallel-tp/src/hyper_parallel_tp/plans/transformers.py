"""The tensor-parallel plan that a ``transformers`` model carries, in our styles.

``transformers`` describes a plan by words (``"colwise"``, ``"rowwise"`` …), for modules and for single parameters, and
passes plain tensors between the modules. Here tensors stay DTensors inside the model: what the words say beyond the
layout of parameters, such as which gradients have to be summed, then follows from the layouts, also where a plan leaves
it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hyper_parallel import DeviceMesh, PackedShard, Placement, Replicate, Shard
from hyper_parallel.rules import matcher
from hyper_parallel_tp.styles.attention import AttentionParallel
from hyper_parallel_tp.styles.colwise_rowwise import ColwiseParallel, RowwiseParallel
from hyper_parallel_tp.styles.local_compute import LocalCompute
from hyper_parallel_tp.styles.sequence_parallel import NoParallel, SequenceParallel
from hyper_parallel_tp.styles.style import ParallelStyle

__all__ = ["transformers_plan"]

WHOLE = frozenset({"mla_kv_a_proj", "replicate", "replicated_with_grad_allreduce"})
"""Parameters that every rank holds whole. Whether their gradients are summed follows from what they meet."""

FOLLOWS = frozenset({"all_reduce", "local_params"})
"""What a module does with pieces follows from their layouts."""

GATHERED = ("colwise_gather_output", "colwise_rep")
SPLIT_INPUT = ("rowwise_split_input", "rowwise_rep")

MODULE_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": lambda: ColwiseParallel(use_local_output=False),
    **dict.fromkeys(GATHERED, lambda: ColwiseParallel(output_layouts=Replicate(), use_local_output=False)),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
    "rowwise": lambda: RowwiseParallel(use_local_output=False),
    **dict.fromkeys(SPLIT_INPUT, lambda: RowwiseParallel(input_layouts=Replicate(), use_local_output=False)),
    "sequence_parallel": lambda: SequenceParallel(),
    "moe_identity_expert": lambda: _OneTermOfMany(),
}

ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
"""The rules of a block that :class:`AttentionParallel` can take as a whole."""


def transformers_plan(model: nn.Module) -> dict[str, ParallelStyle] | None:
    """The plan of a ``transformers`` model, for :func:`parallelize_module`; None when it carries none.

    Every parameter that the plan does not split is Replicate; the model takes and returns plain tensors.

    Raises:
        ValueError: the plan has a word that is not known here, or none of its names means a part of the model.
    """
    rules = getattr(model, "_tp_plan", None)
    if not rules or not isinstance(rules, Mapping):
        return None
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = _expanded(rules, [*modules, *parameters])
    if not found:
        raise ValueError(f"the tp_plan of {type(model).__name__} names no part of it: {sorted(rules)}")
    plan: dict[str, ParallelStyle] = {}
    own: dict[str, dict[str, Placement]] = {}
    for name, rule in found.items():
        if name in parameters:
            owner, _, leaf = name.rpartition(".")
            rule = _of_experts(modules[owner], leaf, rule)
            own.setdefault(owner, {})[leaf] = _parameter_placement(model, name, rule, parameters[name])
    for name, rule in found.items():
        parent = name.rpartition(".")[0]
        if name not in modules or rule in WHOLE or rule in FOLLOWS or parent in plan:
            continue
        if rule == "moe_tp_experts":
            plan[name] = LocalCompute(parameters=own.pop(name, {}))
        elif _is_attention(modules[parent], parent, found):
            plan[parent] = AttentionParallel()
        else:
            plan[name] = _module_style(model, name, rule)
    plan.update((owner, _Parameters(placements)) for owner, placements in own.items())
    return {**plan, "": NoParallel()}


def _module_style(model: nn.Module, name: str, rule: str) -> ParallelStyle:
    """The style that a word means for one module.

    Raises:
        ValueError: the word is not known.
    """
    if rule in MODULE_STYLES:
        return MODULE_STYLES[rule]()
    module: Any = model.get_submodule(name)
    if rule == "packed_colwise":
        return ColwiseParallel(sections=_halves(module.out_features), use_local_output=False)
    if rule == "packed_rowwise":
        return RowwiseParallel(sections=_halves(module.in_features), use_local_output=False)
    raise _unknown(model, name, rule)


def style_of(word: str) -> ParallelStyle | None:
    """The style that a word of such a plan means for a module by itself, if there is a public one."""
    style = NoParallel() if word in WHOLE else MODULE_STYLES.get(word, lambda: None)()
    return None if type(style).__name__.startswith("_") else style


def _expanded(rules: Mapping[str, str], names: list[str]) -> dict[str, str]:
    """The rule of each module or parameter; rules without a part are passed over, as ``transformers`` does: models of
    one family share a plan."""
    found: dict[str, str] = {}
    for pattern, rule in rules.items():
        match = matcher(pattern).match
        found.update((name, rule) for name in names if name and match(name))
    return found


def _unknown(model: nn.Module, name: str, rule: str) -> ValueError:
    known = sorted({*MODULE_STYLES, *WHOLE, *FOLLOWS, "moe_tp_experts", "packed_colwise", "packed_rowwise"})
    return ValueError(
        f"the tp_plan of {type(model).__name__} has {rule!r} for {name!r}; known are {', '.join(known)}. Pass a plan "
        "of styles instead"
    )


def _is_attention(parent: nn.Module, name: str, found: Mapping[str, str]) -> bool:
    """Whether the rules split exactly the projections of an attention block."""
    if not isinstance(getattr(parent, "head_dim", None), int):
        return False
    return all(found.get(f"{name}.{projection}") == rule for projection, rule in ATTENTION.items())


def _of_experts(owner: nn.Module, name: str, rule: str) -> str:
    """Gate and up in one weight of experts are split each by itself, also where a plan forgets it (Inkling's): else one
    rank would have all of gate and another all of up."""
    packed = name.startswith("gate_up_proj") and getattr(owner, "is_concatenated", False)
    return "packed_colwise" if packed and rule == "colwise" else rule


def _parameter_placement(model: nn.Module, name: str, rule: str, parameter: nn.Parameter) -> Placement:
    """Of a parameter named by itself: ``[…, out, in]``, or one dimension of features."""
    out = max(parameter.ndim - 2, 0)
    if rule in ("colwise", *GATHERED):
        return Shard(out)
    if rule in ("rowwise", *SPLIT_INPUT):
        return Replicate() if name.endswith(".bias") else Shard(parameter.ndim - 1)
    if rule == "packed_colwise":
        return PackedShard(out, _halves(parameter.shape[out]))
    if rule == "packed_rowwise":
        return PackedShard(parameter.ndim - 1, _halves(parameter.shape[-1]))
    if rule in WHOLE:
        return Replicate()
    raise _unknown(model, name, rule)


def _halves(features: int) -> tuple[int, int]:
    """Gate and up in one weight."""
    return features // 2, features - features // 2


class _Parameters(ParallelStyle):
    """Place single parameters of a module."""

    def __init__(self, placements: Mapping[str, Placement]) -> None:
        self.placements = dict(placements)

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.place(module, device_mesh, self.placements)
        return module


class _OneTermOfMany(ParallelStyle):
    """An expert that is the identity, inside a module of which each rank computes one term of a sum."""

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = device_mesh.size()

        def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0] / ranks, *args[1:])

        module.register_forward_pre_hook(hook)
        return module
