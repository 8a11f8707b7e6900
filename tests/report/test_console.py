"""A run on the terminal: every kind of event, the numbers of the events, and a terminal left as it was."""

import io

import pytest
from rich.console import Console
from run_events import epoch, finished, solving, started, update

from stretto.report import console_view
from stretto.report.console import LiveView, print_event
from stretto.training import Event

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


NOTED = started(data=started()["data"] | {"name": "ink [red]of[/nobody]", "notes": ["a split was drawn [bold]"]})
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
    for event in (NOTED, update(1), epoch(1), epoch(2, valid_loss=1.5, value=0.5), *OTHERS, finished()):
        print_event(console, event)
    text = _printed(console)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == (
        "handwriting: ink [red]of[/nobody], 4,321 train, 432 valid, 431 test sequences, 987,654 steps; "
        "123,456 parameters, 2 threads"
    )
    assert "2 buckets, 5 batches per epoch, padding 6.1% (shuffled: 43.7%), so 1.8 times fewer padded steps" in lines[1]
    assert lines[2] == "note: a split was drawn [bold]"
    assert lines[3] == "epoch   1  train 1.2500  valid 1.5000  cer 32.17%      1,111 steps/s  padding 7.9%  2.5 s"
    assert "valid 1.5000  cer 50.00%" in lines[4]
    assert lines[5] == "resumed at update 7, epoch 2"
    assert lines[6] == "warning: the checkpoint [/bold] cannot be used"
    table = [line.strip("│┃ ").split() for line in lines[8:]]
    shown = {row[0]: row for row in table if row}
    wanted = {"cer": "4.32%", "cer_beam": "4.11%", "loss": "0.2345", "seconds": "754.6", "padding": "5.2%"}
    assert {name: shown[name][-1] for name in wanted} == wanted
    assert "41,234" in text


def test_the_live_view_shows_all_that_the_plain_one_does() -> None:
    live, plain = _console(terminal=True), _console(terminal=False)
    view = LiveView(live)
    for event in (started(), update(1), epoch(1), *OTHERS[:4], update(8), epoch(2), OTHERS[5], finished()):
        view(event)
        print_event(plain, event)
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
    view(started())
    for number, loss in enumerate((4.0, 2.0, 3.0), start=1):
        view(update(number, loss=loss, time=10.0 + number, steps_real=75, padded_steps=100))
    shown = _bar(view)
    assert "epoch 1/2" in shown
    assert "3/10" in shown
    assert "loss 3.000" in shown
    assert "75 steps/s" in shown
    assert "padding 25.0%" in shown
    view(epoch(1))
    view(update(6, loss=1.0, time=20.0))
    assert "epoch 2/2" in _bar(view)
    assert "loss 1.000" in _bar(view)
    view.close()


def test_a_resumed_run_has_its_bar_where_it_stopped() -> None:
    view = LiveView(_console(terminal=True))
    view(OTHERS[0])
    view(update(8))
    assert "8/10" in _bar(view)
    assert "epoch 2/2" in _bar(view)
    view.close()


def test_the_output_decides_which_view_it_is() -> None:
    with console_view(_console(terminal=True)) as view:
        assert isinstance(view, LiveView)
    with console_view(_console(terminal=False)) as view:
        assert not isinstance(view, LiveView)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_cursor_is_back_however_the_run_ends(error: type[BaseException]) -> None:
    console = _console(terminal=True)

    def fail() -> None:
        with console_view(console) as view:
            view(started())
            view(update(1))
            assert _printed(console).count(HIDE) == 1
            raise error

    with pytest.raises(error):
        fail()
    assert _printed(console).count(SHOW) == 1


def test_an_interruption_takes_the_bar_away() -> None:
    console = _console(terminal=True)
    with console_view(console) as view:
        view(started())
        view(OTHERS[4])
        assert _printed(console).count(SHOW) == 1


def test_the_terminal_shows_residual_fallback_and_memory_of_a_solver() -> None:
    console = _console(terminal=False)
    for event in (
        started(settings={"solver": "warm_start"}),
        epoch(1, solving=solving(fell_back=2)),
        epoch(2, solving=solving(exact=True)),
        epoch(3),
        finished(solving=solving(fell_back=2, batches=14)),
    ):
        print_event(console, event)
    text = _printed(console)
    lines = [line for line in text.splitlines() if line.startswith("epoch")]
    assert "solver warm_start: approximate" in text
    assert lines[0].endswith("2.5 s  residual 0.012, at most 0.46, 2 of 7 fell back")
    assert lines[1].endswith("2.5 s  exact")
    assert lines[2].endswith("2.5 s")
    assert "warm_start, 2 of 14 batches fell back" in text
    assert "0.012 on average in the end, at most 0.46" in text
    assert "3 MB" in text
