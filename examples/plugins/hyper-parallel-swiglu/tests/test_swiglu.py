"""The pack against one device, on every kind of layout, forward and backward."""

import hyper_parallel_swiglu.operators  # noqa: F401 - defines torch.ops.hyper_parallel_swiglu
import torch
import torch.nn.functional as F

from hyper_parallel.testing import OpConformance, PluginContract, sample, tensor


class TestPlugin(PluginContract):
    plugin = "swiglu"


class TestSwiglu(OpConformance):
    op = torch.ops.hyper_parallel_swiglu.swiglu
    samples = (sample(tensor(4, 8)), sample(tensor(2, 3, 6)), sample(tensor(5, 2)))

    @staticmethod
    def reference(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return (F.silu(gate) * up).contiguous()


class TestSiluMul(OpConformance):
    op = torch.ops.hyper_parallel_swiglu.silu_mul
    samples = (sample(tensor(4, 6), tensor(4, 6)), sample(tensor(5, 1), tensor(5, 1)))

    @staticmethod
    def reference(gate, up):
        return (F.silu(gate) * up).contiguous()
