"""A graph that was checked and laid out: the order of one step, what it keeps for later ones, and its weights."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import final

from stretto.errors import StrettoError
from stretto.graph.network.check import check_network, units
from stretto.graph.network.connection import Connection, Kind, Range
from stretto.graph.network.layer import Layer
from stretto.graph.network.order import loops, reached, step_order


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A connection with its ranges resolved.

    Attributes:
        source: The layer that is read.
        delay: Of how many steps ago.
        kind: What is done with it.
        source_range: The units that are read; None where all are, so that nothing is cut.
        destination_range: The units that it arrives at.
        weight: The name of its parameter; None without weights.
        weight_shape: The shape of that parameter, destination first; empty without weights.
    """

    source: str
    delay: int
    kind: Kind
    source_range: Range | None
    destination_range: Range
    weight: str | None
    weight_shape: tuple[int, ...]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Neighbouring units of a layer at which the same wires arrive, by their number among the layer's wires."""

    units: Range
    wires: tuple[int, ...]


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
        parts: Each hidden layer, cut where a connection begins or ends.
        depths: How many earlier values are kept of each layer that is read with a delay.
    """

    layers: tuple[Layer, ...]
    connections: tuple[Connection, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    wires: Mapping[str, tuple[Wire, ...]]
    parts: Mapping[str, tuple[Part, ...]]
    depths: Mapping[str, int]

    @property
    def input_size(self) -> int:
        """Columns of the input."""
        return sum(layer.size for layer in self.layers if layer.role == "input")

    def resized(self, input_size: int) -> "Wiring":
        """The same graph with an input of another size.

        Raises:
            StrettoError: If there are several inputs, or a connection from the input cannot have another size.
        """
        if len(self.inputs) > 1:
            raise StrettoError(
                f"the graph has {len(self.inputs)} inputs, {', '.join(map(repr, self.inputs))}: "
                f"which of them is to change for an input of {input_size} is not defined",
                fix="Give one cell for each layer and direction as a list.",
            )
        layers = [
            dataclasses.replace(layer, size=input_size) if layer.role == "input" else layer for layer in self.layers
        ]
        return lay_out(layers, connections=self.connections, outputs=self.outputs)


def lay_out(layers: Iterable[Layer], *, connections: Sequence[Connection], outputs: Sequence[str]) -> Wiring:
    """Check a graph and lay it out.

    Raises:
        StrettoError: If layers and connections do not fit together; it names the layers.
    """
    named = {layer.name: layer for layer in layers}
    check_network(named, connections=connections, outputs=outputs)
    order = step_order(named, connections=connections)
    ordered = sorted(connections, key=_sorting_key)
    earliness = _earliness(named, connections=connections)
    paired = sorted(zip(ordered, _weight_names(ordered), strict=True), key=lambda pair: earliness[pair[0]])
    wires: dict[str, tuple[Wire, ...]] = {name: () for name in order if named[name].role == "hidden"}
    for connection, weight in paired:
        wires[connection.destination] += (_wire(connection, weight=weight, layers=named),)
    return Wiring(
        layers=tuple(named[name] for name in order),
        connections=tuple(ordered),
        inputs=tuple(name for name, layer in named.items() if layer.role == "input"),
        outputs=tuple(outputs),
        wires=wires,
        parts={name: _parts(arriving) for name, arriving in wires.items()},
        depths=_depths(order, connections=connections),
    )


def _earliness(layers: Mapping[str, Layer], *, connections: Sequence[Connection]) -> dict[Connection, int]:
    """When each is known: with the parameters 0, with the input 1, after another loop 2, in the layer's own loop 3."""
    component = loops(layers, connections=connections)
    within_step = [one for one in connections if one.delay == 0]
    carried = reached({one.destination for one in connections if one.delay > 0}, connections=within_step)
    ranks = {}
    for one in connections:
        if component[one.source] == component[one.destination]:
            ranks[one] = 3
        elif one.delay > 0 or one.source in carried:
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
    first, end = units(source, connection.source_range)
    arrives = units(destination, connection.destination_range)
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


def _parts(wires: Sequence[Wire]) -> tuple[Part, ...]:
    cuts = sorted({unit for wire in wires for unit in wire.destination_range})
    return tuple(
        Part(
            units=(first, end),
            wires=tuple(
                number
                for number, wire in enumerate(wires)
                if wire.destination_range[0] <= first and end <= wire.destination_range[1]
            ),
        )
        for first, end in itertools.pairwise(cuts)
    )


def _depths(order: Iterable[str], *, connections: Iterable[Connection]) -> dict[str, int]:
    deepest = dict.fromkeys(order, 0)
    for connection in connections:
        deepest[connection.source] = max(deepest[connection.source], connection.delay)
    return {name: depth for name, depth in deepest.items() if depth > 0}
