"""One training run of the large-batch experiment: its identity, its result on disk, and processes that make many.

A result is a file named after its run and a digest of everything that shapes it. A finished run is reused by the same
command, and never by another. A run that was stopped continues from its last checkpoint, bit for bit.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias, final

import pydantic
import torch
from torch import nn

from experiments.large_batch_apps import METRICS, WARMUP_CAP, Application, ApplicationName, open_data
from stretto.data import SequenceSet
from stretto.errors import StrettoError
from stretto.files import disk_errors, write_text_atomically
from stretto.large_batch import ScalingRule
from stretto.tasks import find_task
from stretto.training import CHECKPOINT_FOLDER as CHECKPOINTS
from stretto.training import (
    AbstractLog,
    Diverged,
    Interrupted,
    TrainConfig,
    Trainer,
    stop_on_signals,
    validate,
    with_preset,
)

FORMAT: Final = 2
IRRELEVANT: Final = ("data", "threads", "checkpoint_minutes", "keep_checkpoints")
"""Settings that do not shape a result, or are part of the digest in another form."""
CURVE_FILE: Final = "curve.json"
POLL_SECONDS: Final = 0.5
STOP_SECONDS: Final = 60.0
"""A run that is asked to stop has this long to finish its update and save."""

RunRule: TypeAlias = Literal[ScalingRule, "baseline", "lamb"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run."""

    application: Application
    multiple: int  # the batch, in multiples of the baseline's
    rule: RunRule  # how settings follow the batch; at the baseline's batch all rules but lamb are the same
    factor: float = 1.0  # on the learning rate, in search of a better one
    seed: int

    def __str__(self) -> str:
        rate = "" if self.factor == 1.0 else f", rate x {self.factor:g}"
        return f"{self.application.name} x{self.multiple} {self.rule}{rate}, seed {self.seed}"

    @property
    def batch_size(self) -> int:
        """Sequences or streams per batch."""
        return self.multiple * self.application.batch_size

    def config(self) -> TrainConfig:
        """The settings of the run."""
        application, is_lamb = self.application, self.rule == "lamb"
        values = {
            **application.settings,
            "batch_size": self.batch_size,
            "base_batch_size": application.batch_size,
            "rule": {"baseline": "none", "lamb": "legw"}.get(self.rule, self.rule),
            "learning_rate": self.factor * (application.lamb_rate if is_lamb else application.learning_rate),
            "optimizer": "lamb" if is_lamb else application.optimizer,
            "schedule": application.schedule,
            "warmup_epochs": application.warmup_epochs,
            "warmup_cap": WARMUP_CAP,
            "epochs": application.epochs,
            "seed": self.seed,
        }
        kind = find_task(application.name).Config
        return validate(kind, with_preset(kind, values), source=f"the run {self}")

    def key(self, data_digest: str) -> str:
        """A digest of everything that shapes the result."""
        settings = {name: value for name, value in self.config().recorded().items() if name not in IRRELEVANT}
        shaping = {
            "format": FORMAT,
            "task": self.application.name,
            "settings": settings,
            "data": data_digest,
            "threads": torch.get_num_threads(),
            "versions": [importlib.metadata.version("stretto"), torch.__version__],
        }
        return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]

    def path(self, folder: Path, key: str) -> Path:
        """The file of the result."""
        rate = "" if self.factor == 1.0 else f"-rate{self.factor:g}"
        name = f"{self.application.name}-x{self.multiple}-{self.rule}{rate}-seed{self.seed}-{key}.json"
        return folder / name


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of one run; the first six fields say which."""

    key: str
    application: str
    multiple: int
    rule: RunRule
    factor: float
    seed: int
    batch_size: int
    learning_rate: float  # the peak
    warmup_epochs: float  # until the peak
    updates_per_epoch: int
    epochs: int  # whole ones that were done
    updates: int
    seconds: float  # of the updates
    wall_seconds: float  # of the whole run, with validation
    diverged: bool  # whether it ended early, at a loss or gradient that is NaN or inf
    why: str  # the error in that case
    valid: float | None  # the metric on the validation part after the last epoch; None if it diverged
    test: float | None  # the metric on the test part; None if it diverged
    curve: tuple[float, ...]  # the metric on the validation part after each epoch
    weights: str  # a digest of the weights before the first update

    def __post_init__(self) -> None:
        if not self.diverged and (self.valid is None or self.test is None):
            raise ValueError("a run that did not diverge has values")


_RESULT: Final = pydantic.TypeAdapter(RunResult)


def load_result(run: Run, *, key: str, folder: Path) -> RunResult | None:
    """Read the result of a run, if it is finished.

    Raises:
        StrettoError: If the file is damaged.
    """
    path = run.path(folder, key)
    with disk_errors(path, doing="read"):
        if not path.exists():
            return None
        content = path.read_bytes()
    try:
        found = _RESULT.validate_json(content)
    except pydantic.ValidationError as error:
        raise _damaged(path, str(error.errors(include_url=False)[0]["msg"])) from error
    expected = (key, run.application.name, run.multiple, run.rule, run.factor, run.seed)
    if (found.key, found.application, found.multiple, found.rule, found.factor, found.seed) != expected:
        raise _damaged(path, "it is of another run")
    return found


def _damaged(path: Path, why: str) -> StrettoError:
    return StrettoError(f"{str(path)!r} is damaged ({why})", fix="The run is repeated.")


def save_result(run: Run, result: RunResult, *, folder: Path, data: str) -> None:
    """Write the result of a run, with its settings and the name of its data."""
    facts = {"settings": run.config().recorded(), "data": data}
    text = json.dumps({**dataclasses.asdict(result), "facts": facts}, indent=2, allow_nan=False) + "\n"
    write_text_atomically(run.path(folder, result.key), text)


@final
class LearningCurve(AbstractLog):
    """The metric after each epoch, kept in a file beside the checkpoints so that it survives a stop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.weights = ""
        self.values: dict[int, float] = {}

    def begin(self, model: nn.Module) -> None:
        """Start a new curve with a digest of the initial weights."""
        digest = hashlib.sha256()
        for name, tensor in model.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        self.weights = digest.hexdigest()[:16]
        self._write()

    def resume(self) -> None:
        """Continue from the file."""
        stored = json.loads(self._path.read_text(encoding="utf-8"))
        self.weights = stored["weights"]
        self.values = {int(epoch): float(value) for epoch, value in stored["values"].items()}

    def emit(self, kind: str, **values: Any) -> None:
        """Keep the metric of an epoch."""
        if kind == "epoch":
            self.values[int(values["epoch"])] = float(values["value"])
            self._write()

    def close(self) -> None:
        """Nothing is held open."""

    def _write(self) -> None:
        write_text_atomically(self._path, json.dumps({"weights": self.weights, "values": self.values}) + "\n")


