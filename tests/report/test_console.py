"""A run on the terminal: every kind of event, the numbers of the events, and a terminal left as it was."""

import io
from typing import Any

import pytest
from rich.console import Console

from stretto.report import console_view
from stretto.report.console import LiveView, PlainView, format_metric
from stretto.training import Event, Subscriber

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def _started(**changes: Any) -> Event:
    return {
        "event": "started",
        "time": 1.0,
        "task": "handwriting",
        "data": {
            "name": "ink [red]of[/nobody]",
            "sequences": {"train": 4321, "valid": 432, "test": 431},
            "steps": 987654,
            "features": 3,
            "notes": ["a split was drawn [bold]"],
        },
        "report": {"num_buckets": 7, "batches": 5, "padding": 0.0612},
        "shuffled_padding": 0.4371,
        "slot_ratio": 1.83,
        "parameters": 123456,
        "threads": 2,
        "epochs": 2,
    } | changes


def _update(number: int, *, loss: float = 2.0, time: float = 1.0) -> Event:
    return {
        "event": "update",
        "time": time,
        "update": number,
        "epoch": (number - 1) // 5,
        "loss": loss,
        "rows": 4,
        "length": 25,
        "steps_real": 75,
        "slots": 100,
        "seconds": 0.5,
        "gradient_norm": 1.0,
        "rate": 0.01,
    }


def _epoch(number: int, **changes: Any) -> Event:
    return {
        "event": "epoch",
        "time": 2.0,
        "epoch": number,
        "update": 5 * number,
        "train_loss": 1.23456,
        "valid_loss": 2.34567,
        "metric": "cer",
        "value": 0.12345,
        "seconds": 3.21,
        "steps_per_second": 45678.9,
        "padding": 0.0678,
    } | changes


def _finished(**changes: Any) -> Event:
    return {
        "event": "finished",
        "time": 3.0,
        "metrics": {"cer": 0.0456, "cer_beam": 0.0444, "loss": 0.98765},
        "epochs": 2,
        "seconds": 61.24,
        "padding": 0.0731,
        "steps_per_second": 34567.8,
        "slot_ratio": 1.83,
        "run": "runs/handwriting-001",
    } | changes


OTHERS: list[Event] = [
    {"event": "resumed", "time": 1.5, "update": 7, "epoch": 1, "batches": 5, "epochs": 2},
    {"event": "warning", "time": 1.5, "message": "the checkpoint [/bold] cannot be used"},
    {"event": "checkpoint", "time": 1.5, "update": 7, "path": "checkpoints/update-00000007"},
    {"event": "samples", "time": 1.5, "items": []},
    {"event": "interrupted", "time": 1.5, "update": 7},
    {"event": "something new", "time": 1.5},
]


def _console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=180, force_terminal=terminal, legacy_windows=False, _environ={})


def _printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_have_the_numbers_of_the_events() -> None:
    console = _console(terminal=False)
    view = PlainView(console)
    for event in (_started(), _update(1), _epoch(1), _epoch(2, valid_loss=1.5, value=0.5), *OTHERS, _finished()):
        view(event)
    text = _printed(console)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == (
        "handwriting: ink [red]of[/nobody], 4,321 train, 432 valid, 431 test sequences, 987,654 steps; "
        "123,456 parameters, 2 threads"
    )
    assert "7 buckets, 5 batches per epoch, padding 6.1% (shuffled: 43.7%), so 1.8 times fewer slots" in lines[1]
    assert lines[2] == "note: a split was drawn [bold]"
    assert lines[3] == "epoch   1  train 1.2346  valid 2.3457  cer 12.35%     45,679 steps/s  padding 6.8%  3.2 s"
    assert "valid 1.5000  cer 50.00%" in lines[4]
    assert lines[5] == "resumed at update 7, epoch 2"
    assert lines[6] == "warning: the checkpoint [/bold] cannot be used"
    table = [line.strip("│┃ ").split() for line in lines[8:]]
    shown = {row[0]: row for row in table if row}
    assert shown["cer"][-1] == "4.56%"
    assert shown["cer_beam"][-1] == "4.44%"
    assert shown["loss"][-1] == "0.988"
    assert shown["seconds"][-1] == "61.2"
    assert shown["padding"][-1] == "7.3%"
    assert "34,568" in text


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("cer", 0.5, "50.00%"),
        ("cer_beam", 0.0123, "1.23%"),
        ("accuracy", 1.0, "100.00%"),
        ("perplexity", 3.14159, "3.142"),
    ],
)
def test_rates_are_shown_as_percentages(name: str, value: float, shown: str) -> None:
    assert format_metric(name, value) == shown


