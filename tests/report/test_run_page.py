"""The page of a run: every section, the numbers of the events, and runs of every state."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_pages import Elements, assert_self_contained
from run_events import Event, epoch, finished, solving, started, update

from stretto.errors import StrettoError
from stretto.extras import optional
from stretto.files import locked
from stretto.report import figures, run_page, write_run_report
from stretto.report.figures import running_mean

HOSTILE = "</script><script>alert(1)</script> \"double\" 'single'"
SECTIONS = ["Training", "Batches", "Samples", "Results", "Notes and warnings", "Settings", "Data and versions"]
PLOTS = ["loss", "metric", "time", "lengths", "padding", "shapes"]


def _whole(**changes: Any) -> list[Event]:
    return [
        started(**changes),
        *(update(number) for number in range(1, 6)),
        epoch(1),
        {"event": "checkpoint", "time": 0.0, "update": 5, "path": "checkpoints/five"},
        *(update(number) for number in range(6, 11)),
        epoch(2),
        {"event": "warning", "time": 0.0, "message": "something was odd"},
        {
            "event": "samples",
            "time": 0.0,
            "items": [
                {"target": "tone", "output": "tune", "ink": [[0, 0, 0], [1, 1, 1]]},
                {"target": "plain", "output": "plain", "ink": None},
            ],
        },
        finished(),
    ]


def _write(folder: Path, events: list[Event]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return write_run_report(folder).read_text(encoding="utf-8")


def _outside_library(text: str) -> str:
    source = optional("plotly.offline").get_plotlyjs()
    assert text.count(source) == 1
    return text.replace(source, "")


def _array(values: Any) -> list[float]:
    if isinstance(values, dict):
        values = np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"]).tolist()
    return [np.nan if value is None else value for value in values]


def _traces(text: str, name: str) -> list[dict[str, Any]]:
    after = text.split(f'Plotly.newPlot({" " * 24}"plot-{name}",')[1]
    return json.JSONDecoder().raw_decode(after.lstrip())[0]  # type: ignore[no-any-return]


def _values(text: str) -> list[str]:
    return [part.split("</div>")[0] for part in text.split('<div class="value">')[1:]]


def test_the_page_has_every_section_and_plot(tmp_path: Path) -> None:
    text = _outside_library(_write(tmp_path, _whole()))
    assert [part.split("</h2>")[0] for part in text.split("<h2>")[1:]] == SECTIONS
    for name in PLOTS:
        assert text.count(f'id="plot-{name}"') == 1
    assert "<h1>handwriting on ink</h1>" in text
    assert '<p class="state">Finished</p>' in text
    assert "started 14 November 2023, 22:13 UTC, 123,456 parameters, 2 epochs finished" in text
    assert text.count("<svg ") == 1
    assert "<dd>t<mark>u</mark>ne</dd>" in text
    assert_self_contained(text)


def test_the_headline_and_the_tables_are_the_numbers_of_the_events(tmp_path: Path) -> None:
    text = _write(tmp_path, _whole())
    assert _values(text) == ["4.32%", "12 min 35 s", "41,234", "5.2%", "1.8x fewer"]
    assert "shuffled batches: 43.7%" in text
    second = ["2", "10", "0.6250", "0.7500", "16.09%", "2.500", "7.89%"]
    assert "".join(f"<td>{cell}</td>" for cell in second) in text
    rows = {
        "character error rate": "4.32%",
        "character error rate, beam": "4.11%",
        "loss": "0.2345",
        "train sequences": "4,321",
        "test sequences": "431",
        "steps in all": "987,654",
        "features": "3",
        "parameters": "123,456",
        "torch": "9.8.7",
        "largest batch, in padded steps": "160",
        "distinct shapes": "7",
        "learning_rate": "0.005",
        "max_padded_steps": "not set",
        "num_buckets": "auto",
    }
    for name, value in rows.items():
        assert f"<tr><th>{name}</th><td>{value}</td></tr>" in text
    for line in ("a split was drawn", "Warning: something was odd", "is checkpoints/five."):
        assert f"{line}</li>" in text


def test_the_plots_are_the_numbers_of_the_events(tmp_path: Path) -> None:
    text = _write(tmp_path, _whole())
    by_update, smooth, by_epoch, validation = _traces(text, "loss")
    assert smooth["name"] == "train, mean of 5 updates"
    np.testing.assert_allclose(_array(smooth["y"])[-1], sum(4.0 / k for k in range(6, 11)) / 5)
    np.testing.assert_allclose(_array(by_update["y"]), [4.0 / k for k in range(1, 11)])
    np.testing.assert_allclose(_array(by_epoch["x"]), [2.5, 7.5])
    np.testing.assert_allclose(_array(by_epoch["y"]), [1.25, 0.625])
    np.testing.assert_allclose(_array(validation["x"]), [5, 10])
    np.testing.assert_allclose(_array(validation["y"]), [1.5, 0.75])
    (metric,) = _traces(text, "metric")
    np.testing.assert_allclose(_array(metric["y"]), [0.3217, 0.3217 / 2])
    padding, together, shuffled = _traces(text, "padding")
    padded = np.array([80.0 if k % 2 else 160.0 for k in range(1, 11)])
    np.testing.assert_allclose(_array(padding["y"]), np.arange(1, 11) / padded)
    np.testing.assert_allclose(_array(together["y"])[-1], sum(range(6, 11)) / padded[5:].sum())
    assert _array(shuffled["y"]) == [0.437, 0.437]
    (shapes,) = _traces(text, "shapes")
    np.testing.assert_allclose(_array(shapes["x"]), padded / 4)
    np.testing.assert_allclose(_array(shapes["marker"]["color"]), [1, 2] * 5)
    (lengths,) = _traces(text, "lengths")
    assert _array(lengths["y"]) == [1, 20, 30, 4]
    assert _array(lengths["x"]) == [5.5, 15.5, 25.5, 35.5]


def test_only_updates_with_nothing_between_are_timed(tmp_path: Path) -> None:
    (time,) = _traces(_write(tmp_path, _whole()), "time")
    # Updates 1 and 6 begin an epoch; after them come four each whose predecessor is recorded.
    np.testing.assert_allclose(_array(time["y"]), [500.0] * 8)
    events = [started(), *(update(number) for number in (1, 2, 4, 5))]
    events.insert(4, {"event": "checkpoint", "time": 0.0, "update": 4, "path": "x"})
    (time,) = _traces(_write(tmp_path / "gaps", events), "time")
    assert len(_array(time["y"])) == 1


def test_a_slow_update_beyond_the_frame_is_mentioned(tmp_path: Path) -> None:
    updates = [
        update(number, epoch=0, seconds=number * 0.5 + (500 if number == 300 else 0)) for number in range(1, 301)
    ]
    assert "1 slower update lies above the frame." in _write(tmp_path, [started(), *updates])


def test_many_updates_are_thinned_and_the_caption_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MAX_POINTS", 50)
    text = _write(tmp_path, [started(), *(update(number, epoch=0) for number in range(1, 301))])
    assert "50 of 300 updates are drawn, evenly spaced" in text
    drawn = _array(_traces(text, "loss")[0]["x"])
    assert len(drawn) == 50
    assert (drawn[0], drawn[-1]) == (1, 300)


def test_hostile_words_come_out_escaped_everywhere(tmp_path: Path) -> None:
    events = [
        started(
            task=HOSTILE,
            settings={HOSTILE: HOSTILE, "list": [HOSTILE]},
            data={"name": HOSTILE, "sequences": {HOSTILE: 1}, "steps": 1, "features": 1, "notes": [HOSTILE]},
            versions={HOSTILE: HOSTILE},
            report={"batches": HOSTILE},
        ),
        *(update(number) for number in range(1, 6)),
        epoch(1, metric=HOSTILE, solving=solving(reason=HOSTILE, solver=HOSTILE)),
        {"event": "checkpoint", "time": 0.0, "update": 5, "path": HOSTILE},
        {"event": "warning", "time": 0.0, "message": HOSTILE},
        {"event": "samples", "time": 0.0, "items": [{"target": HOSTILE, "output": HOSTILE, "ink": [[0, 0, 1]]}]},
        {"event": "finished", "time": 0.0, "metrics": {HOSTILE: 0.5}, "epochs": 1, "seconds": 1.0},
    ]
    text = _outside_library(_write(tmp_path / "a<b>'c", events))
    assert "alert(1)</script>" not in text
    assert "<script>alert" not in text
    found, plain = Elements(text), Elements(_outside_library(_write(tmp_path / "plain", _whole())))
    assert plain.tags.count("script") == 1 + len(PLOTS)
    assert found.tags.count("script") == 1 + len([*PLOTS, "residual"])
    assert set(found.tags) <= set(plain.tags)
    assert {name for name, _ in found.attributes} <= {name for name, _ in plain.attributes}
    assert "a&lt;b&gt;&#x27;c" in text
    # The plots hold the metric's name escaped for HTML, since the plotting library reads some tags of its own.
    assert "&lt;\\u002fscript&gt;" in text


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    text = _write(tmp_path, [started()])
    assert '<p class="state open">Not finished: no update is recorded yet</p>' in text
    assert _values(text) == ["6.1%", "1.8x fewer"]
    assert "planned; shuffled batches: 43.7%" in text
    assert 'id="plot-lengths"' in text
    assert 'id="plot-loss"' not in text
    assert "No update has been recorded yet." in text


def test_a_record_without_events(tmp_path: Path) -> None:
    text = _outside_library(_write(tmp_path, []))
    assert [part.split("</h2>")[0] for part in text.split("<h2>")[1:]] == SECTIONS
    assert "Not finished: no update is recorded yet" in text
    assert "plotly-graph-div" not in text


def test_a_run_that_is_under_way(tmp_path: Path) -> None:
    text = _write(tmp_path, _whole()[:9])
    assert "Not finished: the last recorded update is 6" in text
    with locked(tmp_path):
        assert '<p class="state">Training: epoch 2 of 2, update 6</p>' in run_page(tmp_path)
    assert _values(text) == ["32.17%", "3.0 s", "1,111", f"{21 / 720:.1%}", "1.8x fewer"]
    assert "on the validation sequences, after epoch 1" in text
    assert "No test sequence has been recorded with its output yet." in text


def test_an_interrupted_run(tmp_path: Path) -> None:
    text = _write(tmp_path, [*_whole()[:9], {"event": "interrupted", "time": 0.0, "update": 1234}])
    assert '<p class="state open">Interrupted at update 1,234:' in text
    assert "<li>Interrupted at update 1,234.</li>" in text


def test_a_resumed_run_is_no_longer_interrupted(tmp_path: Path) -> None:
    events = _whole()
    events[8:8] = [
        {"event": "interrupted", "time": 0.0, "update": 5},
        {"event": "resumed", "time": 0.0, "update": 5, "epoch": 1},
    ]
    text = _write(tmp_path, events)
    assert '<p class="state">Finished</p>' in text
    assert "<li>Resumed at update 5.</li>" in text
    assert "Interrupted" not in _outside_library(text)


def test_an_end_before_the_last_resumption_does_not_count(tmp_path: Path) -> None:
    events = [*_whole(), {"event": "resumed", "time": 0.0, "update": 10, "epoch": 2}, update(11)]
    text = _write(tmp_path, events)
    assert "Not finished: the last recorded update is 11" in text
    assert _values(text)[0] == "16.09%"


def test_more_padded_steps_than_shuffled_are_shown_as_such(tmp_path: Path) -> None:
    assert _values(_write(tmp_path, [started(padded_steps_ratio=0.8)]))[-1] == "1.2x more"


def test_losses_that_are_missing_are_not_drawn(tmp_path: Path) -> None:
    updates = [update(1), update(2, loss=None), update(3)]
    loss = _array(_traces(_write(tmp_path, [started(), *updates, epoch(1, valid_loss=None)]), "loss")[0]["y"])
    assert np.isnan(loss).tolist() == [False, True, False]


def test_an_event_of_another_form_is_an_error_that_names_the_run(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"some-run.*event of another form"):
        _write(tmp_path / "some-run", [started(), update(1, loss="much")])
    assert not (tmp_path / "some-run" / "report.html").exists()


def test_a_running_mean_is_over_what_came_before() -> None:
    means = running_mean(np.array([2.0, 4.0, np.nan, 6.0]), window=2)
    np.testing.assert_allclose(means, [2.0, 3.0, 4.0, 6.0])
    assert np.isnan(running_mean(np.array([np.nan, 1.0]), window=1)[0])


def _solved(folder: Path, *epochs: Event, updates: int = 0) -> str:
    """The section on the solver, of a run with these epochs."""
    events = [started(), *(update(number, residual=0.01 * number) for number in range(1, updates + 1))]
    events += [epoch(number, solving=of_epoch) for number, of_epoch in enumerate(epochs, start=1)]
    return _write(folder, events).partition("<h2>Parallel in time</h2>")[2].partition("</section>")[0]


def test_the_solver_has_words_a_plot_and_numbers(tmp_path: Path) -> None:
    text = _solved(tmp_path, solving(), solving(residual_mean=0.0077), updates=10)
    assert "Approximate." in text
    assert "plot-residual" in text
    for shown in ("0.012", "0.0077", "0.46", "0.79", "4 chunks of 50 steps", "3 MB"):
        assert shown in text, shown


@pytest.mark.parametrize("solver", ["shooting", "auto"])
def test_exact_solvers_are_called_exact_and_have_no_residual_to_draw(tmp_path: Path, solver: str) -> None:
    text = _solved(tmp_path, solving(solver=solver, residual_mean=0.0, residual_max=0.0, cache_bytes=None, fell_back=3))
    assert "Exact within the tolerance" in text
    assert "Approximate" not in text
    assert "plot-residual" not in text
    assert "memory" not in text
    assert "<td>3</td>" in text


def test_exact_epochs_at_the_end_do_not_hide_what_came_before(tmp_path: Path) -> None:
    exact = {"residual_mean": 0.0, "residual_max": 0.0, "backward_residual_mean": None, "cache_bytes": 0, "reason": ""}
    text = _solved(tmp_path, solving(), solving(exact=True, **exact))
    assert "3 MB" in text
    assert "<td>exact</td><td>exact</td><td>-</td>" in text
    assert "4 chunks of 50 steps" in text


def test_residuals_over_many_powers_of_ten_are_drawn(tmp_path: Path) -> None:
    assert "plot-residual" in _solved(tmp_path, *(solving(residual_mean=10.0**-number) for number in range(1, 9)))
