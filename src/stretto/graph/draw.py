"""The graph of a step as an SVG picture: self-contained, on its own background, the same for the same graph.

A picture has panels, a panel has boxes in bands, one band per stage, and arrows between them. Where everything goes is
a layered drawing after Sugiyama et al. (1981):

1. rows      by the longest path within each band; a long arrow gets a bend in every row that it passes
2. order     within rows, by barycentres, for few crossings
3. across    positions that keep arrows short and straight
4. down      heights of rows and bands, with room for arrows to the next step, which run beside the boxes
"""

import html
import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Final, Literal, TypeAlias, final

import networkx as nx

from stretto.graph.adjoint import Body, Kind
from stretto.graph.analyse import Plan, Stage
from stretto.graph.node import Node, needed_for
from stretto.graph.operators import is_view
from stretto.graph.summary import PRODUCTS, SAME_VALUE, Operator, format_shape

Point: TypeAlias = tuple[float, float]
BandKey: TypeAlias = tuple[int, int, int]
"""The order of bands: (level, 0 for a loop or 1 for what follows the loops of that level, number of the loop)."""
ONCE: Final[BandKey] = (-1, 0, 0)
INPUT: Final[BandKey] = (0, 1, 0)
Look: TypeAlias = Literal["value", "product", "work", "view", "bend"]
"""What kind of box it is; a bend is where a long arrow passes a row."""
Rows: TypeAlias = "list[list[Box]]"

ORDER_SWEEPS: Final = 15
PLACEMENT_ROUNDS: Final = 120
TITLE_SIZE: Final = 13.0
LINE_SIZE: Final = 11.0
BOX_GAP: Final = 18.0
ROW_GAP: Final = 30.0
TRACK: Final = 11.0
BAND_TOP: Final = 36.0
BAND_BOTTOM: Final = 16.0
BAND_GAP: Final = 14.0
BAND_SIDE: Final = 20.0
LANE: Final = 14.0
MAX_BOX_WIDTH: Final = 220.0
MIN_BOX_WIDTH: Final = 72.0

INK: Final = "#22303f"
SOFT: Final = "#5c6976"
LINE: Final = "#8592a0"
ACCENT: Final = "#b3461f"
BAND_COLOURS: Final = {
    "once": "#eceff2",
    "input": "#eceff2",
    "hoisted": "#dff0eb",
    "loop": "#fdeed2",
    "sunk": "#e9e4f6",
    "backward": "#fbe3da",
    "deferred": "#dfeaf6",
}
MARGIN: Final = 26.0
HEAD: Final = 70.0
PANEL_HEAD: Final = 30.0
PANEL_GAP: Final = 30.0
FOOT: Final = 64.0
ROUNDING: Final = 10.0
LEGEND: Final = {
    "product": "product of matrices",
    "work": "other work",
    "view": "view: free",
    "value": "value",
}
BOX_STYLES: Final = {
    "product": f'rx="7" fill="#ffffff" stroke="{INK}" stroke-width="2.2"',
    "work": f'rx="7" fill="#ffffff" stroke="{LINE}" stroke-width="1.1"',
    "view": f'rx="7" fill="#ffffff" fill-opacity="0.55" stroke="{LINE}" stroke-width="1" stroke-dasharray="2 2"',
    "value": f'rx="29" fill="{INK}" fill-opacity="0.09" stroke="{SOFT}" stroke-width="1"',
}
STROKE: Final = f'stroke="{LINE}" stroke-width="1.3"'
DELAYED_STROKE: Final = f'stroke="{ACCENT}" stroke-width="1.6" stroke-dasharray="5 4"'


@final
@dataclass(eq=False, slots=True, kw_only=True)
class Box:
    """A value or an operator, and where it lies once it has been placed."""

    title: str = ""
    shape: str = ""
    reads: str = ""
    """Names of what it reads without an arrow: weights, and values of the forward pass."""
    tip: str = ""
    """Shown when the mouse rests on it."""
    band: int = 0
    look: Look
    row: int = 0
    middle: float = 0.0
    top: float = 0.0
    width: float = 4.0
    height: float = 0.0

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.top + self.height


