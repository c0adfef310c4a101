"""ColwiseParallel and RowwiseParallel: linear layers and embeddings split by output or by input features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel import DeviceMesh, PackedShard, Placement, Replicate, Shard
from hyper_parallel.boundary import Boundary
from hyper_parallel.distribute import replicate_rest
from hyper_parallel_tp.call_hooks import change_inputs, change_outputs
from hyper_parallel_tp.local_outputs import local_piece
from hyper_parallel_tp.style import ParallelStyle

__all__ = ["ColwiseParallel", "RowwiseParallel"]


class _ProjectionStyle(ParallelStyle):
    """What both styles share: an input layout, split parameters, an output layout."""

    input_layouts: Placement
    output_layouts: Placement
    use_local_output: bool

    def _input_placement(self, layer: nn.Module) -> Placement:
        raise NotImplementedError

    def _placements(self, layer: nn.Module) -> Mapping[str, Placement]:
        """Of the parameters of a Linear or Embedding."""
        raise NotImplementedError

    def _adapter_placements(self, name: str) -> Placement:
        """Of the weight of a LoRA adapter's A (into the low rank) or B (out of it)."""
        raise NotImplementedError

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See :class:`ParallelStyle`.

        Raises:
            TypeError: the module is no Linear, no Embedding, and no LoRA layer around one.
        """
        layer = base_layer(module)
        if not isinstance(layer, (nn.Linear, nn.Embedding)):
            raise TypeError(
                f"{type(self).__name__} splits nn.Linear and nn.Embedding (also inside a LoRA layer), got "
                f"{type(module).__name__}; name its linear layers in the plan"
            )
        self.place(layer, device_mesh, self._placements(layer))
        if layer is not module:
            self._place_adapters(module, device_mesh)
        enter = Boundary([self._input_placement(layer)], device_mesh, layer, given=[self.input_layouts], in_flight=True)
        leave = Boundary([self.output_layouts], device_mesh, in_flight=True)
        features = layer.in_features if isinstance(layer, nn.Linear) else None

        def change_input(module: nn.Module, value: Any) -> Any:
            return enter(value, _global_shape(value, self.input_layouts, features))

        def change_output(module: nn.Module, value: Any) -> Any:
            value = leave(value)
            return local_piece(value, module) if self.use_local_output else value

        change_inputs(module, [change_input])
        change_outputs(module, [change_output])
        return module

    def _place_adapters(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        """LoRA adapters beside the layer: the factor at the split side is split like the layer's weight."""
        for group in ("lora_A", "lora_B"):
            for adapter in getattr(module, group).values():
                self.place(adapter, device_mesh, {"weight": self._adapter_placements(group)})
        for group in ("lora_embedding_A", "lora_embedding_B"):
            parameters = getattr(module, group, None)
            if isinstance(parameters, nn.ParameterDict):
                self.place(parameters, device_mesh, dict.fromkeys(parameters, self._adapter_placements(group)))
        replicate_rest(module, device_mesh, src_data_rank=self.src_data_rank, buffers=False)


def base_layer(module: nn.Module) -> nn.Module:
    """The layer itself, or the one that a LoRA layer (of peft) is around."""
    inner = getattr(module, "base_layer", None)
    return inner if isinstance(inner, nn.Module) and hasattr(module, "lora_A") else module


def _global_shape(value: Any, given: Placement, features: int | None) -> tuple[int, ...] | None:
    """Global shape of a plain piece of which only the features are split, perhaps unevenly."""
    if features is None or not isinstance(value, torch.Tensor) or not isinstance(given, Shard):
        return None
    return (*value.shape[:-1], features) if given.dim in (-1, value.ndim - 1) else None


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
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        sections: Sequence[int] | None = None,
    ) -> None:
        self.input_layouts = input_layouts or Replicate()
        self.sections = None if sections is None else tuple(sections)
        split_features = Shard(-1) if self.sections is None else PackedShard(-1, self.sections)
        self.output_layouts = output_layouts or split_features
        self.use_local_output = use_local_output

    def _input_placement(self, layer: nn.Module) -> Placement:
        return Replicate()

    def _placements(self, layer: nn.Module) -> Mapping[str, Placement]:
        if isinstance(layer, nn.Embedding):
            return {"weight": _split(1, self.sections)}
        return {"weight": _split(0, self.sections), "bias": _split(0, self.sections)}

    def _adapter_placements(self, name: str) -> Placement:
        return _split(0, self.sections) if name.endswith("_B") else Replicate()


class RowwiseParallel(_ProjectionStyle):
    """Split a Linear by input features, or an Embedding by its vocabulary.

    Linear: weight ``[out, in]`` is ``Shard(1)``, the bias Replicate, the input ``Shard(-1)``; Embedding: weight
    ``[vocabulary, features]`` is ``Shard(0)``, the input Replicate. The output is a pending sum, which becomes
    Replicate (an all-reduce) unless told otherwise; ``Shard(1)`` costs a reduce-scatter. (PyTorch:
    ``torch.distributed.tensor.parallel.RowwiseParallel``.)

    Args:
        input_layouts: what a plain input is; default ``Shard(-1)``, Replicate for an Embedding.
        output_layouts: what the output becomes; default Replicate.
        use_local_output: return this rank's piece as a plain tensor.
        sections: where the input is the output of a packed projection: the number of features of each part.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        sections: Sequence[int] | None = None,
    ) -> None:
        self.sections = None if sections is None else tuple(sections)
        self.input_layouts = input_layouts or _split(-1, self.sections)
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _input_placement(self, layer: nn.Module) -> Placement:
        return Replicate() if isinstance(layer, nn.Embedding) else _split(-1, self.sections)

    def _placements(self, layer: nn.Module) -> Mapping[str, Placement]:
        if isinstance(layer, nn.Embedding):
            return {"weight": _split(0, self.sections)}
        return {"weight": _split(1, self.sections), "bias": Replicate()}

    def _adapter_placements(self, name: str) -> Placement:
        return _split(1, self.sections) if name.endswith("_A") else Replicate()


def _split(dim: int, sections: tuple[int, ...] | None) -> Placement:
    return Shard(dim) if sections is None else PackedShard(dim, sections)
