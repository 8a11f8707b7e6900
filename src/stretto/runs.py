"""Runs: `stretto.train`, and the folders that runs live in.

A run folder is claimed once, by rank 0, and locked while the run writes to it. Settings come from four places, of which
the first that has a value counts:

    flags, or arguments of `stretto.train`  >  the run to resume  >  the TOML file  >  a preset  >  defaults

except that nothing given may contradict the run to resume: that is refused, not overridden.
"""

import contextlib
import copy
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from stretto.data import PARTS, open_sequences
from stretto.distributed import World, detect_lost_rank, join_ranks
from stretto.errors import StrettoError
from stretto.files import disk_errors, locked, write_text_atomically
from stretto.report import console_view, length_histogram, write_run_report
from stretto.tasks import find_task
from stretto.timing import torch_threads
from stretto.training import (
    CHECKPOINT_FOLDER,
    EVENTS_FILE,
    PRESET,
    AbstractLog,
    AbstractTask,
    EventLog,
    RunResult,
    SilentLog,
    Subscriber,
    TrainConfig,
    Trainer,
    read_events,
    validate,
    with_preset,
)

RUNS_FOLDER: Final = Path("runs")
RESULT_FILE: Final = "result.json"

C = TypeVar("C", bound=TrainConfig)


def train(task: str | AbstractTask[Any] = "handwriting", *, progress: bool = False, **settings: Any) -> RunResult:
    """Train a task and return how it went.

    Args:
        task: One of those that `stretto train --help` lists: "handwriting", "classify", ...; or a task of your own,
            with its settings and data.
        progress: Show progress on the terminal.
        **settings: The settings of the task, as `stretto train TASK --help` lists them: data, out, epochs, ...

    Raises:
        StrettoError: The settings or the data cannot be used; the message says what to do.
        Interrupted: Training was stopped by Ctrl-C or SIGTERM; everything is saved.

    Example:
        result = stretto.train("handwriting", epochs=2)
        print(result.metrics["cer"], result.report)
    """
    name, source = task if isinstance(task, str) else task.name, "stretto.train()"
    if isinstance(task, str):
        kind, own = find_task(task).Config, {}
    else:
        kind, own = type(task.config), vars(task.config)
        if settings.get("data") is not None:
            raise StrettoError(
                f"data={settings['data']!r} was given with a task object, which has its data",
                fix="Leave data out, or build the task with that data.",
            )
    config = resolve_settings(
        name,
        kind,
        lambda default: validate(kind, {**vars(default), **settings}, source=source),
        values={**own, **{key: value for key, value in settings.items() if key == PRESET}},
        source=source,
    )
    with contextlib.ExitStack() as stack:
        subscribers = [stack.enter_context(console_view())] if progress else []
        if isinstance(task, str):
            return run_task(name, config, subscribers=subscribers)
        task = copy.copy(task)
        task.config = config
        return run_task(name, config, subscribers=subscribers, task=task)


def resolve_settings(
    name: str, kind: type[C], overlay: Callable[[C], C], *, values: Mapping[str, Any], source: str
) -> C:
    """The settings of a run of the task `name`, by the precedence above.

    `overlay` puts what was given, as flags or arguments, over other settings. `values` are those of a TOML file, which
    `source` names in errors; they may name a preset.
    """
    config = overlay(validate(kind, with_preset(kind, values), source=source))
    if not config.resume:
        return config
    # What the file says is put over the stored settings so that `run_task` finds and refuses a difference.
    stored = {**stored_settings(name, config), **values}
    return overlay(validate(kind, stored, source=f"the run to resume, with {source},"))


