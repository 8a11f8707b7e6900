"""Checkpoints: a folder each, whole or not there, no pickle.

A checkpoint holds `tensors.safetensors` and `state.json`; the latter is written last and carries the checksum of both,
and the folder gets its name by one rename when both are on disk.
"""

import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
import torch

from stretto.errors import StrettoError
from stretto.files import disk_errors, sync_folder

FOLDER: Final = "checkpoints"
TENSORS: Final = "tensors.safetensors"
STATE: Final = "state.json"
VERSION: Final = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Tensors by name and JSON-ready values."""

    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]

    def joined(self, other: "Checkpoint") -> "Checkpoint":
        """What is in either; both have names of their own."""
        return Checkpoint(tensors={**self.tensors, **other.tensors}, state={**self.state, **other.state})

    def copied(self) -> "Checkpoint":
        """The same, in memory of its own: training can go on while it is written."""
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors.items()}
        return Checkpoint(tensors=tensors, state=copy.deepcopy(self.state))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """The newest whole checkpoint, and what was wrong with newer ones."""

    checkpoint: Checkpoint
    path: Path
    refused: tuple[str, ...]


def save_checkpoint(run: Path, checkpoint: Checkpoint, *, step: int, keep: int) -> Path:
    """Write a checkpoint beside the others, then remove all but it and the `keep` - 1 before it."""
    folder = run / FOLDER
    path = folder / f"step-{step:08d}"
    if _is_whole(path):
        # Saved already, for example by an interrupt at the very end of an epoch: the same step has the same state.
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
    saved = sorted(folder.glob("step-*"))
    # A later one was refused when the run resumed from before it; it must not count as one of the newest.
    newest = saved.index(path) + 1
    for old in (*saved[: max(0, newest - keep)], *saved[newest:], *folder.glob(".step-*.part")):
        shutil.rmtree(old, ignore_errors=True)
    return path


def load_newest(run: Path) -> FoundCheckpoint:
    """The newest checkpoint that is whole; torn or foreign ones are refused by name and the one before is taken."""
    refused: list[str] = []
    for path in sorted((run / FOLDER).glob("step-*"), reverse=True):
        try:
            return FoundCheckpoint(checkpoint=_read(path), path=path, refused=tuple(refused))
        except StrettoError as error:
            refused.append(str(error))
    found = f" ({'; '.join(refused)})" if refused else ""
    raise StrettoError(
        f"{str(run)!r} has no checkpoint to go on from{found}", fix="Start again with a new --out folder."
    )


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors as safetensors; a full disk is an `OSError`, as it is for any file."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(plain, path)
    except safetensors.SafetensorError as error:
        raise OSError(f"{error}") from error


def _write_into(folder: Path, checkpoint: Checkpoint) -> None:
    save_tensors(checkpoint.tensors, folder / TENSORS)
    checksum = _checksum(folder / TENSORS, checkpoint.state)
    state = {"version": VERSION, "sha256": checksum, **checkpoint.state}
    (folder / STATE).write_text(json.dumps(state), encoding="utf-8")
    for file in (TENSORS, STATE):
        with (folder / file).open("rb") as stream:
            os.fsync(stream.fileno())
    sync_folder(folder)


def _read(path: Path) -> Checkpoint:
    with _named(path):
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or state.pop("version", None) != VERSION:
            raise ValueError(f"{STATE} is of another version")
        if state.pop("sha256", None) != _checksum(path / TENSORS, state):
            raise ValueError(f"{TENSORS} and {STATE} do not have the checksum they were saved with")
        found = safetensors.torch.load_file(path / TENSORS)
        # Copies lie as any tensor does. Those of a file begin anywhere, and products of a BLAS, and so the last digits
        # of a resumed run, depend on that.
        return Checkpoint(tensors={name: tensor.clone() for name, tensor in found.items()}, state=state)


def _is_whole(path: Path) -> bool:
    if not path.exists():
        return False
    with contextlib.suppress(StrettoError):
        _read(path)
        return True
    return False


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise StrettoError(
            f"the checkpoint {str(path)!r} cannot be used: {error}", fix="The one before it is taken."
        ) from error


def _checksum(tensors: Path, state: dict[str, Any]) -> str:
    hasher = hashlib.sha256(json.dumps(state, allow_nan=False).encode())
    with tensors.open("rb") as stream:
        while block := stream.read(1 << 20):
            hasher.update(block)
    return hasher.hexdigest()
