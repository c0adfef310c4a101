"""ColwiseParallel and RowwiseParallel: linear layers and embeddings split by output or by input features."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel import DeviceMesh, DTensor, PackedShard, Partial, Placement, Replicate, Shard
from hyper_parallel.rules import (
    NOT_VARYING,
    Boundary,
    Redistribution,
    Spec,
    as_layout,
    contiguous_stride,
    is_partial,
    is_replicate,
    local_shape,
    make_spec,
    mesh_info,
    move_of,
    moved,
    set_forward,
    varying_axes,
    wrap,
)
from hyper_parallel_tp.overlap.overlapped_linear import all_gather_linear, linear_reduce_scatter
from hyper_parallel_tp.styles.call_changes import Change, change_inputs, change_outputs
from hyper_parallel_tp.styles.local_layers import compute_on_pieces, function_of_pieces
from hyper_parallel_tp.styles.local_outputs import GradPlacements, check_first_gradient, check_pieces, local_piece
from hyper_parallel_tp.styles.style import ParallelStyle, checked_placement

__all__ = ["ColwiseParallel", "RowwiseParallel"]


def _instead_of(module: nn.Module) -> str:
    """What to name in a plan in the place of a module that is no linear layer."""
    if not hasattr(module, "modules_to_save"):
        return "name its linear layers in the plan"
    return (
        "peft's modules_to_save puts it around a layer and its copy. Put the layer into target_modules instead; or "
        "name both in a plan of your own, as 'lm_head.original_module' and 'lm_head.modules_to_save.default'"
    )


class _ProjectionStyle(ParallelStyle):
    """What both styles share: an input layout, split parameters, an output layout."""

    input_layouts: Placement
    output_layouts: Placement
    use_local_output: bool
    overlap_pieces: int | None
    local_output_grad_placements: GradPlacements

    def _overlapped(self, input: DTensor, layer: nn.Linear) -> DTensor:
        """The layer's output, communication included, in pieces."""
        raise NotImplementedError

    def _input_placement(self, layer: nn.Module) -> Placement:
        raise NotImplementedError

    def _placements(self, layer: nn.Module) -> Mapping[str, Placement]:
        """Of the parameters of a Linear or Embedding."""
        raise NotImplementedError

    def _computed(self) -> Placement:
        """What the product of a Linear's pieces is."""
        raise NotImplementedError

    def _adapter_placements(self, name: str) -> Placement:
        """Of the weight of a LoRA adapter's A (into the low rank) or B (out of it)."""
        raise NotImplementedError

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See :class:`ParallelStyle`.

        Raises:
            TypeError: the module is no Linear, no Embedding, and no LoRA layer around one; or its weight is packed
                (quantised), or computed from other parameters (weight_norm).
        """
        layer = base_layer(module)
        if not isinstance(layer, (nn.Linear, nn.Embedding)):
            raise TypeError(
                f"{type(self).__name__} splits nn.Linear and nn.Embedding (also inside a LoRA layer), got "
                f"{type(module).__name__}; {_instead_of(module)}"
            )
        if self.overlap_pieces is not None and (layer is not module or not isinstance(layer, nn.Linear)):
            raise TypeError(
                f"{type(self).__name__}(overlap_pieces=...) is for nn.Linear by itself, got {type(module).__name__}"
            )
        _check_weight(type(self).__name__, layer)
        self.place(layer, device_mesh, self._placements(layer))
        if layer is not module:
            self._place_adapters(module, device_mesh)
        compute = function_of_pieces(module) if self.overlap_pieces is None else None
        if self.overlap_pieces is not None:
            style = self
            set_forward(module, lambda layer, input: style._overlapped(input, layer))
        enter = Boundary(
            [self._input_placement(layer)],
            device_mesh,
            layer,
            given=[self.input_layouts],
            features=layer.in_features if isinstance(layer, nn.Linear) else None,
            in_flight=True,
        )
        leave = Boundary([self.output_layouts], device_mesh, in_flight=not self.use_local_output)

        def hand_out(module: nn.Module, value: Any) -> Any:
            value = leave(value)
            if not self.use_local_output:
                return value
            return local_piece(value, module, device_mesh, self.local_output_grad_placements)

        def take(module: nn.Module, value: Any) -> Any:
            self._check_features(layer, value, device_mesh)
            return enter(value)

        change_inputs(module, [take])
        change_outputs(module, [hand_out])
        if compute is not None and isinstance(module, nn.Linear):
            uses = self._uses(module, device_mesh)
            leave_piece = self._leaving(module, device_mesh, hand_out)
            compute_on_pieces(module, compute, device_mesh, enter, leave_piece, uses)
        return module

    def _check_features(self, layer: nn.Module, value: Any, mesh: DeviceMesh) -> None:
        """Raise ValueError where a plain input is whole and the style says that it is this rank's piece, or a DTensor
        was made of a piece as if it were the whole."""
        if not isinstance(layer, nn.Linear) or not isinstance(value, torch.Tensor) or not value.ndim:
            return
        if isinstance(value, DTensor):
            if value.shape[-1] != layer.in_features:
                raise ValueError(
                    f"{type(self).__name__}: {type(layer).__name__} takes {layer.in_features} features, got a DTensor "
                    f"with {value.shape[-1]}. Where it was computed from this rank's plain piece and a DTensor, the "
                    "piece counted as the whole: use_local_output=False of the style that made it keeps it a DTensor"
                )
            return
        if is_replicate(self.input_layouts) or value.shape[-1] != layer.in_features:
            return
        given = as_layout(mesh, [self.input_layouts], value.ndim)
        if local_shape(given, tuple(value.shape), given.info.my_coordinate())[-1] != layer.in_features:
            raise ValueError(
                f"{type(self).__name__}: {type(layer).__name__} got a plain input with all {layer.in_features} "
                f"features, and input_layouts={self.input_layouts!r} says that it is this rank's piece of them; say "
                f"{type(self).__name__}(input_layouts=Replicate()) for a whole input"
            )

    def _uses(self, layer: nn.Linear, mesh: DeviceMesh) -> dict[str, Any]:
        """A bias is added once: where the product is a term of a sum, so is the bias."""
        computed = self._computed()
        added = is_partial(computed) and layer.bias is not None
        return {"bias": (as_layout(mesh, [computed], 1), NOT_VARYING)} if added else {}

    def _leaving(self, layer: nn.Linear, mesh: DeviceMesh, hand_out: Change) -> Callable[..., Any]:
        """From the product of the pieces of a Linear to what the style returns."""
        computed, wanted, grads = self._computed(), self.output_layouts, self.local_output_grad_placements
        info, may_meet_shards = mesh_info(mesh), grads is None and is_replicate(wanted)
        if self.use_local_output and wanted == computed:
            return lambda layer, out, _: out

        @functools.lru_cache(maxsize=256)
        def way(shape: torch.Size, dtype: torch.dtype) -> tuple[Spec, Redistribution]:
            whole = (*shape[:-1], layer.out_features)
            before, after = (as_layout(mesh, [placement], len(whole)) for placement in (computed, wanted))
            if self.use_local_output:
                check_pieces(after, whole, layer)
            spec = make_spec(before, whole, contiguous_stride(whole), dtype)
            varying = NOT_VARYING if grads is None else varying_axes(after, grads)
            return spec, move_of((before, NOT_VARYING), (after, varying), whole)

        def leave(layer: nn.Linear, out: torch.Tensor, _: Any) -> Any:
            spec, move = way(out.shape, out.dtype)
            if not self.use_local_output:
                return hand_out(layer, wrap(out, spec))
            local = moved(out, move)
            if may_meet_shards:
                check_first_gradient(local, layer, info)
            return local

        return leave

    def _place_adapters(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """LoRA adapters beside the layer: the factor at the split side is split like the layer's weight."""
        for group in ("lora_A", "lora_B"):
            for adapter in getattr(module, group).values():
                self.place(adapter, device_mesh, {"weight": self._adapter_placements(group)})
        for group in ("lora_embedding_A", "lora_embedding_B"):
            parameters = getattr(module, group, None)
            if isinstance(parameters, nn.ParameterDict):
                self.place(parameters, device_mesh, dict.fromkeys(parameters, self._adapter_placements(group)))
        self.replicate(module, device_mesh)


