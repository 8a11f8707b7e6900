"""Graphs of layers: what they hold, how they compare and are written down, and the cells they make.

Shape legend: B rows, T steps, F features.
"""

import copy
import dataclasses
import json
import random

import numpy as np
import pytest
import torch

from stretto.cells import Cell
from stretto.errors import StrettoError
from stretto.graph import Graph, GraphCell, delayed_graph, lstm_graph, peephole_lstm_graph, two_loop_graph
from stretto.kernels import loop_over_steps

BUILDERS = [lstm_graph, peephole_lstm_graph, delayed_graph, two_loop_graph]


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
    return loop_over_steps(cell, x_BTF, cell.initial_state(len(x_BTF)))[0]


def _shuffle(graph: Graph, *, seed: int) -> Graph:
    """The same content, declared in another order; inputs and outputs keep theirs."""
    document = graph.to_dict()
    inputs = [layer for layer in document["layers"] if layer["role"] == "input"]
    others = [layer for layer in document["layers"] if layer["role"] != "input"]
    order = random.Random(seed)
    order.shuffle(others)
    order.shuffle(document["connections"])
    return Graph.from_dict({**document, "layers": others + inputs})


def test_layers_and_connections_are_kept_and_shown_as_declared() -> None:
    graph = _rich()
    assert repr(Graph()) == "Graph()"
    assert repr(graph).splitlines() == [
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
    assert "h -> h: diagonal, delay 2" in repr(graph.cell())
    assert (graph.inputs, graph.outputs) == (("x",), ("h", "gate"))
    for declared in (graph.layers[0], graph.connections[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            declared.__setattr__(dataclasses.fields(declared)[0].name, "other")


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
    assert lstm_graph(3, 4) != lstm_graph(3, 5)
    assert lstm_graph(3, 4) != peephole_lstm_graph(3, 4)
    assert lstm_graph(3, 4) != "lstm"
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
    for graph in (build(), *(_shuffle(build(), seed=seed) for seed in range(4))):
        assert graph == build()
        torch.manual_seed(0)
        cells.append(graph.cell())
    expected = _run(cells[0], x_BTF)
    for cell in cells[1:]:
        assert cell.state_names == cells[0].state_names
        assert [name for name, _ in cell.named_parameters()] == [name for name, _ in cells[0].named_parameters()]
        assert torch.equal(_run(cell, x_BTF), expected)


def test_parameters_have_readable_names_that_never_clash() -> None:
    graph = Graph()
    for name in ("a", "a_to_b", "state"):
        graph.input(name, 4, learn_initial=True)
        graph.connect(name, "c", delay=1)
        graph.connect(name, "b_to_c", delay=1)
    graph.layer("c", 4, bias=True)
    graph.layer("b_to_c", 4)
    graph.connect("c", "c", kind="diagonal", delay=1)
    graph.connect("c", "c", delay=1)
    graph.connect("a", "c", source_range=(0, 2), destination_range=slice(3))
    graph.output("c")
    graph.output("b_to_c")
    assert {name: tuple(value.shape) for name, value in graph.cell().named_parameters()} == {
        "initial_value_a": (4,),
        "initial_value_a_to_b": (4,),
        "initial_value_state": (4,),
        "bias_c": (4,),
        "weight_a_to_c_d1": (4, 4),
        "weight_state_to_c_d1": (4, 4),
        "weight_a_to_b_to_c_d1": (4, 4),
        "weight_a_to_b_to_c_d1_2": (4, 4),
        "weight_a_to_b_to_b_to_c_d1": (4, 4),
        "weight_state_to_b_to_c_d1": (4, 4),
        "weight_c_to_c_d1": (4,),
        "weight_c_to_c_d1_2": (4, 4),
        "weight_a_to_c_d0_from_0_2_into_0_3": (3, 2),
    }


def test_parameters_start_at_their_initial_values() -> None:
    torch.manual_seed(0)
    cell = _rich().cell()
    assert torch.equal(cell.bias_h, torch.ones(4))
    assert torch.equal(cell.initial_value_h, torch.full((4,), -0.5))
    weight = cell.weight_x_to_gate_d1.detach()
    assert 0.1 < float(weight.abs().max()) <= 0.5
    assert set(cell.state_dict()) == {name for name, _ in cell.named_parameters()}
    drawn = weight.clone()
    with torch.no_grad():
        cell.bias_h.zero_()
    cell.reset_parameters()
    assert torch.equal(cell.bias_h, torch.ones(4))
    assert not torch.equal(cell.weight_x_to_gate_d1, drawn)


def test_a_cell_keeps_the_graph_it_was_made_from() -> None:
    graph = lstm_graph(3, 4)
    cell = graph.cell()
    graph.output("c")
    x_BTF = torch.randn(2, 3, 3)
    assert _run(cell, x_BTF).shape == (2, 3, 4)
    assert _run(graph.cell(), x_BTF).shape == (2, 3, 8)
    twin = copy.deepcopy(cell)
    assert torch.equal(_run(twin, x_BTF), _run(cell, x_BTF))


def test_which_of_several_inputs_would_change_size_is_not_defined() -> None:
    graph = two_loop_graph(3, 4)
    graph.input("z", 2)
    graph.connect("z", "lower")
    with pytest.raises(StrettoError, match=r"2 inputs, 'x', 'z'"):
        graph.cell().with_input_size(5)


def test_what_is_known_early_is_added_first() -> None:
    arriving = two_loop_graph(3, 4).wiring().wires["upper"]
    assert [(wire.source, wire.delay) for wire in arriving] == [("x", 0), ("lower", 0), ("lower", 2), ("upper", 1)]


def test_another_input_size_makes_a_fresh_cell_of_the_same_kind() -> None:
    cell = peephole_lstm_graph(3, 4).cell().double()
    wider = cell.with_input_size(7)
    assert isinstance(wider, GraphCell)
    assert wider.wiring == peephole_lstm_graph(7, 4).wiring()
    assert wider.weight_x_to_candidate_d0.dtype == torch.float64
    assert wider.weight_c_to_output_gate_d0.data_ptr() != cell.weight_c_to_output_gate_d0.data_ptr()
    assert _run(wider, torch.randn(2, 3, 7, dtype=torch.float64)).shape == (2, 3, 4)
    with pytest.raises(StrettoError, match="layer 'x' got size=0"):
        cell.with_input_size(0)
    with pytest.raises(StrettoError, match="uses units 1 to 3 of 'x', which has 2"):
        _rich().cell().with_input_size(2)


def test_a_cell_without_parameters_follows_its_dtype() -> None:
    graph = Graph()
    graph.input("x", 2)
    graph.layer("h", 2)
    graph.connect("x", "h", kind="identity")
    graph.connect("h", "h", kind="identity", delay=1)
    graph.output("h")
    cell = graph.cell().double()
    assert cell.initial_state(1)[0].dtype == torch.float64
    assert cell.with_input_size(2).initial_state(1)[0].dtype == torch.float64


def test_inputs_and_states_of_another_form_are_refused() -> None:
    cell = lstm_graph(3, 4).cell()
    with pytest.raises(StrettoError, match=r"shape \(2, 5\) for its input 'x' of 3 features"):
        cell(torch.randn(2, 5), cell.initial_state(2))
    with pytest.raises(StrettoError, match=r"shape \(3,\)"):
        cell(torch.randn(3), cell.initial_state(2))
    for state in ((), torch.zeros(2, 4), cell.initial_state(2)[:1]):
        with pytest.raises(StrettoError, match="not a tuple of 2 tensors"):
            cell(torch.randn(2, 3), state)
