"""Ways to strike workers while they train: killed, stopped, killed while they save, left without disk space."""

import dataclasses
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from stretto.training import FOLDER

KINDS: Final[dict[str, str]] = {
    "one": "SIGKILL of a random worker",
    "all": "SIGKILL of all workers",
    "saving": "SIGKILL of the first worker while it writes a checkpoint",
    "stopped": "SIGSTOP of a random worker, past the time-out",
    "full": "a full disk",
}
SMALLEST_FILE: Final = 4096
"""Bytes of a file that still find room when the disk is full."""
LONGEST_HUNT: Final = 20.0
"""Seconds to wait for a checkpoint that is being written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One of them: how, on which ranks, and after how many recorded lines."""

    kind: str
    ranks: tuple[int, ...]
    after: int


def strike(kind: str, launcher: int, run: Path, *, chance: np.random.Generator) -> tuple[int, ...]:
    """Strike workers of a launcher.

    Args:
        kind: One of `KINDS`.
        launcher: The process that started them.
        run: Their run folder.
        chance: Who is struck.

    Returns:
        The ranks that were struck; none if there were no workers just then.
    """
    workers = sorted(workers_below(launcher), key=lambda worker: worker[1])
    if not workers:
        return ()
    if kind == "saving":
        return (0,) if _kill_while_saving(workers[0][0], run) else ()
    if kind == "full":
        # Files may not grow beyond that any more, which a program meets as it meets a full disk: the write fails.
        resource.prlimit(workers[0][0], resource.RLIMIT_FSIZE, (SMALLEST_FILE, SMALLEST_FILE))
        return (0,)
    struck = workers if kind == "all" else [workers[chance.integers(len(workers))]]
    for process, _ in struck:
        os.kill(process, signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)
    return tuple(rank for _, rank in struck)


def _kill_while_saving(process: int, run: Path) -> bool:
    """Stop the process when a checkpoint is half there; if it still is, the process is in the middle of it."""
    ends = time.monotonic() + LONGEST_HUNT
    while time.monotonic() < ends:
        if not any((run / FOLDER).glob(".step-*.part")):
            continue
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.01)
        if any((run / FOLDER).glob(".step-*.part")):
            os.kill(process, signal.SIGKILL)
            return True
        os.kill(process, signal.SIGCONT)
    return False


def workers_below(launcher: int) -> Iterator[tuple[int, int]]:
    """Process and rank of every worker that a launcher has started, by itself or through one process in between."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = _parent(int(folder.name))
            above = {parent, _parent(parent)}
            variables = dict(
                item.partition("=")[::2] for item in (folder / "environ").read_bytes().decode().split("\0") if item
            )
        except (OSError, IndexError, UnicodeDecodeError):
            continue
        if launcher in above and "RANK" in variables:
            yield int(folder.name), int(variables["RANK"])


def _parent(process: int) -> int:
    return int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{process}/status").read_text(encoding="utf-8"))[0])
