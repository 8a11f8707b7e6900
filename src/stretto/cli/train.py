"""`stretto train TASK`."""

import contextlib
import shlex

from rich.console import Console
from rich.text import Text

from stretto.cli.flags import check_flags, choose, parse, take_option
from stretto.cli.main import show_error
from stretto.distributed import LostRank, is_distributed, is_rank0, launch_ranks, leave_exit_code
from stretto.errors import StrettoError
from stretto.job import next_run, run_job, stored_settings
from stretto.report import console_view
from stretto.tasks import CONFIGS, TASKS
from stretto.training import PRESET, Interrupted, TrainConfig, checked, read_toml, with_preset

INTERRUPTED = 130


def run(words: list[str]) -> int:
    """Train."""
    summaries = {name: (task.__doc__ or "").splitlines()[0] for name, task in TASKS.items()}
    choice = choose(words, summaries, usage="stretto train TASK [--config FILE.toml] [flags]")
    if choice is None:
        return 0
    name, rest = choice
    config = _config(name, rest)
    if config.nproc > 1 and not is_distributed():
        return _launch(name, rest, config)
    try:
        return _train(name, config)
    except StrettoError as error:
        if not is_distributed():
            raise
        code = show_error(error)
        # With a failure of its own, torchrun starts all workers again.
        return code if isinstance(error, LostRank) else leave_exit_code(code)


def _train(name: str, config: TrainConfig) -> int:
    console = Console()
    try:
        with console_view(console) if is_rank0() else contextlib.nullcontext() as view:
            result = run_job(name, config, subscribers=[] if view is None else [view])
    except Interrupted as stop:
        again = ["stretto", "train", name, "--out", str(stop.run), "--resume"]
        if is_rank0():
            console.print(
                Text(f"Stopped at step {stop.step}; everything is saved. Go on with:\n  {shlex.join(again)}"),
                soft_wrap=True,
            )
        return leave_exit_code(INTERRUPTED)
    if is_rank0():
        console.print(Text(f"run     {result.run}"), soft_wrap=True)
        if result.report is not None:
            console.print(Text(f"report  {result.report}"), soft_wrap=True)
    return 0


def _launch(name: str, words: list[str], config: TrainConfig) -> int:
    """Start this command as several workers, all with one run folder."""
    words = ["train", name, *words]
    if config.out is None and not config.resume:
        words += ["--out", str(next_run(name))]
    return launch_ranks(words, nproc=config.nproc, threads=config.threads, max_restarts=config.max_restarts)


def _config(name: str, words: list[str]) -> TrainConfig:
    """Flags over TOML over a preset over what the run to resume was started with over defaults, checked as a whole."""
    kind, prog = CONFIGS[name], f"stretto train {name}"
    path, words = take_option(words, "--config")
    values = {} if path is None else read_toml(path)
    source = "the command line" if path is None else str(path)
    named, _ = take_option(words, f"--{PRESET}")
    chosen = with_preset(kind, values if named is None else {**values, PRESET: str(named)})
    default = checked(kind, chosen if hasattr(kind, "presets") else values, source=source)
    config = check_flags(parse(kind, words, prog=prog, default=default))
    if not config.resume:
        return config
    stored = checked(kind, stored_settings(name, config) | values, source=f"the run to resume, with {source},")
    return check_flags(parse(kind, words, prog=prog, default=stored))
