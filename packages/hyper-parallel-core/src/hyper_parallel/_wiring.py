"""The only places where a lower layer reaches a higher one; a test holds that all other imports go down.

Each function below is called by the layer named first and runs code of the layer named second, which is imported when
it is first needed: importing a lower layer loads none above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel._rules.call import Call
    from hyper_parallel._rules.op import DistributedOp
    from hyper_parallel._rules.strategy import LayoutOp
    from hyper_parallel.sharding.mesh import MeshInfo


def dispatch(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
    """tensor, registry → dispatch: run a torch function on arguments that contain DTensors."""
    from hyper_parallel.dispatch.dispatcher import dispatch

    return dispatch(func, args, kwargs)


def load_dispatcher() -> None:
    """tensor → dispatch: let the dispatcher take the place of ``DTensor.__torch_function__``."""
    import hyper_parallel.dispatch.dispatcher  # noqa: F401


def mesh_first_used(info: MeshInfo) -> None:
    """sharding → registry, tensor: compare the ranks' plugins before they communicate over a mesh, and make torch know
    DTensor (:mod:`hyper_parallel.torch_compat`).

    Raises:
        PluginError: when they differ.
    """
    from hyper_parallel.registry.fingerprint import check_same_plugins
    from hyper_parallel.tensor import torch_changes

    check_same_plugins(info)
    torch_changes.install()


def op_constructed(op: DistributedOp) -> None:
    """rules → registry: a rule that is constructed by user code registers itself."""
    from hyper_parallel.registry.registry import default_registry

    default_registry().register_instance(op)


def dtensor_type() -> type[Any]:
    """rules, registry → tensor: the class DTensor, for what gets arguments as users wrote them."""
    from hyper_parallel.tensor.dtensor import DTensor

    return DTensor


def call_of(op: LayoutOp, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """rules → dispatch: the call as rules see it, for a rule whose three phases are called one by one."""
    from hyper_parallel.dispatch.arguments import make_call

    return make_call(op, None, args, kwargs)


def save_spread_model(model: Any, folder: Any, max_shard_size: int | str, options: Mapping[str, Any]) -> None:
    """tensor → checkpoint: what ``save_pretrained`` of a ``transformers`` model that is spread does."""
    from hyper_parallel.checkpoint.saved_pretrained import save_spread_model

    save_spread_model(model, folder, max_shard_size, options)
