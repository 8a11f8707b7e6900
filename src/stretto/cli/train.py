"""`stretto train TASK`."""

import contextlib
import shlex
from typing import Any

from rich.console import Console

from stretto.cli.flags import check_flags, choose, parse, take_option
from stretto.cli.loading import load_task
from stretto.cli.main import INTERRUPTED, show_error
from stretto.distributed import LostRank, is_distributed, is_rank0, launch_ranks, leave_exit_code
from stretto.errors import StrettoError
from stretto.report import console_view
from stretto.runs import next_run, resolve_settings, run_task
from stretto.tasks import TASKS, installed_tasks
from stretto.training import PRESET, AbstractTask, Interrupted, TrainConfig, read_toml


def run(words: list[str]) -> int:
    """Train."""
    summaries = {name: (task.__doc__ or "").splitlines()[0] for name, task in TASKS.items()}
    summaries |= {name: f"of an installed package: {place.value}" for name, place in installed_tasks().items()}
    if words and ":" in words[0]:
        choice: tuple[str, list[str]] | None = (words[0], words[1:])
    else:
        choice = choose(words, summaries, usage="stretto train TASK|MODULE:TASK [--config FILE.toml] [flags]")
    if choice is None:
        return 0
    name, rest = choice
    kind = load_task(name)
    assert kind is not None
    config = _config(name, kind, rest)
    if config.nproc > 1 and not is_distributed():
        # All ranks need the same run folder.
        out = [] if config.out is not None or config.resume else ["--out", str(next_run(kind.name))]
        words = ["train", name, *rest, *out]
        return launch_ranks(words, nproc=config.nproc, threads=config.threads, max_restarts=config.max_restarts)
    try:
        return _train(name, kind, config)
    except StrettoError as error:
        if not is_distributed():
            raise
        code = show_error(error)
        # torchrun restarts all ranks if one fails, which helps only when a rank was lost.
        return code if isinstance(error, LostRank) else leave_exit_code(code)


def _train(name: str, kind: type[AbstractTask[Any]], config: TrainConfig) -> int:
    try:
        with console_view(Console()) if is_rank0() else contextlib.nullcontext() as view:
            result = run_task(kind, config, subscribers=[] if view is None else [view])
    except Interrupted as stop:
        again = ["stretto", "train", name, "--out", str(stop.run), "--resume"]
        if is_rank0():
            print(f"Stopped at update {stop.update}; everything is saved. Continue with:\n  {shlex.join(again)}")
        return leave_exit_code(INTERRUPTED)
    if is_rank0():
        print(f"run     {result.run}")
        if result.report is not None:
            print(f"report  {result.report}")
    return 0


def _config(name: str, task: type[AbstractTask[Any]], words: list[str]) -> TrainConfig:
    """The flags over the run to resume over the TOML file over a preset over defaults."""
    kind = task.Config
    path, words = take_option(words, "--config")
    values = {} if path is None else read_toml(path)
    if hasattr(kind, "presets"):
        # What a preset leaves out depends on the schedule too.
        named = {key: take_option(words, f"--{key}")[0] for key in (PRESET, "schedule")}
        values |= {key: str(value) for key, value in named.items() if value is not None}
    return resolve_settings(
        task.name,
        kind,
        lambda default: check_flags(parse(kind, words, prog=f"stretto train {name}", default=default)),
        values=values,
        source="the command line" if path is None else str(path),
    )