@final
@dataclass(eq=False, slots=True, kw_only=True)
class Band:
    """Operators of one stage, which gives the band its colour."""

    title: str
    note: str
    stage: str
    top: float = 0.0
    height: float = 0.0


@final
@dataclass(eq=False, slots=True, kw_only=True)
class Arrow:
    """From a box to one that reads it, or, if `delayed`, to what it is in the next step."""

    source: Box
    target: Box
    delayed: bool = False
    label: str = ""
    """How many steps later, if more than one."""
    path: list[Box] = field(default_factory=list)
    """The bends of an arrow that leads down."""
    corners: list[Point] = field(default_factory=list)

    @property
    def leads_down(self) -> bool:
        """Whether it may pass rows; all other arrows run beside them."""
        return self.source.row < self.target.row

    @property
    def chain(self) -> list[Box]:
        """What it runs through."""
        return [self.source, *self.path, self.target]


@final
@dataclass(slots=True)
class Panel:
    """One picture: boxes in bands from top to bottom. Arrows that are not delayed lead down."""

    title: str
    bands: list[Band] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0

    def add_band(self, title: str, note: str, stage: str) -> int:
        """Add a band; its number."""
        self.bands.append(Band(title=title, note=note, stage=stage))
        return len(self.bands) - 1

    def add_value(self, title: str, node: Node, *, band: int, note: str = "") -> Box:
        """Add a box for an input or a result."""
        tip = f"{title}, {note}" if note else title
        shape = format_shape(node.row_shape)
        self.boxes.append(Box(title=title, shape=shape, reads=note, tip=tip, band=band, look="value"))
        return self.boxes[-1]

    def add_operator(self, node: Node, boxes: dict[Node, Box], *, name: Callable[[Node], str], band: int) -> None:
        """Add a box for an operator, with arrows from those it reads; what has no box is named."""
        shown, sources = Operator.of(node), _sources(node)
        look: Look = "product" if node.label in PRODUCTS else "view" if is_view(node) else "work"
        reads = ", ".join(dict.fromkeys(name(item) for item in sources if item not in boxes))
        tip = f"{node.name}: {shown}" + (f", reads {reads}" if reads else "")
        shape = format_shape(shown.shape)
        self.boxes.append(Box(title=shown.name, shape=shape, reads=reads, tip=tip, band=band, look=look))
        for item in sources:
            if item in boxes:
                self.connect(boxes[item], self.boxes[-1])
        boxes[node] = self.boxes[-1]

    def connect(self, source: Box, target: Box, *, delayed: bool = False, label: str = "") -> None:
        """Add an arrow."""
        self.arrows.append(Arrow(source=source, target=target, delayed=delayed, label=label))


def _drawn_as(node: Node) -> Node:
    """The node whose box stands for a value: bookkeeping operators have none."""
    while node.label in SAME_VALUE:
        node = node.args[0]
    return node


def _sources(node: Node) -> list[Node]:
    """What a box reads; one of several results reads what the operator that computed them reads."""
    read = node.args[0].inputs if node.label == "getitem" else node.inputs
    return list(dict.fromkeys(_drawn_as(item) for item in read))


def is_drawn(node: Node) -> bool:
    """Whether an operator is drawn as a box."""
    return node.op is not None and node.dtype is not None and node.label not in SAME_VALUE


def forward_panel(plan: Plan) -> Panel:
    """The forward pass: boxes and arrows of a step, and arrows from each next state to the state it becomes."""
    graph, panel, keys = plan.graph, Panel("Forward"), _band_keys(plan)
    operators = [node for node in graph.nodes if is_drawn(node)]
    after = {old: _drawn_as(new) for old, new in zip(graph.states, graph.next_states, strict=True)}
    read = {item for node in operators for item in _sources(node)} | {_drawn_as(graph.y)}
    # Delays move values on from one part of the state to the next. Parts that nothing else reads are left out.
    moved_on = {new for old, new in after.items() if new is not old}
    states = [state for state in graph.states if state in read or state not in moved_on]
    working = {keys[node] for node in operators}
    shown = sorted({keys[node] for node in [graph.x, *states, *operators]})
    bands = {key: _add_band(plan, panel, key, is_working=key in working) for key in shown}
    boxes = {graph.x: panel.add_value("x", graph.x, band=bands[keys[graph.x]], note="input")}
    for state in states:
        note = "never changes" if after[state] is state else ""
        boxes[state] = panel.add_value(state.name, state, band=bands[keys[state]], note=note)
    for node in operators:
        panel.add_operator(node, boxes, name=lambda item: item.name, band=bands[keys[node]])
    if (last := boxes.get(_drawn_as(graph.y))) is not None:
        panel.connect(last, panel.add_value("y", graph.y, band=last.band, note="output"))
    for state in states:
        source, steps = after[state], 1
        while source in after and source not in boxes and steps < len(after):
            source, steps = after[source], steps + 1
        if source in boxes and source is not state:
            label = f"{steps} steps" if steps > 1 else ""
            panel.connect(boxes[source], boxes[state], delayed=True, label=label)
    return panel


