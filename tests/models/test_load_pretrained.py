"""``load_pretrained``: folders of the hub and configurations, read or drawn by each rank for itself, and written."""

import ctypes
import json
import sys
import threading
from pathlib import Path

import hub_folders as hub
import pytest
import torch
import torch.distributed as dist
import transformers
from hub_folders import FAMILIES, FOLDERS, auto_class, configuration
from safetensors.torch import save_file

from hyper_parallel import CheckpointError, CommTrace, DTensor, ParallelDims, load_pretrained, parallel_report
from hyper_parallel.checkpoint import build_on_meta, give_memory, give_values, load_safetensors
from hyper_parallel.checkpoint.deferred import construction

MESHES = {"tp2": {"tp": 2}, "fsdp2": {"dp_shard": 2}, "fsdp2 x tp2": {"dp_shard": 2, "tp": 2}}


def tensors_of(model):
    """Whole parameters and buffers by name, tied ones under each of their names."""
    found = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in found}


def check_equal(model, twin):
    ours, theirs = tensors_of(model), tensors_of(twin)
    assert ours.keys() == theirs.keys()
    assert {name: tensor.dtype for name, tensor in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    assert [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []


def check_sharded(model):
    """No rank holds much more than its share."""
    shards = [p for p in model.parameters() if isinstance(p, DTensor) and p.to_local().numel() < p.numel()]
    assert sum(p.numel() for p in shards) > 0.4 * sum(p.numel() for p in model.parameters())


# -- from a configuration ---------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", ["tp2", "fsdp2"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*are whole on every rank")
def test_a_configuration_gives_the_values_that_one_device_draws(family, mesh, monkeypatch):
    monkeypatch.setattr(construction, "SMALL", 64)
    config = configuration(family)
    torch.manual_seed(5)
    twin = auto_class(config).from_config(config)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    with CommTrace() as trace:
        model = load_pretrained(config, ParallelDims(**MESHES[mesh]), model_class=type(twin))
    assert not {"broadcast", "scatter"} & trace.counts.keys()
    assert torch.equal(torch.get_rng_state(), after)
    check_equal(model, twin)
    check_sharded(model)
    assert model.training
    assert model.config.to_dict() == twin.config.to_dict()


@pytest.mark.ranks(2)
def test_a_dict_and_a_folder_with_a_configuration_are_drawn_too(tmp_path):
    config = configuration("qwen3", dtype=torch.bfloat16)
    torch.manual_seed(5)
    twin = transformers.AutoModelForCausalLM.from_config(config)
    if dist.get_rank() == 0:
        config.save_pretrained(tmp_path)
    dist.barrier()
    for given in (config.to_dict(), tmp_path, str(tmp_path)):
        torch.manual_seed(5)
        check_equal(load_pretrained(given, ParallelDims(tp=2)), twin)


# -- from folders of the hub ------------------------------------------------------------------------------------------


def load_and_save(folder, target, mesh, dtype):
    config = transformers.AutoConfig.from_pretrained(folder)
    twin = auto_class(config).from_pretrained(folder, dtype=dtype or "auto")
    state = torch.get_rng_state()
    with CommTrace() as trace:
        model = load_pretrained(folder, ParallelDims(**mesh), dtype=dtype)
    assert torch.equal(torch.get_rng_state(), state)
    assert not {"broadcast", "scatter"} & trace.counts.keys()
    assert isinstance(model, type(twin))
    check_equal(model, twin)
    check_sharded(model)
    assert parallel_report(model)
    model.save_pretrained(target, max_shard_size="100KB")
    dist.barrier()
    again = type(twin).from_pretrained(target)
    check_equal(model, again)
    assert not hasattr(again.config, "quantization_config")
    return again.config.to_dict(), twin.config.to_dict()


@pytest.mark.parametrize(
    ("folder", "mesh", "dtype"),
    [
        *((name, "tp2", None) for name in FOLDERS),
        ("deepseek_v3", "fsdp2 x tp2", torch.float32),
        ("qwen3_5", "fsdp2 x tp2", None),
        ("qwen3_moe", "fsdp2", "float32"),
        ("gpt_oss", "fsdp2 x tp2", None),
    ],
)
def test_a_folder_is_read_as_from_pretrained_reads_it_and_written_back(ranks, tmp_path, folder, mesh, dtype):
    FOLDERS[folder](tmp_path / "hub")
    mesh = MESHES[mesh]
    (written, read), *_ = ranks(2 * len(mesh), load_and_save, tmp_path / "hub", tmp_path / "ours", mesh, dtype)
    for name in ("_name_or_path", "architectures"):
        written.pop(name)
        read.pop(name)
    assert written == read
    theirs, ours = names_in(tmp_path / "hub"), names_in(tmp_path / "ours")
    ignored = ("model.layers.61.", "mtp.", "model.layers.0.self_attn.rotary_emb.")
    scales = ("_scale_inv", ".scale", "_scales")
    theirs = {n.removesuffix("_blocks") for n in theirs if not n.startswith(ignored) and not n.endswith(scales)}
    assert ours == theirs | {n for n in ours if ".hc_" in n and n.endswith(".scale")}


def names_in(folder):
    return set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])


