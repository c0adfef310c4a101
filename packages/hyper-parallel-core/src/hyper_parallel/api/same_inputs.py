"""The ranks that share a model call it with the same batch: checked by itself at first, or before every forward."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hyper_parallel.api.replace_forward import NOT_COMPILED, forward_function, set_forward
from hyper_parallel.context import in_backward
from hyper_parallel.sharding.mesh import DeviceMesh, MeshInfo, mesh_info
from hyper_parallel.tensor.dtensor import DTensor
from hyper_parallel.tensor.from_local_checks import check_same
from hyper_parallel.tensor.untraced import untraced
from hyper_parallel.torch_compat import pytree
from hyper_parallel.utils.structures import tensors_of

__all__ = ["check_first_inputs", "check_same_tensors", "require_same_inputs"]


def require_same_inputs(module: nn.Module, device_mesh: DeviceMesh) -> RemovableHandle:
    """Compare the plain tensors that a module is called with over the ranks of a mesh, before every forward.

    For finding a mistake: ranks of one tensor parallel group that get different batches compute on a mixture of them,
    and nothing else tells. Each forward costs an all-reduce of 16 bytes and one pass over the inputs. DTensors are
    passed over: ``from_local(run_check=True)`` compares those.

    Args:
        module: the model, before or after it is parallelised.
        device_mesh: the ranks that share it, such as ``mesh["tp"]``.

    Returns:
        A handle; its ``remove()`` ends the check.

    Raises:
        ValueError: from the module's forward, on every rank, when shapes, dtypes or values differ.
    """
    info = mesh_info(device_mesh)
    return module.register_forward_pre_hook(
        lambda module, args, kwargs: _compare(module, args, kwargs, info), with_kwargs=True, prepend=True
    )


def check_first_inputs(module: nn.Module, device_mesh: DeviceMesh) -> None:
    """Compare what a module is called with over the ranks of a mesh, in its first forward and in the first one after
    each change between training and evaluation, or of the gradient mode.

    Compared are plain tensors of whole numbers and bools (token ids, labels, masks, positions): of others nothing says
    that they are not this rank's shards. One all-reduce of 16 bytes each time, which no CommTrace counts. It is part of
    the module's forward and no hook, so that torch.compile leaves it out with the rest of what it cannot trace.

    Args:
        module: the model, parallelised.
        device_mesh: the ranks that share it.

    Raises:
        ValueError: from the module's forward, on every rank, when they differ.
    """
    info, function = mesh_info(device_mesh), forward_function(module)
    last: list[Any] = [None]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mode = self.training, torch.is_grad_enabled()
        if mode != last[0] and not in_backward():
            last[0] = mode
            _compare(self, args, kwargs, info, only_whole_numbers=True)
        return function(self, *args, **kwargs)

    set_forward(module, untraced(functools.update_wrapper(forward, function), NOT_COMPILED))


def _is_whole_number(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _compare(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    info: MeshInfo,
    only_whole_numbers: bool = False,
) -> None:
    values = {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
    try:
        check_same_tensors(info, f"the batch of {type(module).__name__}", values, only_whole_numbers=only_whole_numbers)
    except ValueError as error:
        off = (
            "; parallelize_module(..., check_inputs=False) where they are meant to differ" if only_whole_numbers else ""
        )
        raise ValueError(
            f"{error}\n  fix: give the ranks of mesh {info!r} the same batch; a sampler deals batches out over the "
            f"data axes only{off}"
        ) from None


def check_same_tensors(
    info: MeshInfo, what: str, values: Mapping[str, Any], *, only_whole_numbers: bool = False
) -> None:
    """Compare plain tensors over the ranks of a mesh. One all-reduce of 16 bytes.

    Args:
        info: the mesh.
        what: what the tensors are, for the error.
        values: tensors, also inside of other structures, by name.
        only_whole_numbers: pass over tensors of other dtypes, and let no CommTrace count the all-reduce.

    Raises:
        ValueError: on every rank, when shapes, dtypes or values differ.
    """
    named, _ = pytree.tree_flatten_with_path(dict(values))
    facts = [
        f"{_name(path)} {str(value.dtype).removeprefix('torch.')}{list(value.shape)} with checksum {_checksum(value)}"
        for path, leaf in named
        for value in tensors_of(leaf)  # several in a dataclass
        if not isinstance(value, DTensor) and (_is_whole_number(value) or not only_whole_numbers)
    ]
    check_same(info, what, ", ".join(facts) or "no plain tensor", traced=not only_whole_numbers)


def _name(path: tuple[Any, ...]) -> str:
    return str(path[0].key) + pytree.keystr(path[1:])


def _checksum(tensor: torch.Tensor) -> int:
    """A number that depends on every byte and its place; found where the tensor lies."""
    if tensor.is_meta:
        return 0
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    places = torch.arange(1, data.numel() + 1, device=data.device) % 65521
    return int((data * places).sum())
