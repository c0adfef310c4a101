"""Whole models of ``transformers``, each parallelised by one library: what ``bench_models.py`` compares.

Every contender trains the same weights on the same global batch, so that their losses agree step by step. torch's are
written as TorchTitan writes its Llama-like models: sequence and loss parallel, each block and the head fully sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import device_mesh
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torch_tp
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from hyper_parallel import ParallelDims, load_pretrained

Batch = dict[str, torch.Tensor]
LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Sizes:
    """Of both models and their batch."""

    hidden: int = 256
    layers: int = 4
    heads: int = 8
    key_value_heads: int = 4
    inner: int = 768
    experts: int = 8
    expert_inner: int = 256
    words: int = 4096
    rows: int = 4
    tokens: int = 128

    def batch(self) -> Batch:
        """The global batch, equal on all ranks."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.words, (self.rows, self.tokens), generator=generator)
        return {"input_ids": ids, "labels": ids}


QUICK = Sizes(
    hidden=32, layers=2, heads=4, key_value_heads=4, inner=48, experts=4, expert_inner=16, words=64, tokens=16
)


def save_models(folder: str, sizes: Sizes) -> None:
    """Write ``dense`` and ``moe`` into the folder, as the hub has models."""
    common: dict[str, Any] = {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_value_heads,
        "head_dim": sizes.hidden // sizes.heads,
        "intermediate_size": sizes.inner,
        "vocab_size": sizes.words,
        "max_position_embeddings": sizes.tokens,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    experts: dict[str, Any] = {
        "num_experts": sizes.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes.expert_inner,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**common)).save_pretrained(f"{folder}/dense")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts)).save_pretrained(f"{folder}/moe")


class Contender:
    """A model, this rank's rows of the batch, and how to train a step.

    Args:
        model: parallelised.
        batch: the global one.
        data_ranks: into how many parts the batch is cut; ranks that follow one another share a part.
        world_size: number of all ranks.
        rank: of this process.
        loss: from the model and this rank's batch; None: the model's own.
        context: inside of which loss and backward are computed.
    """

    def __init__(
        self,
        model: Any,
        batch: Batch,
        data_ranks: int,
        world_size: int,
        rank: int,
        loss: Callable[[Any, Batch], torch.Tensor] | None = None,
        context: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        part = rank // (world_size // data_ranks)
        self.model = model.train()
        self.batch = {name: value.chunk(data_ranks)[part] for name, value in batch.items()}
        self.loss = loss or own_loss
        self.context = context
        # One parameter after the other: transformers mixes DTensors and plain ones, which foreach refuses.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, foreach=False)

    def step(self) -> torch.Tensor:
        """Forward, backward, SGD; the loss of this rank's rows, or of all."""
        with self.context():
            loss = self.loss(self.model, self.batch)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def own_loss(model: Any, batch: Batch) -> torch.Tensor:
    return model(**batch, use_cache=False).loss


def plain(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder)


def with_transformers(folder: str, **degrees: Any) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**degrees))


def with_auto_plan(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")


def ours(folder: str, world_size: int, **arguments: Any) -> nn.Module:
    degrees = {name: arguments.pop(name, 1) for name in ("dp_shard", "tp", "ep")}
    return load_pretrained(folder, ParallelDims(**degrees, world_size=world_size), **arguments)


def with_torch(folder: str, dp: int, tp: int) -> Any:
    """TP with sequence and loss parallel, then FSDP2: TorchTitan's ``parallelize_llama`` with the names of Qwen3."""
    model: Any = plain(folder)
    mesh = device_mesh.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        torch_tensor_parallel(model, mesh["tp"])
    if dp > 1:
        shard = partial(torch_fsdp.fully_shard, mesh=mesh["dp"])
        shard(model.model.embed_tokens)
        for layer in model.model.layers:
            shard(layer)
        shard([model.model.norm, model.lm_head], reshard_after_forward=False)
        shard(model)
    return model


def torch_tensor_parallel(model: Any, mesh: Any) -> None:
    sequence, whole = Shard(1), Replicate()
    outside = {
        "model.embed_tokens": torch_tp.RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "model.norm": torch_tp.SequenceParallel(),
        "lm_head": torch_tp.ColwiseParallel(input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False),
    }
    layer = {
        "input_layernorm": torch_tp.SequenceParallel(),
        "self_attn": torch_tp.PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": sequence}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "self_attn.[qkv]_proj": torch_tp.ColwiseParallel(),
        "self_attn.[qk]_norm": torch_tp.SequenceParallel(sequence_dim=2, use_local_output=True),
        "self_attn.o_proj": torch_tp.RowwiseParallel(output_layouts=sequence),
        "post_attention_layernorm": torch_tp.SequenceParallel(),
        "mlp": torch_tp.PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,)),
        "mlp.gate_proj": torch_tp.ColwiseParallel(),
        "mlp.up_proj": torch_tp.ColwiseParallel(),
        "mlp.down_proj": torch_tp.RowwiseParallel(output_layouts=sequence),
    }
    torch_tp.parallelize_module(model, mesh, outside)
    for block in model.model.layers:
        torch_tp.parallelize_module(block, mesh, layer)


