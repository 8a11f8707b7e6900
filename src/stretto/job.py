"""One training job, from settings to result: what `stretto.train` and the command line call."""

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from stretto.batching import shuffled_slots
from stretto.data import PARTS, SequenceSet, open_sequences
from stretto.distributed import World, detect_lost_rank, join_ranks
from stretto.errors import StrettoError
from stretto.files import disk_errors, locked, write_text_atomically
from stretto.report import console_view, length_histogram, write_run_report
from stretto.tasks import CONFIGS, task_named
from stretto.training import (
    EVENTS_FILE,
    FOLDER,
    AbstractLog,
    AbstractTask,
    EventLog,
    SilentLog,
    Subscriber,
    TrainConfig,
    Trainer,
    checked,
    read_events,
    summary_of,
    with_preset,
)

RUNS: Final = Path("runs")
RESULT_FILE: Final = "result.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended.

    Attributes:
        metrics: On the test part: the task's metric, and `loss`.
        epochs: Passes over the training data.
        seconds: Wall clock, resumed parts included, the building of the data not.
        padding: Share of slots that were padding.
        steps_per_second: Real time steps trained a second.
        saving: Share of the time in which training stood still for checkpoints, since it was last resumed.
        slot_ratio: How many times more slots shuffled batches would have had.
        settings: As they were used.
        run: The folder with the events, the model, checkpoints and `result.json`.
        report: The HTML page; None when plotly, of the extra `report`, is not installed.
        solving: How the solver of the recurrent layers fared: batches, those that fell back, what was left of the
            residual in the last epoch that was not exact and at most, its mean in each epoch, and the memory for
            where sequences were; None where all was walked step after step.
        model: The trained model.
    """

    metrics: dict[str, float]
    epochs: int
    seconds: float
    padding: float
    steps_per_second: float
    saving: float
    slot_ratio: float
    settings: dict[str, Any]
    run: Path
    report: Path | None
    solving: dict[str, Any] | None = None
    model: nn.Module = dataclasses.field(repr=False)

    def to_json(self) -> str:
        """The content of `result.json`."""
        values = {
            **self.metrics,
            "epochs": self.epochs,
            "seconds": round(self.seconds, 3),
            "padding": self.padding,
            "steps_per_second": round(self.steps_per_second, 1),
            "saving": round(self.saving, 6),
            "slot_ratio": self.slot_ratio,
            **({} if self.solving is None else {"solving": self.solving}),
            "settings": self.settings,
        }
        return json.dumps(values, indent=2) + "\n"


def train(task: str = "handwriting", *, progress: bool = False, **settings: Any) -> TrainResult:
    """Train a task and return how it went.

    Args:
        task: One of those that `stretto train --help` lists: "handwriting", "classify", ...
        progress: Show progress on the terminal.
        **settings: The settings of the task, as `stretto train TASK --help` lists them: data, out, epochs, ...

    Raises:
        StrettoError: The settings or the data cannot be used; the message names the fix.
        Interrupted: Training was stopped by Ctrl-C or SIGTERM; everything is saved.

    Example:
        result = stretto.train("handwriting", epochs=2)
        print(result.metrics["cer"], result.report)
    """
    task_named(task)
    config = checked(CONFIGS[task], with_preset(CONFIGS[task], settings), source="stretto.train()")
    if config.resume:
        config = checked(CONFIGS[task], stored_settings(task, config) | settings, source="stretto.train()")
    with contextlib.ExitStack() as stack:
        return run_job(task, config, subscribers=[stack.enter_context(console_view())] if progress else [])


def run_job(name: str, config: TrainConfig, *, subscribers: list[Subscriber]) -> TrainResult:
    """Open the data, train, and write result and report into the run folder.

    Args:
        name: The task.
        config: Its settings; to resume, those of `stored_settings`, and what differs from them is refused.
        subscribers: Called with every event.
    """
    _check_device(config.device)
    with join_ranks(device=config.device, timeout_minutes=config.rank_timeout_minutes) as world, detect_lost_rank():
        settings = {**config.recorded(), "resume": config.resume, "record_sequences": config.record_sequences}
        world.require_equal("a setting", json.dumps(settings), fix="Start all workers with the same settings.")
        again = _is_again(config, world)
        with contextlib.ExitStack() as stack:

            def claim() -> str:
                resume = config.resume
                if again and config.out is not None:
                    # Workers of the same launch that were told to end may still be saving.
                    stack.enter_context(locked(config.out, patience=60.0 * config.rank_timeout_minutes))
                    resume = resume or _can_go_on(config.out)
                with disk_errors(config.out or RUNS, doing="use the run folder"):
                    run = _run_folder(name, dataclasses.replace(config, resume=resume))
                if config.out is None or not run.exists():
                    stack.callback(_remove_if_empty, run)
                if not (again and config.out is not None):
                    stack.enter_context(locked(run))
                return json.dumps([str(run), resume])

            run, resume = json.loads(world.on_rank0(claim))
            config = dataclasses.replace(config, resume=resume)
            return _run(name, config, run=Path(run), world=world, subscribers=subscribers)


def _is_again(config: TrainConfig, world: World) -> bool:
    """Whether workers of this launch have trained before, in the same run folder.

    torchrun counts a start after a loss, each node for itself, and does not count one after nodes came or went; then
    the name of the launch tells that the run in the folder is this one.
    """
    restarted = max(row[0] for row in world.all_gather([float(world.restarts)])) > 0
    out = config.out
    if out is None:
        if restarted and not config.resume:
            raise StrettoError(
                "workers that may be started again need a run folder that stays the same",
                fix="Name one with --out, or let torchrun start them once with --max-restarts 0.",
            )
        return restarted
    known = world.on_rank0(lambda: str(world.launch != "" and _launch_of(out) == world.launch))
    return restarted or known == str(True)


def _can_go_on(run: Path) -> bool:
    """Whether there is a checkpoint; if there is none yet, what was recorded is lost, and makes room for a start."""
    if any((run / FOLDER).glob("step-*")):
        return True
    with disk_errors(run, doing="use the run folder"):
        (run / EVENTS_FILE).unlink(missing_ok=True)
        shutil.rmtree(run / FOLDER, ignore_errors=True)
    return False


def _launch_of(run: Path) -> str | None:
    """The name of the launch that a run was started by, if there is one."""
    with contextlib.suppress(StrettoError):
        return next((event.get("launch") for event in read_events(run) if event["event"] == "started"), None)
    return None


def _run(name: str, config: TrainConfig, *, run: Path, world: World, subscribers: list[Subscriber]) -> TrainResult:
    if config.resume:
        _refuse_changes(config, stored_settings(name, config))
    kind = task_named(name)
    log: AbstractLog = EventLog(run / EVENTS_FILE, subscribers=subscribers) if world.is_rank0 else SilentLog()
    try:
        with _threads(config.threads or _fair_share(world)), _memory_errors():
            data = kind.embedded_data() if config.data is None else open_sequences(config.data)
            return _train(kind(config, data), config, run=run, log=log, world=world)
    finally:
        log.close()


def _remove_if_empty(run: Path) -> None:
    with contextlib.suppress(OSError):
        # Only what is empty can be removed so: a claimed folder in which nothing was recorded.
        run.rmdir()
        if run.parent == RUNS:
            RUNS.rmdir()


def _fair_share(world: World) -> int | None:
    """Cores of each worker of this machine, so that they do not fight for them."""
    return None if world.local_size == 1 else max(1, (os.cpu_count() or 1) // world.local_size)


def _train(task: AbstractTask[Any], config: TrainConfig, *, run: Path, log: AbstractLog, world: World) -> TrainResult:
    trainer = Trainer(task, run=run, log=log, resume=config.resume, world=world)
    if not config.resume:
        log.emit("started", **_description(task, config, trainer), world_size=world.size, launch=world.launch)
    ended = trainer.run()
    # The first worker records; another one may look before it has begun to.
    world.barrier()
    events = read_events(run)
    slot_ratio = next(e["slot_ratio"] for e in events if e["event"] == "started")
    solving = summary_of([event["solving"] for event in events if event["event"] == "epoch" and "solving" in event])
    result = TrainResult(
        metrics=ended.metrics,
        epochs=ended.epochs,
        seconds=ended.seconds,
        padding=ended.padding,
        steps_per_second=ended.steps_per_second,
        saving=ended.saving,
        slot_ratio=slot_ratio,
        settings={"task": task.name, **config.recorded()},
        run=run,
        report=None,
        solving=solving,
        model=ended.model,
    )
    if not world.is_rank0:
        return result
    write_text_atomically(run / RESULT_FILE, result.to_json())
    log.emit(
        "finished",
        metrics=result.metrics,
        epochs=result.epochs,
        seconds=result.seconds,
        padding=result.padding,
        steps_per_second=result.steps_per_second,
        slot_ratio=slot_ratio,
        run=str(run),
        **({} if solving is None else {"solving": solving}),
    )
    return dataclasses.replace(result, report=_report(run, log))


def _report(run: Path, log: AbstractLog) -> Path | None:
    """Write the page; a trained model is not lost to a missing plotting library or a full disk."""
    try:
        return write_run_report(run)
    except StrettoError as error:
        log.emit("warning", message=f"the report was not written: {error}")
        return None


def _description(task: AbstractTask[Any], config: TrainConfig, trainer: Trainer) -> dict[str, Any]:
    """What the record says at the start: the data, the batches, and what they would be without buckets."""
    train_part = task.data.part("train")
    report = trainer.feed.report()
    shuffled = shuffled_slots(
        train_part.lengths_N, batch_size=config.rows, max_padded_steps=config.max_padded_steps, seed=config.seed
    )
    return {
        "task": task.name,
        "settings": config.recorded(),
        "data": _data_facts(task.data),
        "edges": trainer.feed.edges,
        "histogram": dataclasses.asdict(length_histogram(train_part.lengths_N)),
        "report": dataclasses.asdict(report),
        "shuffled_padding": 1.0 - train_part.num_steps / shuffled,
        "slot_ratio": shuffled * (1.0 - report.padding) / train_part.num_steps,
        "parameters": sum(p.numel() for p in trainer.state.model.parameters()),
        "epochs": config.epochs,
        "versions": {
            "stretto": importlib.metadata.version("stretto"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "threads": torch.get_num_threads(),
    }


def _data_facts(data: SequenceSet) -> dict[str, Any]:
    return {
        "name": data.name,
        "sequences": {part: int((data.split_N == number).sum()) for number, part in enumerate(PARTS)},
        "steps": data.num_steps,
        "features": data.num_features,
        "notes": list(data.notes),
    }


def stored_settings(name: str, config: TrainConfig) -> dict[str, Any]:
    """The settings that the run which `config` resumes was started with."""
    with disk_errors(config.out or RUNS, doing="use the run folder"):
        run = _run_folder(name, config)
    events = read_events(run)
    started = next((event for event in events if event["event"] == "started"), None)
    if started is None or started["task"] != name:
        raise StrettoError(
            f"{str(run)!r} is no run of the task {name!r}", fix="Name the folder of such a run with --out."
        )
    if any(event["event"] == "finished" for event in events):
        raise StrettoError(f"the run in {str(run)!r} is finished", fix="Start a new one with another --out.")
    stored: dict[str, Any] = started["settings"]
    return stored


def _refuse_changes(config: TrainConfig, stored: dict[str, Any]) -> None:
    changed = [
        f"{key}={value!r} (was {stored.get(key)!r})"
        for key, value in config.recorded().items()
        if value != stored.get(key)
    ]
    if changed:
        raise StrettoError(
            f"a run resumes with the settings it was started with, but got {', '.join(changed)}",
            fix="Leave these out, or start a new run with another --out.",
        )


def _run_folder(name: str, config: TrainConfig) -> Path:
    numbered = {int(tail): path for path in RUNS.glob(f"{name}-*") if (tail := path.name[len(name) + 1 :]).isdecimal()}
    if config.resume:
        run = config.out or numbered.get(max(numbered, default=0))
        if run is None or not (run / EVENTS_FILE).exists():
            raise StrettoError(
                f"there is no run to resume in {str(run or RUNS)!r}", fix="Name the folder of a run with --out."
            )
        return run
    if config.out is None:
        return _claim(name, first=max(numbered, default=0) + 1)
    if (config.out / EVENTS_FILE).exists() or (config.out / FOLDER).exists():
        raise StrettoError(
            f"{str(config.out)!r} holds a run already", fix="Add --resume to go on with it, or choose another --out."
        )
    if config.out.exists() and not config.out.is_dir():
        raise StrettoError(f"{str(config.out)!r} is a file", fix="Choose a folder for --out.")
    return config.out


def next_run(name: str) -> Path:
    """The next free folder under runs/."""
    numbers = [int(tail) for path in RUNS.glob(f"{name}-*") if (tail := path.name[len(name) + 1 :]).isdecimal()]
    return RUNS / f"{name}-{max(numbers, default=0) + 1:03d}"


def _claim(name: str, *, first: int) -> Path:
    """The next numbered folder, made at once, so that two runs started together do not share one."""
    for number in itertools.count(first):
        run = RUNS / f"{name}-{number:03d}"
        with contextlib.suppress(FileExistsError):
            run.mkdir(parents=True)
            return run
    raise AssertionError("there is always a next number")


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On a CPU torch has no error class of its own for this.
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise StrettoError(
            f"there is not enough memory ({str(error).splitlines()[0] if str(error) else 'allocation failed'})",
            fix="Lower --batch-size, --max-padded-steps or --hidden-size; the last checkpoint is untouched.",
        ) from error


def _check_device(name: str) -> None:
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise StrettoError(
            f"torch cannot use the device {name!r} here ({str(error).splitlines()[0]})",
            fix="Choose another --device, for example cpu.",
        ) from error


@contextlib.contextmanager
def _threads(number: int | None) -> Iterator[None]:
    earlier = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(earlier)
