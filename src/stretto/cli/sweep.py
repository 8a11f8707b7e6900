"""`stretto sweep FILE`: many runs of one task, and a page that compares them."""

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import tyro
from pydantic import Field

from stretto.cli.flags import check_flags, parse
from stretto.cli.loading import load_task
from stretto.cli.main import INTERRUPTED
from stretto.distributed import count_cores, handle_signals
from stretto.errors import StrettoError
from stretto.files import disk_errors, write_text_atomically
from stretto.report import SweepRun, write_sweep_page
from stretto.runs import RESULT_FILE
from stretto.training import Count, read_toml, validate, with_preset

KNOWN: Final = frozenset({"task", "out", "settings", "grid", "seeds"})
MAX_RUNS: Final = 10_000
NOT_SWEPT: Final = frozenset({"out", "resume"})
PAGE: Final = "index.html"
POLL_SECONDS: Final = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepSettings:
    """Many runs of one task over seeds and settings, and one page that compares them.

    The file is TOML: `task`, `out`, `seeds`, a table `settings` for all runs, and a table `grid` with a list of values
    for each setting that varies; every combination is a run. Called again, it continues what is not finished; seeds and
    values may be added.

    Attributes:
        file: The TOML file.
        jobs: Runs at the same time, each in a process with one thread unless the settings say otherwise; left out, one
            per core.
        index: Train only the run of this place in the list, counted from 0, for array jobs of a cluster: --index
            $SLURM_ARRAY_TASK_ID. The page is rewritten after each.
        dry_run: Show the runs and train none; files of their settings are written, which keep their numbers.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    jobs: Count | None = None
    index: Annotated[int, Field(ge=0)] | None = None
    dry_run: bool = False


def run(words: list[str]) -> int:
    """Train what is not finished, and write the page."""
    settings = check_flags(parse(SweepSettings, words, prog="stretto sweep"))
    task, folder, runs = _plan(settings.file)
    if settings.index is not None and settings.index >= len(runs):
        raise StrettoError(
            f"--index {settings.index} is beyond the last of {len(runs)} runs", fix=f"Give 0 to {len(runs) - 1}."
        )
    for each in runs if settings.dry_run else ():
        print(f"{each.number:>4}  {each.name}")
    if settings.dry_run:
        return 0
    chosen = runs if settings.index is None else [runs[settings.index]]
    left = [each for each in chosen if not (each.folder / RESULT_FILE).exists()]
    print(f"{task}: {len(chosen)} runs, {len(chosen) - len(left)} finished before")
    title = f"Sweep of {task}: {settings.file.stem}"
    kind = load_task(task)
    assert kind is not None

    def show() -> Path:
        page = folder / PAGE
        return write_sweep_page(runs, page, title=title, higher_is_better=kind.higher_is_better)

    codes = _train(task, left, jobs=min(settings.jobs or count_cores(), max(1, len(left))), show=show)
    print(f"page  {show()}")
    if INTERRUPTED in codes.values():
        print("Stopped; everything is saved. The same command continues.")
        return INTERRUPTED
    failed = [number for number, code in codes.items() if code]
    if failed:
        logs = ", ".join(str(_log(each)) for each in left if each.number in failed[:5])
        first = next(each for each in left if each.number in failed)
        reason = f"run {first.number}: {_last_line(_log(first))}"
        raise StrettoError(f"{len(failed)} of {len(codes)} runs failed ({reason})", fix=f"Their output is in {logs}.")
    return 0


def _plan(file: Path) -> tuple[str, Path, list[SweepRun]]:
    """The task, the folder of the sweep, and its runs; their settings are written as files beside their folders."""
    values = read_toml(file)
    if unknown := sorted(values.keys() - KNOWN):
        raise StrettoError(f"{str(file)!r} has {', '.join(unknown)}", fix=f"It may have {', '.join(sorted(KNOWN))}.")
    task = values.get("task")
    if not isinstance(task, str):
        raise StrettoError(f"{str(file)!r} names no task", fix='Write a line such as task = "classify".')
    found = load_task(task)
    assert found is not None
    kind = found.Config
    common, grid = (_table(values, name, file) for name in ("settings", "grid"))
    if "seeds" in values:
        grid = {**grid, "seed": values["seeds"]}
    if wrong := [name for name, choices in grid.items() if not isinstance(choices, list) or not choices]:
        raise StrettoError(
            f"{str(file)!r}: {', '.join(wrong)} in the grid is not a list of values", fix="Write seed = [0, 1, 2]."
        )
    if twice := sorted((grid.keys() & common.keys()) | ((grid.keys() | common.keys()) & NOT_SWEPT)):
        raise StrettoError(
            f"{str(file)!r} sets {', '.join(twice)} where it cannot",
            fix="Give a setting in [settings] or in [grid]; each run has a folder of its own under `out`.",
        )
    count = 1
    for choices in grid.values():
        count *= len(choices)
    if count > MAX_RUNS:
        raise StrettoError(f"{str(file)!r} asks for {count:,} runs", fix=f"At most {MAX_RUNS:,} are made.")
    given = values.get("out")
    if given is not None and not isinstance(given, str):
        raise StrettoError(f"{str(file)!r}: out is not a string", fix='Write out = "sweeps/first".')
    folder = Path(given) if given else Path("runs") / f"sweep-{file.stem}"
    texts: dict[str, dict[str, Any]] = {}
    for position, choice in enumerate(itertools.product(*grid.values())):
        changes = dict(zip(grid, choice, strict=True))
        merged = {"threads": 1, **common, **changes}
        # Every mistake is found before anything is written.
        validate(kind, with_preset(kind, merged), source=f"{file} (run {position})")
        text = f"# stretto train {task}\n{_toml(dict(sorted(merged.items())))}"
        if text in texts:
            raise StrettoError(f"{str(file)!r} asks for the same run twice: {changes}", fix="Name each value once.")
        texts[text] = changes
    # A run keeps the number that it was given first, so that seeds and settings can be added to a sweep.
    with disk_errors(folder, doing="use the folder of the sweep"):
        files = [path for path in folder.glob("*.toml") if path.stem.isdecimal() and path.is_file()]
        numbered = {path.read_text(encoding="utf-8"): path for path in files}
    free = itertools.count(max((int(path.stem) + 1 for path in numbered.values()), default=0))
    runs = []
    for text, changes in texts.items():
        place = numbered.get(text) or folder / f"{next(free):0{len(str(count - 1))}}.toml"
        runs.append(SweepRun(number=int(place.stem), changes=changes, folder=place.with_suffix("")))
        if text not in numbered:
            write_text_atomically(place, text)
    return task, folder, sorted(runs, key=lambda run: run.number)


def _table(values: dict[str, Any], name: str, file: Path) -> dict[str, Any]:
    found = values.get(name, {})
    if not isinstance(found, dict):
        raise StrettoError(f"{str(file)!r}: {name} is not a table", fix=f"Write its settings below a line [{name}].")
    return {key.replace("-", "_"): value for key, value in found.items()}


def _toml(values: dict[str, Any]) -> str:
    try:
        # Numbers, strings, booleans and lists are written in JSON as in TOML.
        return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())
    except TypeError as error:
        raise StrettoError(
            f"a setting is not a number, a string or a list ({error})", fix="Write it as one."
        ) from error


def _settings(run: SweepRun) -> Path:
    return run.folder.with_suffix(".toml")


def _log(run: SweepRun) -> Path:
    return run.folder.with_suffix(".log")


def _train(task: str, runs: list[SweepRun], *, jobs: int, show: Any) -> dict[int, int]:
    """Train the runs, some at a time; their exit codes by number."""
    waiting, codes = list(reversed(runs)), {}
    active: dict[int, tuple[SweepRun, subprocess.Popen[bytes]]] = {}
    with _forward_signals(active) as signals:
        while (waiting and not signals) or active:
            while waiting and not signals and len(active) < jobs:
                each = waiting.pop()
                active[each.number] = each, _begin(task, each)
            for number, (each, process) in list(active.items()):
                try:
                    code = process.wait(timeout=POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
                del active[number]
                codes[number] = code
                state = {0: "finished", INTERRUPTED: "stopped"}.get(code, f"failed, see {_log(each)}")
                print(f"{number:>4}  {state}  {each.name}", flush=True)
                show()
    if signals:
        codes |= {each.number: INTERRUPTED for each in waiting}
    return codes


def _begin(task: str, each: SweepRun) -> subprocess.Popen[bytes]:
    words = ["train", task, "--config", str(_settings(each)), "--out", str(each.folder), "--resume"]
    with _log(each).open("wb") as log:
        # A session of its own: Ctrl-C reaches it through us, once.
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "stretto", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output").rstrip(".")


@contextmanager
def _forward_signals(active: dict[int, tuple[SweepRun, subprocess.Popen[bytes]]]) -> Iterator[list[int]]:
    """Forward Ctrl-C and SIGTERM to the runs, which save and end; the list has the signals so far."""
    received: list[int] = []

    def forward(number: int) -> None:
        received.append(number)
        for _, process in list(active.values()):
            process.send_signal(number)

    with handle_signals(forward):
        yield received