def _band_keys(plan: Plan) -> dict[Node, BandKey]:
    """The band of the input, of every part of the state and of every operator."""
    graph, sunk = plan.graph, (len(plan.loops), 0, 0)
    keys: dict[Node, BandKey] = {graph.x: INPUT}
    for level, nodes in enumerate([plan.per_row + plan.maps[0], *plan.maps[1:]]):
        keys.update((node, (level, 1, 0)) for node in nodes)
    for level, loops in enumerate(plan.loops):
        for position, loop in enumerate(loops):
            inside = [node for node in loop.nodes if plan.stage[node] is Stage.LOOP]
            keys.update((node, (level, 0, position)) for node in [*inside, *(graph.states[i] for i in loop.states)])
    keys.update((node, ONCE) for node in plan.nodes_at(Stage.ONCE))
    keys.update((node, sunk) for node in plan.nodes_at(Stage.SUNK))
    for state, new in zip(graph.states, graph.next_states, strict=True):
        if {plan.stage[node] for node in graph.nodes if state in node.inputs} == {Stage.SUNK}:
            keys[state] = sunk
        elif state not in keys:
            # No loop carries it, so it is known one step after its next value.
            keys[state] = (max(keys.get(new, INPUT)[0], 0), 1, 0)
    for node in graph.nodes:
        if node.op is not None and node not in keys:
            # A view that a loop has absorbed is drawn beside what it is a view of.
            keys[node] = max(keys.get(item, INPUT) for item in [graph.x, *node.inputs])
    return keys


def _add_band(plan: Plan, panel: Panel, key: BandKey, *, is_working: bool) -> int:
    level, behind, position = key
    if key == ONCE:
        return panel.add_band("Once", "from weights alone", "once")
    if level == len(plan.loops):
        return panel.add_band("Sunk", "for all steps at once, after the loops", "sunk")
    if behind and not is_working:
        return panel.add_band("Input", "of all steps", "input")
    if behind:
        before = ", before the loop that waits for it" if plan.all_loops else "; nothing is recurrent"
        return panel.add_band("Hoisted", f"for all steps at once{before}", "hoisted")
    loop = plan.loops[level][position]
    names = ", ".join(plan.graph.states[index].name for index in loop.states)
    which = f"Loop {plan.all_loops.index(loop) + 1}" if len(plan.all_loops) > 1 else "Loop"
    return panel.add_band(which, f"sequential; carries {names}", "loop")


def backward_panel(bodies: list[Body]) -> Panel:
    """The backward pass of each loop, the last loop first: the loop in reverse, and the gradients that are deferred.

    Values of the forward pass are named in the boxes that read them.
    """
    panel = Panel("Backward")
    for index in reversed(range(len(bodies))):
        if any(port.gradient is not None for port in bodies[index].ports):
            _add_backward(bodies[index], panel, which=f" {index + 1}" if len(bodies) > 1 else "")
    return panel


