"""Each style by itself: uneven sizes, packed projections, inputs of every kind, what is refused."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tp_models import Attention, Mlp, check_gradients, twins, whole

from hyper_parallel import (
    AttentionParallel,
    ColwiseParallel,
    CommTrace,
    DTensor,
    LocalCompute,
    NoParallel,
    PackedShard,
    Partial,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.autograd_bridge import InFlight
from hyper_parallel_tp import on_pieces

R, S0, S1, LAST = Replicate(), Shard(0), Shard(1), Shard(-1)


def mesh(size=2):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def hidden(*shape, seed=5):
    shape = shape or (2, 4, 8)
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check(model, twin, *inputs):
    """Output, input gradients and parameter gradients are those of one device."""
    ours = [(x * 1).requires_grad_() if x.is_floating_point() else x for x in inputs]
    theirs = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    out, want = model(*ours), twin(*theirs)
    torch.testing.assert_close(whole(out), want)
    out.pow(2).sum().backward()
    want.pow(2).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
    check_gradients(model, twin)
    return out


@pytest.mark.ranks(4)
@pytest.mark.parametrize("inner", [3, 4, 6, 13])  # 3 and 6 leave the last rank with nothing
@pytest.mark.parametrize("local", [True, False])
def test_uneven_and_empty_features(inner, local):
    model, twin = twins(lambda: Mlp(8, inner, bias=True))
    col, row = ColwiseParallel(use_local_output=local), RowwiseParallel(use_local_output=local)
    parallelize_module(model, mesh(4), {"gate": col, "up": col, "down": row})
    check(model, twin, hidden())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("vocabulary", [16, 13, 6, 3])
@pytest.mark.parametrize("style", ["rows", "columns"])
def test_embeddings_of_any_size(vocabulary, style):
    model, twin = twins(lambda: nn.Embedding(vocabulary, 6, padding_idx=1))
    plan = RowwiseParallel(input_layouts=R) if style == "rows" else ColwiseParallel(output_layouts=R)
    parallelize_module(model, mesh(4), plan)
    check(model, twin, torch.tensor([[0, vocabulary - 1, 1], [2, 1, 2]]))


class Packed(nn.Module):
    """Fused QKV and fused gate-up, taken apart by split and by chunk."""

    def __init__(self, heads=4, kv_heads=2, head_dim=2, inner=10):
        super().__init__()
        self.sections = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.head_dim = head_dim
        self.qkv = nn.Linear(8, sum(self.sections))
        self.o = nn.Linear(heads * head_dim, 8)
        self.gate_up = nn.Linear(8, 2 * inner)
        self.down = nn.Linear(inner, 8)

    def forward(self, x):
        batch, length = x.shape[:-1]
        q, k, v = self.qkv(x).split(self.sections, -1)
        q, k, v = (t.reshape(batch, length, -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


@pytest.mark.ranks(2)
def test_packed_projections_without_touching_the_model():
    model, twin = twins(Packed)
    plan = {
        "qkv": ColwiseParallel(sections=model.sections, use_local_output=False),
        "o": RowwiseParallel(use_local_output=False),
        "gate_up": ColwiseParallel(sections=(10, 10), use_local_output=False),
        "down": RowwiseParallel(use_local_output=False),
        "": NoParallel(),
    }
    parallelize_module(model, mesh(), plan)
    assert model.qkv.weight.placements == (PackedShard(0, model.sections),)
    assert model.qkv.bias.placements == (PackedShard(0, model.sections),)
    check(model, twin, hidden())
    with CommTrace() as trace:
        model(hidden().requires_grad_() * 1).sum().backward()
    assert trace.counts == {"all_reduce": 4}


@pytest.mark.ranks(2)
def test_a_packed_projection_of_plain_pieces():
    model, twin = twins(lambda: nn.Sequential(nn.Linear(8, 10), nn.Linear(10, 8)))
    plan = {"0": ColwiseParallel(sections=(7, 3)), "1": RowwiseParallel(sections=(7, 3))}
    parallelize_module(model, mesh(), plan)
    check(model, twin, hidden())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("placement", [R, S1])
def test_attention_with_any_number_of_key_value_heads(kv_heads, placement):
    model, twin = twins(lambda: Attention(kv_heads=kv_heads, bias=True))
    style = AttentionParallel(
        query="q", key="k", value="v", output="o", input_layouts=placement, output_layouts=placement
    )
    parallelize_module(model, mesh(4), {"": style})
    assert model.k.weight.placements == ((S0,) if kv_heads == 4 else (R,))
    x, y = hidden(2, 5, 8), hidden(2, 5, 8).requires_grad_()
    given = distribute_tensor(x, mesh(4), [placement]).requires_grad_()
    out, want = model(given), twin(y)
    assert out.placements == (placement,)
    torch.testing.assert_close(out.full_tensor(), want)
    out.pow(2).sum().backward()
    want.pow(2).sum().backward()
    torch.testing.assert_close(given.grad.full_tensor(), y.grad)
    check_gradients(model, twin)


@pytest.mark.ranks(2)
def test_attention_whose_key_value_heads_the_ranks_do_not_divide():
    model, twin = twins(lambda: Attention(width=8, heads=6, kv_heads=3))
    parallelize_module(
        model, mesh(), {"": AttentionParallel(query="q", key="k", value="v", output="o", use_local_output=True)}
    )
    check(model, twin, hidden())


@pytest.mark.ranks(2)
def test_attention_that_cannot_be_split_says_so():
    with pytest.raises(ValueError, match="2 ranks do not divide the 3 query heads of Attention"):
        AttentionParallel(query="q", key="k", value="v", output="o").apply(Attention(heads=3, kv_heads=3), mesh())
    style = AttentionParallel(query="gate", key="up", value="up", output="down")
    with pytest.raises(ValueError, match=r"'gate' of Mlp has 12 output features; head_dim is None\. Pass head_dim="):
        style.apply(Mlp(), mesh())


class ManyInputs(nn.Module):
    """Records what it is called with, and returns three things."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(8, 8)

    def forward(self, x, mask=None, *rest, bias=None, **more):
        self.seen = (x, mask, rest, bias, more)
        return {"x": x, "mask": mask, "rest": rest}


