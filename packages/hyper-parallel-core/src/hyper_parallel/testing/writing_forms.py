"""The forms of an operator that write into a tensor: in place, and ``out=``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.tensor.dtensor import DTensor, wrap
from hyper_parallel.testing.case_runner import CaseRunner
from hyper_parallel.testing.placing import make
from hyper_parallel.torch_compat import pytree


class InPlaceRunner(CaseRunner):
    """Runs a form that writes its first tensor, on a copy of it that is connected to the leaf.

    The target must stay the same object in the same layout. A target that cannot hold the result (a pending sum, where
    the operator is not linear) is refused under every policy and stays as it was.
    """

    def call(self, func: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        """The sample's call with a copy of its first tensor as the target."""
        source = tensors[0]
        if not isinstance(source, DTensor):
            args, kwargs = self.sample.arguments([source.clone(), *tensors[1:]])
            return func(*args, **kwargs)
        # Cloned below the wrapper, so that this needs no rule for clone.
        target = wrap(source._resolve().clone(), source._spec)
        args, kwargs = self.sample.arguments([target, *tensors[1:]])
        try:
            result = func(*args, **kwargs)
        except ValueError:
            self.compare("the target after the refusal", target, self.values[0], self.case.inputs[0].grad)
            raise
        if result is not target:
            self.note("the result is not the target itself")
        if target.layout is not source.layout:
            self.note(f"the target's layout changed from {source.layout} to {target.layout}")
        return result

    def may_refuse(self, error: ValueError) -> bool:
        """Unless the target is whole on every rank."""
        return super().may_refuse(error) or (self.policy == "auto" and not self.layouts[0].is_replicated())


class OutRunner(CaseRunner):
    """Runs the ``out=`` form; the given DTensors have the layout of the first input of their shape."""

    def call(self, func: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        """The sample's call with ``out=`` when the tensors are distributed."""
        args, kwargs = self.sample.arguments(tensors)
        if not any(isinstance(t, DTensor) for t in tensors):
            return func(*args, **kwargs)
        out = pytree.tree_unflatten([self._buffer(want) for want in self.expected.outputs], self.expected.structure)
        before = [o.layout for o in pytree.tree_leaves(out)]
        result = func(*args, **kwargs, out=out)
        for mine, given in zip(pytree.tree_leaves(result), pytree.tree_leaves(out), strict=True):
            if mine is not given:
                self.note("the result is not the tensor given as out=")
        for given, layout in zip(pytree.tree_leaves(out), before, strict=True):
            if given.layout is not layout:
                self.note(f"the layout of out= changed from {layout} to {given.layout}")
        return result

    def may_refuse(self, error: ValueError) -> bool:
        """Under the default policy, when the result does not come in the layout of ``out=``."""
        return self.policy == "partial"

    def _buffer(self, want: torch.Tensor) -> DTensor:
        fitting = (
            x for x, v in zip(self.layouts, self.values, strict=True) if v.shape == want.shape and not x.is_partial()
        )
        layout = next(fitting, self.layouts[0].replicated(want.ndim))
        return make(torch.full_like(want, 7), self.mesh, layout)
