"""Checkpoints: a folder each, complete or absent, no pickle, written while training continues.

A checkpoint holds `tensors.safetensors` and `state.json`; the latter is written last and has the checksum of both, and
the folder gets its name by one rename when both are on disk.
"""

import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, Final, final

import safetensors
import safetensors.torch
import torch

from stretto.distributed import DeferredErrors
from stretto.errors import StrettoError
from stretto.files import disk_errors, refuse_special, sync_folder, write_atomically
from stretto.training.events import AbstractLog

CHECKPOINT_FOLDER: Final = "checkpoints"
BEST_FILE: Final = "best.safetensors"
TENSORS_FILE: Final = "tensors.safetensors"
STATE_FILE: Final = "state.json"
VERSION: Final = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Tensors by name and JSON-ready values."""

    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)

    def merge(self, *others: "Checkpoint") -> "Checkpoint":
        """One checkpoint of several, whose names differ."""
        merged = Checkpoint(tensors=dict(self.tensors), state=dict(self.state))
        for other in others:
            merged.tensors.update(other.tensors)
            merged.state.update(other.state)
        return merged

    def model(self) -> dict[str, torch.Tensor]:
        """The weights."""
        begin = "model."
        return {name.removeprefix(begin): value for name, value in self.tensors.items() if name.startswith(begin)}

    def copy(self) -> "Checkpoint":
        """A copy in memory of its own, so that training can continue while it is written."""
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors.items()}
        return Checkpoint(tensors=tensors, state=copy.deepcopy(self.state))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """The newest complete checkpoint, and what was wrong with newer ones."""

    checkpoint: Checkpoint
    path: Path
    refused: tuple[str, ...]


def save_checkpoint(run: Path, checkpoint: Checkpoint, *, update: int, keep: int) -> Path:
    """Write a checkpoint, then remove all but it and the `keep` - 1 before it."""
    folder = run / CHECKPOINT_FOLDER
    path = folder / f"update-{update:08d}"
    with contextlib.suppress(StrettoError):
        # Saved already, for example by an interrupt at the very end of an epoch: the same update has the same state.
        _read(path)
        return path
    temporary = folder / f".{path.name}.{secrets.token_hex(4)}.part"
    with disk_errors(path, doing="write the checkpoint"):
        try:
            temporary.mkdir(parents=True)
            _write_into(temporary, checkpoint)
            if path.exists():
                shutil.rmtree(path)
            temporary.rename(path)
            sync_folder(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    saved = sorted(folder.glob("update-*"))
    # A later one was refused when the run resumed from before it; it must not count as one of the newest.
    newest = saved.index(path) + 1
    for old in (*saved[: max(0, newest - keep)], *saved[newest:], *folder.glob(".update-*.part")):
        shutil.rmtree(old, ignore_errors=True)
    return path


def load_newest(run: Path) -> FoundCheckpoint:
    """The newest complete checkpoint; damaged or foreign ones are named and skipped."""
    refused: list[str] = []
    # Folders of earlier versions have another name; they are refused by their version, with a message that says so.
    for path in sorted((run / CHECKPOINT_FOLDER).glob("*-????????"), reverse=True):
        try:
            return FoundCheckpoint(checkpoint=_read(path), path=path, refused=tuple(refused))
        except StrettoError as error:
            refused.append(str(error))
    found = f" ({'; '.join(refused)})" if refused else ""
    raise StrettoError(
        f"{str(run)!r} has no checkpoint to resume from{found}", fix="Start again with a new --out folder."
    )


def model_of_newest_checkpoint(run: Path) -> dict[str, torch.Tensor]:
    """The weights of a run that is not finished."""
    return load_newest(run).checkpoint.model()


@final
class CheckpointWriter:
    """Writes one checkpoint at a time in a thread, and records each that is on disk.

    The error of a write, which occurs only on the rank that writes, is kept in `errors` by the next call. `seconds` is
    the time in which training waited.
    """

    def __init__(self, run: Path, *, keep: int, log: AbstractLog, errors: DeferredErrors) -> None:
        self._run, self._keep, self._log, self._errors = run, keep, log, errors
        self._pending: Future[Path] | None = None
        self.seconds = 0.0

    def begin(self, checkpoint: Checkpoint, *, update: int, seconds: float = 0.0, is_best: bool = False) -> None:
        """Begin to write a checkpoint that nothing changes any more, and took so many seconds to prepare.

        If its model is the best so far, its weights are written by themselves too. The checkpoint before is on disk and
        recorded by then.
        """
        self.wait()
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending = thread.submit(self._write, checkpoint, update=update, is_best=is_best)
        thread.shutdown(wait=False)
        self.seconds += seconds

    def _write(self, checkpoint: Checkpoint, *, update: int, is_best: bool) -> Path:
        if is_best:
            # Before the checkpoint: a run that is resumed from an earlier one writes the same weights again.
            weights = checkpoint.model()
            write_atomically(self._run / BEST_FILE, lambda path: save_tensors(weights, path))
        return save_checkpoint(self._run, checkpoint, update=update, keep=self._keep)

    def poll(self) -> None:
        """Record the checkpoint under way if it is on disk."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint under way, and record it."""
        pending = self._pending
        if pending is None:
            return
        start = time.perf_counter()
        # A second Ctrl-C may end the wait, but not the write: then it is still pending.
        wait_for([pending])
        self._pending = None
        with self._errors.defer():
            path = pending.result()
            update = int(path.name.rpartition("-")[2])
            self._log.emit("checkpoint", update=update, path=str(path.relative_to(self._run)))
        self.seconds += time.perf_counter() - start


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors as safetensors; a full disk is an `OSError`, as it is for any file."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(plain, path)
    except safetensors.SafetensorError as error:
        raise OSError(f"{error}") from error


def _write_into(folder: Path, checkpoint: Checkpoint) -> None:
    save_tensors(checkpoint.tensors, folder / TENSORS_FILE)
    checksum = _checksum(folder / TENSORS_FILE, checkpoint.state)
    state = {"version": VERSION, "sha256": checksum, **checkpoint.state}
    (folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
    for file in (TENSORS_FILE, STATE_FILE):
        with (folder / file).open("rb") as stream:
            os.fsync(stream.fileno())
    sync_folder(folder)


def _read(path: Path) -> Checkpoint:
    try:
        for file in (TENSORS_FILE, STATE_FILE):
            refuse_special(path / file)
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or state.pop("version", None) != VERSION:
            raise ValueError(f"{STATE_FILE} was written by another version of Stretto")
        if state.pop("sha256", None) != _checksum(path / TENSORS_FILE, state):
            raise ValueError(f"{TENSORS_FILE} and {STATE_FILE} do not have the checksum they were saved with")
        found = safetensors.torch.load_file(path / TENSORS_FILE)
        # Copies are aligned as any tensor is. Those of a file begin anywhere, and the last digits of a BLAS product,
        # and so of a resumed run, depend on that.
        return Checkpoint(tensors={name: tensor.clone() for name, tensor in found.items()}, state=state)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise StrettoError(
            f"the checkpoint {str(path)!r} cannot be used: {error}", fix="The one before it is used."
        ) from error


def _checksum(tensors: Path, state: dict[str, Any]) -> str:
    hasher = hashlib.sha256(json.dumps(state, allow_nan=False).encode())
    with tensors.open("rb") as stream:
        while block := stream.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()
