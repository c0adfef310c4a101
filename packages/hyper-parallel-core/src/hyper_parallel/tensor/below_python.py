"""What to do instead, for the error about C++ code that met a DTensor: it depends on which part of PyTorch called.

The text only; whether something is refused does not depend on who calls.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["instead"]

_VMAP = (
    "torch.vmap does not know of layouts: operators on DTensors take any number of dims in front, so write the "
    "function with one (x @ w, torch.einsum); or vmap a function of local tensors inside of hyper_parallel.custom_shard"
)
_FUNC = (
    "torch.func's transforms do not know of layouts: torch.autograd.grad, with create_graph=True for higher "
    "derivatives, does what grad, vjp and jacrev do; or transform a function of local tensors inside of "
    "hyper_parallel.custom_shard"
)
_DATA_PARALLEL = (
    "PyTorch's own data parallelism flattens plain parameters. For data parallelism around a model that is spread over "
    'tp: hyper_parallel.fully_shard(model, mesh=mesh["dp"]) of a mesh with both axes'
)
_ANY = (
    "Call the operator through torch (torch.*, Tensor methods, torch.ops.*), or pass to_local() if the code is meant "
    "for this rank's piece"
)
# By the module that called; the more special comes first.
_CALLERS = {
    "torch._functorch.vmap": _VMAP,
    "torch._functorch": _FUNC,
    "torch.nn.parallel": _DATA_PARALLEL,
    "torch.distributed.fsdp": _DATA_PARALLEL,
    "torch.distributed._composable": _DATA_PARALLEL,
}


def instead() -> str:
    """The advice for the part of PyTorch that called last."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        caller = frame.f_globals.get("__name__", "")
        for module, text in _CALLERS.items():
            if caller == module or caller.startswith(f"{module}."):
                return text
        frame = frame.f_back
    return _ANY
