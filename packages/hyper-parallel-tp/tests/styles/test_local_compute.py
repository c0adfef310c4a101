"""``LocalCompute``: a module's own code on this rank's pieces of its parameters and inputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from tp_models import check_gradients, hidden, mesh, twins, whole

from hyper_parallel import (
    CommTrace,
    DTensor,
    LocalCompute,
    PackedShard,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Experts(nn.Module):
    """Each expert has its own slice of one parameter; the code reads the parameters' shapes."""

    def __init__(self, experts=3, inner=6):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(experts, inner, 8))
        self.down = nn.Parameter(torch.zeros(experts, 8, inner))
        self.scale = nn.Parameter(torch.zeros(experts))

    def forward(self, x, weights):
        assert type(x) is type(weights) is torch.Tensor or type(self.up) is nn.Parameter
        out = torch.zeros_like(x)
        for e in range(self.up.shape[0]):
            inner = torch.relu(x @ self.up[e].T).reshape(*x.shape[:-1], self.down.shape[2])
            out = out + self.scale[e] * weights[..., e, None] * (inner @ self.down[e].T)
        return out


@pytest.mark.ranks(2)
def test_experts_compute_on_this_ranks_pieces():
    model, twin = twins(Experts)
    parallelize_module(model, mesh(), LocalCompute(parameters={"up": Shard(1), "down": Shard(2)}))
    x, w = distribute_tensor(hidden(), mesh(), [R]).requires_grad_(), hidden(2, 4, 3).requires_grad_()
    y, v = hidden().requires_grad_(), hidden(2, 4, 3).requires_grad_()
    out, want = model(x, weights=w), twin(y, v)
    assert isinstance(model.up, DTensor)
    torch.testing.assert_close(out.full_tensor(), want)
    out.pow(2).sum().backward()
    want.pow(2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), y.grad)
    torch.testing.assert_close(w.grad, v.grad)
    check_gradients(model, twin)
    with pytest.raises(RuntimeError, match="shape"):
        model(hidden(2, 4, 7), hidden(2, 4, 3))
    assert isinstance(model.up, DTensor)  # also after an error


@dataclasses.dataclass
class Tokens:
    """What a module takes and returns."""

    hidden: torch.Tensor
    count: int = 3


class InStructures(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(6, 8)), nn.Parameter(torch.zeros(8, 6))

    def forward(self, tokens, *, more):
        y = torch.relu((tokens.hidden + more["offset"]) @ self.up.T) @ self.down.T
        return {"tokens": Tokens(y), "twice": [2 * y]}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", [None, R, S1], ids=["plain", "R", "S1"])
def test_tensors_inside_of_structures(placement):
    """They enter whole and leave as sums, as those do that are inputs and outputs themselves."""
    model, twin = twins(InStructures)
    parallelize_module(model, mesh(), LocalCompute(parameters={"up": S0, "down": S1}))
    x = hidden() if placement is None else distribute_tensor(hidden(), mesh(), [placement])
    x, y, offset = x.requires_grad_(), hidden().requires_grad_(), hidden(8)
    out = model(Tokens(x), more={"offset": offset})
    want = twin(Tokens(y), more={"offset": offset})
    torch.testing.assert_close(out["tokens"].hidden.full_tensor(), want["tokens"].hidden)
    torch.testing.assert_close(out["twice"][0].full_tensor(), want["twice"][0])
    (out["tokens"].hidden.pow(2).sum() + out["twice"][0].sum()).backward()
    (want["tokens"].hidden.pow(2).sum() + want["twice"][0].sum()).backward()
    torch.testing.assert_close(whole(x.grad), y.grad)
    check_gradients(model, twin)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("rows", [R, S0, S1], ids=["R", "S0", "S1"])
def test_experts_compute_with_their_part_of_a_batch_over_data_ranks(rows):
    """Of 3 rows, or 4 positions, over dp; parameters on the whole mesh, as fully_shard hands them out."""
    full = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, twin = twins(Experts)
    parallelize_module(model, full["tp"], LocalCompute(parameters={"up": Shard(1), "down": Shard(2)}))
    x, w = (distribute_tensor(hidden(3, 4, n), full, [rows, R]).requires_grad_() for n in (8, 3))
    if rows != R:
        with pytest.raises(ValueError, match=r"Experts got Layout\(tp=2.*beside Layout\(dp=2xtp=2.*fully_shard"):
            model(x, w)
    for name, parameter in list(model.named_parameters()):
        local = parameter.detach().to_local()
        laid_out = DTensor.from_local(local, full, [R, *parameter.placements], shape=parameter.shape)
        setattr(model, name, nn.Parameter(laid_out))
    y, v = hidden(3, 4, 8).requires_grad_(), hidden(3, 4, 3).requires_grad_()
    with CommTrace() as trace:
        out, want = model(x, w), twin(y, v)
    assert out.placements == (rows, R)
    assert trace.counts == {"all_reduce": 1}  # over tp alone
    torch.testing.assert_close(out.full_tensor(), want)
    out.pow(2).sum().backward()
    want.pow(2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), y.grad)
    torch.testing.assert_close(w.grad.full_tensor(), v.grad)
    check_gradients(model, twin)
    if rows != R:
        with pytest.raises(ValueError, match="along the dimension of the first that is"):
            model(x, w.redistribute(full, [S1 if rows == S0 else S0, R]))


