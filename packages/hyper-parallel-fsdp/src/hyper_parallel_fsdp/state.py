"""When what happens to one wrapped module: gather before it computes, free after it, reduce after its backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from hyper_parallel import implicit_replication
from hyper_parallel.rules import gradient_paths, in_backward, tensors_of, torch_compat
from hyper_parallel_fsdp.bucket import Bucket
from hyper_parallel_fsdp.checks import check_devices, check_nothing_added, current_parameter
from hyper_parallel_fsdp.data_mesh import DataMesh
from hyper_parallel_fsdp.mixed_precision import cast_inputs, cast_outputs
from hyper_parallel_fsdp.parameter import HSDPParam
from hyper_parallel_fsdp.reduction import GradientReduction, Gradients
from hyper_parallel_fsdp.root import Root

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

_STATE = "_hsdp_state"


def state_of(module: nn.Module) -> FullyShardState | None:
    """The state of a wrapped module; None for others."""
    return module.__dict__.get(_STATE)


class ForwardRecord:
    """One forward of a wrapped module, whose backward is to come: open from when it begins to when it ends."""

    __slots__ = ("handle", "opened", "state", "watched")

    def __init__(self, state: FullyShardState) -> None:
        self.state, self.opened, self.watched = state, False, False
        self.handle: Any = None

    def watch_inputs(self, inputs: Iterable[torch.Tensor]) -> None:
        """The backward is over when the inputs have their gradients."""
        tensors = [path for t in inputs if t.requires_grad for path in gradient_paths(t)[-1:] if path.requires_grad]
        if not tensors:
            return  # the end of the whole backward closes it
        self.watched = True
        if len(tensors) == 1:
            handle: Any = tensors[0].register_hook(self._close)
            # Before what the module below does with the same gradient: free and reduce, then gather. (Put in anew, as
            # the engine does not see move_to_end.)
            hooks: Any = tensors[0]._backward_hooks
            for key in [k for k in hooks if k != handle.id]:
                hooks[key] = hooks.pop(key)
        else:
            handle = register_multi_grad_hook(tensors, self._close)
        if any(t.is_leaf for t in tensors):  # else the hook goes with the graph
            self.handle = handle

    def watch_outputs(self, outputs: Iterable[torch.Tensor]) -> None:
        """The backward begins when an output has its gradient."""
        for tensor in outputs:
            if tensor.requires_grad:
                for path in gradient_paths(tensor):
                    if path.requires_grad:
                        path.register_hook(self._open)

    def _open(self, grad: Any) -> None:
        self.state.backward_begins(None if self.opened else self)
        self.opened = True

    def _close(self, grad: Any) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.state.backward_ends(self)


class FullyShardState:
    """The parameters of one ``fully_shard`` call and where they are in the iteration.

    Attributes:
        modules: what was wrapped together.
        params: the parameters that it manages, those of wrapped modules inside left out.
        data: its mesh with the roles of the axes.
        reshard_after_forward: whether the parameters are freed between forward and backward; None: yes, but not for
            the root, nor for the module whose backward comes first.
        forward_prefetch, backward_prefetch: states to gather while this one computes; None: what comes next.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        data: DataMesh,
        device: torch.device,
        reshard_after_forward: bool | None,
        mp_policy: MixedPrecisionPolicy,
        offload: OffloadPolicy | None,
        ignored: frozenset[int],
    ) -> None:
        self.modules, self.data, self.device = tuple(modules), data, device
        self.reshard_after_forward = reshard_after_forward
        self.mp_policy, self.offload, self.ignored = mp_policy, offload, ignored
        self.params: list[HSDPParam] = []
        self.buckets: list[Bucket] = []
        self.root: Root | None = None
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.divide_factor: float | None = None
        self.forward_prefetch: list[FullyShardState] | None = None
        self.backward_prefetch: list[FullyShardState] | None = None
        self._built_laid_out: bool | None = None
        self._registered = False  # whether the modules hold the whole parameters
        self._prefetched = False
        self._backward = False
        self._open_calls = 0
        self._calls: dict[nn.Module, ForwardRecord] = {}
        self._to_run: set[nn.Module] = set()

    # -- the parameters' two forms ----------------------------------------------------------------------------------

    def joined_root(self) -> Root:
        """What is shared with the wrapped modules inside; this module becomes the root when it has none above."""
        if self.root is None:
            inside = dict.fromkeys(
                state for m in self.modules for sub in m.modules() if (state := state_of(sub)) is not None
            )
            check_nothing_added(self.modules, [p for s in inside for p in s.params], self.ignored)
            root = Root([self, *(s for s in inside if s is not self)])
            for state in root.states:
                state.root = root
        assert self.root is not None
        return self.root

    def unshard(self) -> None:
        """Begin to gather."""
        if not (self._registered or self._prefetched or self._backward):
            self._refresh()
        for bucket in self.buckets:
            bucket.start_gather()

    def wait_for_unshard(self) -> None:
        """Wait until the parameters are whole, and let the modules hold them."""
        for bucket in self.buckets:
            bucket.finish_gather()
        self._prefetched = False
        if not self._registered:
            self._registered = True
            for param in self.params:
                param.register_unsharded()

    def reshard(self) -> None:
        """Let the modules hold the shards, and free the whole parameters."""
        self._register_shards()
        self._prefetched = False
        for bucket in self.buckets:
            bucket.free()

    def _register_shards(self) -> None:
        if self._registered:
            self._registered = False
            for param in self.params:
                param.register(param.sharded)

    def _refresh(self) -> None:
        """Build the buckets anew where the parameters are not what they were built for."""
        laid_out = bool(self.joined_root().laid_out)
        moved = laid_out is not self._built_laid_out
        for param in self.params:
            module, attribute = param.owners[0]
            if module._parameters.get(attribute) is not param.sharded:
                param.replace_sharded(current_parameter(param))
            moved = moved or param.moved
        if moved:
            self.build(laid_out)

    def build(self, laid_out: bool) -> None:
        """Make the buckets."""
        check_devices(self.params, self.device, bool(self.offload))
        by_kind: dict[Any, list[HSDPParam]] = {}
        for param in self.params:
            groups = (param.sharded_group_info.ranks, param.unsharded_group_info.ranks)
            by_kind.setdefault((groups, param.local.dtype, self._compute_dtype(param)), []).append(param)
        self._built_laid_out = laid_out
        with torch.inference_mode(False):
            self.buckets = [
                Bucket(params, kind[2], self.device, self.offload, laid_out) for kind, params in by_kind.items()
            ]

    def _compute_dtype(self, param: HSDPParam) -> torch.dtype:
        own, wanted = param.local.dtype, self.mp_policy.param_dtype
        return own if wanted is None or not own.is_floating_point else wanted

    def average_over(self, axes: tuple[str, ...]) -> None:
        """Average gradients over these model axes too."""
        unknown = set(axes) - {n for p in self.params for n in p.placement.sharded.mesh_dim_names}
        if unknown:
            raise ValueError(f"set_gradient_average_axes: no parameter's mesh has the axes {sorted(unknown)}")
        self.reshard()
        for param in self.params:
            param.average_over(axes)
        self._built_laid_out = None

    def remove(self, param: HSDPParam) -> None:
        """Hand a parameter over to another state."""
        self.reshard()
        self.params.remove(param)
        self._built_laid_out = None

    def forward_context(self) -> AbstractContextManager[None]:
        """In which a module's own forward runs: on a laid out batch, plain buffers count as Replicate."""
        return implicit_replication() if self.root is not None and self.root.laid_out else nullcontext()

    # -- forward ----------------------------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before a module's forward."""
        root = self.joined_root()
        again = in_backward()  # activation checkpointing
        if not again:
            if root.outermost is None or root.outermost is self:
                root.begin_forward(self, args, kwargs)
            root.began(self)
        if not self._to_run:
            self._to_run = set(self.modules)
        self.unshard()
        self.wait_for_unshard()
        if not again:
            self._prefetch(self.forward_prefetch, root.next_forward(self))
        args, kwargs = cast_inputs(self.mp_policy, self.device, self is root.states[0], args, kwargs)
        if torch.is_grad_enabled() and not (again and self._backward):
            call = self._calls[module] = ForwardRecord(self)
            call.watch_inputs(tensors_of((args, kwargs)))
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """After a module's forward; when it raised, with ``output`` None."""
        root = self.root
        if root is None:  # before anything began
            return output
        output = cast_outputs(self.mp_policy, output)
        call = self._calls.pop(module, None)
        if call is not None:
            call.watch_outputs(tensors_of(output))
        if in_backward():  # its backward follows
            return output
        self._to_run.discard(module)
        if not self._to_run:
            if self._keep_after_forward(root):
                self._register_shards()
            else:
                self.reshard()
        root.ended(self, completed=output is not None)
        return output

    def _keep_after_forward(self, root: Root) -> bool:
        if self.reshard_after_forward is not None:
            return not self.reshard_after_forward
        return self is root.states[0] or (self is root.last and torch.is_grad_enabled())

    def end_forward(self) -> None:
        """The outermost forward is over."""
        if self._prefetched or self._to_run:
            self.reshard()
        self._to_run = set()

    def _prefetch(self, chosen: list[FullyShardState] | None, likely: Iterable[FullyShardState]) -> None:
        for state in likely if chosen is None else chosen:
            if state is not self and not state._registered:
                state.unshard()
                state._prefetched = True

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward_begins(self, call: ForwardRecord | None) -> None:
        """The gradient of an output is there."""
        root = self.joined_root()
        root.begin_backward()
        if call is not None and call.watched:
            self._open_calls += 1
        if not (self._backward and self._registered):
            self._backward = True
            self.unshard()
            self.wait_for_unshard()
            self._prefetch(self.backward_prefetch, root.next_backward(self))

    def backward_ends(self, call: ForwardRecord) -> None:
        """The gradients of a call's inputs are there."""
        if call.opened:
            self._open_calls -= 1
        if self._backward and self._open_calls <= 0 and not self._awaits_gradients():
            self._finish_backward()

    def _awaits_gradients(self) -> bool:
        """Whether this backward will still add to a parameter's gradient."""
        for param in self.params:
            leaf = param.unsharded
            if leaf is not None and leaf.requires_grad and leaf.grad is None:
                if torch_compat.will_run(get_gradient_edge(leaf).node):
                    return True
        return False

    def end_backward(self) -> None:
        """The whole backward is over."""
        self._open_calls = 0
        left = any(p.unsharded is not None and p.unsharded.grad is not None for p in self.params)
        kept = self.requires_gradient_sync and any(p.accumulated is not None for p in self.params)
        if self._backward or left or kept:
            self._finish_backward()
        else:
            self._leave_backward()

    def _finish_backward(self) -> None:
        self._backward = False
        self._leave_backward()  # first: the gradients take the memory of the parameters on their way
        for bucket in self.buckets:
            self._reduce(bucket)

    def _leave_backward(self) -> None:
        # What was gathered ahead and not used may still be on the way when an optimizer changes the shards.
        if self.reshard_after_backward or self._prefetched:
            self.reshard()
        else:
            self._register_shards()

    def _reduce(self, bucket: Bucket) -> None:
        dtype = bucket.dtype
        if dtype.is_floating_point and self.mp_policy.reduce_dtype is not None:
            dtype = self.mp_policy.reduce_dtype
        gradients = self._gradients_of(bucket, dtype)
        if not gradients or not self.requires_gradient_sync:
            return
        root, factor = self.joined_root(), self._factor() * bucket.params[0].averaged
        if bucket.groups.rank_size == 1:
            for param, grad in gradients:
                if grad is not None:
                    grad = grad if factor == 1 else grad / factor
                    param.add_gradient(grad.to(bucket.shards.device, bucket.shards.dtype))
            return
        root.make_room()
        root.add(GradientReduction(bucket, gradients, dtype, factor, self.requires_all_reduce, root.stream))

    def _gradients_of(self, bucket: Bucket, dtype: torch.dtype) -> Gradients:
        """What the backwards since the last reduction left; without reduction it is kept, in ``dtype``."""
        gradients: Gradients = []
        for param in bucket.params:
            if not param.local.requires_grad:
                continue
            grad = param.take_gradient()
            if param.accumulated is not None:
                grad = param.accumulated if grad is None else param.accumulated.add_(grad)
                param.accumulated = None
            if not self.requires_gradient_sync and grad is not None:
                param.accumulated, grad = grad.to(dtype), None
            gradients.append((param, grad))
        return gradients

    def _factor(self) -> float:
        if self.divide_factor is not None:
            return self.divide_factor
        return 1.0 if self.joined_root().laid_out else float(self.data.data_size)

    def reset(self) -> None:
        """Forget an iteration that an exception ended."""
        self._open_calls, self._backward = 0, False
        self._calls, self._to_run = {}, set()
        for param in self.params:
            param.take_gradient()
            param.accumulated = None
        for bucket in self.buckets:
            bucket.partial = None
        self.reshard()
