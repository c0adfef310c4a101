"""``loss_parallel``: the promise that a loss is computed where the scores are, each rank on its part of the vocabulary.

The rule itself is an op's (``cross_entropy`` and ``nll_loss`` of ``hyper-parallel-ops-basic``) and works without any
context. Inside the context a loss that would *not* be computed so is an error instead of a slow surprise, a plain
target is taken as every rank's, and the loss of low-precision scores comes back in float32.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hyper_parallel import DeviceMesh, DTensor, Replicate, all_gather, implicit_replication
from hyper_parallel.rules import LOW, chunk_bounds, mesh_info

__all__ = ["gather_tensor_parallel_logits", "is_loss_parallel_active", "loss_parallel"]

_LOSSES = (F.cross_entropy, F.nll_loss, F.linear_cross_entropy)


@contextlib.contextmanager
def loss_parallel(mesh: DeviceMesh | None = None, strict: bool = True) -> Iterator[None]:
    """Inside, ``F.cross_entropy``, ``F.nll_loss`` and ``F.linear_cross_entropy`` run on vocabulary shards.

        with loss_parallel():
            loss = F.cross_entropy(logits, labels)  # logits: Shard(1), on any mesh
        loss.backward()  # inside or outside

    The loss itself is that of the op's rule, with all reductions, ``ignore_index``, ``label_smoothing``, class weights
    and class probabilities, over any mesh. What the context adds:

    - ``strict``: scores whose classes are not sharded, or that are a plain tensor, are refused.
    - A plain target or class weight counts as the same on all ranks. Where the batch is sharded, a plain target could
      also be this rank's part, and is refused.
    - The loss of float16 or bfloat16 scores is float32, as under autocast. (It is accumulated in float32 anyway.)

    Contexts nest, the innermost holds, and an exception restores the outer one. The switch is this thread's.

    Args:
        mesh: the mesh whose axes may shard the vocabulary, usually ``mesh["tp"]``; by default any axis may. With a mesh
            of one rank there is nothing to share, and nothing is refused.
        strict: False only lets scores that are not vocabulary shards pass, to be computed as outside of the context.

    Raises:
        ValueError: from a loss inside, on every rank alike; the message says what the scores are and how to make them
            vocabulary shards.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"loss_parallel takes a DeviceMesh, such as mesh['tp'], got {type(mesh).__name__}")
    guard = _Guard(mesh, strict)
    outer = _state.innermost
    _state.innermost = guard
    try:
        with guard:
            yield
    finally:
        _state.innermost = outer


def is_loss_parallel_active() -> bool:
    """Whether this thread is inside :func:`loss_parallel`."""
    return _state.innermost is not None


def gather_tensor_parallel_logits(
    logits: torch.Tensor, mesh: DeviceMesh | None = None, *, vocab_size: int | None = None
) -> torch.Tensor:
    """Scores with the whole vocabulary (the last dim) on every rank: for sampling, or a metric that needs all of it.

    The opposite of :func:`loss_parallel`, over the same axes, and differentiable: a loss of the result has the value
    and the gradients of the parallel loss, for the price of one all-gather of all scores.

    Args:
        logits: ``(..., vocabulary)``. A DTensor, or this rank's plain part of the vocabulary, cut as ``torch.chunk``
            does (what a column-parallel head with ``use_local_output=True`` gives).
        mesh: the 1-D mesh that shards the vocabulary; needed for a plain tensor. By default all axes that do.
        vocab_size: length of the whole vocabulary, where a plain tensor's parts are to be checked against it.

    Returns:
        A DTensor whose other dims are sharded as before; for a plain tensor a plain one.

    Raises:
        ValueError: for a plain tensor without ``mesh``, or parts that are not those of ``torch.chunk``.
    """
    if isinstance(logits, DTensor):
        axes = _vocabulary_axes(logits, logits.ndim - 1, mesh)
        return logits.redistribute(logits.layout.with_placements(dict.fromkeys(axes, Replicate())))
    if mesh is None or mesh.ndim != 1:
        raise ValueError(
            "gather_tensor_parallel_logits of a plain tensor needs the 1-D mesh that shards its last dim, such as "
            f"mesh['tp'], got {mesh}"
        )
    sizes = all_gather(torch.tensor([logits.shape[-1]], device=logits.device), mesh).tolist()
    size = sum(sizes) if vocab_size is None else vocab_size
    expected = [stop - start for start, stop in (chunk_bounds(size, len(sizes), rank) for rank in range(len(sizes)))]
    if sizes != expected:
        raise ValueError(
            f"gather_tensor_parallel_logits: the ranks hold {sizes} classes; of a vocabulary of {size} torch.chunk "
            f"gives them {expected}. Wrap the parts with DTensor.from_local(..., shape=...) in the layout they have"
        )
    return all_gather(logits, mesh, dim=-1, size=size)


