"""Each style by itself: uneven sizes, packed projections, attention, what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tp_models import Attention, Mlp, check_gradients, hidden, mesh, twins, whole

from hyper_parallel import (
    AttentionParallel,
    ColwiseParallel,
    CommTrace,
    LocalCompute,
    NoParallel,
    PackedShard,
    ParallelStyle,
    Partial,
    PrepareModuleInput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
)

R, S0, S1 = Replicate(), Shard(0), Shard(1)


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
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_attention_whose_values_have_a_size_of_their_own(kv_heads):
    """As MiMo-V2 has it: 192 features of queries and keys, 128 of values."""
    model, twin = twins(lambda: Attention(kv_heads=kv_heads, head_dim=4, value_dim=3))
    parallelize_module(
        model, mesh(), {"": AttentionParallel(query="q", key="k", value="v", output="o", use_local_output=True)}
    )
    assert model.v.weight.placements == ((S0,) if kv_heads == 2 else (R,))
    check(model, twin, hidden())


@pytest.mark.ranks(2)
def test_attention_that_cannot_be_split_says_so():
    with pytest.raises(ValueError, match="2 ranks do not divide the 3 query heads of Attention"):
        AttentionParallel(query="q", key="k", value="v", output="o").apply(Attention(heads=3, kv_heads=3), mesh())
    style = AttentionParallel(query="gate", key="up", value="up", output="down")
    with pytest.raises(ValueError, match=r"\(query='q_proj', value='w'\): Attention has no such .* q, k, v, o$"):
        AttentionParallel(key="k", value="w", output="o").apply(Attention(), mesh())
    with pytest.raises(ValueError, match=r"'gate' of Mlp has 12 output features; head_dim is None\. Pass head_dim="):
        style.apply(Mlp(), mesh())


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


@pytest.mark.ranks(2)
def test_a_whole_input_where_the_style_says_that_it_is_a_piece():
    layer = parallelize_module(nn.Linear(8, 6).double(), mesh(), RowwiseParallel())
    with pytest.raises(ValueError, match=r"Linear got a plain input with all 8 features, .*=Replicate\(\)\) for"):
        layer(hidden())
    with pytest.raises(ValueError, match=r"local shape \(2, 4, 7\) does not fit"):
        layer(hidden(2, 4, 7))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("local", [True, False])
def test_a_piece_that_meets_a_dtensor(local):
    """Plain, it counts as the whole, which the next layer sees; as a DTensor it is what it is."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.down(self.up(x) * self.scale)

    model, twin = twins(Scaled)
    plan = {"up": ColwiseParallel(use_local_output=local), "down": RowwiseParallel(), "": NoParallel()}
    parallelize_module(model, mesh(), plan)
    if not local:
        check(model, twin, hidden())
        return
    with pytest.raises(ValueError, match=r"Linear takes 6 features, got a DTensor with 3.*use_local_output=False"):
        model(hidden())


def test_layouts_that_are_no_placements():
    for make, name in (
        (lambda given: ColwiseParallel(input_layouts=given), "input_layouts"),
        (lambda given: RowwiseParallel(output_layouts=given), "output_layouts"),
        (lambda given: NoParallel(output_layout=given), "output_layout"),
        (lambda given: AttentionParallel(input_layouts=given), "input_layouts"),
        (lambda given: LocalCompute(output_layouts=given), "output_layouts"),
        (lambda given: PrepareModuleInput(input_layouts=(None, given)), "input_layouts"),
        (lambda given: PrepareModuleInput(input_kwarg_layouts={"x": given}), "input_kwarg_layouts"),
        (lambda given: PrepareModuleOutput(output_layouts=R, desired_output_layouts=given), "desired_output_layouts"),
    ):
        for given in ("Shard(1)", Shard, 1):
            with pytest.raises(TypeError, match=rf"^{name} of a style takes a placement per tensor, .* got "):
                make(given)


def test_a_style_shows_its_arguments():
    assert repr(SequenceParallel(sequence_dim=0)) == "SequenceParallel(sequence_dim=0, use_local_output=False)"


def test_a_style_that_defines_the_method_of_pytorchs_styles():
    with pytest.raises(TypeError, match=r"Mine defines _apply.*defines apply\(self, module, device_mesh\).*rename"):

        class Mine(ParallelStyle):
            def _apply(self, module, device_mesh):
                return module

    class Both(ColwiseParallel):  # a helper of its own is its own affair
        def _apply(self):
            return 1

    assert Both()._apply() == 1
