"""A checkpoint's folder on disk: written aside and renamed when it is whole, read with its completeness checked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hyper_parallel import torch_compat
from hyper_parallel.checkpoint.untrusted import check_names, plain_metadata

__all__ = ["CheckpointReader", "CheckpointWriter"]

METADATA = ".metadata"


class CheckpointWriter(torch_compat.FileSystemWriter):
    """Writes a checkpoint next to its folder and renames it at the end: whatever dies meanwhile, the folder holds its
    last complete checkpoint, or none.

    For ``storage_writer=`` of PyTorch's ``save`` and ``async_save``; those of :mod:`hyper_parallel.checkpoint` use it.

    Args:
        path: the folder, on a file system that all ranks see, or a link to one. An older checkpoint in it is replaced.
        options: those of ``torch.distributed.checkpoint.FileSystemWriter``.

    Raises:
        FileExistsError: (``save``, on every rank) the folder holds other things than a checkpoint.
    """

    # Not FileSystemWriter: that is a stager too, which does not copy what is in host memory already.
    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        self.folder = linked(path)
        super().__init__(_incomplete(self.folder), **options)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write into another folder next."""
        if checkpoint_id:
            self.folder = linked(checkpoint_id)
        super().reset(_incomplete(self.folder))

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder."""
        return self.folder

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is: the folder is made by the coordinator."""
        if not self.use_collectives:
            raise ValueError("CheckpointWriter needs use_collectives=True: one rank renames what all have written")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make an empty folder to write to; only the coordinator comes here, before anyone writes."""
        others = [] if not self.folder.exists() else sorted(p.name for p in self.folder.iterdir() if not _is_ours(p))
        if others:
            raise FileExistsError(
                f"{self.folder} would be replaced as a whole, but holds other things than a checkpoint: "
                f"{', '.join(others[:5])}; save into a folder of its own"
            )
        shutil.rmtree(self.path, ignore_errors=True)
        Path(self.path).mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part."""
        if not Path(self.path).is_dir():
            raise FileNotFoundError(
                f"{self.path}, which the first rank made, is not here; save to a file system that all ranks see"
            )
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the table of contents, then rename; only the coordinator comes here, after everyone has written."""
        super().finish(metadata, results)
        replace_folder(Path(self.path), self.folder)

    def discard(self) -> None:
        """Remove what a save that failed has written: a full disk must not stay full. One rank calls it, when none
        writes any more; :func:`~hyper_parallel.checkpoint.save` and ``async_save`` do."""
        shutil.rmtree(self.path, ignore_errors=True)


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint's folder; says clearly what it lacks.

    When a crash fell between the two renames that replace an older checkpoint, that one is read.

    Args:
        path: the folder, or a link to it.
        weights_only: read the table of contents without running code that may be written in it.
    """

    def __init__(self, path: str | os.PathLike[str], *, weights_only: bool = False) -> None:
        super().__init__(_readable(linked(path)))
        self.weights_only = weights_only

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another folder next."""
        super().reset(_readable(linked(checkpoint_id)) if checkpoint_id else None)

    def read_metadata(self) -> Metadata:
        """The table of contents.

        Raises:
            FileNotFoundError: it is not there.
            UnsafeCheckpointError: it names files outside of the folder, or (``weights_only``) holds other things than
                a table of contents.
        """
        folder = Path(self.path)
        if not (folder / METADATA).is_file():
            there = "has no .metadata: the save did not finish" if folder.is_dir() else "does not exist"
            known = [p.parent.name for p in sorted(folder.parent.glob(f"*/{METADATA}")) if p.parent.name[0] != "."]
            beside = f"; checkpoints beside it: {', '.join(known)}" if known else ""
            raise FileNotFoundError(f"no checkpoint in {folder}: it {there}{beside}")
        metadata = self._plain_metadata() if self.weights_only else super().read_metadata()
        check_names(metadata, folder)
        return metadata

    def _plain_metadata(self) -> Metadata:
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = plain_metadata(file)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, its files checked.

        Raises:
            FileNotFoundError: a file that this rank needs is missing or too short.
        """
        ends: dict[str, int] = {}
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
        sizes = {name: self._size(name) for name in ends}
        short = sorted(name for name, size in sizes.items() if size < ends[name])
        if short:
            raise FileNotFoundError(
                f"the checkpoint in {self.path} is incomplete: missing or cut off are {', '.join(short)}; copy the "
                "folder again, or load an older checkpoint"
            )
        return plan

    def _size(self, name: str) -> int:
        file = Path(self.path) / name
        return file.stat().st_size if file.is_file() else -1


def replace_folder(new: Path, folder: Path) -> None:
    """Give ``new`` the name ``folder``. A crash in between leaves the old one under its own or a ``.previous`` name."""
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    try:
        new.rename(folder)
    except OSError:
        if previous.exists():
            previous.rename(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def linked(path: str | os.PathLike[str]) -> Path:
    """The folder that a path means: a link is no folder that could be replaced, but says where it is."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)


def sync(folder: Path) -> None:
    """Have the renames on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _incomplete(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.incomplete")


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _readable(folder: Path) -> Path:
    return _previous(folder) if _previous(folder).exists() and not folder.exists() else folder


def _is_ours(path: Path) -> bool:
    return path.name == METADATA or path.suffix == ".distcp"
