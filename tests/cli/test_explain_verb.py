"""`stretto explain`: finds cells wherever they are. What it refuses is in tests/bad_input."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from defusedxml import ElementTree

from stretto.cli.loading import builtin_cells

Run = Callable[..., Any]

MINE = """
print("a module that talks")
import torch
from torch import nn
import stretto


class Leaky(stretto.Cell):
    def __init__(self, input_size, hidden_size, rate=0.1, kind="tanh"):
        super().__init__()
        self.hidden_size, self.rate, self.squash = hidden_size, rate, getattr(torch, kind)
        self.inward = nn.Linear(input_size, hidden_size)
        self.around = nn.Linear(hidden_size, hidden_size, bias=False)

    def initial_state(self, batch_size):
        return self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t, state):
        new = (1 - self.rate) * state + self.rate * self.squash(self.inward(x_t) + self.around(state))
        return new, new

    class Inner(stretto.cells.AbstractGatedCell):
        pass


def made():
    return Leaky(5, 7)


def sized(hidden_size=3):
    return stretto.cells.GRU(2, hidden_size)


def drawn():
    graph = stretto.Graph()
    graph.input("x", 3)
    graph.layer("h", 4)
    graph.connect("x", "h")
    graph.connect("h", "h", delay=1)
    graph.output("h")
    return graph


ready = Leaky(5, 7)
graph = drawn()
torch_cell = nn.GRUCell(2, 3)
"""


@pytest.fixture(autouse=True)
def a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    Path("mine.py").write_text(MINE, encoding="utf-8")
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    Path("package/beside.py").write_text("SIZE = 6\n", encoding="utf-8")
    Path("package/cells.py").write_text(
        "from beside import SIZE\nimport stretto\ncell = stretto.cells.GRU(SIZE, 3)\n", encoding="utf-8"
    )
    for name, text in (("absent", "import not_to_be_had"), ("leaves", "exit(3)")):
        Path(f"{name}.py").write_text(text, encoding="utf-8")
    yield
    for name in set(sys.modules) - known:
        if name in {"mine", "absent", "leaves", "beside"} or name.startswith(("package", "stretto_exp")):
            del sys.modules[name]


def _explained(run: Run, *words: str) -> Any:
    ended = run("explain", *words, "--backend", "eager", "--json")
    assert ended.code == 0
    return json.loads(ended.out)


@pytest.mark.parametrize(
    ("cell", "name", "states"),
    [
        ("LSTM", "LSTM", {"state0": [128], "state1": [128]}),
        ("mine:Leaky", "Leaky", {"state0": [128]}),
        ("mine.py:Leaky", "Leaky", {"state0": [128]}),
        ("./mine.py:made", "Leaky", {"state0": [7]}),
        ("mine:made", "Leaky", {"state0": [7]}),
        ("mine:ready", "Leaky", {"state0": [7]}),
        ("mine:sized", "GRU", {"state0": [3]}),
        ("mine:drawn", "GraphCell", {"state0": [4]}),
        ("mine:graph", "GraphCell", {"state0": [4]}),
        ("mine:torch_cell", "GRU", {"state0": [3]}),
        ("torch.nn:LSTMCell", "LSTM", {"state0": [128], "state1": [128]}),
        ("package/cells.py:cell", "GRU", {"state0": [3]}),
        ("stretto.graph:two_loop_graph", "GraphCell", {"state0": [128]}),
    ],
)
def test_a_cell_is_found(run: Run, cell: str, name: str, states: dict[str, list[int]]) -> None:
    found = _explained(run, cell)
    assert found["cell"] == name
    assert found["loops"][0]["states"] == states


def test_every_cell_of_ours_is_found_by_its_name(run: Run) -> None:
    names = builtin_cells()
    assert {"LSTM", "GRU", "Zoneout"} <= set(names)
    assert "Cell" not in names
    for name in set(names) - {"Zoneout", "RecurrentDropout", "ProjectedLSTM"}:
        assert _explained(run, name, "--hidden-size", "8")["cell"] == name


def test_sizes_and_other_arguments_are_passed_on(run: Run) -> None:
    found = _explained(run, "ProjectedLSTM", "--input-size", "3", "--hidden-size", "5", "--set", "proj_size=2")
    assert found["loops"][0]["forward_gemms"][0] == [2, 20]
    assert found["operators"]["hoisted"] == [{"operator": "addmm", "shape": [20]}]
    found = _explained(run, "mine:Leaky", "--set", "rate=0.5", "--set", "kind='sigmoid'", "--hidden-size", "4")
    assert "sigmoid" in [item["operator"] for item in found["operators"]["loop"]]
    assert _explained(run, "mine:sized", "--hidden-size", "9")["loops"][0]["states"] == {"state0": [9]}
    assert _explained(run, "mine:Leaky", "--set", "hidden_size=6")["loops"][0]["states"] == {"state0": [6]}


def test_bytes_are_those_of_the_dtype(run: Run) -> None:
    single, double = (_explained(run, "GRU", "--dtype", kind)["counts"] for kind in ("float32", "float64"))
    assert double["saved_bytes"] == 2 * single["saved_bytes"] > 0


def test_the_table_and_the_picture(run: Run) -> None:
    code, out, err = run("explain", "mine:Leaky", "--backend", "eager", "--svg", "deep/down/leaky.svg")
    assert (code, err) == (0, "a module that talks\n")
    lines = out.splitlines()
    assert lines[0] == "cell       Leaky"
    assert lines[-1] == f"picture    {Path('deep/down/leaky.svg')}"
    assert "\x1b" not in out
    root = ElementTree.fromstring(Path("deep/down/leaky.svg").read_text(encoding="utf-8"))
    assert "One step of Leaky" in "".join(root.itertext())
    assert list(Path("deep/down").iterdir()) == [Path("deep/down/leaky.svg")]


def test_json_is_all_that_is_printed(run: Run) -> None:
    code, out, err = run("explain", "mine:ready", "--backend", "eager", "--json", "--svg", "x.svg")
    assert (code, err) == (0, "a module that talks\n")
    assert json.loads(out)["backend"] == "eager"
    assert Path("x.svg").exists()


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("mine.deeper:Cell", "there is no module 'mine.deeper'"),
        ("absent:Cell", "ModuleNotFoundError: No module named 'not_to_be_had'"),
        ("leaves:Cell", "SystemExit"),
    ],
)
def test_a_module_that_cannot_be_imported_is_an_error_and_nothing_is_printed(run: Run, cell: str, problem: str) -> None:
    code, out, err = run("explain", cell)
    assert (code, out) == (2, "")
    assert problem in err
    assert "Traceback" not in err
