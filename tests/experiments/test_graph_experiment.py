"""The graph experiment in small: its rows, its checks, its files, and what it refuses. No time is judged."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness import Report
from experiments import graph
from experiments.graph import NETWORKS, VARIANTS, GraphResult, GraphSettings, reproduce_graph, show
from stretto.errors import StrettoError
from stretto.kernels import NoCompiler, find_compiler
from stretto.nn import RNN


@pytest.fixture(scope="module", autouse=True)
def compiler(quick_compiler: None) -> None:
    try:
        find_compiler()
    except NoCompiler as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def quick(compiler: None) -> GraphResult:
    return reproduce_graph(GraphSettings(quick=True))


def test_every_network_is_trained_in_every_variant_with_every_number_of_streams(quick: GraphResult) -> None:
    assert [(row.network, row.streams, row.variant) for row in quick.rows] == [
        (network, streams, variant) for network in NETWORKS for streams in (1, 2) for variant in VARIANTS
    ]
    for row in quick.rows:
        assert row.steps_per_second == row.streams * row.window / row.min_seconds
        assert row.window == quick.settings["loop_window" if row.variant == graph.LOOP else "window"]
        assert row.variant != graph.LOOP or row.over_loop == 1.0
        assert (row.variant, row.streams) != (graph.LOOP, 1) or row.speed_up == 1.0


def test_the_analysis_finds_the_loops_of_each_network(quick: GraphResult) -> None:
    loops = {network: plan["loops"] for network, plan in quick.plans.items()}
    assert loops == {"LSTM": 1, "peephole LSTM": 1, "delays": 1, "two loops": 2}
    assert all(plan["hoisted"] > 0 and plan["deferred"] > 0 for plan in quick.plans.values())
    assert all(0 <= error <= 1e-4 for error in quick.errors.values())


@pytest.mark.parametrize(("variant", "backend"), [(graph.FUSION, "cpp"), (graph.ANALYSIS, "eager")])
@pytest.mark.parametrize("wrong", ["outputs", "gradients"])
def test_a_wrong_kernel_stops_the_experiment(
    monkeypatch: pytest.MonkeyPatch, variant: str, backend: str, wrong: str
) -> None:
    def make(cell: Any, **options: Any) -> Any:
        rnn = RNN(cell, **options)
        if options["backend"] == backend:
            rnn.register_forward_hook(lambda _, __, found: (_spoil(found[0], wrong), found[1]))
        return rnn

    monkeypatch.setattr(graph, "RNN", make)
    monkeypatch.setattr(graph, "NETWORKS", {"LSTM": NETWORKS["LSTM"]})
    with pytest.raises(StrettoError, match=f"LSTM by {variant} differs from {graph.LOOP}"):
        reproduce_graph(GraphSettings(quick=True))


def _spoil(y_TBH: torch.Tensor, wrong: str) -> torch.Tensor:
    """The outputs off by a thousandth, or the same outputs with gradients off by as much."""
    return y_TBH * 1.001 if wrong == "outputs" else y_TBH + 0.001 * (y_TBH - y_TBH.detach())


def test_one_stream_is_always_included(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "NETWORKS", {"delays": NETWORKS["delays"]})
    lines: list[str] = []
    sizes = {"hidden_size": 4, "input_size": 2, "window": 5, "loop_window": 5, "rounds": 1}
    result = reproduce_graph(GraphSettings(streams=(3, 3), **sizes), progress=lines.append)  # type: ignore[arg-type]
    assert sorted({row.streams for row in result.rows}) == [1, 3]
    assert {row.window for row in result.rows} == {5}
    assert [line.partition(":")[0] for line in lines] == ["delays", "delays"]


def test_files_hold_all_rows(quick: GraphResult, tmp_path: Path) -> None:
    report = Report("graph", title="Graph")
    show(quick, report)
    report.write(tmp_path)
    stored = json.loads((tmp_path / "graph.json").read_text(encoding="utf-8"))["result"]
    assert len(stored["rows"]) == len(quick.rows)
    assert stored["plans"] == quick.plans
    rows = list(csv.DictReader(io.StringIO((tmp_path / "graph.csv").read_text(encoding="utf-8"))))
    assert [(row["network"], int(row["streams"])) for row in rows] == [(row.network, row.streams) for row in quick.rows]
    assert [float(row["min_seconds"]) for row in rows] == [row.min_seconds for row in quick.rows]
    for figure in ("graph.svg", "graph-1.svg"):
        assert (tmp_path / figure).read_text(encoding="utf-8").count("<polyline") == len(NETWORKS) * len(VARIANTS)
    assert len(report.tables[0].rows) == 2 * len(NETWORKS)


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(StrettoError, match=r"cannot be compiled: .*no-such-compiler.*CXX"):
        reproduce_graph(GraphSettings(quick=True))
