"""The harness of `python -m bench` and `python -m experiments`.

A benchmark is a function that takes its settings and a `Report`, registered under a name:

    @bench("kernels", title="Training steps against other implementations")
    def run(settings: KernelsSettings, report: Report) -> None:
        check_equal(ours, theirs, ...)                      # correctness first
        timings = time_interleaved(tasks, budget=...)       # then the clock: A, B, A, B, ...
        report.table(title=..., columns=..., rows=..., caption=...)
        report.goal("GRU over nn.GRU", ratio, at_least=1.5)

The harness parses the flags, prints the tables, and writes the JSON and the HTML page that were asked for.
`render` turns the JSON files in `bench/results` into the pages in `docs/measurements`. Such a file holds

    {"name", "title", "machine", "commit", "command", "date", "notes": [...],
     "tables": [{"title", "columns", "rows", "caption"}, ...]}

as `--json FILE` writes it. To publish a measurement: run with `--json bench/results/NAME.json`, then render.
"""

import contextlib
import dataclasses
import datetime as dt
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar

from pydantic import Field
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from stretto.checks import check_choice
from stretto.cli import check_flags, choose, console_for, parse
from stretto.errors import StrettoError
from stretto.files import write_text_atomically
from stretto.report import Html, bullets, columns, figure, grid, join, page, paragraph
from stretto.timing import QUICK, Timing, TimingBudget, torch_threads

Cell = str | int | float | bool | None
S = TypeVar("S", bound="Settings")
Count = Annotated[int, Field(ge=1)]

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "bench" / "results"
PAGES: Final = ROOT / "docs" / "measurements"
PACKAGES: Final = ("torch", "triton", "numpy", "jax", "lhotse", "transformers")
CPU_INFO: Final = Path("/proc/cpuinfo")
WIDE: Final = 120
SMOKE_TEST: Final = "A smoke test: its numbers mean nothing."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Flags that every benchmark has.

    Attributes:
        quick: Tiny sizes and a single round. It shows that everything runs; its numbers mean nothing.
        json: Write all numbers to this JSON file, after each part.
        out: Write an HTML page, plots and the JSON into this folder.
        threads: Threads of torch; its own default if left out.
    """

    quick: bool = False
    json: Path | None = None
    out: Path | None = None
    threads: Count | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedSettings(Settings):
    """Flags of benchmarks that time contenders in turn.

    Attributes:
        rounds: Rounds of an interleaved run; in each, every contender has a turn of at least a tenth of a second.
        budget: Seconds after which a run of at least three rounds begins no further one.
    """

    rounds: Count = 10
    budget: float = 10.0

    @property
    def timing(self) -> TimingBudget:
        """How often everything is timed."""
        return QUICK if self.quick else TimingBudget(rounds=self.rounds, seconds=self.budget, turn_seconds=0.1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of raw values; printing rounds them, and shows True and False as yes and no, None as a dash."""

    title: str
    columns: Sequence[str]  # with the unit: "ours ms", "padding %"
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{self.title}: a row has {len(row)} cells, and there are {len(self.columns)} columns")


