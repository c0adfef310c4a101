"""``HSDPModule``: what a module can do after ``fully_shard``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from hyper_parallel_fsdp.parameter import HSDPParam
from hyper_parallel_fsdp.root import wait_for_all_reductions
from hyper_parallel_fsdp.state import FullyShardState, state_of

__all__ = ["FSDPModule", "HSDPModule", "UnshardHandle", "hsdp_sync_stream", "register_fsdp_forward_method"]


class UnshardHandle:
    """An unshard in flight."""

    def __init__(self, state: FullyShardState) -> None:
        self._state: FullyShardState | None = state

    def wait(self) -> None:
        """Wait until the module holds its whole parameters."""
        if self._state is not None:
            self._state.wait_for_unshard()
            self._state = None


class HSDPModule:
    """The base class that ``fully_shard`` adds to a module. ``FSDPModule`` is another name of it.

    Setters that take ``recurse`` apply to the wrapped modules inside too; by default where PyTorch's do.
    """

    @property
    def hsdp_params(self) -> dict[str, HSDPParam]:
        """The parameters that this module (not the wrapped ones inside) manages, by name: their sharded DTensor, groups
        and sizes (:class:`HSDPParam`)."""
        return {param.name: param for param in self._hsdp.params}

    # -- sharded and whole ------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters and let the module hold them, until :meth:`reshard`.

        The next forward gathers anew, as an optimizer may step before it; called while the model's forward runs, it
        gathers ahead for that forward.

        Args:
            async_op: return a handle at once, whose ``wait()`` makes the parameters usable.
        """
        self._hsdp.unshard()
        if async_op:
            return UnshardHandle(self._hsdp)
        self._hsdp.wait_for_unshard()
        return None

    def reshard(self) -> None:
        """Let this module hold its shards again, and free the whole parameters."""
        self._hsdp.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed between forward and backward, which costs a second all-gather."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"set_reshard_after_forward takes True or False, got {reshard_after_forward!r}")
        for state in self._hsdp_states(recurse):
            state.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are freed after backward. False keeps them, for the next forward if this backward did not
        reduce gradients (:meth:`set_requires_gradient_sync`). After one that did, an optimizer may have stepped, and
        the next forward gathers anew."""
        for state in self._hsdp_states(recurse):
            state.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether parameters are gathered again for backward (default), where they were freed after forward. False is
        for a module whose backward does not read them, such as an embedding; one that does raises an error. As in
        PyTorch, of this module's own parameters only."""
        self._hsdp.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[HSDPModule]) -> None:
        """Which modules to gather while this one's forward runs. Default: the one that came next the last time."""
        self._hsdp.forward_prefetch = _states_of(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[HSDPModule]) -> None:
        """Which modules to gather while this one's backward runs. Default: the one whose backward comes next."""
        self._hsdp.backward_prefetch = _states_of(modules, "set_modules_to_backward_prefetch")

    # -- gradients --------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; if not, every rank keeps whole gradients and adds to them."""
        for state in self._hsdp_states(recurse):
            state.requires_gradient_sync = requires_gradient_sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward only accumulates; the next backward outside reduces the sum."""
        before = [(state, state.requires_gradient_sync) for state in self._hsdp_states(True)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for state, value in before:
                state.requires_gradient_sync = value

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether the copies of a shard (HSDP) are added up; if not, each reduce-scatter's result waits for the next
        backward that does. Saves memory over :meth:`set_requires_gradient_sync`."""
        for state in self._hsdp_states(recurse):
            state.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the end of a backward waits for its reductions (default). With False they go on; the next last
        backward or :func:`hsdp_sync_stream` waits."""
        self._hsdp.joined_root().is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Divide summed gradients by this. Default: the number of data ranks (an average) for plain batches, 1 for
        DTensors over the data axes. As in PyTorch, only of this module's own parameters unless ``recurse=True``."""
        if factor <= 0:
            raise ValueError(f"set_gradient_divide_factor: the factor must be positive, got {factor}")
        for state in self._hsdp_states(recurse):
            state.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Another name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_gradient_average_axes(self, axes: Sequence[str], *, recurse: bool = True) -> None:
        """Also average gradients over these model axes (``"tp"``), for parameters that are Replicate on them.

        For plain activations that are meant to be equal on all tensor parallel ranks but may drift apart by rounding.
        Parameters that are sharded over an axis are left alone. ``()`` takes it back.

        Raises:
            ValueError: the mesh has no such axis.
        """
        for state in self._hsdp_states(recurse):
            state.average_over(tuple(axes))

    def synchronize_parameters(self, *, recurse: bool = True) -> None:
        """Give every copy of a parameter the value that the first rank of its copies has; all ranks must call it.

        Nothing does this by itself: as with PyTorch's ``fully_shard``, ranks are expected to initialise alike.
        """
        for state in self._hsdp_states(recurse):
            state.reshard()
            for param in state.params:
                param.synchronize()

    def reset_iter_state(self) -> None:
        """Forget an iteration that an exception ended; its gradients are lost. The next forward does so by itself."""
        self._hsdp.joined_root().reset()

    # -- nn.Module --------------------------------------------------------------------------------------------------

    @property
    def _hsdp(self) -> FullyShardState:
        state = state_of(self)  # type: ignore[arg-type]
        assert state is not None
        return state

    def _hsdp_states(self, recurse: bool) -> Iterable[FullyShardState]:
        modules: Any = self.modules() if recurse else (self,)  # type: ignore[attr-defined]
        return dict.fromkeys(state for m in modules if (state := state_of(m)) is not None)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        for state in self._hsdp_states(True):
            state.reshard()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be deep-copied: it is tied to its process groups. Copy the module before "
            "fully_shard and wrap both"
        )


FSDPModule = HSDPModule


def _states_of(modules: Sequence[HSDPModule], what: str) -> list[FullyShardState]:
    for module in modules:
        if not isinstance(module, HSDPModule):
            raise ValueError(f"{what} takes modules that fully_shard wrapped, got a {type(module).__name__}")
    return [module._hsdp for module in modules]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method another forward: parameters are gathered before it and freed after it.

    Nothing happens when the module is not wrapped, so that code can call it in both cases.

    Raises:
        ValueError: the module has no such method.
    """
    state = state_of(module)
    if state is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = state.pre_forward(module, args, kwargs)
        output = None
        try:
            with state.forward_context(module):
                output = method(*args, **kwargs)
        finally:
            output = state.post_forward(module, output)
        return output

    setattr(module, method_name, wrapped)


def hsdp_sync_stream() -> None:
    """Wait until the gradients of all wrapped models are in their places.

    Needed before gradients are read after a backward with ``set_is_last_backward(False)``; harmless otherwise.
    """
    wait_for_all_reductions()
