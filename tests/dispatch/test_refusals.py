"""What is refused says what to do instead, and what it says works."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

import hyper_parallel
from hyper_parallel import (
    DFunction,
    DistributedOp,
    Replicate,
    Shard,
    custom_shard,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    parallelize_module,
    redistribute_policy,
)
from hyper_parallel.errors import MissingOpError
from hyper_parallel.registry.registry import Registry, use_registry
from hyper_parallel.testing import mesh_of


def spread(value, *placements):
    return distribute_tensor(value, mesh_of((2,)), placements or [Shard(0)])


BATCHED = {"method": lambda t: t * 2, "function": torch.sum, "two": lambda t: t.relu() + 1, "product": lambda t: t @ t}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", BATCHED)
def test_vmap(name):
    function = BATCHED[name]
    x = spread(torch.ones(5, 3))
    for vmap in (torch.vmap, torch.func.vmap):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"torch\.vmap does not know of layouts.*custom_shard"):
                vmap(function)(x)
    inside = custom_shard(torch.vmap(function), device_mesh=mesh_of((2,)), out_layouts=[Shard(0)])
    torch.testing.assert_close(inside(x).full_tensor(), torch.vmap(function)(torch.ones(5, 3)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["grad", "jacrev", "vjp"])
def test_transforms_of_torch_func(name):
    x = spread(torch.ones(5, 3))
    transform = getattr(torch.func, name)
    with pytest.raises(RuntimeError, match=r"torch\.func's transforms.*torch\.autograd\.grad"):
        transform(lambda t: (t * t).sum(), x) if name == "vjp" else transform(lambda t: (t * t).sum())(x)
    x.requires_grad_()
    (grad,) = torch.autograd.grad((x * x).sum(), x)
    torch.testing.assert_close(grad.full_tensor(), torch.full((5, 3), 2.0))


@pytest.mark.ranks(2)
def test_distributed_data_parallel():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    parallelize_module(
        model, mesh["tp"], {"0": hyper_parallel.ColwiseParallel(), "1": hyper_parallel.RowwiseParallel()}
    )
    with pytest.raises(RuntimeError, match=r'(?s)data parallelism.*fully_shard\(model, mesh=mesh\["dp"\]\)'):
        DistributedDataParallel(model)
    fully_shard(model, mesh=mesh["dp"])(torch.ones(2, 4)).sum().backward()


@pytest.mark.ranks(2)
def test_spectral_norm():
    torch.manual_seed(0)
    twin = nn.Linear(4, 6, bias=False)
    layer = nn.Linear(4, 6, bias=False)
    layer.weight = nn.Parameter(spread(twin.weight.detach()))
    torch.manual_seed(1)
    parametrizations.spectral_norm(twin)
    torch.manual_seed(1)
    with pytest.raises(ValueError, match=r"out= is laid out.*redistribute_policy\('auto'\).*spectral_norm"):
        parametrizations.spectral_norm(layer)
    torch.manual_seed(1)
    with redistribute_policy("auto"):
        parametrizations.spectral_norm(layer)
        out = layer(spread(torch.ones(2, 4), Replicate()))
    torch.testing.assert_close(out.full_tensor(), twin(torch.ones(2, 4)))


class Doubled(DFunction):
    _op_name = "doubled_by_nobody"

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class DoubledOp(DistributedOp):
    def infer_layout(self, cache_values):
        return (cache_values[0],), None


@pytest.mark.ranks(2)
def test_a_function_whose_op_nobody_registered():
    x = spread(torch.ones(5))
    with use_registry(Registry()):
        for _ in range(2):
            with pytest.raises(
                MissingOpError, match=r"Doubled\.apply.*'doubled_by_nobody'(?s:.)*YourOp\('doubled_by_nobody'\)"
            ):
                Doubled.apply(x)
        assert Doubled.apply(torch.ones(1)).item() == 2
        DoubledOp("doubled_by_nobody")
        assert Doubled.apply(x).full_tensor().tolist() == [2.0] * 5


def small_llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["tp", "fsdp"])
def test_methods_of_transformers_models(name, tmp_path):
    model, mesh = small_llama(), init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
    assert model.resize_token_embeddings(34).weight.shape == (34, 16)  # first, as the error says
    parallelize_module(model, mesh) if name == "tp" else fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError, match=r"resize first, then call parallelize_module"):
        model.resize_token_embeddings(40)
    with pytest.raises(RuntimeError, match=r"leave state_dict out, on all ranks"):
        model.save_pretrained(tmp_path / "refused", state_dict=model.state_dict())
    with pytest.raises(NotImplementedError, match=r"save_pretrained\(push_to_hub=True\).*upload_folder"):
        model.save_pretrained(tmp_path / "refused", push_to_hub=True)
    assert not (tmp_path / "refused").exists()
    rank = torch.distributed.get_rank()
    whole = {key: value.full_tensor() for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / f"whole{rank}", state_dict=whole)


@pytest.mark.ranks(2)
def test_the_file_of_safetensors():
    safetensors = pytest.importorskip("safetensors.torch")
    with pytest.raises(MissingOpError, match=r"hyper_parallel\.checkpoint\.save_safetensors\(model, folder\)"):
        safetensors.save({"x": spread(torch.ones(3))})
