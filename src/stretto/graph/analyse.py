"""Which nodes of a step are truly recurrent, and where all others go.

The graph of a step gets an edge from each next state to the state it becomes. A strongly connected component of that
graph is a loop through time (Hwang & Sung 2015). Everything else can be computed for all steps at once, before the
loops it feeds or after the loops it reads. Of h' = tanh(W^T x + U h + b), y = V h' three operators stay in the loop:

    once         W^T                from weights alone: one time per call
    hoisted      W^T x + b          for all steps at once, before the loop that waits for it
    loop         U h, +, tanh       sequential: on a cycle through time
    sunk         V h'               for all steps at once, after the loops

                 +-----<--- next step ---<-----+
                 |                             |
    x --hoisted--+--> [ h -> U h -> + -> tanh -+-> h' ]--sunk--> y

The backward pass (`adjoint.py`) adds a fifth stage, `deferred`: the gradients of weights, after its loop.

Loops can stand one behind the other. A node's level is the largest number of loops on a path that leads to it, so
the stages run in the order  maps[0], loops[0] (none), maps[1], loops[1], ...: each level reads only what is done.
"""

import operator
from dataclasses import dataclass, field
from enum import Enum

import networkx as nx

from stretto.graph.node import Node, topological_sort
from stretto.graph.operators import is_pointwise, is_random, is_view, uses_number_of_rows, why_mixed, why_not_rowwise
from stretto.graph.rewrite import drop_unused, look_up_rows, merge_products, split_products_of_concatenations
from stretto.graph.rows import rows_first
from stretto.graph.trace import StepGraph, Untraceable, constant_fill


class Stage(str, Enum):
    """When a node is computed; see the drawing at the top of this file."""

    ONCE = "once"
    HOISTED = "hoisted"
    LOOP = "loop"
    SUNK = "sunk"


@dataclass(slots=True)
class Loop:
    """What has to be done sequentially.

    Attributes:
        states: Indices of the parts of the state that this loop carries.
        nodes: Its operators, in order.
        per_step: Values it reads that differ between steps.
        weights: Values it reads that are the same for all rows and steps.
        constants: Values it reads that are the same at every step, though not for every row.
        outputs: Values, other than next states, that are read outside.
        level: How many loops there are up to it, itself included.
    """

    states: list[int]
    nodes: list[Node]
    per_step: list[Node]
    weights: list[Node]
    constants: list[Node]
    outputs: list[Node]
    level: int


@dataclass(slots=True)
class Plan:
    """A step with a stage for every operator, and its loops.

    Attributes:
        graph: The step, after rewriting.
        stage: When each operator runs.
        maps: Operators outside of loops by level, in order. A part of the state in between stands for the value that
            the next state had one step earlier.
        loops: Loops by level; those of one level do not depend on each other.
        constants_per_row: Indices of the parts of the state that never change.
        per_row: Operators on these and on weights alone, in order: once for each sequence, as keys of a memory are.
        rewrites: What was rewritten, in words.
    """

    graph: StepGraph
    stage: dict[Node, Stage]
    maps: list[list[Node]]
    loops: list[list[Loop]]
    constants_per_row: set[int]
    per_row: list[Node]
    rewrites: list[str] = field(default_factory=list)

    @property
    def all_loops(self) -> list[Loop]:
        """The loops of all levels."""
        return [loop for level in self.loops for loop in level]

    def nodes_at(self, stage: Stage) -> list[Node]:
        """The operators of one stage, in order."""
        return [node for node in self.graph.nodes if self.stage.get(node) is stage]


def analyse(graph: StepGraph) -> Plan:
    """Rewrite `graph` so that as much as possible can leave the loops, and give every operator its stage.

    Raises:
        Untraceable: Something outside the loops mixes the rows of the batch, so steps cannot be laid out as rows, or a
            value is the number of rows, which is another one wherever steps are laid out as rows.
    """
    rewrites = _rewrite(graph)
    if (node := next(filter(uses_number_of_rows, graph.nodes), None)) is not None:
        name = "full" if node.op is constant_fill else node.label
        raise Untraceable(
            f"{name} uses the number of rows{node.whereabouts}; let no value depend on how many sequences there are"
        )
    constants = {index for index, state in enumerate(graph.states) if state not in graph.changing}
    cycles = _cycles(graph)
    level = _levels(graph, cycles)
    cycle_of = {node: index for index, cycle in enumerate(cycles) for node in cycle}
    stage = _stages(graph, cycle_of, level)
    users = _users(graph)
    unchanging = _once_per_row(graph, constants, {node for node, when in stage.items() if when is Stage.ONCE})
    loops = [_loop(graph, cycle, stage=stage, level=level, constants=unchanging, users=users) for cycle in cycles]
    depth = max([*level.values(), 0])
    by_level: list[list[Loop]] = [[] for _ in range(depth + 1)]
    for loop in sorted(loops, key=lambda loop: loop.states):
        by_level[loop.level].append(loop)
    for node in (node for loop in loops for node in loop.nodes):
        if stage[node] is Stage.SUNK:
            stage[node] = Stage.LOOP
    maps: list[list[Node]] = [[] for _ in range(depth + 1)]
    for node in graph.nodes:
        if stage.get(node) in {Stage.HOISTED, Stage.SUNK}:
            if reason := why_mixed(node):
                raise Untraceable(reason)
            if node not in unchanging:
                maps[level[node]].append(node)
    per_row = [node for node in graph.nodes if node in unchanging and node.op is not None]
    _drop_unread_views([per_row, *maps], loops, graph)
    maps = [_with_shifts(graph, nodes, cycle_of) for nodes in maps]
    return Plan(
        graph=graph,
        stage=stage,
        maps=maps,
        loops=by_level,
        constants_per_row=constants,
        per_row=per_row,
        rewrites=rewrites,
    )


