"""The benchmark of kernels in small: it checks before it times, and reports what ran. No time is judged."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_reports import column, measure

from bench import kernels
from bench.contenders import (
    Shape,
    draw_batch,
    draw_cell,
    loop_contender,
    torch_contender,
    torch_layer,
)
from bench.harness import bench
from stretto.errors import StrettoError
from stretto.timing import check_equal

SHAPE = Shape(num_steps=6, batch=2, input_size=4, hidden_size=8)


def test_every_part_gives_its_rows(without_peers: None, quick_compiler: None) -> None:
    report = measure("kernels")
    pairs = set(zip(column(report.tables, "net"), column(report.tables, "peer"), strict=True))
    assert pairs == {
        ("GRU", "nn.GRU"),
        ("LSTM", "nn.LSTM"),
        ("LayerNormLSTM", "Python loop"),
        ("2-layer BiGRU", "nn.GRU"),
        ("3-layer GRU", "layer by layer"),
        ("3-layer GRU", "nn.GRU"),
    }
    assert len(report.tables) == len(kernels.PARTS)
    assert any("pip install 'stretto[peers]'" in note for note in report.notes)
    ragged = [table for table in report.tables if "over full" in table.columns]
    real, padded = column(ragged, "real steps"), column(ragged, "padded steps")
    assert real[0] == padded[0] == padded[1] > real[1] == real[2] == real[3]
    assert column(ragged, "over full")[0] == 1
    assert set(column(report.tables[-1:], "threads")) == {1, 2}
    errors = [error for error in column(report.tables, "error") if error is not None]
    assert all(0 <= error <= 1e-4 for error in errors)
    for ratio, ours, theirs in zip(
        *(column(report.tables, name) for name in ("ratio", "ours ms", "peer ms")), strict=True
    ):
        assert ratio == pytest.approx(theirs / ours)


@pytest.mark.usefixtures("without_peers", "quick_compiler")
@pytest.mark.parametrize("part", ["bidirectional", "ragged"])
def test_a_wrong_layer_is_not_timed(wrong_layer: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=rf"{wrong_layer}.* differs from"):
        measure("kernels", "--only", part, "--json", str(tmp_path / "out.json"))
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_it_runs_and_says_so(without_peers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    report = measure("kernels", "--only", "bidirectional")
    assert any("compiled kernels" in note and "no-such-compiler" in note for note in report.notes)
    assert any(note.startswith("2-layer BiGRU ran without compiled code") for note in report.notes)


def test_flags_are_checked() -> None:
    assert bench.parse("kernels", ["--only", "shapes,ragged", "stack"]).only == ("shapes,ragged", "stack")
    assert kernels.chosen_parts(("stack,shapes",), kernels.PARTS) == ("shapes", "stack")
    with pytest.raises(StrettoError, match=r"speed.*shapes"):
        kernels.chosen_parts(("speed",), kernels.PARTS)
    for flags in (["--rounds", "0"], ["--threads", "0"], ["--thread-counts", "2", "0"]):
        with pytest.raises(StrettoError, match=r"rounds|threads|thread_counts"):
            bench.parse("kernels", flags)


@pytest.mark.parametrize("net", ["GRU", "LSTM"])
def test_the_loop_computes_what_torch_does(net: Any) -> None:
    cell, batch = draw_cell(net, SHAPE), draw_batch(SHAPE)
    theirs = torch_contender(torch_layer([cell], net, SHAPE), batch=batch).results()
    assert len(theirs) == 5
    assert check_equal(loop_contender(cell, batch=batch).results(), theirs, name="loop", peer=net, where="") < 1e-5


JAX_AGAINST_TORCH = f"""
from bench.contenders import *
from stretto.timing import check_equal
shape = {SHAPE!r}
cell, batch = draw_cell("GRU", shape), draw_batch(shape)
theirs = torch_contender(torch_layer([cell], "GRU", shape), batch=batch).results()
print(check_equal(JaxContender(cell, batch=batch).results(), theirs, name="JAX", peer="torch", where="here"))
"""


def test_jax_computes_what_torch_does() -> None:
    # In its own process: JAX has threads, and later tests fork.
    done = subprocess.run([sys.executable, "-c", JAX_AGAINST_TORCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5
