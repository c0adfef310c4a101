"""LatentAttentionParallel: attention whose queries, keys and values come out of small latents, split by heads.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) projects a position down to latents that all
heads share, and up from them for each head. The latents are much smaller than what they are made of, so they are what
ranks exchange: each computes those of its part of the sequence, one collective brings all together, and what follows is
a matter of heads, on plain local tensors.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from hyper_parallel import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard
from hyper_parallel.rules import (
    Boundary,
    fit_rank,
    forward_function,
    is_replicate,
    is_shard,
    map_structure,
    mesh_info,
    remembered,
    set_forward,
    taken_as,
)
from hyper_parallel_tp.styles.call_changes import parameter_names
from hyper_parallel_tp.styles.colwise_rowwise import base_layer
from hyper_parallel_tp.styles.gather_together import gather_together
from hyper_parallel_tp.styles.local_compute import LocalCompute
from hyper_parallel_tp.styles.plain_parameters import note_no_terms
from hyper_parallel_tp.styles.style import ParallelStyle, checked_placement

__all__ = ["LatentAttentionParallel"]


class LatentAttentionParallel(ParallelStyle):
    """Split the heads of an attention block that works on latents, whose code is written for one device.

    With ``input_layouts=Shard(1)`` every rank projects its part of the sequence to latents, and these are gathered: one
    all-gather, and one reduce-scatter of their gradient. With a whole input all ranks compute the same latents, and the
    gradient of all latents is one all-reduce. What follows runs on plain tensors, with this rank's heads; the output
    projection's result is a term of a sum.

    Args:
        latents: names of the projections of the block's first input, one position at a time, each with the name of the
            norm that follows, or None. A norm of fewer features than the projection has is for the first ones; the
            others go around it (the part of a key with its position, which all heads share). Empty where there are
            none: then the input itself is gathered.
        heads: names of the projections out of latents, or between heads of one group, that are split by heads.
        output: name of the output projection.
        num_heads: number of heads; by default the block's attribute of that name.
        per_head: names of parameters of the block with one entry per head (attention sinks).
        divided: names of whole numbers that count heads or groups of them, ``"num_groups"`` of the block or
            ``"config.o_groups"`` of what it holds, of which each rank has its part while the block runs.
        without_gradient: as ``latents``, for projections that no gradient comes back to, as they only say which
            positions are looked at (those of an indexer, which has no gradient at all).
        input_layouts: what the block's first input is; default Replicate, ``Shard(1)`` for sequence parallel.
        output_layouts: what the output becomes; default Replicate, ``Shard(1)`` for sequence parallel.
    """

    def __init__(
        self,
        *,
        latents: Mapping[str, str | None],
        heads: Sequence[str],
        output: str = "o_proj",
        num_heads: int | None = None,
        per_head: Sequence[str] = (),
        divided: Sequence[str] = (),
        without_gradient: Mapping[str, str | None] | None = None,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
    ) -> None:
        self.latents, self.without_gradient = dict(latents), dict(without_gradient or {})
        self.heads, self.output, self.num_heads = tuple(heads), output, num_heads
        self.per_head, self.divided = tuple(per_head), tuple(divided)
        self.input_layouts = checked_placement("input_layouts", input_layouts) or Replicate()
        self.output_layouts = checked_placement("output_layouts", output_layouts) or Replicate()

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See :class:`ParallelStyle`.

        Raises:
            ValueError: the block has no such projections; the ranks do not divide the heads, or a count of them.
        """
        self._check(module, device_mesh.size())
        first, ranks = parameter_names(module)[0][0], device_mesh.size()
        self._run_on_given_latents(module, ranks)
        run = LocalCompute(parameters=self._placements(module), output_layouts=self.output_layouts)
        run.src_data_rank = self.src_data_rank
        run.apply(module, device_mesh)
        self._note_no_terms(module)
        self._compute_latents(module, device_mesh, first)
        return module

    def _placements(self, module: nn.Module) -> dict[str, Placement]:
        """Of the parameters that are not whole."""
        found: dict[str, Placement] = dict.fromkeys(self.per_head, Shard(0))
        for name in self.heads:
            layer = base_layer(module.get_submodule(name))
            found |= {f"{name}.{leaf}": Shard(0) for leaf, p in layer._parameters.items() if p is not None}
        found[f"{self.output}.weight"] = Shard(1)
        if base_layer(module.get_submodule(self.output))._parameters.get("bias") is not None:
            found[f"{self.output}.bias"] = Partial()
        return found

    def _note_no_terms(self, module: nn.Module) -> None:
        """What chooses has no gradient; where all ranks see the whole input, that of other projections is complete."""
        for name in self.without_gradient:
            note_no_terms(module.get_submodule(name.rpartition(".")[0] or name))
        if is_replicate(self.input_layouts):
            for name in (*self.latents, *filter(None, self.latents.values())):
                note_no_terms(module.get_submodule(name))

    def _check(self, module: nn.Module, ranks: int) -> None:
        kind = type(module).__name__
        named = {**self.latents, **self.without_gradient}
        wanted = [*named, *filter(None, named.values()), *self.heads, self.output]
        missing = [name for name in wanted if not isinstance(_found(module, name), nn.Module)]
        missing += [name for name in self.per_head if module._parameters.get(name) is None]
        if missing:
            raise ValueError(
                f"LatentAttentionParallel: {kind} has no {', '.join(missing)}; it has "
                f"{', '.join(name for name, _ in module.named_children())}"
            )
        counts = {name: _found(module, name) for name in self.divided}
        heads = self.num_heads or getattr(module, "num_heads", None)
        for name, count in {"num_heads": heads, **counts}.items():
            if not isinstance(count, int):
                raise ValueError(f"LatentAttentionParallel: {name} of {kind} is {count!r}, and should be a number")
            if count % ranks:
                raise ValueError(
                    f"LatentAttentionParallel: {ranks} ranks do not divide {name}={count} of {kind}; use a number of "
                    "ranks that does, or NoParallel() for this block"
                )

    def _run_on_given_latents(self, module: nn.Module, ranks: int) -> None:
        """Let the block take latents in the place of its input; what it returns beside its output goes to ``others``
        (attention weights, which are no terms of a sum)."""
        inner, divided = forward_function(module), self.divided
        norms = [norm for norm in self.latents.values() if norm] + [n for n in self.without_gradient.values() if n]

        @functools.wraps(inner)
        def forward(self: nn.Module, input: Any, *args: Any, given: Any, like: Any, others: Any, **kwargs: Any) -> Any:
            values: dict[str, torch.Tensor] = {}
            for buffer, names, widths in given:
                values.update(zip(names, buffer.split(list(widths), dim=-1), strict=True))
            with ExitStack() as stack:
                if values:
                    features, dtype = like
                    buffer = given[0][0]
                    input = buffer.new_empty((), dtype=dtype).expand(*buffer.shape[:-1], features)
                    stack.enter_context(_standing_in(self, values, norms))
                stack.enter_context(_divided(self, divided, ranks))
                output = inner(self, input, *args, **kwargs)
            if isinstance(output, tuple):
                others.extend(output[1:])
                return output[0]
            return output

        set_forward(module, forward)

    def _compute_latents(self, module: nn.Module, mesh: DeviceMesh, first: str) -> None:
        """Let the block take its input as it is, and hand latents on."""
        inner, axis = forward_function(module), mesh_info(mesh).names[0]
        enter = Boundary([self.input_layouts], mesh)
        wanted, forgotten = self.latents, self.without_gradient

        @functools.wraps(inner)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            args, hidden = (args[1:], args[0]) if args else (args, kwargs.pop(first))
            hidden, others = enter(hidden), list[Any]()
            given = _given_latents(self, hidden, wanted, forgotten, axis) if wanted else []
            rows = _rows(hidden, axis)
            if rows:
                args, kwargs = map_structure((args, kwargs), lambda value: _with_rows(value, hidden, rows))
            like = (hidden.shape[-1], hidden.dtype)
            first_input = None if wanted else hidden
            result = inner(self, first_input, *args, given=given, like=like, others=others, **kwargs)
            if not others:
                return result
            return (result, *(_by_heads(value, hidden, axis) for value in others))

        set_forward(module, forward)


