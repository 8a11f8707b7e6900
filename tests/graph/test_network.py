"""Graphs as objects: what they hold, how they compare, and how they are written down.

Shape legend: B rows, T steps, F features.
"""

import dataclasses
import json
import random

import numpy as np
import pytest
import torch

from stretto.cells import Cell
from stretto.graph import Graph
from stretto.graph.network.builders import delayed, gru, lstm, peephole_lstm, two_loops

BUILDERS = [lstm, peephole_lstm, gru, delayed, two_loops]


def _rich() -> Graph:
    """Every kind of layer and connection at once."""
    graph = Graph()
    graph.output("h")
    graph.connect("x", "h", source_range=slice(1, 3))
    graph.connect("h", "h", kind="diagonal", delay=2)
    graph.connect("one", "h", kind="broadcast", destination_range=(2, 4))
    graph.input("x", 3, initial=0.5)
    graph.connect("x", "gate", delay=1)
    graph.constant("one", value=2.0)
    graph.layer("h", 4, activation="tanh", bias=True, initial_bias=1.0, learn_initial=True, initial=-0.5)
    graph.layer("gate", 4, aggregation="multiply")
    graph.connect("h", "gate", kind="identity")
    graph.output("gate")
    return graph


def _run(cell: Cell, x_BTF: torch.Tensor) -> torch.Tensor:
    state = cell.initial_state(len(x_BTF))
    outputs = []
    for x_BF in x_BTF.unbind(1):
        y_BF, state = cell(x_BF, state)
        outputs.append(y_BF)
    return torch.stack(outputs, dim=1)


def _shuffled(graph: Graph, *, seed: int) -> Graph:
    """The same content, declared in another order; inputs and outputs keep theirs."""
    document = graph.to_dict()
    inputs = [layer for layer in document["layers"] if layer["role"] == "input"]
    others = [layer for layer in document["layers"] if layer["role"] != "input"]
    order = random.Random(seed)
    order.shuffle(others)
    order.shuffle(document["connections"])
    return Graph.from_dict({**document, "layers": others + inputs})


def test_layers_and_connections_are_kept_as_declared() -> None:
    graph = _rich()
    assert [layer.name for layer in graph.layers] == ["x", "one", "h", "gate"]
    assert [layer.role for layer in graph.layers] == ["input", "constant", "hidden", "hidden"]
    assert [(one.source, one.destination, one.kind, one.delay) for one in graph.connections] == [
        ("x", "h", "full", 0),
        ("h", "h", "diagonal", 2),
        ("one", "h", "broadcast", 0),
        ("x", "gate", "full", 1),
        ("h", "gate", "identity", 0),
    ]
    assert graph.connections[0].source_range == (1, 3)
    assert graph.inputs == ("x",)
    assert graph.outputs == ("h", "gate")
    with pytest.raises(dataclasses.FrozenInstanceError):
        graph.layers[0].size = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        graph.connections[0].delay = 5


def test_repr_tells_everything() -> None:
    assert repr(Graph()) == "Graph()"
    assert repr(_rich()).splitlines() == [
        "Graph(",
        "  input x: 3, initial value 0.5",
        "  constant one: 1, value 2",
        "  layer h: 4, sum, tanh, bias from 1, learns its initial value from -0.5",
        "  layer gate: 4, multiply, linear",
        "  x[1:3] -> h: full",
        "  h -> h: diagonal, delay 2",
        "  one -> h[2:4]: broadcast",
        "  x -> gate: full, delay 1",
        "  h -> gate: identity",
        "  output h",
        "  output gate",
        ")",
    ]
    assert "h -> h: diagonal, delay 2" in repr(_rich().cell())


@pytest.mark.parametrize("graph", [_rich(), *(build(3, 4) for build in BUILDERS)])
def test_a_graph_survives_json(graph: Graph) -> None:
    written = json.dumps(graph.to_dict(), allow_nan=False)
    again = Graph.from_dict(json.loads(written))
    assert again == graph
    assert repr(again) == repr(graph)
    assert again.to_dict() == graph.to_dict()


def test_numbers_of_numpy_become_plain() -> None:
    graph = Graph()
    graph.input("x", np.int64(3), initial=np.float32(0.5))
    graph.layer("h", np.int32(2))
    graph.connect("x", "h", delay=np.int8(1), source_range=(np.int64(0), np.int64(2)))
    graph.output("h")
    assert Graph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph


def test_settings_may_be_left_out_of_a_document() -> None:
    document = {
        "format": "stretto.Graph 1",
        "layers": [{"name": "x", "size": 2, "role": "input"}, {"name": "h", "size": 3}],
        "connections": [{"source": "x", "destination": "h"}, {"source": "h", "destination": "h", "delay": 1}],
        "outputs": ["h"],
    }
    graph = Graph()
    graph.input("x", 2)
    graph.layer("h", 3)
    graph.connect("h", "h", delay=1)
    graph.connect("x", "h")
    graph.output("h")
    assert Graph.from_dict(document) == graph


def test_equality_is_by_content() -> None:
    assert _rich() == _rich()
    assert lstm(3, 4) != lstm(3, 5)
    assert lstm(3, 4) != peephole_lstm(3, 4)
    assert lstm(3, 4) != "lstm"
    twice, once = _rich(), _rich()
    twice.connect("h", "gate", kind="identity")
    assert twice != once
    swapped = Graph.from_dict({**_rich().to_dict(), "outputs": ["gate", "h"]})
    assert swapped != _rich()
    with pytest.raises(TypeError, match="unhashable"):
        hash(_rich())


@pytest.mark.parametrize("build", [_rich, *((lambda b=build: b(3, 4)) for build in BUILDERS)])
def test_the_order_of_declaring_does_not_matter(build) -> None:
    x_BTF = torch.randn(2, 5, 3)
    cells = []
    for graph in (build(), *(_shuffled(build(), seed=seed) for seed in range(4))):
        assert graph == build()
        torch.manual_seed(0)
        cells.append(graph.cell())
    expected = _run(cells[0], x_BTF)
    for cell in cells[1:]:
        assert cell.state_names == cells[0].state_names
        assert [name for name, _ in cell.named_parameters()] == [name for name, _ in cells[0].named_parameters()]
        assert torch.equal(_run(cell, x_BTF), expected)
