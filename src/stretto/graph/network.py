"""A recurrent network written as layers and connections with delays, after Hwang and Sung (ICASSP 2015).

`Graph` is the description, `GraphCell` one step of it in plain PyTorch, and the functions at the end are well-known
networks as graphs: examples to start from, and subjects for measurements.

Shape legend: B rows of the batch, F features of the input, N units of a layer.
"""

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast, final

import torch
from torch import nn
from torch.nn import functional

from stretto.cells import Cell, State
from stretto.checks import check_int
from stretto.errors import StrettoError
from stretto.graph.network_wiring import (
    ACTIVATIONS,
    Aggregation,
    Connection,
    ConnectionKind,
    Layer,
    Range,
    Wire,
    Wiring,
    check_name,
    lay_out,
)

FORMAT: Final = "stretto.Graph 1"
SKIP_DELAY: Final = 2
"""The delay of the connection that `two_loop_graph` has from its lower to its upper layer."""


@final
class GraphCell(Cell):
    """One step of a `stretto.Graph`; built by `Graph.cell`.

    The state holds the last d values of each layer that is read with a delay of up to d, a tensor each. Weights start
    uniform within 1 / sqrt(n) of zero, n being the longer side of the matrix, as `torch.nn.LSTM` does with its hidden
    size; biases and learned initial values start where the layers say.

    Attributes:
        wiring: The graph, checked and laid out.
    """

    def __init__(self, wiring: Wiring) -> None:
        super().__init__()
        self.wiring = wiring
        for layer in wiring.layers:
            if layer.role == "constant":
                self.register_buffer(f"constant_{layer.name}", torch.empty(layer.size), persistent=False)
            if layer.bias:
                self.register_parameter(f"bias_{layer.name}", nn.Parameter(torch.empty(layer.size)))
            if layer.learn_initial:
                self.register_parameter(f"initial_value_{layer.name}", nn.Parameter(torch.empty(layer.size)))
            elif layer.name in wiring.depths:
                self.register_buffer(f"initial_value_{layer.name}", torch.empty(layer.size), persistent=False)
            for wire in wiring.wires.get(layer.name, ()):
                if wire.weight is not None:
                    self.register_parameter(wire.weight, nn.Parameter(torch.empty(wire.weight_shape)))
        self.reset_parameters()

    @property
    def state_names(self) -> tuple[str, ...]:
        """For each tensor of the state, its layer and how many steps ago the layer had that value."""
        return tuple(f"{name}_{delay}" for name, delay in self._delayed_values())

    def reset_parameters(self) -> None:
        """Draw the weights again and set everything else to its initial value."""
        with torch.no_grad():
            for layer in self.wiring.layers:
                for name, start in (
                    (f"constant_{layer.name}", layer.initial),
                    (f"initial_value_{layer.name}", layer.initial),
                    (f"bias_{layer.name}", layer.initial_bias),
                ):
                    vector_N = getattr(self, name, None)
                    if vector_N is not None:
                        vector_N.fill_(start)
                for wire in self.wiring.wires.get(layer.name, ()):
                    if wire.weight is not None:
                        bound = max(wire.weight_shape) ** -0.5
                        self.get_parameter(wire.weight).uniform_(-bound, bound)

    def initial_state(self, batch_size: int) -> State:
        """The initial value of every layer that is read with a delay, once per step of delay."""
        return tuple(getattr(self, f"initial_value_{name}").repeat(batch_size, 1) for name, _ in self._delayed_values())

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step; `x_t` holds the inputs of the graph side by side, the output its output layers likewise."""
        delayed = self._delayed_values()
        self._check(x_t, state=state, num_delayed=len(delayed))
        # values[name, d] is what the layer was d steps ago. In the next state, each moves on by one step.
        values: dict[tuple[str, int], torch.Tensor] = dict(zip(delayed, state, strict=True))
        values.update(self._inputs(x_t))
        for layer in self.wiring.layers:
            if layer.role == "constant":
                values[layer.name, 0] = self.get_buffer(f"constant_{layer.name}")
            elif layer.role == "hidden":
                values[layer.name, 0] = self._value(layer, values=values)
        rows = len(x_t)
        outputs = [_with_rows(values[name, 0], rows=rows) for name in self.wiring.outputs]
        following = tuple(_with_rows(values[name, delay - 1], rows=rows) for name, delay in delayed)
        return _concatenate(outputs), following

    @property
    def input_size(self) -> int:
        """Features per step."""
        return self.wiring.input_size

    def with_input_size(self, input_size: int) -> Cell:
        """A cell of the same graph with fresh parameters and an input of another size.

        Raises:
            StrettoError: The graph has several inputs, or cannot have an input of that size.
        """
        cell = GraphCell(self.wiring.with_input_size(input_size))
        like = next(iter((*self.parameters(), *self.buffers())), None)
        return cell if like is None else cell.to(device=like.device, dtype=like.dtype)

    def extra_repr(self) -> str:
        """The layers in the order of a step, and the connections."""
        return "\n".join(map(str, (*self.wiring.layers, *self.wiring.connections)))

    def _delayed_values(self) -> list[tuple[str, int]]:
        return [(name, delay) for name, depth in self.wiring.depths.items() for delay in range(1, depth + 1)]

    def _check(self, x_t: torch.Tensor, *, state: State, num_delayed: int) -> None:
        inputs, size = ", ".join(map(repr, self.wiring.inputs)), self.wiring.input_size
        if x_t.dim() != 2 or x_t.shape[1] != size:
            raise StrettoError(
                f"the graph was given an input of shape {tuple(x_t.shape)} for its input {inputs} of {size} features",
                fix=f"Give rows of the batch times {size} features.",
            )
        if not isinstance(state, tuple) or len(state) != num_delayed:
            raise StrettoError(
                f"the graph was given a state that is not a tuple of {num_delayed} tensors",
                fix="Start from initial_state(batch_size) and pass on the state that each step returns.",
            )

    def _inputs(self, x_BF: torch.Tensor) -> dict[tuple[str, int], torch.Tensor]:
        sizes = {layer.name: layer.size for layer in self.wiring.layers}
        names, values, first = self.wiring.inputs, {}, 0
        for name in names:
            values[name, 0] = x_BF if len(names) == 1 else x_BF[:, first : first + sizes[name]]
            first += sizes[name]
        return values

    def _value(self, layer: Layer, *, values: dict[tuple[str, int], torch.Tensor]) -> torch.Tensor:
        """The value of a hidden layer in this step."""
        wires = self.wiring.wires[layer.name]
        arriving = [self._transmit(values[wire.source, wire.delay], wire=wire) for wire in wires]
        combine = operator.mul if layer.aggregation == "multiply" else operator.add
        combined = []
        for units, numbers in self.wiring.parts[layer.name]:
            terms = [_slice(arriving[number], of=wires[number].destination_range, to=units) for number in numbers]
            if layer.bias:
                terms.insert(0, _slice(self.get_parameter(f"bias_{layer.name}"), of=(0, layer.size), to=units))
            combined.append(functools.reduce(combine, terms))
        return ACTIVATIONS[layer.activation](_concatenate(combined))

    def _transmit(self, value_BN: torch.Tensor, *, wire: Wire) -> torch.Tensor:
        """The source's value as it arrives at the other end of the wire."""
        if wire.source_range is not None:
            value_BN = value_BN[..., wire.source_range[0] : wire.source_range[1]]
        if wire.kind == "broadcast":
            first, end = wire.destination_range
            return value_BN.expand(*value_BN.shape[:-1], end - first)
        if wire.weight is None:
            return value_BN
        weight = self.get_parameter(wire.weight)
        return functional.linear(value_BN, weight) if wire.kind == "full" else value_BN * weight