class _Latents(NamedTuple):
    """Several latents side by side."""

    buffer: DTensor
    names: tuple[str, ...]
    widths: tuple[int, ...]


def _given_latents(
    module: nn.Module, hidden: DTensor, wanted: Mapping[str, Any], forgotten: Mapping[str, Any], axis: str
) -> list[_Latents]:
    """The latents of the positions that this rank has, then those of all."""
    side_by_side: dict[Any, _Latents] = {}
    for has_gradient, names in ((True, wanted), (False, forgotten)):
        kinds: dict[torch.dtype, dict[str, DTensor]] = {}
        with nullcontext() if has_gradient else torch.no_grad():
            for name, norm in names.items():
                latent = _latent(module, hidden, name, norm)
                kinds.setdefault(latent.dtype, {})[name] = latent
            for dtype, latents in kinds.items():
                buffer: Any = torch.cat(list(latents.values()), dim=-1)
                widths = tuple(latent.shape[-1] for latent in latents.values())
                side_by_side[dtype, has_gradient] = _Latents(buffer, tuple(latents), widths)
    for dtype in [dtype for dtype, has_gradient in side_by_side if has_gradient]:
        kept, free = side_by_side[dtype, True], side_by_side.get((dtype, False))
        first, second = gather_together(kept.buffer, None if free is None else free.buffer, axis)
        side_by_side[dtype, True] = _Latents(first, kept.names, kept.widths)
        if free is not None:
            side_by_side[dtype, False] = _Latents(second, free.names, free.widths)
    return list(side_by_side.values())


