"""Checkpoints of others and saves that fail: nothing is left behind, nobody waits, nothing outside is read, no code is
run unless it is asked for; links are followed."""

import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from hyper_parallel import CheckpointError, Shard
from hyper_parallel.checkpoint import CheckpointReader, CheckpointWriter, async_save, load, save
from hyper_parallel.testing.placing import make, mesh_of


def state_with(value):
    return {"w": make(torch.full((7, 3), float(value)), mesh_of((dist.get_world_size(),)), [Shard(0)]), "step": value}


def value_in(folder, **options):
    state = state_with(0)
    load(state, checkpoint_id=folder, **options)
    assert torch.equal(state["w"].full_tensor(), torch.full((7, 3), float(state["step"])))
    return state["step"]


def message(action, *args, **kwargs):
    """The text of the error, which must be the same on all ranks."""
    with pytest.raises(CheckpointError) as caught:
        action(*args, **kwargs)
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts
    return texts[0]


def only_rank_0(action, *args):
    if dist.get_rank() == 0:
        action(*args)
    dist.barrier()


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["absolute", "relative", "of a link", "dangling"])
def test_a_link_to_a_folder_is_followed(tmp_path, how):
    there, link = tmp_path / "disk" / "there", tmp_path / "link"

    def prepare():
        (there.parent if how == "dangling" else there).mkdir(parents=True)
        (tmp_path / "second").symlink_to(there)
        link.symlink_to({"relative": "disk/there", "of a link": tmp_path / "second"}.get(how, there))

    only_rank_0(prepare)
    for value in (1, 2):
        save(state_with(value), checkpoint_id=link)
        assert value_in(link) == value_in(there) == value
    own = dist.new_group(backend="gloo")
    async_save(state_with(3), checkpoint_id=link, process_group=own).result()
    dist.barrier()
    save(state_with(4), checkpoint_id=there)
    assert value_in(link) == 4
    dcp.save(state_with(5), storage_writer=CheckpointWriter(link))
    assert value_in(link) == 5
    assert link.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "link", "second"]
    assert [p.name for p in there.parent.iterdir()] == ["there"]


@pytest.mark.ranks(2)
def test_a_link_finds_the_older_checkpoint_when_the_newer_died_between_the_renames(tmp_path):
    save(state_with(1), checkpoint_id=tmp_path / "there")

    def die():
        (tmp_path / "link").symlink_to("there")
        (tmp_path / "there").rename(tmp_path / ".there.previous")

    only_rank_0(die)
    assert value_in(tmp_path / "link") == 1


# -- failed saves -----------------------------------------------------------------------------------------------------


def full(*args, **kwargs):
    raise OSError("No space left on device")


def fail_on(rank, monkeypatch, moment):
    if dist.get_rank() == rank:
        if moment == "write":
            monkeypatch.setattr(os, "fsync", full)
        else:
            monkeypatch.setattr("hyper_parallel.checkpoint.folder.replace_folder", full)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("rank", "moment"), [(0, "write"), (1, "write"), (0, "finish")])
def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch, rank, moment):
    save(state_with(1), checkpoint_id=tmp_path / "last")
    own = dist.new_group(backend="gloo")
    fail_on(rank, monkeypatch, moment)
    assert "No space left on device" in message(save, state_with(2), checkpoint_id=tmp_path / "last")
    dist.barrier()
    assert [p.name for p in tmp_path.iterdir()] == ["last"]
    with pytest.raises(CheckpointException, match="No space left"):
        async_save(state_with(2), checkpoint_id=tmp_path / "new", process_group=own).result()
    dist.barrier()
    assert [p.name for p in tmp_path.iterdir()] == ["last"]
    monkeypatch.undo()
    assert value_in(tmp_path / "last") == 1
    save(state_with(3), checkpoint_id=tmp_path / "last")
    assert value_in(tmp_path / "last") == 3


@pytest.mark.ranks(1)
def test_the_older_checkpoint_keeps_its_name_when_the_newer_cannot_be_renamed(tmp_path, monkeypatch):
    save(state_with(1), checkpoint_id=tmp_path / "last")
    rename = Path.rename

    def unwilling(self, target):
        return full() if Path(target).name == "last" and "incomplete" in self.name else rename(self, target)

    monkeypatch.setattr(Path, "rename", unwilling)
    with pytest.raises(CheckpointError, match="No space left"):
        save(state_with(2), checkpoint_id=tmp_path / "last")
    assert [p.name for p in tmp_path.iterdir()] == ["last"]
    assert value_in(tmp_path / "last") == 1


# -- objects of one rank that fail ------------------------------------------------------------------------------------