def run_task(
    name: str, config: TrainConfig, *, subscribers: list[Subscriber], task: AbstractTask[Any] | None = None
) -> RunResult:
    """Train in a run folder, and write the result and the report into it; subscribers are called with every event.

    The settings are those of `resolve_settings`. The task is by default the one of that name, with their data.
    """
    _check_device(config.device)
    timeout = config.rank_timeout_minutes
    with join_ranks(device=config.device, timeout_minutes=timeout) as world, detect_lost_rank():
        settings = {**config.recorded(), "resume": config.resume, "record_sequences": config.record_sequences}
        world.require_equal("a setting", json.dumps(settings), fix="Start all ranks with the same settings.")
        is_restart = _is_restart(config, world)
        with contextlib.ExitStack() as stack:
            run, resume = json.loads(
                world.on_rank0(lambda: json.dumps(_claim(name, config, stack, is_restart=is_restart)))
            )
            config = dataclasses.replace(config, resume=resume)
            if resume:
                _refuse_changes(config, stored_settings(name, config))
            log: AbstractLog = (
                EventLog(Path(run) / EVENTS_FILE, subscribers=subscribers) if world.is_rank0 else SilentLog()
            )
            stack.callback(log.close)
            # Ranks of one machine share its cores, so that they do not compete for them.
            share = None if world.local_size == 1 else max(1, (os.cpu_count() or 1) // world.local_size)
            stack.enter_context(torch_threads(config.threads or share))
            stack.enter_context(_memory_errors())
            if task is None:
                kind = find_task(name)
                task = kind(config, kind.embedded_data() if config.data is None else open_sequences(config.data))
            return _train(task, config, run=Path(run), log=log, world=world)


def _train(task: AbstractTask[Any], config: TrainConfig, *, run: Path, log: AbstractLog, world: World) -> RunResult:
    trainer = Trainer(task, run=run, log=log, resume=config.resume, world=world)
    if not config.resume:
        trainer.log.emit("started", **_describe(task, config, trainer), world_size=world.size, launch=world.launch)
    result = trainer.run()
    if not world.is_rank0:
        return result
    values = result.to_dict()
    write_text_atomically(run / RESULT_FILE, json.dumps(values, indent=2) + "\n")
    log.emit("finished", **values)
    try:
        return dataclasses.replace(result, report=write_run_report(run))
    except StrettoError as error:
        # A trained model is not lost to a missing plotting library or a full disk.
        log.emit("warning", message=f"the report was not written: {error}")
        return result


def _describe(task: AbstractTask[Any], config: TrainConfig, trainer: Trainer) -> dict[str, Any]:
    """What is recorded at the start: the data, the batches, and what they would be without buckets."""
    data, report, padded_steps_ratio = task.data, trainer.feed.report(), trainer.state.padded_steps_ratio
    return {
        "task": task.name,
        "settings": config.recorded(),
        "data": {
            "name": data.name,
            "sequences": {part: int((data.split_N == number).sum()) for number, part in enumerate(PARTS)},
            "steps": data.num_steps,
            "features": data.num_features,
            "notes": list(data.notes),
        },
        "edges": trainer.feed.edges,
        "histogram": dataclasses.asdict(length_histogram(data.part("train").lengths_N)),
        "report": report,
        "shuffled_padding": 1.0 - (1.0 - report["padding"]) / padded_steps_ratio,
        "padded_steps_ratio": padded_steps_ratio,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "epochs": config.epochs,
        "versions": {
            "stretto": importlib.metadata.version("stretto"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "threads": torch.get_num_threads(),
    }


def stored_settings(name: str, config: TrainConfig) -> dict[str, Any]:
    """The settings that the run which `config` resumes was started with."""
    with disk_errors(config.out or RUNS_FOLDER, doing="use the run folder"):
        run = _find_run(name, config)
    events = {event["event"]: event for event in read_events(run)}
    started = events.get("started")
    if started is None or started["task"] != name:
        raise StrettoError(
            f"{str(run)!r} is no run of the task {name!r}", fix="Name the folder of such a run with --out."
        )
    if "finished" in events:
        raise StrettoError(f"the run in {str(run)!r} is finished", fix="Start a new one with another --out.")
    stored: dict[str, Any] = started["settings"]
    return stored


def next_run(name: str) -> Path:
    """The next free folder under runs/."""
    return RUNS_FOLDER / f"{name}-{max(_numbered_runs(name), default=0) + 1:03d}"


def _claim(name: str, config: TrainConfig, stack: contextlib.ExitStack, *, is_restart: bool) -> tuple[str, bool]:
    """Claim and lock the run folder; its path, and whether to resume the run in it."""
    resume, out = config.resume, config.out
    if is_restart and out is not None:
        # Ranks of the same launch that were asked to end may still be saving.
        stack.enter_context(locked(out, patience=60.0 * config.rank_timeout_minutes))
        resume = resume or _can_resume(out)
    with disk_errors(out or RUNS_FOLDER, doing="use the run folder"):
        run = _find_run(name, config) if resume else _new_run(name, config)
    if out is None or not run.exists():
        stack.callback(_remove_if_empty, run)
    if not (is_restart and out is not None):
        stack.enter_context(locked(run))
    return str(run), resume


def _is_restart(config: TrainConfig, world: World) -> bool:
    """Whether ranks of this launch have trained before, in the same run folder.

    torchrun counts restarts after a loss, each node for itself, but not those after nodes came or went; then the id of
    the launch shows that the run in the folder is this one.
    """
    restarted = max(row[0] for row in world.all_gather([float(world.restarts)])) > 0
    out = config.out
    if out is None:
        if restarted and not config.resume:
            raise StrettoError(
                "ranks that may be restarted need a run folder that stays the same",
                fix="Name one with --out, or let torchrun start them once with --max-restarts 0.",
            )
        return restarted
    known = world.on_rank0(lambda: str(world.launch != "" and _launch_of(out) == world.launch))
    return restarted or known == str(True)


def _can_resume(run: Path) -> bool:
    """Whether there is a checkpoint; if not, what was recorded is removed to make room for a new start."""
    if any((run / CHECKPOINT_FOLDER).glob("update-*")):
        return True
    with disk_errors(run, doing="use the run folder"):
        (run / EVENTS_FILE).unlink(missing_ok=True)
        shutil.rmtree(run / CHECKPOINT_FOLDER, ignore_errors=True)
    return False


def _launch_of(run: Path) -> str | None:
    """The id of the launch that a run was started by, if there is one."""
    with contextlib.suppress(StrettoError):
        return next((event.get("launch") for event in read_events(run) if event["event"] == "started"), None)
    return None


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


def _find_run(name: str, config: TrainConfig) -> Path:
    """The run to resume: the one in `out`, or the latest of the task."""
    numbered = _numbered_runs(name)
    run = config.out or numbered.get(max(numbered, default=0))
    if run is None or not (run / EVENTS_FILE).exists():
        raise StrettoError(
            f"there is no run to resume in {str(run or RUNS_FOLDER)!r}", fix="Name the folder of a run with --out."
        )
    return run


def _new_run(name: str, config: TrainConfig) -> Path:
    """The folder for a new run; a numbered one is made at once, so that two runs started together do not share it."""
    out = config.out
    while out is None:
        run = next_run(name)
        with contextlib.suppress(FileExistsError):
            run.mkdir(parents=True)
            return run
    if (out / EVENTS_FILE).exists() or (out / CHECKPOINT_FOLDER).exists():
        raise StrettoError(
            f"{str(out)!r} holds a run already", fix="Add --resume to continue it, or choose another --out."
        )
    if out.exists() and not out.is_dir():
        raise StrettoError(f"{str(out)!r} is a file", fix="Choose a folder for --out.")
    return out


def _numbered_runs(name: str) -> dict[int, Path]:
    found = ((path.name.removeprefix(f"{name}-"), path) for path in RUNS_FOLDER.glob(f"{name}-*"))
    return {int(number): path for number, path in found if number.isdecimal()}


def _remove_if_empty(run: Path) -> None:
    with contextlib.suppress(OSError):
        # rmdir removes empty folders only: a claimed one in which nothing was recorded.
        run.rmdir()
        if run.parent == RUNS_FOLDER:
            RUNS_FOLDER.rmdir()


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
