"""What is wrong with a LoRA adapter that came after parallelize_module, where it cannot work.

No style knows of such an adapter: it is whole on every rank and sees what the caller gives to the layer. That is right
where the layer takes a whole input and gives a DTensor. Where the style gathers the layer's input (a piece of the
sequence), or hands out a plain piece, layer and adapter give values that do not go together, and the error that follows
speaks of an addition inside of the adapter's library.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import DTensor
from hyper_parallel.errors import RedistributionError
from hyper_parallel.rules import forward_function, set_forward

__all__ = ["explain_late_adapters"]


def explain_late_adapters(module: nn.Module) -> None:
    """Let errors that come out of a layer with such an adapter say so, in the module's forward."""
    if getattr(module.forward, "_explains_adapters", False):
        return
    function = forward_function(module)

    @functools.wraps(function)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except (torch.OutOfMemoryError, dist.DistError):  # whoever asks for memory or talks to the others may get them
            raise
        except (RedistributionError, RuntimeError) as error:
            name = _raised_in(self, error)
            if name is None:
                raise
            raise ValueError(
                f"{name}: its adapters were added after parallelize_module, so no style split them: they meet the "
                "layer's input and output as the caller has them (here pieces). Add them first: "
                "model = get_peft_model(model, config), then parallelize_module(model, mesh, plan)"
            ) from error

    forward._explains_adapters = True  # type: ignore[attr-defined]
    set_forward(module, forward)


def _raised_in(module: nn.Module, error: BaseException) -> str | None:
    """The name of the layer with late adapters whose forward raised the error."""
    running = set()
    traceback = error.__traceback__
    while traceback is not None:
        running.add(id(traceback.tb_frame.f_locals.get("self")))
        traceback = traceback.tb_next
    return next((name for name, m in module.named_modules() if id(m) in running and _has_late_adapters(m)), None)


def _has_late_adapters(module: nn.Module) -> bool:
    """Whether a LoRA layer of peft is around a layer that is spread, and its adapters are not."""
    base = getattr(module, "base_layer", None)
    if not isinstance(base, nn.Module) or not any(isinstance(p, DTensor) for p in base.parameters(recurse=False)):
        return False
    adapters = [p for group in ("lora_A", "lora_embedding_A") for p in getattr(module, group, nn.Module()).parameters()]
    return any(not isinstance(p, DTensor) for p in adapters)