class Heads(nn.Module):
    """A linear attention in small: heads counted by attributes, a norm of single heads, an output beside."""

    def __init__(self, heads=4, size=3, width=6):
        super().__init__()
        self.num_heads, self.size, self.features = heads, size, heads * size
        self.mixed = nn.Linear(width, 2 * self.features, bias=False)
        self.scale = nn.Parameter(torch.rand(heads))
        self.norm, self.shift = nn.Parameter(torch.rand(size)), nn.Parameter(torch.rand(size))
        self.out = nn.Linear(self.features, width, bias=False)

    def forward(self, hidden, factor=1.0):
        a, b = self.mixed(hidden).split([self.features, self.features], dim=-1)
        shape = (*hidden.shape[:-1], self.num_heads, self.size)
        heads = (a * b.tanh()).view(shape).cumsum(1) * self.norm + self.shift
        weights = heads.sum(-1) * self.scale
        return self.out((heads * weights[..., None]).flatten(-2)) * factor


def heads_style(**layouts):
    parameters = {
        "mixed.weight": PackedShard(0, (12, 12)), "scale": Shard(0), "out.weight": Shard(1),
    }  # fmt: skip
    return LocalCompute(parameters=parameters, divided=("num_heads", "features"), **layouts)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_module_whose_numbers_count_heads(sequence):
    """By heads, on local tensors: one collective each way, and one for what is replicated inside."""
    torch.manual_seed(0)
    module, single = Heads().double(), Heads().double()
    single.load_state_dict(module.state_dict())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layout = Shard(1) if sequence else Replicate()
    parallelize_module(module, mesh, heads_style(input_layouts=layout, output_layouts=layout))
    x = torch.randn(2, 5, 6, dtype=torch.float64)  # 5 positions are uneven over 2 ranks
    given = distribute_tensor(x, mesh, [layout]).requires_grad_()
    plain = x.clone().requires_grad_()
    with CommTrace() as trace:
        out = module(given, factor=2.0)
        out.square().sum().backward()
    want = single(plain, factor=2.0)
    want.square().sum().backward()
    torch.testing.assert_close(out.full_tensor(), want)
    torch.testing.assert_close(given.grad.full_tensor(), plain.grad)
    for (name, p), q in zip(module.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)
    gather, scatter = {"all_gather": 1}, {"reduce_scatter": 1}
    assert trace.phase("forward") == (gather | scatter if sequence else {"all_reduce": 1})
    # The gradient of the input, and that of `norm` and `shift` together.
    assert trace.phase("backward") == (gather | scatter | {"all_reduce": 1} if sequence else {"all_reduce": 2})
    assert (module.num_heads, module.features) == (4, 12)


class AttentionWithWeights(nn.Module):
    """Returns the weights of its heads too, takes tables of positions and a mask, and adds a bias at its end."""

    def __init__(self, heads=4, size=2, width=6):
        super().__init__()
        self.num_heads, self.size = heads, size
        self.qkv, self.out = nn.Linear(width, 3 * heads * size), nn.Linear(heads * size, width)

    def forward(self, hidden, position_embeddings=None, attention_mask=None):
        cos, sin = position_embeddings
        split = (*hidden.shape[:-1], self.num_heads, self.size)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        q, k = (x * cos + x.flip(-1) * sin for x in (q, k))
        weights = (q @ k.transpose(-1, -2) + attention_mask).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2)), weights


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", [R, S1], ids=["R", "S1"])
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "LoRA"])
def test_attention_with_weights_of_this_ranks_heads_and_a_bias_that_is_added_once(layout, adapted):
    model, twin = twins(AttentionWithWeights)
    if adapted:
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(r=2, target_modules=["qkv", "out"], init_lora_weights=False)
        for each in (model, twin):
            peft.get_peft_model(each, lora).double().requires_grad_()
        twin.load_state_dict(model.state_dict())
    placements = {
        "qkv.weight": PackedShard(0, (8, 8, 8)), "qkv.bias": PackedShard(0, (8, 8, 8)),
        "out.weight": S1, "out.bias": Partial(),
    }  # fmt: skip
    style = LocalCompute(
        parameters=placements, divided=("num_heads",), input_layouts=layout, output_layouts=layout
    )  # fmt: skip
    parallelize_module(model, mesh(), style)
    x = distribute_tensor(hidden(2, 4, 6), mesh(), [layout]).requires_grad_()
    y, mask = (
        hidden(2, 4, 6).requires_grad_(),
        torch.zeros(4, 4, dtype=torch.float64).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf),
    )
    given = {"position_embeddings": (hidden(4, 2, seed=6), hidden(4, 2, seed=7)), "attention_mask": mask}
    with CommTrace() as trace:
        out, weights = model(x, **given)
        out.pow(2).sum().backward()
    want, all_weights = twin(y, **given)
    want.pow(2).sum().backward()
    torch.testing.assert_close(out.full_tensor(), want)
    assert type(weights) is torch.Tensor
    torch.testing.assert_close(weights, all_weights.chunk(2, dim=1)[mesh().get_local_rank()])
    torch.testing.assert_close(x.grad.full_tensor(), y.grad)
    check_gradients(model, twin)
    assert trace.phase("forward") == ({"all_reduce": 1} if layout == R else {"all_gather": 1, "reduce_scatter": 1})


@pytest.mark.ranks(2)
def test_what_cannot_be_divided_or_found_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for style, message in [
        (LocalCompute(divided=("size",)), "size of Heads is 3, no number that 2 ranks divide"),
        (LocalCompute(divided=("heads",)), "heads of Heads is None"),
        (LocalCompute(parameters={"mixed.bias2": Shard(0)}), "Heads has no parameter 'mixed.bias2'"),
    ]:
        with pytest.raises(ValueError, match=message):
            parallelize_module(Heads(), mesh, style)