@pytest.mark.ranks(2)
def test_inputs_are_laid_out_and_all_are_kept():
    module = PrepareModuleInput(
        input_layouts=(S1, None),
        desired_input_layouts=(R, None),
        input_kwarg_layouts={"bias": S0, "extra": R},
        desired_input_kwarg_layouts={"bias": R, "extra": S0},
    ).apply(ManyInputs(), mesh())
    rank = mesh().get_local_rank()
    x, mask, bias, extra = hidden(), hidden(2), hidden(4), hidden(4, 2)
    module(x.chunk(2, 1)[rank], mask, "third", bias=bias.chunk(2)[rank], extra=extra, other=7)
    seen, seen_mask, rest, seen_bias, more = module.seen
    assert seen.placements == (R,)
    assert seen_mask is mask
    assert rest == ("third",)
    assert more["other"] == 7
    assert more["extra"].placements == (S0,)
    for found, want in ((seen, x), (seen_bias, bias), (more["extra"], extra)):
        torch.testing.assert_close(found.full_tensor(), want)
    module(mask=mask, x=x.chunk(2, 1)[rank])  # by name, in any order
    torch.testing.assert_close(module.seen[0].full_tensor(), x)
    with pytest.raises(ValueError, match=r"lays out 2 positional inputs, called with 0 and keywords \['x0'\]"):
        module(x0=x)


@pytest.mark.ranks(2)
def test_a_forward_that_another_library_replaced():
    """As accelerate does: a partial on the instance. Names and positions of arguments stay."""
    module = ManyInputs()
    module.forward = functools.update_wrapper(functools.partial(ManyInputs.forward, module), module.forward)
    signature = inspect.signature(module.forward)
    style = PrepareModuleInput(input_kwarg_layouts={"bias": S0}, desired_input_kwarg_layouts={"bias": R})
    parallelize_module(module, mesh(), {"": NoParallel(use_local_output=False)})
    style.apply(module, mesh())
    assert inspect.signature(module.forward) == signature
    module(hidden(), "mask", bias=hidden(4).chunk(2)[mesh().get_local_rank()])
    torch.testing.assert_close(module.seen[3].full_tensor(), hidden(4))
    torch.testing.assert_close(module.seen[0].full_tensor(), hidden())
    assert module.seen[1] == "mask"


@pytest.mark.ranks(2)
def test_outputs_are_laid_out_and_all_are_kept():
    module = PrepareModuleOutput(output_layouts=(S1, None), desired_output_layouts=(R, None)).apply(
        ManyInputs(), mesh()
    )
    rank = mesh().get_local_rank()
    out = module(hidden().chunk(2, 1)[rank], "mask", "third")
    torch.testing.assert_close(out["x"], hidden())
    assert out["mask"] == "mask"
    assert out["rest"] == ("third",)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("local", [False, True])