def _latent(module: nn.Module, hidden: Any, name: str, norm_name: str | None) -> Any:
    projection = module.get_submodule(name)
    weight: Any = base_layer(projection).weight
    if weight.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(weight.dtype)
    value = projection(hidden)
    if norm_name is None:
        return value
    norm = module.get_submodule(norm_name)
    features = next(norm.parameters()).numel()
    if features == value.shape[-1]:
        return norm(value)
    return torch.cat([norm(value[..., :features]), value[..., features:]], dim=-1)


class _KnownResult(nn.Module):
    """In the place of a projection whose result is known, or of a norm that is done."""

    def __init__(self, real: nn.Module, value: torch.Tensor | None) -> None:
        super().__init__()
        self.__dict__["real"], self.value = real, value

    def forward(self, input: Any) -> Any:
        return input if self.value is None else self.value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)


@contextmanager
def _standing_in(module: nn.Module, values: Mapping[str, torch.Tensor], done: Sequence[str]) -> Iterator[None]:
    """The block with these results in the place of what gives them."""
    real = {name: module.get_submodule(name) for name in (*values, *done)}
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in real}
    for name, owner in owners.items():
        owner.add_module(name.rpartition(".")[2], _KnownResult(real[name], values.get(name)))
    try:
        yield
    finally:
        for name, owner in owners.items():
            owner.add_module(name.rpartition(".")[2], real[name])


@contextmanager
def _divided(module: nn.Module, names: Sequence[str], ranks: int) -> Iterator[None]:
    """This rank's part of whole numbers. What the block shares with others, its configuration, is changed in a copy."""
    kept: list[tuple[Any, str, Any]] = []
    for name in names:
        parent, _, leaf = name.rpartition(".")
        owner = _found(module, parent) if parent else module
        if not isinstance(owner, nn.Module):
            kept.append((module, parent, owner))
            owner = copy.copy(owner)
            module.__dict__[parent] = owner
        else:
            kept.append((owner, leaf, getattr(owner, leaf)))
        setattr(owner, leaf, getattr(owner, leaf) // ranks)
    try:
        yield
    finally:
        for owner, leaf, value in reversed(kept):
            owner.__dict__[leaf] = value


def _rows(hidden: DTensor, axis: str) -> dict[int, Placement]:
    """The axes over which the rows of the batch are spread, in the mesh of a batch that is laid out."""
    axes = zip(hidden.layout.info.names, hidden.placements, strict=True)
    return {index: p for index, (name, p) in enumerate(axes) if name != axis and is_shard(p) and p.dim == 0}


def _with_rows(value: torch.Tensor, hidden: DTensor, rows: Mapping[int, Placement]) -> torch.Tensor:
    """What comes with the hidden states (masks, positions), with as many rows on each rank."""
    if not value.ndim or value.shape[0] != hidden.shape[0]:
        return value
    if not isinstance(value, DTensor):
        value = taken_as(value, hidden.layout.replicated(value.ndim))
    if value.layout.info is not hidden.layout.info:
        return value
    return remembered(value, value.layout.with_placements(rows))


def _by_heads(value: Any, hidden: DTensor, axis: str) -> Any:
    """What is split by heads along dim 1, as attention weights are."""
    if not isinstance(value, torch.Tensor):
        return value
    layout = fit_rank(hidden.layout.replace(axis, Shard(1)), value.ndim)
    ranks = hidden.layout.mesh_shape[hidden.layout.info.axis(axis)]
    shape = (hidden.shape[0], value.shape[1] * ranks, *value.shape[2:])
    return DTensor.from_local(value, layout, shape=shape)


def _found(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module