def _add_backward(body: Body, panel: Panel, *, which: str) -> None:
    """Add the bands of one loop."""
    once, names = _forward_names(body)
    gradients = {port: _drawn_as(port.gradient) for port in body.ports if port.gradient is not None}
    states = dict(zip(body.ports_of(Kind.STATE), body.state_gradients, strict=True))

    def name(node: Node) -> str:
        return names.get(node, node.name if node.op is None else Operator.of(node).name)

    boxes: dict[Node, Box] = {}
    loop = deferred = panel.add_band(f"Backward loop{which}", "sequential, from the last step to the first", "backward")
    for port, node in states.items():
        note = "unchanged" if gradients.get(port) is node else "from the step after"
        boxes[node] = panel.add_value(f"d {port.source.name}", node, band=loop, note=note)
    for node, output in zip(body.output_gradients, body.outputs, strict=True):
        boxes[node] = panel.add_value(f"d {name(output)}", node, band=loop, note="arrives")
    for node in (node for node in body.backward if is_drawn(node) and node not in once):
        panel.add_operator(node, boxes, name=name, band=loop)
    if any(port.kind is Kind.WEIGHT for port in gradients):
        deferred = panel.add_band(f"Deferred{which}", "for all steps at once, after the backward loop", "deferred")
        drawn = [node for node in body.deferred if is_drawn(node) and node not in once]
        # What is computed again after the loop has a box in both bands.
        boxes = {node: box for node, box in boxes.items() if node not in drawn}
        for node in drawn:
            panel.add_operator(node, boxes, name=name, band=deferred)
    notes = {Kind.PER_STEP: "for all steps", Kind.CONSTANT: "summed up", Kind.WEIGHT: "gradient"}
    for port, gradient in gradients.items():
        if port in states and gradient in boxes and gradient is not states[port]:
            panel.connect(boxes[gradient], boxes[states[port]], delayed=True)
        elif port not in states and gradient in boxes:
            band, note = deferred if port.kind is Kind.WEIGHT else loop, notes[port.kind]
            panel.connect(boxes[gradient], panel.add_value(f"d {names[port.node]}", port.node, band=band, note=note))


def _forward_names(body: Body) -> tuple[set[Node], dict[Node, str]]:
    """The weights of a loop and views of them, which are made before it; and names for values of the forward pass."""
    once = set(body.nodes_of(Kind.WEIGHT))
    names = {port.node: _origin(port.source) for port in body.ports}
    for node in body.backward:
        if not node.has_rows and node.inputs and all(item in once for item in node.inputs):
            once.add(node)
            names[node] = ", ".join(names[item] for item in node.inputs)
    for new, port in zip(body.next_states, body.ports_of(Kind.STATE), strict=True):
        names.setdefault(new, f"new {port.source.name}")
    names.update((node, f"stored {Operator.of(node).name}") for node in body.saved)
    return once, names


def _origin(source: Node) -> str:
    """The parameters behind a value that is computed once; of any other value, its operator or the input's name."""
    if source.op is None:
        return source.name
    if source.has_rows:
        return Operator.of(source).name
    behind = sorted(node.name for node in needed_for([source]) if node.op is None)
    return ", ".join(behind) or source.name


def _text_width(text: str, size: float, *, bold: bool = False) -> float:
    """About how wide a text is in any plain font."""
    return len(text) * size * (0.63 if bold else 0.58)


def _lay_out(panel: Panel) -> None:
    """Find a place for everything in a panel."""
    for box in panel.boxes:
        texts = [_text_width(box.title, TITLE_SIZE, bold=True)]
        texts += [_text_width(text, LINE_SIZE) for text in (box.shape, box.reads)]
        around = 36.0 if box.look == "value" else 20.0
        box.width = min(max(MIN_BOX_WIDTH, max(texts) + around), MAX_BOX_WIDTH)
        box.height = 58.0 if box.reads else 44.0
        box.middle = 0.0
    rows = _assign_rows(panel)
    falling = [arrow for arrow in panel.arrows if arrow.leads_down]
    links = list(dict.fromkeys(pair for arrow in falling for pair in pairwise(arrow.chain)))
    _order_rows(rows, links)
    _place_across(rows, links)
    _straighten(rows, falling)
    rising = [arrow for arrow in panel.arrows if not arrow.leads_down]
    lanes, left, right = _choose_lanes(rows, rising)
    shift = BAND_SIDE - left
    for box in (box for row in rows for box in row):
        box.middle += shift
    titles = [_text_width(f"{band.title}  {band.note}", TITLE_SIZE) for band in panel.bands]
    panel.width = BAND_SIDE + max([right + shift, *titles])
    _place_down(panel, rows, rising)
    _draw_falling(falling)
    _draw_rising(rows, rising, {arrow: lane + shift for arrow, lane in lanes.items()})


