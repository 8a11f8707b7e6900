"""A run on the terminal: a live display, or plain lines where the output is not a terminal."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from stretto.large_batch import format_rules
from stretto.report.run_page import format_bytes, format_metric, format_residual, is_reported
from stretto.training import Event, Subscriber

SOLVERS: Final = {
    "auto": "exact within the tolerance, by whatever is expected to be fastest",
    "shooting": "exact within the tolerance",
    "warm_start": "approximate: one sweep from the states of the last visit; watch the residual",
    "multigrid": "approximate, as published; watch the residual",
}


@contextlib.contextmanager
def console_view(console: Console | None = None) -> Iterator[Subscriber]:
    """A subscriber that shows events on the terminal, and restores the terminal however the run ends."""
    console = console or Console()
    if not console.is_terminal:
        yield functools.partial(print_event, console)
        return
    view = LiveView(console)
    try:
        yield view
    finally:
        view.close()


def print_event(console: Console, event: Event) -> None:
    """One line per epoch, for logs and pipes."""
    kind, lines = event["event"], []
    if kind == "started":
        lines = start_lines(event)
    elif kind == "epoch":
        lines = [epoch_line(event)]
    elif kind == "resumed":
        lines = [f"resumed at update {event['update']}, epoch {event['epoch'] + 1}"]
    elif kind == "batch" and is_reported(event):
        lines = [f"batch {event['batch_size']}, rate {event['rate']:.3g}: {event['reason']}"]
    elif kind == "auto":
        lines = auto_lines(event)
    elif kind == "warning":
        lines = [f"warning: {event['message']}"]
    elif kind == "finished":
        console.print(result_table(event))
    for line in lines:
        console.print(Text(line), soft_wrap=True)


@final
class LiveView:
    """A progress bar for the epoch under way, and a line for each finished one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[metric]}"),
            TextColumn("{task.fields[speed]} steps/s"),
            TextColumn("padding {task.fields[padding]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        self._live = Live(self._progress, console=console, refresh_per_second=8, transient=True)
        self._bar = self._progress.add_task("", total=1, epoch=1, epochs=1, loss="-", metric="", speed="-", padding="-")
        self._reset()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        kind = event["event"]
        if kind in ("started", "resumed") and not self._live.is_started:
            self._live.start()
        if kind in ("started", "resumed"):
            batches = event["report"]["batches"] if kind == "started" else event["batches"]
            self._progress.update(self._bar, total=batches * event["epochs"], epochs=event["epochs"])
        if kind == "update":
            self._show_update(event)
            return
        if kind in ("finished", "interrupted"):
            self.close()
        if "updates_left" in event:
            self._progress.update(self._bar, total=event["update"] + event["updates_left"])
        if kind == "epoch":
            self._reset()
            shown = f"{event['metric']} {format_metric(event['metric'], event['value'])}"
            self._progress.update(self._bar, metric=shown)
        print_event(self._console, event)

    def close(self) -> None:
        """Remove the bar and show the cursor again."""
        self._live.stop()

    def _reset(self) -> None:
        self._real = self._padded = self._seen = 0
        self._loss = 0.0
        self._since: float | None = None

    def _show_update(self, event: Event) -> None:
        self._real += event["steps_real"]
        self._padded += event["padded_steps"]
        self._seen += 1
        self._loss += (event["loss"] - self._loss) / min(self._seen, 50)
        if self._since is None:
            self._since = event["time"]
            self._first = event["steps_real"]
        elapsed = event["time"] - self._since
        speed = f"{(self._real - self._first) / elapsed:,.0f}" if elapsed > 0 else "-"
        self._progress.update(
            self._bar,
            completed=event["update"],
            epoch=event["epoch"] + 1,
            loss=f"{self._loss:.3f}",
            speed=speed,
            padding=f"{1 - self._real / self._padded:.1%}",
        )


def start_lines(event: Event) -> list[str]:
    """What will be trained, and what the buckets save."""
    data, report = event["data"], event["report"]
    counts = ", ".join(f"{count:,} {part}" for part, count in data["sequences"].items())
    lines = [
        f"{event['task']}: {data['name']}, {counts} sequences, {data['steps']:,} steps; "
        f"{event['parameters']:,} parameters, {event['threads']} thread{'s' * (event['threads'] != 1)}",
        f"{report['streams']} streams in {report['batches']} windows of {report['window']} steps"
        if "streams" in report
        else f"{report['num_buckets']} buckets, {report['batches']} batches per epoch, padding {report['padding']:.1%} "
        f"(shuffled: {event['shuffled_padding']:.1%}), so {event['padded_steps_ratio']:.1f} times fewer padded steps",
    ]
    solver = (event.get("settings") or {}).get("solver", "serial")
    if solver != "serial":
        lines.append(f"solver {solver}: {SOLVERS.get(solver, 'see the residual')}")
    if event.get("rules"):
        lines += format_rules(event["rules"]).splitlines()
    return lines + [f"note: {note}" for note in data["notes"]]


def auto_lines(event: Event) -> list[str]:
    """A decision of `--auto`."""
    if event["action"] == "end":
        return [f"end: {event['reason']}"]
    if event["action"] == "trial":
        loss = "diverged" if event["loss"] is None else f"loss {event['loss']:.4f}"
        return [f"trial  {event['recipe']}: {loss} after {event['epochs']:.3g} epochs, {event['seconds']:.1f} s"]
    rules = format_rules(event["rules"]).splitlines() if "rules" in event else []
    return [f"run  {event['recipe']}, {event['epochs']:.0f} epochs: {event['reason']}", *rules]


def epoch_line(event: Event) -> str:
    """One epoch in one line."""
    return (
        f"epoch {event['epoch']:>3}  train {event['train_loss']:.4f}  valid {event['valid_loss']:.4f}  "
        f"{event['metric']} {format_metric(event['metric'], event['value'])}  "
        f"{event['steps_per_second']:>9,.0f} steps/s  padding {event['padding']:.1%}  {event['seconds']:.1f} s"
        f"{_format_solving(event['solving']) if 'solving' in event else ''}"
    )


def _format_solving(solving: Mapping[str, Any]) -> str:
    """What a solver left over, in a few words."""
    if solving["exact"]:
        return "  exact"
    fell_back = f", {solving['fell_back']} of {solving['batches']} fell back" if solving["fell_back"] else ""
    mean, most = format_residual(solving["residual_mean"]), format_residual(solving["residual_max"])
    return f"  residual {mean}, at most {most}{fell_back}"


def result_table(event: Event) -> Table:
    """The end of a run."""
    table = Table(title="Result on the test part", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows: list[tuple[str, Any]] = [(name, format_metric(name, value)) for name, value in event["metrics"].items()]
    rows += [
        ("epochs", event["epochs"]),
        ("seconds", f"{event['seconds']:.1f}"),
        ("real steps/s", f"{event['steps_per_second']:,.0f}"),
        ("padding", f"{event['padding']:.1%}"),
        ("padded steps saved", f"{event['padded_steps_ratio']:.1f} times fewer than shuffled batches"),
    ]
    solving = event.get("solving")
    if solving:
        mean, most = format_residual(solving["residual_mean"]), format_residual(solving["residual_max"])
        rows.append(
            ("solver", f"{solving['solver']}, {solving['fell_back']} of {solving['batches']} batches fell back")
        )
        rows.append(("residual", f"{mean} on average in the end, at most {most}"))
        if solving["cache_bytes"] is not None:
            rows.append(("memory for boundary states", format_bytes(solving["cache_bytes"])))
    for name, value in rows:
        table.add_row(name, str(value))
    return table
