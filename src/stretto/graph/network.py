"""A recurrent network written as layers and connections with delays, after Hwang and Sung (ICASSP 2015).

`Layer` and `Connection` are what a graph is declared with, `Wiring` is a graph checked and laid out, `GraphCell` one
step of it in plain PyTorch, and `Graph` the description that users write. The functions at the end are well-known
networks as graphs: examples to start from, and subjects for measurements.

The order of a step is a topological sort of the connections without delay. Delayed connections read earlier values,
which the state holds:

    x --+--> h --+--> y             order x, h, y;  h is read with delays 1 and 3, so the state holds the last
        ^        |                  three values of h
        +--d=1---+
        +--d=3---+

Shape legend: B rows of the batch, F features of the input, N units of a layer.
"""

import dataclasses
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast, final, get_args

import networkx as nx
import torch
from torch import nn
from torch.nn import functional

from stretto.cells import Cell, State
from stretto.checks import check_bool, check_choice, check_float, check_int
from stretto.errors import StrettoError

FORMAT: Final = "stretto.Graph 1"
Role: TypeAlias = Literal["hidden", "input", "constant"]
Aggregation: TypeAlias = Literal["sum", "multiply"]
ConnectionKind: TypeAlias = Literal["full", "identity", "broadcast", "diagonal"]
Range: TypeAlias = tuple[int, int]
Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: Final[dict[str, Activation]] = {
    "linear": lambda x_BN: x_BN,
    "softmax": lambda x_BN: torch.softmax(x_BN, dim=-1),
    "one_minus": lambda x_BN: 1.0 - x_BN,
    "negate": torch.neg,
    **{name: getattr(torch, name) for name in "sigmoid tanh relu abs cos erf exp sin square".split()},
    **{
        name: getattr(functional, name)
        for name in "softplus elu gelu hardtanh leaky_relu logsigmoid mish selu silu softsign".split()
    },
}
"""The functions that a layer may apply to its sum or product, by name."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A named vector that takes a new value at every step, with the settings of `Graph.layer`.

    A layer of the role "hidden" is computed from what arrives, an "input" is given at every step, and a "constant" is
    `initial` at all steps.
    """

    name: str
    size: int
    role: Role = "hidden"
    aggregation: Aggregation = "sum"
    activation: str = "linear"
    bias: bool = False
    initial_bias: float = 0.0
    initial: float = 0.0
    learn_initial: bool = False

    def __post_init__(self) -> None:
        _check_name(self.name, what="the name of a layer")
        owner = f"layer {self.name!r}"
        object.__setattr__(self, "size", check_int(self.size, name="size", owner=owner))
        for number in ("initial", "initial_bias"):
            object.__setattr__(self, number, check_float(getattr(self, number), name=number, owner=owner))
        for flag in ("bias", "learn_initial"):
            check_bool(getattr(self, flag), name=flag, owner=owner)
        check_choice(self.role, name="role", choices=get_args(Role), owner=owner)
        check_choice(self.aggregation, name="aggregation", choices=get_args(Aggregation), owner=owner)
        check_choice(self.activation, name="activation", choices=ACTIVATIONS, owner=owner)
        self._check_combination()

    def __str__(self) -> str:
        if self.role == "constant":
            return f"constant {self.name}: {self.size}, value {self.initial:g}"
        words = [str(self.size)]
        if self.role == "hidden":
            words += [self.aggregation, self.activation]
        if self.bias:
            words.append("bias" if self.initial_bias == 0.0 else f"bias from {self.initial_bias:g}")
        if self.learn_initial:
            words.append(f"learns its initial value from {self.initial:g}")
        elif self.initial != 0.0:
            words.append(f"initial value {self.initial:g}")
        return f"{'layer' if self.role == 'hidden' else 'input'} {self.name}: {', '.join(words)}"

    def _check_combination(self) -> None:
        """Refuse settings that could have no effect."""
        computes = self.aggregation != "sum" or self.activation != "linear" or self.bias
        if self.role != "hidden" and computes:
            raise StrettoError(
                f"the {self.role} layer {self.name!r} has an aggregation, an activation or a bias",
                fix="Only hidden layers compute: connect it to one that does.",
            )
        if self.role == "constant" and self.learn_initial:
            raise StrettoError(
                f"the constant layer {self.name!r} has 'learn_initial' set",
                fix="Connect a constant layer with a full connection, whose weights are learned.",
            )
        if self.bias and self.aggregation == "multiply":
            raise StrettoError(
                f"layer {self.name!r} multiplies and has a bias",
                fix="Add the bias in a layer with aggregation 'sum', connected to this one or fed by it.",
            )
        if self.initial_bias != 0.0 and not self.bias:
            raise StrettoError(f"layer {self.name!r} has an 'initial_bias' and no bias", fix="Set bias=True.")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """An edge that carries one layer's value, of this or an earlier step, to another layer; see `Graph.connect`.

    Ranges are (first, end), or None for all units.
    """

    source: str
    destination: str
    kind: ConnectionKind = "full"
    delay: int = 0
    source_range: Range | None = None
    destination_range: Range | None = None

    def __post_init__(self) -> None:
        _check_name(self.source, what="the source of a connection")
        _check_name(self.destination, what="the destination of a connection")
        owner = f"the connection {self.ends}"
        check_choice(self.kind, name="kind", choices=get_args(ConnectionKind), owner=owner)
        object.__setattr__(self, "delay", check_int(self.delay, name="delay", at_least=0, owner=owner))
        for end in ("source_range", "destination_range"):
            object.__setattr__(self, end, _check_range(getattr(self, end), name=end, owner=owner))

    @property
    def ends(self) -> str:
        """Both layers, as messages quote them."""
        return f"{self.source!r} -> {self.destination!r}"

    def __str__(self) -> str:
        source, destination = (
            name if units is None else f"{name}[{units[0]}:{units[1]}]"
            for name, units in ((self.source, self.source_range), (self.destination, self.destination_range))
        )
        return f"{source} -> {destination}: {self.kind}{f', delay {self.delay}' if self.delay else ''}"