def _assign_rows(panel: Panel) -> Rows:
    """Bands one below the other; within a band, a box lies below all it reads, and an input just above its reader."""
    rows: Rows = []
    for number in range(len(panel.bands)):
        graph = nx.DiGraph()
        graph.add_nodes_from(box for box in panel.boxes if box.band == number)
        for arrow in panel.arrows:
            if arrow.source.band == arrow.target.band == number and not arrow.delayed:
                graph.add_edge(arrow.source, arrow.target)
        generations = list(nx.topological_generations(graph))
        for depth, generation in enumerate(generations):
            for box in generation:
                box.row = len(rows) + depth
        for box in (box for box in graph if not graph.in_degree(box)):
            box.row = min((reader.row for reader in graph.successors(box)), default=box.row + 1) - 1
        rows += [[] for _ in generations]
    for box in panel.boxes:
        rows[box.row].append(box)
    passed: dict[tuple[Box, int], Box] = {}
    for arrow in panel.arrows:
        arrow.path.clear()
        for row in range(arrow.source.row + 1, arrow.target.row):
            # Arrows from one box run together for as long as they can.
            if (arrow.source, row) not in passed:
                passed[arrow.source, row] = Box(look="bend", row=row)
                rows[row].append(passed[arrow.source, row])
            arrow.path.append(passed[arrow.source, row])
    return rows


def _order_rows(rows: Rows, links: list[tuple[Box, Box]]) -> None:
    """Sort each row by the mean place of what its boxes are linked to in the row above, or below, by turns."""
    above: dict[Box, list[Box]] = defaultdict(list)
    below: dict[Box, list[Box]] = defaultdict(list)
    for upper, lower in links:
        above[lower].append(upper)
        below[upper].append(lower)
    # Places as shares of a row's width: rows are of unequal length.
    places = {box: (index + 0.5) / len(row) for row in rows for index, box in enumerate(row)}
    for sweep in range(ORDER_SWEEPS):
        neighbours = below if sweep % 2 else above
        for row in reversed(rows) if sweep % 2 else rows:
            means = {box: fmean([places[other] for other in neighbours[box]] or [places[box]]) for box in row}
            row.sort(key=means.__getitem__)
            places.update((box, (index + 0.5) / len(row)) for index, box in enumerate(row))


def _place_across(rows: Rows, links: list[tuple[Box, Box]]) -> None:
    """Positions that keep arrows short and straight: least squares in each row, under its order, repeatedly."""
    pulls: dict[Box, list[tuple[Box, float]]] = defaultdict(list)
    for upper, lower in links:
        # The bends of an arrow should lie in line; its ends matter less.
        weight = (1.0, 2.0, 12.0)[(upper.look == "bend") + (lower.look == "bend")]
        pulls[upper].append((lower, weight))
        pulls[lower].append((upper, weight))
    for turn in range(PLACEMENT_ROUNDS):
        for row in rows if turn % 2 == 0 else reversed(rows):
            _place_row(row, [pulls[box] or [(box, 0.1)] for box in row])


def _distance(left: Box, right: Box) -> float:
    """Between the middles of neighbours in a row, at least."""
    return (left.width + right.width) / 2 + BOX_GAP