class _ActiveContexts(threading.local):
    innermost: _Guard | None = None


class _Guard(TorchFunctionMode):
    """Sees every call of a loss, on plain tensors too."""

    def __init__(self, mesh: DeviceMesh | None, strict: bool) -> None:
        super().__init__()
        self.mesh, self.strict = mesh, strict

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _LOSSES or self is not _state.innermost:
            return func(*args, **kwargs)
        return self._loss(func, args, kwargs)

    def _loss(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, scores = func.__name__, args[0]
        classes = min(scores.ndim - 1, 1)
        if func is F.linear_cross_entropy:  # whose scores are sharded as the weight's rows are
            sharded, dim, target, kept = args[1], 0, args[2], scores.ndim - 1
        else:
            sharded, dim, target, kept = scores, classes, args[1], classes
        if self.strict and (self.mesh is None or self.mesh.size() > 1):
            _check_parallel(name, sharded, dim, self.mesh)
        with contextlib.ExitStack() as stack:
            if isinstance(scores, DTensor) and (_plain(args) or _plain(kwargs.values())):
                _check_whole(name, scores, kept, target)
                stack.enter_context(implicit_replication())
            if scores.dtype in LOW:
                stack.enter_context(torch.autocast(scores.device.type, scores.dtype))
            return func(*args, **kwargs)


_state = _ActiveContexts()


def _vocabulary_axes(tensor: DTensor, dim: int, mesh: DeviceMesh | None) -> tuple[int, ...]:
    """The mesh axes that shard the vocabulary, of those that may."""
    axes = tensor.layout.shard_order[dim]
    if mesh is None:
        return axes
    mine, theirs = mesh_info(tensor.device_mesh), mesh_info(mesh)
    if mine.axes_beyond(theirs) is None and theirs.axes_beyond(mine) is None:
        raise ValueError(f"the scores are on mesh {mine!r}, which has no part {theirs!r}; give loss_parallel that mesh")
    return tuple(a for a in axes if mine.names[a] in theirs.names)


def _check_parallel(name: str, scores: Any, dim: int, mesh: DeviceMesh | None) -> None:
    """Raise ValueError unless the classes are sharded."""
    fix = (
        "Keep the output of a column-parallel head as it is: ColwiseParallel(output_layouts=Shard(-1), "
        "use_local_output=False); or allow other scores with loss_parallel(strict=False)"
    )
    over = "" if mesh is None else f" over mesh {mesh_info(mesh)!r}"
    if not isinstance(scores, DTensor):
        raise ValueError(
            f"{name} inside loss_parallel needs a DTensor whose classes (dim {dim}) are sharded{over}, got a plain "
            f"tensor of shape {tuple(scores.shape)}. {fix}"
        )
    if scores.device_mesh.size() > 1 and not _vocabulary_axes(scores, dim, mesh):
        raise ValueError(
            f"{name} inside loss_parallel needs classes (dim {dim}) that are sharded{over}, got shape "
            f"{tuple(scores.shape)}, {scores.layout}. {fix}"
        )


def _plain(values: Any) -> bool:
    return any(isinstance(v, torch.Tensor) and not isinstance(v, DTensor) for v in values)


def _check_whole(name: str, scores: DTensor, dim: int, target: torch.Tensor) -> None:
    """Raise ValueError when a plain target could be this rank's part of a batch that is sharded.

    Args:
        scores: whose dims other than ``dim`` are those of the batch.
    """
    layout = scores.layout
    axes = [a for d, axes in enumerate(layout.shard_order) if d != dim for a in axes if layout.mesh_shape[a] > 1]
    if axes and not isinstance(target, DTensor):
        raise ValueError(
            f"{name} inside loss_parallel: the batch is sharded (scores of shape {tuple(scores.shape)}, {layout}) and "
            f"the target, of shape {tuple(target.shape)}, is plain, so it could be this rank's part or the whole. Say "
            "which: DTensor.from_local(target, mesh, placements) or distribute_tensor(target, mesh, placements)"
        )
