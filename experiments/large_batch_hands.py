"""Processes that make the runs of the experiment with large batches side by side, one run each at a time."""

import dataclasses
import functools
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Final, TypeAlias, final

import torch

from experiments.large_batch_cells import Cell, CellResult
from experiments.large_batch_courses import Course, course_of
from experiments.large_batch_running import run_cell
from experiments.large_batch_settings import ApplicationName, LargeBatchSettings
from stretto.errors import StrettoError
from stretto.training import Interrupted, stop_on_signals

OFTEN: Final = 0.5
"""Seconds between looks at whether to stop."""
PATIENCE: Final = 60.0
"""Seconds in which a run that is asked to stop ends its step and saves."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """A run to be made.

    Attributes:
        cell: Which.
        key: Of all that shapes the result.
        folder: For what is kept while it is under way.
    """

    cell: Cell
    key: str
    folder: Path


Answer: TypeAlias = CellResult | StrettoError | None
"""What came of a run: a result, or what was in the way; neither if it was stopped."""


@final
class Hands:
    """Makes runs side by side.

    Args:
        settings: Of the experiment.
        count: How many processes.
        threads: Of each.
    """

    def __init__(self, settings: LargeBatchSettings, *, count: int, threads: int) -> None:
        # Not forked: a process that has computed with threads leaves locks behind in its copies.
        context = multiprocessing.get_context("spawn")
        self._lines: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, settings, threads), daemon=True)
            process.start()
            theirs.close()
            self._lines.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "Hands":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in self._lines:
            # Who waits for an errand hears that there is none.
            line.close()
        for process in self._processes:
            if kind is not None:
                process.terminate()
            process.join(PATIENCE)

    def run(self, errands: Sequence[Errand]) -> Iterator[tuple[Errand, CellResult]]:
        """Make all these runs; their results as they come.

        Raises:
            StrettoError: A run cannot be made, or its process ended.
            KeyboardInterrupt: It was asked to stop; runs under way were saved.
        """
        waiting, busy, stop = list(reversed(errands)), dict[int, Errand](), threading.Event()
        with stop_on_signals(stop):
            while waiting or busy:
                for at in range(len(self._lines)):
                    if at not in busy and waiting and not stop.is_set():
                        busy[at] = waiting.pop()
                        self._give(at, busy[at])
                if stop.is_set():
                    self._stop(busy)
                    raise KeyboardInterrupt
                for at in self._answered(busy):
                    errand = busy.pop(at)
                    answer = self._answer(at, errand)
                    if isinstance(answer, StrettoError):
                        raise answer
                    if answer is None:
                        # Somebody has asked this process alone to stop.
                        stop.set()
                    else:
                        yield errand, answer

    def _answered(self, busy: dict[int, Errand]) -> list[int]:
        ready = wait([self._lines[at] for at in busy], timeout=OFTEN)
        return [at for at in busy if self._lines[at] in ready]

    def _answer(self, at: int, errand: Errand) -> Answer:
        try:
            answer: Answer = self._lines[at].recv()
        except (EOFError, OSError):
            raise self._ended(at, errand) from None
        return answer

    def _give(self, at: int, errand: Errand) -> None:
        try:
            self._lines[at].send(errand)
        except OSError:
            raise self._ended(at, errand) from None

    def _ended(self, at: int, errand: Errand) -> StrettoError:
        self._processes[at].join(PATIENCE)
        return StrettoError(
            f"the process for {errand.cell.title} ended with exit code {self._processes[at].exitcode}",
            fix="Run the same command again, which goes on from here; --jobs 1 needs the least memory.",
        )

    def _stop(self, busy: dict[int, Errand]) -> None:
        for at in busy:
            self._processes[at].terminate()
        for at in busy:
            self._processes[at].join(PATIENCE)


def _work(line: Connection, settings: LargeBatchSettings, threads: int) -> None:
    """Make runs until there are no more."""
    # Ctrl-C is for the process that the user started; it tells this one.
    if hasattr(os, "setsid"):
        os.setsid()
    torch.set_num_threads(threads)

    @functools.cache
    def course(name: ApplicationName) -> Course:
        return course_of(name, settings)

    while True:
        try:
            errand = line.recv()
        except EOFError:
            return
        answer: Answer
        try:
            data = course(errand.cell.application.name).data
            answer = run_cell(errand.cell, data, key=errand.key, folder=errand.folder)
        except Interrupted:
            line.send(None)
            return
        except StrettoError as error:
            answer = error
        line.send(answer)