def _place_row(row: list[Box], pulls: list[list[tuple[Box, float]]]) -> None:
    """Place boxes where they are pulled, as far as order and gaps allow; those that push each other move as one."""
    offsets = list(accumulate((_distance(*pair) for pair in pairwise(row)), initial=0.0))
    blocks: list[tuple[float, float, int]] = []
    for found, offset in zip(pulls, offsets, strict=True):
        total = sum(weight for _, weight in found)
        blocks.append((sum(box.middle * weight for box, weight in found) / total - offset, total, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (one, first, many), (two, second, more) = blocks[-2:]
            blocks[-2:] = [((one * first + two * second) / (first + second), first + second, many + more)]
    places = [place for place, _, count in blocks for _ in range(count)]
    for box, place, offset in zip(row, places, offsets, strict=True):
        box.middle = place + offset


def _straighten(rows: Rows, falling: list[Arrow]) -> None:
    """Let arrows run upright through as many rows as their neighbours leave room."""
    for arrow in sorted(falling, key=lambda arrow: -len(arrow.path)):
        waiting = arrow.path
        while waiting:
            low, high = -math.inf, math.inf
            run: list[Box] = []
            for bend in waiting:
                row, at = rows[bend.row], rows[bend.row].index(bend)
                # Rounding must not leave no room at all: the present place is fine.
                least = min([other.middle + _distance(other, bend) for other in row[:at][-1:]] or [-math.inf])
                most = max([other.middle - _distance(bend, other) for other in row[at + 1 : at + 2]] or [math.inf])
                least, most = min(least, bend.middle), max(most, bend.middle)
                if max(low, least) > min(high, most):
                    break
                low, high = max(low, least), min(high, most)
                run.append(bend)
            place = min(max(fmean(bend.middle for bend in run), low), high)
            for bend in run:
                bend.middle = place
            waiting = waiting[len(run) :]


def _choose_lanes(rows: Rows, rising: list[Arrow]) -> tuple[dict[Arrow, float], float, float]:
    """For each arrow that leads up, where it does: beside all that lies in between, on the nearer side.

    An arrow within a row has no lane: it is an arch over that row. Also returns the left and right edge of everything.
    """
    lanes = {}
    lefts = [min(box.middle - box.width / 2 for box in row) for row in rows]
    rights = [max(box.middle + box.width / 2 for box in row) for row in rows]
    higher = [arrow for arrow in rising if arrow.source.row != arrow.target.row]
    for arrow in sorted(higher, key=lambda arrow: arrow.source.row - arrow.target.row):
        rows_passed = slice(arrow.target.row, arrow.source.row + 1)
        left, right = min(lefts[rows_passed]) - LANE, max(rights[rows_passed]) + LANE
        is_left = left + right > arrow.source.middle + arrow.target.middle
        lanes[arrow] = left if is_left else right
        (lefts if is_left else rights)[rows_passed] = [lanes[arrow]] * len(lefts[rows_passed])
    return lanes, min(lefts, default=0.0), max(rights, default=0.0)


def _place_down(panel: Panel, rows: Rows, rising: list[Arrow]) -> None:
    """Heights of rows and bands, with a track for each arrow that turns above or below a row."""
    above = Counter(arrow.target.row for arrow in rising)
    below = Counter(arrow.source.row for arrow in rising if arrow.source.row != arrow.target.row)
    y, number = 0.0, 0
    for index, band in enumerate(panel.bands):
        band.top = y
        y += BAND_TOP
        last = max((box.row for box in panel.boxes if box.band == index), default=-1)
        while number <= last:
            y += TRACK * above[number]
            height = max(box.height for box in rows[number])
            for box in rows[number]:
                box.height = height if box.look == "bend" else box.height
                box.top = y + (height - box.height) / 2
            y += height + TRACK * below[number] + (ROW_GAP if number < last else 0.0)
            number += 1
        y += BAND_BOTTOM
        band.height = y - band.top
        y += BAND_GAP
    panel.height = max(y - BAND_GAP, 0.0)


def _draw_falling(falling: list[Arrow]) -> None:
    """Arrows leave and reach each box side by side, in the order of where they go or come from."""
    ends: dict[tuple[Box, bool], set[Box]] = defaultdict(set)
    for arrow in falling:
        ends[arrow.source, True].add(arrow.chain[1])
        ends[arrow.target, False].add(arrow.chain[-2])

    def port(box: Box, other: Box, *, leaving: bool) -> float:
        others = ends[box, leaving]
        position = sum(item.middle < other.middle for item in others)
        return box.middle + (position - (len(others) - 1) / 2) * min(16.0, (box.width - 24) / len(others))

    for arrow in falling:
        source, *bends, target = arrow.chain
        arrow.corners = [(port(source, arrow.chain[1], leaving=True), source.bottom)]
        for bend in bends:
            arrow.corners += [(bend.middle, bend.top), (bend.middle, bend.bottom)]
        arrow.corners.append((port(target, arrow.chain[-2], leaving=False), target.top))


def _draw_rising(rows: Rows, rising: list[Arrow], lanes: dict[Arrow, float]) -> None:
    above, below = Counter[int](), Counter[int]()
    for arrow in rising:
        source, target = arrow.source, arrow.target
        above[target.row] += 1
        high = min(box.top for box in rows[target.row]) - TRACK * (above[target.row] + 0.5)
        if arrow not in lanes:
            start = source.middle + math.copysign(0.3 * source.width, target.middle - source.middle)
            arrow.corners = [(start, source.top), (start, high)]
        else:
            lane = lanes[arrow]
            below[source.row] += 1
            low = max(box.bottom for box in rows[source.row]) + TRACK * (below[source.row] + 0.5)
            start = source.middle + math.copysign(source.width / 2 - 14, lane - source.middle)
            arrow.corners = [(start, source.bottom), (start, low), (lane, low), (lane, high)]
        arrow.corners += [(target.middle, high), (target.middle, target.top)]


def draw(plan: Plan, bodies: list[Body], *, title: str, subtitle: str = "") -> str:
    """A plan and the bodies of its loops, in order, as SVG: what is computed at which stage, forward and backward."""
    panels = [panel for panel in (forward_panel(plan), backward_panel(bodies)) if panel.boxes]
    return document(panels, title=title, subtitle=subtitle)


def escape(text: str) -> str:
    """Text as XML shows it; characters that XML cannot hold become a replacement mark."""
    plain = "".join("\ufffd" if unicodedata.category(c) in {"Cc", "Cs", "Cn"} else c for c in text)
    return html.escape(plain, quote=True)


def document(panels: Sequence[Panel], *, title: str, subtitle: str = "", words: str = "") -> str:
    """Panels side by side as a whole picture, or `words` if there are none."""
    for panel in panels:
        _lay_out(panel)
    inside = sum(panel.width for panel in panels) + PANEL_GAP * max(len(panels) - 1, 0)
    wide = max(inside, _text_width(title, 21, bold=True), _text_width(subtitle, 13), _text_width(words, 13), 780.0)
    width = wide + 2 * MARGIN
    height = HEAD + PANEL_HEAD + max(panel.height for panel in panels) + FOOT if panels else HEAD + 50
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(width)}" height="{_n(height)}" '
        f'viewBox="0 0 {_n(width)} {_n(height)}" role="img" aria-label="{escape(title)}" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\" "
        'style="max-width: 100%; height: auto">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_n(width)}" height="{_n(height)}" rx="12" fill="#ffffff"/>',
        _text(MARGIN, 40, title, size=21, weight=650),
        _text(MARGIN, 61, subtitle, size=13, fill=SOFT),
    ]
    if words:
        lines.append(_text(MARGIN, HEAD + 24, words, size=13))
    x = MARGIN
    for panel in panels:
        lines.append(_text(x, HEAD + 19, panel.title, size=15, weight=600))
        lines.append(f'<g transform="translate({_n(x)} {_n(HEAD + PANEL_HEAD)})">')
        lines += _panel(panel)
        lines.append("</g>")
        x += panel.width + PANEL_GAP
    if panels:
        lines += _legend(height - FOOT / 2 + 4)
    return "\n".join([*lines, "</svg>\n"])


