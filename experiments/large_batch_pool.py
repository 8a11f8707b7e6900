"""Executes the unfinished runs of the large-batch experiment, several at a time.

Runner      knows which runs are finished, executes the others, and reports how many are left
WorkerPool  processes that execute one run at a time each
"""

import contextlib
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Final, TypeAlias, final

import torch

from experiments.large_batch_apps import METRICS, ApplicationName, open_data
from experiments.large_batch_runs import Run, RunResult, execute, load_result, save_result
from stretto.data import SequenceSet
from stretto.errors import StrettoError
from stretto.report import duration
from stretto.training import Interrupted, stop_on_signals

RESULTS: Final = "runs"
IN_PROGRESS: Final = "in-progress"
STOPPED: Final = "stopped; finished runs and checkpoints are kept, and the same command continues from here"
POLL_SECONDS: Final = 0.5
STOP_SECONDS: Final = 60.0
"""A run that is asked to stop has this long to finish its update and save."""


@final
class Runner:
    """Makes runs and keeps their results.

    Args:
        out: The folder of finished runs, and of checkpoints of those in progress.
        data: The data of each application.
        data_folder: Where other processes find them, as for `open_data`.
        num_jobs: Runs at a time; one alone is made in this process.
        fresh: Whether to repeat what was finished or started before.
        progress: Called with a line after every run, and with how many to expect before.
    """

    def __init__(
        self,
        out: Path,
        *,
        data: Mapping[ApplicationName, SequenceSet],
        data_folder: Path | None,
        num_jobs: int,
        fresh: bool,
        progress: Callable[[str], None],
    ) -> None:
        self._out, self._data, self._data_folder = out, data, data_folder
        self._num_jobs, self._fresh, self._progress = num_jobs, fresh, progress
        self._looked_up: set[str] = set()
        self.finished: dict[str, RunResult] = {}
        self.num_reused = 0

    def find(self, run: Run) -> RunResult | None:
        """The result of a run, if it is finished; looked up on disk once."""
        key = run.key
        if key not in self._looked_up and not self._fresh:
            self._looked_up.add(key)
            try:
                found = load_result(run, self._out / RESULTS)
            except StrettoError as error:
                self._progress(str(error))
            else:
                if found is not None:
                    self.finished[key] = found
                    self.num_reused += 1
        return self.finished.get(key)

    def missing(self, runs: Iterable[Run]) -> list[Run]:
        """The runs that are not finished, each once."""
        return list({run.key: run for run in runs if self.find(run) is None}.values())

    def results(self, runs: Iterable[Run]) -> list[RunResult]:
        """The results of finished runs."""
        return [self.finished[run.key] for run in runs]

    def make(self, runs: Sequence[Run]) -> None:
        """Make runs that are not finished.

        Raises:
            StrettoError: If a run cannot be made, or its process died.
            KeyboardInterrupt: If it was asked to stop; runs in progress were saved.
        """
        if not runs:
            return
        self._progress(f"{len(runs)} runs to make; finished runs are kept in {self._out / RESULTS}")
        if self._fresh:
            for run in runs:
                shutil.rmtree(self._folder(run), ignore_errors=True)
        try:
            for number, (run, result) in enumerate(self._execute(runs), start=1):
                save_result(run, result, self._out / RESULTS, data=self._data[run.application.name].name)
                self.finished[run.key] = result
                self._progress(f"{run}: {describe(result)}; {len(runs) - number} left")
        except (Interrupted, KeyboardInterrupt):
            self._progress(STOPPED)
            raise KeyboardInterrupt from None

    def _folder(self, run: Run) -> Path:
        return self._out / IN_PROGRESS / run.key

    def _execute(self, runs: Sequence[Run]) -> Iterator[tuple[Run, RunResult]]:
        if self._num_jobs == 1:
            for run in runs:
                yield run, execute(run, self._data[run.application.name], self._folder(run))
            return
        threads = torch.get_num_threads()
        with WorkerPool(self._data_folder, num_processes=self._num_jobs, threads=threads) as pool:
            yield from pool.map([(run, self._folder(run)) for run in runs])


