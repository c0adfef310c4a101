"""Modules of a decoder, small and in plain PyTorch, with their inputs and mesh, for the tests of this package."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import init_device_mesh


def mesh(size=2):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def hidden(*shape, seed=5):
    shape = shape or (2, 4, 8)
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Mlp(nn.Module):
    """Gate and up, then down; called with further inputs, which it must get."""

    def __init__(self, width=8, inner=12, bias=False):
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=bias)
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Causal attention with grouped heads; head counts follow from the projections, as in transformers."""

    def __init__(self, width=8, heads=4, kv_heads=4, head_dim=2, value_dim=2, bias=False):
        super().__init__()
        self.head_dim, self.value_dim = head_dim, value_dim
        self.q = nn.Linear(width, heads * head_dim, bias=bias)
        self.k = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.v = nn.Linear(width, kv_heads * value_dim, bias=bias)
        self.o = nn.Linear(heads * value_dim, width, bias=bias)

    def forward(self, x):
        batch, length = x.shape[:-1]
        sizes = {self.q: self.head_dim, self.k: self.head_dim, self.v: self.value_dim}
        q, k, v = (p(x).view(batch, length, -1, size).transpose(1, 2) for p, size in sizes.items())
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, width=8, bias=False, **attention):
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = Attention(width, bias=bias, **attention)
        self.norm2 = nn.RMSNorm(width)
        self.mlp = Mlp(width, bias=bias)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Token ids to logits."""

    def __init__(self, vocabulary=16, width=8, layers=1, tied=False, **block):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, **block) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def language_model(family, device="cpu", **changes):
    """A model of transformers, small, its parameters always the same."""
    import transformers

    torch.manual_seed(0)
    settings = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "dtype": torch.float32,
        **changes,
    }
    config = getattr(transformers, f"{family}Config")(**settings)
    with torch.device(device):
        return getattr(transformers, f"{family}ForCausalLM")(config).train()


def twins(make, seed=0, dtype=torch.float64):
    """Two equal models with random parameters, norms included."""
    torch.manual_seed(seed)
    models = [make().to(dtype) for _ in range(2)]
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=dtype) / max(parameter.shape[-1], 4) ** 0.5)
    models[1].load_state_dict(models[0].state_dict())
    return models


def whole(tensor):
    """The whole of a DTensor, ours or PyTorch's; a plain tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_gradients(model, twin):
    """Every gradient is that of one device, and laid out as its parameter."""
    for (name, parameter), (_, single) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        if hasattr(parameter, "placements"):
            assert parameter.grad.placements == parameter.placements, name
        torch.testing.assert_close(whole(parameter.grad), single.grad, msg=lambda m, n=name: f"{n}: {m}")
