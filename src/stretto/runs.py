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
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from stretto.data import PARTS, SequenceSet, open_sequences
from stretto.distributed import World, count_cores, detect_lost_rank, is_distributed, join_ranks, launch_ranks, take_gpu
from stretto.errors import StrettoError, memory_errors
from stretto.files import disk_errors, locked, write_text_atomically
from stretto.large_batch import Muon
from stretto.nn import warnings_to
from stretto.report import PAGE_NAME, console_view, length_histogram, open_logger, write_run_report
from stretto.tasks import TASKS, find_task
from stretto.timing import torch_threads
from stretto.trained import CARD_FILE, SETTINGS_FILE, check_device, load, read_card, write_card
from stretto.training import (
    AUTO_FILE,
    BEST_FILE,
    CHECKPOINT_FOLDER,
    EVENTS_FILE,
    MAY_CHANGE,
    MODEL_FILE,
    PRESET,
    AbstractLog,
    AbstractTask,
    Event,
    EventLog,
    Interrupted,
    LoggerName,
    RunResult,
    SilentLog,
    Subscriber,
    TrainConfig,
    Trainer,
    read_events,
    run_auto,
    settings_to_toml,
    validate,
    with_preset,
)

RUNS_FOLDER: Final = Path("runs")
LESS_MEMORY: Final = "Lower --batch-size, --max-padded-steps or --hidden-size; the last checkpoint is untouched."
RESULT_FILE: Final = "result.json"
WRITTEN: Final = (CARD_FILE, SETTINGS_FILE, MODEL_FILE, BEST_FILE, RESULT_FILE, PAGE_NAME, AUTO_FILE)
"""What a run writes into its folder besides its record and checkpoints."""

C = TypeVar("C", bound=TrainConfig)


def train(
    task: str | type[AbstractTask[Any]] | AbstractTask[Any] = "handwriting",
    *,
    data: str | Path | SequenceSet | None = None,
    ranks: int | None = None,
    progress: bool = False,
    subscribers: Sequence[Subscriber] = (),
    **settings: Any,
) -> RunResult:
    """Train a task and return how it went.

    Args:
        task: One of those that `stretto train --help` lists: "handwriting", "classify", ...; the class of a task of
            your own; or such a task, with its settings and data.
        data: A file or folder, or sequences in memory, as `stretto.data.from_tensors` and others make them; left out,
            the task's own.
        ranks: How many processes of this machine train together, each on batches of the size given.
        progress: Show progress on the terminal.
        subscribers: Functions that are called with every event, as `events.jsonl` has them.
        **settings: The settings of the task, as `stretto train TASK --help` lists them: out, epochs, ...

    Raises:
        StrettoError: The settings or the data cannot be used; the message says what to do.
        Interrupted: Training was stopped by Ctrl-C or SIGTERM; everything is saved.

    Examples:
        result = stretto.train("handwriting", epochs=2)
        print(result.metrics["cer"], result.report)
    """
    source, own = "stretto.train()", {}
    task = find_task(task) if isinstance(task, str) else task
    if not isinstance(task, AbstractTask) and not (isinstance(task, type) and issubclass(task, AbstractTask)):
        raise StrettoError(
            f"task={task!r} is no task", fix=f"Give one of {', '.join(TASKS)}, or a subclass of AbstractTask."
        )
    if isinstance(task, AbstractTask):
        own = vars(task.config)
        if data is not None:
            raise StrettoError(
                f"data={data!r} was given with a task object, which has its data",
                fix="Leave data out, or build the task with that data.",
            )
    if hasattr(data, "__len__") and not isinstance(data, (str, os.PathLike, SequenceSet)):
        raise StrettoError(
            f"data= got a {type(data).__name__}",
            fix="Give a path, or sequences made by stretto.data.from_tensors, from_pandas, from_polars or from_arrow.",
        )
    if not isinstance(subscribers, Sequence) or not all(map(callable, subscribers)):
        raise StrettoError(f"subscribers={subscribers!r} cannot be used", fix="Give a list of functions.")
    kind = type(task.config) if isinstance(task, AbstractTask) else task.Config
    if ranks is not None:
        settings["nproc"] = ranks
    in_memory = data if isinstance(data, SequenceSet) else None
    if data is not None and in_memory is None:
        settings["data"] = data
    config = resolve_settings(
        task.name,
        kind,
        lambda default: validate(kind, {**vars(default), **settings}, source=source),
        values={**own, **{key: value for key, value in settings.items() if key == PRESET}},
        source=source,
    )
    if config.nproc > 1 and not is_distributed():
        if isinstance(task, AbstractTask) or in_memory is not None or subscribers:
            raise StrettoError(
                f"{config.nproc} ranks were asked for, and a task object, data in memory and subscribers "
                "are known to this process alone",
                fix="Give the class of the task and the path of its data (stretto.data.write_npz), or start this "
                "program with torchrun.",
            )
        return _train_by_ranks(task, config, progress=progress)
    with contextlib.ExitStack() as stack:
        views = [stack.enter_context(console_view()) if progress else _warn_if_slower]
        if isinstance(task, AbstractTask):
            task = copy.copy(task)
            task.config = config
        return run_task(task, config, subscribers=[*views, *subscribers], data=in_memory)