def _check_name(value: object, *, what: str) -> None:
    """Parameters are named after it."""
    if not isinstance(value, str) or not value.isidentifier():
        raise StrettoError(
            f"{what} is {value!r}, which is not a plain name",
            fix="Use letters, digits and underscores, with no digit in front.",
        )


def _check_range(value: object, *, name: str, owner: str) -> Range | None:
    """`value`, a slice or a pair of unit numbers, as a pair; None and `slice(None)` are all units."""
    if value is None or (isinstance(value, slice) and value == slice(None)):
        return None
    if isinstance(value, slice) and value.step in (None, 1):
        value = (0 if value.start is None else value.start, value.stop)
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise StrettoError(
            f"{owner} got {name}={value!r}", fix="Give a slice without a step, or the first unit and the end."
        )
    first, end = (check_int(unit, name=f"a unit of {name}", at_least=0, owner=owner) for unit in value)
    if first >= end:
        raise StrettoError(
            f"{owner} got {name}={value!r}, which holds no unit", fix="Give an end above the first unit."
        )
    return first, end


class Wire(NamedTuple):
    """A connection with its ranges resolved, and the name of its parameter; None without weights."""

    source: str
    delay: int
    kind: ConnectionKind
    source_range: Range
    destination_range: Range
    weight: str | None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What one step does. Graphs of equal content have equal wirings, in whatever order they were declared."""

    layers: tuple[Layer, ...]  # each after those that it reads within the step
    connections: tuple[Connection, ...]  # sorted
    inputs: tuple[str, ...]  # they share the columns of the input, in this order
    outputs: tuple[str, ...]  # their values, concatenated, are the output
    # What arrives at each hidden layer, the earliest known first, so that sums of it can leave the time loop.
    wires: Mapping[str, tuple[Wire, ...]]
    # Each hidden layer, cut where a connection begins or ends: units, and the numbers of the wires that arrive there.
    parts: Mapping[str, tuple[tuple[Range, tuple[int, ...]], ...]]
    delayed: tuple[tuple[str, int], ...]  # values that the state holds: the layer, and how many steps ago it had them


def lay_out(layers: Iterable[Layer], *, connections: Sequence[Connection], outputs: Sequence[str]) -> Wiring:
    """Check a graph and lay it out.

    Raises:
        StrettoError: Layers and connections do not fit together; the message names the layers.
    """
    named = {layer.name: layer for layer in layers}
    _check(named, connections=connections, outputs=outputs)
    order = _step_order(named, connections=connections)
    ordered = sorted(connections, key=_sorting_key)
    earliness = _earliness(named, connections=connections)
    paired = sorted(zip(ordered, _weight_names(ordered), strict=True), key=lambda pair: earliness[pair[0]])
    wires: dict[str, tuple[Wire, ...]] = {name: () for name in order if named[name].role == "hidden"}
    for connection, weight in paired:
        wire = Wire(
            source=connection.source,
            delay=connection.delay,
            kind=connection.kind,
            source_range=_units(named[connection.source], connection.source_range),
            destination_range=_units(named[connection.destination], connection.destination_range),
            weight=weight,
        )
        wires[connection.destination] += (wire,)
    depths = dict.fromkeys(order, 0)
    for connection in connections:
        depths[connection.source] = max(depths[connection.source], connection.delay)
    return Wiring(
        layers=tuple(named[name] for name in order),
        connections=tuple(ordered),
        inputs=tuple(name for name, layer in named.items() if layer.role == "input"),
        outputs=tuple(outputs),
        wires=wires,
        parts={name: _parts(arriving) for name, arriving in wires.items()},
        delayed=tuple((name, delay) for name, depth in depths.items() for delay in range(1, depth + 1)),
    )


def _step_order(names: Iterable[str], *, connections: Sequence[Connection]) -> tuple[str, ...]:
    """Every layer after all that it reads in the same step, the same order however the layers were declared."""
    graph = _digraph(names, connections=[one for one in connections if one.delay == 0])
    for component in sorted(sorted(each) for each in nx.strongly_connected_components(graph)):
        if len(component) > 1 or graph.has_edge(component[0], component[0]):
            edges = nx.find_cycle(graph.subgraph(component), source=component[0])
            cycle = " -> ".join([repr(edges[0][0]), *(repr(edge[1]) for edge in edges)])
            raise StrettoError(
                f"the layers {cycle} form a cycle without delay: each waits for the others within a step",
                fix="Give at least one of these connections a delay of 1 or more.",
            )
    return tuple(nx.lexicographical_topological_sort(graph))


def _reach(starts: Iterable[str], *, connections: Sequence[Connection], backwards: bool = False) -> set[str]:
    """The layers that paths from `starts` lead to, or with `backwards` those that paths to `starts` come from."""
    graph = _digraph(starts, connections=connections)
    ends = nx.ancestors if backwards else nx.descendants
    return set(starts).union(*(ends(graph, start) for start in starts))


def _digraph(names: Iterable[str], *, connections: Iterable[Connection]) -> nx.DiGraph:
    """Built in sorted order, so that results do not depend on the order of declaration."""
    graph = nx.DiGraph()
    graph.add_nodes_from(sorted(names))
    graph.add_edges_from(sorted((one.source, one.destination) for one in connections))
    return graph


def _earliness(layers: Mapping[str, Layer], *, connections: Sequence[Connection]) -> dict[Connection, int]:
    """When each is known: with the parameters 0, with the input 1, after another loop 2, in the layer's own loop 3."""
    components = nx.strongly_connected_components(_digraph(layers, connections=connections))
    loop_of = {name: number for number, component in enumerate(components) for name in component}
    within_step = [one for one in connections if one.delay == 0]
    behind_delay = _reach({one.destination for one in connections if one.delay > 0}, connections=within_step)
    ranks = {}
    for one in connections:
        if loop_of[one.source] == loop_of[one.destination]:
            ranks[one] = 3
        elif one.delay > 0 or one.source in behind_delay:
            ranks[one] = 2
        else:
            ranks[one] = 0 if layers[one.source].role == "constant" else 1
    return ranks