def _panel(panel: Panel) -> Iterator[str]:
    for band in panel.bands:
        yield _rectangle(0, band.top, panel.width, band.height, f'rx="10" fill="{BAND_COLOURS[band.stage]}"')
    for arrow in sorted(panel.arrows, key=lambda arrow: arrow.delayed):
        x, y = arrow.corners[-1]
        shape = _curve(arrow.corners) if arrow.leads_down else _polyline(arrow.corners)
        colour = ACCENT if arrow.delayed else LINE
        yield f'<path d="{shape}" fill="none" {DELAYED_STROKE if arrow.delayed else STROKE}/>'
        yield f'<path d="M{_n(x - 3.6)} {_n(y - 7)}h7.2L{_n(x)} {_n(y)}z" fill="{colour}"/>'
        if arrow.label:
            yield _text(x + 9, y - 5, arrow.label, size=LINE_SIZE, fill=ACCENT)
    for band in panel.bands:
        # An outline in the band's colour keeps arrows off the words.
        halo = f'paint-order="stroke" stroke="{BAND_COLOURS[band.stage]}" stroke-width="5" stroke-linejoin="round"'
        note = f'<tspan dx="8" font-weight="400" fill="{SOFT}">{escape(band.note)}</tspan>'
        yield (
            f'<text x="14" y="{_n(band.top + 22)}" font-size="{_n(TITLE_SIZE)}" font-weight="650" '
            f'fill="{INK}" {halo}>{escape(band.title)} {note}</text>'
        )
    for box in panel.boxes:
        yield from _box(box)


