"""What a picture of a step shows: boxes in bands, one band per stage, and arrows between them."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias, final

from stretto.graph.adjoint import Body, Kind
from stretto.graph.analyse import Plan, Stage
from stretto.graph.node import Node, needed_for
from stretto.graph.summary import PRODUCTS, SAME_VALUE, SAME_VALUE_BACKWARD, Operator, format_shape


class Look(str, Enum):
    """What kind of box it is."""

    VALUE = "value"
    PRODUCT = "product"
    WORK = "work"
    VIEW = "view"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A value or an operator.

    Attributes:
        title: Its name.
        shape: Its format_shape.
        reads: Names of what it reads without an arrow: weights, and values of the forward pass.
        band: Number of the band it lies in.
        look: What kind of box it is.
        tip: Shown when the mouse rests on it.
    """

    title: str
    shape: str
    reads: str
    band: int
    look: Look
    tip: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Operators of one stage, with a title, a note, and the stage that gives the band its colour."""

    title: str
    note: str
    stage: str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed:
    """An arrow into another step, from one box to another; `label` says how many steps, if more than one."""

    source: int
    target: int
    label: str = ""


@final
@dataclass(slots=True)
class Panel:
    """One picture: boxes in bands from top to bottom. Arrows within a step lead down; boxes go by their number."""

    title: str
    bands: list[Band] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    delayed: list[Delayed] = field(default_factory=list)

    def add(self, box: Box) -> int:
        """Add a box; its number."""
        self.boxes.append(box)
        return len(self.boxes) - 1

    def value(self, title: str, node: Node, *, band: int, note: str = "") -> int:
        """Add a box for an input or a result."""
        tip = f"{title}, {note}" if note else title
        return self.add(
            Box(title=title, shape=format_shape(node.row_shape), reads=note, band=band, look=Look.VALUE, tip=tip)
        )

    def operator(self, node: Node, *, reads: list[str], band: int) -> int:
        """Add a box for an operator."""
        shown = Operator.of(node)
        look = Look.PRODUCT if node.label in PRODUCTS else Look.VIEW if shown.is_view else Look.WORK
        names = ", ".join(dict.fromkeys(reads))
        tip = f"{node.name}: {shown}" + (f", reads {names}" if names else "")
        return self.add(
            Box(title=shown.name, shape=format_shape(shown.shape), reads=names, band=band, look=look, tip=tip)
        )


def _drawn_as(node: Node, *, hidden: frozenset[str] = SAME_VALUE) -> Node:
    """The node whose box stands for a value: bookkeeping operators have none."""
    while node.label in hidden:
        node = node.args[0]
    return node


def _sources(node: Node, *, hidden: frozenset[str] = SAME_VALUE) -> list[Node]:
    """What a box reads; one of several results reads what the operator that computed them reads."""
    read = node.args[0].inputs if node.label == "getitem" else node.inputs
    return [_drawn_as(item, hidden=hidden) for item in read]


def is_drawn(node: Node, *, hidden: frozenset[str] = SAME_VALUE) -> bool:
    """Whether an operator gets a box of its own."""
    return node.op is not None and node.dtype is not None and node.label not in hidden


Key: TypeAlias = "tuple[int, int, int]"
"""The order of bands: (level, 0 for a loop or 1 for what is hoisted behind the loops, number of the loop)."""

_ONCE: Key = (-1, 0, 0)
_INPUT: Key = (0, 1, 0)


def forward_panel(plan: Plan) -> Panel:
    """The forward pass: boxes and arrows of a step, and arrows from each next state to the state it becomes."""
    graph, panel = plan.graph, Panel("Forward")
    keys = _Bands(plan).keys
    operators = [node for node in graph.nodes if is_drawn(node)]
    still = {node for node in graph.nodes if node.op is None} - {graph.x, *graph.states}
    readers = {item for node in operators for item in _sources(node)} | {_drawn_as(graph.y)}
    states = [state for state in graph.states if state in readers or not _passes_on(plan, state, readers)]
    shown_keys = sorted({keys[node] for node in [graph.x, *states, *operators]})
    for key in shown_keys:
        panel.bands.append(_band(plan, key, working={keys[node] for node in operators}))
    number = {key: position for position, key in enumerate(shown_keys)}
    kept = {graph.states[index] for index in plan.constants_per_row}
    boxes: dict[Node, int] = {graph.x: panel.value("x", graph.x, band=number[keys[graph.x]], note="input")}
    for state in states:
        note = "never changes" if state in kept else ""
        boxes[state] = panel.value(state.name, state, band=number[keys[state]], note=note)
    for node in operators:
        read = _sources(node)
        reads = [item.name for item in read if item in still]
        boxes[node] = panel.operator(node, reads=reads, band=number[keys[node]])
        panel.edges += [(boxes[item], boxes[node]) for item in dict.fromkeys(read) if item in boxes]
    last = _drawn_as(graph.y)
    if last in boxes:
        output = panel.value("y", graph.y, band=panel.boxes[boxes[last]].band, note="output")
        panel.edges.append((boxes[last], output))
    _add_delayed(plan, panel, boxes)
    return panel


def _passes_on(plan: Plan, state: Node, readers: set[Node]) -> bool:
    """Whether nothing reads a part of the state, except that it moves on to a part that is read, as delays do."""
    graph = plan.graph
    after = {old: _drawn_as(new) for old, new in zip(graph.states, graph.next_states, strict=True)}
    for _ in graph.states:
        following = [old for old in graph.states if after[old] is state and old is not state]
        if not following:
            return False
        if any(old in readers for old in following):
            return True
        state = following[0]
    return False


def _add_delayed(plan: Plan, panel: Panel, boxes: dict[Node, int]) -> None:
    graph = plan.graph
    after = {old: _drawn_as(new) for old, new in zip(graph.states, graph.next_states, strict=True)}
    for state in graph.states:
        source, steps = after[state], 1
        while source in after and source not in boxes and after[source] is not source:
            source, steps = after[source], steps + 1
        if state in boxes and source in boxes and source is not state:
            label = f"{steps} steps" if steps > 1 else ""
            panel.delayed.append(Delayed(source=boxes[source], target=boxes[state], label=label))


def _band(plan: Plan, key: Key, *, working: set[Key]) -> Band:
    if key == _ONCE:
        return Band(title="Once", note="from weights alone", stage="once")
    if key == _sunk(plan):
        return Band(title="Sunk", note="for all steps at once, after the loops", stage="sunk")
    level, behind, position = key
    if behind:
        if key not in working:
            return Band(title="Input", note="of all steps", stage="input")
        before = ", before the loop that waits for it" if plan.all_loops else "; nothing is recurrent"
        return Band(title="Hoisted", note=f"for all steps at once{before}", stage="hoisted")
    loop = plan.loops[level][position]
    names = ", ".join(plan.graph.states[index].name for index in loop.states)
    which = f"Loop {plan.all_loops.index(loop) + 1}" if len(plan.all_loops) > 1 else "Loop"
    return Band(title=which, note=f"sequential; carries {names}", stage="loop")


def _sunk(plan: Plan) -> Key:
    return (len(plan.loops), 0, 0)


class _Bands:
    """The band of every value of a step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        graph = plan.graph
        self.stage = plan.stage
        self.keys: dict[Node, Key] = {graph.x: _INPUT}
        self.level = {node: level for level, nodes in enumerate(plan.maps) for node in nodes}
        self.loop: dict[Node, Any] = {}
        for level, loops in enumerate(plan.loops):
            for position, loop in enumerate(loops):
                self.loop.update((graph.states[index], (level, 0, position)) for index in loop.states)
                self.loop.update((node, (level, 0, position)) for node in loop.nodes)
        self.keys.update((graph.states[index], _INPUT) for index in plan.constants_per_row)
        for state in graph.states:
            self.key(state)
        for node in graph.nodes:
            self.key(node)

    def key(self, node: Node) -> Key:
        """The band of a node, found by way of the nodes it reads."""
        if node not in self.keys:
            self.keys[node] = self._state(node) if node in self.plan.graph.states else self._operator(node)
        return self.keys[node]

    def _state(self, state: Node) -> Key:
        """A part of the state that no loop carries is known one step after its next value."""
        if state in self.loop:
            return self.loop[state]  # type: ignore[no-any-return]
        graph = self.plan.graph
        reading = [node for node in graph.nodes if state in node.inputs]
        before = self.key(graph.next_states[graph.states.index(state)])
        if not reading:
            return max(before, _INPUT)
        if all(self.stage[node] is Stage.SUNK for node in reading):
            return _sunk(self.plan)
        return (max(before[0], 0), 1, 0)

    def _operator(self, node: Node) -> Key:
        stage = self.stage.get(node, Stage.ONCE)
        if stage is Stage.ONCE:
            return _ONCE
        if stage is Stage.SUNK:
            return _sunk(self.plan)
        if stage is Stage.LOOP:
            return self.loop[node]  # type: ignore[no-any-return]
        # A view that a loop has absorbed is drawn beside what it is a view of.
        level = self.level.get(node, max([0, *(self.key(item)[0] for item in node.inputs)]))
        return (level, 1, 0)