def load_plain(folder, mesh):
    return tensors_of(load_pretrained(folder, ParallelDims(**mesh)))


def test_blocks_of_scales_that_end_inside_of_matrices_and_shards(ranks, tmp_path):
    """As those of DeepSeek-V3: 576 rows in blocks of 128, which transformers itself does not read."""
    plain = hub.deepseek_v3_folder(tmp_path / "scaled", 24, 40)
    hub.write_folder(tmp_path / "plain", configuration("deepseek_v3", dtype=torch.bfloat16), plain)
    want = tensors_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
    for got in ranks(4, load_plain, tmp_path / "scaled", MESHES["fsdp2 x tp2"]):
        assert [name for name, tensor in want.items() if not torch.equal(got[name], tensor)] == []


def test_text_alone_out_of_a_folder_with_images(ranks, tmp_path):
    hub.qwen3_5_folder(tmp_path / "hub")
    (got, *_), want = ranks(2, load_text, tmp_path / "hub"), load_text_alone(tmp_path / "hub")
    assert [name for name, tensor in want.items() if not torch.equal(got[name], tensor)] == []


def load_text(folder):
    return tensors_of(load_pretrained(folder, ParallelDims(tp=2), model_class=transformers.Qwen3_5ForCausalLM))


def load_text_alone(folder):
    return tensors_of(transformers.Qwen3_5ForCausalLM.from_pretrained(folder))


def save_on(mesh, folder):
    torch.manual_seed(5)
    load_pretrained(configuration("qwen3_moe"), ParallelDims(**mesh)).save_pretrained(folder)


