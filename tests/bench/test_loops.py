"""The benchmark of people's own cells in small: parity first, a row for each, and what ran. No time is judged."""

from typing import Any

import pytest
from bench_reports import column, measure

from bench import loops
from stretto.errors import StrettoError


def test_every_cell_gives_a_row_and_is_compiled(quick_compiler: None) -> None:
    report = measure("loops", "--only", "loops,layers")
    tables = report.tables
    assert [tuple(table.columns) for table in tables] == [loops.COLUMNS] * 2
    names = [case.name for case in loops.CASES]
    assert column(tables, "cell") == [*names, "nn.LSTM, resets", "nn.LSTM, resets"]
    assert set(column(tables, "backend")) == {"cpp", None}
    assert all(0 <= error <= 1e-4 for error in column(tables, "error"))
    for ratio, theirs, ours in zip(*(column(tables, name) for name in ("ratio", "loop ms", "ours ms")), strict=True):
        assert ratio == pytest.approx(theirs / ours)
    for ratio, goal, met in zip(*(column(tables, name) for name in ("ratio", "goal", "met")), strict=True):
        assert met == (ratio >= goal)


def test_steps_and_first_calls_give_rows() -> None:
    report = measure("loops", "--only", "step,first")
    step, first = report.tables
    found = list(zip(column([step], "ours"), column([step], "beside"), column([step], "gradients"), strict=True))
    lstm = [("accelerate", "nn.LSTM", False), ("accelerate", "nn.LSTM", True)]
    assert found == [(ours, "nn.GRU", recorded) for ours, _, recorded in [("step", "", False), *lstm]] + lstm
    assert column([step], "error")[1:] == [0.0] * 4  # the same operator
    assert column([first], "cell") == ["GRU", "300 nodes"]
    assert column([first], "backend") == ["cpp", "cpp"]
    assert all(seconds > 0 for seconds in column([first], "cold s"))


@pytest.mark.usefixtures("quick_compiler")
def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = loops.stretto.scan

    def wrong(*args: Any, **options: Any) -> Any:
        state, ys = right(*args, **options)
        return state, 1.001 * ys

    monkeypatch.setattr(loops.stretto, "scan", wrong)
    with pytest.raises(StrettoError, match=r"CfC by scan differs from the loop"):
        measure("loops", "--only", "loops", "--cells", "CfC")


def test_parts_are_checked() -> None:
    with pytest.raises(StrettoError, match=r"speed.*loops"):
        measure("loops", "--only", "speed")