def _slice(value_BN: torch.Tensor, *, of: Range, to: Range) -> torch.Tensor:
    """The columns `to` of a value that has the columns `of`."""
    return value_BN if of == to else value_BN[..., to[0] - of[0] : to[1] - of[0]]


def _with_rows(value: torch.Tensor, *, rows: int) -> torch.Tensor:
    """A value that depends only on parameters is a vector, the same for every row."""
    return value if value.dim() == 2 else value.expand(rows, -1)


def _concatenate(values: list[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    rows = next((len(value) for value in values if value.dim() == 2), None)
    return torch.cat(values if rows is None else [_with_rows(value, rows=rows) for value in values], dim=-1)


@final
class Graph:
    """Layers, and connections that carry their values to others in the same step or some steps later.

    A layer adds or multiplies everything that arrives and applies its activation. Gates are layers that multiply; a
    loop is a cycle of connections of which at least one has a delay. Declare layers and connections in any order.

    Example:
        >>> graph = stretto.Graph()
        >>> x = graph.input("x", 8)
        >>> h = graph.layer("h", 16, activation="tanh", bias=True)
        >>> graph.connect(x, h)
        >>> graph.connect(h, h, delay=1)
        >>> graph.connect(h, h, delay=3, kind="diagonal")
        >>> graph.output(h)
        >>> rnn = stretto.RNN(graph.cell())
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self._layers: dict[str, Layer] = {}
        self._connections: list[Connection] = []
        self._outputs: list[str] = []

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers as declared, inputs and constants among them."""
        return tuple(self._layers.values())

    @property
    def connections(self) -> tuple[Connection, ...]:
        """All connections as declared."""
        return tuple(self._connections)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input layers; their sizes share the columns of the cell's input in this order."""
        return tuple(layer.name for layer in self.layers if layer.role == "input")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The output layers; their values, concatenated in this order, are the cell's output."""
        return tuple(self._outputs)

    def input(self, name: str, size: int, *, initial: float = 0.0, learn_initial: bool = False) -> str:
        """Declare an input; return its name.

        Args:
            name: Its name.
            size: Its features.
            initial: Its value before the first step, for connections with a delay.
            learn_initial: Whether that value is learned, from `initial` on.
        """
        return self._add(Layer(name=name, size=size, role="input", initial=initial, learn_initial=learn_initial))

    def constant(self, name: str, size: int = 1, *, value: float = 1.0) -> str:
        """Declare a layer that is `value` at every step; return its name."""
        return self._add(Layer(name=name, size=size, role="constant", initial=value))

    def layer(
        self,
        name: str,
        size: int,
        *,
        aggregation: Aggregation = "sum",
        activation: str = "linear",
        bias: bool = False,
        initial_bias: float = 0.0,
        initial: float = 0.0,
        learn_initial: bool = False,
    ) -> str:
        """Declare a layer; return its name.

        Args:
            name: Its name, and part of the names of its parameters.
            size: Its units.
            aggregation: "sum" or "multiply": how everything that arrives is combined.
            activation: Applied to the result: "linear", "sigmoid", "tanh", "relu", "softplus", "softmax", "one_minus",
                "negate" or another of `stretto.graph.ACTIVATIONS`.
            bias: Whether to add a vector of parameters to the sum.
            initial_bias: Where that vector starts.
            initial: The value before the first step, for connections with a delay.
            learn_initial: Whether that value is learned, from `initial` on.
        """
        return self._add(
            Layer(
                name=name,
                size=size,
                aggregation=aggregation,
                activation=activation,
                bias=bias,
                initial_bias=initial_bias,
                initial=initial,
                learn_initial=learn_initial,
            )
        )

    def connect(
        self,
        source: str,
        destination: str,
        *,
        kind: ConnectionKind = "full",
        delay: int = 0,
        source_range: Range | slice | None = None,
        destination_range: Range | slice | None = None,
    ) -> None:
        """Carry the value of one layer to another; two equal connections count twice.

        Args:
            source: The layer that is read; it may be declared later.
            destination: The layer that it arrives at; it may be declared later.
            kind: "full" (a matrix of weights), "diagonal" (one weight per unit), "identity" (no weights) or
                "broadcast" (one unit repeated, no weights).
            delay: Steps until it arrives; 0 is within the step.
            source_range: The units that are read; all if left out.
            destination_range: The units that it arrives at; all if left out.
        """
        self._connections.append(
            Connection(
                source=source,
                destination=destination,
                kind=kind,
                delay=delay,
                # The connection makes pairs of slices.
                source_range=cast("Range | None", source_range),
                destination_range=cast("Range | None", destination_range),
            )
        )

    def output(self, name: str) -> None:
        """Make a layer an output; several are concatenated in the order of these calls."""
        check_name(name, what="the name of an output")
        if name in self._outputs:
            raise StrettoError(f"layer {name!r} is an output already", fix="Name each output once.")
        self._outputs.append(name)

    def wiring(self) -> Wiring:
        """Check the graph and lay it out as one step computes it.

        Raises:
            StrettoError: Layers and connections do not fit together; the message names the layers.
        """
        return lay_out(self.layers, connections=self.connections, outputs=self.outputs)

    def cell(self) -> GraphCell:
        """A recurrent cell that computes this graph, with its own parameters; later changes do not affect it.

        Raises:
            StrettoError: Layers and connections do not fit together; the message names the layers.
        """
        return GraphCell(self.wiring())

    def to_dict(self) -> dict[str, Any]:
        """The graph as plain values that JSON can hold; the weights belong to its cells.

        Raises:
            StrettoError: Layers and connections do not fit together; the message names the layers.
        """
        self.wiring()
        connections = [dataclasses.asdict(connection) for connection in self._connections]
        for connection in connections:
            for end in ("source_range", "destination_range"):
                connection[end] = None if connection[end] is None else list(connection[end])
        return {
            "format": FORMAT,
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
            "connections": connections,
            "outputs": list(self.outputs),
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Graph":
        """The graph that `to_dict` wrote, checked again; settings of layers and connections may be left out.

        Raises:
            StrettoError: The document has another form, or its graph does not fit together.
        """
        _check_document(document)
        graph = cls()
        for settings in document["layers"]:
            graph._add(Layer(**settings))
        graph._connections = [Connection(**settings) for settings in document["connections"]]
        for name in document["outputs"]:
            graph.output(name)
        graph.wiring()
        return graph

    def __eq__(self, other: object) -> bool:
        """Whether both have the same layers and connections in any order, and the same inputs and outputs in order."""
        if not isinstance(other, Graph):
            return NotImplemented
        return (
            self._layers == other._layers
            and Counter(self._connections) == Counter(other._connections)
            and self.inputs == other.inputs
            and self.outputs == other.outputs
        )

    def __repr__(self) -> str:
        lines = [*map(str, self.layers), *map(str, self.connections), *(f"output {name}" for name in self.outputs)]
        return "\n  ".join(["Graph(", *lines]) + "\n)" if lines else "Graph()"

    def _add(self, layer: Layer) -> str:
        if layer.name in self._layers:
            raise StrettoError(f"there is a layer {layer.name!r} already", fix="Give every layer a name of its own.")
        self._layers[layer.name] = layer
        return layer.name


def _check_document(document: object) -> None:
    """Refuse what has another form than `Graph.to_dict` gives; layers and connections check their own values."""
    lists = ("layers", "connections", "outputs")
    if not isinstance(document, Mapping) or set(document) != {"format", *lists} or document["format"] != FORMAT:
        given = sorted(map(str, document)) if isinstance(document, Mapping) else type(document).__name__
        raise StrettoError(
            f"this does not describe a graph: {given}",
            fix=f"Give what Graph.to_dict wrote, with 'format' {FORMAT!r} and the lists {', '.join(map(repr, lists))}.",
        )
    for key in lists:
        if not isinstance(document[key], list | tuple):
            raise StrettoError(f"{key!r} of the graph is {document[key]!r}", fix="Give a list.")
    for key, form, needed in (
        ("layers", Layer, {"name", "size"}),
        ("connections", Connection, {"source", "destination"}),
    ):
        known = [field.name for field in dataclasses.fields(form)]
        for settings in document[key]:
            if not isinstance(settings, Mapping) or not needed <= set(settings) <= set(known):
                raise StrettoError(
                    f"{settings!r} among the {key!r} of the graph lacks a setting or has an unknown one",
                    fix=f"Give at least {' and '.join(sorted(needed))}, and only: {', '.join(known)}.",
                )


def lstm_graph(input_size: int, hidden_size: int) -> Graph:
    """An LSTM as `torch.nn.LSTMCell` computes it, with one bias for each gate; its forget gate starts open."""
    graph = Graph()
    x = graph.input("x", input_size)
    for gate in ("input_gate", "forget_gate", "output_gate"):
        start = 1.0 if gate == "forget_gate" else 0.0
        graph.layer(gate, hidden_size, activation="sigmoid", bias=True, initial_bias=start)
    graph.layer("candidate", hidden_size, activation="tanh", bias=True)
    for layer in ("input_gate", "forget_gate", "candidate", "output_gate"):
        graph.connect(x, layer)
        graph.connect("h", layer, delay=1)
    _add_product(graph, "written", hidden_size, of=("input_gate", "candidate"))
    _add_product(graph, "kept", hidden_size, of=("forget_gate",), earlier="c")
    graph.layer("c", hidden_size)
    graph.connect("written", "c", kind="identity")
    graph.connect("kept", "c", kind="identity")
    graph.layer("squashed", hidden_size, activation="tanh")
    graph.connect("c", "squashed", kind="identity")
    _add_product(graph, "h", hidden_size, of=("output_gate", "squashed"))
    graph.output("h")
    return graph


def peephole_lstm_graph(input_size: int, hidden_size: int) -> Graph:
    """An LSTM whose gates also see the cell, unit by unit: the output gate as it is now, the others as it was."""
    graph = lstm_graph(input_size, hidden_size)
    graph.connect("c", "input_gate", kind="diagonal", delay=1)
    graph.connect("c", "forget_gate", kind="diagonal", delay=1)
    graph.connect("c", "output_gate", kind="diagonal")
    return graph


def gru_graph(input_size: int, hidden_size: int) -> Graph:
    """A GRU as `torch.nn.GRUCell` computes it, which resets after the product with the weights."""
    graph = Graph()
    x = graph.input("x", input_size)
    for gate in ("reset_gate", "update_gate"):
        graph.layer(gate, hidden_size, activation="sigmoid", bias=True)
        graph.connect(x, gate)
        graph.connect("h", gate, delay=1)
    graph.layer("recalled", hidden_size, bias=True)
    graph.connect("h", "recalled", delay=1)
    _add_product(graph, "reset", hidden_size, of=("reset_gate", "recalled"))
    graph.layer("candidate", hidden_size, activation="tanh", bias=True)
    graph.connect(x, "candidate")
    graph.connect("reset", "candidate", kind="identity")
    graph.layer("renewal", hidden_size, activation="one_minus")
    graph.connect("update_gate", "renewal", kind="identity")
    _add_product(graph, "written", hidden_size, of=("renewal", "candidate"))
    _add_product(graph, "kept", hidden_size, of=("update_gate",), earlier="h")
    graph.layer("h", hidden_size)
    graph.connect("written", "h", kind="identity")
    graph.connect("kept", "h", kind="identity")
    graph.output("h")
    return graph


def delayed_graph(input_size: int, hidden_size: int, delays: Sequence[int] = (1, 3)) -> Graph:
    """A simple recurrent layer that reads its own value of several steps ago, with weights for each delay.

    Raises:
        StrettoError: `delays` is empty, or holds one below 1 or one twice.
    """
    steps = [check_int(delay, name="delay", owner=f"delayed_graph with delays={tuple(delays)}") for delay in delays]
    if not steps or len(set(steps)) < len(steps):
        raise StrettoError(f"the delays are {tuple(steps)}", fix="Give one or more, each of them once.")
    graph = Graph()
    x = graph.input("x", input_size)
    h = graph.layer("h", hidden_size, activation="tanh", bias=True)
    graph.connect(x, h)
    for delay in steps:
        graph.connect(h, h, delay=delay)
    graph.output(h)
    return graph


def two_loop_graph(input_size: int, hidden_size: int) -> Graph:
    """Two simple recurrent layers, one above the other.

    The upper one reads the lower one as it is now and as it was two steps ago, and the input directly.
    """
    graph = Graph()
    x = graph.input("x", input_size)
    for name in ("lower", "upper"):
        graph.layer(name, hidden_size, activation="tanh", bias=True)
        graph.connect(x, name)
        graph.connect(name, name, delay=1)
    graph.connect("lower", "upper")
    graph.connect("lower", "upper", delay=SKIP_DELAY)
    graph.output("upper")
    return graph


def _add_product(graph: Graph, name: str, size: int, *, of: Sequence[str], earlier: str | None = None) -> None:
    """A layer that multiplies those named, unit by unit, and `earlier` as it was one step ago."""
    graph.layer(name, size, aggregation="multiply")
    for factor in of:
        graph.connect(factor, name, kind="identity")
    if earlier is not None:
        graph.connect(earlier, name, kind="identity", delay=1)
