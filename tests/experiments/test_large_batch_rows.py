"""What is made of the runs of the experiment with large batches: rows, marks, table, picture, page and estimate."""

import dataclasses
import io
import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench.machine import machine_with
from experiments.large_batch import FACTORS, LargeBatchResult
from experiments.large_batch_applications import FULL, MINIATURE, QUICK
from experiments.large_batch_cells import Cell, CellResult, CellRule
from experiments.large_batch_courses import LeftOut, course_of
from experiments.large_batch_figure import write_large_batch_figure
from experiments.large_batch_measures import MEASURES
from experiments.large_batch_page import write_large_batch_page
from experiments.large_batch_progress import Progress
from experiments.large_batch_rows import Row, best_of, holdings, row_of
from experiments.large_batch_settings import APPLICATION_NAMES, RULES, LargeBatchSettings
from experiments.large_batch_table import large_batch_table

WITH_RULES: tuple[CellRule, ...] = ("none", "linear", "sqrt", "legw", "lamb")


def _result(
    multiple: int, rule: CellRule, test: float | None, *, seed: int = 0, application: str = "digits", **changes: Any
) -> CellResult:
    values: dict[str, Any] = {
        "key": f"{application}{multiple}{rule}{seed}",
        "application": application,
        "multiple": multiple,
        "rule": rule,
        "factor": 1.0,
        "seed": seed,
        "batch_size": 8 * multiple,
        "learning_rate": 0.1,
        "warmup_epochs": 0.1,
        "updates_per_epoch": 64 // multiple,
        "epochs": 2,
        "updates": 128 // multiple,
        "seconds": 1.0,
        "wall_seconds": 2.0,
        "diverged": test is None,
        "why": "" if test is not None else "the loss or gradient is nan",
        "valid": test,
        "test": test,
        "curve": (),
        "weights": "",
    }
    return CellResult(**(values | changes))


def _rows(values: dict[int, Sequence[float | None]], *, rule: Any = "legw", application: str = "digits") -> list[Row]:
    """The baseline, and a rule at some batches; each with a value a seed."""

    def results(multiple: int, kind: CellRule) -> list[CellResult]:
        seeds = enumerate(values[multiple])
        return [_result(multiple, kind, value, seed=seed, application=application) for seed, value in seeds]

    baseline = row_of("baseline", results(1, "baseline"), baseline=None)
    others = [row_of(rule, results(multiple, rule), baseline=baseline) for multiple in values if multiple > 1]
    return [baseline, *others]


def _put_together(rows: list[Row], cells: Sequence[CellResult] = (), **changes: Any) -> LargeBatchResult:
    course = course_of(
        rows[0].application, LargeBatchSettings(quick=True, multiples=tuple(row.multiple for row in rows))
    )
    told = dataclasses.replace(course.told(), multiples=tuple(sorted({row.multiple for row in rows})))
    values: dict[str, Any] = {
        "applications": (told,),
        "rows": tuple(rows),
        "holdings": holdings(rows),
        "cells": tuple(cells),
        "left_out": (),
        "reused": 0,
        "threads": 1,
        "machine": machine_with(()),
        "settings": {"quick": True, "full": False},
    }
    return LargeBatchResult(**(values | changes))


def _shown(result: LargeBatchResult) -> str:
    stream = io.StringIO()
    Console(file=stream, width=110).print(large_batch_table(result))
    return stream.getvalue()


@given(base=st.floats(0.2, 0.9), points=st.floats(-20.0, 10.0))
def test_a_point_of_accuracy_is_allowed_and_no_more(base: float, points: float) -> None:
    row = _rows({1: [base], 4: [base + points / 100]})[1]
    if abs(points + 1.0) > 1e-6:
        assert row.is_within == (points > -1.0)
    assert _rows({1: [base], 4: [base - 0.01]})[1].is_within


@given(base=st.floats(2.0, 500.0), share=st.floats(-0.5, 2.0))
def test_three_per_cent_of_a_perplexity_are_allowed_and_no_more(base: float, share: float) -> None:
    row = _rows({1: [base], 4: [base * (1 + share)]}, application="language-model")[1]
    if abs(share - 0.03) > 1e-6:
        assert row.is_within == (share < 0.03)


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=5))
def test_means_and_deviations_are_those_of_a_sample(values: list[float]) -> None:
    row = _rows({1: values}, application="language-model")[0]
    assert row.test == pytest.approx(np.mean(values))
    assert row.test_deviation == pytest.approx(np.std(values, ddof=1) if len(values) > 1 else 0.0, abs=1e-6)


