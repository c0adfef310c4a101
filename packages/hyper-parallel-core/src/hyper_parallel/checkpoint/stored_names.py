"""Under which names, and in what pieces, ``transformers`` stores the tensors of its models.

Some of its modules hold as one parameter what the files hold as many: the experts of a layer as one ``gate_up_proj``,
the files each expert's ``gate_proj.weight`` and ``up_proj.weight``. How its ``save_pretrained`` takes such a parameter
apart is found by doing it without memory: each tensor of the files is a view of a parameter.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["Piece", "pieces_of", "whole_piece"]


class Piece(NamedTuple):
    """A tensor of the files, as a part of one in the module's state dict.

    Attributes:
        name: in the files.
        source: name in the module's state dict.
        shape: of the piece.
        dims: for each dim of the piece the dim of the source that it runs along; None for a dim of size 1.
        box: start and stop along each dim of the source.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    box: tuple[tuple[int, int], ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The piece of a whole source, a view."""
        part = whole[tuple(slice(*bounds) for bounds in self.box)]
        run = [d for d in self.dims if d is not None]
        rest = [d for d in range(whole.ndim) if d not in run]
        return part.permute([*run, *rest]).reshape(self.shape)

    def read(self, stored: Any, offsets: tuple[int, ...], sizes: tuple[int, ...], target: torch.Tensor) -> None:
        """Copy from the file what the piece has of a block of the source.

        Args:
            stored: a safetensors slice of this piece.
            offsets, sizes: the block, in the source.
            target: where it goes; of shape ``sizes``.
        """
        common = [(max(a, at), min(b, at + n)) for (a, b), at, n in zip(self.box, offsets, sizes, strict=True)]
        if any(a >= b for a, b in common):
            return
        inside = tuple(
            slice(0, 1) if d is None else slice(common[d][0] - self.box[d][0], common[d][1] - self.box[d][0])
            for d in self.dims
        )
        data = stored[inside or ...]
        kept = [i for i, d in enumerate(self.dims) if d is not None]
        order = sorted(kept, key=lambda i: self.dims[i])  # type: ignore[arg-type, return-value]
        data = data.permute([*order, *(i for i in range(data.ndim) if i not in kept)])
        place = tuple(slice(a - at, b - at) for (a, b), at in zip(common, offsets, strict=True))
        target[place].copy_(data.reshape(target[place].shape))


def pieces_of(model: nn.Module, state: Mapping[str, torch.Tensor]) -> list[Piece]:
    """Every tensor of the files of a module, in their order. What no rule of ``transformers`` takes apart, or one that
    computes more than views of one tensor, is stored whole under the module's name."""
    wholes = {name: whole_piece(name, tensor) for name, tensor in state.items()}
    revert = _revert_of(model)
    if revert is None:
        return list(wholes.values())
    without_memory = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in state.items()}
    with _NoCopies():
        stored = revert(model, dict(without_memory))
    by_storage = {t.untyped_storage()._cdata: name for name, t in without_memory.items()}
    found = list(_views(stored, without_memory, by_storage))
    held = dict.fromkeys(state, 0)
    for piece in found:
        held[piece.source] += math.prod(piece.shape)
    whole = {name for name, count in held.items() if count != state[name].numel()}
    return [p for p in found if p.source not in whole] + [wholes[name] for name in state if name in whole]


def _views(
    stored: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor], by_storage: Mapping[int, str]
) -> Iterator[Piece]:
    for name, view in stored.items():
        source = by_storage.get(view.untyped_storage()._cdata)
        if source is not None:
            piece = _piece(name, source, view, sources[source])
            if piece is not None:
                yield piece


def _piece(name: str, source: str, view: torch.Tensor, whole: torch.Tensor) -> Piece | None:
    """A view as a box of its source; None when it is none (reshaped, or with a step)."""
    by_stride = {whole.stride(d): d for d in range(whole.ndim) if whole.shape[d] > 1}
    dims = tuple(by_stride.get(s) if n > 1 else None for s, n in zip(view.stride(), view.shape, strict=True))
    lengths = {d: n for d, n in zip(dims, view.shape, strict=True) if d is not None}
    if any(d is None and n > 1 for d, n in zip(dims, view.shape, strict=True)):
        return None
    box, left = [], int(view.storage_offset())
    for d in range(whole.ndim):
        start, left = divmod(left, whole.stride(d)) if whole.shape[d] > 1 else (0, left)
        box.append((start, start + lengths.get(d, 1)))
    if any(stop > size for (_, stop), size in zip(box, whole.shape, strict=True)):
        return None
    return Piece(name, source, tuple(view.shape), dims, tuple(box))


def whole_piece(name: str, tensor: torch.Tensor) -> Piece:
    """A tensor that is stored as it is."""
    shape = tuple(tensor.shape)
    return Piece(name, name, shape, tuple(range(len(shape))), tuple((0, n) for n in shape))


def _revert_of(model: nn.Module) -> Any:
    """What ``save_pretrained`` does to the state dict of this model; None for a module that is not its."""
    transformers: Any = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return None
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5, names were the module's
        return None
    return revert_weight_conversion


class _NoCopies(TorchFunctionMode):
    """Leaves views the views that they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))
