"""A recurrent network written out as layers and connections with delays, after Hwang and Sung (ICASSP 2015)."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, final

from stretto.errors import StrettoError
from stretto.graph.network.argument import checked_name
from stretto.graph.network.cell import GraphCell
from stretto.graph.network.connection import Connection, Kind, Range, checked_range
from stretto.graph.network.layer import Aggregation, Layer
from stretto.graph.network.wiring import Wiring, lay_out

FORMAT: Final = "stretto.Graph 1"


@final
class Graph:
    """Layers, and connections that carry their values to others, in the same step or some steps later.

    A layer adds up or multiplies all that arrives and applies its activation. Gates are layers that multiply; a loop
    is a cycle of connections of which at least one has a delay. Declare layers and connections in any order.

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
        """The output layers; their values are the cell's output, side by side in this order."""
        return tuple(self._outputs)

    def input(self, name: str, size: int, *, initial: float = 0.0, learn_initial: bool = False) -> str:
        """Declare an input; return its name.

        Args:
            name: What to call it.
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
            name: What to call it; its parameters are called after it.
            size: Its units.
            aggregation: "sum" or "multiply": what happens to all that arrives.
            activation: What is then applied: "linear", "sigmoid", "tanh", "relu", "softplus", "softmax",
                "one_minus", "negate" or another of `stretto.graph.network.activation.ACTIVATIONS`.
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
        kind: Kind = "full",
        delay: int = 0,
        source_range: Range | slice | None = None,
        destination_range: Range | slice | None = None,
    ) -> None:
        """Carry the value of one layer to another; two connections that are alike count twice.

        Args:
            source: The layer that is read; it may be declared later.
            destination: The layer that it arrives at; it may be declared later.
            kind: "full" (a matrix of weights), "diagonal" (a weight for each unit), "identity" (no weights) or
                "broadcast" (one unit repeated, no weights).
            delay: Steps until it arrives; 0 is within the step.
            source_range: The units that are read; all if left out.
            destination_range: The units that it arrives at; all if left out.
        """
        of = f"of the connection {source!r} -> {destination!r}"
        self._connections.append(
            Connection(
                source=source,
                destination=destination,
                kind=kind,
                delay=delay,
                source_range=checked_range(source_range, what=f"the 'source_range' {of}"),
                destination_range=checked_range(destination_range, what=f"the 'destination_range' {of}"),
            )
        )

    def output(self, name: str) -> None:
        """Make a layer an output; several stand side by side in the order of these calls."""
        checked_name(name, what="the name of an output")
        if name in self._outputs:
            raise StrettoError(f"layer {name!r} is an output already", fix="Name each output once.")
        self._outputs.append(name)

    def wiring(self) -> Wiring:
        """Check the graph and lay it out as one step computes it.

        Raises:
            StrettoError: If layers and connections do not fit together; it names the layers.
        """
        return lay_out(self.layers, connections=self.connections, outputs=self.outputs)

    def cell(self) -> GraphCell:
        """A recurrent cell that computes this graph, with parameters of its own; later changes do not reach it.

        Raises:
            StrettoError: If layers and connections do not fit together; it names the layers.
        """
        return GraphCell(self.wiring())

    def to_dict(self) -> dict[str, Any]:
        """The graph as plain values that JSON can hold; the weights belong to its cells.

        Raises:
            StrettoError: If layers and connections do not fit together; it names the layers.
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
        """The graph that `to_dict` wrote, checked anew; settings of layers and connections may be left out.

        Raises:
            StrettoError: If the document is of another form, or its graph does not fit together.
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
        told = sorted(map(str, document)) if isinstance(document, Mapping) else type(document).__name__
        raise StrettoError(
            f"this is no description of a graph: {told}",
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
                    f"{settings!r} among the {key!r} of the graph has other settings than one can have",
                    fix=f"Name {' and '.join(sorted(needed))}; there are: {', '.join(known)}.",
                )
