"""PrepareModuleInput, PrepareModuleOutput and both: layouts at the boundary of a module that holds styled ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel import DeviceMesh, Placement
from hyper_parallel.rules import Boundary
from hyper_parallel_tp.styles.call_changes import Change, change_inputs, change_outputs
from hyper_parallel_tp.styles.local_outputs import GradPlacements, local_piece
from hyper_parallel_tp.styles.style import ParallelStyle, checked_placement

__all__ = ["PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput"]

Layouts = Placement | Sequence[Placement | None] | None


def _several(name: str, layouts: Layouts) -> tuple[Placement | None, ...]:
    given = () if layouts is None else layouts if isinstance(layouts, (tuple, list)) else (layouts,)
    return tuple(checked_placement(name, layout) for layout in given)


def _named(name: str, layouts: Mapping[str, Placement] | None) -> dict[str, Placement]:
    return {argument: checked_placement(name, layout) for argument, layout in (layouts or {}).items()}


def _check_pairs(what: str, given: Any, desired: Any) -> None:
    """Every value has a layout that it comes in and one that is wanted."""
    named = isinstance(given, Mapping)
    if (set(given) != set(desired)) if named else (len(given) != len(desired)):
        raise ValueError(
            f"{what} and desired_{what} go together, one for one: got {given!r} and {desired!r}. None leaves a "
            "value as it is"
        )


def _mover(
    given: Placement | None,
    desired: Placement | None,
    mesh: DeviceMesh,
    user: nn.Module | None,
    local: bool,
    grad_placements: GradPlacements = None,
) -> Change | None:
    """What is done to one value; None where it stays as it is."""
    if given is None:
        return None
    boundary = Boundary([given if desired is None else desired], mesh, user, given=[given], in_flight=not local)

    def move(module: nn.Module, value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{type(module).__name__}: its style lays out a tensor as {given!r} and got {type(value).__name__}; "
                "say None for a value that is to stay as it is"
            )
        value = boundary(value)
        return local_piece(value, module, mesh, grad_placements) if local else value

    return move


class PrepareModuleInput(ParallelStyle):
    """Lay out a module's inputs. All its other inputs, positional and by name, stay, and so does None.

    Args:
        input_layouts: what plain positional inputs are, one per input; None leaves an input as it is.
        desired_input_layouts: what they become, one for one; DTensors too.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same by the name of forward's argument, however it is
            passed.
        use_local_output: give the module plain tensors, this rank's pieces.
        local_output_grad_placements: of the gradients of these plain tensors, as of :class:`ColwiseParallel`.

    Raises:
        ValueError: the two kinds of layouts are not one for one; a name is no argument of the module's forward.
        TypeError: what is no placement; in the forward, a value with a layout that is no tensor.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
        local_output_grad_placements: GradPlacements = None,
    ) -> None:
        self.local_output_grad_placements = local_output_grad_placements
        self.input_layouts = _several("input_layouts", input_layouts)
        self.desired_input_layouts = _several("desired_input_layouts", desired_input_layouts)
        self.input_kwarg_layouts = _named("input_kwarg_layouts", input_kwarg_layouts)
        self.desired_input_kwarg_layouts = _named("desired_input_kwarg_layouts", desired_input_kwarg_layouts)
        self.use_local_output = use_local_output
        _check_pairs("input_layouts", self.input_layouts, self.desired_input_layouts)
        _check_pairs("input_kwarg_layouts", self.input_kwarg_layouts, self.desired_input_kwarg_layouts)

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See :class:`ParallelStyle`."""

        def mover(given: Placement | None, desired: Placement | None) -> Change | None:
            grads = self.local_output_grad_placements
            return _mover(given, desired, device_mesh, module, self.use_local_output, grads)

        positional = [mover(g, d) for g, d in zip(self.input_layouts, self.desired_input_layouts, strict=True)]
        named = {n: mover(g, self.desired_input_kwarg_layouts[n]) for n, g in self.input_kwarg_layouts.items()}
        change_inputs(module, positional, {n: move for n, move in named.items() if move is not None})
        return module


class PrepareModuleOutput(ParallelStyle):
    """Lay out a module's outputs: a tensor, or the values of a tuple, list, mapping or dataclass in order. Further ones
    stay, and so does None.

    Args:
        output_layouts: what plain outputs are, one per output; None leaves an output as it is.
        desired_output_layouts: what they become, one for one; DTensors too.
        use_local_output: return plain tensors, this rank's pieces.
        local_output_grad_placements: of the gradients of these plain tensors, as of :class:`ColwiseParallel`.

    Raises:
        ValueError: the two kinds of layouts are not one for one.
        TypeError: as of :class:`PrepareModuleInput`.
    """

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
        local_output_grad_placements: GradPlacements = None,
    ) -> None:
        self.local_output_grad_placements = local_output_grad_placements
        self.output_layouts = _several("output_layouts", output_layouts)
        self.desired_output_layouts = _several("desired_output_layouts", desired_output_layouts)
        self.use_local_output = use_local_output
        _check_pairs("output_layouts", self.output_layouts, self.desired_output_layouts)

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See :class:`ParallelStyle`."""
        pairs = zip(self.output_layouts, self.desired_output_layouts, strict=True)
        change_outputs(module, [self._mover(g, d, device_mesh) for g, d in pairs])
        return module

    def _mover(self, given: Placement | None, desired: Placement | None, mesh: DeviceMesh) -> Change | None:
        return _mover(given, desired, mesh, None, self.use_local_output, self.local_output_grad_placements)


class PrepareModuleInputOutput(ParallelStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` together.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts: of the inputs.
        use_local_input: give the module plain inputs.
        output_layouts, desired_output_layouts: of the outputs.
        use_local_output: return plain outputs.
        local_input_grad_placements, local_output_grad_placements: of the gradients of plain inputs and outputs, as
            ``local_output_grad_placements`` of :class:`ColwiseParallel`.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
        local_input_grad_placements: GradPlacements = None,
        local_output_grad_placements: GradPlacements = None,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
            local_output_grad_placements=local_input_grad_placements,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
            local_output_grad_placements=local_output_grad_placements,
        )

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See :class:`ParallelStyle`."""
        self.prepare_module_input.apply(module, device_mesh)
        return self.prepare_module_output.apply(module, device_mesh)