def test_inputs_and_outputs_of_a_module_of_plain_code(local):
    """Its forward needs the whole sequence; the world around works on parts of it."""

    class Reversed(nn.Module):
        def forward(self, x):
            return x.flip(1) * torch.arange(1.0, 1 + x.shape[1], dtype=x.dtype).view(1, -1, 1)

    style = PrepareModuleInputOutput(
        input_layouts=S1,
        desired_input_layouts=R,
        use_local_input=local,
        output_layouts=R,
        desired_output_layouts=S1,
        use_local_output=local,
    )
    module = parallelize_module(Reversed(), mesh(), style)
    rank = mesh().get_local_rank()
    piece = hidden().chunk(2, 1)[rank].clone().requires_grad_()
    y = hidden().requires_grad_()
    out, want = module(piece), Reversed()(y)
    assert isinstance(out, DTensor) != local
    found = out.to_local() if isinstance(out, DTensor) else out
    torch.testing.assert_close(found, want.chunk(2, 1)[rank])
    out.pow(3).sum().backward()
    want.pow(3).sum().backward()
    torch.testing.assert_close(piece.grad, y.grad.chunk(2, 1)[rank])


@pytest.mark.ranks(2)
def test_layouts_that_do_not_go_together():
    with pytest.raises(ValueError, match="input_layouts and desired_input_layouts go together, one for one"):
        PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(S1,))
    with pytest.raises(ValueError, match="input_kwarg_layouts and desired_input_kwarg_layouts go together"):
        PrepareModuleInput(input_kwarg_layouts={"x": R}, desired_input_kwarg_layouts={"y": R})
    style = PrepareModuleInput(input_kwarg_layouts={"hiden": R}, desired_input_kwarg_layouts={"hiden": R})
    with pytest.raises(ValueError, match=r"Attention\.forward has no argument 'hiden'; it takes x"):
        style.apply(Attention(), mesh())
    module = PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=(R, R)).apply(nn.Identity(), mesh())
    with pytest.raises(ValueError, match="Identity: its style lays out 2 outputs, it returned 1"):
        module(hidden())


