"""The messages that docs/troubleshooting.md quotes are those that users meet."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    Replicate,
    Shard,
    ShardingPlan,
    distribute_tensor,
    init_device_mesh,
    manual_seed,
    parallelize_module,
    randn,
    require_same_inputs,
    shard_module,
)
from hyper_parallel.checkpoint import get_model_state_dict, load, save

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()


def mesh_of(name="tp"):
    return init_device_mesh("cpu", (2,), mesh_dim_names=(name,))


# -- what goes wrong; each raises what the page quotes -----------------------------------------------------------------


def steps_an_optimizer_from_before():
    net = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    shard_module(net, mesh_of(), ShardingPlan(plan={"0.weight": [Shard(0)]}))
    net(distribute_tensor(torch.ones(2, 2), mesh_of(), [Replicate()])).sum().backward()
    optimizer.step()


def mixes_plain_and_distributed():
    return distribute_tensor(torch.ones(4, 2), mesh_of(), [Shard(0)]) + torch.ones(4, 2)


def gives_a_plain_batch():
    shard_module(nn.Linear(2, 2), mesh_of("dp"), ShardingPlan())(torch.ones(2, 2))


def multiplies_what_does_not_fit():
    left, right = (distribute_tensor(torch.ones(4, 6), mesh_of(), [Shard(dim)]) for dim in (1, 0))
    return left * right


def asks_for_memory():
    distribute_tensor(torch.ones(4, 2), mesh_of(), [Shard(0)]).untyped_storage()


def writes_while_a_row_lives():
    x = distribute_tensor(torch.ones(4, 2), mesh_of(), [Shard(0)])
    row = x.select(0, 1)
    x.mul_(2)
    return row


def writes_to_windows():
    distribute_tensor(torch.ones(4, 2), mesh_of(), [Shard(0)]).unfold(0, 2, 2).mul_(2)


def gives_different_batches():
    model = parallelize_module(nn.Sequential(nn.Linear(4, 6)), mesh_of(), {"0": ColwiseParallel()})
    require_same_inputs(model, mesh_of())
    model(torch.full((2, 4), float(dist.get_rank())))


def seeds_by_rank():
    manual_seed(dist.get_rank())
    randn(4, 2, device_mesh=mesh_of(), placements=[Replicate()])


def waits_for_a_rank_that_does_not_come():
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if dist.get_rank() == 1:
        time.sleep(3)
        raise RuntimeError("went another way")
    dist.all_reduce(torch.ones(1), group=group)


def loads_into_another_model(folder):
    net, wrapped = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    for model, name in ((net, "weight"), (wrapped, "0.weight")):
        shard_module(model, mesh_of(), ShardingPlan(plan={name: [Shard(0)]}))
    save({"model": get_model_state_dict(net)}, checkpoint_id=folder)
    load({"model": get_model_state_dict(wrapped)}, checkpoint_id=folder)


def loads_an_unfinished_checkpoint(folder):
    save({"step": 1}, checkpoint_id=folder / "step-1")
    (folder / "step-2").mkdir(exist_ok=True)
    dist.barrier()
    load({"step": 1}, checkpoint_id=folder / "step-2")


ON_RANKS = {
    "Nothing is learned, or step() is refused": [steps_an_optimizer_from_before],
    "A plain tensor meets a DTensor": [mixes_plain_and_distributed],
    "A plain batch is refused": [gives_a_plain_batch],
    "Code of another library refuses DTensors": [asks_for_memory],
    "The layouts do not fit an operator": [multiplies_what_does_not_fit],
    "A write in place is refused": [writes_while_a_row_lives, writes_to_windows],
    "The loss is wrong with tensor parallelism, and nothing raises": [gives_different_batches],
    "Ranks draw different random numbers": [seeds_by_rank],
    "The program hangs": [waits_for_a_rank_that_does_not_come],
    "A checkpoint is refused": [loads_into_another_model, loads_an_unfinished_checkpoint],
}
IN_PROGRAMS = {
    "A function has no rule": 1,
    "One rank fails, and the others blame the connection": 2,
    "A rank is aborted at its end, or says that its process groups are gone": 1,
}


# -- the page against them ---------------------------------------------------------------------------------------------


def quoted():
    """The messages under each heading."""
    sections = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return {title: re.findall(r"```text\n(.*?)```", text, re.DOTALL) for title, text in sections}


def same_words(text):
    return " ".join(text.split())


def check_quote(quote, message):
    """Whether they are the same but for line breaks, and for what ``...`` stands for."""
    pattern = ".*".join(re.escape(same_words(part)) for part in quote.split("..."))
    assert re.fullmatch(pattern, same_words(message)), f"the page says\n{quote}\nthe library says\n{message}"


def message_of(action, *args):
    try:
        action(*args)
    except Exception as error:
        return str(error)
    raise AssertionError(f"{action.__name__} raised nothing")


def test_every_quoted_message_is_compared():
    found = {title: len(quotes) for title, quotes in quoted().items() if quotes}
    compared = {title: len(actions) for title, actions in ON_RANKS.items()}
    assert found == {**compared, **IN_PROGRAMS}


@pytest.mark.parametrize(("title", "index"), [(t, i) for t, actions in ON_RANKS.items() for i in range(len(actions))])
def test_message_is_the_quoted_one(ranks, tmp_path, title, index):
    action = ON_RANKS[title][index]
    messages = ranks(2, message_of, action, *[tmp_path] * ("checkpoint" in title))
    check_quote(quoted()[title][index], messages[0])


def test_message_about_a_blocked_pack(monkeypatch):
    code = (
        "import torch; from hyper_parallel.registry import Registry; print(Registry().missing_message(torch.softmax))"
    )
    monkeypatch.setenv("HYPER_PARALLEL_DISABLE_PLUGINS", "ops-basic")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    check_quote(quoted()["A function has no rule"][0], done.stdout)


def test_message_about_destroyed_groups():
    code = """
        import torch, torch.distributed as dist
        from hyper_parallel import Replicate, distribute_tensor, init_device_mesh

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        distribute_tensor(torch.ones(2), mesh, [Replicate()])
        dist.destroy_process_group()
        try:
            distribute_tensor(torch.ones(2), mesh, [Replicate()])
        except RuntimeError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    check_quote(quoted()["A rank is aborted at its end, or says that its process groups are gone"][0], done.stdout)


def test_failure_of_one_rank_as_torchrun_shows_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import signal
            import torch, torch.distributed as dist
            from torch.distributed.elastic.multiprocessing.errors import record

            @record
            def main():
                dist.init_process_group("gloo")
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which may come before the echo is printed
                dist.barrier()
                if dist.get_rank() == 1:
                    raise ValueError("a bad sample in this rank's data")
                dist.all_reduce(torch.ones(1))

            main()
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    for quote in quoted()["One rank fails, and the others blame the connection"]:
        check_quote(quote, done.stderr)