def _train_by_ranks(task: type[AbstractTask[Any]], config: TrainConfig, *, progress: bool) -> RunResult:
    """Let other processes train, as `stretto train --nproc` does, and read what they wrote."""
    out = config.out or (None if config.resume else next_run(task.name))
    place = f"{task.__module__}:{task.__qualname__}"
    if task.__module__ == "__main__":
        place = f"{getattr(sys.modules['__main__'], '__file__', '')}:{task.__qualname__}"
    name = task.name if TASKS.get(task.name) is task else place
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        toml, said = Path(folder) / "settings.toml", Path(folder) / "said.txt"
        toml.write_text(settings_to_toml(config, title=f"stretto train {name}"), encoding="utf-8")
        words = ["train", name, "--config", str(toml), *([] if out is None else ["--out", str(out)])]
        words += ["--resume"] if config.resume else []
        for key in ("nproc", "time_parallel", "max_restarts", "rank_timeout_minutes"):
            words += [f"--{key.replace('_', '-')}", str(getattr(config, key))]
        words += ["--record-sequences"] if config.record_sequences else []
        words += ["--log", *config.log] if config.log else []
        for key, value in config.recorded().items():
            # TOML has no None: where it is not the default, it is given as a flag.
            words += [f"--{key.replace('_', '-')}", "None"] if value is None is not getattr(type(config), key) else []
        with said.open("wb") as stream:
            code = launch_ranks(
                words,
                nproc=config.nproc,
                threads=config.threads,
                max_restarts=config.max_restarts,
                stdout=None if progress else subprocess.DEVNULL,
                stderr=stream,
            )
        lines = said.read_text(encoding="utf-8", errors="replace").splitlines()
    run = out or _find_run(task.name, config) or RUNS_FOLDER
    if code == 128 + signal.SIGINT:
        raise Interrupted(run, update=max((event.get("update", 0) for event in read_events(run)), default=0))
    if code:
        reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines[-1:]
        raise StrettoError(
            f"training by {config.nproc} ranks ended with exit code {code}: {''.join(reasons[-1:])}",
            fix=f"The run folder is {str(run)!r}.",
        )
    values = json.loads((run / RESULT_FILE).read_text(encoding="utf-8"))
    page = run / PAGE_NAME
    return RunResult(
        **{**values, "run": run},
        report=page if page.exists() else None,
        model=load(run, task=task, device=config.device).model,
    )


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
    found = stored_settings(name, config)
    if found is None:
        return config
    # What the file says is put over the stored settings so that `run_task` finds and refuses a difference.
    stored = {**found, **values}
    return overlay(validate(kind, stored, source=f"the run to resume, with {source},"))