SHORT_WAYS = {
    "colwise": (lambda: nn.Linear(8, 5), lambda: ColwiseParallel(use_local_output=False), R),
    "colwise, gathered": (lambda: nn.Linear(8, 6), lambda: ColwiseParallel(input_layouts=S1, output_layouts=R), S1),
    "rowwise": (lambda: nn.Linear(5, 8), lambda: RowwiseParallel(), LAST),
    "rowwise in sequence": (
        lambda: nn.Linear(6, 8, bias=False),
        lambda: RowwiseParallel(output_layouts=S1, use_local_output=False),
        LAST,
    ),
    "layer norm": (lambda: nn.LayerNorm(8), lambda: SequenceParallel(), S1),
    "rms norm": (lambda: nn.RMSNorm(8), lambda: SequenceParallel(use_local_output=True), S1),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", SHORT_WAYS)
def test_the_short_way_gives_what_the_general_way_gives(name):
    make, style, layout = SHORT_WAYS[name]
    modules = twins(make)
    with pytest.MonkeyPatch.context() as patch:
        short = counted(patch)
        parallelize_module(modules[0], mesh(), style())
        patch.setattr(on_pieces, "_FUNCTIONS", {})
        parallelize_module(modules[1], mesh(), style())
    given = distribute_tensor(hidden(2, 4, getattr(modules[0], "in_features", 8)), mesh(), [layout])
    for plain, low in ((False, False), (True, False), (True, True)):
        found = []
        for module in modules:
            x = (given.to_local() if plain else given).detach().requires_grad_()
            module.zero_grad()
            with CommTrace() as trace, torch.autocast("cpu", torch.bfloat16, enabled=low):
                out = module(x * 1)
                out.double().pow(2).sum().backward()
            kind = type(out), out.dtype, tuple(out.shape), out.stride(), getattr(out, "placements", None)
            values = [out, x.grad, *(p.grad for p in module.parameters())]
            found.append((kind, trace.counts, [v.to_local() if isinstance(v, DTensor) else v for v in values]))
        assert found[0][:2] == found[1][:2]
        torch.testing.assert_close(found[0][2], found[1][2])
    assert len(short) == 3


def counted(patch):
    """A list that grows by one whenever the short way is taken."""
    calls = []

    def counting(compute):
        return lambda *args, **kwargs: calls.append(compute) or compute(*args, **kwargs)

    functions = {forward: counting(compute) for forward, compute in on_pieces._FUNCTIONS.items()}
    patch.setattr(on_pieces, "_FUNCTIONS", functions)
    return calls


@pytest.mark.ranks(2)
def test_the_short_way_is_left_for_what_it_does_not_know():
    layer, twin = twins(lambda: nn.Linear(8, 6))
    want, whole_weight = twin(hidden()), distribute_tensor(twin.weight.detach(), mesh(), [R])
    with pytest.MonkeyPatch.context() as patch:
        short = counted(patch)
        parallelize_module(layer, mesh(), ColwiseParallel(output_layouts=R))
    torch.testing.assert_close(layer(input=hidden()), want)
    assert len(short) == 1
    torch.testing.assert_close(torch.func.functional_call(layer, {"weight": whole_weight}, hidden()), want)
    bias = layer._parameters.pop("bias")
    layer.bias = bias * 1  # as weight_norm and its like do: computed from others
    torch.testing.assert_close(layer(hidden()), want)
    assert len(short) == 1
    with pytest.raises(RuntimeError, match=r"\[8, 7\] X \[8, 6\]"):  # the sizes of the whole tensors
        layer(hidden(2, 4, 7))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("length", [4, 5])
def test_plain_pieces_of_a_sequence_have_equal_length(length):
    layer, twin = twins(lambda: nn.Linear(8, 8))
    parallelize_module(layer, mesh(), RowwiseParallel(input_layouts=R, output_layouts=S1))
    x = hidden(2, length, 8)
    if length == 4:
        torch.testing.assert_close(layer(x), twin(x).chunk(2, 1)[mesh().get_local_rank()])
    else:
        with pytest.raises(ValueError, match="dim 1 of its output has length 5, which 2 ranks do not divide"):
            layer(x)


@pytest.mark.ranks(2)
def test_norms_along_a_sequence_shard_sum_their_gradients():
    model, twin = twins(lambda: nn.LayerNorm(8))
    parallelize_module(model, mesh(), SequenceParallel())
    for given in (distribute_tensor(hidden(2, 5, 8), mesh(), [R]), distribute_tensor(hidden(2, 5, 8), mesh(), [S1])):
        assert model(given).placements == (S1,)
    with CommTrace() as trace:
        model(distribute_tensor(hidden(2, 5, 8), mesh(), [S1])).pow(2).sum().backward()
    assert trace.phase("backward") == {"all_reduce": 2}
    twin(hidden(2, 5, 8)).pow(2).sum().backward()
    check_gradients(model, twin)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", [R, S1])
def test_a_router_that_every_rank_holds(placement):
    model, twin = twins(lambda: nn.Linear(8, 3))
    style = NoParallel(input_layout=placement, output_layout=placement, use_local_output=False)
    parallelize_module(model, mesh(), style)
    given = hidden() if placement == R else hidden().chunk(2, 1)[mesh().get_local_rank()]
    out = model(given)
    assert out.placements == (placement,)
    want = twin(hidden())
    torch.testing.assert_close(out.full_tensor(), want)
    out.pow(2).sum().backward()
    want.pow(2).sum().backward()
    check_gradients(model, twin)


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


@pytest.mark.ranks(2)
def test_collectives_at_boundaries_are_in_flight_until_used():
    layer, twin = twins(lambda: nn.Linear(8, 6))
    parallelize_module(layer, mesh(), RowwiseParallel(input_layouts=R, use_local_output=False))
    out = layer(hidden())
    assert isinstance(out._pending, InFlight)
    torch.testing.assert_close(out.full_tensor(), twin(hidden()))
    assert not isinstance(out._pending, InFlight)
    style = PrepareModuleInput(input_layouts=S1, desired_input_layouts=R)
    module = style.apply(ManyInputs(), mesh())
    x = distribute_tensor(hidden(), mesh(), [S1])
    module(x)
    first = module.seen[0]
    assert isinstance(first._pending, InFlight)
    torch.testing.assert_close(first.to_local(), hidden())
    module(x)
    assert module.seen[0] is first  # completing it counted as no change


@pytest.mark.ranks(2)
def test_a_pending_sum_can_be_handed_on():
    layer, twin = twins(lambda: nn.Linear(8, 6, bias=False))
    style = RowwiseParallel(input_layouts=R, output_layouts=Partial(), use_local_output=False)
    parallelize_module(layer, mesh(), style)
    with CommTrace() as trace:
        out = layer(hidden())
    assert out.placements == (Partial(),)
    assert not trace.counts
    torch.testing.assert_close(out.full_tensor(), twin(hidden()))


@pytest.mark.ranks(2)
def test_pytorchs_dtensors_are_no_input():
    layer = parallelize_module(nn.Linear(8, 6).double(), mesh(), ColwiseParallel())
    with pytest.raises(TypeError, match=r"got torch\.distributed\..*DTensor; DTensor\.from_torch takes over"):
        layer(torch.distributed.tensor.distribute_tensor(hidden(), mesh(), [R]))


def test_a_style_shows_its_arguments():
    assert repr(SequenceParallel(sequence_dim=0)) == "SequenceParallel(sequence_dim=0, use_local_output=False)"


@pytest.mark.ranks(4)
def test_a_batch_on_a_larger_mesh_keeps_its_data_axis():
    full = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = PrepareModuleInput(input_layouts=S1, desired_input_layouts=R).apply(ManyInputs(), full["tp"])
    module(distribute_tensor(hidden(), full, [S0, S1]))
    assert module.seen[0].placements == (S0, R)
    torch.testing.assert_close(module.seen[0].full_tensor(), hidden())
