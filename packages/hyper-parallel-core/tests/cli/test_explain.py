"""``hyper-parallel explain``: layouts, redistributions and collectives of a program, without a cluster."""

import importlib
import json
import os
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.analysis.fake_world import fake_world, parse_mesh
from hyper_parallel.analysis.op_trace import readable_size
from hyper_parallel.checkpoint import saving
from hyper_parallel.cli import main
from hyper_parallel.plugins import PluginManager
from hyper_parallel.registry import Registry, use_registry

PROGRAM = """
    import os, sys
    import torch
    import torch.distributed as dist
    from hyper_parallel import DTensor, Partial, Replicate, Shard, init_device_mesh

    def work(mesh):
        x = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0), Partial()]).requires_grad_()
        for _ in range(3):
            y = x.exp()                                            # line 9
        y.redistribute(placements=[Replicate(), Replicate()])      # line 10
        return y

    def broken():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        work(mesh).expm1()

    class Odd(BaseException): pass

    def odd(mesh):
        work(mesh)
        raise Odd("no Exception")

    if __name__ == "__main__":
        dist.init_process_group("gloo")                            # keeps the pretended one
        print("RANK", dist.get_rank(), os.environ["WORLD_SIZE"], sys.argv[1:])
        work(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))).mul(2.0)
        dist.destroy_process_group()
        sys.exit(0)
"""

RULES = """
    __default__: {distributed_op_module: hyper_parallel._rules.families.elementwise, distributed_op_class: Elementwise}
    exp: {}
    mul: {params: {linear: each}}
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    path = tmp_path / "program_of_a_test.py"
    path.write_text(textwrap.dedent(PROGRAM).lstrip())
    (tmp_path / "rules.yaml").write_text(textwrap.dedent(RULES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry(PluginManager([], {}), {})
    registry.load_table(tmp_path / "rules.yaml")
    with use_registry(registry):
        yield path
    sys.modules.pop(path.stem, None)  # each test imports its own


def test_script_runs_as_it_is_and_every_operator_is_shown(program, capsys):
    assert main(["explain", "--mesh", "dp=2,tp=2", str(program), "--flag", "3"]) == 0
    assert not dist.is_initialized()
    assert "WORLD_SIZE" not in os.environ
    shown = capsys.readouterr()
    assert "RANK 0 4 ['--flag', '3']" in shown.err
    assert (
        textwrap.dedent(
            f"""
        COLLECTIVE  CALLS  BYTES  AXES
        all_gather  1      128    dp
        all_reduce  3      192    tp

        layouts are written per mesh axis: dp, tp

        Tensor.exp  x3
          at    {program}:9
          in    [8, 4] S(0),P(sum)
          move  S(0),P(sum) -> S(0),R
          comm  all_reduce 64 B over tp (2 ranks)
          out   [8, 4] S(0),R
        (outside operators)
          at    {program}:10
          move  S(0),R -> R,R
          comm  all_gather 128 B over dp (2 ranks)
        Tensor.mul
          at    {program}:26
          in    [8, 4] S(0),R
          out   [8, 4] S(0),R
        """
        )
        == "\n" + shown.out
    )


TWO_MESHES = """
    import torch
    from hyper_parallel import Partial, DTensor, Replicate, Shard, init_device_mesh

    def work(mesh):
        DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()]).exp()
        DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0), Replicate()]).full_tensor()
        DTensor.from_local(torch.ones(4, 4), mesh["fsdp"], [Shard(0)]).full_tensor()
        DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()]).exp()
