"""The picture of a step: what is computed once, before the loops, in them, and after them."""

from typing import Any, TypeAlias

from stretto.graph.analyse import Plan, Stage
from stretto.graph.drawing.panel import Band, Delayed, Panel, is_drawn, shown, sources
from stretto.graph.node import Node
from stretto.graph.summary import places

Key: TypeAlias = "tuple[int, int, int]"
"""Where a band lies: by level; loops before what is computed behind them; one loop before the other."""

ONCE: Key = (-1, 0, 0)
INPUT: Key = (0, 1, 0)


def forward_panel(plan: Plan) -> Panel:
    """Boxes and arrows of a step, with arrows from each next state to the state it becomes."""
    graph, panel = plan.graph, Panel("Forward")
    keys = _Bands(plan).keys
    operators = [node for node in graph.nodes if is_drawn(node)]
    still = {node for node in graph.nodes if node.op is None} - {graph.x, *graph.states}
    readers = {item for node in operators for item in sources(node)} | {shown(graph.y)}
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
        read = sources(node)
        reads = [item.name for item in read if item in still]
        boxes[node] = panel.operator(node, reads=reads, band=number[keys[node]])
        panel.edges += [(boxes[item], boxes[node]) for item in dict.fromkeys(read) if item in boxes]
    last = shown(graph.y)
    if last in boxes:
        output = panel.value("y", graph.y, band=panel.boxes[boxes[last]].band, note="output")
        panel.edges.append((boxes[last], output))
    _add_delayed(plan, panel, boxes)
    return panel


def _passes_on(plan: Plan, state: Node, readers: set[Node]) -> bool:
    """Whether nothing reads a part of the state, but that a part that is read becomes it one step later."""
    graph = plan.graph
    after = {old: shown(new) for old, new in zip(graph.states, graph.next_states, strict=True)}
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
    after = {old: shown(new) for old, new in zip(graph.states, graph.next_states, strict=True)}
    for state in graph.states:
        source, steps = after[state], 1
        while source in after and source not in boxes and after[source] is not source:
            source, steps = after[source], steps + 1
        if state in boxes and source in boxes and source is not state:
            label = f"{steps} steps" if steps > 1 else ""
            panel.delayed.append(Delayed(source=boxes[source], target=boxes[state], label=label))


def _band(plan: Plan, key: Key, *, working: set[Key]) -> Band:
    if key == ONCE:
        return Band(title="Once", note="from weights alone", place="once")
    if key == _sunk(plan):
        return Band(title="Sunk", note="for all steps at once, after the loops", place="sunk")
    level, behind, position = key
    if behind:
        if key not in working:
            return Band(title="Input", note="of all steps", place="input")
        before = ", before the loop that waits for it" if plan.all_loops else "; nothing is recurrent"
        return Band(title="Hoisted", note=f"for all steps at once{before}", place="hoisted")
    loop = plan.loops[level][position]
    names = ", ".join(plan.graph.states[index].name for index in loop.states)
    which = f"Loop {plan.all_loops.index(loop) + 1}" if len(plan.all_loops) > 1 else "Loop"
    return Band(title=which, note=f"step after step; carries {names}", place="loop")


def _sunk(plan: Plan) -> Key:
    return (len(plan.loops), 0, 0)


class _Bands:
    """The band of every value of a step."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        graph = plan.graph
        self.place: dict[Node, Stage] = places(plan)
        self.keys: dict[Node, Key] = {graph.x: INPUT}
        self.level = {node: level for level, nodes in enumerate(plan.maps) for node in nodes}
        self.loop: dict[Node, Any] = {}
        for level, loops in enumerate(plan.loops):
            for position, loop in enumerate(loops):
                self.loop.update((graph.states[index], (level, 0, position)) for index in loop.states)
                self.loop.update((node, (level, 0, position)) for node in loop.nodes)
        self.keys.update((graph.states[index], INPUT) for index in plan.constants_per_row)
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
        """A part of the state that no loop carries is there one step after its next value."""
        if state in self.loop:
            return self.loop[state]  # type: ignore[no-any-return]
        graph = self.plan.graph
        reading = [node for node in graph.nodes if state in node.inputs]
        before = self.key(graph.next_states[graph.states.index(state)])
        if not reading:
            return max(before, INPUT)
        if all(self.place[node] is Stage.SUNK for node in reading):
            return _sunk(self.plan)
        return (max(before[0], 0), 1, 0)

    def _operator(self, node: Node) -> Key:
        place = self.place.get(node, Stage.ONCE)
        if place is Stage.ONCE:
            return ONCE
        if place is Stage.SUNK:
            return _sunk(self.plan)
        if place is Stage.LOOP:
            return self.loop[node]  # type: ignore[no-any-return]
        # A view that a loop reads where it lies belongs to what it looks at.
        level = self.level.get(node, max([0, *(self.key(item)[0] for item in node.inputs)]))
        return (level, 1, 0)
