"""Folders as the hub has them, written by hand from what a plain ``transformers`` model holds: names and pieces of the
hub, tensors that a model passes over, scales, several files with an index."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from model_steps import DELTA_SIZES, EXPERTS, SIZES, SPECIAL_TOKENS, STEPS, VISION
from safetensors.torch import load_file, save_file

State = dict[str, torch.Tensor]

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def configuration(family: str, **changes: Any) -> Any:
    """A tiny configuration; ``_vl`` for images beside text."""
    with_images = {"vision_config": VISION, **SPECIAL_TOKENS}
    if family in STEPS:
        sizes = {**SIZES, **STEPS[family].sizes, **changes}
        return transformers.AutoConfig.for_model(STEPS[family].model_type, **sizes)
    if family == "gpt_oss":
        return transformers.AutoConfig.for_model("gpt_oss", **{**SIZES, **EXPERTS, **changes})
    text = {**SIZES, **changes}
    if family in ("qwen3_5_vl", "qwen3_5_moe_vl"):
        text |= DELTA_SIZES | (EXPERTS if "moe" in family else {})
    return transformers.AutoConfig.for_model(family.removesuffix("_vl") if "3_5" in family else family,
                                             text_config=text, **with_images)  # fmt: skip


FAMILIES = [*STEPS, "gpt_oss", "qwen3_vl", "qwen3_5_vl", "qwen3_5_moe_vl"]


def auto_class(config: Any) -> Any:
    """Of a model with images where the configuration has them."""
    images = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM


def plain_model(family: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> torch.nn.Module:
    """On one device, random, always the same; norms and biases too."""
    config = configuration(family, **changes)
    torch.manual_seed(1)
    model = auto_class(config).from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape).to(dtype) / 8)
    return model


def write_folder(folder: Path, config: Any, tensors: State, files: int = 3, **more: Any) -> None:
    """``config.json`` with more settings in it, and the tensors in turn in several files with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **more}, default=str))
    parts: list[State] = [{} for _ in range(files)]
    for n, (name, tensor) in enumerate(tensors.items()):
        parts[n % files][name] = tensor.contiguous()
    names = [f"model-{n + 1:05}-of-{files:05}.safetensors" for n in range(files)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, metadata={"format": "pt"})
    index = {member: name for name, part in zip(names, parts, strict=True) for member in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def one_by_one(state: Mapping[str, torch.Tensor]) -> State:
    """The experts of a layer, which the model holds in two tensors, expert by expert."""
    found: State = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for n, expert in enumerate(tensor):
                found[f"{stem}{n}.gate_proj.weight"], found[f"{stem}{n}.up_proj.weight"] = expert.chunk(2)
        elif name.endswith("experts.down_proj"):
            found.update({f"{name.removesuffix('down_proj')}{n}.down_proj.weight": e for n, e in enumerate(tensor)})
        else:
            found[name] = tensor
    return found


def in_float8(matrix: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of 8 bits, and a scale for each block."""
    numbers = torch.empty(matrix.shape)
    scales = torch.empty(-(-matrix.shape[0] // rows), -(-matrix.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = matrix[block].float().abs().max() / 448
            numbers[block] = matrix[block].float() / scales[i, j]
    return numbers.to(torch.float8_e4m3fn), scales


def in_four_bits(numbers: torch.Tensor, group: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes with two numbers each, the first one in the low half; and for each group of the last dim the power of two
    that they are multiplied by, as the byte that stands for it."""
    grouped = numbers.float().unflatten(-1, (-1, group))
    powers = torch.floor(torch.log2(grouped.abs().amax(-1, keepdim=True).clamp(min=1e-20))) - 2
    scaled = grouped / torch.exp2(powers)
    nearest = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (powers.squeeze(-1) + 127).to(torch.uint8)


def from_float8(numbers: torch.Tensor, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """What :func:`in_float8` stands for, rounded as the model holds it."""
    factors = scales.repeat_interleave(rows, 0)[: numbers.shape[0]].repeat_interleave(columns, 1)
    return (numbers.float() * factors[:, : numbers.shape[1]]).to(torch.bfloat16)


def deepseek_v3_folder(folder: Path, rows: int = 8, columns: int = 16) -> State:
    """As DeepSeek-V3: experts one by one, float8 with scales, one more layer (for several tokens at once) that
    ``transformers`` passes over. Returns the tensors as they are without scales."""
    model = plain_model("deepseek_v3")
    tensors, plain = {}, one_by_one(model.state_dict())
    for name, tensor in plain.items():
        tensors[name] = tensor
        if tensor.ndim == 2 and re.search(r"layers.*_proj(_with_mqa)?\.weight", name):
            scaled = in_float8(tensor, rows, columns)
            tensors[name], tensors[f"{name}_scale_inv"] = scaled
            plain[name] = from_float8(*scaled, rows, columns)
    for name in ("embed_tokens.weight", "shared_head.head.weight", "eh_proj.weight"):
        tensors[f"model.layers.61.{name}"] = torch.ones(3, 3, dtype=torch.bfloat16)
    scheme = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [rows, columns]}
    write_folder(folder, model.config, tensors, quantization_config=scheme)
    return plain


def gpt_oss_folder(folder: Path) -> None:
    """As gpt-oss: experts in 4 bits (MXFP4), the rest in bfloat16."""
    model = plain_model("gpt_oss")
    tensors: State = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            numbers, tensors[f"{name}_scales"] = in_four_bits(tensor.transpose(1, 2))
            tensors[f"{name}_blocks"] = numbers.unflatten(-1, (-1, 16))
        else:
            tensors[name] = tensor
    write_folder(folder, model.config, tensors, quantization_config={"quant_method": "mxfp4"})


def qwen3_5_folder(folder: Path) -> None:
    """As Qwen3.5: a model with images, a part that predicts several tokens, embeddings that are tied."""
    model = plain_model("qwen3_5_vl", tie_word_embeddings=True)
    model.config.tie_word_embeddings = True
    tensors = dict(model.state_dict())
    tensors.pop("lm_head.weight")
    tensors["mtp.fc.weight"] = torch.ones(2, 2, dtype=torch.bfloat16)
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = torch.ones(2, 2, dtype=torch.bfloat16)
    write_folder(folder, model.config, tensors, architectures=["Qwen3_5ForConditionalGeneration"])


def qwen3_moe_folder(folder: Path) -> None:
    """As Qwen3-MoE: experts one by one."""
    model = plain_model("qwen3_moe")
    write_folder(folder, model.config, one_by_one(model.state_dict()), architectures=["Qwen3MoeForCausalLM"])


def llama_folder(folder: Path) -> None:
    """As Llama: tied embeddings under one name, and tables of angles that older versions stored."""
    model = plain_model("llama", tie_word_embeddings=True)
    tensors = dict(model.state_dict())
    del tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    write_folder(folder, model.config, tensors)


def deepseek_v4_folder(folder: Path) -> None:
    """As DeepSeek-V4: names of its own, attention in float8, experts in 4 bits, scales that are powers of two."""
    model = plain_model("deepseek_v4")
    model.save_pretrained(folder / "plain")
    tensors: State = {}
    for name, tensor in load_file(folder / "plain" / "model.safetensors").items():
        tensors[name] = tensor
        if re.search(r"experts.\d+.w[123].weight", name):
            numbers, powers = in_four_bits(tensor)
            tensors[name], tensors[name.replace("weight", "scale")] = (
                numbers.view(torch.int8), powers.view(torch.float8_e8m0fnu)
            )  # fmt: skip
        elif re.search(r"attn.w[qk]v?_?[ab]?.weight", name):
            tensors[name], tensors[name.replace("weight", "scale")] = in_float8(tensor, 8, 16)
    shutil.rmtree(folder)
    scheme = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 16]}
    write_folder(folder, model.config, tensors, quantization_config=scheme)


FOLDERS = {
    "deepseek_v3": deepseek_v3_folder,
    "deepseek_v4": deepseek_v4_folder,
    "gpt_oss": gpt_oss_folder,
    "llama": llama_folder,
    "qwen3_5": qwen3_5_folder,
    "qwen3_moe": qwen3_moe_folder,
}