def base_layer(module: nn.Module) -> nn.Module:
    """The layer itself, or the one that a LoRA layer (of peft) is around."""
    inner = getattr(module, "base_layer", None)
    return inner if isinstance(inner, nn.Module) and hasattr(module, "lora_A") else module


def _check_weight(style: str, layer: nn.Linear | nn.Embedding) -> None:
    """Raise TypeError unless the layer's weight is a matrix, and a parameter."""
    width = layer.in_features if isinstance(layer, nn.Linear) else layer.embedding_dim
    weight = layer._parameters.get("weight")
    if weight is None or weight.ndim != 2 or weight.shape[1] != width:
        found = "no such parameter" if weight is None else f"one of shape {tuple(weight.shape)}"
        raise TypeError(
            f"{style} splits a parameter 'weight' of shape (..., {width}), and {type(layer).__name__} has {found}. A "
            "layer that is quantised or parametrised (weight_norm) can be held whole: NoParallel()"
        )


class ColwiseParallel(_ProjectionStyle):
    """Split a Linear by output features, or an Embedding by its features.

    Linear: weight ``[out, in]`` and bias ``[out]`` are ``Shard(0)``; Embedding: weight ``[vocabulary, features]`` is
    ``Shard(1)``. The first input is made Replicate, the output is ``Shard(-1)`` unless told otherwise. Uneven features
    are split as ``torch.chunk`` does. (PyTorch: ``torch.distributed.tensor.parallel.ColwiseParallel``.)

    Args:
        input_layouts: what a plain input is; default Replicate.
        output_layouts: what the output becomes; default ``Shard(-1)``.
        use_local_output: return this rank's piece as a plain tensor.
        sections: of a packed projection (fused QKV, gate and up), the number of features of each part: every part is
            split by itself, so that the model's own ``split`` or ``chunk`` of the output works on the pieces.
        overlap_pieces: of a Linear whose input is a sequence shard (``input_layouts=Shard(1)``): gather it in that many
            pieces, each multiplied while the next ones travel (:func:`all_gather_linear`). Layers that share an input,
            and all say this, gather it once.
        local_output_grad_placements: of the gradient of a plain output, one per mesh axis, as ``grad_placements`` of
            :meth:`DTensor.to_local`. Say ``[Partial()]`` where an output that is equal on all ranks is used together
            with plain shards, so that each rank has one term of its gradient; by default an error, in the first
            backward, says so.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        sections: Sequence[int] | None = None,
        overlap_pieces: int | None = None,
        local_output_grad_placements: GradPlacements = None,
    ) -> None:
        self.local_output_grad_placements = local_output_grad_placements
        self.input_layouts = checked_placement("input_layouts", input_layouts) or Replicate()
        self.sections = None if sections is None else tuple(sections)
        split_features = Shard(-1) if self.sections is None else PackedShard(-1, self.sections)
        self.output_layouts = checked_placement("output_layouts", output_layouts) or split_features
        self.use_local_output = use_local_output
        self.overlap_pieces = _checked(overlap_pieces, "input_layouts", self.input_layouts)

    def _overlapped(self, input: DTensor, layer: nn.Linear) -> DTensor:
        return all_gather_linear(input, layer.weight, layer.bias, pieces=self.overlap_pieces)  # type: ignore[arg-type]

    def _input_placement(self, layer: nn.Module) -> Placement:
        return Replicate() if self.overlap_pieces is None else self.input_layouts

    def _placements(self, layer: nn.Module) -> Mapping[str, Placement]:
        if isinstance(layer, nn.Embedding):
            return {"weight": _split(1, self.sections)}
        return {"weight": _split(0, self.sections), "bias": _split(0, self.sections)}

    def _computed(self) -> Placement:
        return _split(-1, self.sections)

    def _adapter_placements(self, name: str) -> Placement:
        return _split(0, self.sections) if name.endswith("_B") else Replicate()


class RowwiseParallel(_ProjectionStyle):
    """Split a Linear by input features, or an Embedding by its vocabulary.

    Linear: weight ``[out, in]`` is ``Shard(1)``, the bias Replicate, the input becomes ``Shard(-1)``; Embedding: weight
    ``[vocabulary, features]`` is ``Shard(0)``, the input becomes Replicate. The output is a pending sum, which becomes
    Replicate (an all-reduce) unless told otherwise; ``Shard(1)`` costs a reduce-scatter. (PyTorch:
    ``torch.distributed.tensor.parallel.RowwiseParallel``.)

    Args:
        input_layouts: what a plain input is; default ``Shard(-1)``. Say Replicate for the token ids of an Embedding.
        output_layouts: what the output becomes; default Replicate.
        use_local_output: return this rank's piece as a plain tensor.
        sections: where the input is the output of a packed projection: the number of features of each part.
        overlap_pieces: of a Linear whose output is a sequence shard (``output_layouts=Shard(1)``): scatter the sum in
            that many pieces, each on its way while the next is multiplied (:func:`linear_reduce_scatter`).
        local_output_grad_placements: of the gradient of a plain output, one per mesh axis, as ``grad_placements`` of
            :meth:`DTensor.to_local`. Say ``[Partial()]`` where an output that is equal on all ranks is used together
            with plain shards, so that each rank has one term of its gradient; by default an error, in the first
            backward, says so.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        sections: Sequence[int] | None = None,
        overlap_pieces: int | None = None,
        local_output_grad_placements: GradPlacements = None,
    ) -> None:
        self.local_output_grad_placements = local_output_grad_placements
        self.sections = None if sections is None else tuple(sections)
        self.input_layouts = checked_placement("input_layouts", input_layouts) or _split(-1, self.sections)
        self.output_layouts = checked_placement("output_layouts", output_layouts) or Replicate()
        self.use_local_output = use_local_output
        self.overlap_pieces = _checked(overlap_pieces, "output_layouts", self.output_layouts)

    def _overlapped(self, input: DTensor, layer: nn.Linear) -> DTensor:
        out = self.output_layouts.dim  # type: ignore[attr-defined]
        return linear_reduce_scatter(input, layer.weight, layer.bias, dim=out, pieces=self.overlap_pieces)  # type: ignore[arg-type]

    def _input_placement(self, layer: nn.Module) -> Placement:
        return Replicate() if isinstance(layer, nn.Embedding) else _split(-1, self.sections)

    def _placements(self, layer: nn.Module) -> Mapping[str, Placement]:
        if isinstance(layer, nn.Embedding):
            return {"weight": _split(0, self.sections)}
        return {"weight": _split(1, self.sections), "bias": Replicate()}

    def _computed(self) -> Placement:
        return Partial()

    def _adapter_placements(self, name: str) -> Placement:
        return _split(1, self.sections) if name.endswith("_A") else Replicate()


def _split(dim: int, sections: tuple[int, ...] | None) -> Placement:
    return Shard(dim) if sections is None else PackedShard(dim, sections)


def _checked(pieces: int | None, name: str, layout: Placement) -> int | None:
    """A number of pieces, where there is something to cut."""
    if pieces is None:
        return None
    if type(layout) is not Shard or layout.dim == -1:
        raise ValueError(
            f"overlap_pieces cuts the sequence: it needs {name}=Shard(dim of the sequence), got {layout!r}"
        )
    if pieces < 1:
        raise ValueError(f"overlap_pieces is a number of pieces, 1 or more; got {pieces}")
    return pieces
