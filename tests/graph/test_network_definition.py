"""Random graphs against their definition, evaluated literally: the value of a layer at a step, one at a time.

Shape legend: B rows, T steps, F features, N units of a layer.
"""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from stretto.graph import Graph
from stretto.graph.network.builders import delayed, gru, lstm, peephole_lstm, two_loops
from stretto.graph.network.connection import Connection

MAX_DELAY = 4
TOLERANCE = 1e-10


FORMULAS = {
    "linear": lambda x: x,
    "sigmoid": lambda x: 1.0 / (1.0 + (-x).exp()),
    "tanh": lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "softplus": lambda x: (1.0 + x.exp()).log(),
    "softmax": lambda x: x.exp() / x.exp().sum(dim=1, keepdim=True),
    "one_minus": lambda x: 1.0 - x,
    "negate": lambda x: -x,
    "sin": lambda x: torch.cos(x - math.pi / 2.0),
}


class Definition:
    """Looks up any layer's value at any step, from the declarations alone."""

    def __init__(self, graph: Graph, parameters: dict[str, torch.Tensor], x_BTF: torch.Tensor) -> None:
        self.layers = {layer.name: layer for layer in graph.layers}
        self.inputs = graph.inputs
        self.outputs = graph.outputs
        self.parameters = parameters
        self.x_BTF = x_BTF
        self.known: dict[tuple[str, int], torch.Tensor] = {}
        seen = Counter[str]()
        self.arriving: dict[str, list[tuple[Connection, str]]] = {name: [] for name in self.layers}
        # Full ones come second among those of one name: they sort after diagonal ones.
        for one in sorted(graph.connections, key=lambda one: one.kind):
            name = f"weight_{one.source}_to_{one.destination}_d{one.delay}"
            name += "" if one.source_range is None else "_from_{}_{}".format(*one.source_range)
            name += "" if one.destination_range is None else "_into_{}_{}".format(*one.destination_range)
            seen[name] += one.kind in ("full", "diagonal")
            self.arriving[one.destination].append((one, f"{name}_{seen[name]}" if seen[name] > 1 else name))

    def output(self) -> torch.Tensor:
        steps = range(self.x_BTF.shape[1])
        return torch.stack([torch.cat([self.value(name, t) for name in self.outputs], dim=1) for t in steps], dim=1)

    def value(self, name: str, t: int) -> torch.Tensor:
        if (name, t) not in self.known:
            self.known[name, t] = self._value(name, t)
        return self.known[name, t]

    def _value(self, name: str, t: int) -> torch.Tensor:
        layer = self.layers[name]
        like_BN = self.x_BTF.new_ones(len(self.x_BTF), layer.size)
        if layer.role == "constant":
            return layer.initial * like_BN
        if t < 0:
            return like_BN * (self.parameters[f"initial_value_{name}"] if layer.learn_initial else layer.initial)
        if layer.role == "input":
            first = sum(self.layers[other].size for other in self.inputs[: self.inputs.index(name)])
            return self.x_BTF[:, t, first : first + layer.size]
        multiplies = layer.aggregation == "multiply"
        total_BN = like_BN if multiplies else 0.0 * like_BN
        for connection, weight in self.arriving[name]:
            term_BN = self._term(connection, weight, t, size=layer.size, neutral=1.0 if multiplies else 0.0)
            total_BN = total_BN * term_BN if multiplies else total_BN + term_BN
        if layer.bias:
            total_BN = total_BN + self.parameters[f"bias_{name}"]
        return FORMULAS[layer.activation](total_BN)

    def _term(self, one: Connection, weight: str, t: int, *, size: int, neutral: float) -> torch.Tensor:
        """What arrives, as wide as the layer; neutral where it does not arrive."""
        value_BN = self.value(one.source, t - one.delay)
        first, end = one.source_range or (0, value_BN.shape[1])
        value_BN = value_BN[:, first:end]
        begin, stop = one.destination_range or (0, size)
        if one.kind == "full":
            value_BN = value_BN @ self.parameters[weight].T
        elif one.kind == "diagonal":
            value_BN = value_BN * self.parameters[weight]
        elif one.kind == "broadcast":
            value_BN = value_BN * value_BN.new_ones(stop - begin)
        assert value_BN.shape[1] == stop - begin
        filled = value_BN.new_full((len(value_BN), size), neutral)
        return torch.cat([filled[:, :begin], value_BN, filled[:, stop:]], dim=1)


