"""Libraries whose ``autograd.Function``s are kernels: without a rule these are refused by name before they run.

An ``autograd.Function`` that is written in torch functions works on DTensors and is let alone. Those of the libraries
listed here hand the memory of their arguments to a kernel, in C++ where no error of ours can name them.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

from hyper_parallel.errors import MissingOpError

__all__ = ["KERNEL_PACKAGES", "refuse_kernels_without_rules"]

KERNEL_PACKAGES = {
    "apex": "apex",
    "causal_conv1d": "causal-conv1d",
    "cut_cross_entropy": "cut-cross-entropy",
    "fla": "flash-linear-attention",
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn 3",
    "flash_mla": "flash-mla",
    "grouped_gemm": "grouped-gemm",
    "liger_kernel": "liger-kernel",
    "mamba_ssm": "mamba-ssm",
    "quack": "quack-kernels",
    "scattermoe": "scattermoe",
    "transformer_engine": "transformer-engine",
    "unsloth": "unsloth",
    "xformers": "xformers",
}
"""What people call each, by the name of its top module."""

# Kernels of the Hugging Face hub are imported from such folders, under names with a hash.
_HUB_FOLDER = re.compile(r"[/\\]build[/\\]torch[^/\\]*[/\\]")
_MARK = "_refuses_dtensors"


def refuse_kernels_without_rules() -> None:
    """From now on; a rule that names an ``apply`` takes its place (see ``autograd_functions``)."""
    import torch  # the registry is read without torch too

    base: Any = torch.autograd.Function
    if getattr(base.__dict__.get("__init_subclass__"), _MARK, False):
        return
    before = base.__init_subclass__

    def init_subclass(cls: Any, /, **options: Any) -> None:
        before(**options)
        _refuse(cls)

    hook: Any = classmethod(init_subclass)
    setattr(hook, _MARK, True)
    base.__init_subclass__ = hook
    pending = base.__subclasses__()
    while pending:
        cls = pending.pop()
        _refuse(cls)
        pending += cls.__subclasses__()


def _package_of(function: Any) -> str | None:
    """The library with kernels that a class is of; None for other classes."""
    module = function.__module__
    found = KERNEL_PACKAGES.get(module.partition(".")[0])
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "a kernel of the Hugging Face hub" if found is None and _HUB_FOLDER.search(file) else found


def _refuse(function: Any) -> None:
    """Let the ``apply`` of a class of these libraries refuse DTensors."""
    package = _package_of(function)
    if package is None or getattr(function.apply, _MARK, False):
        return  # or its parent's refuses for it
    plain: Any = inspect.getattr_static(function, "apply")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from hyper_parallel.context import state
        from hyper_parallel.tensor.dtensor import DTensor
        from hyper_parallel.tensor.raw_memory import apply_name, how_to_serve
        from hyper_parallel.utils.structures import map_structure, tensors_of

        if any(isinstance(tensor, DTensor) for tensor in tensors_of((args, kwargs))):
            if not state.mode.skip:
                text = f"{apply_name(cls)} ({package}) computes by a kernel, which knows nothing of DTensors"
                raise MissingOpError(f"{text}\n{how_to_serve(cls)}", func=cls.apply, op_name=apply_name(cls))
            args, kwargs = map_structure((args, kwargs), lambda t: t.to_local() if isinstance(t, DTensor) else t)
        return plain.__get__(None, cls)(*args, **kwargs)

    setattr(apply, _MARK, True)
    apply.__qualname__, apply.__module__ = f"{function.__qualname__}.apply", function.__module__
    function.apply = classmethod(apply)
