"""Operators that draw random numbers, each element's as on one device; see :mod:`hyper_parallel.tensor.random`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hyper_parallel import DTensor, Replicate
from hyper_parallel.errors import RedistributionError
from hyper_parallel.rules import (
    FunctionOp,
    OpSummary,
    before_write,
    carry,
    check_generators,
    contiguous_stride,
    draw,
    embedded,
    in_memory_order,
    local_of,
    local_part,
    make_spec,
    root_of,
    state,
    wrap,
)
from hyper_parallel_ops_basic.values.factories import settled


class FillRandomly(FunctionOp):
    """Functions that overwrite their first argument with random numbers: ``normal_``, ``nn.init.kaiming_uniform_`` ...

    The function runs on a tensor of the global shape, so whatever it derives from the shape (fan in) is right, and
    every rank copies its part into the target. A pending target holds the numbers once.
    """

    summary = OpSummary(
        "every dim; each element as on one device",
        pending="stays: the numbers count once",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = next((n for n in ("tensor", "self", "input") if n in kwargs), None)
        target = args[0] if args else kwargs[name]  # type: ignore[index]
        if not isinstance(target, DTensor):
            raise TypeError(
                f"{func.__name__} of a plain tensor with a DTensor as parameter: make the target a DTensor, for "
                "example with empty_like(parameter)"
            )
        before_write(target, carried=True)
        spec, local = target.spec, local_of(target)
        # Parameters of the distribution that are tensors are needed in full, since the whole tensor is drawn.
        rest = [_whole(a) for a in args[1:]]
        named = {n: _whole(v) for n, v in kwargs.items() if n != name}

        def make() -> torch.Tensor:
            whole = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=local.device)
            return func(whole, *rest, **named)

        part = draw(spec.layout, tuple(spec.shape), make, kwargs.get("generator"))
        # The functions of nn.init are not recorded by autograd, so that they may overwrite parameters.
        with torch.no_grad() if getattr(func, "__module__", None) == "torch.nn.init" else nullcontext():
            local.copy_(part)
        carry(root_of(target))
        return target


class _Drawn(torch.autograd.Function):
    """Random numbers as a result of their distribution's parameters; the gradient is 0, whatever the layouts."""

    @staticmethod
    def forward(ctx: Any, drawn: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [p.shape for p in parameters]  # and not the parameters, which may be written to afterwards
        return drawn.view_as(drawn)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *map(gradient.new_zeros, ctx.shapes)


def drawn_from(drawn: Any, *parameters: Any) -> DTensor:
    """A DTensor of random numbers that require a gradient when a parameter of theirs does, as PyTorch's do."""
    tensors = [local_of(p) for p in parameters if isinstance(p, DTensor) and p.requires_grad]
    if not tensors or not torch.is_grad_enabled():
        return drawn
    return wrap(_Drawn.apply(local_of(drawn), *tensors), drawn.spec)


def _whole(value: Any) -> Any:
    return value.detach().full_tensor() if isinstance(value, DTensor) else value


class RandomLike(FunctionOp):
    """``rand_like``, ``randn_like``, ``randint_like``: laid out like the model, Replicate where that is pending."""

    summary = OpSummary(
        "every dim; each element as on one device",
        pending="becomes whole",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        model = args[0] if args else kwargs.pop("input")
        layout, shape = settled(model.layout), tuple(model.shape)
        requires_grad = kwargs.pop("requires_grad", False)
        kwargs["device"] = kwargs.get("device") or model.device
        made: list[torch.Tensor] = []

        def make() -> torch.Tensor:
            made.append(func(model.spec.meta, *args[1:], **kwargs))
            return made[0]

        local = draw(layout, shape, make, kwargs.get("generator"))
        spec = make_spec(layout, shape, made[0].stride(), local.dtype)
        return wrap(in_memory_order(local, spec.memory_order).requires_grad_(requires_grad), spec)


class Bernoulli(FunctionOp):
    """``bernoulli(input)``: each element's probability; with ``p`` only shape and dtype of the tensor are read."""

    summary = OpSummary(
        "every dim; each element as on one device",
        pending="reduced first",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        chances, *rest = args if args else [kwargs["input"]]
        options = {name: value for name, value in kwargs.items() if name != "input"}
        chances = _reduced(func, chances)
        spec = chances.spec
        shape = tuple(spec.shape)

        def make() -> torch.Tensor:
            return func(embedded(local_of(chances), spec.layout, shape, 0.5), *rest, **options)

        part = draw(spec.layout, shape, make, options.get("generator"))
        return drawn_from(wrap(part, make_spec(spec.layout, shape, contiguous_stride(shape), spec.dtype)), chances)


class DrawnFrom(FunctionOp):
    """``poisson`` and ``binomial``: how many numbers an element takes depends on its parameters, so every rank draws
    all of them from the whole parameters and keeps its own."""

    summary = OpSummary(
        "every dim; each element as on one device",
        communicates="1 all-gather of each parameter",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        model = next(a for a in (*args, *kwargs.values()) if isinstance(a, DTensor))
        layout, shape = settled(model.layout), tuple(model.shape)
        given, named = [_whole(a) for a in args], {name: _whole(a) for name, a in kwargs.items()}
        part = draw(layout, shape, lambda: func(*given, **named), kwargs.get("generator"))
        result = wrap(part, make_spec(layout, shape, contiguous_stride(shape), part.dtype))
        return drawn_from(result, *args, *kwargs.values())


class Multinomial(FunctionOp):
    """``multinomial(input, num_samples)``: rows may be sharded, categories are redistributed as the policy allows."""

    summary = OpSummary(
        "rows",
        pending="reduced first",
        whole="the categories: a draw depends on all of them",
    )

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        weights, *rest = args if args else [kwargs["input"]]
        options = {name: value for name, value in kwargs.items() if name != "input"}
        weights = _reduced(func, weights)
        axes = weights.layout.shard_order[weights.ndim - 1]
        if axes:
            layout = weights.layout.with_placements(dict.fromkeys(axes, Replicate()))
            if state.mode.policy != "auto":
                raise RedistributionError(
                    f"multinomial: the categories of {weights.layout} are sharded\n"
                    f"  fix: redistribute to {layout} first, or use redistribute_policy('auto')",
                    op_name="multinomial",
                    layouts=[weights.layout],
                )
            weights = weights.redistribute(layout)
        spec = weights.spec
        layout = spec.layout
        made: list[torch.Tensor] = []

        def make() -> torch.Tensor:
            whole = embedded(local_of(weights), layout, tuple(spec.shape), 1.0, spec.stride)
            made.append(func(whole, *rest, **options))
            return local_part(made[0], layout, tuple(made[0].shape))

        check_generators(layout.info, options.get("generator"))
        with torch.no_grad():
            local = make()
        shape = tuple(made[0].shape)
        return wrap(local, make_spec(layout, shape, contiguous_stride(shape), local.dtype))


def _reduced(func: Callable[..., Any], tensor: DTensor) -> DTensor:
    """The tensor without pending reductions, which the default policy carries out."""
    if not tensor.layout.is_partial():
        return tensor
    if state.mode.policy == "strict":
        raise RedistributionError(
            f"{func.__name__}: the tensor is pending ({tensor.layout})\n  fix: call reduce_partial() first",
            op_name=func.__name__,
            layouts=[tensor.layout],
        )
    return tensor.reduce_partial()