def _link(draw: st.DrawFn, sizes: dict[str, int], source: str, destination: str, **fixed: Any) -> Connection:
    """A connection of any kind that fits, with ranges or without."""
    begin, stop = fixed.pop("destination_range", None) or (0, sizes[destination])
    if (begin, stop) == (0, sizes[destination]) and not fixed.pop("whole", False) and draw(st.booleans()):
        begin = draw(st.integers(0, sizes[destination] - 1))
        stop = draw(st.integers(begin + 1, sizes[destination]))
    fixed.pop("whole", None)
    kinds = ["full", "broadcast"]
    if sizes[source] >= stop - begin:
        kinds += ["identity", "diagonal"]
    kind = draw(st.sampled_from(kinds))
    width = {"full": draw(st.integers(1, sizes[source])), "broadcast": 1}.get(kind, stop - begin)
    first = draw(st.integers(0, sizes[source] - width))
    source_range = None if width == sizes[source] and draw(st.booleans()) else (first, first + width)
    destination_range = None if (begin, stop) == (0, sizes[destination]) and draw(st.booleans()) else (begin, stop)
    return Connection(
        source=source,
        destination=destination,
        kind=kind,
        source_range=source_range,
        destination_range=destination_range,
        **fixed,
    )


def _dead(names: list[str], connections: list[Connection], outputs: list[str]) -> list[str]:
    alive = set(outputs)
    for _ in names:
        alive |= {one.source for one in connections if one.destination in alive}
    return [name for name in names if name not in alive]


@st.composite
def _graphs(draw: st.DrawFn) -> Graph:
    inputs = [f"in{number}" for number in range(draw(st.integers(1, 2)))]
    constants = [f"const{number}" for number in range(draw(st.integers(0, 1)))]
    hidden = [f"h{number}" for number in draw(st.permutations(range(draw(st.integers(1, 5)))))]
    sizes = {name: draw(st.integers(1, 4)) for name in (*inputs, *constants, *hidden)}
    delays = st.integers(0, MAX_DELAY)
    connections = []
    for place, name in enumerate(hidden):
        cut = draw(st.integers(0, sizes[name] - 1))
        for part in [(0, cut), (cut, sizes[name])] if cut else [(0, sizes[name])]:
            source = draw(st.sampled_from([*inputs, *constants, *hidden[:place]]))
            delay = 0 if source in constants else draw(delays)
            connections.append(_link(draw, sizes, source, name, delay=delay, destination_range=part, whole=True))
    for _ in range(draw(st.integers(0, 7))):
        source, name = draw(st.sampled_from([*inputs, *constants, *hidden])), draw(st.sampled_from(hidden))
        ahead = source in hidden and hidden.index(source) >= hidden.index(name)
        delay = 0 if source in constants else draw(st.integers(1, MAX_DELAY) if ahead else delays)
        connections.append(_link(draw, sizes, source, name, delay=delay))
    if draw(st.booleans()):
        connections.append(draw(st.sampled_from(connections)))
    outputs = draw(st.lists(st.sampled_from(hidden), min_size=1, unique=True))
    while dead := _dead([*hidden, *inputs, *constants], connections, outputs):
        outputs.append(dead[0])

    graph = Graph()
    read_later = {one.source for one in connections if one.delay > 0}
    for name in draw(st.permutations(list(sizes))):
        start: dict[str, Any] = {}
        if name in read_later:
            start = {"initial": draw(st.sampled_from([0.0, 0.5, -1.0])), "learn_initial": draw(st.booleans())}
        if name in inputs:
            graph.input(name, sizes[name], **start)
        elif name in constants:
            graph.constant(name, sizes[name], value=draw(st.sampled_from([1.0, -0.5])))
        else:
            aggregation = draw(st.sampled_from(["sum", "multiply"]))
            activation = draw(st.sampled_from(list(FORMULAS)))
            bias = aggregation == "sum" and draw(st.booleans())
            graph.layer(name, sizes[name], aggregation=aggregation, activation=activation, bias=bias, **start)
    for one in draw(st.permutations(connections)):
        graph.connect(
            one.source,
            one.destination,
            kind=one.kind,
            delay=one.delay,
            source_range=one.source_range,
            destination_range=one.destination_range,
        )
    for name in outputs:
        graph.output(name)
    return graph


