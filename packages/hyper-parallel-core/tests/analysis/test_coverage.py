"""``hyper-parallel coverage``: which functions of a training step have a rule, and who has it."""

import json
import os
import textwrap

import pytest
import torch

from hyper_parallel.analysis.coverage import coverage_of, trace_training_step
from hyper_parallel.analysis.sample_models import SampleModel, sample_models
from hyper_parallel.cli import main
from hyper_parallel.plugins import PluginManager
from hyper_parallel.registry import Registry

MODEL = """
    import torch

    squeeze_out = torch.library.custom_op(
        "coverage_of_a_test::squeeze_out", lambda x: x.tanh(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    squeeze_out.register_autograd(lambda ctx, grad: grad)

    class Small(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x):
            mask = torch.ones(4).cumprod(0)         # made from nothing: plain also in a sharded run
            return torch.ops.coverage_of_a_test.squeeze_out(self.layer(x)) * mask

    def factory():
        return Small(), {"x": torch.randn(2, 4)}

    def not_a_module():
        return 3

    def broken():
        raise RuntimeError("no such weights")
"""

TABLE = """
    __default__: {distributed_op_module: hp_acme, distributed_op_class: Rule}
    linear: {}
    mul: {}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "small_model_of_a_test.py").write_text(textwrap.dedent(MODEL))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def of(found):
    return {one.name: one for one in found}


def test_functions_are_those_called_on_what_would_be_sharded(folder):
    (sample,) = sample_models("small_model_of_a_test:factory")
    functions = of(coverage_of(trace_training_step(sample), Registry(PluginManager([], {}), {})))
    assert {"torch.nn.functional.linear", "torch.ops.coverage_of_a_test.squeeze_out", "torch.Tensor.mul"} <= set(
        functions
    )
    assert "torch.Tensor.cumprod" not in functions
    assert "torch.Tensor.addcdiv_" in functions, "the optimizer's step counts too"
    assert functions["torch.Tensor.grad"].provider == functions["torch.Tensor.backward"].provider == "core"


def test_what_is_missing_comes_first_with_the_pack_that_has_it(folder):
    (sample,) = sample_models("small_model_of_a_test:factory")
    found = coverage_of(trace_training_step(sample), Registry(PluginManager([], {}), {}))
    statuses = [one.status for one in found]
    assert statuses == sorted(statuses)  # missing before ok
    functions = of(found)
    linear, own = functions["torch.nn.functional.linear"], functions["torch.ops.coverage_of_a_test.squeeze_out"]
    assert (linear.status, linear.pack) == ("missing", "hyper-parallel-ops-basic")
    assert (own.status, own.pack) == ("missing", None)
    assert own.where.partition(":")[0].endswith("small_model_of_a_test.py")


def test_rule_whose_class_cannot_be_used_does_not_cover(folder):
    registry = Registry(PluginManager([], {}), {})
    table = folder / "rules.yaml"
    table.write_text("linear: {distributed_op_module: gone, distributed_op_class: A}")
    registry.load_table(table)
    (sample,) = sample_models("small_model_of_a_test:factory")
    linear = of(coverage_of(trace_training_step(sample), registry))["torch.nn.functional.linear"]
    assert linear.status == "broken"
    assert "gone cannot be imported" in linear.reason


def test_program_reports_and_ends_with_one(site, folder):
    package = site.install("acme", ops=TABLE)
    (package / "__init__.py").write_text(
        "def __getattr__(name):\n"
        "    if name != 'Rule': raise AttributeError(name)\n"
        "    from hyper_parallel import DistributedOp\n"
        "    return type('Rule', (DistributedOp,), {})\n"
    )
    report = folder / "report.html"
    done = site.run(
        "-m", "hyper_parallel", "coverage", "small_model_of_a_test:factory", "--html", str(report),
        check=False, HYPER_PARALLEL_PLUGINS="acme", PYTHONPATH=f"{site.folder}{os.pathsep}{folder}",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["torch.nn.functional.linear", "1", "ok", "acme"] in lines
    assert ["torch.ops.coverage_of_a_test.squeeze_out", "1", "missing", "-"] in lines
    assert "no pack of ours has one; to add one: docs/write-an-op.md" in done.stdout
    assert "hyper-parallel-ops-basic has one, but is " in done.stdout  # not installed, or blocked by this very setting
    page = report.read_text()
    assert page.startswith("<!doctype html>")
    assert '<tr class="bad"><td>torch.ops.coverage_of_a_test.squeeze_out' in page


def test_json_has_a_version_and_the_exit_code_is_zero_when_all_is_covered(folder, capsys):
    (folder / "tiny_model_of_a_test.py").write_text(
        textwrap.dedent(
            """
            import torch

            class Scale(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.weight = torch.nn.Parameter(torch.ones(3))
                def forward(self):
                    return {"loss": self.weight}

            def factory():
                return Scale(), ()
            """
        )
    )
    code = main(["coverage", "tiny_model_of_a_test:factory", "--json"])
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == 1
    assert content["ok"] is (code == 0) is all(one["status"] == "ok" for one in content["functions"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_module_at_all:factory", "there is no module 'no_such_module_at_all'"),
        ("small_model_of_a_test:factori", "has no function 'factori'"),
        ("small_model_of_a_test:not_a_module", "returned a int; it must return a module"),
        ("small_model_of_a_test:broken", 'in broken\n    raise RuntimeError("no such weights")\nRuntimeError'),
    ],
)
def test_model_that_cannot_be_used_ends_with_two(folder, capsys, name, text):
    assert main(["coverage", name]) == 2
    assert text in capsys.readouterr().err


def test_model_without_a_gradient_is_told():
    with pytest.raises(Exception, match="no training step to look at"):
        SampleModel(torch.nn.Identity(), (torch.ones(2),)).loss()


KINDS = "qwen3 qwen3_moe qwen3_next qwen3_vl_moe qwen3_5 qwen3_5_moe llama deepseek_v3".split()


@pytest.fixture
def offline(monkeypatch):
    """No network, and a note of who tried."""
    tried = []

    def refuse(address, *args, **kwargs):
        tried.append(address)
        raise OSError("Network is unreachable")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("socket.socket.connect", lambda self, address: refuse(address))
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tried


def test_unknown_model_without_network_is_told_at_once(offline, capsys):
    pytest.importorskip("transformers")
    assert main(["coverage", "qwen33"]) == 2
    told = capsys.readouterr().err
    assert "'qwen33' is no model type of transformers" in told
    assert "cannot be reached (Network is unreachable)" in told
    assert "did you mean qwen3" in told
    assert "give a model id, a model type such as qwen3, a config.json or its folder, or package:function" in told
    assert len(offline) <= 2  # not again and again


def test_folder_without_a_configuration_is_told(tmp_path, offline, capsys):
    pytest.importorskip("transformers")
    assert main(["coverage", str(tmp_path)]) == 2
    assert "it has no usable config.json" in capsys.readouterr().err
    assert offline == []


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_model_is_built_small_from_its_type(offline, kind):
    pytest.importorskip("transformers")
    sample = next(sample_models(kind))
    on_cpu = next(sample.model.parameters()).device.type == "cpu"
    assert not on_cpu or sum(p.numel() for p in sample.model.parameters()) < 10_000_000
    trace = trace_training_step(sample)
    assert torch.nn.functional.linear in trace.counts
    assert offline == []


def test_transformers_model_is_built_small_from_a_config(tmp_path, offline):
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model("qwen3").save_pretrained(tmp_path)
    assert next(sample_models(str(tmp_path))).how == "small, on the CPU, random weights"