def _rewrite(graph: StepGraph) -> list[str]:
    rewrites = ["half precision computed in single precision"] if graph.narrow else []
    look_up_rows(graph)
    graph.nodes = rows_first(graph.nodes)
    if count := split_products_of_concatenations(graph):
        rewrites.append(f"{count} product(s) of a concatenation split, so that the input's part leaves the loop")
    drop_unused(graph)
    if count := merge_products(graph, set().union(*_cycles(graph))):
        rewrites.append(f"{count} product(s) in the loop merged with another one of the same vector")
    return rewrites


def _stages(graph: StepGraph, cycle_of: dict[Node, int], level: dict[Node, int]) -> dict[Node, Stage]:
    """The stage of every operator, before loops absorb what is cheaper inside."""
    once, feeds_loop = _weights_only(graph), _feeding_loops(graph, cycle_of)
    stage: dict[Node, Stage] = {}
    for node in graph.nodes:
        if node.op is None:
            continue
        if node in once:
            stage[node] = Stage.ONCE
        elif node in cycle_of:
            stage[node] = Stage.LOOP
        elif level[node] == 0 or node in feeds_loop:
            stage[node] = Stage.HOISTED
        else:
            stage[node] = Stage.SUNK
    return stage


def _cycles(graph: StepGraph) -> list[set[Node]]:
    """The loops through time."""
    network = nx.DiGraph()
    network.add_nodes_from(graph.nodes)
    network.add_edges_from((item, node) for node in graph.nodes for item in node.inputs)
    network.add_edges_from((new, old) for old, new in graph.changing.items())
    cycles = [set(part) for part in nx.strongly_connected_components(network) if len(part) > 1]
    cycle_of = {node: cycle for cycle in cycles for node in cycle}
    for node in graph.nodes:
        # The parts of an operator with several outputs stay with it, also those that nothing in the loop reads.
        if node.op is operator.getitem and node.args[0] in cycle_of:
            cycle_of[node.args[0]].add(node)
    return cycles


def _levels(graph: StepGraph, cycles: list[set[Node]]) -> dict[Node, int]:
    """The level of every node: a topological sort of the graph whose nodes are the components."""
    component = {node: index for index, cycle in enumerate(cycles) for node in cycle}
    for index, node in enumerate(node for node in graph.nodes if node not in component):
        component[node] = len(cycles) + index
    network = nx.DiGraph()
    network.add_nodes_from(component.values())
    for node in graph.nodes:
        network.add_edges_from((component[item], component[node]) for item in node.inputs)
    network.add_edges_from((component[new], component[old]) for old, new in graph.changing.items())
    network.remove_edges_from([(index, index) for index in component.values()])
    found: dict[int, int] = {}
    for index in nx.topological_sort(network):
        before = max((found[item] for item in network.predecessors(index)), default=0)
        found[index] = before + (index < len(cycles))
    return {node: found[component[node]] for node in graph.nodes}


def _weights_only(graph: StepGraph) -> set[Node]:
    """Nodes that depend only on parameters and constants."""
    varying = {graph.x, *graph.states}
    for node in graph.nodes:
        if node.op is None:
            continue
        if node.has_rows or is_random(node) or any(item in varying for item in node.inputs):
            varying.add(node)
    return {node for node in graph.nodes if node not in varying}


def _once_per_row(graph: StepGraph, constants: set[int], once: set[Node]) -> set[Node]:
    """The parts of the state that never change, and what is computed row by row from them and from weights alone."""
    found = {graph.states[index] for index in constants}
    still = once | {node for node in graph.nodes if node.op is None and node is not graph.x} - set(graph.states)
    for node in graph.nodes:
        read = node.inputs
        if any(item in found for item in read) and all(item in found or item in still for item in read):
            is_per_row = node.has_rows or node.dtype is None
            if is_per_row and not is_random(node) and why_not_rowwise(node) is None:
                found.add(node)
    return found


