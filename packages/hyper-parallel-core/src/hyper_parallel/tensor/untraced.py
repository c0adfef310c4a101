"""Keep ``torch.compile`` out of this library's own code, in functions that somebody else compiled.

What happens between an operator on a DTensor and the local call depends on more than Dynamo can guard on: what is
remembered of layouts, plans and gradients. So Dynamo neither compiles our frames nor traces into them. A compiled
function that meets a DTensor runs eagerly, functions of plain tensors that it calls are compiled; where everything has
to be one graph the first call is refused.
"""

from __future__ import annotations

import types
from typing import Any

from hyper_parallel import torch_compat
from hyper_parallel.utils.import_hooks import when_imported

__all__ = ["install", "untraced"]

_REASON = (
    "torch.compile cannot trace DTensors of hyper_parallel as one graph. Give the compiled function plain tensors "
    "(x.to_local()), or leave out fullgraph=True: then what meets a DTensor runs eagerly. Where the call of "
    "torch.compile is another library's, run it inside `with torch.compiler.set_stance('force_eager'):`"
)


def untraced(function: Any, reason: str = _REASON) -> Any:
    """Let Dynamo trace neither this function nor what it calls; where all has to be one graph it gives the reason.

    As ``torch.compiler.disable``, which wraps the function and so costs time on every call, compiled or not; this is a
    mark on the code object, which only a running compiler looks at.
    """
    torch_compat.skip_frames(function.__code__)
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason
    return function


def install(tensor_class: type) -> None:
    """For the frames of this package, and for tensors of this class; called when the first mesh is used. Nothing of
    Dynamo is imported for it."""
    when_imported("torch._dynamo.trace_rules", _skip_our_files)
    when_imported("torch._dynamo.variables.builder", _RefuseOneGraph(tensor_class))


def _skip_our_files(trace_rules: types.ModuleType) -> None:
    torch_compat.skip_package(trace_rules, "hyper_parallel")


class _RefuseOneGraph:
    """Says why and what to do, where Dynamo would say that it cannot call ``__mul__``."""

    def __init__(self, tensor_class: type) -> None:
        self.tensor_class = tensor_class

    def __call__(self, module: types.ModuleType) -> None:
        torch_compat.show_dynamo(module, self.tensor_class, _wrapped)


def _wrapped(builder: Any, value: Any) -> Any:
    """How Dynamo sees a DTensor: as an object of which it knows nothing."""
    if builder.tx.one_graph or builder.tx.error_on_graph_break:
        torch_compat.refuse_graph("DTensor of hyper_parallel", type(value).__name__, _REASON)
    return builder.wrap_user_defined(value)