def backward_panel(bodies: list[Body]) -> Panel:
    """The backward pass of each loop, the last loop first: the loop in reverse, and the gradients that are deferred.

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
            # A view of a weight is made before the loop.
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
        band = self._band(f"Backward loop{self.which}", "sequential, from the last step to the first", "backward")
        pills = []
        for node, port in zip(self.body.state_gradients, states, strict=True):
            same = port.gradient is not None and _drawn_backward_as(port.gradient) is node
            pills.append(
                self._pill(node, f"d {port.source.name}", band, "unchanged" if same else "from the step after")
            )
        for node, emitted in zip(self.body.output_gradients, self.body.outputs, strict=True):
            self._pill(node, f"d {self._name(emitted)}", band, "arrives")
        loop = [node for node in self.body.backward if _is_drawn_backward(node) and node not in self.once]
        self._operators(loop, self.in_loop, band)
        for port, pill in zip(states, pills, strict=True):
            source = None if port.gradient is None else self.in_loop.get(_drawn_backward_as(port.gradient))
            if source is not None and source != pill:
                self.panel.delayed.append(Delayed(source=source, target=pill))
        self._results({Kind.PER_STEP: "for all steps", Kind.CONSTANT: "summed up"}, self.in_loop, band)
        self._deferred()

    def _deferred(self) -> None:
        nodes = [node for node in self.body.deferred if _is_drawn_backward(node)]
        sums = [port.gradient for port in self.body.ports_of(Kind.WEIGHT) if port.gradient is not None]
        if not nodes and not sums:
            return
        band = self._band(f"Deferred{self.which}", "for all steps at once, after the backward loop", "deferred")
        after: dict[Node, int] = {}
        self._operators(nodes, after, band)
        self._results({Kind.WEIGHT: "gradient"}, {**self.in_loop, **after}, band)

    def _band(self, title: str, note: str, stage: str) -> int:
        self.panel.bands.append(Band(title=title, note=note, stage=stage))
        return len(self.panel.bands) - 1

    def _pill(self, node: Node, title: str, band: int, note: str) -> int:
        self.in_loop[node] = self.panel.value(title, node, band=band, note=note)
        return self.in_loop[node]

    def _operators(self, nodes: list[Node], boxes: dict[Node, int], band: int) -> None:
        here = set(nodes)
        for node in nodes:
            read = _sources(node, hidden=SAME_VALUE_BACKWARD)
            # What is computed again after the loop has a box in both bands.
            found = {item: (boxes if item in here else self.in_loop).get(item) for item in read}
            reads = [self._name(item) for item in read if found[item] is None]
            boxes[node] = self.panel.operator(node, reads=reads, band=band)
            self.panel.edges += [(source, boxes[node]) for source in found.values() if source is not None]

    def _results(self, notes: dict[Kind, str], boxes: dict[Node, int], band: int) -> None:
        for port in self.body.ports:
            source = None if port.gradient is None else boxes.get(_drawn_backward_as(port.gradient))
            if port.kind in notes and source is not None:
                pill = self.panel.value(f"d {self.names[port.node]}", port.node, band=band, note=notes[port.kind])
                self.panel.edges.append((source, pill))

    def _name(self, node: Node) -> str:
        return self.names.get(node, node.name if node.op is None else Operator.of(node).name)


def _origin(source: Node) -> str:
    """The parameters behind a value that is computed once; of any other value, its operator or the input's name."""
    if source.op is None:
        return source.name
    if source.has_rows:
        return Operator.of(source).name
    behind = sorted((node for node in needed_for([source]) if node.op is None), key=lambda node: node.name)
    return ", ".join(node.name for node in behind) or source.name


def _drawn_backward_as(node: Node) -> Node:
    return _drawn_as(node, hidden=SAME_VALUE_BACKWARD)


def _is_drawn_backward(node: Node) -> bool:
    return is_drawn(node, hidden=SAME_VALUE_BACKWARD)
