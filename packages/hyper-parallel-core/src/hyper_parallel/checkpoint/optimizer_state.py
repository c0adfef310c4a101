"""State dicts of optimizers by parameter name: PyTorch's functions of the same names.

PyTorch makes the state of an optimizer that has none yet by a step with zero gradients, which leaves Adam one step
ahead. Here the optimizer is not touched: the places to load into are :class:`AbsentState`, which ``save`` leaves out
and ``load`` drops where the checkpoint has no state either.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from hyper_parallel.checkpoint.model_state import canonical, checked
from hyper_parallel.checkpoint.whole_tensors import announced, delivered, placed

__all__ = ["AbsentState", "get_optimizer_state_dict", "set_optimizer_state_dict"]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


class AbsentState(dict[str, Any]):
    """State that a parameter does not have yet: tensors of the right shapes and layouts to load into."""


def get_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, *, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """``{"state": {name: {…}}, "param_groups": [{…, "params": [names]}]}`` of one or several optimizers; as
    ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``.

    Args:
        model: the module whose parameters are optimized. A tied parameter goes by its first name.
        optimizers: one or several.
        options: PyTorch's, as in :func:`get_model_state_dict`; ``flatten_optimizer_state_dict`` gives one level,
            ``"state.<name>.exp_avg"`` and ``"param_groups.<name>.lr"``. A parameter without state has an
            :class:`AbsentState`, and none in a full state dict.

    Raises:
        ValueError: an optimizer has a parameter that the model has not.
    """
    options = checked(options)
    names = {id(p): canonical(name) for name, p in model.named_parameters()}
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in _each(optimizers):
        saved = optimizer.state_dict()
        by_number = list(_parameters(optimizer))
        for number, (group, parameter) in enumerate(by_number):
            name = _name(names, parameter, group)
            if number in saved["state"]:
                state[name] = dict(saved["state"][number])
            elif parameter.requires_grad and not options.full_state_dict:
                absent = _absent_state(optimizer, group, parameter)
                if absent:
                    state[name] = absent
        for group in saved["param_groups"]:
            groups.append({**group, "params": [names[id(by_number[number][1])] for number in group["params"]]})
    result: dict[str, Any] = {"state": state, "param_groups": groups}
    return delivered(_flat(result) if options.flatten_optimizer_state_dict else result, options)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load a state dict by parameter name into one or several optimizers; as
    ``torch.distributed.checkpoint.state_dict.set_optimizer_state_dict``.

    Args:
        model: the module whose parameters are optimized; a tied parameter is found under any of its names.
        optimizers: one or several; each takes what belongs to its parameters, whatever their order and grouping.
        optim_state_dict: as :func:`get_optimizer_state_dict` gives it, flat or not. A parameter that it lists without
            state has none afterwards.
        options: PyTorch's, as in :func:`set_model_state_dict`. With ``strict=False`` parameters that it does not list
            keep their state.

    Raises:
        RuntimeError: (``strict``) it does not list a parameter of an optimizer, or has one that the model has not.
        ValueError: the parameters of one group come from groups with different settings.
    """
    options = checked(options)
    if options.broadcast_from_rank0:
        optim_state_dict = announced(optim_state_dict)
    aliases: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases[id(parameter)].append(canonical(name))
    saved = optim_state_dict if "param_groups" in optim_state_dict else _nested(optim_state_dict, aliases.values())
    settings = {name: group for group in saved["param_groups"] for name in group["params"]}
    optimizers = _each(optimizers)
    if options.strict:
        _check_names(settings, aliases, optimizers)
    for optimizer in optimizers:
        _load(optimizer, saved["state"], settings, aliases, options)


