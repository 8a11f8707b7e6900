"""The benchmark of the tuner: runs end at their target, and a grid compares medians."""

import dataclasses
import math
from typing import Any

import pytest
from bench_reports import column, measure

from bench.tuner import (
    CASES,
    Case,
    Grid,
    Run,
    TunerSettings,
    cut_data,
    make_task,
    median_to_target,
    run_grid,
    run_to_target,
)
from stretto.data import SequenceSet
from stretto.training import AbstractTask

SMALL = dataclasses.replace(
    CASES["digits"].quick,
    settings={"hidden_size": 8, "row_size": 64, "optimizer": "momentum", "learning_rate": 0.03, "backend": "torch"},
)


@pytest.fixture(scope="module")
def digits() -> SequenceSet:
    return cut_data("digits", SMALL, folder=None)


def _task(data: SequenceSet, *, batch_size: Any = 4, case: Case = SMALL) -> AbstractTask[Any]:
    return make_task("digits", case, data, batch_size=batch_size, seed=0)


def _run(seconds: float, updates: int, *, batch: int = 8, reached: bool = True, probe: float = 0.0) -> Run:
    return Run(last_batch=batch, is_reached=reached, updates=updates, seconds=seconds, probe_seconds=probe)


GIVEN = {
    8: (_run(4.0, 1000), _run(5.0, 1200), _run(6.0, 1100)),
    16: (_run(4.2, 600), _run(4.4, 700), _run(9.0, 610)),
    32: (_run(8.0, 400), _run(1.0, 9, reached=False), _run(1.0, 9, reached=False)),
}


def test_a_run_ends_with_the_measurement_that_reaches_the_target(digits: SequenceSet) -> None:
    run = run_to_target(_task(digits), target=math.inf, every=12)
    assert run.is_reached
    # Three measurements, one after every three updates of four.
    assert (run.updates, run.last_batch) == (9, 4)
    assert run.seconds > 0


def test_a_run_that_chooses_its_batch_counts_its_probe_separately(digits: SequenceSet) -> None:
    run = run_to_target(_task(digits, batch_size="auto"), target=-1.0, every=40)
    assert run.probe_seconds > 0
    assert run.last_batch >= 4


def test_a_run_that_diverges_says_why(digits: SequenceSet) -> None:
    case = dataclasses.replace(SMALL, settings={**SMALL.settings, "learning_rate": 1e38, "clip_norm": 1e30})
    run = run_to_target(_task(digits, case=case), target=-1.0, every=4)
    assert not run.is_reached
    assert run.fault


def test_a_grid_compares_medians() -> None:
    grid = Grid(given=GIVEN, tuned=tuple(_run(4.8, 1000, batch=batch, probe=0.48) for batch in (8, 16, 16)))
    assert [grid.seconds(size) for size in GIVEN] == [5.0, 4.4, math.inf]
    assert (grid.best, grid.chosen, grid.batch_ratio) == (16, 16, 1.0)
    assert grid.run_ratio == pytest.approx(4.8 / 4.4)
    assert grid.overhead == pytest.approx(10.0)
    assert median_to_target(GIVEN[8], "updates") == 1100
    beyond = Grid(given=GIVEN, tuned=(_run(4.6, 100, batch=64),) * 3)
    assert beyond.batch_ratio is None
    assert beyond.chosen_ratio == pytest.approx(4.6 / 4.4)


def test_a_grid_runs_all_batches_in_turn(digits: SequenceSet) -> None:
    lines: list[str] = []
    settings = TunerSettings(seeds=2)
    grid = run_grid("digits", SMALL, digits, (1, 2), settings, progress=lines.append)
    assert {size: len(runs) for size, runs in grid.given.items()} == {4: 2, 8: 2}
    assert [line.rpartition(" ")[2] for line in lines] == ["4", "8", "auto", "8", "auto", "4"]


def test_a_whole_run(quick_compiler: None) -> None:
    report = measure("tuner", "--tasks", "language-model")
    assert column(report.tables, "task, base batch") == ["language-model, 4"]
    assert column(report.tables, "overhead %")[0] > 0
