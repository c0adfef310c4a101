"""An export of safetensors files replaces an older one as a whole, wherever the saving rank dies; failed ones leave
nothing; what an index says is not believed."""

import json
import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import CheckpointError, Shard
from hyper_parallel.checkpoint import load_safetensors, replaced_export, save_safetensors
from hyper_parallel.testing import RanksFailed
from hyper_parallel.testing.placing import make, mesh_of

INDEX = "model.safetensors.index.json"
KILLED = 77


def net_of(value, names="abcd"):
    net = nn.Module()
    for name in names:
        net.register_buffer(name, torch.full((4, 5), float(value)))
    return net


def value_in(folder):
    """The one value of all tensors of an export."""
    net = net_of(-1.0)
    load_safetensors(net, folder)
    (value,) = set(torch.cat([tensor.flatten() for tensor in net.state_dict().values()]).tolist())
    return value


def value_for_others(folder):
    """What a program reads that goes by the index, or else by ``model.safetensors``; None where it finds nothing."""
    from safetensors.torch import load_file

    index = folder / INDEX
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    )
    if not all((folder / name).exists() for name in names):
        assert not index.exists()
        return None
    tensors = [tensor.flatten() for name in names for tensor in load_file(folder / name).values()]
    (value,) = set(torch.cat(tensors).tolist())
    return value


def killed_at(step, action):
    """Run an action in a child that dies before the given rename or unlink; whether it died."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        steps = iter(range(step))
        originals = {name: getattr(os, name) for name in ("rename", "unlink")}

        def dying(name):
            def call(*args, **kwargs):
                if next(steps, None) is None:
                    os._exit(KILLED)
                return originals[name](*args, **kwargs)

            return call

        for name in originals:
            setattr(os, name, dying(name))
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


ONE, TWO, FOUR = "5GB", 160, 80  # bytes, for one, two or four files


@pytest.mark.parametrize(("older", "newer"), [(FOUR, FOUR), (FOUR, TWO), (ONE, TWO), (TWO, ONE), (ONE, ONE)])
def test_an_export_that_dies_at_any_step_leaves_the_old_or_the_new_one(tmp_path, older, newer):
    seen = []
    for step in range(30):
        folder = tmp_path / str(step)
        save_safetensors(net_of(1), folder, max_shard_size=older)
        if not killed_at(step, lambda folder=folder: save_safetensors(net_of(2), folder, max_shard_size=newer)):
            break
        seen.append(value_in(folder))
        assert value_for_others(folder) in (None, 1, 2)  # never both
        save_safetensors(net_of(3), folder, max_shard_size=older)  # goes on where that one died
        assert value_in(folder) == value_for_others(folder) == 3
        assert not list(folder.glob(".*"))
    else:
        raise AssertionError("the save never ended")
    assert seen == sorted(seen)
    assert {1, 2} <= set(seen)
    assert value_in(folder) == value_for_others(folder) == 2


def test_what_a_save_that_died_while_writing_has_left_is_removed_by_the_next(tmp_path):
    save_safetensors(net_of(1), tmp_path, max_shard_size=FOUR)
    for name in ("model-00007-of-00009.safetensors", "model.safetensors", INDEX):
        (tmp_path / f".{name}.incomplete").write_text("half of i")
    save_safetensors(net_of(2), tmp_path, max_shard_size=FOUR)
    assert not list(tmp_path.glob(".*"))
    assert value_in(tmp_path) == 2


def export_and_die(folder, victim):
    """Each rank holds pieces; rank ``victim`` is killed between two renames."""
    net = nn.Module()
    for name in "abcd":
        net.register_buffer(name, make(torch.full((4, 5), 2.0), mesh_of((2,)), [Shard(0)]))
    if dist.get_rank() == victim:
        rename, done = os.rename, []

        def dying(*args, **kwargs):
            done.append(args)
            if len(done) == 3:  # after that of the record and that of one file
                os.kill(os.getpid(), signal.SIGKILL)
            rename(*args, **kwargs)

        os.rename = dying
    save_safetensors(net, folder, max_shard_size=FOUR)


def test_a_rank_killed_between_two_renames_over_an_export_of_as_many_files(ranks, tmp_path):
    save_safetensors(net_of(1), tmp_path, max_shard_size=FOUR)
    with pytest.raises(RanksFailed):
        ranks(2, export_and_die, tmp_path, 0, timeout=60)
    assert value_in(tmp_path) == 2
    assert value_for_others(tmp_path) is None


@pytest.mark.parametrize("moment", ["sync", "write_text"])
def test_a_failed_export_leaves_no_files(tmp_path, monkeypatch, moment):
    save_safetensors(net_of(1), tmp_path, max_shard_size=FOUR)
    before = sorted(tmp_path.iterdir())

    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(replaced_export, moment, full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_safetensors(net_of(2), tmp_path, max_shard_size=FOUR)
    assert sorted(tmp_path.iterdir()) == before
    assert value_in(tmp_path) == 1


def test_an_export_that_is_interrupted_leaves_no_files(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("hyper_parallel.checkpoint.safetensors_file._write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_safetensors(net_of(2), tmp_path, max_shard_size=FOUR)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "has no 'weight_map' from names of tensors"),
        (b"{}", "has no 'weight_map' from names of tensors"),
        (b'{"weight_map": ["a"]}', "has no 'weight_map' from names of tensors"),
        (b'{"weight_map": {"a": 3}}', "has no 'weight_map' from names of tensors"),
        (
            b'{"weight_map": {"a": "../secret.safetensors"}}',
            "files outside of its folder, which are not read: ../secret",
        ),
        (b'{"weight_map": {"a": "/etc/secret"}}', "files outside of its folder, which are not read: /etc/secret"),
        (b'{"weight_map": {"a": "b/../../secret"}}', "files outside of its folder"),
        (b'{"weight_map": {"a": "b\\\\..\\\\..\\\\secret"}}', "files outside of its folder"),
        (b'{"weight_map": {"a": "C:secret"}}', "files outside of its folder"),
        (b'{"weight_map": {"a": ""}}', "files outside of its folder"),
        (b'{"weight_map": {"a": "no.safetensors"}}', "no.safetensors is no safetensors file, or cut off"),
    ],
)
def test_a_malformed_index_is_a_checkpoint_error(tmp_path, content, text):
    save_safetensors(net_of(1), tmp_path / "in", max_shard_size=FOUR)
    (tmp_path / "secret.safetensors").write_bytes((tmp_path / "in" / "model-00001-of-00004.safetensors").read_bytes())
    (tmp_path / "in" / "no.safetensors").write_bytes(b"nothing")
    (tmp_path / "in" / INDEX).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_safetensors(net_of(0), tmp_path / "in")
    assert text in str(caught.value)


def test_links_inside_of_the_folder_are_followed(tmp_path):
    """Hugging Face's cache consists of them."""
    save_safetensors(net_of(1), tmp_path / "blobs", max_shard_size=FOUR)
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{file.name}")
    assert value_in(tmp_path / "snapshot") == 1


@pytest.mark.parametrize("record", ["{", "[3]", '["../secret.safetensors"]', '{"a": "b"}'])
def test_a_record_of_a_replacement_is_not_believed_either(tmp_path, record):
    save_safetensors(net_of(1), tmp_path)
    (tmp_path / replaced_export.RECORD).write_text(record)
    with pytest.raises(CheckpointError, match="remove it and export"):
        load_safetensors(net_of(0), tmp_path)
