"""The functions that users of these packs name: each has a rule, and fused and plain forms share one."""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import Partial, Replicate, Shard, distribute_tensor
from hyper_parallel.registry import Registry
from hyper_parallel.testing import OpConformance, sample, tensor
from hyper_parallel.testing.placing import mesh_of

NAMES = (
    "cpu", "cross_entropy", "gather", "histc", "index_add_", "new_zeros", "npu_rms_norm", "npu_rotary_mul", "tolist",
    "type_as", "vstack", "conv1d", "softplus", "to", "tril", "greater", "one_hot", "where", "bool", "scatter_",
    "clamp_", "_grouped_mm", "rms_norm", "rotary_mul", "_fused_adamw_",
)  # fmt: skip
FUNCTIONS = {
    "cpu": torch.Tensor.cpu,
    "cross_entropy": F.cross_entropy,
    "index_add_": torch.Tensor.index_add_,
    "tolist": torch.Tensor.tolist,
    "conv1d": F.conv1d,
    "to": torch.Tensor.to,
    "greater": torch.greater,
    "bool": torch.Tensor.bool,
    "scatter_": torch.Tensor.scatter_,
    "clamp_": torch.Tensor.clamp_,
    "rms_norm": F.rms_norm,
    "_grouped_mm": F.grouped_mm,
    "_fused_adamw_": torch._fused_adamw_,
}


@pytest.fixture(scope="module")
def registry():
    return Registry()


@pytest.mark.parametrize("name", NAMES)
def test_has_a_rule(registry, name):
    found = registry.find(FUNCTIONS[name]) if name in FUNCTIONS else registry.get(name)
    assert found is not None


def test_a_rule_listed_by_several_packs_is_one(registry):
    """Counting tokens by expert is what both families need; ops-basic has it, and the packs list it."""
    providers = [entry.provider for entry in registry.entries("histc")]
    assert providers == ["ops-basic", "ops-deepseek", "ops-qwen"]
    assert len({entry.class_path for entry in registry.entries("histc")}) == 1
    assert registry.find(torch.histc) is registry.chosen("histc").op


class Quick(OpConformance):
    meshes = ((4,), (2, 2))
    max_layouts = 16


class TestGreater(Quick):
    op = torch.greater
    samples = (sample(tensor(5, 6), tensor(6)), sample(tensor(5, 1), 0.5))


class TestCpu(Quick):
    op = torch.Tensor.cpu
    samples = (sample(tensor(5, 6)),)


class TestClamp(Quick):
    op = torch.clamp
    inplace = "clamp_"
    samples = (sample(tensor(5, 6), -0.5, 0.5), sample(tensor(3, dtype=torch.int64), max=2))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "for loop"])
def test_adamw_fused_or_not_takes_the_same_step(fused):
    torch.manual_seed(0)
    value, gradient = torch.randn(5, 6), torch.randn(5, 6)
    plain = torch.nn.Parameter(value.clone())
    mine = torch.nn.Parameter(distribute_tensor(value, mesh_of((4,)), [Shard(0)]))
    plain.grad, mine.grad = gradient, distribute_tensor(gradient, mesh_of((4,)), [Shard(0)])
    for parameter in (plain, mine):
        torch.optim.AdamW([parameter], lr=0.1, fused=fused or None, foreach=False if not fused else None).step()
    assert mine.placements == (Shard(0),)
    torch.testing.assert_close(mine.detach().full_tensor(), plain.detach())


@pytest.mark.ranks(4)
def test_the_plain_and_the_fused_norm_are_sharded_alike():
    from hyper_parallel_ops_deepseek import reference

    for placement, of_weight in ((Shard(0), Replicate()), (Shard(1), Shard(0)), (Partial(), Replicate())):
        x = distribute_tensor(torch.randn(3, 8), mesh_of((4,)), [placement])
        weight = distribute_tensor(torch.rand(8), mesh_of((4,)), [of_weight])
        plain, (fused, _) = F.rms_norm(x, (8,), weight, 1e-6), reference.npu_rms_norm(x, weight)
        assert plain.placements == fused.placements
        torch.testing.assert_close(plain.full_tensor(), fused.full_tensor())
