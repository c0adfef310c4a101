"""``hyper_parallel.checkpoint``: save and load, over world sizes, meshes and crashes."""

import os
import signal
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_models import STEPS, build, optimizer_of, same_tensors, train, whole_state
from torch import nn

from hyper_parallel import CheckpointError, Partial, Replicate, Shard
from hyper_parallel.checkpoint import (
    CheckpointWriter,
    StateDictOptions,
    async_save,
    get_optimizer_state_dict,
    get_state_dict,
    load,
    save,
    set_optimizer_state_dict,
    set_state_dict,
)
from hyper_parallel.testing import RanksFailed
from hyper_parallel.testing.placing import make, mesh_of


def state_of(net, optimizer, flat=False):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizers = get_state_dict(net, optimizer, options=options)
    return {"model": model, "optimizer": optimizers, "step": 0}


def start(plan, folder, kind, last, flat=False):
    """Train from the beginning and save; losses and all values."""
    net = build(0, plan, dist.get_world_size())
    optimizer = optimizer_of(net, kind)
    losses = train(net, optimizer, range(last))
    state = state_of(net, optimizer, flat)
    save(state | {"step": last}, checkpoint_id=folder)
    return losses, whole_state(state)


def go_on(plan, source, target, kind, last, flat=False):
    """Load into another model, train and save; losses and the values as they were loaded."""
    net = build(1, plan, dist.get_world_size())
    optimizer = optimizer_of(net, kind)
    state = state_of(net, optimizer, flat)
    load(state, checkpoint_id=source)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = whole_state(state_of(net, optimizer, flat))
    losses = train(net, optimizer, range(state["step"], last))
    save(state_of(net, optimizer, flat) | {"step": last}, checkpoint_id=target)
    return losses, loaded


@pytest.mark.parametrize(
    ("route", "kind", "flat"),
    [
        ((("fsdp x tp", 4), ("fsdp", 2), ("fsdp x tp", 4)), "adamw", False),
        ((("fsdp", 2), ("fsdp x tp", 4), ("one rank", 1)), "sgd", False),
        ((("tp", 4), ("replicas", 4), ("fsdp on dim 1", 2)), "adamw", True),
        ((("one rank", 1), ("fsdp x tp", 2), ("fsdp", 4)), "sgd", True),
    ],
    ids=lambda value: "-".join(f"{plan} on {n}" for plan, n in value) if isinstance(value, tuple) else str(value),
)
def test_training_resumed_on_other_meshes_has_the_losses_of_one_device(ranks, tmp_path, route, kind, flat):
    torch.manual_seed(0)
    net = build(0, "one rank", 1)
    want = train(net, optimizer_of(net, kind), range(STEPS))
    plan, count = route[0]
    (losses, values), *_ = ranks(count, start, plan, tmp_path / "0", kind, 2, flat)
    for i, (plan, count) in enumerate(route[1:]):
        (more, loaded), *_ = ranks(count, go_on, plan, tmp_path / str(i), tmp_path / str(i + 1), kind, 4 + 2 * i, flat)
        losses += more
        if i == 0:
            absent = values.keys() - loaded.keys()
            assert all("unused" in name for name in absent)
            same_tensors(loaded, {name: value for name, value in values.items() if name not in absent})
    assert losses == pytest.approx(want, abs=1e-5)