class Report:
    """What a benchmark has measured so far.

    The JSON file is rewritten after each part, so that an interrupted run keeps what it has. `progress` shows a line
    while the benchmark runs.
    """

    def __init__(
        self,
        name: str,
        *,
        title: str,
        command: str = "",
        quick: bool = False,
        json: Path | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.name, self.title, self.command, self.quick = name, title, command, quick
        self.progress = progress
        self.tables: list[Table] = []
        self.notes: list[str] = [SMOKE_TEST] if quick else []
        self.figures: list[tuple[str, str, str]] = []
        self.details: list[Table] = []
        self.files: dict[str, str] = {}
        self.result: dict[str, Any] = {}
        self.failed = False
        self._goals: list[tuple[Cell, ...]] = []
        self.json_path = json
        self._machine, self._commit = describe_machine(), _commit()
        self._date = dt.datetime.now(tz=dt.timezone.utc).date().isoformat()

    def table(
        self,
        *,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        caption: str = "",
        is_detail: bool = False,
    ) -> None:
        """Add a table, in place of an earlier one of the same title; one without rows is dropped.

        A detail is for the page and the JSON file, too long for the terminal.
        """
        if not rows:
            return
        tables = self.details if is_detail else self.tables
        made = Table(title=title, columns=columns, rows=rows, caption=caption)
        titles = [table.title for table in tables]
        if title in titles:
            tables[titles.index(title)] = made
        else:
            tables.append(made)
        self.save()

    def note(self, line: str) -> None:
        """Add a line that a reader of the tables should know."""
        if line not in self.notes:
            self.notes.append(line)

    def skip(self, what: str, why: object) -> None:
        """Note what could not run here."""
        self.note(f"left out: {what}: {why}")

    def goal(self, what: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """Hold a number against its goal; all goals together are the last table."""
        bound = f"at least {at_least:g}" if at_least is not None else f"at most {at_most:g}"
        met = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        self._goals.append((what, value, bound, met))

    def plot(self, svg: str, *, title: str, caption: str = "") -> None:
        """Add a static SVG picture to the page; it is also written to a file next to it."""
        self.figures.append((title, svg, caption))

    def attach(self, suffix: str, text: str) -> None:
        """Add a file that is written next to the page, such as all rows as CSV."""
        self.files[suffix] = text

    def short_tables(self) -> list[Table]:
        """What the terminal shows: the tables, and the goals if there are any."""
        goals = Table(title="Goals", columns=("goal", "measured", "bound", "met"), rows=tuple(self._goals))
        return [*self.tables, *([goals] if self._goals else [])]

    def all_tables(self) -> list[Table]:
        """What the page shows: the same, and the details."""
        return [*self.short_tables(), *self.details]

    def as_dict(self) -> dict[str, Any]:
        """What is written as JSON: see `bench/results`."""
        return {
            "name": self.name,
            "title": self.title,
            "machine": self._machine,
            "commit": self._commit,
            "command": self.command,
            "date": self._date,
            "notes": list(self.notes),
            "tables": [_finite(dataclasses.asdict(table)) for table in self.all_tables()],
            **({"result": _finite(self.result)} if self.result else {}),
        }

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"

    def print(self) -> None:
        """Print tables, notes and where it ran; a file or pipe is as wide as the widest table."""
        shown = [_rich_table(table) for table in self.short_tables()]
        console = console_for(max((Console(width=1000).measure(table).maximum for table in shown), default=WIDE))
        for table in shown:
            console.print(table, "")
        for line in [*self.notes, f"{self._machine}; commit {self._commit}"]:
            console.print(Text(line), soft_wrap=True)

    def write(self, folder: Path) -> list[Path]:
        """Write page, JSON, plots and attached files into a folder; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {f"{self.name}.html": self._page(), f"{self.name}.json": self.to_json()}
        files |= {f"{self.name}.{suffix}": text for suffix, text in self.files.items()}
        for number, (_, svg, _) in enumerate(self.figures):
            files[f"{self.name}{f'-{number}' if number else ''}.svg"] = svg
        for name, text in files.items():
            write_text_atomically(folder / name, text)
        return [folder / name for name in files]

    def _page(self) -> str:
        sections = []
        if self.figures:
            pictures = [
                figure(Html(svg), title=title, caption=caption, wide=True) for title, svg, caption in self.figures
            ]
            sections.append(("Plots", grid(pictures)))
        for table in self.all_tables():
            body = [columns(table.columns, [[format_cell(cell) for cell in row] for row in table.rows])]
            body += [paragraph(line) for line in table.caption.splitlines()]
            sections.append((table.title, join(body)))
        return page(
            title=self.title,
            subtitle=self._machine,
            top=[bullets(self.notes)] if self.notes else [],
            sections=sections,
            footer=f"{self.command}, commit {self._commit}, {self._date}",
            scripted=False,
        )

    def save(self) -> None:
        """Write the JSON file, if one was asked for, with all that there is."""
        if self.json_path is not None:
            write_text_atomically(self.json_path, self.to_json())


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry(Generic[S]):
    title: str
    settings: type[S]
    run: Callable[[S, Report], None]


class Registry:
    """Benchmarks by name.

    Args:
        module: Run as `python -m MODULE NAME [flags]`.
        keeps_progress: Print lines of progress instead of showing only the last one, for runs of hours.
    """

    def __init__(self, module: str, *, keeps_progress: bool = False) -> None:
        self.module, self._keeps_progress = module, keeps_progress
        self.entries: dict[str, _Entry[Any]] = {}

    def __call__(
        self, name: str, *, title: str
    ) -> Callable[[Callable[[S, Report], None]], Callable[[S, Report], None]]:
        """Register a function of (settings, report); the type of its settings is read from its annotations."""

        def register(run: Callable[[S, Report], None]) -> Callable[[S, Report], None]:
            settings = run.__annotations__["settings"]
            self.entries[name] = _Entry(title=title, settings=settings, run=run)
            return run

        return register

    def parse(self, name: str, words: Sequence[str]) -> Any:
        """The settings that the flags ask for."""
        settings = self.entries[name].settings
        return check_flags(parse(settings, list(words), prog=f"python -m {self.module} {name}"))

    def measure(
        self, name: str, settings: Settings, *, command: str = "", progress: Callable[[str], None] = lambda _: None
    ) -> Report:
        """Run one benchmark with the number of threads in its settings."""
        entry = self.entries[name]
        report = Report(
            name,
            title=entry.title,
            command=command,
            quick=settings.quick,
            json=settings.json,
            progress=progress,
        )
        with torch_threads(settings.threads):
            entry.run(settings, report)
        report.save()
        return report

    def main(self, words: Sequence[str]) -> int:
        """Run what the command line asks for; the exit code is 1 if the benchmark found a fault."""
        names = {name: self.entries[name].title for name in sorted(self.entries)}
        choice = choose(list(words), names, usage=f"python -m {self.module} NAME [flags]")
        if choice is None:
            return 0
        name, rest = choice
        settings: Settings = self.parse(name, rest)
        console = console_for(WIDE)
        with _show_progress(console, keep=self._keeps_progress) as progress:
            command = shlex.join(["python", "-m", self.module, *words])
            report = self.measure(name, settings, command=command, progress=progress)
        report.print()
        written = [*([settings.json] if settings.json else []), *(report.write(settings.out) if settings.out else [])]
        for path in written:
            console.print(Text(f"written: {path}"), soft_wrap=True)
        return int(report.failed)


bench: Final = Registry("bench")


def chosen_parts(only: Sequence[str], parts: Sequence[str]) -> tuple[str, ...]:
    """The parts that a flag such as `--only a,b c` names, in the benchmark's order; all of them if it names none."""
    named = [part for word in only for part in word.split(",") if part]
    for part in named:
        check_choice(part, name="part", choices=parts)
    return tuple(part for part in parts if part in named) if named else tuple(parts)


def why_missing(require: Callable[[], object]) -> str | None:
    """Why a package does not work here, if it does not: `require` imports it."""
    try:
        require()
    except StrettoError as error:
        return str(error)
    except (AttributeError, OSError, RuntimeError) as error:
        return f"its import fails ({error}). Reinstall it: pip install 'stretto[peers]'."
    return None


def ratio_of(timings: Mapping[str, Timing], peer: str, ours: str) -> tuple[float, float]:
    """How many times faster we are than a peer: by minima and by medians."""
    theirs, own = timings[peer], timings[ours]
    return theirs.minimum / own.minimum, theirs.median / own.median


def format_cell(cell: Cell) -> str:
    """Format a table value: numbers with three significant digits, or all digits before the point."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        if not math.isfinite(cell) or cell == 0:
            return f"{cell:g}"
        digits = 2 - math.floor(math.log10(abs(cell)))
        return f"{cell:,.{max(0, digits)}f}" if digits < 6 else f"{cell:.2g}"
    return cell


def describe_machine() -> str:
    """Processor, system and versions, without which the numbers mean nothing."""
    versions = [f"{package} {version}" for package in PACKAGES if (version := _version(package)) is not None]
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", CPU_INFO.read_text(encoding="utf-8"), flags=re.MULTILINE)
    except OSError:
        names = []
    processor = " ".join([f"{os.cpu_count() or 1} CPUs", *names[:1]])
    system = f"{platform.system()} {platform.machine()}"
    return ", ".join([processor, system, f"Python {platform.python_version()}", *versions])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit that is checked out, with a plus sign if files differ from it."""
    try:
        commit, changes = (
            subprocess.run(  # noqa: S603
                ["git", *words],  # noqa: S607
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}+" if changes else commit


def _finite(value: Any) -> Any:
    """NaN and inf as text, because JSON has no numbers for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def _show_progress(console: Console, *, keep: bool) -> Iterator[Callable[[str], None]]:
    """A status line, or plain lines where they are to be kept or the output is a file or pipe."""
    if keep or not console.is_terminal:
        yield lambda line: console.print(Text(line), soft_wrap=True)
        return
    with console.status("") as status:
        yield status.update


def _is_numeric(table: Table, place: int) -> bool:
    """Whether a column holds numbers, some of them perhaps as text: "1.5 x"."""
    cells = [row[place] for row in table.rows]
    return all(not isinstance(cell, str) or re.match(r"[-+]?\d(?!.*[A-Za-z]{3})|-$", cell) for cell in cells)


def _rich_table(table: Table) -> RichTable:
    shown = RichTable(
        title=Text(table.title),
        caption=Text(table.caption),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for number, heading in enumerate(table.columns):
        shown.add_column(heading, justify="right" if _is_numeric(table, number) else "left")
    for row in table.rows:
        is_missed = any(row[place] is False for place, name in enumerate(table.columns) if name in ("met", "reached"))
        shown.add_row(*(Text(format_cell(cell)) for cell in row), style="yellow" if is_missed else None)
    return shown


# Results as documentation --------------------------------------------------------------------------------------------


def render(*, results: Path = RESULTS, pages: Path = PAGES, check: bool = False) -> list[Path]:
    """Write a Markdown page for every JSON file of results, or write nothing and only check.

    Returns:
        The pages that were missing, outdated, or without results.
    """
    wanted = {f"{path.stem}.md": _markdown(_read(path), source=path.name) for path in sorted(results.glob("*.json"))}
    titles = {name: text.partition("\n")[0].lstrip("# ") for name, text in wanted.items()}
    lines = ["# Measurements", "", "Generated from `bench/results` by `python -m bench render`.", ""]
    wanted["index.md"] = "\n".join([*lines, *(f"- [{title}]({name})" for name, title in titles.items())]) + "\n"
    present = {path.name: path.read_text(encoding="utf-8") for path in pages.glob("*.md")} if pages.exists() else {}
    changed = sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))
    for name in [] if check else changed:
        if name in wanted:
            write_text_atomically(pages / name, wanted[name])
        else:
            (pages / name).unlink()
    return [pages / name for name in changed]


def _read(path: Path) -> dict[str, Any]:
    keys = ("name", "title", "machine", "commit", "command", "date", "notes", "tables")
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in keys if key not in result]
        result["tables"] = [Table(**table) for table in result["tables"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StrettoError(f"{str(path)!r} holds no result ({error})", fix="Write it with --json FILE.") from error
    if missing:
        raise StrettoError(f"{str(path)!r} has no {', '.join(missing)}", fix="Write it with --json FILE.")
    return dict(result)


def _markdown(result: dict[str, Any], *, source: str) -> str:
    lines = [
        f"# {result['title']}",
        "",
        f"<!-- Generated by `python -m bench render` from bench/results/{source}. -->",
        "",
        f"- Machine: {result['machine']}",
        f"- Commit: `{result['commit']}`, {result['date']}",
        f"- Command: `{result['command']}`",
        *(f"- {note}" for note in result["notes"]),
    ]
    for table in result["tables"]:
        lines += ["", f"## {table.title}", "", _markdown_row(table.columns)]
        numeric = [_is_numeric(table, place) for place in range(len(table.columns))]
        lines.append(_markdown_row(["---:" if right else "---" for right in numeric]))
        lines += [_markdown_row([format_cell(cell) for cell in row]) for row in table.rows]
        for line in table.caption.splitlines():
            lines += ["", line]
    return "\n".join(lines) + "\n"


def run_render(words: Sequence[str]) -> int:
    """`python -m bench render [--check]`: write the pages, or only say which are outdated."""
    if unknown := [word for word in words if word != "--check"]:
        raise StrettoError(f"render got {' '.join(unknown)!r}", fix="Its only flag is --check.")
    check = "--check" in words
    changed = render(check=check)
    for path in changed:
        print(f"{'outdated' if check else 'written'}: {path}")
    return int(check and bool(changed))


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