def _sorting_key(connection: Connection) -> tuple[str, str, int, str, Range, Range]:
    return (
        connection.destination,
        connection.source,
        connection.delay,
        connection.kind,
        connection.source_range or (0, 0),
        connection.destination_range or (0, 0),
    )


def _weight_names(connections: Iterable[Connection]) -> list[str | None]:
    """A name for each that has weights; those that would share one are numbered from the second on."""
    names: list[str | None] = []
    seen = Counter[str]()
    for one in connections:
        if one.kind not in ("full", "diagonal"):
            names.append(None)
            continue
        name = f"weight_{one.source}_to_{one.destination}_d{one.delay}"
        for word, part in (("from", one.source_range), ("into", one.destination_range)):
            if part is not None:
                name += f"_{word}_{part[0]}_{part[1]}"
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return names


def _units(layer: Layer, part: Range | None) -> Range:
    return (0, layer.size) if part is None else part


def _parts(wires: Sequence[Wire]) -> tuple[tuple[Range, tuple[int, ...]], ...]:
    cuts = sorted({unit for wire in wires for unit in wire.destination_range})
    parts = []
    for first, end in itertools.pairwise(cuts):
        ranges = enumerate(wire.destination_range for wire in wires)
        parts.append(((first, end), tuple(number for number, (low, high) in ranges if low <= first and end <= high)))
    return tuple(parts)


