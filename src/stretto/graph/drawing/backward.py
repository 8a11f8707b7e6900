"""The picture of the backward pass: the loops in reverse, and the gradients that wait until a loop has ended."""

from stretto.graph.adjoint import Body, Kind
from stretto.graph.drawing.panel import Band, Delayed, Panel, is_drawn, shown, sources
from stretto.graph.node import Node, needed_for
from stretto.graph.summary import SAME_VALUE_BACKWARD, Operator


def backward_panel(bodies: list[Body]) -> Panel:
    """Boxes and arrows of the backward pass of each loop, the last loop first.

    Values of the forward pass are named in the boxes that read them.
    """
    panel = Panel("Backward")
    for index in reversed(range(len(bodies))):
        _Backward(bodies[index], panel, which=f" {index + 1}" if len(bodies) > 1 else "").add()
    return panel


class _Backward:
    """Adds the bands of one loop."""

    def __init__(self, body: Body, panel: Panel, *, which: str) -> None:
        self.body, self.panel, self.which = body, panel, which
        self.in_loop: dict[Node, int] = {}
        self.once = {port.node for port in body.ports_of(Kind.WEIGHT)}
        self.names = {port.node: _origin(port.source) for port in body.ports}
        for node in body.backward:
            # A weight looked at differently is made before the loop.
            if not node.has_rows and node.inputs and all(item in self.once for item in node.inputs):
                self.once.add(node)
                self.names[node] = ", ".join(self.names[item] for item in node.inputs)
        steps = zip(body.next_states, body.ports_of(Kind.STATE), strict=True)
        self.names.update((new, f"new {port.source.name}") for new, port in steps if new not in self.names)
        self.names.update((node, f"stored {Operator.of(node).name}") for node in body.saved)

    def add(self) -> None:
        """Add everything."""
        states = self.body.ports_of(Kind.STATE)
        if all(port.gradient is None for port in self.body.ports):
            return
        band = self._band(f"Backward loop{self.which}", "step after step, from the last to the first", "backward")
        pills = []
        for node, port in zip(self.body.state_gradients, states, strict=True):
            same = port.gradient is not None and _shown(port.gradient) is node
            pills.append(
                self._pill(node, f"d {port.source.name}", band, "unchanged" if same else "from the step after")
            )
        for node, emitted in zip(self.body.output_gradients, self.body.outputs, strict=True):
            self._pill(node, f"d {self._name(emitted)}", band, "arrives")
        loop = [node for node in self.body.backward if _is_drawn(node) and node not in self.once]
        self._operators(loop, self.in_loop, band)
        for port, pill in zip(states, pills, strict=True):
            source = None if port.gradient is None else self.in_loop.get(_shown(port.gradient))
            if source is not None and source != pill:
                self.panel.delayed.append(Delayed(source=source, target=pill))
        self._results({Kind.PER_STEP: "for all steps", Kind.CONSTANT: "summed up"}, self.in_loop, band)
        self._deferred()

    def _deferred(self) -> None:
        nodes = [node for node in self.body.deferred if _is_drawn(node)]
        sums = [port.gradient for port in self.body.ports_of(Kind.WEIGHT) if port.gradient is not None]
        if not nodes and not sums:
            return
        band = self._band(f"Deferred{self.which}", "for all steps at once, after the backward loop", "deferred")
        after: dict[Node, int] = {}
        self._operators(nodes, after, band)
        self._results({Kind.WEIGHT: "gradient"}, {**self.in_loop, **after}, band)

    def _band(self, title: str, note: str, place: str) -> int:
        self.panel.bands.append(Band(title=title, note=note, place=place))
        return len(self.panel.bands) - 1

    def _pill(self, node: Node, title: str, band: int, note: str) -> int:
        self.in_loop[node] = self.panel.value(title, node, band=band, note=note)
        return self.in_loop[node]

    def _operators(self, nodes: list[Node], boxes: dict[Node, int], band: int) -> None:
        here = set(nodes)
        for node in nodes:
            read = sources(node, hidden=SAME_VALUE_BACKWARD)
            # What is computed again after the loop has a box in either band.
            found = {item: (boxes if item in here else self.in_loop).get(item) for item in read}
            reads = [self._name(item) for item in read if found[item] is None]
            boxes[node] = self.panel.operator(node, reads=reads, band=band)
            self.panel.edges += [(source, boxes[node]) for source in found.values() if source is not None]

    def _results(self, notes: dict[Kind, str], boxes: dict[Node, int], band: int) -> None:
        for port in self.body.ports:
            source = None if port.gradient is None else boxes.get(_shown(port.gradient))
            if port.kind in notes and source is not None:
                pill = self.panel.value(f"d {self.names[port.node]}", port.node, band=band, note=notes[port.kind])
                self.panel.edges.append((source, pill))

    def _name(self, node: Node) -> str:
        return self.names.get(node, node.name if node.op is None else Operator.of(node).name)


def _origin(source: Node) -> str:
    """The parameters behind a value that is computed once; the operator of any other value, or the input's name."""
    if source.op is None:
        return source.name
    if source.has_rows:
        return Operator.of(source).name
    behind = sorted((node for node in needed_for([source]) if node.op is None), key=lambda node: node.name)
    return ", ".join(node.name for node in behind) or source.name


def _shown(node: Node) -> Node:
    return shown(node, hidden=SAME_VALUE_BACKWARD)


def _is_drawn(node: Node) -> bool:
    return is_drawn(node, hidden=SAME_VALUE_BACKWARD)