def test_the_live_view_shows_all_that_the_plain_one_does() -> None:
    live, plain = _console(terminal=True), _console(terminal=False)
    views: list[Subscriber] = [LiveView(live), PlainView(plain)]
    for event in (_started(), _update(1), _epoch(1), *OTHERS[:4], _update(8), _epoch(2), OTHERS[5], _finished()):
        for view in views:
            view(event)
    assert _printed(live).count(HIDE) == _printed(live).count(SHOW) > 0
    shown = _printed(live)
    for line in _printed(plain).splitlines():
        for word in line.strip("│┃┏┓┗┛┌┐└┘├┤━─┡┩ ").split("│"):
            assert word.strip() in shown


def _bar(view: LiveView) -> str:
    console = _console(terminal=False)
    console.print(view._progress)
    return _printed(console)


def test_the_bar_shows_the_mean_loss_the_speed_and_the_padding() -> None:
    view = LiveView(_console(terminal=True))
    view(_started())
    for number, loss in enumerate((4.0, 2.0, 3.0), start=1):
        view(_update(number, loss=loss, time=10.0 + number))
    shown = _bar(view)
    assert "epoch 1/2" in shown
    assert "3/10" in shown
    assert "loss 3.000" in shown
    assert "75 steps/s" in shown
    assert "padding 25.0%" in shown
    view(_epoch(1))
    view(_update(6, loss=1.0, time=20.0))
    assert "epoch 2/2" in _bar(view)
    assert "loss 1.000" in _bar(view)
    view.close()


def test_a_resumed_run_has_its_bar_where_it_stopped() -> None:
    view = LiveView(_console(terminal=True))
    view(OTHERS[0])
    view(_update(8))
    assert "8/10" in _bar(view)
    assert "epoch 2/2" in _bar(view)
    view.close()


def test_the_output_decides_which_view_it_is() -> None:
    with console_view(_console(terminal=True)) as view:
        assert isinstance(view, LiveView)
    with console_view(_console(terminal=False)) as view:
        assert isinstance(view, PlainView)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_cursor_is_back_however_the_run_ends(error: type[BaseException]) -> None:
    console = _console(terminal=True)

    def fail() -> None:
        with console_view(console) as view:
            view(_started())
            view(_update(1))
            assert _printed(console).count(HIDE) == 1
            raise error

    with pytest.raises(error):
        fail()
    assert _printed(console).count(SHOW) == 1


def test_an_interruption_takes_the_bar_away() -> None:
    console = _console(terminal=True)
    with console_view(console) as view:
        view(_started())
        view({"event": "interrupted", "time": 1.0, "update": 1})
        assert _printed(console).count(SHOW) == 1


def test_the_terminal_shows_residual_fallback_and_memory_of_a_solver() -> None:
    solving = {
        "solver": "warm_start",
        "exact": False,
        "batches": 7,
        "residual_mean": 0.0123,
        "residual_max": 0.456,
        "fell_back": 2,
        "cache_bytes": 3 << 20,
    }
    console = _console(terminal=False)
    view = PlainView(console)
    view(_started(settings={"solver": "warm_start"}))
    for epoch, own in enumerate((solving, solving | {"exact": True}), start=1):
        view(_epoch(epoch, solving=own))
    view(_epoch(3))
    view(_finished(solving=solving | {"batches": 14}))
    text = _printed(console)
    lines = [line for line in text.splitlines() if line.startswith("epoch")]
    assert "solver warm_start: approximate" in text
    assert lines[0].endswith("3.2 s  residual 0.012, at most 0.46, 2 of 7 fell back")
    assert lines[1].endswith("3.2 s  exact")
    assert lines[2].endswith("3.2 s")
    assert "warm_start, 2 of 14 batches fell back" in text
    assert "0.012 on average in the end, at most 0.46" in text
    assert "3 MB" in text
