"""The flash attention path of ``transformers`` on a CPU, with kernels in plain PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import PreTrainedModel, modeling_flash_attention_utils
from transformers.integrations import npu_flash_attention

from hyper_parallel_ops_deepseek import reference

sys.path.insert(0, str(Path(__file__).parents[1] / "packages/hyper-parallel-ops-basic/tests/stand_ins"))

import flash_attn

KERNELS = {
    "cuda": (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func),
    "npu": (npu_flash_attention.npu_flash_attn_func, npu_flash_attention.npu_flash_attn_varlen_func),
}


@contextmanager
def flash_path(kernels: str, *models: torch.nn.Module) -> Iterator[None]:
    """Let models use ``flash_attention_2``; the function that each kernel is comes from the package ``flash_attn``, or
    is ``torch_npu.npu_fusion_attention`` inside of the functions that ``transformers`` has for NPUs."""
    pad = modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input
    with (
        patch.object(npu_flash_attention, "npu_fusion_attention", reference.npu_fusion_attention, create=True),
        patch.object(modeling_flash_attention_utils, "_loaded_implementation", None),
        patch.object(modeling_flash_attention_utils, "_lazy_imports", lambda *_, **__: (*KERNELS[kernels], None, *pad)),
        patch.object(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True),
    ):
        for model in models:
            model.set_attn_implementation("flash_attention_2")
        yield