def test_huge_perplexities_have_a_deviation() -> None:
    row = _rows({1: [1e304, 2e304, 10.0]}, application="language-model")[0]
    assert 1e303 < row.test_deviation < math.inf


def test_the_table_marks_what_is_within_a_point() -> None:
    rows = _rows({1: [0.96, 0.94], 4: [0.96, 0.93], 16: [0.9, 0.7], 64: [None, 0.9]})
    shown = _shown(_put_together(rows, left_out=(LeftOut(application="digits", multiple=256, why="too large"),)))
    line = next(line for line in shown.splitlines() if "legw" in line)
    assert "* 95.0 ± 1.4" in line
    assert "* 94.5 ± 2.1" in line
    assert "80.0 ± 14.1" in line
    assert "* 80.0" not in line
    assert "1 of 2 diverged" in line
    assert line.rstrip().endswith("-")
    assert "x256" in shown


def test_where_a_rule_stops_is_computed() -> None:
    def told(values: dict[int, Sequence[float | None]]) -> tuple[int, int | None, str]:
        found = holdings(_rows(values))[0]
        return found.holds_to, found.fails_at, found.says

    assert told({1: [0.95], 4: [0.95], 16: [0.96]}) == (16, None, "holds up to x16, the largest batch that was run")
    far, fails, says = told({1: [0.95], 4: [0.945], 16: [0.9], 64: [0.95]})
    assert (far, fails) == (4, 16)
    assert says == (
        "holds up to x4; at x16: accuracy 90.0 % against 95.0, 5.0 points worse, with 8 updates; within again at x64"
    )
    assert told({1: [0.95, 0.95], 4: [None, 0.95]})[2] == "does not hold at any batch; at x4: 1 of 2 runs diverged"
    assert "the baseline diverged" in told({1: [None], 4: [0.9]})[2]


def test_the_best_of_a_grid_is_found_among_those_that_did_not_diverge() -> None:
    grid = [
        _result(4, "sqrt", value, factor=factor) for value, factor in zip((None, 0.5, 0.7, None), FACTORS, strict=True)
    ]
    assert best_of(grid, "digits").factor == FACTORS[2]
    assert best_of(grid, "handwriting").factor == FACTORS[1]
    assert best_of([grid[0], grid[3]], "digits").factor == FACTORS[0]


def test_the_page_and_the_picture_show_text_and_never_obey_it(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    rows = _rows({1: [0.95], 4: [None]})
    cells = [_result(4, "legw", None, why=f"the loss is {bad}")]
    result = _put_together(rows, cells, left_out=(LeftOut(application="digits", multiple=16, why=bad),))
    told = dataclasses.replace(result.applications[0], data=bad, notes=(bad,))
    result = dataclasses.replace(result, applications=(told,))
    write_large_batch_page(result, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert bad not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 4
    write_large_batch_figure(result, tmp_path / "plot.svg")
    root = ET.fromstring((tmp_path / "plot.svg").read_text())
    assert len(root.findall(".//{*}path")) == 2  # One in the legend, one at the batch that diverged.


def test_values_off_the_scale_are_crosses(tmp_path: Path) -> None:
    rows = _rows({1: [20.0], 4: [25.0], 16: [1e300]}, application="language-model")
    write_large_batch_figure(_put_together(rows), tmp_path / "plot.svg")
    root = ET.fromstring((tmp_path / "plot.svg").read_text())
    assert len(root.findall(".//{*}path")) == 2
    assert len(root.findall(".//{*}circle")) == 2


def test_the_estimate_follows_what_runs_take() -> None:
    application = dataclasses.replace(QUICK["digits"], seconds=(10.0, 2.0))
    progress = Progress()
    progress.plan(application, [1, 1, 4, 4])
    assert progress.seconds_left == pytest.approx(2 * 10.0 + 2 * (2.0 + 8.0 / 4))
    cell = Cell(application=application, multiple=1, rule="baseline", seed=0)
    line = progress.line(cell, _result(1, "baseline", 0.9, wall_seconds=20.0))
    # Twice as slow as expected: so will the others be.
    assert progress.seconds_left == pytest.approx(20.0 + 2 * 8.0)
    assert "accuracy 90.0 %" in line
    assert "3 left, about 36.0 s" in line
    progress.drop(application, 4)
    assert progress.left == 1


def test_rules_and_measures_are_told_of_every_application() -> None:
    assert set(MEASURES) == set(APPLICATION_NAMES) == set(MINIATURE) == set(FULL) == set(QUICK)
    assert set(RULES) == {*WITH_RULES, "oracle"}
