"""The benchmark of the engine: its meter, its runs, the arithmetic and the page. No time is ever judged.

Shape legend: N sequences.
"""

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import tuner_overhead, tuner_run
from bench.machine import machine_with
from bench.tuner import TASK_NAMES, TunerBench, TunerBenchSettings, run_tuner_bench
from bench.tuner_cases import CASES, Case, cut_data, made_task
from bench.tuner_grid import Grid, median_to_target, run_grid
from bench.tuner_many import WORKERS, decisions_with, exchange_seconds, many_workers, time_shares
from bench.tuner_noise import (
    AGE,
    ALONG,
    NoiseAlong,
    filled,
    moved,
    noise_along,
    predicted_updates,
    quadratic_row,
)
from bench.tuner_overhead import Overhead, measure_overhead
from bench.tuner_page import write_tuner_page
from bench.tuner_run import Aim, Run, run_to_target
from bench.tuner_tables import bench_tables, tables, within_text
from stretto.cli.main import main
from stretto.data import SequenceSet
from stretto.errors import StrettoError
from stretto.large_batch import ThroughputTable, choose_batch
from stretto.training import AbstractTask, BatchTuning, SilentLog, Trainer, batch_tuning, evaluate

scales = st.floats(0.0, 1e5)
SMALL = dataclasses.replace(
    CASES["digits"].quick,
    settings={"hidden_size": 8, "row_size": 64, "optimizer": "momentum", "learning_rate": 0.03, "backend": "torch"},
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Small nets are faster so, and the machine may be shared."""
    earlier = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(earlier)


@pytest.fixture(scope="module")
def digits() -> SequenceSet:
    data, note = cut_data("digits", SMALL, folder=None)
    assert not note
    return data


def _task(data: SequenceSet, *, batch_size: Any = 4, case: Case = SMALL, seed: int = 0) -> AbstractTask[Any]:
    return made_task("digits", case, data, batch_size=batch_size, seed=seed)


def _run(seconds: float, updates: int, *, batch: int = 8, reached: bool = True, probe: float = 0.0) -> Run:
    return Run(
        first_batch=8,
        last_batch=batch,
        is_reached=reached,
        updates=updates,
        seconds=seconds,
        probe_seconds=probe,
    )


def _grid(**changes: Any) -> Grid:
    values: dict[str, Any] = {
        "task": "digits",
        "data": "drawn",
        "sequences": 100,
        "base_batch_size": 8,
        "loss": 0.3,
        "given": {
            8: (_run(4.0, 1000), _run(5.0, 1200), _run(6.0, 1100)),
            16: (_run(4.2, 600), _run(4.4, 700), _run(9.0, 610)),
            32: (_run(8.0, 400), _run(1.0, 9, reached=False), _run(1.0, 9, reached=False)),
        },
        "auto": tuple(_run(4.8, 1000, batch=batch, probe=0.5) for batch in (8, 16, 16)),
        "noise": (NoiseAlong(batch_size=8, scales=(40.0,), trace=1.0, square=1.0),) * 3,
    }
    return Grid(**{**values, **changes})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("parts", [2, 5])
def test_the_meter_finds_the_noise_of_a_quadratic(parts: int, dtype: torch.dtype) -> None:
    row = quadratic_row(dimension=200, parts=parts, dtype=dtype, updates=1200 // parts)
    assert row.true == pytest.approx(20.0, rel=1e-5)
    assert abs(row.error) < 0.1
    assert row.error == pytest.approx(row.measured / row.true - 1)


@given(updates=st.integers(1, 10**6), phi=scales, base=st.integers(1, 512), multiple=st.integers(1, 64))
def test_predicted_updates_lie_between_no_gain_and_all_of_it(
    updates: int, phi: float, base: int, multiple: int
) -> None:
    found = predicted_updates(updates, noise_scale=phi, base_batch_size=base, batch_size=base * multiple)
    assert updates / multiple * (1 - 1e-9) <= found <= updates * (1 + 1e-9)
    table = ThroughputTable.of({base: 1.0, base * multiple: 1.0})
    rows = choose_batch(table, noise_scale=phi, base_batch_size=base).candidates
    (row,) = [row for row in rows if row.batch_size == base * multiple]
    assert found == pytest.approx(updates * row.updates_ratio)


@given(values=st.lists(scales, min_size=1, max_size=30), base=st.integers(1, 512), multiple=st.sampled_from([1, 2, 16]))
def test_the_mean_over_progress_predicts_what_the_updates_one_by_one_do(
    values: list[float], base: int, multiple: int
) -> None:
    along = NoiseAlong(batch_size=base, scales=tuple(values), trace=1.0, square=1.0)
    large = base * multiple
    expected = math.fsum((1 + phi / large) / (1 + phi / base) for phi in values)
    found = predicted_updates(len(values), noise_scale=along.mean, base_batch_size=base, batch_size=large)
    assert found == pytest.approx(expected)
    assert min(values) * (1 - 1e-9) <= along.mean <= max(values) * (1 + 1e-9)


def test_the_mean_is_harmonic_where_noise_is_large_and_plain_where_it_is_small() -> None:
    loud = NoiseAlong(batch_size=1, scales=(1e6, 3e6), trace=1.0, square=1.0)
    calm = dataclasses.replace(loud, scales=(1e-6, 3e-6))
    assert loud.mean == pytest.approx(1.5e6, rel=1e-4)
    assert calm.mean == pytest.approx(2e-6, rel=1e-4)
    assert loud.until(1).scales == (1e6,)


@given(known=st.lists(st.none() | scales, max_size=20))
def test_what_is_not_known_is_what_was_known_last(known: list[float | None]) -> None:
    found = filled(known)
    if all(value is None for value in known):
        assert found == ()
        return
    assert len(found) == len(known)
    for at, value in enumerate(known):
        before = [each for each in known[: at + 1] if each is not None]
        first = next(each for each in known if each is not None)
        assert found[at] == (before[-1] if before else first) == (found[at] if value is None else value)


def test_a_run_ends_with_the_measurement_that_reaches_the_target(digits: SequenceSet) -> None:
    run = run_to_target(_task(digits), Aim(loss=math.inf, every=12))
    assert run.is_reached
    # Three measurements, one after every three updates of four.
    assert [point.updates for point in run.points] == [3, 6, 9]
    assert run.updates == 9
    assert (run.first_batch, run.last_batch, run.table, run.decisions) == (4, 4, None, ())
    assert 0 < run.points[0].seconds < run.points[-1].seconds == run.seconds


def test_a_run_without_end_is_that_of_the_loop_however_often_it_is_measured(
    digits: SequenceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner_run, "SMOOTHED", 1)
    task = _task(digits, case=dataclasses.replace(SMALL, settings={**SMALL.settings, "dropout": 0.3}))
    run = run_to_target(task, Aim(loss=-1.0, every=4))
    assert not run.is_reached
    assert [point.updates for point in run.points] == [*range(1, SMALL.epochs * 40 + 1)]
    trainer = Trainer(task, run=tmp_path, log=SilentLog(), resume=False)
    losses = [trainer.train_epoch().valid_loss for _ in range(SMALL.epochs)]
    assert [point.loss for point in run.points[39::40]] == losses


def test_measuring_is_not_counted(digits: SequenceSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return evaluate(*args, **kwargs)

    monkeypatch.setattr("bench.tuner_run.evaluate", slow)
    begun = time.perf_counter()
    run = run_to_target(_task(digits), Aim(loss=math.inf, every=4))
    assert run.updates == 3
    assert run.seconds + 3 * 0.5 <= time.perf_counter() - begun


def test_a_run_that_chooses_tells_its_probe_apart(digits: SequenceSet) -> None:
    run = run_to_target(_task(digits, batch_size="auto"), Aim(loss=-1.0, every=40))
    assert run.table is not None
    assert ThroughputTable.from_dict(run.table).batch_sizes[0] == 4
    assert run.probe_seconds > 0
    assert len(run.decisions) == SMALL.epochs - 1
    assert run.decisions[0][1] in (4, 8, 16)


def test_a_run_that_diverges_is_not_reached_and_says_why(digits: SequenceSet) -> None:
    case = dataclasses.replace(SMALL, settings={**SMALL.settings, "learning_rate": 1e38, "clip_norm": 1e30})
    run = run_to_target(_task(digits, case=case), Aim(loss=-1.0, every=4))
    assert not run.is_reached
    assert run.fault


def test_noise_is_measured_in_every_update_of_the_run_that_is_given(
    digits: SequenceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, looked = _task(digits), _task(digits)
    losses: dict[str, list[float]] = {"given": [], "noise": []}
    for name, each in (("given", task), ("noise", looked)):
        loss = each.loss

        def noted(output: torch.Tensor, batch: Any, *, loss: Any = loss, kept: list[float] = losses[name]) -> Any:
            found = loss(output, batch)
            if torch.is_grad_enabled():
                kept.append(float(found.total.detach()))
            return found

        monkeypatch.setattr(each, "loss", noted)
    run_to_target(task, Aim(loss=-1.0, every=10_000))
    along = noise_along(looked, updates=70)
    assert along is not None
    assert len(along.scales) == 70
    assert along.batch_size == 4
    assert along.trace > 0
    # Two halves an update; and some updates more, since averages are older than what they are taken for.
    halves = np.array(losses["noise"]).reshape(70 + AGE, 2).sum(axis=1)
    np.testing.assert_allclose(halves, losses["given"][: 70 + AGE], rtol=1e-4)


def test_averages_that_lag_are_moved_to_where_they_belong() -> None:
    """What rises by one an update is told as it is, but at the ends, by an average that lags by its age."""
    keep, average, truth = 1 - 1 / ALONG, 0.0, np.arange(3000.0)
    told = [average := keep * average + (1 - keep) * value for value in truth]
    np.testing.assert_allclose(moved(tuple(told), by=AGE)[500:-AGE], truth[500:-AGE], rtol=1e-3)
    assert moved((1.0, 2.0, 3.0), by=2) == (3.0, 3.0, 3.0)
    assert moved((1.0, 2.0), by=5) == (2.0, 2.0)
    assert moved((), by=5) == ()


def test_a_grid_compares_the_medians() -> None:
    grid = _grid()
    assert (grid.seconds(8), grid.seconds(16), grid.seconds(32)) == (5.0, 4.4, math.inf)
    assert (grid.best, grid.chosen, grid.has_grown) == (16, 16, True)
    assert grid.batch_ratio == 1.0
    assert grid.run_ratio == pytest.approx(4.8 / 4.4)
    assert grid.probe_seconds == 0.5
    assert grid.is_within
    assert median_to_target(grid.given[8], "updates") == 1100
    first, second = grid.steps
    assert first.predicted == pytest.approx(1100 * (1 + 40 / 16) / (1 + 40 / 8))
    assert (first.observed, first.is_within) == (610, True)
    assert (second.observed, second.is_within) == (math.inf, False)


def test_a_batch_that_is_too_slow_or_never_arrives_is_not_within() -> None:
    stays = _grid(auto=(_run(5.0, 1000, batch=8),) * 3)
    assert stays.batch_ratio == pytest.approx(5.0 / 4.4)
    assert not stays.is_within
    beyond = _grid(auto=(_run(4.6, 100, batch=64),) * 3)
    assert beyond.batch_ratio is None
    assert beyond.is_within
    nothing = _grid(given={8: (_run(1.0, 10, reached=False),)}, auto=(_run(1.0, 10, reached=False),))
    assert not nothing.is_within
    assert math.isnan(nothing.run_ratio)
    hidden = _grid(noise=(None,) * 3)
    assert (hidden.noise_scale, hidden.steps) == (None, ())


def test_many_workers_grow_where_one_stays() -> None:
    # One worker's time is linear in its share: alone, nothing is gained by growing.
    table = ThroughputTable.of({size: 1e-4 + 1e-3 * size for size in (1, 2, 4, 8, 16, 32, 64)})
    found = many_workers("digits", table, noise_scale=300.0, base_batch_size=16, best=64, num_bytes=400_000)
    for decisions, size in ((found.alone, 16), (found.from_best, 64)):
        assert [(growth.action, growth.batch_size) for growth in decisions] == [("keep", size)]
    sizes = [growth.batch_size for growth in found.many]
    assert sizes == sorted(sizes)
    assert sizes[0] == 64
    assert found.many[-1].action == "keep"
    assert found.gain > 1.0
    last, first = (
        (1 + 300.0 / size) * (table.seconds(max(1, size // WORKERS)) + found.exchange_seconds)
        for size in (sizes[-1], 16)
    )
    assert found.gain == pytest.approx(first / last - 1)
    calm = decisions_with(table, noise_scale=0.0, base_batch_size=16, workers=WORKERS, exchange=1e-3)
    assert [growth.action for growth in calm] == ["keep"]


@given(num_bytes=st.integers(1, 10**9))
def test_an_exchange_takes_longer_the_more_share_it(num_bytes: int) -> None:
    times = [exchange_seconds(num_bytes, workers=workers) for workers in (1, 2, 8, 64)]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] >= 1.9 * num_bytes / 1.25e9


def test_shares_of_one_worker_are_timed_without_a_trace(digits: SequenceSet) -> None:
    before = torch.get_rng_state()
    table = time_shares(_task(digits))
    assert table.batch_sizes == (1, 2, 4, 8, 16, 32, 64, 128)
    assert torch.equal(torch.get_rng_state(), before)


def test_watched_updates_keep_their_batch_and_all_is_measured(
    digits: SequenceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner_overhead, "BLOCK", 60)
    monkeypatch.setattr(batch_tuning, "NOISE_EVERY", ((math.inf, 2),))
    monkeypatch.setattr(batch_tuning, "CURVATURE_EVERY", 60)
    decided, curved = [], []
    decide, curvature = BatchTuning.decide, BatchTuning._curvature

    def noted(self: BatchTuning, epoch: int, *, clipped: float) -> Any:
        decided.append(decide(self, epoch, clipped=clipped))
        return decided[-1]

    def looked(self: BatchTuning, batch: Any) -> float | None:
        curved.append(curvature(self, batch))
        return curved[-1]

    monkeypatch.setattr(BatchTuning, "decide", noted)
    monkeypatch.setattr(BatchTuning, "_curvature", looked)
    case = dataclasses.replace(SMALL, epochs=10)
    found = measure_overhead(_task(digits, case=case), _task(digits, case=case, batch_size="auto"), turns=2)
    assert len(found.given) == len(found.watched) == 2
    assert found.batch_size == 4
    assert [decision.action for decision in decided] == ["keep"] * len(decided)
    assert decided[-1].noise_scale is not None
    assert len(curved) == 5 * 60
    assert sum(value is not None for value in curved) == 5


@settings(max_examples=20)
@given(pairs=st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=9))
def test_overhead_is_of_neighbours(pairs: list[tuple[float, float]]) -> None:
    theirs, ours = zip(*pairs, strict=True)
    found = Overhead(task="digits", batch_size=4, given=theirs, watched=ours, first=0.0)
    assert found.share == pytest.approx(float(np.median(np.array(ours) / np.array(theirs))) - 1)


def _bench(grids: tuple[Grid, ...]) -> TunerBench:
    table = ThroughputTable.of({1: 1e-3, 2: 2e-3, 4: 4e-3})
    return TunerBench(
        quadratics=(quadratic_row(dimension=3, parts=2, dtype=torch.float64, updates=4),),
        grids=grids,
        many=(many_workers("digits", table, noise_scale=99.0, base_batch_size=8, best=16, num_bytes=8),),
        overheads=(Overhead(task="digits", batch_size=8, given=(1.0,), watched=(1.02,), first=0.3),),
        threads=1,
        machine=machine_with([]),
        settings={},
        missing=("a word",),
        seconds=1.0,
    )


def test_failures_are_shown_as_they_are(tmp_path: Path) -> None:
    lost = _grid(task="language-model", given={8: (_run(1.0, 10, reached=False),) * 3})
    bench = _bench((_grid(), lost))
    assert within_text(bench) == "1 of 2 tasks within 10%; not language-model"
    titles = {table.title: table for table in bench_tables(bench)}
    (choices, *_) = bench_tables(bench)
    assert choices.rows[0][-1] == "yes"
    assert choices.rows[1][2:3] == ("8: not reached",)
    assert choices.rows[1][-1] == "no"
    for table in titles.values():
        assert all(len(row) == len(table.headings) for row in table.rows)
    assert len(tables(bench)) == 6
    write_tuner_page(bench, tmp_path / "tuner.html")
    text = (tmp_path / "tuner.html").read_text(encoding="utf-8")
    assert "1 of 2 tasks within 10%" in text
    assert "plot-times-digits" in text
    assert "a word" in text
    content = json.loads(bench.to_json())
    assert content["followed"][1]["run_ratio"] is None
    assert content["followed"][0]["batch_ratio"] == 1.0
    assert content["overheads"][0]["share"] == pytest.approx(0.02)


def test_a_grid_runs_all_of_it_in_turn(digits: SequenceSet) -> None:
    told: list[str] = []
    grid = run_grid("digits", SMALL, digits, multiples=(1, 2), seeds=2, rounds=1, tell=told.append)
    assert {size: [run.first_batch for run in runs] for size, runs in grid.given.items()} == {4: [4, 4], 8: [8, 8]}
    assert len(grid.auto) == len(grid.noise) == 2
    order = [line.rpartition(" ")[2] for line in told if "batch" in line]
    assert order == ["4", "8", "auto", "8", "auto", "4"]
    along = grid.noise[0]
    assert along is not None
    assert len(along.scales) == grid.given[4][0].updates


def test_the_rate_of_a_batch_follows_from_the_first(digits: SequenceSet) -> None:
    config = _task(digits, batch_size=16).config
    assert (config.base_batch_size, config.batch_size, config.rule) == (4, 16, "legw")
    assert config.learning_rate == SMALL.settings["learning_rate"]


def test_a_part_of_the_data_is_used(tmp_path: Path) -> None:
    case = dataclasses.replace(SMALL, sequences=50, measured=7)
    data, note = cut_data("digits", case, folder=tmp_path)
    assert (len(data.part("train")), len(data.part("valid"))) == (50, 7)
    assert "has no mnist" in note
    # The target of the text is one of the embedded text.
    text, note = cut_data("language-model", CASES["language-model"].quick, folder=tmp_path)
    assert (text.name, note) == ("made-text", "")
    with pytest.raises(StrettoError, match="there is no folder"):
        cut_data("digits", case, folder=tmp_path / "nowhere")


@pytest.mark.parametrize("tasks", [(), ("digits", "digits")])
def test_tasks_are_named_once(tasks: Any) -> None:
    with pytest.raises(StrettoError, match="the tasks to train are"):
        run_tuner_bench(TunerBenchSettings(tasks=tasks), tell=print)


def test_every_task_has_a_case_that_leaves_the_engine_room() -> None:
    assert set(CASES) == set(TASK_NAMES)
    for case in CASES.values():
        # Ten updates an epoch at 16 times the first batch, a hundred until the end.
        assert case.sequences >= 10 * 16 * case.base_batch_size
        assert case.sequences * case.epochs >= 100 * 16 * case.base_batch_size


def test_the_command_line_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], quick_compiler: None) -> None:
    words = ["bench", "tuner", "--quick", "--tasks", "language-model", "--out", str(tmp_path)]
    assert main([*words, "--json", str(tmp_path / "own.json")]) == 0
    shown = capsys.readouterr().out
    assert "The batch that the engine chose" in shown
    assert "language-model" in shown
    assert (tmp_path / "tuner.html").exists()
    own, other = (json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8")) for name in ("own", "tuner"))
    assert own == other
    assert own["grids"][0]["auto"][0]["is_reached"]
