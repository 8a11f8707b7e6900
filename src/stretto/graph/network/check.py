"""Whether the layers and connections of a graph fit together."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from stretto.errors import StrettoError
from stretto.graph.network.connection import Connection, Range
from stretto.graph.network.layer import Layer
from stretto.graph.network.order import reached


def check_network(layers: Mapping[str, Layer], *, connections: Sequence[Connection], outputs: Sequence[str]) -> None:
    """Refuse what cannot be computed or would be computed for nothing; cycles are left to `step_order`.

    Raises:
        StrettoError: At the first thing found wrong; it names the layers.
    """
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
        set_for_nothing = layer.role != "constant" and (layer.learn_initial or layer.initial != 0.0)
        if set_for_nothing and layer.name not in delayed:
            raise StrettoError(
                f"layer {layer.name!r} has an initial value, but no connection reads it with a delay",
                fix="Leave 'initial' and 'learn_initial' out, or connect the layer with a delay of 1 or more.",
            )


def units(layer: Layer, part: Range | None) -> Range:
    """The units that `part` of the layer means."""
    return (0, layer.size) if part is None else part


def _check_names(layers: Mapping[str, Layer], *, connections: Sequence[Connection], outputs: Sequence[str]) -> None:
    known = f"The layers are: {_quoted(layers) or 'none'}."
    for connection in connections:
        for name in (connection.source, connection.destination):
            if name not in layers:
                raise StrettoError(f"the connection {connection.ends} names {name!r}, which is no layer", fix=known)
    for name in outputs:
        if name not in layers:
            raise StrettoError(f"the output {name!r} is no layer", fix=known)
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
    given, wanted = (end - first for first, end in (units(layer, part) for layer, part in ends))
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
    for first, end in sorted(units(layer, connection.destination_range) for connection in connections):
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
    idle = _others(layers, than=reached(starts, connections=connections))
    if idle:
        raise StrettoError(
            f"no input or constant leads to: {_quoted(idle)}",
            fix="Connect an input to what they read, or leave them out.",
        )
    unused = _others(layers, than=reached(outputs, connections=connections, backwards=True))
    if unused:
        raise StrettoError(
            f"no output depends on: {_quoted(unused)}",
            fix="Connect them onwards, make them outputs, or leave them out.",
        )


def _others(layers: Mapping[str, Layer], *, than: Collection[str]) -> list[str]:
    return [name for name in layers if name not in than]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
