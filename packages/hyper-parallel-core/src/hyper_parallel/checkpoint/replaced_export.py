"""An export of safetensors files takes the place of an older one as a whole, though its files are renamed one by one.

The new files lie beside the old ones until all are written. Then a *record* of their names is put into the folder: from
here on the new export counts, whatever of it has its name already. The renames follow, the record goes last. Whoever
dies in between leaves the record, by which :func:`~hyper_parallel.checkpoint.load_safetensors` finds the files and the
next save finishes. Other programs find no index meanwhile, which they need for several files: nothing, not a mixture.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from hyper_parallel.checkpoint.folder import sync
from hyper_parallel.checkpoint.safetensors_file import incomplete
from hyper_parallel.checkpoint.untrusted import leads_out
from hyper_parallel.errors import CheckpointError

__all__ = ["INDEX", "WHOLE", "discard_unfinished", "finish_replacing", "newest_files", "replace_export", "write_text"]

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
SHARDS = "model-?????-of-?????.safetensors"
RECORD = ".model.safetensors.replacing"


def replace_export(folder: Path, names: Sequence[str]) -> None:
    """Put files in their places that lie under their :func:`incomplete` names, and remove an older export.

    Args:
        folder: where they are.
        names: all files of the new export, its index included.
    """
    sync(folder)
    written = incomplete(folder / RECORD)
    write_text(written, json.dumps(list(names)))
    written.rename(folder / RECORD)
    sync(folder)
    finish_replacing(folder)


def finish_replacing(folder: Path) -> None:
    """Do the rest of a replacement that was begun, if one was."""
    names = _recorded(folder)
    if names is None:
        return
    pending = [name for name in names if incomplete(folder / name).exists()]
    if INDEX in pending or INDEX not in names:  # first: the old one names files that are replaced now
        (folder / INDEX).unlink(missing_ok=True)
    for old in {folder / WHOLE, *folder.glob(SHARDS)}:
        if old.name not in names:
            old.unlink(missing_ok=True)
    for name in sorted(pending, key=lambda name: name == INDEX):  # last: what it names is there
        incomplete(folder / name).rename(folder / name)
    sync(folder)
    (folder / RECORD).unlink()


def discard_unfinished(folder: Path) -> None:
    """Remove the files of a save that failed or died before its export counted."""
    if _recorded(folder) is None:
        for name in (WHOLE, SHARDS, INDEX, RECORD):
            for file in folder.glob(incomplete(Path(name)).name):
                file.unlink()


def newest_files(folder: Path) -> list[Path] | None:
    """The safetensors files of an export whose replacing was not finished; None when there is none."""
    names = _recorded(folder)
    if names is None:
        return None
    beside = ((incomplete(folder / name), folder / name) for name in names if name != INDEX)
    return [new if new.exists() else there for new, there in beside]


def _recorded(folder: Path) -> list[str] | None:
    record = folder / RECORD
    try:
        names = json.loads(record.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise CheckpointError(
            f"{record} is no list of file names: {error}; remove it and export the model again"
        ) from error
    if not isinstance(names, list) or not all(isinstance(name, str) and not leads_out(name) for name in names):
        raise CheckpointError(f"{record} is no list of names of files in its folder; remove it and export again")
    return names


def write_text(path: Path, text: str) -> None:
    """Write a file and have it on disk."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