@pytest.mark.ranks(2)
def test_state_that_is_not_there_yet_is_neither_saved_nor_made_by_loading(tmp_path):
    net = build(0, "fsdp", 2)
    optimizer = optimizer_of(net)
    save({"optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=tmp_path / "new")
    names = dcp.FileSystemReader(tmp_path / "new").read_metadata().state_dict_metadata
    assert [name for name in names if ".state." in name] == []
    state = {"optimizer": get_optimizer_state_dict(net, optimizer)}
    load(state, checkpoint_id=tmp_path / "new")
    set_optimizer_state_dict(net, optimizer, state["optimizer"])
    assert not optimizer.state
    train(net, optimizer, range(2))
    save({"optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=tmp_path / "trained")
    fresh = optimizer_of(net)
    state = {"optimizer": get_optimizer_state_dict(net, fresh)}
    load(state, checkpoint_id=tmp_path / "trained")
    set_optimizer_state_dict(net, fresh, state["optimizer"])
    assert net.unused not in fresh.state
    assert fresh.state[net.low]["step"] == 2


class Stateful:
    """An application's own object, as torch.distributed.checkpoint takes it."""

    def __init__(self, net, optimizer):
        self.net, self.optimizer = net, optimizer

    def state_dict(self):
        model, optimizers = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizers}

    def load_state_dict(self, state):
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@pytest.mark.ranks(4)
def test_stateful_objects_and_asynchronous_saving(tmp_path):
    net = build(0, "fsdp x tp", 4)
    optimizer = optimizer_of(net)
    train(net, optimizer, range(2))
    own = dist.new_group(backend="gloo")  # for the saving thread
    values = whole_state(Stateful(net, optimizer).state_dict())
    saving = async_save({"training": Stateful(net, optimizer)}, checkpoint_id=tmp_path / "a", process_group=own)
    train(net, optimizer, range(2, 3))
    saving.result()
    assert not list(tmp_path.glob(".*"))
    other = build(1, "tp", 4)
    training = Stateful(other, optimizer_of(other))
    load({"training": training}, checkpoint_id=tmp_path / "a")
    got = whole_state(training.state_dict())
    assert got.keys() == values.keys()
    same_tensors(
        {n: v for n, v in got.items() if "unused" not in n}, {n: v for n, v in values.items() if "unused" not in n}
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("second", [save, async_save])
def test_a_save_waits_for_one_that_runs_into_the_same_folder(tmp_path, second):
    own = [dist.new_group(backend="gloo") for _ in range(2)]
    first = async_save(state_with(1), checkpoint_id=tmp_path / "a", process_group=own[0])
    going_on = second(state_with(2), checkpoint_id=tmp_path / "a", process_group=own[1])
    first.result()
    if second is async_save:
        going_on.result()
    dist.barrier()
    assert load_value(tmp_path / "a") == 2


# -- crashes ----------------------------------------------------------------------------------------------------------


def state_with(value):
    x = make(torch.full((7, 3), float(value)), mesh_of((dist.get_world_size(),)), [Shard(0)])
    return {"w": x, "step": value}


def save_value(value, folder):
    save(state_with(value), checkpoint_id=folder)


def load_value(folder):
    state = state_with(0)
    load(state, checkpoint_id=folder)
    assert torch.equal(state["w"].full_tensor(), torch.full((7, 3), float(state["step"])))
    return state["step"]


def save_and_die(value, folder, victim, moment):
    """Save; the rank ``victim`` is killed while it writes, or between the renames."""

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def die_writing(self, plan, planner):
        (Path(self.path) / f"__{victim}_0.distcp").write_bytes(b"half of i")
        die()

    renames = []

    def die_renaming(self, target):
        renames.append(target)
        if len(renames) == 3:  # after that of the table of contents and that of the old folder
            die()
        os.rename(self, target)

    if dist.get_rank() == victim:
        if moment == "writing":
            CheckpointWriter.write_data = die_writing
        else:
            Path.rename = die_renaming
    save_value(value, folder)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_while_saving_leaves_the_last_checkpoint(ranks, tmp_path, victim):
    folder = tmp_path / "last"
    ranks(4, save_value, 1, folder)
    with pytest.raises(RanksFailed):
        ranks(4, save_and_die, 2, folder, victim, "writing", timeout=60)
    assert ranks(2, load_value, folder) == [1, 1]
    with pytest.raises(RanksFailed):
        ranks(4, save_and_die, 2, tmp_path / "new", victim, "writing", timeout=60)
    assert not (tmp_path / "new").exists()
    ranks(4, save_value, 3, folder)
    assert ranks(2, load_value, folder) == [3, 3]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".new.incomplete", "last"]


def test_a_rank_killed_between_the_renames_leaves_the_last_checkpoint(ranks, tmp_path):
    folder = tmp_path / "last"
    ranks(4, save_value, 1, folder)
    with pytest.raises(RanksFailed):
        ranks(4, save_and_die, 2, folder, 0, "renaming", timeout=60)
    assert not folder.exists()
    assert ranks(2, load_value, folder) == [1, 1]
    ranks(4, save_value, 3, folder)
    assert ranks(2, load_value, folder) == [3, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


@pytest.mark.ranks(4)
def test_a_full_disk_of_one_rank_fails_on_all_and_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    save_value(1, tmp_path / "last")

    def full(handle):
        raise OSError("No space left on device")

    if dist.get_rank() == 2:
        monkeypatch.setattr(os, "fsync", full)
    text = message(save, state_with(2), checkpoint_id=tmp_path / "last")
    monkeypatch.undo()
    assert "No space left on device" in text
    assert text.endswith("(rank 2)")
    assert load_value(tmp_path / "last") == 1


def load_as(dtype, folder):
    x = make(torch.zeros(7, 3, dtype=dtype), mesh_of((dist.get_world_size(),)), [Shard(0)])
    load({"w": x, "step": 0}, checkpoint_id=folder)
    assert x.dtype is dtype
    assert torch.equal(x.full_tensor(), torch.full((7, 3), 1, dtype=dtype))


def test_other_dtypes_on_odd_numbers_of_ranks(ranks, tmp_path):
    ranks(4, save_value, 1, tmp_path / "a")
    for count, dtype in ((3, torch.bfloat16), (1, torch.float64)):
        ranks(count, load_as, dtype, tmp_path / "a")


# -- errors: one text, on every rank ----------------------------------------------------------------------------------


def message(action, *args, **kwargs):
    """The text of the error, which must be the same on all ranks."""
    try:
        action(*args, **kwargs)
    except CheckpointError as error:
        texts = [None] * dist.get_world_size()
        dist.all_gather_object(texts, str(error))
        assert len(set(texts)) == 1
        return texts[0]
    raise AssertionError("no error")


@pytest.mark.ranks(4)
def test_all_that_does_not_fit_is_listed(tmp_path):
    mesh = mesh_of((4,))
    zeros = {n: make(torch.zeros(7, 3), mesh, [Shard(0)]) for n in ("a", "b", "c")}
    save({"model": zeros, "other": {"x": 1}, "step": 3}, checkpoint_id=tmp_path / "c")
    asked = {"a": zeros["a"], "b": make(torch.zeros(3, 7), mesh, [Shard(0)]), "d": zeros["c"]}
    text = message(load, {"model": asked, "step": torch.tensor(0)}, checkpoint_id=tmp_path / "c")
    for part in (
        f"cannot load checkpoint {tmp_path / 'c'}: it does not fit the state dict:",
        "model.b has shape (7, 3) in the checkpoint, (3, 7) in the state dict",
        "step is an object in the checkpoint, a tensor in the state dict",
        "missing in the checkpoint: model.d\n",
        "only in the checkpoint: model.c\n",
        "strict=False loads the names that both have\n(rank 0, 1, 2, 3)",
    ):
        assert part in text
    with pytest.raises(CheckpointError) as caught:
        load({"model": asked}, checkpoint_id=tmp_path / "c")
    assert "".join(traceback.format_exception(caught.value)).count("model.c") == 1
    del asked["b"]
    load({"model": asked}, checkpoint_id=tmp_path / "c", strict=False)


@pytest.mark.ranks(4)
def test_an_error_of_one_rank_is_raised_on_all(tmp_path):
    state = state_with(1)
    save(state, checkpoint_id=tmp_path / "c")
    if dist.get_rank() == 2:
        state["w"] = make(torch.zeros(7, 3), mesh_of((4,)), [Partial()])
    text = message(save, state, checkpoint_id=tmp_path / "c")
    assert "pending reduction" in text
    assert text.endswith("(rank 2)")
    assert load_value(tmp_path / "c") == 1
    assert "pending reduction" in message(load, state, checkpoint_id=tmp_path / "c")


@pytest.mark.ranks(4)
def test_what_is_no_checkpoint_or_half_of_one(tmp_path):
    save(state_with(1), checkpoint_id=tmp_path / "good")
    save(state_with(2), checkpoint_id=tmp_path / "bad")
    text = message(load, state_with(0), checkpoint_id=tmp_path / "goood")
    assert "does not exist; checkpoints beside it: bad, good" in text
    dist.barrier()
    if dist.get_rank() == 0:
        os.truncate(tmp_path / "bad" / "__1_0.distcp", 10)
    dist.barrier()
    text = message(load, state_with(0), checkpoint_id=tmp_path / "bad")
    assert "is incomplete: missing or cut off are __1_0.distcp; copy the folder again" in text
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "bad" / ".metadata").unlink()
    dist.barrier()
    assert "has no .metadata: the save did not finish" in message(load, state_with(0), checkpoint_id=tmp_path / "bad")


@pytest.mark.ranks(4)
def test_a_folder_with_other_things_is_not_replaced(tmp_path):
    if dist.get_rank() == 0:
        (tmp_path / "notes.txt").write_text("mine")
    dist.barrier()
    assert "holds other things than a checkpoint: notes.txt; save into a folder" in message(
        save, state_with(1), checkpoint_id=tmp_path
    )
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.ranks(2)
def test_a_part_of_an_optimizers_state_is_missing_not_absent(tmp_path):
    net = nn.Module()
    net.w = nn.Parameter(make(torch.ones(4), mesh_of((2,)), [Replicate()]))
    optimizer = torch.optim.AdamW(net.parameters())
    net.w.sum().backward()
    optimizer.step()
    state = {"optimizer": get_optimizer_state_dict(net, optimizer)}
    del state["optimizer"]["state"]["w"]["exp_avg"]
    save(state, checkpoint_id=tmp_path / "c")
    fresh = {"optimizer": get_optimizer_state_dict(net, torch.optim.AdamW(net.parameters()))}
    assert "missing in the checkpoint: optimizer.state.w.exp_avg\n" in message(
        load, fresh, checkpoint_id=tmp_path / "c"
    )
