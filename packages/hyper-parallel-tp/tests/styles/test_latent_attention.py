"""LatentAttentionParallel on a small block in plain PyTorch, against one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from tp_models import check_gradients, hidden, mesh, twins

from hyper_parallel import CommTrace, LatentAttentionParallel, Replicate, Shard, distribute_tensor
from hyper_parallel_tp.styles.gather_together import gather_together


class Scores(nn.Module):
    """Which positions are looked at; it has no gradient."""

    def __init__(self, width):
        super().__init__()
        self.key, self.norm = nn.Linear(width, 2, bias=False), nn.LayerNorm(2)

    @torch.no_grad()
    def forward(self, x):
        key = self.norm(self.key(x))
        return (key @ key.transpose(-1, -2)).tril() > -0.5


class LatentAttention(nn.Module):
    """Queries, keys and values of each head out of two latents; a part of each key is that of all heads."""

    def __init__(self, width=8, heads=4, latent=6, shared=2, size=3):
        super().__init__()
        self.num_heads, self.groups, self.shared = heads, heads, shared
        self.down_q, self.norm_q = nn.Linear(width, latent), nn.RMSNorm(latent)
        self.down_kv, self.norm_kv = nn.Linear(width, latent + shared), nn.RMSNorm(latent)
        self.up_q = nn.Linear(latent, heads * (size + shared))
        self.up_kv = nn.Linear(latent, heads * 2 * size, bias=False)
        self.scores = Scores(width)
        self.sinks = nn.Parameter(torch.randn(heads))
        self.out = nn.Linear(heads * size, width)

    def forward(self, x, scale=1.0):
        rows, length = x.shape[:2]
        q = self.up_q(self.norm_q(self.down_q(x))).view(rows, length, self.groups, -1).transpose(1, 2)
        latent, shared = self.down_kv(x).split([6, self.shared], dim=-1)
        k, v = self.up_kv(self.norm_kv(latent)).view(rows, length, self.groups, -1).transpose(1, 2).chunk(2, dim=-1)
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, k.shape[1], -1, -1)], dim=-1)
        weights = (q @ k.transpose(-1, -2) * scale).masked_fill(~self.scores(x).unsqueeze(1), -1e9)
        weights = weights + self.sinks.view(1, -1, 1, 1) * torch.eye(length, dtype=x.dtype)
        weights = weights.softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(rows, length, -1)), weights


STYLE = {
    "latents": {"down_q": "norm_q", "down_kv": "norm_kv"},
    "without_gradient": {"scores.key": None},
    "heads": ("up_q", "up_kv"),
    "output": "out",
    "per_head": ("sinks",),
    "divided": ("groups",),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("length", [8, 5])
def test_values_and_gradients_of_one_device(sequence, length):
    model, twin = twins(LatentAttention)
    layout = Shard(1) if sequence else Replicate()
    LatentAttentionParallel(**STYLE, input_layouts=layout, output_layouts=layout).apply(model, mesh(4))
    x = hidden(2, length, 8)
    spread = distribute_tensor(x, mesh(4), [layout]).requires_grad_()
    x.requires_grad_()
    with CommTrace() as trace:
        out, weights = model(spread, scale=0.5)
    wanted, wanted_weights = twin(x, scale=0.5)
    assert out.placements == (layout,)
    torch.testing.assert_close(out.full_tensor(), wanted)
    torch.testing.assert_close(weights.full_tensor(), wanted_weights)
    assert trace.counts == ({"all_gather": 1, "reduce_scatter": 1} if sequence else {"all_reduce": 1})
    F.mse_loss(out.full_tensor(), torch.zeros_like(x)).backward()
    F.mse_loss(wanted, torch.zeros_like(x)).backward()
    torch.testing.assert_close(spread.grad.full_tensor(), x.grad)
    for parameters in (model, twin):
        assert {name for name, p in parameters.named_parameters() if p.grad is None} == {
            "scores.key.weight", "scores.norm.weight", "scores.norm.bias"
        }  # fmt: skip
    del model.scores, twin.scores
    check_gradients(model, twin)


@pytest.mark.ranks(2)
def test_the_second_derivative_of_a_gather_of_two():
    x, other = hidden(2, 5, 3), hidden(2, 5, 4, seed=6)
    spread = [distribute_tensor(t, mesh(), [Shard(1)]) for t in (x, other)]
    with CommTrace() as trace:
        kept, free = gather_together(spread[0].requires_grad_(), spread[1], "tp")
    assert trace.counts == {"all_gather": 1}
    assert torch.equal(free.full_tensor(), other)
    found = []
    for value, leaf in ((kept.pow(3), spread[0]), (x.requires_grad_().pow(3), x)):
        (first,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), leaf)
        found.append(second)
    torch.testing.assert_close(found[0].full_tensor(), found[1])


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": {"down_q": "norm"}}, "LatentAttention has no norm; it has down_q, norm_q"),
        ({"per_head": ("sink",)}, "LatentAttention has no sink"),
        ({"divided": ("shared",)}, "4 ranks do not divide shared=2 of LatentAttention"),
        ({"divided": ("up_q",)}, "up_q of LatentAttention is Linear.*should be a number"),
    ],
)
def test_what_the_block_has_not(changes, message):
    with pytest.raises(ValueError, match=message):
        LatentAttentionParallel(**{**STYLE, **changes}).apply(LatentAttention(), mesh(4))
