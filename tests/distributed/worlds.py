"""Real processes that form a world, for tests: each runs one function and leaves what it returns in a file."""

import functools
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quick_starts import quick_starts
from stretto.distributed import World, join_ranks
from stretto.distributed.world import STORE_VARIABLE
from stretto.errors import StrettoError
from stretto.kernels.backends.cpp import compiler
from stretto.training import EVENTS_FILE, AbstractLog, EventLog, SilentLog, Trainer

Prepare = Callable[[int], None]


def run_world(
    size: int, work: Callable[..., Any], folder: Path, *arguments: Any, prepare: Prepare | None = None
) -> list[Any]:
    """What `work(world, *arguments)` returns on each of `size` ranks, as JSON has it; errors by their text.

    Args:
        size: How many processes.
        work: A function of a module, which each process calls.
        folder: Where they meet and leave what they return.
        *arguments: Given to `work` after the world.
        prepare: Called with the rank before the others are met.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = quick_starts()
    workers = [
        context.Process(
            target=_worker,
            args=(rank, size, str(folder), prepare, functools.partial(_called, work, arguments)),
            daemon=True,
        )
        for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def _called(work: Callable[..., Any], arguments: tuple[Any, ...], world: World) -> Any:
    return work(world, *arguments)


def _worker(rank: int, size: int, folder: str, prepare: Prepare | None, work: Callable[[World], Any]) -> None:
    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), STORE_VARIABLE: f"{folder}/store"})
    answer: Any
    try:
        if prepare is not None:
            prepare(rank)
        with join_ranks(timeout_minutes=15.0) as world:
            answer = work(world)
    except StrettoError as error:
        answer = f"StrettoError: {error}"
    except Exception:  # noqa: BLE001 - the test shows it
        answer = traceback.format_exc()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(answer))


def compile_quickly(rank: int) -> None:
    """Code that is compiled quickly rather than well, in a process of a world."""
    compiler.BASE_FLAGS = tuple("-O0" if flag == "-O2" else flag for flag in compiler.BASE_FLAGS)  # type: ignore[misc]


def rank0_log(world: World, run: Path | str) -> AbstractLog:
    """The events of a run, written by rank 0 alone."""
    return EventLog(Path(run) / EVENTS_FILE) if world.is_rank0 else SilentLog()


class StopAt(AbstractLog):
    """A log that asks its trainer to stop in an update, which all of several ranks learn of in the next."""

    trainer: Trainer

    def __init__(self, log: AbstractLog, *, update: int | None) -> None:
        self._log, self._update = log, update

    def emit(self, kind: str, **values: Any) -> None:
        """Pass the event on."""
        self._log.emit(kind, **values)
        if kind == "update" and values["update"] == self._update:
            self.trainer._stop.set()
