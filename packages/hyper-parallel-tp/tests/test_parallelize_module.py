"""parallelize_module: plans, names, ties, sources of parameters, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.tensor.parallel as torchs
from torch import nn
from torch.distributed.fsdp import fully_shard
from tp_models import Decoder, Mlp, check_gradients, twins

import hyper_parallel
from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    NoParallel,
    ParallelStyle,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    ShardingPlan,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)

MLP = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def tp_mesh(size=2):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def double(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class OfPyTorchsKind(torchs.ParallelStyle):
    def _apply(self, module, device_mesh):
        return module


@pytest.mark.ranks(2)
def test_names_are_those_of_pytorch_and_of_the_rfc():
    from hyper_parallel.core import tensor_parallel

    for name in ("ColwiseParallel", "NoParallel", "ParallelStyle", "PrepareModuleInputOutput", "parallelize_module"):
        assert getattr(tensor_parallel, name) is getattr(hyper_parallel, name)


@pytest.mark.ranks(2)
def test_a_plan_of_names_globs_and_nested_plans():
    model, twin = twins(lambda: nn.ModuleDict({"layers": nn.ModuleList(Mlp() for _ in range(2)), "head": Mlp()}))
    plan = {
        "layers.[0-8]": {"gate": ColwiseParallel(), "[t-v]?": ColwiseParallel(), "[!gu]*": RowwiseParallel()},
        "**.gate": NothingToDo(),
        "head": {"": NothingToDo(), "gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()},
    }
    assert parallelize_module(model, tp_mesh(), plan) is model
    x = double(3, 8)
    out, want = x, x
    for mlp, plain in zip([*model["layers"], model["head"]], [*twin["layers"], twin["head"]], strict=True):
        assert mlp.up.weight.placements == (Shard(0),)
        assert mlp.down.weight.placements == (Shard(1),)
        assert mlp.gate.seen == 1
        out, want = mlp(out), plain(want)
    torch.testing.assert_close(out, want)
    out.pow(2).sum().backward()
    want.pow(2).sum().backward()
    check_gradients(model, twin)


class NothingToDo(ParallelStyle):
    """Counts how often it is applied to a module."""

    def apply(self, module, device_mesh):
        module.seen = getattr(module, "seen", 0) + 1
        return module


@pytest.mark.ranks(2)
def test_a_style_for_the_module_itself_and_a_sharding_plan():
    linear, twin = twins(lambda: nn.Linear(8, 6))
    parallelize_module(linear, tp_mesh(), ColwiseParallel(output_layouts=Replicate()))
    x = double(3, 8)
    torch.testing.assert_close(linear(x), twin(x))
    model, twin = twins(Mlp)
    plan = {"gate.weight": [Shard(0)], "up.weight": [Shard(0)], "down.weight": [Shard(1)]}
    parallelize_module(model, tp_mesh(), ShardingPlan(plan=plan, return_local_tensor=True))
    torch.testing.assert_close(model(x), twin(x))


@pytest.mark.ranks(2)
def test_applying_changes_no_style():
    style = ColwiseParallel()
    before = copy.deepcopy(vars(style))
    for seed, source in ((0, 0), (1, None), (2, 1)):
        layer, _ = twins(lambda: nn.Linear(8, 6), seed=seed)
        parallelize_module(layer, tp_mesh(), {"": style}, src_data_rank=source)
    layer, _ = twins(lambda: nn.Linear(8, 6))
    assert style.apply(layer, tp_mesh()) is layer
    assert layer.weight.placements == (Shard(0),)
    assert vars(style) == before
    assert style.src_data_rank == 0


@pytest.mark.ranks(2)
def test_what_is_refused():
    model, _ = twins(Decoder)
    with pytest.raises(ValueError, match=r"1-D mesh, got dp=1xtp=2; slice .*mesh\['tp'\]"):
        parallelize_module(model, init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), {})
    with pytest.raises(ValueError, match=r"layers\.0\.mpl\.up.*means no module.*did you mean.*layers\.0\.mlp\.up"):
        parallelize_module(model, tp_mesh(), {"layers.0.mpl.up": ColwiseParallel()})
    with pytest.raises(ValueError, match="'atention' means no module"):
        parallelize_module(model, tp_mesh(), {"head": ColwiseParallel(), "layers.*": {"atention": ColwiseParallel()}})
    for word, said in {
        "colwise": r"; the style for that is ColwiseParallel\(\)",
        "rowwise": r"; the style for that is RowwiseParallel\(\)",
        "colwise_rep": r"; the style for that is ColwiseParallel\(output_layouts=Replicate\(\)\)",
        "replicate": r"; the style for that is NoParallel\(\)",
        "sequence_parallel": r"; the style for that is SequenceParallel\(\)",
        "column": r"; a style is an object, such as ColwiseParallel\(\)",
    }.items():
        with pytest.raises(TypeError, match=rf"for 'layers\.\*' takes a ParallelStyle.*got the word '{word}'{said}$"):
            parallelize_module(model, tp_mesh(), {"layers.*": word})
    with pytest.raises(TypeError, match="got the word 'auto'; the model's own plan is used where none is given"):
        parallelize_module(model, tp_mesh(), "auto")
    for given, said in {
        ColwiseParallel: r"the class ColwiseParallel; make a style of it: ColwiseParallel\(\)",
        torchs.ColwiseParallel(): "PyTorch's ColwiseParallel; import that of this library",
        OfPyTorchsKind(): r"OfPyTorchsKind, a style of PyTorch's kind; derive it from hyper_parallel\.ParallelStyle",
    }.items():
        with pytest.raises(TypeError, match=f"for 'head' takes a ParallelStyle.*got {said}"):
            parallelize_module(model, tp_mesh(), {"head": given})
    with pytest.raises(TypeError, match=r"names in a plan are strings.*got 0"):
        parallelize_module(model, tp_mesh(), {0: ColwiseParallel()})
    with pytest.raises(ValueError, match=r"given no mesh .* pass one"):
        parallelize_module(model, parallelize_plan={"head": ColwiseParallel()})
    with pytest.raises(TypeError, match=r"'weight' of shape \(\.\.\., 8\), and .*Linear has no such parameter"):
        parallelize_module(nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)), tp_mesh(), ColwiseParallel())
    with pytest.raises(TypeError, match=r"ColwiseParallel splits nn\.Linear and nn\.Embedding.*got RMSNorm"):
        parallelize_module(model, tp_mesh(), {"norm": ColwiseParallel()})
    with pytest.raises(TypeError, match=r"takes an nn\.Module, got list"):
        parallelize_module([model], tp_mesh(), {"head": ColwiseParallel()})
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"1 placements .* mesh of 2 axes .*, or slice the mesh, such as mesh\['tp'\]"):
        ColwiseParallel().apply(nn.Linear(8, 6), mesh)
    mlp = Mlp()
    with pytest.warns(UserWarning, match="no plan was given and none is known for Mlp; nothing is done"):
        parallelize_module(mlp, tp_mesh())
    assert not any(isinstance(p, DTensor) for p in [*mlp.parameters(), *model.parameters()])


@pytest.mark.ranks(2)
def test_a_module_is_parallelised_once_and_before_it_is_fully_sharded():
    model, _ = twins(Mlp)
    parallelize_module(model, tp_mesh(), {"gate": ColwiseParallel()})
    parallelize_module(model, tp_mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with pytest.raises(ValueError, match=r"parameter 'weight' of Linear is laid out as .* already"):
        parallelize_module(model, tp_mesh(), {"down": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"style that takes all that is left, such as NoParallel, comes after those"):
        parallelize_module(twins(Mlp)[0], tp_mesh(), {"": NoParallel(), **MLP})
    data = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    other, _ = twins(Mlp)
    other.up.weight = nn.Parameter(distribute_tensor(other.up.weight.detach(), data, [Shard(0)]))
    with pytest.raises(ValueError, match=r"'up\.weight' is spread over the mesh.*then fully_shard"):
        parallelize_module(other, tp_mesh(), MLP)
    fully_shard(fsdp := nn.Linear(4, 4), mesh=data)
    with pytest.raises(ValueError, match=r"Tensor parallelism comes first.*mesh\['tp'\]"):
        parallelize_module(fsdp, tp_mesh(), ColwiseParallel())


def from_rank(source):
    torch.manual_seed(torch.distributed.get_rank())
    model = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 5))
    mine = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        mine[2].add_(0)
    styles = {"0": ColwiseParallel(), "1": SequenceParallel(), "2": RowwiseParallel()}
    parallelize_module(model, tp_mesh(3), styles, src_data_rank=source)
    return mine, [p.detach().to_local() for p in model.parameters()]


def test_parameters_come_from_the_source_rank(ranks):
    for source in (0, 2, None):
        results = ranks(3, from_rank, source)
        for rank, (mine, local) in enumerate(results):
            weight, bias, norm, _, down, down_bias = mine if source is None else results[source][0]
            want = [weight[2 * rank : 2 * rank + 2], bias[2 * rank : 2 * rank + 2], norm, local[3]]
            want += [down[:, 2 * rank : 2 * rank + 2], down_bias]
            for found, expected in zip(local, want, strict=True):
                torch.testing.assert_close(found, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", [16, 13])
def test_tied_embeddings_stay_tied_with_one_gradient(tied, vocabulary):
    model, twin = twins(lambda: Decoder(vocabulary, tied=tied))
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.mlp": MLP,
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, tp_mesh(), plan)
    assert (model.head.weight is model.embed.weight) == tied
    ids = torch.tensor([[1, 12, 3, 3], [0, 9, 12, 5]])
    model(ids).pow(2).sum().backward()
    twin(ids).pow(2).sum().backward()
    check_gradients(model, twin)


@pytest.mark.ranks(2)
def test_a_tied_parameter_has_one_layout():
    model, _ = twins(lambda: Decoder(tied=True))
    with pytest.raises(ValueError, match="A tied parameter has one layout"):
        parallelize_module(model, tp_mesh(), {"embed": ColwiseParallel(), "head": ColwiseParallel()})


@pytest.mark.ranks(2)
def test_frozen_parameters_stay_frozen_and_attributes_travel():
    model, _ = twins(lambda: Mlp(bias=True))
    model.gate.requires_grad_(False)
    model.up.weight.mark = "mine"
    parallelize_module(model, tp_mesh(), MLP)
    assert not model.gate.weight.requires_grad
    assert not model.gate.bias.requires_grad
    assert model.up.weight.requires_grad
    assert model.up.weight.mark == "mine"
    model(double(3, 8)).sum().backward()
    assert model.gate.weight.grad is None
    assert model.up.bias.grad is not None


@pytest.mark.ranks(2)
def test_a_copy_of_a_parallelised_model_is_its_own():
    model, twin = twins(Decoder)
    plan = {"layers.*.mlp": MLP, "": NoParallel()}
    copied = copy.deepcopy(parallelize_module(model, tp_mesh(), plan))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ids = torch.tensor([[1, 12, 3, 3]])
    torch.testing.assert_close(copied(ids), twin(ids))


@pytest.mark.ranks(2)
def test_a_parallelised_model_is_saved_by_its_state_dict():
    """Pickled, its forward would come back as that of its class."""
    model, twin = twins(Mlp)
    parallelize_module(model, tp_mesh(), MLP)
    for save in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(TypeError, match=r"forward was replaced .* cannot be pickled: save .*model\.state_dict\(\)"):
            save(model)
    copied, _ = twins(Mlp, seed=1)
    parallelize_module(copied, tp_mesh(), MLP).load_state_dict(pickle.loads(pickle.dumps(model.state_dict())))
    torch.testing.assert_close(copied(double(3, 8)), twin(double(3, 8)))
    assert copy.copy(model).down.weight is model.down.weight


@pytest.mark.ranks(2)
def test_a_model_on_the_meta_device_is_sharded_there():
    with torch.device("meta"):
        model = Decoder(vocabulary=13)
    plan = {"embed": RowwiseParallel(), "layers.*.mlp": MLP, "head": ColwiseParallel(), "": NoParallel()}
    parallelize_module(model, tp_mesh(), plan)
    rank = torch.distributed.get_rank()
    assert model.embed.weight.is_meta
    assert model.embed.weight.to_local().shape == ((7, 8), (6, 8))[rank]
    model.to_empty(device="cpu")
    assert not model.embed.weight.is_meta
    assert model.embed.weight.to_local().shape == ((7, 8), (6, 8))[rank]
    assert model.norm.weight.placements == (Replicate(),)