def describe(result: RunResult) -> str:
    """What a run reached, and how long it took."""
    took = f"{result.updates:,} updates, {duration(result.wall_seconds)}"
    if result.valid is None or result.test is None:
        return f"diverged after {took}"
    metric = METRICS[result.application]  # type: ignore[index]
    return f"{metric.unit} {metric.format(result.test)} (validation {metric.format(result.valid)}), {took}"


Job: TypeAlias = tuple[Run, Path]
"""A run, and the folder for its checkpoints."""
Outcome: TypeAlias = RunResult | StrettoError | None
"""Of a job: its result, or why it cannot be run; None if it was asked to stop."""


@final
class WorkerPool:
    """Processes that make one run at a time each.

    Not concurrent.futures: here a process that is killed names its run, and Ctrl-C lets every run save a checkpoint.
    """

    def __init__(self, data: Path | None, *, num_processes: int, threads: int) -> None:
        # Not forked: a copy of a process that has computed with threads may inherit locked locks.
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, data, threads), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            # Ends a process that waits for a job.
            pipe.close()
        _join(self._processes, terminate=kind is not None)

    def map(self, jobs: Sequence[Job]) -> Iterator[tuple[Run, RunResult]]:
        """Make all runs and yield their results as they come.

        Raises:
            StrettoError: If a run cannot be made, or its process died.
            KeyboardInterrupt: If it was asked to stop; runs in progress were saved.
        """
        waiting, busy, stop = list(reversed(jobs)), dict[int, Run](), threading.Event()
        with stop_on_signals(stop):
            while waiting or busy:
                for number in range(len(self._pipes)):
                    if number not in busy and waiting and not stop.is_set():
                        job = waiting.pop()
                        busy[number] = job[0]
                        with self._name_run(number, job[0]):
                            self._pipes[number].send(job)
                if stop.is_set():
                    _join([self._processes[number] for number in busy], terminate=True)
                    raise KeyboardInterrupt
                ready = wait([self._pipes[number] for number in busy], timeout=POLL_SECONDS)
                for number in [number for number in busy if self._pipes[number] in ready]:
                    run = busy.pop(number)
                    with self._name_run(number, run):
                        outcome: Outcome = self._pipes[number].recv()
                    if isinstance(outcome, StrettoError):
                        raise outcome
                    if outcome is None:
                        # Somebody asked this process alone to stop.
                        stop.set()
                    else:
                        yield run, outcome

    @contextlib.contextmanager
    def _name_run(self, number: int, run: Run) -> Iterator[None]:
        """If the pipe breaks, name the run whose process died."""
        try:
            yield
        except (EOFError, OSError):
            process = self._processes[number]
            process.join(STOP_SECONDS)
            raise StrettoError(
                f"the process for {run} ended with exit code {process.exitcode}",
                fix="Run the same command again, which continues from here; --jobs 1 needs the least memory.",
            ) from None


def _join(processes: Sequence[BaseProcess], *, terminate: bool) -> None:
    if terminate:
        for process in processes:
            process.terminate()
    for process in processes:
        process.join(STOP_SECONDS)


def _work(pipe: Connection, data_folder: Path | None, threads: int) -> None:
    """Make runs until the pipe is closed."""
    # In a session of its own, Ctrl-C reaches only the process that the user started, which stops this one.
    if hasattr(os, "setsid"):
        os.setsid()
    torch.set_num_threads(threads)
    data: dict[ApplicationName, SequenceSet] = {}
    while True:
        try:
            run, folder = pipe.recv()
        except EOFError:
            return
        name = run.application.name
        outcome: Outcome
        try:
            if name not in data:
                data[name] = open_data(run.application, data_folder)
            outcome = execute(run, data[name], folder)
        except Interrupted:
            pipe.send(None)
            return
        except StrettoError as error:
            outcome = error
        pipe.send(outcome)
