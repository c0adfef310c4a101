"""When what happens to one wrapped module: gather before it computes, free after it, reduce after its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from hyper_parallel import implicit_replication
from hyper_parallel.rules import in_backward, tensors_of, torch_compat
from hyper_parallel_fsdp.bucket import Bucket
from hyper_parallel_fsdp.checks import (
    check_devices,
    check_nothing_added,
    current_parameter,
    refuses_freed,
)
from hyper_parallel_fsdp.data_mesh import DataMesh
from hyper_parallel_fsdp.forward_record import ForwardRecord
from hyper_parallel_fsdp.left_behind import LeftBehind, tensors_in
from hyper_parallel_fsdp.mixed_precision import cast_inputs, cast_outputs
from hyper_parallel_fsdp.outputs import outlasting
from hyper_parallel_fsdp.parameter import HSDPParam
from hyper_parallel_fsdp.reduction import GradientReduction, Gradients
from hyper_parallel_fsdp.root import Root

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

_STATE = "_hsdp_state"


def state_of(module: nn.Module) -> FullyShardState | None:
    """The state of a wrapped module; None for others."""
    return module.__dict__.get(_STATE)


def _unshard_in_backward(state: FullyShardState, root: Root) -> None:
    if state.unshard_in_backward:
        state.unshard()


def _gradient_came(state: weakref.ref[FullyShardState]) -> None:
    """A whole parameter got a gradient: the end of this backward reduces it."""
    found = state()
    if found is not None:
        found.joined_root().begin_backward()


def _without_wrapped(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """These modules and those inside, without the wrapped ones inside and what is in them."""
    found: dict[nn.Module, None] = dict.fromkeys(modules)
    stack = list(modules)
    while stack:
        inside = [m for m in stack.pop().children() if m not in found and state_of(m) is None]
        found.update(dict.fromkeys(inside))
        stack.extend(inside)
    return list(found)


class FullyShardState:
    """The parameters of one ``fully_shard`` call and where they are in the iteration.

    Attributes:
        modules: what was wrapped together.
        params: the parameters that it manages, those of wrapped modules inside left out.
        data: its mesh with the roles of the axes.
        reshard_after_forward: whether the parameters are freed between forward and backward; None: yes, but not for
            the root, nor for the module whose backward comes first. A number: to a part on each of so many ranks.
        forward_prefetch, backward_prefetch: states to gather while this one computes; None: what comes next.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        data: DataMesh,
        device: torch.device,
        reshard_after_forward: bool | int | None,
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
        self.unshard_in_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.divide_factor: float | None = None
        self.forward_prefetch: list[FullyShardState] | None = None
        self.backward_prefetch: list[FullyShardState] | None = None
        self._built_laid_out: bool | None = None
        self._registered = False  # whether the modules hold the whole parameters
        # The call that gathered them (0: nothing is gathered), and what ended last: with reductions off? a backward?
        self._gathered_in, self._ended_quiet, self._ended_backward = 0, False, False
        self._prefetched = False
        self._backward = False
        self._open_calls = 0
        self._calls: dict[nn.Module, ForwardRecord] = {}
        self._to_run: set[nn.Module] = set()
        self._left: LeftBehind | None = None

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
        self._gathered_in = self._gathered_in or self.joined_root().call
        for bucket in self.buckets:
            bucket.start_gather()

    def unshard_for_call(self, root: Root) -> None:
        """Begin to gather for the running call. What an earlier one gathered is out of date: an optimizer may have
        stepped since, and fused steps, collectives and writes through ``.data`` leave no trace. It stays good only
        after a backward that did not reduce, and while reductions are off: then no step is to come."""
        lasting = self._ended_quiet and (self._ended_backward or not self.requires_gradient_sync)
        if self._gathered_in != root.call and not lasting:
            self.reshard()
        self.unshard()

    def _note_end(self, backward: bool) -> None:
        """A forward or backward ended."""
        self._ended_quiet, self._ended_backward = not self.requires_gradient_sync, backward

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
        self._prefetched, self._gathered_in = False, 0
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
        self._built_laid_out, self._gathered_in = laid_out, 0
        with torch.inference_mode(False):
            self.buckets = [
                Bucket(params, kind[2], self.device, self.offload, laid_out, self.kept_by)
                for kind, params in by_kind.items()
            ]
        this = weakref.ref(self)  # the gradients that come in no other way that is seen are reduced too
        for param in self.params:
            assert param.unsharded is not None
            if param.unsharded.requires_grad:
                param.unsharded.register_post_accumulate_grad_hook(lambda _: _gradient_came(this))

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

    @contextmanager
    def forward_context(self, module: nn.Module) -> Iterator[None]:
        """In which a module's own forward runs: on a laid out batch, plain buffers count as Replicate."""
        laid_out = self.root is not None and self.root.laid_out
        with (
            implicit_replication() if laid_out else nullcontext(),
            nullcontext() if self.unshard_in_backward else refuses_freed(module),
        ):
            yield

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
        if again:
            self.unshard()
        else:
            self.unshard_for_call(root)
        self.wait_for_unshard()
        if not again:
            self._prefetch(self.forward_prefetch, root.next_forward(self), FullyShardState.unshard_for_call)
        args, kwargs = cast_inputs(self.mp_policy, self.device, self is root.states[0], args, kwargs)
        if torch.is_grad_enabled() and not (again and self._backward):
            outer = None if again else root.innermost
            call = self._calls[module] = ForwardRecord(self, outer, (args, kwargs))
            call.watch_inputs(tensors_of((args, kwargs)))
            if not again:
                root.innermost = call
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """After a module's forward; when it raised, with ``output`` None."""
        root = self.root
        if root is None:  # before anything began
            return output
        output = cast_outputs(self.mp_policy, outlasting(module, output, self.buckets))
        call = self._calls.pop(module, None)
        if call is not None:
            call.watch_outputs((*tensors_in([output]), *self._tensors_left(call.given)))
            call.given = None
            if root.innermost is call:
                root.innermost = call.outer
        if in_backward():  # its backward follows
            return output
        self._to_run.discard(module)
        if not self._to_run:
            self._leave_forward(root)
        root.ended(self, completed=output is not None)
        return output

    def _tensors_left(self, given: Any) -> Iterable[torch.Tensor]:
        """What the modules hold now besides parameters, and what is in the containers that they were called with."""
        if self._left is None:
            self._left = LeftBehind(_without_wrapped(self.modules))
        return self._left.tensors([given])

    def _leave_forward(self, root: Root) -> None:
        if self._keep_after_forward(root):
            self._register_shards()
        elif self.kept_by is not None and (root.trains or not self.requires_gradient_sync):
            self._register_shards()
            for bucket in self.buckets:
                bucket.keep_part()
        else:
            self.reshard()

    @property
    def kept_by(self) -> int | None:
        """How many ranks keep the whole parameters together between forward and backward; None for all."""
        given = self.reshard_after_forward
        return None if given is None or isinstance(given, bool) else given

    def _keep_after_forward(self, root: Root) -> bool:
        if not root.trains and self.requires_gradient_sync:
            return False  # no backward follows, and the next call gathers anew
        if self.reshard_after_forward is not None:
            return not self.reshard_after_forward
        return self is root.states[0] or (self is root.last and torch.is_grad_enabled())

    def end_forward(self) -> None:
        """The outermost forward is over."""
        if self._prefetched or self._to_run:
            self.reshard()
        self._to_run = set()
        self._note_end(backward=False)

    def _prefetch(
        self,
        chosen: list[FullyShardState] | None,
        likely: Iterable[FullyShardState],
        unshard: Callable[[FullyShardState, Root], None],
    ) -> None:
        for state in likely if chosen is None else chosen:
            if state is not self and not state._registered:
                unshard(state, state.joined_root())
                state._prefetched = True

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward_begins(self, call: ForwardRecord | None) -> None:
        """The gradient of an output is there."""
        root = self.joined_root()
        root.begin_backward()
        if call is not None and call.watched:
            self._open_calls += 1
        if not self._backward or (self.unshard_in_backward and not self._registered):
            self._backward = True
            if self.unshard_in_backward:
                self.unshard()
                self.wait_for_unshard()
            self._prefetch(self.backward_prefetch, root.next_backward(self), _unshard_in_backward)

    def backward_ends(self, call: ForwardRecord) -> None:
        """The gradients of a call's inputs are there."""
        if call.opened:
            self._open_calls -= 1
        if self._backward and self._open_calls <= 0 and not self._awaits_gradients():
            self._finish_backward()

    @property
    def runs_backward(self) -> bool:
        """Whether its backward has begun and not ended."""
        return self._backward

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
        self._note_end(backward=True)
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
