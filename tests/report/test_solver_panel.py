"""What a run tells of its solver: on its page, on the terminal, and nothing where there is nothing to tell."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from stretto.report import write_run_report
from stretto.report.console import PlainView
from stretto.report.record import RunRecord
from stretto.report.samples import samples_html
from stretto.report.solver_panel import bytes_in_words, small, solver_html
from stretto.training import summary_of

Event = dict[str, Any]
HOSTILE = "</script><script>alert(1)</script>"


def _solving(**changes: Any) -> Event:
    return {
        "solver": "carried",
        "exact": False,
        "batches": 7,
        "residual_mean": 0.0123,
        "residual_max": 0.456,
        "iterations": 1.0,
        "backward_residual_mean": 0.789,
        "backward_residual_max": 1.0,
        "fell_back": 0,
        "reason": "4 chunks of 50 steps",
        "cache_bytes": 3 << 20,
    } | changes


def _epoch(number: int, solving: Event | None) -> Event:
    told = {} if solving is None else {"solving": solving}
    return {
        "event": "epoch",
        "time": 1.0,
        "epoch": number,
        "step": 5 * number,
        "train_loss": 1.0,
        "valid_loss": 1.0,
        "metric": "accuracy",
        "value": 0.5,
        "seconds": 1.0,
        "steps_per_second": 10.0,
        "padding": 0.1,
        **told,
    }


def _step(number: int, **changes: Any) -> Event:
    return {
        "event": "step",
        "time": 1.0,
        "step": number,
        "epoch": (number - 1) // 5,
        "loss": 1.0,
        "rows": 2,
        "length": 10,
        "steps_real": 15,
        "slots": 20,
        "seconds": 0.1 * number,
    } | changes


def _run(folder: Path, events: list[Event]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return folder


def _html(folder: Path, events: list[Event]) -> str:
    found = solver_html(RunRecord.read(_run(folder, events)))
    assert found is not None
    return found


def test_the_panel_has_words_line_and_numbers(tmp_path: Path) -> None:
    steps = [_step(number, residual=0.01 * number) for number in range(1, 11)]
    text = _html(tmp_path, [*steps[:5], _epoch(1, _solving()), *steps[5:], _epoch(2, _solving(residual_mean=0.0077))])
    assert "Told, not exact" in text
    assert "always walked step after step" in text
    assert "Residual along training" in text
    assert "plot-residual" in text
    for shown in ("0.012", "0.0077", "0.46", "0.79", "4 chunks of 50 steps", "3 MB"):
        assert shown in text, shown


@pytest.mark.parametrize("solver", ["shooting", "auto"])
def test_exact_solvers_are_called_exact(tmp_path: Path, solver: str) -> None:
    told = _solving(solver=solver, residual_mean=0.0, residual_max=0.0, cache_bytes=None, fell_back=3)
    text = _html(tmp_path, [_epoch(1, told)])
    assert "Exact within the tolerance" in text
    assert "not exact" not in text
    # Nothing is left, so there is no line to draw.
    assert "plot-residual" not in text
    assert "memory" not in text
    assert "<td>3</td>" in text


def test_exact_epochs_at_the_end_do_not_hide_what_came_before(tmp_path: Path) -> None:
    exact = _solving(
        exact=True, residual_mean=0.0, residual_max=0.0, backward_residual_mean=None, cache_bytes=0, reason=""
    )
    text = _html(tmp_path, [_epoch(1, _solving()), _epoch(2, exact)])
    assert "3 MB" in text
    assert "<td>exact</td><td>exact</td><td>-</td>" in text
    assert "4 chunks of 50 steps" in text


def test_residuals_over_many_powers_of_ten_are_drawn(tmp_path: Path) -> None:
    events = [_epoch(number, _solving(residual_mean=10.0**-number)) for number in range(1, 9)]
    assert "plot-residual" in _html(tmp_path, events)


def test_nothing_is_told_of_a_run_step_after_step(tmp_path: Path) -> None:
    run = _run(tmp_path, [_step(1), _epoch(1, None)])
    assert solver_html(RunRecord.read(run)) is None
    page = write_run_report(run).read_text(encoding="utf-8")
    assert "Parallel in time" not in page
    assert "residual" not in page.partition("<main>")[2]


def test_the_page_has_the_section_and_text_of_the_record_stays_text(tmp_path: Path) -> None:
    run = _run(tmp_path, [_step(1, residual=0.1), _epoch(1, _solving(reason=HOSTILE, solver=HOSTILE))])
    page = write_run_report(run).read_text(encoding="utf-8")
    assert "<h2>Parallel in time</h2>" in page
    assert HOSTILE not in page


def test_the_terminal_tells_residual_fallback_and_memory() -> None:
    console = Console(file=io.StringIO(), width=180, _environ={})
    view = PlainView(console)
    view(
        {
            "event": "started",
            "task": "label-steps",
            "data": {"name": "x", "sequences": {"train": 1}, "steps": 3, "notes": []},
            "report": {"num_buckets": 1, "batches": 5, "padding": 0.1},
            "settings": {"solver": "carried"},
            "shuffled_padding": 0.4,
            "slot_ratio": 1.0,
            "parameters": 1,
            "threads": 1,
        }
    )
    view(_epoch(1, _solving(fell_back=2)))
    view(_epoch(2, _solving(exact=True)))
    view(_epoch(3, None))
    summary = summary_of([_solving(fell_back=2), _solving(exact=True, residual_mean=0.0, cache_bytes=0)])
    view(
        {
            "event": "finished",
            "metrics": {"accuracy": 0.5},
            "epochs": 2,
            "seconds": 1.0,
            "padding": 0.1,
            "steps_per_second": 1.0,
            "slot_ratio": 1.0,
            "solving": summary,
        }
    )
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert "solver carried: one sweep from where sequences were last time; told, not exact" in lines[2]
    assert lines[3].endswith("1.0 s  residual 0.012, at most 0.46, 2 of 7 fell back")
    assert lines[4].endswith("1.0 s  exact")
    assert lines[5].endswith("1.0 s")
    text = "\n".join(lines)
    assert "carried, 2 of 14 batches fell back" in text
    assert "0.012 on average in the end, at most 0.46" in text
    assert "3 MB" in text


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 bytes"), (999, "999 bytes"), (2048, "2 kB"), (5_500_000, "5.25 MB"), (3 << 30, "3 GB")]
)
def test_sizes_in_words(count: int, said: str) -> None:
    assert bytes_in_words(count) == said


@pytest.mark.parametrize(("value", "said"), [(None, "-"), (0.0, "0"), (1.25e-7, "1.2e-07"), (1.9, "1.9")])
def test_small_numbers(value: float | None, said: str) -> None:
    assert small(value) == said


def test_labels_along_a_sequence_are_drawn_as_two_bands() -> None:
    track = {"names": ["sit", HOSTILE], "target": [[0, 5], [-1, 5]], "output": [[1, 10]], "right": 0.125}
    text = samples_html([{"target": "sit", "output": "x", "ink": None, "track": track}], metric="accuracy")
    assert text.count("<rect") == 3
    assert 'x="0.00" y="0" width="215.00"' in text
    assert 'x="0.00" y="23" width="430.00"' in text
    assert "12.5% right" in text
    assert "no label" in text
    assert HOSTILE not in text
