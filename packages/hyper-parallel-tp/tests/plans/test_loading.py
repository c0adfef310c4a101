"""A model that no rank ever holds whole: built on the meta device, sharded there, its pieces read from safetensors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from tp_models import language_model

from hyper_parallel import init_device_mesh, parallelize_module

pytest.importorskip("transformers")


class CountingReader(HuggingFaceStorageReader):
    """Adds up how many numbers this rank reads."""

    read = 0

    def _process_read_request(self, f, req, planner):
        self.read += math.prod(req.lengths)
        super()._process_read_request(f, req, planner)


def build(tied, device="cpu"):
    return language_model("Llama", device, tie_word_embeddings=tied)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_from_meta_to_training_by_pieces(tied, tmp_path):
    if dist.get_rank() == 0:
        build(tied).save_pretrained(tmp_path)
    dist.barrier()
    model = build(tied, device="meta")
    parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.tie_weights()  # to_empty unties, as it does without us
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # computed, not saved
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    reader = CountingReader(str(tmp_path))
    dcp.load(dict(model.named_parameters()), storage_reader=reader)
    held = sum(p.to_local().numel() for p in model.parameters())
    assert reader.read == held < 0.6 * sum(p.numel() for p in model.parameters())

    twin = build(tied)
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(3))
    loss, want = model(input_ids=ids, labels=ids).loss, twin(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, want)
    loss.backward()
    want.backward()
    for parameter, single in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), single.grad, rtol=1e-4, atol=1e-6)