def _box(box: Box) -> Iterator[str]:
    yield f"<g><title>{escape(box.tip)}</title>"
    yield _rectangle(box.middle - box.width / 2, box.top, box.width, box.height, BOX_STYLES[box.look])
    weight = 600 if box.look != "view" else 450
    title = _shorten(box.title, box.width - 14, size=TITLE_SIZE)
    yield _text(box.middle, box.top + 19, title, size=TITLE_SIZE, weight=weight, style='text-anchor="middle"')
    yield _text(box.middle, box.top + 34, box.shape, size=LINE_SIZE, fill=SOFT, style='text-anchor="middle"')
    if box.reads:
        reads, style = _shorten(box.reads, box.width - 14, size=LINE_SIZE), 'text-anchor="middle" font-style="italic"'
        yield _text(box.middle, box.top + 48, reads, size=LINE_SIZE, fill=SOFT, style=style)
    yield "</g>"


def _legend(y: float) -> Iterator[str]:
    x = MARGIN
    for look, words in LEGEND.items():
        yield _rectangle(x, y - 12, 26, 16, BOX_STYLES[look])
        yield _text(x + 34, y, words, size=12, fill=SOFT)
        x += 34 + _text_width(words, 12) + 18
    for stroke, words in ((STROKE, "read by"), (DELAYED_STROKE, "carried to the next step")):
        yield f'<path d="M{_n(x)} {_n(y - 4)}h22" fill="none" {stroke}/>'
        yield _text(x + 30, y, words, size=12, fill=SOFT)
        x += 30 + _text_width(words, 12) + 18


def _curve(corners: list[Point]) -> str:
    """An arrow that leads down: vertical at every row, bent in between."""
    parts = []
    for (x, y), (to_x, to_y) in zip(corners[::2], corners[1::2], strict=True):
        half = _n((y + to_y) / 2)
        parts.append(f"L{_n(x)} {_n(y)}C{_n(x)} {half} {_n(to_x)} {half} {_n(to_x)} {_n(to_y)}")
    return "M" + "".join(parts)[1:]


def _polyline(corners: list[Point]) -> str:
    """Straight lines with rounded corners."""
    parts = [f"M{_n(corners[0][0])} {_n(corners[0][1])}"]
    for before, here, after in zip(corners, corners[1:], corners[2:], strict=False):
        start, end = _towards(here, before), _towards(here, after)
        parts.append(f"L{_n(start[0])} {_n(start[1])}Q{_n(here[0])} {_n(here[1])} {_n(end[0])} {_n(end[1])}")
    return "".join([*parts, f"L{_n(corners[-1][0])} {_n(corners[-1][1])}"])


def _towards(here: Point, there: Point) -> Point:
    away = abs(there[0] - here[0]) + abs(there[1] - here[1])
    share = min(ROUNDING, away / 2) / away if away else 0.0
    return here[0] + (there[0] - here[0]) * share, here[1] + (there[1] - here[1]) * share


def _text(x: float, y: float, text: str, *, size: float, weight: int = 400, fill: str = INK, style: str = "") -> str:
    return (
        f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" font-weight="{weight}" fill="{fill}" {style}>'
        f"{escape(text)}</text>"
    )


def _rectangle(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" {style}/>'


def _shorten(text: str, width: float, *, size: float) -> str:
    """As much as fits, with an ellipsis for the rest."""
    most = int(width / _text_width("x", size, bold=size == TITLE_SIZE))
    return text if len(text) <= most else f"{text[: most - 1].rstrip(', ')}…"


def _n(number: float) -> str:
    """A coordinate, without needless digits."""
    return f"{number:.1f}".removesuffix(".0") if round(number, 1) else "0"
