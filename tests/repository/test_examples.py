"""The recipes of examples/ learn what one device learns."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

EXAMPLES = Path(__file__).parents[2] / "examples"


def recipe(family):
    spec = importlib.util.spec_from_file_location(f"{family}_recipe", EXAMPLES / family / "parallelize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_alone(model, ids, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks(4)
def test_llama3():
    module = recipe("llama3")
    found = module.train(steps=3)
    want = train_alone(module.small_llama(), torch.cat([module.batch(rank) for rank in range(2)]), 3)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-4)


@pytest.mark.ranks(4)
def test_qwen3_from_safetensors(tmp_path):
    module = recipe("qwen3")
    if dist.get_rank() == 0:
        module.save_small_model(tmp_path)
    dist.barrier()
    found = module.train(tmp_path, steps=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, use_cache=False).train()
    want = train_alone(model, module.batch(model.config.vocab_size), 3)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-4)


def test_from_a_folder_to_a_folder(tmp_path):
    """The page shows the script as it is, and it runs; what it writes plain transformers reads."""
    script = EXAMPLES / "train_folder.py"
    shown = (EXAMPLES.parent / "docs" / "train-a-model.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert shown == script.read_text().partition('"""\n\n')[2]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    config = transformers.Qwen3Config(vocab_size=64, num_key_value_heads=2, **sizes)
    before = transformers.Qwen3ForCausalLM(config)
    before.save_pretrained(tmp_path / "folder")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", script]
    done = subprocess.run(
        [*command, tmp_path / "folder", tmp_path / "tuned"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "sequence_parallel=True" in done.stdout
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    change = after.model.norm.weight.detach() - before.model.norm.weight.detach()
    assert 0 < change.abs().max() < 1e-2


def test_training_script_under_explain_leaves_its_results_alone(tmp_path):
    """They would come from values that are only pretended."""
    arguments = ("--steps", "1", "--layers", "1", "--length", "16", "--no-check", "--out", str(tmp_path))
    command = [sys.executable, "-m", "hyper_parallel", "explain", EXAMPLES / "train.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "all_gather" in done.stdout
    assert list(tmp_path.iterdir()) == []


SCRIPTS = [path for path in EXAMPLES.rglob("*.py") if "dist.init_process_group(" in path.read_text()]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_script_leaves_the_process_group_however_it_ends(path):
    """A rank that fails and keeps its connections open leaves the others waiting for it."""
    ends = [
        ast.unparse(statement)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Try)
        for statement in node.finalbody
    ]
    assert any("dist.destroy_process_group()" in end for end in ends)


def test_scripts_are_looked_at():
    assert len(SCRIPTS) == 6