def _check(layers: Mapping[str, Layer], *, connections: Sequence[Connection], outputs: Sequence[str]) -> None:
    """Refuse what cannot be computed or would be computed for nothing; cycles are left to `_step_order`."""
    _check_names(layers, connections=connections, outputs=outputs)
    for connection in connections:
        _check_ends(layers, connection=connection)
        _check_widths(layers, connection=connection)
    for layer in layers.values():
        if layer.role == "hidden":
            _check_units_are_fed(layer, connections=[one for one in connections if one.destination == layer.name])
    _check_paths(layers, connections=connections, outputs=outputs)
    delayed = {connection.source for connection in connections if connection.delay > 0}
    for layer in layers.values():
        has_initial = layer.role != "constant" and (layer.learn_initial or layer.initial != 0.0)
        if has_initial and layer.name not in delayed:
            raise StrettoError(
                f"layer {layer.name!r} has an initial value, but no connection reads it with a delay",
                fix="Leave 'initial' and 'learn_initial' out, or connect the layer with a delay of 1 or more.",
            )


def _check_names(layers: Mapping[str, Layer], *, connections: Sequence[Connection], outputs: Sequence[str]) -> None:
    known = f"The layers are: {_quote(layers) or 'none'}."
    for connection in connections:
        for name in (connection.source, connection.destination):
            if name not in layers:
                raise StrettoError(f"the connection {connection.ends} names {name!r}, which is not a layer", fix=known)
    for name in outputs:
        if name not in layers:
            raise StrettoError(f"the output {name!r} is not a layer", fix=known)
    if not any(layer.role == "input" for layer in layers.values()):
        raise StrettoError("the graph has no input", fix="Declare one with graph.input(name, size).")
    if not outputs:
        raise StrettoError("the graph has no output", fix="Choose a layer with graph.output(name).")


def _check_ends(layers: Mapping[str, Layer], *, connection: Connection) -> None:
    source, destination = layers[connection.source], layers[connection.destination]
    if destination.role != "hidden":
        raise StrettoError(
            f"the connection {connection.ends} ends at a layer with the role {destination.role!r}",
            fix="Connect to a layer declared with graph.layer(name, size).",
        )
    if source.role == "constant" and connection.delay > 0:
        raise StrettoError(
            f"the connection {connection.ends} reads the constant layer {source.name!r} with delay {connection.delay}",
            fix="A constant is the same at every step: use delay 0.",
        )


def _check_widths(layers: Mapping[str, Layer], *, connection: Connection) -> None:
    ends = (
        (layers[connection.source], connection.source_range),
        (layers[connection.destination], connection.destination_range),
    )
    for layer, part in ends:
        if part is not None and part[1] > layer.size:
            raise StrettoError(
                f"the connection {connection.ends} uses units {part[0]} to {part[1]} of {layer.name!r}, "
                f"which has {layer.size}",
                fix="Keep the range within the layer, or make the layer larger.",
            )
    given, wanted = (end - first for first, end in (_units(layer, part) for layer, part in ends))
    if connection.kind in ("identity", "diagonal") and given != wanted:
        raise StrettoError(
            f"the {connection.kind} connection {connection.ends} goes from {given} to {wanted} units",
            fix="Make both sides equally wide, or use kind='full'.",
        )
    if connection.kind == "broadcast" and given != 1:
        raise StrettoError(
            f"the broadcast connection {connection.ends} reads {given} units",
            fix="Read a single unit, for instance with source_range=(0, 1), or use another kind.",
        )


def _check_units_are_fed(layer: Layer, *, connections: Sequence[Connection]) -> None:
    if not connections:
        raise StrettoError(f"nothing is connected to layer {layer.name!r}", fix="Connect it, or leave it out.")
    fed = {unit for one in connections for unit in range(*_units(layer, one.destination_range))}
    unfed = min(set(range(layer.size)) - fed, default=None)
    if unfed is not None:
        raise StrettoError(
            f"no connection arrives at unit {unfed} of layer {layer.name!r}, though others of its {layer.size} are fed",
            fix="Make the destination ranges cover the layer, or make the layer smaller.",
        )


def _check_paths(layers: Mapping[str, Layer], *, connections: Sequence[Connection], outputs: Sequence[str]) -> None:
    starts = [layer.name for layer in layers.values() if layer.role != "hidden"]
    reached = _reach(starts, connections=connections)
    if idle := [name for name in layers if name not in reached]:
        raise StrettoError(
            f"no input or constant leads to: {_quote(idle)}",
            fix="Connect an input to what they read, or leave them out.",
        )
    used = _reach(outputs, connections=connections, backwards=True)
    if unused := [name for name in layers if name not in used]:
        raise StrettoError(
            f"no output depends on: {_quote(unused)}",
            fix="Connect them onwards, make them outputs, or leave them out.",
        )


