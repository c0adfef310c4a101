"""``save``, ``async_save`` and ``load``: PyTorch's, with checkpoints that are whole or not there, and clear errors."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as torch_async_save
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from hyper_parallel.checkpoint.folder import CheckpointReader, CheckpointWriter
from hyper_parallel.checkpoint.optimizer_state import AbsentState
from hyper_parallel.checkpoint.stateful_objects import NothingToLoad, NothingToSave, StateDictError, given_back, taken
from hyper_parallel.errors import CheckpointError

__all__ = ["async_save", "load", "save"]

_running: weakref.WeakValueDictionary[Path, Future[Any]] = weakref.WeakValueDictionary()
"""The last asynchronous save into each folder."""


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Metadata:
    """Save a state dict, each rank its shards; as ``torch.distributed.checkpoint.save``.

    A folder is written aside and renamed when it is complete (:class:`CheckpointWriter`), so that a crash never costs
    the last good checkpoint; one that failed leaves nothing behind. While an :func:`async_save` into the same folder
    runs, it waits for that. State that an optimizer does not have yet is left out.

    Args:
        state_dict: tensors, objects, nested state dicts, and objects with ``state_dict`` and ``load_state_dict``.
        checkpoint_id: the folder, or a link to it; a URL goes to PyTorch's fsspec writer, which has no rename.
        storage_writer, planner, process_group, no_dist: PyTorch's.

    Raises:
        CheckpointError: on every rank, when it failed on one, be it in the ``state_dict`` of an object.
    """
    writer = _writer(storage_writer, checkpoint_id)
    content, failure = taken(state_dict)
    try:
        with _readable_errors("save", checkpoint_id), _quiet():
            return torch_save(
                _without_absent(content),
                checkpoint_id=checkpoint_id,
                storage_writer=writer,
                planner=NothingToSave(failure) if failure else planner,
                process_group=process_group,
                no_dist=no_dist,
            )
    except BaseException:
        _discard(writer, process_group, no_dist)
        raise


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Any:
    """Copy the state dict to host memory and save it in the background; as ``torch.distributed.checkpoint.async_save``.

    Args:
        process_group: the saving thread communicates: give it a group of its own when training goes on meanwhile.
        options: PyTorch's others. For the rest see :func:`save`.

    Returns:
        A future; training may change the tensors at once. Its ``result()`` raises PyTorch's ``CheckpointException``.
    """
    writer = _writer(storage_writer, checkpoint_id)
    content, failure = taken(state_dict)
    saving: Any = torch_async_save(
        _without_absent(content),
        checkpoint_id=checkpoint_id,
        storage_writer=writer,
        planner=NothingToSave(failure) if failure else planner,
        process_group=process_group,
        **options,
    )
    if not isinstance(writer, CheckpointWriter):
        return saving
    discard = functools.partial(_discard, writer, process_group, options.get("no_dist", False))
    uploaded = _with_discard(getattr(saving, "upload_completion", saving), discard)
    _running[writer.folder.absolute()] = uploaded
    return replace(saving, upload_completion=uploaded) if isinstance(saving, AsyncSaveResponse) else uploaded


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    strict: bool = True,
    weights_only: bool = False,
) -> None:
    """Load a checkpoint into a state dict, in place, whatever mesh and layouts it was saved from; as
    ``torch.distributed.checkpoint.load``.

    Each rank reads what it holds. Optimizer state that neither the optimizer nor the checkpoint has is dropped from the
    state dict. A checkpoint may have top-level entries that are not asked for.

    Args:
        state_dict: as for :func:`save`, its tensors allocated; take it from :func:`get_state_dict`.
        checkpoint_id: the folder, a link to it, or a URL.
        storage_reader, process_group, no_dist: PyTorch's.
        planner: PyTorch's; replaces the checks described here.
        strict: whether names that the checkpoint lacks, or has beside the ones asked for, are errors.
        weights_only: run no code that may be written in the checkpoint, as ``torch.load`` calls it: tensors, numbers,
            text and containers of them are loaded. For checkpoints that somebody else has made.

    Raises:
        CheckpointError: on every rank, when it failed on one: no or an incomplete checkpoint, names that are missing
            or unexpected, other shapes (it lists all of them), files outside of the folder, other objects than
            ``weights_only`` allows, an object that cannot give its ``state_dict`` or load one.
        ValueError: ``weights_only`` with a planner or a reader, which may do as they like, or without a folder.
    """
    if weights_only:
        _check_weights_only(checkpoint_id, storage_reader, planner)
    if storage_reader is None and checkpoint_id is not None and _is_folder(checkpoint_id):
        storage_reader = CheckpointReader(checkpoint_id, weights_only=weights_only)
    content, failure = taken(state_dict)
    with _readable_errors("load", checkpoint_id), _quiet():
        torch_load(
            content,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=NothingToLoad(failure) if failure else planner or _CheckingPlanner(strict, weights_only),
            process_group=process_group,
            no_dist=no_dist,
        )
    failure = given_back(state_dict, content)
    _raise_on_all(failure, checkpoint_id, process_group, no_dist)


def _check_weights_only(checkpoint_id: Any, reader: StorageReader | None, planner: LoadPlanner | None) -> None:
    if reader is not None or planner is not None or checkpoint_id is None or not _is_folder(checkpoint_id):
        raise ValueError(
            "weights_only=True holds for load's own reader and planner: give the folder as checkpoint_id, and no "
            "storage_reader or planner"
        )


# -- failures ---------------------------------------------------------------------------------------------------------


def _raise_on_all(
    failure: Exception | None, checkpoint_id: Any, process_group: dist.ProcessGroup | None, no_dist: bool
) -> None:
    """Compare notes after the last step, which is each rank's own."""
    failures: list[Any] = [failure]
    if _together(no_dist):
        failures = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(failures, failure, group=process_group)
    found = {rank: (error, None) for rank, error in enumerate(failures) if error is not None}
    if found:
        with _readable_errors("load", checkpoint_id):
            raise CheckpointException("load_state_dict", found) from failure  # type: ignore[arg-type]