class OddError(Exception):
    """One that cannot be unpickled."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


class Counter:
    def __init__(self, fails_on=-1, method=""):
        self.count, self.fails = 0, method if dist.get_rank() == fails_on else ""

    def state_dict(self):
        if self.fails == "state_dict":
            raise OddError("not", "ready")
        return {"count": self.count}

    def load_state_dict(self, state):
        if self.fails == "load_state_dict":
            raise OddError("not", "mine")
        self.count = state["count"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_object_that_fails_on_one_rank_fails_on_all(tmp_path, rank):
    good, own = tmp_path / "good", dist.new_group(backend="gloo")
    save({"counter": Counter(), **state_with(1)}, checkpoint_id=good)
    text = f"state_dict() of 'counter', a Counter, raised OddError: not ready\n(rank {rank})"
    bad = {"counter": Counter(rank, "state_dict"), **state_with(2)}
    assert text in message(save, bad, checkpoint_id=tmp_path / "bad")
    assert text in message(save, bad, storage_writer=CheckpointWriter(tmp_path / "bad"))
    assert text in message(load, bad, checkpoint_id=good)
    with pytest.raises(CheckpointException, match="not ready"):
        async_save(bad, checkpoint_id=tmp_path / "bad", process_group=own).result()
    text = f"load_state_dict() of 'counter', a Counter, raised OddError: not mine\n(rank {rank})"
    assert text in message(load, {"counter": Counter(rank, "load_state_dict"), **state_with(0)}, checkpoint_id=good)
    dist.barrier()
    assert [p.name for p in tmp_path.iterdir()] == ["good"]
    state = {"counter": Counter(), **state_with(0)}
    load(state, checkpoint_id=good)
    assert state["step"] == 1


# -- checkpoints of others --------------------------------------------------------------------------------------------


def change_metadata(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["../out/{}", "{folder}/out/{}", "sub/../../out/{}", "..\\out\\{}", "C:{}"])
@pytest.mark.parametrize("weights_only", [False, True])
def test_files_outside_of_the_folder_are_not_read(tmp_path, name, weights_only):
    for folder in ("in", "out"):
        save(state_with(1), checkpoint_id=tmp_path / folder)

    def lead_out(metadata):
        for stored in metadata.storage_data.values():
            stored.relative_path = name.format(stored.relative_path, folder=tmp_path)

    only_rank_0(change_metadata, tmp_path / "in", lead_out)
    text = message(load, state_with(0), checkpoint_id=tmp_path / "in", weights_only=weights_only)
    assert "names files outside of the folder, which are not read: " in text
    with pytest.raises(CheckpointException, match="outside of the folder"):
        dcp.load(state_with(0), storage_reader=CheckpointReader(tmp_path / "in"))


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, "w")


@dataclass
class Settings:
    depth: int


@pytest.mark.ranks(2)
def test_weights_only_runs_no_code(tmp_path):
    folder, made = tmp_path / "c", tmp_path / "made"
    plain = {"lr": 0.1, "betas": (0.9, 0.99), "names": ["a", None, True], "more": {"x": {"y": 2}}, "t": torch.ones(2)}
    save({**state_with(1), "plain": plain}, checkpoint_id=folder)
    state = {
        **state_with(0),
        "plain": {"lr": 0.0, "betas": 0, "names": [0, 0, 0], "more": {"x": {"y": 0}}, "t": torch.zeros(2)},
    }
    load(state, checkpoint_id=folder, weights_only=True)
    assert torch.equal(state["plain"].pop("t"), plain.pop("t"))
    assert (state["plain"], state["step"]) == (plain, 1)

    save({**state_with(1), "settings": Settings(3)}, checkpoint_id=tmp_path / "object")
    text = message(load, {**state_with(0), "settings": None}, checkpoint_id=tmp_path / "object", weights_only=True)
    assert "settings is an object that weights_only=True does not load" in text
    load({**state_with(0), "settings": None}, checkpoint_id=tmp_path / "object")
    assert value_in(tmp_path / "object", weights_only=True) == 1  # the others

    save({**state_with(1), "code": Code(made)}, checkpoint_id=tmp_path / "evil")
    assert "weights_only=True" in message(
        load, {**state_with(0), "code": 0}, checkpoint_id=tmp_path / "evil", weights_only=True
    )
    only_rank_0(change_metadata, folder, lambda metadata: setattr(metadata, "planner_data", Code(made)))
    assert "refers to io.open, which weights_only=True does not load" in message(
        load, state_with(0), checkpoint_id=folder, weights_only=True
    )
    dist.barrier()
    assert not made.exists()


@pytest.mark.parametrize("options", [{"checkpoint_id": "memory://x"}, {"planner": dcp.DefaultLoadPlanner()}, {}])
def test_weights_only_holds_for_what_load_itself_reads(options):
    with pytest.raises(ValueError, match="give the folder as checkpoint_id"):
        load({}, weights_only=True, **options)
