"""Layers and connections, and a graph of them checked and laid out: the order of one step, its state and its weights.

The order of a step is a topological sort of the connections without delay. Delayed connections read earlier values,
which the state holds:

    x --+--> h --+--> y             order x, h, y;  h is read with delays 1 and 3, so the state holds the last
        ^        |                  three values of h
        +--d=1---+
        +--d=3---+

Shape legend: B rows of the batch, N units of the layer.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias, final, get_args

import networkx as nx
import torch
from torch.nn import functional

from stretto.checks import check_bool, check_choice, check_float, check_int
from stretto.errors import StrettoError

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
    """A named vector that takes a new value at every step.

    Attributes:
        name: What connections and parameters call it.
        size: Its units.
        role: "hidden" is computed from what arrives, "input" is given at every step, "constant" never changes.
        aggregation: "sum" or "multiply": how everything that arrives is combined.
        activation: Applied to the result; "softmax" runs over the units, all others act on each unit.
        bias: Whether a vector of parameters is added to the sum.
        initial_bias: Where that vector starts.
        initial: The value at every step before the first; for a constant layer, its value at all steps.
        learn_initial: Whether that value is a vector of parameters, which starts at `initial`.
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
        check_name(self.name, what="the name of a layer")
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
                f"the {self.role} layer {self.name!r} has an aggregation, an activation or a bias of its own",
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
    """An edge that carries one layer's value, of this or an earlier step, to another layer.

    Attributes:
        source: The layer that is read.
        destination: The layer that the value arrives at.
        kind: "full" multiplies with a matrix of weights, "diagonal" with one weight per unit; "identity" has no
            weights, and neither has "broadcast", which repeats a single unit.
        delay: How many steps ago the source had the value; 0 is this step.
        source_range: The units that are read, as (first, end); None for all.
        destination_range: The units that the value arrives at, likewise.
    """

    source: str
    destination: str
    kind: ConnectionKind = "full"
    delay: int = 0
    source_range: Range | None = None
    destination_range: Range | None = None

    def __post_init__(self) -> None:
        check_name(self.source, what="the source of a connection")
        check_name(self.destination, what="the destination of a connection")
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


def check_name(value: object, *, what: str) -> str:
    """`value` if it is a plain name, which parameters can be called after."""
    if not isinstance(value, str) or not value.isidentifier():
        raise StrettoError(
            f"{what} is {value!r}, which is not a plain name",
            fix="Use letters, digits and underscores, with no digit in front.",
        )
    return value


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


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A connection with its ranges resolved; `source_range` is None for all units, so that nothing is sliced.

    `weight` names its parameter, of `weight_shape`, destination first; None and empty without weights.
    """

    source: str
    delay: int
    kind: ConnectionKind
    source_range: Range | None
    destination_range: Range
    weight: str | None
    weight_shape: tuple[int, ...]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What one step does. Graphs of equal content have equal wirings, in whatever order they were declared.

    Attributes:
        layers: All layers, each after those that it reads within the step.
        connections: All connections, sorted.
        inputs: The layers that share the columns of the input, in that order.
        outputs: The layers whose values are the output, side by side.
        wires: What arrives at each hidden layer, the earliest known first, so that sums of it can leave the time loop.
        parts: Each hidden layer, cut where a connection begins or ends: units, and the numbers of the wires that
            arrive at all of them.
        depths: How many earlier values are kept of each layer that is read with a delay.
    """

    layers: tuple[Layer, ...]
    connections: tuple[Connection, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    wires: Mapping[str, tuple[Wire, ...]]
    parts: Mapping[str, tuple[tuple[Range, tuple[int, ...]], ...]]
    depths: Mapping[str, int]

    @property
    def input_size(self) -> int:
        """Columns of the input."""
        return sum(layer.size for layer in self.layers if layer.role == "input")

    def with_input_size(self, input_size: int) -> "Wiring":
        """The same graph with an input of another size.

        Raises:
            StrettoError: There are several inputs, or a connection from the input cannot have another size.
        """
        if len(self.inputs) > 1:
            raise StrettoError(
                f"the graph has {len(self.inputs)} inputs, {', '.join(map(repr, self.inputs))}: "
                f"which of them is to change for an input of {input_size} is not defined",
                fix="Give a list with one cell for each layer and direction.",
            )
        layers = [
            dataclasses.replace(layer, size=input_size) if layer.role == "input" else layer for layer in self.layers
        ]
        return lay_out(layers, connections=self.connections, outputs=self.outputs)


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
        wires[connection.destination] += (_wire(connection, weight=weight, layers=named),)
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
        depths={name: depth for name, depth in depths.items() if depth > 0},
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


def _wire(connection: Connection, *, weight: str | None, layers: Mapping[str, Layer]) -> Wire:
    source, destination = layers[connection.source], layers[connection.destination]
    first, end = _units(source, connection.source_range)
    arrives = _units(destination, connection.destination_range)
    width = arrives[1] - arrives[0]
    shapes: dict[str, tuple[int, ...]] = {"full": (width, end - first), "diagonal": (width,)}
    return Wire(
        source=connection.source,
        delay=connection.delay,
        kind=connection.kind,
        source_range=None if (first, end) == (0, source.size) else (first, end),
        destination_range=arrives,
        weight=weight,
        weight_shape=shapes.get(connection.kind, ()),
    )


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
    fed = 0
    for first, end in sorted(_units(layer, connection.destination_range) for connection in connections):
        if first > fed:
            break
        fed = max(fed, end)
    if fed < layer.size:
        raise StrettoError(
            f"no connection arrives at unit {fed} of layer {layer.name!r}, though others of its {layer.size} are fed",
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
