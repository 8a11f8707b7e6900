"""`stretto train TASK`."""

import shlex

from rich.console import Console
from rich.text import Text

from stretto.cli.parsing import checked_flags, choose, parse, take_option
from stretto.job import run_job, stored_settings
from stretto.report.console import console_view
from stretto.tasks.registry import CONFIGS, TASKS
from stretto.training.config import TrainConfig, checked, read_toml
from stretto.training.loop import Interrupted

INTERRUPTED = 130


def run(words: list[str]) -> int:
    """Train."""
    summaries = {name: (task.__doc__ or "").splitlines()[0] for name, task in TASKS.items()}
    choice = choose(words, summaries, usage="stretto train TASK [--config FILE.toml] [flags]")
    if choice is None:
        return 0
    name, rest = choice
    config = _config(name, rest)
    console = Console()
    try:
        with console_view(console) as view:
            result = run_job(name, config, subscribers=[view])
    except Interrupted as stop:
        again = ["stretto", "train", name, "--out", str(stop.run), "--resume"]
        console.print(
            Text(f"Stopped at step {stop.step}; everything is saved. Go on with:\n  {shlex.join(again)}"),
            soft_wrap=True,
        )
        return INTERRUPTED
    console.print(Text(f"run     {result.run}"), soft_wrap=True)
    if result.report is not None:
        console.print(Text(f"report  {result.report}"), soft_wrap=True)
    return 0


def _config(name: str, words: list[str]) -> TrainConfig:
    """Flags over TOML over what the run to resume was started with over defaults, then checked as a whole."""
    kind, prog = CONFIGS[name], f"stretto train {name}"
    path, words = take_option(words, "--config")
    values = {} if path is None else read_toml(path)
    source = "the command line" if path is None else str(path)
    config = checked_flags(parse(kind, words, prog=prog, default=checked(kind, values, source=source)))
    if not config.resume:
        return config
    stored = checked(kind, stored_settings(name, config) | values, source=f"the run to resume, with {source},")
    return checked_flags(parse(kind, words, prog=prog, default=stored))