def run_task(
    task: type[AbstractTask[Any]] | AbstractTask[Any],
    config: TrainConfig,
    *,
    subscribers: list[Subscriber],
    data: SequenceSet | None = None,
) -> RunResult:
    """Train in a run folder, and write the result and the report into it; subscribers are called with every event.

    The settings are those of `resolve_settings`. The class of a task is given `data`, or else what they name.
    """
    name = task.name
    take_gpu(config.device)
    check_device(config.device)
    timeout = config.rank_timeout_minutes
    with join_ranks(device=config.device, timeout_minutes=timeout) as world, detect_lost_rank():
        settings = {**config.recorded(), "resume": config.resume, "record_sequences": config.record_sequences}
        world.require_equal("a setting", json.dumps(settings), fix="Start all ranks with the same settings.")
        is_restart = _is_restart(config, world)
        with contextlib.ExitStack() as stack:
            run, resume = json.loads(
                world.on_rank0(lambda: json.dumps(_claim(name, config, stack, is_restart=is_restart)))
            )
            asked, config = config.resume, dataclasses.replace(config, resume=resume)
            if resume:
                _refuse_changes(config, stored_settings(name, config) or {})
            log: AbstractLog = (
                EventLog(Path(run) / EVENTS_FILE, subscribers=subscribers) if world.is_rank0 else SilentLog()
            )
            stack.callback(log.close)
            world.on_rank0(lambda: _open_loggers(config.log, Path(run), log, stack))
            # Ranks of one machine share its cores, so that they do not compete for them; SLURM may have dealt them.
            share = (
                None if world.local_size == 1 else min(count_cores(), max(1, (os.cpu_count() or 1) // world.local_size))
            )
            stack.enter_context(torch_threads(config.threads or share))
            stack.enter_context(memory_errors(fix=LESS_MEMORY))
            if not isinstance(task, AbstractTask):
                if data is None:
                    data = task.embedded_data() if config.data is None else open_sequences(config.data)
                task = task(config, data)
            return _train(task, config, run=Path(run), log=log, world=world, starts_over=asked and not resume)


def _open_loggers(names: Sequence[LoggerName], run: Path, log: AbstractLog, stack: contextlib.ExitStack) -> str:
    """Let the loggers that settings name subscribe to the events of rank 0."""
    assert isinstance(log, EventLog)
    for name in dict.fromkeys(names):
        logger = open_logger(name, run, warn=lambda message: log.emit("warning", message=message))
        log.subscribe(stack.enter_context(logger))
    return ""


def _train(
    task: AbstractTask[Any], config: TrainConfig, *, run: Path, log: AbstractLog, world: World, starts_over: bool
) -> RunResult:
    trainer = Trainer(task, run=run, log=log, resume=config.resume and not config.auto, world=world)
    if not config.resume or not (run / CARD_FILE).exists():
        world.on_rank0(lambda: str(write_card(run, task, digest=trainer.digest)))
    if not config.resume:
        trainer.log.emit("started", **_describe(task, config, trainer), world_size=world.size, launch=world.launch)
    if starts_over:
        message = f"there was nothing to resume in {str(run)!r}: it starts from the beginning"
        trainer.log.emit("warning", message=message)
    with warnings_to(lambda text: trainer.log.emit("warning", message=text, slower=True)):
        if config.auto:
            result = run_auto(task, run=run, log=log, world=world, plain=trainer, resume=config.resume)
        else:
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


def _warn_if_slower(event: Event) -> None:
    """Where nothing is shown on the terminal: what is slower than expected, as a Python warning."""
    if event["event"] == "warning" and event.get("slower"):
        warnings.warn(event["message"], stacklevel=2)


def _describe(task: AbstractTask[Any], config: TrainConfig, trainer: Trainer) -> dict[str, Any]:
    """What is recorded at the start: the data, the batches, and what they would be without buckets."""
    data, report, padded_steps_ratio = task.data, trainer.feed.report(), trainer.state.padded_steps_ratio
    optimizer = trainer.state.optimizer
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
        # Those of pairs do not lie on one axis of lengths.
        "edges": trainer.feed.edges if task.bucket_lengths(data.part("train")).ndim == 1 else [],
        "histogram": dataclasses.asdict(length_histogram(data.part("train").lengths_N)),
        "report": report,
        "shuffled_padding": 1.0 - (1.0 - report["padding"]) / padded_steps_ratio,
        "padded_steps_ratio": padded_steps_ratio,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "epochs": config.epochs,
        **({"rules": optimizer.rules()} if isinstance(optimizer, Muon) else {}),
        "versions": {
            "stretto": importlib.metadata.version("stretto"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "threads": torch.get_num_threads(),
    }


def stored_settings(name: str, config: TrainConfig) -> dict[str, Any] | None:
    """The settings that the run which `config` resumes was started with; None if it recorded nothing yet."""
    with disk_errors(config.out or RUNS_FOLDER, doing="use the run folder"):
        run = _find_run(name, config)
    if run is None or not _has_record(run):
        return None
    events = {event["event"]: event for event in read_events(run)}
    started = events.get("started")
    if started is None or started.get("task") != name:
        raise StrettoError(
            f"{str(run)!r} is not a run of the task {name!r}", fix="Name the folder of such a run with --out."
        )
    if "finished" in events:
        raise StrettoError(
            f"the run in {str(run)!r} is finished",
            fix=f"Start a new one with another --out; `stretto report {run}` makes its page.",
        )
    stored = started.get("settings")
    if not isinstance(stored, dict):
        raise StrettoError(f"the record of {str(run)!r} has no settings", fix="Start a new run with another --out.")
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
        resume = True
    with disk_errors(out or RUNS_FOLDER, doing="use the run folder"):
        found = _find_run(name, config) if resume else None
        run = _new_run(name, config) if found is None else found
    if out is None or not run.exists():
        stack.callback(_remove_if_empty, run)
    if not (is_restart and out is not None):
        stack.enter_context(locked(run))
    # A run that was ended before its first checkpoint starts from the beginning, so that a job can be requeued.
    return str(run), resume and found is not None and _can_resume(found)


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


def _has_record(run: Path) -> bool:
    """Whether anything is recorded: the first line is there, or checkpoints whose record is missing."""
    record = run / EVENTS_FILE
    return (record.exists() and b"\n" in record.read_bytes()) or any((run / CHECKPOINT_FOLDER).glob("update-*"))


def _can_resume(run: Path) -> bool:
    """Whether there is a checkpoint or a finished trial; if not, the record is removed to make room for a new start."""
    has_record = _has_record(run)
    if any((run / CHECKPOINT_FOLDER).glob("update-*")) or (has_record and (run / AUTO_FILE).exists()):
        return True
    with disk_errors(run, doing="use the run folder"):
        partial = set((run / CHECKPOINT_FOLDER).glob(".update-*.part"))
        foreign = [path for path in (run / CHECKPOINT_FOLDER).glob("*") if path not in partial]
        if not has_record and not _has_card(run):
            foreign += [run / name for name in WRITTEN if (run / name).exists()]
        if foreign:
            raise StrettoError(
                f"{str(run)!r} holds {', '.join(str(path.relative_to(run)) for path in foreign[:4])}, "
                "which no run of this version wrote, and has no checkpoint to resume from",
                fix="Choose another --out; nothing was changed.",
            )
        (run / EVENTS_FILE).unlink(missing_ok=True)
        for path in partial:
            shutil.rmtree(path, ignore_errors=True)
    return False


def _has_card(run: Path) -> bool:
    """Whether a run has started here: it writes its card before anything is recorded."""
    with contextlib.suppress(StrettoError):
        return bool(read_card(run))
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
        if value != stored.get(key) and key not in MAY_CHANGE
    ]
    if changed:
        raise StrettoError(
            f"a run resumes with the settings it was started with, but got {', '.join(changed)}",
            fix="Leave these out, or start a new run with another --out.",
        )


def _find_run(name: str, config: TrainConfig) -> Path | None:
    """The folder of the run to resume: `out`, or the latest of the task, if there is one."""
    numbered = _numbered_runs(name)
    run = config.out or numbered.get(max(numbered, default=0))
    return run if run is not None and run.is_dir() else None


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
    if held := [name for name in WRITTEN if (out / name).exists()]:
        raise StrettoError(
            f"{str(out)!r} holds {', '.join(held)}, which a run would replace",
            fix="Choose another --out; or add --resume, if a run was to begin there.",
        )
    return out


def _numbered_runs(name: str) -> dict[int, Path]:
    found = ((path.name.removeprefix(f"{name}-"), path) for path in RUNS_FOLDER.glob(f"{name}-*"))
    return {int(number): path for number, path in found if number.isdecimal()}


def _remove_if_empty(run: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        # rmdir removes empty folders only: a claimed one in which nothing was recorded.
        run.rmdir()
        if run.parent == RUNS_FOLDER:
            RUNS_FOLDER.rmdir()