def test_any_mesh_reads_what_another_one_wrote(ranks, tmp_path):
    ranks(4, save_on, MESHES["fsdp2 x tp2"], tmp_path)
    assert {file.name for file in tmp_path.iterdir()} >= {"config.json", "generation_config.json", "model.safetensors"}
    torch.manual_seed(5)
    want = tensors_of(transformers.AutoModelForCausalLM.from_config(configuration("qwen3_moe")))
    for mesh in ({"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}):
        got, *_ = ranks(2, load_plain, tmp_path, mesh)
        assert [name for name, tensor in want.items() if not torch.equal(got[name], tensor)] == []


@pytest.mark.ranks(2)
def test_a_loaded_model_trains_as_one_device(tmp_path):
    if dist.get_rank() == 0:
        hub.llama_folder(tmp_path / "hub")
    dist.barrier()
    twin = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hub", dtype=torch.float32).train()
    model = load_pretrained(tmp_path / "hub", ParallelDims(tp=2), dtype=torch.float32, checkpointing="full")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(1))
    for net in (model, twin):
        net(input_ids=ids, labels=ids).loss.backward()
    for (name, parameter), single in zip(model.named_parameters(), twin.parameters(), strict=True):
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert (grad - single.grad).norm() <= 1e-5 * single.grad.norm(), name


# -- memory -----------------------------------------------------------------------------------------------------------


class HeapUse(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


class Peak(threading.Thread):
    """The most memory that this process had while the block ran, above what it had before.

    Attributes:
        used: bytes that were allocated.
        resident: bytes of memory that were the process's own, no pages of files; holes in its heap count.
    """

    def __enter__(self):
        self.library = ctypes.CDLL(None)
        self.library.mallinfo2.restype = HeapUse
        self.before, self.over, self.used, self.resident = self.now(), threading.Event(), 0, 0
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.join()

    def run(self):
        while not self.over.wait(0.002):
            used, resident = self.now()
            self.used = max(self.used, used - self.before[0])
            self.resident = max(self.resident, resident - self.before[1])

    def now(self):
        heap = self.library.mallinfo2()
        lines = Path("/proc/self/status").read_text().splitlines()
        resident = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
        return heap.uordblks + heap.hblkhd, resident


LARGE = {
    "vocab_size": 4096, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64,
    "num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip


def load_large(given):
    with Peak() as loading:
        model = load_pretrained(given, ParallelDims(dp_shard=2, tp=2))
    whole = sum(p.nbytes for p in model.parameters())
    held = sum(p.to_local().nbytes for p in model.parameters())
    with Peak() as saving:
        model.save_pretrained(Path(given).parent / "ours" if isinstance(given, Path) else given.name_or_path)
    return whole, held, loading.used, loading.resident, saving.used, saving.resident


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc, and /proc")
@pytest.mark.parametrize("from_files", [True, False])
def test_no_rank_ever_holds_the_whole_model(ranks, tmp_path, from_files):
    given = transformers.LlamaConfig(**LARGE, name_or_path=str(tmp_path / "ours"))
    if from_files:
        with Peak() as alone:
            model = transformers.LlamaForCausalLM(given)
        assert min(alone.used, alone.resident) > 0.9 * sum(
            p.nbytes for p in model.parameters()
        )  # the measurement measures
        given = tmp_path / "hub"
        hub.write_folder(given, model.config, model.state_dict())
        del model
    for whole, held, loading, loading_resident, saving, saving_resident in ranks(4, load_large, given):
        assert whole > 180e6
        assert held < 0.27 * whole
        assert held < loading < 0.45 * whole
        assert saving < 0.2 * whole
        assert max(loading_resident, saving_resident) < 0.75 * whole


# -- what is refused --------------------------------------------------------------------------------------------------


def refuse(given, match, error=ValueError, **options):
    with pytest.raises(error, match=match):
        load_pretrained(given, ParallelDims(world_size=1), **options)


def test_what_is_no_folder_of_a_model(tmp_path):
    refuse("Qwen/Qwen3-8B", r"there is no Qwen/Qwen3-8B/config.json; .* hf download Qwen/Qwen3-8B", FileNotFoundError)
    refuse(tmp_path, rf"there is no {tmp_path}/config.json$", FileNotFoundError)
    refuse(7, "takes a folder, a configuration or a dict, got int", TypeError)
    refuse({"vocab_size": 7}, "has a 'model_type'")
    refuse(configuration("llama"), "dtype is 'auto' or the name of one, such as 'bfloat16', got 'bf17'", dtype="bf17")


def test_weights_of_other_kinds(tmp_path):
    configuration("llama").save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_text("")
    refuse(tmp_path, r"reads safetensors files, and .* has pytorch_model.bin; convert it once: AutoModelForCausalLM")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_weights_that_are_quantised_in_other_ways(tmp_path, method):
    settings = {"quant_method": method, "bits": 4, "load_in_4bit": True}
    hub.write_folder(tmp_path / "hub", configuration("llama"), {"x": torch.ones(1)}, 1, quantization_config=settings)
    refuse(
        tmp_path / "hub", rf"is quantised by '{method}'.* Use the weights that it was made from, or dequantise it once"
    )


def test_code_of_a_folder_is_run_only_when_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    hub.plain_model("llama").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    classes = {"AutoConfig": "model.OwnConfig", "AutoModelForCausalLM": "model.Own"}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "model_type": "own", "auto_map": classes}))
    (tmp_path / "model.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    refuse(tmp_path, r"is code in that folder, which would be run; read it, and pass trust_remote_code=True")
    model = load_pretrained(tmp_path, ParallelDims(world_size=1), trust_remote_code=True)
    assert type(model).__name__ == "Own"
    check_equal(model, hub.plain_model("llama"))


def test_files_that_do_not_fit(tmp_path):
    model = hub.plain_model("qwen3_moe")
    tensors = hub.one_by_one(model.state_dict())
    for name in ("layers.0.mlp.experts.2.up_proj", "layers.0.mlp.experts.3.up_proj", "norm"):
        del tensors[f"model.{name}.weight"]
    tensors["model.layers.1.self_attn.o_proj.weight"] = torch.ones(3, 3, dtype=torch.bfloat16)
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.ones(64, 64, dtype=torch.int8)
    tensors["strange.weight"] = torch.ones(3)
    hub.write_folder(tmp_path / "hub", model.config, tensors)
    with pytest.raises(CheckpointError) as error:
        load_pretrained(tmp_path / "hub", ParallelDims(world_size=1))
    for part in (
        "missing in the files: model.layers.0.mlp.experts.2.up_proj.weight, ",
        " model.layers.0.mlp.experts.3.up_proj.weight, model.norm.weight\n",
        "only in the files: strange.weight",
        "model.layers.1.self_attn.o_proj.weight has shape (3, 3) in the file, (64, 64) in the model",
        "q_proj.weight is torch.int8 in the file without scales that are known here, torch.bfloat16 in the model",
    ):
        assert part in str(error.value)


def test_tied_tensors_that_the_files_have_twice(tmp_path):
    model = hub.plain_model("llama", tie_word_embeddings=True)
    state = dict(model.state_dict())
    hub.write_folder(tmp_path / "equal", model.config, {n: t.clone() for n, t in state.items()})
    check_equal(load_pretrained(tmp_path / "equal", ParallelDims(world_size=1)), model)
    hub.write_folder(tmp_path / "other", model.config, {**state, "lm_head.weight": state["lm_head.weight"] + 1})
    refuse(
        tmp_path / "other",
        r"has other numbers in the file; build the model with tie_word_embeddings=False",
        CheckpointError,
    )


def test_buffers_that_nobody_knows(tmp_path):
    hub.llama_folder(tmp_path / "hub")
    model, values = build_on_meta(lambda: hub.plain_model("llama", tie_word_embeddings=True))
    model.register_buffer("late", torch.ones(3), persistent=False)
    give_memory(model, "cpu")
    with pytest.raises(ValueError, match="no values were given for late, and nobody knows how they are made"):
        give_values(model, values)
    with pytest.raises(CheckpointError, match="no values for late: the files have none, and nobody knows how"):
        load_safetensors(model, tmp_path / "hub", defaults=values)
    load_safetensors(model, tmp_path / "hub", defaults={**values, "late": torch.arange(3.0)})
    assert model.late.tolist() == [0, 1, 2]


def test_files_beside_the_weights_are_not_read(tmp_path):
    model = hub.plain_model("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    save_file({"base_model.x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    check_equal(load_pretrained(tmp_path, ParallelDims(world_size=1)), model)
