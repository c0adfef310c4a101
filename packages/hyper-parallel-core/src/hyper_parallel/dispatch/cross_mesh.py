"""Inputs on several meshes: a tensor that is Replicate over a mesh's extra axes may join an operator on a sub-mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel._rules.call import Call, refuse
from hyper_parallel.dispatch.arguments import map_arguments
from hyper_parallel.sharding.layout import Layout
from hyper_parallel.sharding.mesh import MeshInfo
from hyper_parallel.sharding.placements import is_replicate
from hyper_parallel.tensor.dtensor import DTensor, wrap
from hyper_parallel.tensor.redistribute_cache import remembered


def common_mesh(call: Call) -> MeshInfo | None:
    """The sub-mesh on which inputs from different meshes meet; None when all are on one mesh.

    Raises:
        RedistributionError: when one is not part of the other, or an input is sharded or pending over the extra axes.
    """
    infos = {spec.layout.info for spec in call.inputs}
    if len(infos) == 1:
        return None
    smallest = min(infos, key=lambda info: info.ndim)
    if call.inplace and call.info is not smallest:
        raise refuse(
            call,
            f"it writes its first argument, which is on the mesh {call.info!r}, with one on {smallest!r}",
            "use the out-of-place form, or bring the others to the mesh of the first",
        )
    for index, spec in enumerate(call.inputs):
        layout = spec.layout
        extra = layout.info.axes_beyond(smallest)
        if extra is None or not all(is_replicate(layout.placements[a]) for a in extra):
            raise refuse(
                call,
                f"the inputs are on different meshes: {smallest!r}, and input {index} on {layout.info!r}",
                "build them on one mesh; a tensor on a larger mesh can join an operator on a sub-mesh of it "
                "(mesh['tp']) when it is Replicate over the other axes; fully_shard brings the parameters of a "
                "sub-mesh to the whole one",
            )
    return smallest


def on_mesh(args: Sequence[Any], kwargs: dict[str, Any], info: MeshInfo) -> tuple[Any, Any]:
    """The arguments with every DTensor on the sub-mesh."""
    return map_arguments(args, kwargs, lambda tensor: to_sub_mesh(tensor, info))


def to_sub_mesh(tensor: DTensor, info: MeshInfo) -> DTensor:
    """A tensor that is Replicate over a mesh's extra axes, on the sub-mesh: every sub-mesh gets its copy, and the
    gradients of the copies are summed."""
    layout = tensor.layout
    extra = layout.info.axes_beyond(info)
    if not extra:
        return tensor
    copies = remembered(tensor, layout, tensor._spec.varying | frozenset(extra))
    axes = [layout.info.names.index(name) for name in info.names]
    order = {d: [axes.index(a) for a in by] for d, by in enumerate(layout.shard_order) if by}
    inner = Layout.from_placements(info.mesh, [layout.placements[a] for a in axes], ndim=layout.ndim, shard_order=order)
    varying = frozenset(axes.index(a) for a in tensor._spec.varying if a in axes)
    return wrap(copies._resolve(), tensor._spec.replace(layout=inner, varying=varying))
