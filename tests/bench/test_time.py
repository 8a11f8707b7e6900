"""The benchmark of solvers in small: what claims to be exact is checked, and nets forget as they should."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_reports import column, measure

from bench import time_parallel, time_ranks
from bench.contenders import Shape, draw_batch, loop_contender
from bench.harness import Report
from bench.time_parallel import (
    SERIAL,
    TORCH,
    check_exact,
    initial_case,
    shrink_until_forgetting,
    slow_down_while_forgetting,
)
from bench.trained_nets import measure_memory
from stretto.cells import GRU
from stretto.data import SequenceSet, make_regimes, write_npz
from stretto.errors import StrettoError
from stretto.solvers import Shooting


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "regimes.npz"
    write_npz(path, make_regimes(num_train=8, median_length=60, mean_stay=20))
    return path


@pytest.fixture(scope="module")
def quick(recorded: Path, quick_compiler: None) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        # JAX has threads, and the ranks are forked.
        patch.setattr(time_parallel, "missing_peers", lambda: {"JAX scan": "left out"})
        return measure("time", "--data", str(recorded), "--threads", "1")


def test_every_part_gives_its_rows(quick: Report) -> None:
    found = [
        name.partition(",")[0]
        for name in column([table for table in quick.tables if "contender" in table.columns], "contender")
    ]
    peers = [TORCH, SERIAL]
    others = [*peers, "Newton", "Newton", "multigrid to 1e-6", "multigrid as published"]
    # Two nets each: forgets soon and late; at initial weights and trained.
    assert found == [*peers, "warm start", "gradients too", *([*peers, "shooting"] * 2), *(others * 2)]
    assert column(quick.tables, "1 rank s")
    assert column(quick.tables, "training")[0] == SERIAL


def test_exact_solvers_are_exact_and_approximate_ones_report_a_residual(quick: Report) -> None:
    tables = [table for table in quick.tables if "contender" in table.columns]
    names = ("contender", "output error", "gradient error", "residual")
    for name, output, gradient, residual in zip(*(column(tables, key) for key in names), strict=True):
        approximate = name.startswith(("warm start", "gradients too")) or name == "multigrid as published"
        if approximate:
            assert output > 1e-4
            assert residual > 1e-4
        else:
            assert output <= 1e-5
            assert gradient <= 1e-4
        assert (residual is None) == (name in (SERIAL, TORCH))
    cut, cached = (
        error
        for name, error in zip(column(tables, "contender"), column(tables, "gradient error"), strict=True)
        if name.startswith(("warm start", "gradients too"))
    )
    assert cached < cut
    assert max(column(quick.tables[-2:-1], "output error") + column(quick.tables[-2:-1], "gradient error")) <= 1e-5


def test_without_data_the_parts_that_need_them_are_left_out(without_peers: None, quick_compiler: None) -> None:
    report = measure("time", "--only", "exact,ranks", "training", "--threads", "1")
    assert [table.title.partition(",")[0] for table in report.tables] == ["Exact shooting"] * 2
    assert {note.split(": ")[1] for note in report.notes if "--data FILE" in note} == {"ranks", "training"}


def test_flags_and_data_are_checked(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"nowhere\.npz"):
        measure("time", "--data", "nowhere.npz")
    with pytest.raises(StrettoError, match="dance"):
        measure("time", "--only", "dance")
    write_npz(tmp_path / "bare.npz", SequenceSet.from_flat(np.zeros((30, 1), np.float32), offsets=np.arange(0, 31, 3)))
    with pytest.raises(StrettoError, match="no label per step"):
        measure("time", "--data", str(tmp_path / "bare.npz"))


@pytest.mark.usefixtures("quick_compiler")
def test_a_solver_that_is_exact_is_timed() -> None:
    case = initial_case(40, 5)
    check_exact(case.solver("right", Shooting(num_chunks=2)), case.serial().results(), where="here")


@pytest.mark.usefixtures("quick_compiler")
def test_a_solver_that_is_not_exact_is_not_timed(wrong_layer: str) -> None:
    case = initial_case(40, 5)
    expected = loop_contender(case.cell, batch=case.batch).results()
    with pytest.raises(StrettoError, match=rf"{wrong_layer}.* of wrong"):
        check_exact(case.solver("wrong", Shooting(num_chunks=2)), expected, where="here")


def test_ranks_that_are_not_exact_are_not_timed() -> None:
    time_ranks.check_exact({"output_error": 1e-7, "gradient_error": 1e-6}, where="here")
    for errors in ((1e-7, 1e-3), (1e-3, 1e-7), (math.nan, 0.0)):
        with pytest.raises(StrettoError, match="of two ranks differs"):
            time_ranks.check_exact(dict(zip(("output_error", "gradient_error"), errors, strict=True)), where="here")


def test_nets_that_forget_soon_and_late_are_found(quick_compiler: None) -> None:
    x_TBF = draw_batch(Shape(num_steps=8 * 64, batch=1, input_size=6, hidden_size=5)).x_TBF
    torch.manual_seed(0)
    remembers = GRU(6, 5)
    with torch.no_grad():
        remembers.weight_hh.mul_(3.0)
    soon, soon_memory = shrink_until_forgetting(remembers, x_TBF)
    late, late_memory = slow_down_while_forgetting(soon, soon_memory, x_TBF)
    assert soon_memory <= late_memory <= 64
    with torch.no_grad():
        late.bias_ih[5:10] += 0.1
    assert measure_memory(late, x_TBF[:, 0], stride=16) > 64
