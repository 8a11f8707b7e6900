"""Benchmarks of kernels for GPUs, in small: a prediction and compilation need no GPU, and the rest is interpreted."""

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_reports import column, measure

from bench import gpu_prediction, gpu_targets, kernels
from bench.harness import RESULTS, Table
from graph_recorder import TapeRecorder
from stretto.errors import StrettoError
from stretto.kernels.backends import cudagraph
from stretto.kernels.backends.triton.emit import Tiles
from stretto.kernels.backends.triton.model import cooperative_tiles, gpu_of
from stretto.kernels.backends.triton.modes import choices, mode_of

pytest.importorskip("triton")


def test_the_prediction_is_marked_as_one() -> None:
    report = measure("gpu-prediction")
    assert "prediction" in report.title
    assert len(gpu_prediction.PUBLISHED) == 7
    assert any("none was measured" in note for note in report.notes)
    assert any("expect to lose" in note for note in report.notes)
    low, high = (column(report.tables, f"kernel, {end}") for end in ("low", "high"))
    assert all(one < other for one, other in zip(low, high, strict=True))
    assert column(report.tables, "published / low")


def test_kernels_are_compiled_for_every_target() -> None:
    report = measure("gpu-targets")
    assert set(gpu_targets.NO_SPILLS) < set(gpu_targets.CELLS)
    assert [table.title for table in report.tables] == ["sm_80", "sm_90", "sm_100", "gfx942"]
    assert all(column(report.tables, "within limits"))
    assert not report.failed
    assert any("was ever run" in note for note in report.notes)


def test_stored_figures_are_within_limits() -> None:
    """What was compiled for every cell of the library, as `docs/measurements/gpu-targets.md` has it."""
    stored = json.loads((RESULTS / "gpu-targets.json").read_text(encoding="utf-8"))
    tables = [Table(**table) for table in stored["tables"]]
    assert [table.title for table in tables] == list(gpu_targets.TARGETS)
    for table in tables:
        assert {(row[0], row[1]) for row in table.rows} == set(product(gpu_targets.CELLS, gpu_targets.SIZES))
        assert [row[:3] for row in table.rows if not row[-1]] == []


@pytest.mark.slow
def test_stored_figures_are_of_the_modes_that_are_taken_now() -> None:
    """By the choice before anything is compiled: each kernel that a batch of 16 would get has its line."""
    alone, shared = (
        {table["title"]: Counter(_mode(row) for row in table["rows"]) for table in stored["tables"]}
        for stored in (
            json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
            for name in ("gpu-targets", "gpu-cooperative")
        )
    )
    stored = json.loads((RESULTS / "gpu-cooperative.json").read_text(encoding="utf-8"))
    assert all(row[-1] for table in stored["tables"] for row in table["rows"])
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for name, size in product(gpu_targets.CELLS, gpu_targets.SIZES):
            for body in gpu_targets.bodies_of(name, size):
                for way, target in product(gpu_targets.WAYS, gpu_targets.TARGETS.values()):
                    of_one = list(choices(body, way, operands=torch.float32, target=target))
                    assert any((name, size, way, *_facts(one)) in alone[target.name] for one in of_one)
                    gpu = gpu_of(target)
                    of_team = cooperative_tiles(body, way, of_one[0], gpu, rows=16, operands=torch.float32)
                    key = (name, size, way)
                    assert not of_team or any((*key, *_facts(one)) in shared[target.name] for one in of_team), key
    finally:
        torch.set_float32_matmul_precision(precision)


def _facts(tiles: Tiles) -> tuple[str, str, int]:
    team = "" if tiles.shares == 1 else f", {tiles.shares} programs"
    return f"{mode_of(tiles)}{team}", f"{tiles.columns} x {tiles.depth}", tiles.warps


def _mode(row: list[Any]) -> tuple[Any, ...]:
    return tuple(row[:6])


def test_kernels_on_a_device_are_checked_and_timed_beside_their_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter is the device, and a tape stands for CUDA's graphs."""
    monkeypatch.setitem(cudagraph.RECORDERS, "cpu", TapeRecorder())
    assert {"device", "only"} <= set(kernels.KernelsSettings.__annotations__)
    report = measure("kernels", "--device", "interpreter", "--json", str(tmp_path / "kernels.json"))
    pairs = list(zip(column(report.tables, "net"), column(report.tables, "contender"), strict=True))
    ours = ["Python loop", "stretto, cudagraph", "stretto, triton"]
    assert pairs == [("GRU", name) for name in ["cuDNN", *ours]] + [("LayerNormLSTM", name) for name in ours]
    assert all(value > 0 for value in column(report.tables, "predicted us, low"))
    errors = [error for error in column(report.tables, "error, full precision") if error is not None]
    assert len(errors) == 5
    assert max(errors) < 1e-5
    assert any("times mean nothing" in note for note in report.notes)
    assert "stretto, triton" in (tmp_path / "kernels.json").read_text(encoding="utf-8")


@pytest.mark.usefixtures("wrong_layer")
def test_a_wrong_kernel_is_not_timed() -> None:
    report = measure("kernels", "--device", "interpreter")
    assert report.failed
    assert not report.tables
    assert sum("differs from" in note for note in report.notes) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_remedy_is_named() -> None:
    with pytest.raises(StrettoError, match=r"torch finds no GPU here.*--device interpreter"):
        measure("kernels", "--device", "cuda")