def torch_parallel_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Cross entropy of logits that stay sharded by vocabulary. Positions are given, as the model would count those of
    this rank's piece of the sequence."""
    ids = batch["input_ids"]
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


@dataclass(frozen=True)
class Entry:
    """One row of the table: ``make`` builds the model from a folder, inside of each rank."""

    name: str
    layout: str
    make: Callable[[str], nn.Module]
    data_ranks: int
    source: str = "dense"
    is_ours: bool = False
    loss: Callable[[Any, Batch], torch.Tensor] | None = None
    context: Callable[[], Any] = contextlib.nullcontext

    def build(self, folder: str, batch: Batch, world_size: int, rank: int) -> Contender:
        model = self.make(f"{folder}/{self.source}")
        return Contender(model, batch, self.data_ranks, world_size, rank, self.loss, self.context)


def entries(n: int) -> list[Entry]:
    """All contenders on ``n`` ranks; names are unique."""
    tp, fsdp = f"tp={n}", f"fsdp={n}"
    make_ours = partial(partial, ours, world_size=n)
    parallel_loss = {"loss": torch_parallel_loss, "context": torch_tp.loss_parallel}
    found = [
        Entry("plain", "a part of the batch, nothing shared", plain, n),
        Entry("ours, tp", tp, make_ours(tp=n), 1, is_ours=True),
        Entry(
            "ours, tp, whole sequence",
            f"{tp}, logits gathered",
            make_ours(tp=n, sequence_parallel=False, loss_parallel=False),
            1,
            is_ours=True,
        ),
        Entry("torch, tp", tp, partial(with_torch, dp=1, tp=n), 1, **parallel_loss),  # type: ignore[arg-type]
        Entry("transformers, tp", f"{tp}, logits gathered", with_auto_plan, 1),
        Entry("ours, fsdp", fsdp, make_ours(dp_shard=n), n, is_ours=True),
        Entry("torch, fsdp", fsdp, partial(with_torch, dp=n, tp=1), n),
        Entry("transformers, fsdp", fsdp, partial(with_transformers, fsdp_size=n), n),
    ]
    if n % 4 == 0:
        dp, both = n // 2, f"fsdp={n // 2}, tp=2"
        found += [
            Entry("ours, fsdp + tp", both, make_ours(dp_shard=dp, tp=2), dp, is_ours=True),
            Entry("torch, fsdp + tp", both, partial(with_torch, dp=dp, tp=2), dp, **parallel_loss),  # type: ignore[arg-type]
            Entry("transformers, fsdp + tp", both, partial(with_transformers, fsdp_size=dp, tp_size=2), dp),
        ]
    exchange = partial(with_transformers, fsdp_size=n, ep_size=n, ep_implementation="all_to_all")
    ep = f"fsdp={n}, ep={n}"
    found += [
        Entry("plain, experts", "a part of the batch, nothing shared", plain, n, "moe"),
        Entry("ours, ep", ep, make_ours(dp_shard=n, ep=n), n, "moe", is_ours=True),
        Entry("transformers, ep", f"{ep}, all-to-all", exchange, n, "moe"),
    ]
    return found
