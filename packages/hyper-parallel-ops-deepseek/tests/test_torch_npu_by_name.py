"""The rules serve ``torch_npu``'s functions as soon as somebody has imported it."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch

from hyper_parallel import Shard, distribute_tensor
from hyper_parallel.registry import Registry
from hyper_parallel.testing.placing import mesh_of
from hyper_parallel_ops_deepseek import reference

NAMES = sorted(name for name in reference.__all__ if name.startswith("npu_"))
HAS_NPU = importlib.util.find_spec("torch_npu") is not None


@pytest.fixture
def torch_npu(monkeypatch):
    """A stand-in for the module, with functions of its own."""
    if HAS_NPU:
        pytest.skip("torch_npu itself is here: see test_real_operators")
    module = types.ModuleType("torch_npu")
    for name in NAMES:
        setattr(module, name, reference._overridable(getattr(reference, name).__wrapped__))
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_the_same_rule_serves_both(torch_npu, name):
    registry = Registry()
    mine, theirs = registry.find(getattr(reference, name)), registry.find(getattr(torch_npu, name))
    assert mine is not None
    assert type(mine) is type(theirs)


def test_bare_names_are_registered():
    registry = Registry()
    for name in (*NAMES, "rotary_mul"):
        assert registry.get(name) is not None


@pytest.mark.ranks(2)
def test_a_call_through_the_module_takes_the_rule():
    module = types.ModuleType("torch_npu")
    calls = []

    @reference._overridable
    def npu_swiglu(self, dim=-1):
        calls.append(tuple(self.shape))
        return reference.npu_swiglu(self, dim)

    module.npu_swiglu = npu_swiglu
    sys.modules["torch_npu"] = module
    try:
        x = torch.randn(4, 6)
        out = module.npu_swiglu(distribute_tensor(x, mesh_of((2,)), [Shard(0)]))
        assert calls == [(2, 6)], "the kernel sees this rank's rows"
        torch.testing.assert_close(out.full_tensor(), reference.npu_swiglu(x))
    finally:
        del sys.modules["torch_npu"]


@pytest.mark.ranks(2)
def test_operators_beneath_the_functions_are_served_too():
    """``torch.ops.npu.*``, which some integrations call."""
    if HAS_NPU:
        pytest.skip("torch_npu defines this operator itself")
    if not hasattr(torch.ops.npu, "npu_swiglu"):
        schema = "(Tensor self, int dim=-1) -> Tensor"
        torch.library.custom_op("npu::npu_swiglu", reference.npu_swiglu.__wrapped__, mutates_args=(), schema=schema)
    x = torch.randn(4, 6)
    out = torch.ops.npu.npu_swiglu(distribute_tensor(x, mesh_of((2,)), [Shard(0)]))
    assert out.placements == (Shard(0),)
    torch.testing.assert_close(out.full_tensor(), reference.npu_swiglu(x))


@pytest.mark.skipif(not HAS_NPU, reason="torch_npu is not installed: there is no NPU to run its operators on")
def test_real_operators_equal_the_reference():
    import torch_npu

    def on_npu(*tensors):
        return [t.half().npu() for t in tensors]

    x, gamma, cos, sin = torch.randn(2, 4, 8, 64), torch.rand(64), torch.rand(1, 1, 8, 64), torch.rand(1, 1, 8, 64)
    pairs = [
        (torch_npu.npu_rms_norm(*on_npu(x, gamma))[0], reference.npu_rms_norm(x, gamma)[0]),
        (torch_npu.npu_add_rms_norm(*on_npu(x, x, gamma))[0], reference.npu_add_rms_norm(x, x, gamma)[0]),
        (torch_npu.npu_rotary_mul(*on_npu(x, cos, sin)), reference.npu_rotary_mul(x, cos, sin)),
        (torch_npu.npu_swiglu(*on_npu(x)), reference.npu_swiglu(x)),
        (
            torch_npu.npu_fusion_attention(*on_npu(x, x, x), 4, "BNSD", scale=0.125)[0],
            reference.npu_fusion_attention(x, x, x, 4, "BNSD", scale=0.125)[0],
        ),
    ]
    for got, want in pairs:
        torch.testing.assert_close(got.cpu().float(), want, rtol=1e-2, atol=1e-2)
