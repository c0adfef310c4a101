"""Both ways to make a wrapper give the same tensor: PyTorch's constructor may go, the other stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hyper_parallel import DTensor
from hyper_parallel.sharding.spec import TensorMeta
from hyper_parallel.tensor.wrapper import _new_wrapper, new_wrapper

METADATA = ("shape", "dtype", "device", "requires_grad", "is_leaf")


def facts(wrapper: Any) -> dict[str, Any]:
    with torch._C.DisableTorchFunctionSubclass():
        found = {name: getattr(torch.Tensor, name).__get__(wrapper) for name in METADATA}
        found |= {"stride": torch.Tensor.stride(wrapper), "inference": torch.Tensor.is_inference(wrapper)}
        return found | {"keys": torch._C._dispatch_keys(wrapper)}


@pytest.mark.parametrize("shape", [(4, 6), (), (0, 3)])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_both_make_the_same_wrapper(shape, requires_grad, mode):
    whole = torch.empty(shape, dtype=torch.bfloat16)
    spec = SimpleNamespace(tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype))
    with mode():
        local = torch.zeros(2, dtype=whole.dtype, requires_grad=requires_grad)
        made = [make(DTensor, local, spec, requires_grad) for make in (new_wrapper, _new_wrapper)]
        assert facts(made[0]) == facts(made[1])
    for wrapper in made:
        assert wrapper._local is local
        assert wrapper._spec is spec
        assert not hasattr(wrapper, "_local_tensor")  # by which some libraries recognise PyTorch's DTensor


def test_cpp_code_that_meets_a_wrapper_ends_in_torch_dispatch():
    spec = SimpleNamespace(tensor_meta=TensorMeta(torch.Size([2]), (1,), torch.float32))
    for make in (new_wrapper, _new_wrapper):
        wrapper = make(DTensor, torch.zeros(1), spec, False)
        wrapper._pending = None
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="below PyTorch's Python layer"):
            torch.Tensor.exp(wrapper)
