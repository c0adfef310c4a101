"""Weights that files hold in few bits, with a scale for each block of them: given back as numbers, block by block.

Two formats: 8 bits (``float8``), or 4 bits two by two in a byte, with scales for blocks of a matrix
(``X.weight`` and ``X.weight_scale_inv``, as DeepSeek writes them); and MXFP4, 4 bits with a power of two for each 32
(``X_blocks`` and ``X_scales``, as OpenAI writes them).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from hyper_parallel.checkpoint.deferred.tensor import DeferredTensor, deferred, value_of
from hyper_parallel.checkpoint.deferred.values import Bounds, DeferredValue
from hyper_parallel.errors import CheckpointError

__all__ = ["block_size_of", "with_scales_applied"]

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_TWO_IN_A_BYTE = (torch.int8, torch.float4_e2m1fn_x2)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of 4 bits: a sign, two bits of exponent, one of mantissa."""


def with_scales_applied(
    stored: Mapping[str, DeferredTensor], block_size: Sequence[int] | None
) -> dict[str, DeferredTensor]:
    """The tensors of files, the scaled ones as what they stand for, in float32, without their scales.

    Args:
        stored: the tensors by name.
        block_size: rows and columns that share a scale; None: found from the shapes.

    Raises:
        CheckpointError: a weight and its scales do not fit.
    """
    found = dict(stored)
    for name, tensor in stored.items():
        scale = next((s for s in _scale_names(name) if s in stored), None)
        if scale is not None and _is_scaled(tensor.dtype, stored[scale].dtype):
            found[name] = deferred(_ScaledValue(name, value_of(tensor), value_of(stored[scale]), block_size))
            found.pop(scale)
            for other in ("activation_scale", "qscale_act"):  # of inputs, for kernels of 8 bits
                found.pop(name.removesuffix("weight") + other, None)
        elif name.endswith("_blocks") and tensor.dtype is torch.uint8:
            scale = name.removesuffix("blocks") + "scales"
            if scale in stored:
                found[name.removesuffix("_blocks")] = deferred(_MXFP4Value(value_of(tensor), value_of(stored[scale])))
                del found[name], found[scale]
    return found


def block_size_of(path: Path) -> list[int] | None:
    """What the ``config.json`` beside safetensors files says of how many rows and columns share a scale."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        size = config["quantization_config"]["weight_block_size"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return size if isinstance(size, list) and len(size) == 2 else None


def _scale_names(name: str) -> Iterator[str]:
    yield f"{name}_scale_inv"
    if name.endswith(".weight"):
        yield name.removesuffix("weight") + "scale"
        yield name.removesuffix("weight") + "qscale_weight"


def _is_scaled(numbers: torch.dtype, scales: torch.dtype) -> bool:
    """Whether numbers with such scales are of a format that is known here; bytes may be those of others."""
    return numbers in _FLOAT8 or (numbers in _TWO_IN_A_BYTE and scales in (torch.float8_e8m0fnu, torch.uint8))


class _ScaledValue(DeferredValue):
    """``[…, rows, columns]`` with a scale for each block of rows and columns."""

    def __init__(
        self, name: str, numbers: DeferredValue, scales: DeferredValue, block_size: Sequence[int] | None
    ) -> None:
        self._packed = numbers.dtype in _TWO_IN_A_BYTE
        shape = (*numbers.shape[:-1], numbers.shape[-1] * (2 if self._packed else 1))
        super().__init__(shape, torch.float32)
        self._numbers, self._scales = numbers, scales
        grid = scales.shape if len(scales.shape) >= 2 else (1, 1)
        self._blocks = [_block(n, s, b) for n, s, b in zip(shape[-2:], grid[-2:], block_size or (0, 0), strict=True)]
        if 0 in self._blocks or len(shape) < 2 or (len(grid) == len(shape) > 2 and grid[:-2] != shape[:-2]):
            raise CheckpointError(
                f"{name} of shape {shape} has scales of shape {scales.shape}, which are not one for each block of rows "
                f"and columns{'' if block_size is None else f' of {tuple(block_size)}'}"
            )

    def make(self, bounds: Bounds) -> torch.Tensor:
        numbers = self._unpacked(bounds) if self._packed else self._numbers.block(bounds).to(torch.float32)
        if len(self._scales.shape) < 2:
            return numbers * _as_factors(self._scales.whole())
        places = bounds[-2:]
        cover = tuple((a // n, -(-b // n)) for (a, b), n in zip(places, self._blocks, strict=True))
        scales = _as_factors(self._scales.block((*bounds[: len(self._scales.shape) - 2], *cover)))
        for dim, (a, b), n in zip((-2, -1), places, self._blocks, strict=True):
            scales = scales.index_select(dim, torch.arange(a, b) // n - a // n)
        return numbers * scales

    def _unpacked(self, bounds: Bounds) -> torch.Tensor:
        start, stop = bounds[-1]
        return _two_by_two(self._numbers.block((*bounds[:-1], (start // 2, -(-stop // 2)))))[
            ..., start % 2 : start % 2 + stop - start
        ]


class _MXFP4Value(DeferredValue):
    """``[experts, rows, groups, 16 bytes]`` with a power of two for each group of 32 numbers; as the module wants it,
    ``[experts, columns, rows]``."""

    def __init__(self, blocks: DeferredValue, scales: DeferredValue) -> None:
        experts, rows, groups, width = blocks.shape
        super().__init__((experts, groups * width * 2, rows), torch.float32)
        self._blocks, self._scales, self._width = blocks, scales, width * 2

    def make(self, bounds: Bounds) -> torch.Tensor:
        experts, (start, stop), rows = bounds
        groups = (start // self._width, -(-stop // self._width))
        numbers = _two_by_two(self._blocks.block((experts, rows, groups, (0, self._width // 2))))
        scales = torch.exp2(self._scales.block((experts, rows, groups)).to(torch.float32) - 127)
        at = start - groups[0] * self._width
        return (numbers * scales[..., None]).flatten(-2)[..., at : at + stop - start].transpose(-2, -1)


def _two_by_two(packed: torch.Tensor) -> torch.Tensor:
    """Numbers of 4 bits out of bytes, the low half first."""
    table = torch.tensor(_E2M1, dtype=torch.float32)
    numbers = packed.contiguous().view(torch.uint8).to(torch.int32)
    return table[torch.stack([numbers & 15, numbers >> 4], dim=-1)].flatten(-2)


def _as_factors(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float32; bytes are exponents of two."""
    if scales.dtype is torch.uint8:
        return torch.exp2(scales.to(torch.float32) - 127)
    return scales.to(torch.float32)


def _block(size: int, scales: int, stated: int) -> int:
    """How many rows share a scale: what is stated, or a power of two, or what divides them evenly; 0 when none fits."""
    powers = (1 << n for n in range(size.bit_length() + 1))
    even = size // scales if scales and size % scales == 0 else 0
    return next((n for n in (stated, *powers, even) if n and -(-size // n) == scales), 0)
