"""``save_safetensors`` and ``load_safetensors``: files that Hugging Face's libraries write and read alike."""

import json

import huggingface_hub as hub
import pytest
import torch
import torch.distributed as dist
import transformers
from checkpoint_models import build, same_tensors, whole_state
from torch import nn

from hyper_parallel import CheckpointError, CommTrace, DTensor, Replicate, Shard
from hyper_parallel.checkpoint import load_safetensors, safetensors_file, save_safetensors, stored_tensors
from hyper_parallel.tensor.distribute import as_parameter
from hyper_parallel.testing.placing import make, mesh_of


def export(plan, folder, size):
    net = build(0, plan, dist.get_world_size())
    with CommTrace() as trace:
        save_safetensors(net, folder, max_shard_size=size)
    return whole_state(net.state_dict()), [event.op for event in trace.events]


def contents(folder):
    from safetensors.torch import load_file

    return {f".{n}": t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


@pytest.mark.parametrize("plan", ["fsdp x tp", "tp", "replicas"])
def test_the_files_are_those_that_huggingface_hub_writes(ranks, tmp_path, plan):
    (state, ops), *_ = ranks(4, export, plan, tmp_path / "ours", "200KB")
    assert set(ops) <= {"gather"}
    assert [f.name for f in (tmp_path / "ours").iterdir()] == ["model.safetensors"]
    assert state.pop(".head.weight") is not None  # tied: written once, under the first name
    same_tensors(contents(tmp_path / "ours"), state)
    (tmp_path / "theirs").mkdir()
    hub.save_torch_model(build(0, "one rank", 1), tmp_path / "theirs")
    ours, theirs = (parts(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours[0].pop("__metadata__") == {"format": "pt", "head.weight": "embed.weight"}
    assert theirs[0].pop("__metadata__") == {"format": "pt", "head.weight": "embed.weight"}
    assert list(ours[0].items()) == list(theirs[0].items())
    assert ours[1] == theirs[1]


def parts(file):
    """Header and data."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    assert end % 8 == 0
    return json.loads(data[8:end]), data[end:]


def test_shards_of_a_largest_size_and_their_index(ranks, tmp_path):
    folder = tmp_path / "ours"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-00001-of-00009.safetensors").write_text("an older export")
    (state, _), *_ = ranks(4, export, "fsdp x tp", folder, 300)
    del state[".head.weight"]
    same_tensors(contents(folder), state)
    (tmp_path / "theirs").mkdir()
    hub.save_torch_model(build(0, "one rank", 1), tmp_path / "theirs", max_shard_size=300)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index == json.loads((tmp_path / "theirs" / "model.safetensors.index.json").read_text())
    assert {f.name for f in folder.iterdir()} == {f.name for f in (tmp_path / "theirs").iterdir()} | {"config.json"}
    ranks(4, export, "tp", folder, "5GB")
    assert {f.name for f in folder.iterdir()} == {"model.safetensors", "config.json"}


def load_into(plan, folder):
    net = build(1, plan, dist.get_world_size())
    with CommTrace() as trace:
        assert load_safetensors(net, folder) == ([], [])
    assert not trace.events
    assert net.head.weight is net.embed.weight
    return whole_state(net.state_dict())


@pytest.mark.parametrize("size", ["5GB", 300])
@pytest.mark.parametrize(("plan", "count"), [("fsdp x tp", 4), ("fsdp on dim 1", 2), ("tp", 4), ("one rank", 1)])
def test_every_rank_reads_its_slices(ranks, tmp_path, plan, count, size):
    source = build(0, "one rank", 1)
    hub.save_torch_model(source, tmp_path, max_shard_size=size)
    state, *_ = ranks(count, load_into, plan, tmp_path)
    same_tensors(state, whole_state(source.state_dict()))


@pytest.mark.ranks(4)
def test_no_rank_reads_more_than_it_holds(tmp_path, monkeypatch):
    net = nn.Module()
    net.w = as_parameter(make(torch.arange(21.0).reshape(7, 3), mesh_of((4,)), [Shard(0)]), nn.Parameter(torch.ones(1)))
    save_safetensors(net, tmp_path)
    read = []
    original = stored_tensors.StoredValue.make

    def counted(self, bounds):
        found = original(self, bounds)
        read.append(found.numel())
        return found

    monkeypatch.setattr(stored_tensors.StoredValue, "make", counted)
    load_safetensors(net, tmp_path)
    assert sum(read) == net.w.to_local().numel()


@pytest.mark.ranks(4)
def test_what_was_remembered_before_loading_is_not_used_after(tmp_path):
    net = nn.Module()
    net.w = as_parameter(make(torch.ones(2, 3), mesh_of((4,)), [Shard(0)]), nn.Parameter(torch.ones(1)))
    save_safetensors(net, tmp_path)
    from hyper_parallel.tensor.redistribute_cache import remembered

    with torch.no_grad():
        net.w.zero_()
        assert not remembered(net.w, net.w.layout.replicated()).to_local().any()
        load_safetensors(net, tmp_path)  # ranks 2 and 3 hold nothing of it
        assert remembered(net.w, net.w.layout.replicated()).to_local().all()


CONFIG = {
    "vocab_size": 33,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
}


def shard_everything(model):
    """Every parameter over four ranks along dim 0, unevenly where it must be."""
    done = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                if id(parameter) not in done:
                    value = make(parameter.detach(), mesh_of((4,)), [Shard(0)])
                    done[id(parameter)] = as_parameter(value, parameter)
                module._parameters[name] = done[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = make(buffer, mesh_of((4,)), [Replicate()])
    return model


def export_qwen(folder, tied):
    config = transformers.Qwen3Config(**CONFIG, tie_word_embeddings=tied, dtype=torch.bfloat16)
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "theirs")
        config.save_pretrained(folder / "ours")
    dist.barrier()
    save_safetensors(shard_everything(model), folder / "ours", max_shard_size="4KB")
    other = shard_everything(transformers.Qwen3ForCausalLM(config).to(torch.bfloat16))
    load_safetensors(other, folder / "theirs")
    same_tensors(whole_state(other.state_dict()), whole_state(model.state_dict()))
    assert all(isinstance(p, DTensor) for p in other.parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_ours_and_we_read_theirs(ranks, tmp_path, tied):
    ranks(4, export_qwen, tmp_path, tied)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    ours, theirs = (transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / name) for name in ("ours", "theirs"))
    assert ours.dtype == torch.bfloat16
    same_tensors(whole_state(ours.state_dict()), whole_state(theirs.state_dict()))


MOE = {**CONFIG, "moe_intermediate_size": 12, "num_experts": 3, "num_experts_per_tok": 2, "decoder_sparse_step": 1}


def export_experts(folder):
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MOE))
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "theirs", max_shard_size="8KB")
    dist.barrier()
    shard_everything(model)
    save_safetensors(model, folder / "ours", max_shard_size="8KB")
    for name in ("theirs", "ours"):
        other = shard_everything(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MOE)))
        assert load_safetensors(other, folder / name) == ([], [])
        same_tensors(whole_state(other.state_dict()), whole_state(model.state_dict()))


def test_experts_are_stored_one_by_one_as_transformers_stores_them(ranks, tmp_path):
    ranks(4, export_experts, tmp_path)
    same_tensors(contents(tmp_path / "ours"), contents(tmp_path / "theirs"))
    # The split is by size alone; save_pretrained's keeps together what shared memory.
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert "model.layers.1.mlp.experts.2.gate_proj.weight" in index["weight_map"]
    assert len(set(index["weight_map"].values())) == 4


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_what_rank_0_cannot_write_fails_on_every_rank(tmp_path):
    net = build(0, "fsdp", 4)
    if dist.get_rank() == 0:
        (tmp_path / "file").write_text("")
    dist.barrier()
    with pytest.raises(CheckpointError, match=rf"cannot write to {tmp_path}/file: (NotADirectory|FileExists)Error"):
        save_safetensors(net, tmp_path / "file")


def failing_write(folder):
    net = build(1, "fsdp", dist.get_world_size())
    written = []
    original = safetensors_file._write

    def write(stream, tensor):
        if len(written) == 3:
            raise OSError("No space left on device")
        written.append(tensor)
        original(stream, tensor)

    safetensors_file._write = write
    try:
        with pytest.raises(CheckpointError, match="OSError: No space left"):
            save_safetensors(net, folder)
    finally:
        safetensors_file._write = original


def test_a_failed_export_leaves_the_last_one(ranks, tmp_path):
    (state, _), *_ = ranks(4, export, "fsdp", tmp_path, "5GB")
    ranks(4, failing_write, tmp_path)
    del state[".head.weight"]
    same_tensors(contents(tmp_path), state)


@pytest.mark.ranks(4)
def test_all_that_does_not_fit_is_listed(tmp_path):
    net = build(0, "fsdp", 4)
    save_safetensors(net, tmp_path / "a")
    net.down = nn.Linear(2, 3)
    net.new = nn.Parameter(torch.ones(1))
    del net.low
    with pytest.raises(CheckpointError) as error:
        load_safetensors(net, tmp_path / "a")
    for part in (
        f"{tmp_path / 'a'} does not fit the model:\n  missing in the files: new\n  only in the files: low\n",
        "down.weight has shape (6, 7) in the file, (3, 2) in the model",
    ):
        assert part in str(error.value)
    del net.down
    missing, unexpected = load_safetensors(net, tmp_path / "a", strict=False)
    assert (missing, sorted(unexpected)) == (["new"], ["down.bias", "down.weight", "low"])


def test_what_is_not_there_and_what_has_no_memory(tmp_path):
    net = build(0, "one rank", 1)
    with pytest.raises(CheckpointError, match=r"no \*.safetensors file in"):
        load_safetensors(net, tmp_path)
    save_safetensors(net, tmp_path, max_shard_size=300)
    with pytest.raises(RuntimeError, match=r"is on the meta device; .*model.to_empty\(device="):
        load_safetensors(net.to("meta"), tmp_path)
    next(tmp_path.glob("model-00002-of-*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="names files that are not there: model-00002-of-"):
        load_safetensors(build(0, "one rank", 1), tmp_path)