def _together(no_dist: bool) -> bool:
    """Whether several ranks save or load one checkpoint."""
    return not no_dist and dist.is_available() and dist.is_initialized()


def _discard(writer: StorageWriter | None, process_group: dist.ProcessGroup | None, no_dist: bool) -> None:
    """Leave nothing of a save that failed; the others have been told and write no more."""
    if isinstance(writer, CheckpointWriter) and (not _together(no_dist) or dist.get_rank(process_group) == 0):
        writer.discard()


def _with_discard(saving: Future[Any], discard: Callable[[], None]) -> Future[Any]:
    """The future of a save, done when what a failed one has written is gone too."""
    result: Future[Any] = Future()

    def finish(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            result.set_result(done.result())
        else:
            discard()
            result.set_exception(error)

    saving.add_done_callback(finish)
    return result


# -- folders and errors -----------------------------------------------------------------------------------------------


def _is_folder(checkpoint_id: str | os.PathLike[str]) -> bool:
    return "://" not in str(checkpoint_id)


def _writer(given: StorageWriter | None, checkpoint_id: str | os.PathLike[str] | None) -> StorageWriter | None:
    """The writer to use, when no save into its folder runs any more: two at once would mix their files."""
    if given is None and checkpoint_id is not None and _is_folder(checkpoint_id):
        given = CheckpointWriter(checkpoint_id)
    if isinstance(given, CheckpointWriter):
        running = _running.pop(given.folder.absolute(), None)
        if running is not None:
            wait([running])
    return given


def _without_absent(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_absent(v) for k, v in value.items() if not isinstance(v, AbsentState)}
    return value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """On one rank PyTorch warns that it assumes one rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


@contextlib.contextmanager
def _readable_errors(verb: str, checkpoint_id: Any) -> Iterator[None]:
    """PyTorch's error is the tracebacks of all ranks, one after the other; here each cause comes once."""
    try:
        yield
    except CheckpointException as error:
        failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
        by_text: dict[str, list[int]] = defaultdict(list)
        for rank, failure in failures.items():
            text = str(failure).removeprefix("metadata is None; global metadata read failed: ")
            by_text[text or repr(failure)].append(rank)
        causes = "\n".join(f"{text}\n(rank {', '.join(map(str, ranks))})" for text, ranks in by_text.items())
        where = "" if checkpoint_id is None else f" {checkpoint_id}"
        # Where the causes say it all, the tracebacks of all ranks would only repeat them.
        explained = all(isinstance(failure, (_Misfit, StateDictError, OSError)) for failure in failures.values())
        raise CheckpointError(f"cannot {verb} checkpoint{where}: {causes}", failures=failures) from (
            None if explained else error
        )


class _Misfit(ValueError):
    """What is asked for is not what the checkpoint has."""


class _CheckingPlanner(DefaultLoadPlanner):
    """Compares all that is asked for with all that there is before anything is read."""

    def __init__(self, strict: bool, weights_only: bool) -> None:
        super().__init__(allow_partial_load=not strict)
        self.strict, self.weights_only = strict, weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an object; with ``weights_only`` PyTorch's own code gets one that we have written anew."""
        if self.weights_only:
            try:
                plain = torch.load(value, weights_only=True)
            except pickle.UnpicklingError as error:
                raise _Misfit(
                    f"{read_item.storage_index.fqn} is an object that weights_only=True does not load; load the "
                    f"checkpoint with weights_only=False if you trust whoever made it ({str(error).splitlines()[-1]})"
                ) from None
            value = io.BytesIO()
            torch.save(plain, value)
            value.seek(0)
        super().load_bytes(read_item, value)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        saved = metadata.state_dict_metadata
        _drop_absent(state_dict, "", saved)
        asked = set(state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)
        problems = list(_other_kinds(self.state_dict, saved))
        problems += _listed("incomplete in the checkpoint", (n for n in self.state_dict if _is_cut(saved.get(n))))
        if self.strict:
            paths = metadata.planner_data or {}
            beside = (n for n in saved if n not in self.state_dict and _top(paths.get(n, (n,)), asked, state_dict))
            problems += _listed("missing in the checkpoint", (n for n in self.state_dict if n not in saved))
            problems += _listed("only in the checkpoint", beside)
        if problems:
            hint = "\nstrict=False loads the names that both have" if self.strict else ""
            raise _Misfit("it does not fit the state dict:\n" + "\n".join(problems) + hint)


def _drop_absent(value: Any, path: str, saved: Mapping[str, Any]) -> None:
    """Remove state that the checkpoint has not either. With a part of it there, the rest counts as missing."""
    if not isinstance(value, dict):
        return
    for key, item in list(value.items()):
        name = f"{path}{key}"
        if isinstance(item, AbsentState) and not any(f"{name}.{inner}" in saved for inner in item):
            del value[key]
        else:
            _drop_absent(item, f"{name}.", saved)


def _other_kinds(state: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    for name, value in state.items():
        there = saved.get(name)
        is_tensor = isinstance(there, TensorStorageMetadata)
        if there is None:
            continue
        if is_tensor != isinstance(value, torch.Tensor):
            kinds = ("a tensor", "an object") if is_tensor else ("an object", "a tensor")
            yield f"  {name} is {kinds[0]} in the checkpoint, {kinds[1]} in the state dict"
        elif is_tensor and tuple(there.size) != tuple(value.shape):
            yield f"  {name} has shape {tuple(there.size)} in the checkpoint, {tuple(value.shape)} in the state dict"


def _listed(title: str, names: Iterable[str]) -> list[str]:
    found = sorted(names)
    return [f"  {title}: {', '.join(found)}"] if found else []


def _is_cut(saved: Any) -> bool:
    """Whether the blocks that the checkpoint has of a tensor are not all of it."""
    return isinstance(saved, TensorStorageMetadata) and saved.size.numel() != sum(c.sizes.numel() for c in saved.chunks)


def _top(path: tuple[Any, ...], asked: set[str], state_dict: Mapping[str, Any]) -> bool:
    """Whether a saved name lies in a nested state dict that was asked for."""
    return path[0] in asked and isinstance(state_dict[path[0]], Mapping)
