"""The C++ autograd graph between wrappers, as a part of the graph of local tensors.

``autograd.Function.apply`` on DTensors makes C++ nodes between *wrappers*, which the local graph knows nothing of
(module backward hooks and reentrant checkpoint are such functions). When a wrapper that came out of such a node is
first used, every node that it depends on gets a stand-in in the local graph, whose backward has the engine run that one
node. A node has one stand-in however many tensors need it, so it runs, and its hooks are called, once per backward pass
with the complete gradient, as on one device. Between stand-ins gradients travel as DTensors; at the leaves, which are
the wrappers that went into the functions, they are converted to the type of the local tensor's gradient.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from hyper_parallel import tensor as _folder  # whose other modules need this one
from hyper_parallel import torch_compat
from hyper_parallel.sharding.spec import contiguous_stride, gradient_spec, make_spec
from hyper_parallel.tensor import dtensor

_STAND_IN = "hyper_parallel"  # key in a node's metadata


class _StandIn:
    """The outputs of a node's stand-in, held by whatever needs the node's gradient, and by the node only weakly."""

    __slots__ = ("__weakref__", "outputs")

    def __init__(self, outputs: tuple[torch.Tensor, ...]) -> None:
        self.outputs = outputs


def joined(local: torch.Tensor, spec: Any, node: Any, output: int, is_changed: Any) -> torch.Tensor:
    """The local tensor of a DTensor that output number ``output`` of ``node`` made, connected to the local graph.

    Args:
        local: without history; the result shares its memory.
        spec: of the DTensor.
        is_changed: tells whether a DTensor was written to after it went into the function.
    """
    stand_in = _stand_in(node, is_changed)
    source = stand_in.outputs[output]
    return _Enter.apply(_Hidden(local.detach()), spec, stand_in, source) if source.requires_grad else local


def same_as(local: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A tensor with the memory of ``local`` and the history of ``source``."""
    return _SameAs.apply(_Hidden(local.detach()), source) if source.requires_grad else local


class _SameAs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: _Hidden, source: torch.Tensor) -> torch.Tensor:
        return local.tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, grad