"""


@pytest.mark.parametrize("sizes", ["fsdp=2,tp=2", "tp=2,fsdp=2"])
def test_axes_are_those_of_the_mesh_that_communicates(program, capsys, sizes):
    program.write_text(textwrap.dedent(TWO_MESHES))
    assert main(["explain", "--mesh", sizes, "program_of_a_test:work"]) == 0
    shown = capsys.readouterr().out
    assert f"layouts are written per mesh axis: {sizes.replace('=2', '').replace(',', ', ')}\n" in shown
    assert "in    [4, 4] P(sum) on tp\n  move  P(sum) -> R on tp\n  comm  all_reduce 64 B over tp (2 ranks)" in shown
    assert "  comm  all_gather 128 B over fsdp (2 ranks)" in shown or "over fsdp (2 ranks)" in shown
    totals = [line.split() for line in shown.partition("\n\n")[0].splitlines()[1:]]
    assert {(row[0], row[3]) for row in totals} == {("all_reduce", "tp"), ("all_gather", "fsdp")} | (
        {("all_gather", "tp")} if sizes.startswith("tp") else set()
    )


MODULES = """
    import torch
    from torch import nn
    from hyper_parallel import DTensor, Layout, Replicate, Shard, distribute_tensor

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Tanh() for _ in range(3))
            self.weight = nn.Parameter(torch.ones(6, 2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.exp()

    def work(mesh):
        net = Net()
        net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh, [Replicate(), Shard(0)]))
        x = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0), Replicate()]).requires_grad_()
        net(x).exp()
"""


def test_modules_and_the_memory_of_a_rank_are_shown(program, capsys):
    """Layers that do the same are one step; what tanh keeps is its result, what exp keeps too."""
    program.write_text(textwrap.dedent(MODULES))
    with (program.parent / "rules.yaml").open("a") as rules:
        rules.write("tanh: {}\n")
    registry = Registry(PluginManager([], {}), {})
    registry.load_table(program.parent / "rules.yaml")
    with use_registry(registry):
        assert main(["explain", "--mesh", "dp=2,tp=3", "--json", "program_of_a_test:work"]) == 0
        content = json.loads(capsys.readouterr().out)
        assert main(["explain", "--mesh", "dp=2,tp=3", "--summary", "program_of_a_test:work"]) == 0
        summary = capsys.readouterr().out
    steps = [(step["name"], step["module"], step["times"]) for step in content["steps"]]
    assert ("Tensor.exp", "", 1) in steps
    assert [(module, times) for name, module, times in steps if "tanh" in name] == [("layers.*", 3)]
    weight, activation = 2 * 2 * 4, 4 * 4 * 4
    assert content["memory"] == {
        "parameters": weight, "gradients": weight, "AdamW": 2 * weight, "activations": 5 * activation,
    }  # fmt: skip
    *totals, memory = summary.splitlines()
    assert {row.split()[0] for row in totals} >= {"COLLECTIVE", "broadcast", "scatter"}  # of distribute_tensor
    assert memory == "memory on this rank: parameters 16 B, gradients 16 B, AdamW 32 B, activations 320 B"


def test_function_gets_the_mesh_and_equal_steps_can_be_shown_one_by_one(program, capsys):
    assert main(["explain", "--mesh", "a=4,b=8", "--all", "--json", "program_of_a_test:work"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["schema"], content["mesh"], content["ok"]) == (1, {"a": 4, "b": 8}, True)
    assert [step["name"] for step in content["steps"]] == ["Tensor.exp"] * 3 + ["(outside operators)"]
    assert content["steps"][0]["inputs"] == ["[16, 4] S(0),P(sum)"]
    assert content["steps"][0]["collectives"] == [
        {"op": "all_reduce", "nbytes": 64, "axes": ["b"], "ranks": 8, "change": "S(0),P(sum) -> S(0),R"}
    ]
    assert content["totals"][0] == {"collective": "all_gather", "calls": "1", "bytes": "256", "axes": "a"}


def test_program_that_fails_is_shown_up_to_there(program, capsys, tmp_path):
    report = tmp_path / "report.html"
    assert main(["explain", "--html", str(report), "program_of_a_test:broken"]) == 1
    shown = capsys.readouterr()
    assert "error MissingOpError: torch.Tensor.expm1 has no distributed rule" in shown.out
    # The first frame is the user's.
    assert f'Traceback (most recent call last):\n  File "{program}' in shown.err
    page = report.read_text()
    assert '<tr class="bad"><td>Tensor.expm1' in page
    assert '<tr class="note"><td>Tensor.exp<' in page
    assert not dist.is_initialized()


def test_failure_that_is_no_exception_is_shown_too(program, capsys):
    assert main(["explain", "program_of_a_test:odd"]) == 1
    shown = capsys.readouterr()
    assert "Tensor.exp" in shown.out
    assert "Odd: no Exception" in shown.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--mesh", "dp2", "program_of_a_test:work"], "a mesh is written as dp=2,tp=4"),
        (["nothing_here.py"], "'nothing_here.py' is neither a file nor package:function"),
        (["program_of_a_test:wrok"], "has no function 'wrok'"),
    ],
)
def test_wrong_use_ends_with_two(program, capsys, arguments, text):
    assert main(["explain", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_mesh_is_parsed_strictly():
    assert parse_mesh("dp=2, tp=4") == {"dp": 2, "tp": 4}
    for text in ("", "dp", "dp=0", "dp=2,dp=3", "2=2"):
        with pytest.raises(ValueError, match="a mesh is written as"):
            parse_mesh(text)


def test_fake_world_refuses_to_replace_a_process_group():
    with fake_world(2):
        assert dist.get_world_size() == 2
        with pytest.raises(RuntimeError, match="needs a process of its own"), fake_world(2):
            pass


@pytest.mark.parametrize(("sent", "received"), [(0, 3), (3, 0), (0, 0), (2, 3)])
def test_ranks_of_a_fake_world_may_send_and_receive_nothing(sent, received):
    with fake_world(4):
        out, splits = torch.empty(received), ([received, 0, 0, 0], [sent, 0, 0, 0])
        assert dist.all_to_all_single(out, torch.empty(sent), *splits) is None
        assert dist.all_to_all_single(out, torch.empty(sent), *splits, async_op=True).wait()


@pytest.mark.parametrize(("size", "text"), [(3, "3 B"), (2048, "2.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB")])
def test_sizes_are_readable(size, text):
    assert readable_size(size) == text


TRAINING = """
    import sys
    import torch
    import torch.distributed as dist
    from torch.distributed import checkpoint
    from torch.utils.checkpoint import checkpoint as recompute
    from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()]).requires_grad_()
    for reentrant in (True, False):
        recompute(torch.exp, x, use_reentrant=reentrant).backward(torch.ones(4, 4))
    checkpoint.save({"x": x}, checkpoint_id=sys.argv[1])       # needs the other ranks' shards
    checkpoint.load({"x": x}, checkpoint_id=sys.argv[1])
    x.mul(2.0)