def execute(run: Run, data: SequenceSet, *, key: str, folder: Path) -> RunResult:
    """Train and measure; a run that diverges has a result, too.

    Args:
        run: What to run.
        data: Of its application.
        key: Of the run.
        folder: For its checkpoints; a run that was stopped continues from there. Removed at the end.

    Raises:
        StrettoError: If it cannot be run.
        Interrupted: If it was asked to stop.
    """
    metric = METRICS[run.application.name].name
    is_resumed = (folder / CHECKPOINTS).is_dir() and (folder / CURVE_FILE).exists()
    if not is_resumed:
        shutil.rmtree(folder, ignore_errors=True)
    curve = LearningCurve(folder / CURVE_FILE)
    task = find_task(run.application.name)(run.config(), data)
    trainer = Trainer(task, run=folder, log=curve, resume=is_resumed)
    if is_resumed:
        curve.resume()
    else:
        curve.begin(trainer.state.model)
    begin = time.perf_counter() - trainer.state.seconds
    why, test = "", math.nan
    try:
        test = float(trainer.run().metrics[metric])
    except Diverged as error:
        why = error.problem
    wall_seconds = time.perf_counter() - begin
    state = trainer.state
    values = tuple(value for _, value in sorted(curve.values.items()) if math.isfinite(value))
    if not why and (not math.isfinite(test) or len(values) < run.application.epochs):
        why = f"the {metric} is NaN or inf"
    shutil.rmtree(folder)
    return RunResult(
        key=key,
        application=run.application.name,
        multiple=run.multiple,
        rule=run.rule,
        factor=run.factor,
        seed=run.seed,
        batch_size=run.batch_size,
        learning_rate=state.recipe.lr,
        warmup_epochs=state.recipe.warmup_epochs,
        updates_per_epoch=trainer.feed.whole_epoch,
        epochs=state.epoch,
        updates=state.num_updates,
        seconds=state.train_seconds,
        wall_seconds=wall_seconds,
        diverged=bool(why),
        why=why,
        valid=None if why else values[-1],
        test=None if why else test,
        curve=values,
        weights=curve.weights,
    )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run for a process of the pool."""

    run: Run
    key: str
    folder: Path


Outcome: TypeAlias = RunResult | StrettoError | None
"""Of a job: its result, or why it cannot be run; None if it was asked to stop."""


@final
class WorkerPool:
    """Processes that make one run at a time each.

    Not concurrent.futures: here a process that is killed names its run, and Ctrl-C lets every run save a checkpoint.

    Args:
        data: The folder of data, as for `open_data`.
        num_processes: How many.
        threads: Of each.
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
        self._join(self._processes, terminate=kind is not None)

    def map(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, RunResult]]:
        """Make all runs and yield their results as they come.

        Raises:
            StrettoError: If a run cannot be made, or its process died.
            KeyboardInterrupt: If it was asked to stop; runs in progress were saved.
        """
        waiting, busy, stop = list(reversed(jobs)), dict[int, Job](), threading.Event()
        with stop_on_signals(stop):
            while waiting or busy:
                for number in range(len(self._pipes)):
                    if number not in busy and waiting and not stop.is_set():
                        busy[number] = waiting.pop()
                        self._send(number, busy[number])
                if stop.is_set():
                    self._join([self._processes[number] for number in busy], terminate=True)
                    raise KeyboardInterrupt
                ready = wait([self._pipes[number] for number in busy], timeout=POLL_SECONDS)
                for number in [number for number in busy if self._pipes[number] in ready]:
                    job = busy.pop(number)
                    outcome = self._receive(number, job)
                    if isinstance(outcome, StrettoError):
                        raise outcome
                    if outcome is None:
                        # Somebody asked this process alone to stop.
                        stop.set()
                    else:
                        yield job, outcome

    def _send(self, number: int, job: Job) -> None:
        try:
            self._pipes[number].send(job)
        except OSError:
            raise self._died(number, job) from None

    def _receive(self, number: int, job: Job) -> Outcome:
        try:
            outcome: Outcome = self._pipes[number].recv()
        except (EOFError, OSError):
            raise self._died(number, job) from None
        return outcome

    def _died(self, number: int, job: Job) -> StrettoError:
        process = self._processes[number]
        process.join(STOP_SECONDS)
        return StrettoError(
            f"the process for {job.run} ended with exit code {process.exitcode}",
            fix="Run the same command again, which continues from here; --jobs 1 needs the least memory.",
        )

    def _join(self, processes: Sequence[BaseProcess], *, terminate: bool) -> None:
        if terminate:
            for process in processes:
                process.terminate()
        for process in processes:
            process.join(STOP_SECONDS)


def _work(pipe: Connection, folder: Path | None, threads: int) -> None:
    """Make runs until the pipe is closed."""
    # In a session of its own, Ctrl-C reaches only the process that the user started, which stops this one.
    if hasattr(os, "setsid"):
        os.setsid()
    torch.set_num_threads(threads)
    data: dict[ApplicationName, SequenceSet] = {}
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        application = job.run.application
        outcome: Outcome
        try:
            if application.name not in data:
                data[application.name] = open_data(application, folder)
            outcome = execute(job.run, data[application.name], key=job.key, folder=job.folder)
        except Interrupted:
            pipe.send(None)
            return
        except StrettoError as error:
            outcome = error
        pipe.send(outcome)
