"""Changes of a module's inputs and outputs that keep whatever else it is called with, and returns.

They are part of the module's forward and no hooks: a call without hooks is the quicker one, and a user's own hooks see
what the caller gives and gets, in whatever order they were registered.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from hyper_parallel.rules import change_values, forward_function, set_forward

Change = Callable[[nn.Module, Any], Any]
"""From the module and a value to the value in its place."""


def parameter_names(module: nn.Module) -> tuple[list[str], bool]:
    """Names of the arguments of a module's forward, in order, and whether it takes any keyword."""
    parameters = inspect.signature(module.forward).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def change_inputs(
    module: nn.Module, by_position: Sequence[Change | None], by_name: Mapping[str, Change] | None = None
) -> None:
    """Change inputs of a module before its forward sees them.

    Args:
        module: the module.
        by_position: for the first positional inputs; None leaves one as it is. A call with fewer positional inputs is
            an error, unless it passes them by name.
        by_name: for arguments of forward, passed by name or by position.

    Raises:
        ValueError: a name is no argument of the module's forward.
    """
    names, open_ended = parameter_names(module)
    named = dict(by_name or {})
    for name in named:
        if name not in names and not open_ended:
            near = difflib.get_close_matches(name, names, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"it takes {', '.join(names)}"
            raise ValueError(f"{type(module).__name__}.forward has no argument {name!r}; {hint}")

    placed = [(index, change) for index, change in enumerate(by_position) if change is not None]
    inner = forward_function(module)

    @functools.wraps(inner)
    def forward(module: nn.Module, /, *args: Any, **keywords: Any) -> Any:
        inputs = list(args)
        for index, change in placed:
            if index < len(inputs):
                inputs[index] = change(module, inputs[index])
            elif index < len(names) and names[index] in keywords:
                keywords[names[index]] = change(module, keywords[names[index]])
            else:
                raise ValueError(
                    f"{type(module).__name__}: its style lays out {len(by_position)} positional inputs, called with "
                    f"{len(args)} and keywords {sorted(keywords)}"
                )
        for name, change in named.items():
            if name in keywords:
                keywords[name] = change(module, keywords[name])
            elif name in names and names.index(name) < len(inputs):
                at = names.index(name)
                inputs[at] = change(module, inputs[at])
        return inner(module, *inputs, **keywords)

    set_forward(module, forward)


def change_outputs(module: nn.Module, changes: Iterable[Change | None]) -> None:
    """Change the first outputs of a module: a tensor, or the values of a tuple, list, mapping (ModelOutput) or
    dataclass.

    Raises:
        ValueError: when it returns fewer outputs.
    """
    wanted = list(changes)
    change_output(module, lambda module, output: change_values(module, output, wanted, "its style"))


def change_output(module: nn.Module, change: Change) -> None:
    """Change all that a module returns."""
    inner = forward_function(module)

    @functools.wraps(inner)
    def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return change(module, inner(module, *args, **kwargs))

    set_forward(module, forward)