"""


def test_script_goes_on_after_checkpoints_of_both_kinds(program, capsys):
    program.write_text(textwrap.dedent(TRAINING))
    assert main(["explain", "--all", str(program), str(program.parent / "saved")]) == 0
    names = [line for line in capsys.readouterr().out.splitlines() if line and line[0] != " "]
    assert names.count("exp") == 2
    assert "Tensor.mul" in names  # after the checkpoints
    assert not (program.parent / "saved").exists()


CHECKPOINTS = """
    import torch
    from hyper_parallel import Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.checkpoint import async_save, load, load_safetensors, save, save_safetensors

    def work(mesh):
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
        model = torch.nn.Linear(2, 2)
        save({"x": x}, checkpoint_id="saved")
        assert async_save({"x": x}, checkpoint_id="saved").result() is None
        load({"x": x}, checkpoint_id="saved")
        save_safetensors(model, "saved")
        missing, unexpected = load_safetensors(model, "saved")
        x.exp()

    if __name__ == "__main__":
        work(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
"""


@pytest.mark.parametrize("imported", ["as a script", "inside", "before"])
def test_our_checkpoints_are_skipped_however_they_were_imported(program, imported, capsys):
    program.write_text(textwrap.dedent(CHECKPOINTS))
    if imported == "before":
        importlib.import_module(program.stem)
    target = str(program) if imported == "as a script" else f"{program.stem}:work"
    assert main(["explain", target]) == 0, capsys.readouterr().err
    assert "\nTensor.exp\n" in capsys.readouterr().out  # after the checkpoints
    assert not (program.parent / "saved").exists()
    # Afterwards a module has the real functions, also one that was imported inside.
    assert importlib.import_module(program.stem).save is saving.save