def _assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    scale = max(1.0, float(theirs.detach().abs().max()))
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=TOLERANCE * scale)


def _assert_as_defined(graph: Graph, *, num_steps: int, num_rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cell = graph.cell().double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.normal_(std=0.6, generator=generator)
    size = sum(layer.size for layer in graph.layers if layer.role == "input")
    x_BTF = torch.randn(num_rows, num_steps, size, dtype=torch.float64, generator=generator, requires_grad=True)
    parameters = dict(cell.named_parameters())

    definition = Definition(graph, parameters, x_BTF)
    theirs_BTN = definition.output()
    if max(float(value.detach().abs().max()) for value in definition.known.values()) > 1e3:
        reject()

    state = cell.initial_state(num_rows)
    outputs = []
    for x_BF in x_BTF.unbind(1):
        y_BN, state = cell(x_BF, state)
        outputs.append(y_BN)
    ours_BTN = torch.stack(outputs, dim=1)
    _assert_close(ours_BTN, theirs_BTN)

    read_later = {one.source for one in graph.connections if one.delay > 0}
    assert {name.rpartition("_")[0] for name in cell.state_names} == read_later
    assert len(state) == sum(
        max(one.delay for one in graph.connections if one.source == source) for source in read_later
    )
    for name, value_BN in zip(cell.state_names, state, strict=True):
        layer, _, delay = name.rpartition("_")
        _assert_close(value_BN, definition.value(layer, num_steps - int(delay)))

    weights_BTN = torch.randn(ours_BTN.shape, dtype=torch.float64, generator=generator)
    leaves = [*parameters.values(), x_BTF]
    gradients = [
        torch.autograd.grad((y_BTN * weights_BTN).sum(), leaves, allow_unused=True, materialize_grads=True)
        if y_BTN.requires_grad
        else [torch.zeros_like(leaf) for leaf in leaves]
        for y_BTN in (ours_BTN, theirs_BTN)
    ]
    for one, other in zip(*gradients, strict=True):
        _assert_close(one, other)


@settings(deadline=None, max_examples=100)
@given(graph=_graphs(), num_steps=st.integers(1, 6), num_rows=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_random_graphs_are_as_defined(graph: Graph, num_steps: int, num_rows: int, seed: int) -> None:
    _assert_as_defined(graph, num_steps=num_steps, num_rows=num_rows, seed=seed)


@settings(deadline=None, max_examples=50)
@given(graph=_graphs())
def test_random_graphs_survive_a_document(graph: Graph) -> None:
    again = Graph.from_dict(graph.to_dict())
    assert again == graph
    assert again.wiring() == graph.wiring()


@pytest.mark.parametrize("build", [lstm, peephole_lstm, gru, delayed, two_loops])
@pytest.mark.parametrize("num_steps", [1, 2, 8])
def test_builders_are_as_defined(build, num_steps: int) -> None:
    _assert_as_defined(build(3, 4), num_steps=num_steps, num_rows=2, seed=5)
