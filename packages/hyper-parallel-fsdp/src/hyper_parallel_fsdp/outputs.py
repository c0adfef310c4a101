"""What a module may return: not what is only there while its parameters are whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel.rules import gradient_paths
from hyper_parallel_fsdp.bucket import Bucket
from hyper_parallel_fsdp.left_behind import tensors_in
from hyper_parallel_fsdp.mixed_precision import map_values


def outlasting(module: nn.Module, output: Any, buckets: Sequence[Bucket]) -> Any:
    """The output, copied where it lies in the whole parameters: a module may return one, or a part of it.

    Raises:
        TypeError: it has an iterator, which goes on computing later, or a parameter in an object that is not known.
    """
    _check_no_iterator(module, output)

    def held(tensor: torch.Tensor) -> bool:
        local = gradient_paths(tensor)[0]
        return any(bucket.holds(local) for bucket in buckets)

    if not any(held(t) for t in tensors_in([output])):
        return output
    output = map_values(output, lambda t: t.clone() if held(t) else t)
    if any(held(t) for t in tensors_in([output])):
        raise TypeError(
            f"{type(module).__name__} returned its own parameter, or a view of it, inside of a "
            f"{type(output).__name__}, but fully_shard frees whole parameters after forward; return a clone() of "
            "it, or put it in a list, tuple, dict or dataclass"
        )
    return output


def _check_no_iterator(module: nn.Module, output: Any) -> None:
    """Raise when a module returned an iterator, which goes on computing when the parameters are sharded again."""
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    for value in (output, *parts):
        if isinstance(value, Iterator):
            raise TypeError(
                f"{type(module).__name__} returned a {type(value).__name__}, whose elements are computed after its "
                "forward, when fully_shard has freed its parameters; return a list or tuple"
            )