def _quote(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


@final
class GraphCell(Cell):
    """One step of a `stretto.Graph`; built by `Graph.cell`.

    The state holds the last d values of each layer that is read with a delay of up to d, a tensor each. Weights start
    uniform within 1 / sqrt(n) of zero, n being the longer side of the matrix, as `torch.nn.LSTM` does with its hidden
    size; biases and learned initial values start where the layers say. `wiring` is the graph, checked and laid out.
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
            elif any(name == layer.name for name, _ in wiring.delayed):
                self.register_buffer(f"initial_value_{layer.name}", torch.empty(layer.size), persistent=False)
            for wire in wiring.wires.get(layer.name, ()):
                if wire.weight is not None:
                    given, wanted = (end - first for first, end in (wire.source_range, wire.destination_range))
                    shape = (wanted, given) if wire.kind == "full" else (wanted,)
                    self.register_parameter(wire.weight, nn.Parameter(torch.empty(shape)))
        self.reset_parameters()

    @property
    def state_names(self) -> tuple[str, ...]:
        """For each tensor of the state, its layer and how many steps ago the layer had that value."""
        return tuple(f"{name}_{delay}" for name, delay in self.wiring.delayed)

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
                        weight = self.get_parameter(wire.weight)
                        bound = max(weight.shape) ** -0.5
                        weight.uniform_(-bound, bound)

    def initial_state(self, batch_size: int) -> State:
        """The initial value of every layer that is read with a delay, once per step of delay."""
        return tuple(getattr(self, f"initial_value_{name}").repeat(batch_size, 1) for name, _ in self.wiring.delayed)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step; `x_t` holds the inputs of the graph concatenated, the output its output layers likewise."""
        delayed = self.wiring.delayed
        self._check(x_t, state=state)
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
        return sum(layer.size for layer in self.wiring.layers if layer.role == "input")

    def with_input_size(self, input_size: int) -> Cell:
        """A cell of the same graph with fresh parameters and an input of another size.

        Raises:
            StrettoError: The graph has several inputs, or cannot have an input of that size.
        """
        wiring = self.wiring
        if len(wiring.inputs) > 1:
            raise StrettoError(
                f"the graph has {len(wiring.inputs)} inputs, {_quote(wiring.inputs)}: "
                f"which of them is to change for an input of {input_size} is not defined",
                fix="Give a list with one cell for each layer and direction.",
            )
        layers = [
            dataclasses.replace(layer, size=input_size) if layer.role == "input" else layer for layer in wiring.layers
        ]
        cell = GraphCell(lay_out(layers, connections=wiring.connections, outputs=wiring.outputs))
        like = next(iter((*self.parameters(), *self.buffers())), None)
        return cell if like is None else cell.to(device=like.device, dtype=like.dtype)

    def extra_repr(self) -> str:
        """The layers in the order of a step, and the connections."""
        return "\n".join(map(str, (*self.wiring.layers, *self.wiring.connections)))

    def _check(self, x_t: torch.Tensor, *, state: State) -> None:
        size, num_delayed = self.input_size, len(self.wiring.delayed)
        if x_t.dim() != 2 or x_t.shape[1] != size:
            raise StrettoError(
                f"the graph was given an input of shape {tuple(x_t.shape)} for its input "
                f"{_quote(self.wiring.inputs)} of {size} features",
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
        value_BN = _slice(value_BN, of=(0, value_BN.shape[-1]), to=wire.source_range)
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

    Examples:
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
                "negate" or another of `stretto.graph.ACTIVATIONS`. "softmax" runs over the units, all others act on
                each unit.
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
        _check_name(name, what="the name of an output")
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
            raise StrettoError(f"there is a layer {layer.name!r} already", fix="Give every layer a different name.")
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
    graph.connect("lower", "upper", delay=2)
    graph.output("upper")
    return graph


def _add_product(graph: Graph, name: str, size: int, *, of: Sequence[str], earlier: str | None = None) -> None:
    """A layer that multiplies those named, unit by unit, and `earlier` as it was one step ago."""
    graph.layer(name, size, aggregation="multiply")
    for factor in of:
        graph.connect(factor, name, kind="identity")
    if earlier is not None:
        graph.connect(earlier, name, kind="identity", delay=1)