class _Hidden:
    """Hides a tensor from ``apply``, which would make a view of an input that it returns."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Enter(torch.autograd.Function):
    """From the gradient of a local tensor to that of the wrapper."""

    @staticmethod
    def forward(ctx: Any, local: _Hidden, spec: Any, stand_in: _StandIn, source: torch.Tensor) -> torch.Tensor:
        ctx.spec, ctx.stand_in = spec, stand_in
        return local.tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, dtensor.wrap_gradient(grad, ctx.spec)


class _Node(torch.autograd.Function):
    """One node of the wrapper graph: DTensor gradients of its outputs to those of what it was made from."""

    @staticmethod
    def forward(
        ctx: Any, node: Any, edges: list[Any], below: list[_StandIn], *sources: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.node, ctx.edges, ctx.below = node, edges, below
        ctx.set_materialize_grads(False)
        # Of the shapes that the gradients will have; nobody reads the values.
        return tuple(
            torch.empty_strided(m.shape, [0] * len(m.shape), dtype=m.dtype, device=m.device)
            for m in node._input_metadata
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if all(g is None for g in grads):
            return None, None, None, *(None for _ in ctx.edges)
        name = ctx.node.name()
        if isinstance(ctx.node, BackwardCFunction) and name != "BackwardHookFunctionBackward":
            grads = _materialized(ctx.node, grads)
        found: Any
        if name == "CheckpointFunctionBackward":
            grads = _zero_scalars(ctx.node, grads)
            found = _run_checkpoint(ctx.node, ctx.edges, grads)
        else:
            given = [(GradientEdge(ctx.node, i), g) for i, g in enumerate(grads) if g is not None]
            found = torch_compat.run_backward(
                tuple(edge for edge, _ in given),
                tuple(grad for _, grad in given),
                torch_compat.keeps_graph(),
                torch.is_grad_enabled(),
                tuple(GradientEdge(*edge) for edge in ctx.edges),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        return None, None, None, *(_to_leaf(edge, grad) for edge, grad in zip(ctx.edges, found, strict=True))


def _materialized(node: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """Zeros in the place of missing gradients. PyTorch does this too, but its zeros are plain tensors.

    Scalars are left to PyTorch: plain numbers work with DTensors, and an output that is not differentiable looks like
    a scalar here.
    """
    like = next(g for g in grads if g is not None)
    if not isinstance(like, dtensor.DTensor):
        return grads
    return tuple(
        grad
        if grad is not None or not meta.shape
        else _replica(torch.zeros((), dtype=meta.dtype, device=meta.device), meta, like)
        for grad, meta in zip(grads, node._input_metadata, strict=True)
    )


def _zero_scalars(node: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """Zeros for missing gradients of scalar outputs: a missing seed of a scalar would count as one."""
    return tuple(
        torch.zeros((), dtype=meta.dtype, device=meta.device)
        if grad is None and not meta.shape and meta.dtype.is_floating_point
        else grad
        for grad, meta in zip(grads, node._input_metadata, strict=True)
    )


def _replica(value: torch.Tensor, meta: Any, like: Any) -> Any:
    """A number on every rank of a mesh, as a DTensor of one value."""
    shape = tuple(meta.shape)
    spec = make_spec(like.layout.replicated(len(shape)), shape, contiguous_stride(shape), value.dtype)
    return dtensor.wrap(value.expand(shape), spec)


def _run_checkpoint(node: Any, edges: list[Any], grads: tuple[Any, ...]) -> list[Any]:
    """Reentrant checkpoint refuses to run when the engine was asked for the gradients of certain tensors, and running
    one node is that; so its backward is called without the engine."""
    results = [g for g, needed in zip(node.apply(*grads), node.needs_input_grad, strict=True) if needed]
    found = dict.fromkeys(edges)
    for edge, grad in zip((e for e in node.next_functions if e[0] is not None), results, strict=True):
        found[edge] = grad if found[edge] is None else found[edge] + grad
    return list(found.values())


def _to_leaf(edge: Any, grad: Any) -> Any:
    """The gradient as the source of an edge takes it: a leaf's local gradient, else the DTensor as it is."""
    node, _ = edge
    if grad is None or not isinstance(node, torch_compat.AccumulateGrad):
        return grad
    leaf = node.variable
    if isinstance(leaf, dtensor.DTensor) and not isinstance(grad, dtensor.DTensor) and grad.ndim == 0:
        grad = _replica(grad, leaf, leaf)
    if isinstance(leaf, dtensor.DTensor) is not isinstance(grad, dtensor.DTensor):
        raise TypeError(
            f"the backward of an autograd.Function returned a {type(grad).__name__} as the gradient of a "
            f"{type(leaf).__name__}; compute it from the DTensors that backward gets, or make it one with "
            "distribute_tensor or DTensor.from_local"
        )
    if not isinstance(leaf, dtensor.DTensor):
        return grad
    return _folder.redistribute_cache.convert(grad, gradient_spec(leaf._spec, grad.dtype))._resolve()


def _known(node: Any) -> _StandIn | None:
    reference = node.metadata.get(_STAND_IN)
    return None if reference is None else reference()


def _stand_in(root: Any, is_changed: Any) -> _StandIn:
    """The stand-in of a node, made (after those of the nodes below it) unless it has one."""
    made: dict[Any, _StandIn] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        if node in made:
            stack.pop()
            continue
        found = _known(node)
        if found is None:
            below = {
                n for n, _ in node.next_functions if n is not None and not isinstance(n, torch_compat.AccumulateGrad)
            }
            missing = [n for n in below if n not in made]
            if missing:
                stack.extend(missing)
                continue
            found = _make(node, made, is_changed)
        made[node] = found
        stack.pop()
    return made[root]


def _make(node: Any, made: dict[Any, _StandIn], is_changed: Any) -> _StandIn:
    edges = list(dict.fromkeys(edge for edge in node.next_functions if edge[0] is not None))
    sources = []
    for below, output in edges:
        if not isinstance(below, torch_compat.AccumulateGrad):
            sources.append(made[below].outputs[output])
            continue
        leaf = below.variable
        if isinstance(leaf, dtensor.DTensor):
            if is_changed(leaf):
                raise RuntimeError(
                    f"{node.name()}: a DTensor was written in place after it went into the autograd.Function and "
                    "before the result was used, so its gradient cannot be found any more. Use the result first, or "
                    "clone() the input"
                )
            leaf = leaf._resolve()
        sources.append(leaf)
    found = _StandIn(_Node.apply(node, edges, [made[n] for n, _ in edges if n in made], *sources))
    node.metadata[_STAND_IN] = weakref.ref(found)
    return found
