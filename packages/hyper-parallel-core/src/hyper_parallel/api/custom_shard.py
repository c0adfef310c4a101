"""custom_shard: use a function written for plain local tensors on DTensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.comm.redistribute import varying_axes
from hyper_parallel.dispatch.gradient_types import vary_axes
from hyper_parallel.errors import RedistributionError
from hyper_parallel.sharding.layout import Layout, as_layout
from hyper_parallel.sharding.mesh import DeviceMesh
from hyper_parallel.sharding.placements import Placement, Replicate
from hyper_parallel.sharding.spec import make_spec
from hyper_parallel.sharding.stated import as_stated, stride_of_whole
from hyper_parallel.tensor.dtensor import DTensor, wrap
from hyper_parallel.tensor.redistribute_cache import remembered
from hyper_parallel.tensor.shapes_of_pieces import global_shapes

__all__ = ["custom_shard"]


def custom_shard(
    func: Callable[..., Any] | None = None,
    device_mesh: DeviceMesh | None = None,
    out_layouts: Any = None,
    in_layouts: Any = None,
    *,
    redistribute_inputs: bool = True,
    grad_placements: Any = None,
) -> Any:
    """Wrap a function of local tensors so that it takes and returns DTensors.

    How large an output is only its pieces tell, and they may be larger or smaller at the next call. So where one is
    sharded the ranks tell each other the sizes at each call (one small all-gather); a :class:`DFunction` whose forward
    works on meta tensors needs none.

        @custom_shard(device_mesh=mesh, out_layouts=[Shard(0)])
        def rotate(x, angle): ...

        rotate = custom_shard(rotate, mesh, out_layouts=[Shard(0)])

    Args:
        func: the function; left out when used as a decorator.
        device_mesh: the mesh; by default that of the layouts or of the first DTensor.
        out_layouts: layout of the output: a :class:`Layout` or placements (one per mesh axis). For several outputs a
            tuple of them, with None for an output that is no tensor.
        in_layouts: what the inputs must have: a tuple with one entry per positional argument (None: as it comes), or a
            mapping from parameter names. By default every input keeps its own layout.
        redistribute_inputs: bring inputs to ``in_layouts``; otherwise a different layout is an error.
        grad_placements: per positional argument, placements of the gradient that the function sends back for it; None
            for the general rule (the terms of a Replicate input are summed where another input is sharded).

    Raises:
        TypeError: ``func`` is a module, or a declared input is no DTensor.
        ValueError: ``out_layouts`` is missing or does not fit the outputs; on every rank, when the pieces of an output
            are not as ``torch.chunk`` cuts a tensor.
        RedistributionError: an input has another layout and ``redistribute_inputs`` is False.
    """
    if isinstance(func, nn.Module):
        raise TypeError(
            "custom_shard takes a function; for a module use shard_module, or custom_shard(module.forward, ...)"
        )
    if isinstance(func, DeviceMesh):
        raise TypeError(
            "custom_shard: the first argument is the function; as a decorator write custom_shard(device_mesh=mesh, …)"
        )
    if out_layouts is None:
        raise ValueError("custom_shard needs out_layouts: nothing else says how the outputs are laid out")
    if func is None:
        return lambda f: custom_shard(
            f,
            device_mesh,
            out_layouts,
            in_layouts,
            redistribute_inputs=redistribute_inputs,
            grad_placements=grad_placements,
        )
    if not callable(func):
        raise TypeError(f"custom_shard takes a function, got {type(func).__name__}")
    sharded = _CustomShard(func, device_mesh, out_layouts, in_layouts, redistribute_inputs, grad_placements)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return sharded(args, kwargs)

    return wrapper


class _CustomShard:
    def __init__(
        self,
        func: Callable[..., Any],
        mesh: DeviceMesh | None,
        outputs: Any,
        inputs: Any,
        may_move: bool,
        gradients: Any,
    ) -> None:
        self.func, self.mesh, self.outputs, self.inputs = func, mesh, outputs, inputs
        self.may_move, self.gradients = may_move, gradients
        self.name = getattr(func, "__name__", "custom_shard function")

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        declared = self._declared(args, kwargs)
        values = [*args, *kwargs.values()]
        values = [self._placed(v, d, i) for i, (v, d) in enumerate(zip(values, declared, strict=True))]
        tensors = [v for v in values if isinstance(v, DTensor)]
        if not tensors:
            return self.func(*args, **kwargs)
        values = self._varied(values, tensors)
        local = [v.to_local() if isinstance(v, DTensor) else v for v in values]
        count = len(args)
        out = self.func(*local[:count], **dict(zip(kwargs, local[count:], strict=True)))
        return self._wrapped(out, [v for v in values if isinstance(v, DTensor)])

    def _declared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if self.inputs is None:
            return [None] * (len(args) + len(kwargs))
        if isinstance(self.inputs, Mapping):
            names = list(inspect.signature(self.func).parameters)
            return [self.inputs.get(n) for n in (*names[: len(args)], *kwargs)]
        given = [self.inputs] if _is_layout(self.inputs) and len(args) == 1 else list(self.inputs)
        if len(given) != len(args):
            raise ValueError(
                f"{self.name}: in_layouts has {len(given)} entries, the call {len(args)} positional arguments"
            )
        return given + [None] * len(kwargs)

    def _placed(self, value: Any, declared: Any, position: int) -> Any:
        if declared is None:
            return value
        if not isinstance(value, DTensor):
            raise TypeError(
                f"{self.name}: argument {position} has a layout in in_layouts but is a {type(value).__name__}, no "
                "DTensor"
            )
        layout = self._layout(declared, value.ndim, value)
        if value.layout is layout:
            return value
        if not self.may_move:
            raise RedistributionError(
                f"{self.name}: argument {position} is laid out as {value.layout}, in_layouts wants {layout}; "
                "redistribute it, or allow it with redistribute_inputs=True",
                op_name=self.name,
                layouts=[value.layout],
            )
        return value.redistribute(layout)

    def _layout(self, declared: Any, ndim: int, like: DTensor) -> Layout:
        return as_layout(declared if isinstance(declared, Layout) else self.mesh or like.device_mesh, declared, ndim)

    def _varied(self, values: list[Any], tensors: list[DTensor]) -> list[Any]:
        """Inputs that are Replicate where another is not enter as varying, so that their gradient's terms are
        summed."""
        needed = iter(vary_axes(tensors))
        result = []
        for position, value in enumerate(values):
            if isinstance(value, DTensor):
                axes = next(needed)
                given = self.gradients[position] if self.gradients and position < len(self.gradients) else None
                axes = axes | value._spec.varying if given is None else varying_axes(value.layout, given)
                if axes != value._spec.varying:
                    value = remembered(value, value.layout, axes)
            result.append(value)
        return result

    def _wrapped(self, out: Any, tensors: list[DTensor]) -> Any:
        many = isinstance(out, (tuple, list))
        outs = list(out) if many else [out]
        layouts = [self.outputs] if not many or _is_layout(self.outputs) else list(self.outputs)
        if len(layouts) != len(outs):
            raise ValueError(
                f"{self.name}: out_layouts has {len(layouts)} entries, the function returned {len(outs)} values"
            )
        placed = [
            (value, self._layout(declared, value.ndim, tensors[0]))
            if declared is not None and isinstance(value, torch.Tensor)
            else None
            for value, declared in zip(outs, layouts, strict=True)
        ]
        shapes = iter(global_shapes([(p[0].shape, p[1]) for p in placed if p is not None], self.name))
        wrapped = [
            value if p is None else _wrapped_as(value, p[1], next(shapes), tensors)
            for value, p in zip(outs, placed, strict=True)
        ]
        return type(out)(wrapped) if many else wrapped[0]


def _wrapped_as(local: torch.Tensor, layout: Layout, shape: tuple[int, ...], tensors: Sequence[DTensor]) -> DTensor:
    """An output of which this rank holds ``local``; varying where all inputs are Replicate and one is varying."""
    varying = frozenset(
        axis
        for axis, placement in enumerate(layout.placements)
        if isinstance(placement, Replicate)
        and any(axis in t._spec.varying for t in tensors)
        and all(isinstance(t.placements[axis], Replicate) for t in tensors)
    )
    spec = make_spec(layout, shape, stride_of_whole(local, shape, layout), local.dtype, varying)
    return wrap(as_stated(local, spec), spec)


def _is_layout(value: Any) -> bool:
    """One layout or one list of placements, not a tuple of them."""
    return isinstance(value, Layout) or (isinstance(value, Sequence) and all(isinstance(p, Placement) for p in value))