def _feeding_loops(graph: StepGraph, cycle_of: dict[Node, int]) -> set[Node]:
    """Nodes outside of loops that a loop waits for."""
    feeding: set[Node] = set()
    after = dict(zip(graph.next_states, graph.states, strict=True))
    users = _users(graph)
    for node in reversed(graph.nodes):
        reads = [*users.get(node, []), *([after[node]] if node in after else [])]
        if any(user in feeding or user in cycle_of for user in reads if user is not node):
            feeding.add(node)
    return feeding


def _users(graph: StepGraph) -> dict[Node, list[Node]]:
    users: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for item in node.inputs:
            users.setdefault(item, []).append(node)
    return users


def _loop(
    graph: StepGraph,
    cycle: set[Node],
    *,
    stage: dict[Node, Stage],
    level: dict[Node, int],
    constants: set[Node],
    users: dict[Node, list[Node]],
) -> Loop:
    states = [index for index, state in enumerate(graph.states) if state in cycle]
    mine = level[graph.states[states[0]]]
    inside = {node for node in cycle if node.op is not None}
    outputs = {graph.y, *graph.next_states}
    own = {graph.states[index] for index in states}
    _absorb_results(graph, inside, stage=stage, level=level, mine=mine, states=own)
    _absorb_views(inside, stage)
    nodes = [node for node in graph.nodes if node in inside]
    read = dict.fromkeys(item for node in nodes for item in node.inputs if item not in inside and item not in own)
    next_states = {graph.next_states[index] for index in states}
    varying = [node for node in read if node.has_rows or node is graph.x]
    emitted = [
        node
        for node in nodes
        if stage[node] not in {Stage.HOISTED, Stage.ONCE}
        and node not in next_states
        and node.dtype is not None
        and (node in outputs or any(user not in inside for user in users.get(node, [])))
    ]
    return Loop(
        states=states,
        nodes=nodes,
        per_step=[node for node in varying if stage.get(node) is not Stage.ONCE and node not in constants],
        weights=[node for node in read if node not in varying],
        constants=[node for node in read if node in constants],
        outputs=emitted,
        level=mine,
    )


def _absorb_views(inside: set[Node], stage: dict[Node, Stage]) -> None:
    """A slice of a hoisted value is not copied: the loop reads it where it lies."""
    waiting = list(inside)
    while waiting:
        for item in waiting.pop().inputs:
            if item not in inside and stage.get(item) is Stage.HOISTED and is_view(item) and _keeps_rows(item):
                inside.add(item)
                waiting.append(item)


def _keeps_rows(node: Node) -> bool:
    source = node.inputs[0]
    return (node.dtype is None or node.has_rows) and (source.dtype is None or source.has_rows)


def _absorb_results(
    graph: StepGraph,
    inside: set[Node],
    *,
    stage: dict[Node, Stage],
    level: dict[Node, int],
    mine: int,
    states: set[Node],
) -> None:
    """Keep pointwise work on values of the loop in it, where it is part of a pass over the elements of a row.

    Sinking it would store those values, and each operator would read and write all steps by itself.
    """
    for node in graph.nodes:
        if stage.get(node) is not Stage.SUNK or level[node] != mine or node in inside:
            continue
        if not (is_pointwise(node) or is_view(node)) or is_random(node):
            continue
        read = node.inputs
        reachable = all(
            item in inside or item in states or stage.get(item, Stage.ONCE) is not Stage.SUNK for item in read
        )
        own = all(item in inside or item in states or level[item] < mine for item in read)
        if reachable and own and any(item in inside for item in read):
            inside.add(node)


def _with_shifts(graph: StepGraph, nodes: list[Node], cycle_of: dict[Node, int]) -> list[Node]:
    """A state on no loop is its next state, shifted by one step: insert it after the node that computes that."""
    after = {old: new for old, new in graph.changing.items() if old not in cycle_of}
    here = {*nodes, *after}
    reads = {node: [item for item in node.inputs if item in here] for node in nodes}
    reads.update((old, [new] if new in here else []) for old, new in after.items())
    return topological_sort(nodes, reads.__getitem__)


def _drop_unread_views(maps: list[list[Node]], loops: list[Loop], graph: StepGraph) -> None:
    """Views that loops have absorbed are not made outside as well."""
    read = {graph.y, *graph.next_states} | {
        node for loop in loops for node in [*loop.per_step, *loop.weights, *loop.constants]
    }
    for level in reversed(maps):
        for node in reversed(level):
            if node in read or not is_view(node):
                read.update(node.inputs)
        level[:] = [node for node in level if node in read or not is_view(node)]
