"""Graphs against their definition: activations, well-known networks, and random graphs evaluated literally.

Shape legend: B rows, T steps, F features, H hidden units, N units of a layer.
"""

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from stretto import cells
from stretto.graph import (
    ACTIVATIONS,
    Connection,
    Graph,
    delayed_graph,
    lstm_graph,
    peephole_lstm_graph,
    two_loop_graph,
)
from stretto.kernels import loop_over_steps

MAX_DELAY = 4
TOLERANCE = 1e-10
F, H = 5, 4


def _erf(x: torch.Tensor) -> torch.Tensor:
    """Erf by its Maclaurin series, good for small arguments."""
    terms = [(-1) ** n / (math.factorial(n) * (2 * n + 1)) * x ** (2 * n + 1) for n in range(40)]
    return 2.0 / math.sqrt(math.pi) * torch.stack(terms).sum(dim=0)


def _selu(x: torch.Tensor) -> torch.Tensor:
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    return scale * torch.where(x > 0, x, alpha * (x.exp() - 1.0))


FORMULAS = {
    "linear": lambda x: x,
    "sigmoid": lambda x: 1.0 / (1.0 + (-x).exp()),
    "tanh": lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "softplus": lambda x: (1.0 + x.exp()).log(),
    "softmax": lambda x: x.exp() / x.exp().sum(dim=1, keepdim=True),
    "one_minus": lambda x: 1.0 - x,
    "negate": lambda x: -x,
    "abs": lambda x: torch.where(x > 0, x, -x),
    "cos": lambda x: torch.sin(x + math.pi / 2.0),
    "elu": lambda x: torch.where(x > 0, x, x.exp() - 1.0),
    "erf": _erf,
    "exp": lambda x: math.e**x,
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))),
    "hardtanh": lambda x: x.clamp(-1.0, 1.0),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "logsigmoid": lambda x: -(1.0 + (-x).exp()).log(),
    "mish": lambda x: x * torch.tanh((1.0 + x.exp()).log()),
    "selu": _selu,
    "silu": lambda x: x / (1.0 + (-x).exp()),
    "sin": lambda x: torch.cos(x - math.pi / 2.0),
    "softsign": lambda x: x / (1.0 + torch.where(x > 0, x, -x)),
    "square": lambda x: x * x,
}


IN_RANDOM_GRAPHS = ["linear", "sigmoid", "tanh", "relu", "softplus", "softmax", "one_minus", "negate", "sin"]
"""Activations whose formula is good for any argument."""


class Definition:
    """Computes any layer's value at any step, one at a time, from the declarations alone."""

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
            activation = draw(st.sampled_from(IN_RANDOM_GRAPHS))
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

    ours_BTN, state = loop_over_steps(cell, x_BTF, cell.initial_state(num_rows))
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
    again = Graph.from_dict(json.loads(json.dumps(graph.to_dict(), allow_nan=False)))
    assert again == graph
    assert (repr(again), again.to_dict()) == (repr(graph), graph.to_dict())
    assert again.wiring() == graph.wiring()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_its_formula(name: str) -> None:
    graph = Graph()
    graph.input("x", 4)
    graph.layer("h", 4, activation=name)
    graph.connect("x", "h", kind="identity")
    graph.output("h")
    x_BF = torch.linspace(-1.7, 1.9, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    ours_BN, _ = graph.cell()(x_BF, ())
    theirs_BN = FORMULAS[name](x_BF)
    torch.testing.assert_close(ours_BN, theirs_BN, rtol=TOLERANCE, atol=TOLERANCE)
    weights_BN = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    gradients = [torch.autograd.grad((y_BN * weights_BN).sum(), x_BF)[0] for y_BN in (ours_BN, theirs_BN)]
    torch.testing.assert_close(*gradients, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("peepholes", [False, True])
def test_gated_networks_are_the_cells_of_that_name(peepholes: bool) -> None:
    """With the same weights; tests/cells compares these cells with torch's and with their equations."""
    torch.manual_seed(3)
    ours = (peephole_lstm_graph if peepholes else lstm_graph)(F, H).cell().double()
    theirs = (cells.PeepholeLSTM if peepholes else cells.LSTM)(F, H).double()
    gates = ["input_gate", "forget_gate", "candidate", "output_gate"]
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.5)
        theirs.bias_hh.zero_()
        blocks = {
            "weight_x_to_{}_d0": theirs.weight_ih,
            "weight_h_to_{}_d1": theirs.weight_hh,
            "bias_{}": theirs.bias_ih,
        }
        for pattern, stacked in blocks.items():
            for gate, block in zip(gates, stacked.split(H), strict=True):
                ours.get_parameter(pattern.format(gate)).copy_(block)
        if peepholes:
            for gate, delay in (("input", 1), ("forget", 1), ("output", 0)):
                diagonal = ours.get_parameter(f"weight_c_to_{gate}_gate_d{delay}")
                diagonal.copy_(getattr(theirs, f"peephole_{gate[0]}"))
    x_BTF = torch.randn(3, 7, F, dtype=torch.float64)
    found, wanted = (loop_over_steps(cell, x_BTF, cell.initial_state(3))[0] for cell in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_simple_networks_have_the_connections_of_their_equations() -> None:
    assert [str(one) for one in delayed_graph(F, H, delays=(2, 5)).connections] == [
        "x -> h: full",
        "h -> h: full, delay 2",
        "h -> h: full, delay 5",
    ]
    graph = two_loop_graph(F, H)
    assert {str(one) for one in graph.connections} == {
        "x -> lower: full",
        "lower -> lower: full, delay 1",
        "x -> upper: full",
        "upper -> upper: full, delay 1",
        "lower -> upper: full",
        "lower -> upper: full, delay 2",
    }
    for layer in (*graph.layers[1:], delayed_graph(F, H).layers[1]):
        assert (layer.size, layer.aggregation, layer.activation, layer.bias) == (H, "sum", "tanh", True)
    assert graph.outputs == ("upper",)


def test_a_new_lstm_remembers_by_default() -> None:
    cell = lstm_graph(F, H).cell()
    assert torch.equal(cell.bias_forget_gate, torch.ones(H))
    assert torch.equal(cell.bias_input_gate, torch.zeros(H))
