"""Global shapes of an operator's outputs, for rules whose placements depend on them."""

from __future__ import annotations

import torch

from hyper_parallel.call import Call


def output_shapes(call: Call) -> list[tuple[int, ...]]:
    """Shapes of the tensors that the call's function returns, found on meta tensors."""
    from hyper_parallel.plan import meta_arguments

    with torch.no_grad():
        kwargs = {name: meta_arguments(value) for name, value in call.kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = "meta"
        result = call.func(*meta_arguments(call.args), **kwargs)
    return [tuple(t.shape) for t in (result if isinstance(result, (tuple, list)) else (result,))]
