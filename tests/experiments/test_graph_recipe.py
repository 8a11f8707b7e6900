"""The graph experiment in small: its rows, its gate, its files, and what it refuses. No time is ever judged."""

import csv
import dataclasses
import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from experiments import graph
from experiments.graph import NETWORKS, VARIANTS, GraphResult, GraphSettings, reproduce_graph
from experiments.graph_figure import write_graph_figure
from experiments.graph_page import graph_table, write_graph_page
from stretto.cli.main import main
from stretto.errors import StrettoError
from stretto.kernels import CppKernel, NoCompiler, find_compiler
from stretto.kernels.eager import EagerKernel


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        find_compiler()
    except NoCompiler as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def quick(compiler: None, tmp_path_factory: pytest.TempPathFactory) -> GraphResult:
    return reproduce_graph(GraphSettings(quick=True, out=tmp_path_factory.mktemp("graph")))


def _shown(result: GraphResult, *, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(graph_table(result))
    return stream.getvalue()


def test_every_network_is_trained_every_way_with_every_number_of_streams(quick: GraphResult) -> None:
    assert [(row.network, row.streams, row.variant) for row in quick.rows] == [
        (network, streams, variant) for network in NETWORKS for streams in (1, 2) for variant in VARIANTS
    ]


def test_the_numbers_of_a_row_fit_together(quick: GraphResult) -> None:
    found = {(row.network, row.variant, row.streams): row for row in quick.rows}
    for row in quick.rows:
        assert row.steps_per_second == row.streams * row.window / row.timing.least
        baseline = found[row.network, graph.LOOP, 1]
        assert row.speed_up == row.steps_per_second / baseline.steps_per_second
        peer = found[row.network, graph.LOOP, row.streams]
        assert row.over_loop == row.steps_per_second / peer.steps_per_second
        assert row.window == quick.settings["loop_window" if row.variant == graph.LOOP else "window"]
    assert quick.settings["loop_window"] != quick.settings["window"]


def test_the_plans_tell_the_networks_apart(quick: GraphResult) -> None:
    loops = {network: plan["loops"] for network, plan in quick.plans.items()}
    assert loops == {"LSTM": 1, "peephole LSTM": 1, "delays": 1, "two loops": 2}
    assert all(plan["hoisted"] > 0 and plan["deferred"] > 0 for plan in quick.plans.values())
    assert all(0 <= error <= 1e-4 for error in quick.errors.values())


@pytest.mark.parametrize("kernel", [CppKernel, EagerKernel], ids=["compiled", "eager"])
@pytest.mark.parametrize("wrong", ["outputs", "gradients"])
def test_a_wrong_kernel_stops_the_experiment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: Any, wrong: str
) -> None:
    name = "forward_together" if wrong == "outputs" else "backward_together"
    right = getattr(kernel, name)

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = right(self, *args, **kwargs)
        for item in made:
            with torch.no_grad():
                for value in item.after if wrong == "outputs" else [*item.steps, *item.handed]:
                    if value is not None:
                        value.mul_(1.001)
        return made

    monkeypatch.setattr(kernel, name, broken)
    variant = graph.FUSION if kernel is CppKernel else graph.ANALYSIS
    with pytest.raises(StrettoError, match=f"LSTM by {variant} differs from that of {graph.LOOP}.*No time counts"):
        reproduce_graph(GraphSettings(quick=True, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_one_stream_is_always_taken_and_numbers_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(graph, "NETWORKS", {"delays": NETWORKS["delays"]})
    settings = GraphSettings(
        streams=(3, 3), hidden_size=4, input_size=2, window=5, loop_window=5, rounds=1, out=tmp_path / "out"
    )
    lines: list[str] = []
    result = reproduce_graph(settings, tell=lines.append)
    assert sorted({row.streams for row in result.rows}) == [1, 3]
    assert {row.window for row in result.rows} == {5}
    assert "All windows are the same" in " ".join(_shown(result, width=200).split())
    assert [line.partition(":")[0] for line in lines] == ["delays", "delays"]


def test_the_files_hold_the_rows(quick: GraphResult) -> None:
    folder = Path(quick.settings["out"])
    read = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
    assert len(read["rows"]) == len(quick.rows)
    assert read["plans"] == quick.plans
    rows = list(csv.DictReader(io.StringIO((folder / "graph.csv").read_text(encoding="utf-8"))))
    assert [(row["network"], int(row["streams"])) for row in rows] == [(row.network, row.streams) for row in quick.rows]
    assert [float(row["least_seconds"]) for row in rows] == [row.timing.least for row in quick.rows]


@pytest.mark.parametrize("width", [100, 200])
def test_the_table_fits_and_has_a_row_for_each_number_of_streams(quick: GraphResult, width: int) -> None:
    text = _shown(quick, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert graph_table(quick).row_count == 2 * len(NETWORKS)
    assert f"{quick.rows[0].steps_per_second:,.0f}" in text


def test_the_picture_has_a_line_for_each_way_of_each_network(quick: GraphResult, tmp_path: Path) -> None:
    renamed = tuple(dataclasses.replace(row, network=f"<{row.network}>") for row in quick.rows)
    write_graph_figure(dataclasses.replace(quick, rows=renamed), tmp_path / "graph.svg")
    picture = ET.parse(tmp_path / "graph.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    lines = list(picture.iter(f"{space}polyline"))
    assert len(lines) == len(NETWORKS) * len(VARIANTS)
    assert all(len(line.attrib["points"].split()) == 2 for line in lines)
    words = {text.text for text in picture.iter(f"{space}text")}
    assert {f"<{network}>" for network in NETWORKS} <= words
    assert set(VARIANTS) <= words


def test_the_page_is_escaped_and_has_the_table(quick: GraphResult, tmp_path: Path) -> None:
    renamed = tuple(dataclasses.replace(row, network=row.network.replace("LSTM", "<b>LSTM")) for row in quick.rows)
    plans = {network.replace("LSTM", "<b>LSTM"): plan for network, plan in quick.plans.items()}
    write_graph_page(dataclasses.replace(quick, rows=renamed, plans=plans), tmp_path / "graph.html")
    text = (tmp_path / "graph.html").read_text(encoding="utf-8")
    assert "<td><b>LSTM" not in text
    assert "<td>&lt;b&gt;LSTM</td>" in text
    assert all(f"{row.steps_per_second:,.0f}" in text for row in quick.rows)
    assert f"windows of {quick.settings['loop_window']} steps, to save time" in text


def test_the_command_writes_tables_and_plots_where_it_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "my [bold] out"
    assert main(["reproduce", "graph", "--quick", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"graph.json", "graph.csv", "graph.svg", "graph.html"}
    assert all(str(path) in shown for path in out.iterdir())
    assert "its times mean nothing" in shown


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(StrettoError, match=r"cannot be compiled: .*no-such-compiler.*CXX"):
        reproduce_graph(GraphSettings(quick=True, out=tmp_path))


def test_nonsense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "graph", "--streams", "0"]) == 2
    assert "streams" in capsys.readouterr().err