def _each(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Any]]:
    """(group, parameter) in the order in which an optimizer numbers them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter


def _name(names: Mapping[int, str], parameter: torch.Tensor, group: Mapping[str, Any]) -> str:
    if id(parameter) not in names:
        raise ValueError(
            f"an optimizer has a parameter of shape {tuple(parameter.shape)} that the model has not; pass the whole "
            "model, and build the optimizer after the model was sharded"
        )
    return names[id(parameter)]


def _absent_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> AbsentState | None:
    """What a step leaves in the state of a parameter: of a stand-in, by a copy of the optimizer without its hooks."""
    stand_in = nn.Parameter(torch.zeros_like(parameter.detach()))
    stand_in.grad = torch.zeros_like(stand_in.detach())
    copied = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    copied.__dict__.pop("step", None)  # a learning rate scheduler puts its own there, bound to the optimizer
    copied._optimizer_step_pre_hooks = OrderedDict()
    copied._optimizer_step_post_hooks = OrderedDict()
    copied.state = defaultdict(dict)
    copied.param_groups = [{**group, "params": [stand_in]}]
    with torch.enable_grad():
        copied.step()
    return AbsentState(copied.state[stand_in]) if stand_in in copied.state else None


# -- loading ----------------------------------------------------------------------------------------------------------


def _check_names(
    settings: Mapping[str, Any], aliases: Mapping[int, list[str]], optimizers: tuple[torch.optim.Optimizer, ...]
) -> None:
    known = set(itertools.chain.from_iterable(aliases.values()))
    wanted = [aliases[id(p)] for optimizer in optimizers for _, p in _parameters(optimizer)]
    missing = [
        names[0] if names else "a parameter that is not the model's" for names in wanted if not settings.keys() & names
    ]
    unexpected = [name for name in settings if name not in known]
    if missing or unexpected:
        raise RuntimeError(
            "the optimizer state dict does not fit the model and its optimizers:"
            + _listed("missing parameters", missing)
            + _listed("parameters that the model does not have", unexpected)
            + "\nPass options=StateDictOptions(strict=False) to load what fits"
        )


def _listed(title: str, names: list[str]) -> str:
    return f"\n  {title}: {', '.join(names)}" if names else ""


def _load(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, Any]],
    aliases: Mapping[int, list[str]],
    options: StateDictOptions,
) -> None:
    current = optimizer.state_dict()
    loaded: dict[int, Any] = {}
    groups = []
    number = 0
    for group, mine in zip(optimizer.param_groups, current["param_groups"], strict=True):
        found: dict[str, Mapping[str, Any]] = {}
        for parameter in group["params"]:
            name = next((n for n in aliases[id(parameter)] if n in settings), None)
            if name is None:
                if number in current["state"]:
                    loaded[number] = current["state"][number]
            else:
                found[name] = settings[name]
                if name in state:
                    loaded[number] = _placed_state(state[name], optimizer, group, parameter, name, options)
            number += 1
        groups.append({**mine, **_common(found), "params": mine["params"]})
    optimizer.load_state_dict({"state": loaded, "param_groups": groups})


def _placed_state(
    state: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameter: torch.Tensor,
    name: str,
    options: StateDictOptions,
) -> dict[str, Any]:
    # Moments have the shape and the layout of their parameter, step counts are plain numbers. Where the shape cannot
    # tell them apart, the optimizer itself can.
    like: Any = dict.fromkeys(state, parameter)
    if parameter.ndim == 0:
        like = optimizer.state.get(parameter) or _absent_state(optimizer, group, parameter) or {}
    result = {}
    for key, value in state.items():
        value = placed(value, like.get(key), f"{name}.{key}", options)
        # Optimizers change step counts in place: a state dict that is loaded twice must not tie them together.
        result[key] = value.clone() if isinstance(value, torch.Tensor) and value.ndim == 0 else value
    return result


def _common(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of the saved groups in which the parameters of one group are."""
    result: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, group in found.items():
        for key, value in group.items():
            if key == "params":
                continue
            if key in result and result[key] != value:
                raise ValueError(
                    f"the optimizer has {origin[key]} and {name} in one group, but they were saved with different "
                    f"{key}: {result[key]} and {value}; group the parameters as they were"
                )
            result.setdefault(key, value)
            origin.setdefault(key, name)
    return result


# -- one level --------------------------------------------------------------------------------------------------------


def _flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    """``{"state.<name>.<key>": …, "param_groups.<name>.<key>": …}``. An :class:`AbsentState` stays one, under
    ``"state.<name>"``: a checkpoint has its entries under the same keys."""
    flat: dict[str, Any] = {}
    for name, state in nested["state"].items():
        if isinstance(state, AbsentState):
            flat[f"state.{name}"] = state
        else:
            flat.update({f"state.{name}.{key}": value for key, value in state.items()})
    for group in nested["param_groups"]:
        for name in group["params"]:
            flat.update({f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"})
    return flat


def _nested(flat: Mapping[str, Any], names: Iterable[list[str]]) -> dict[str, Any]:
    """The reverse of :func:`_flat`. Names contain dots, so the model's names say where one ends."""
    known = set(itertools.chain.from_iterable(names))
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        section, _, rest = path.partition(".")
        if section == "state" and isinstance(value, Mapping) and rest in known:
            state.setdefault(rest, {}).update(value)
            continue
        name, _, key = rest.rpartition(".")
        while name and name not in known and section == "state" and "." in name:
            name, _, inner = name.rpartition(".")
            key = f"{inner}.{key}"
        target = state if section == "state" else groups
        target.setdefault(name, {})[key] = value
    return {"state": state, "param_groups": [{**settings, "params": [name]} for name, settings in groups.items()]}
