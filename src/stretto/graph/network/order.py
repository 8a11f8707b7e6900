"""The order in which one step computes the layers of a graph, and which of them form loops through time."""

from collections.abc import Iterable, Sequence

import networkx as nx  # type: ignore[import-untyped, unused-ignore]

from stretto.errors import StrettoError
from stretto.graph.network.connection import Connection


def step_order(names: Iterable[str], *, connections: Sequence[Connection]) -> tuple[str, ...]:
    """Every layer after all that it reads in the same step; the same order however the layers were declared.

    Raises:
        StrettoError: If layers wait for each other within a step.
    """
    graph = _graph(names, connections=[one for one in connections if one.delay == 0])
    for component in sorted(sorted(each) for each in nx.strongly_connected_components(graph)):
        if len(component) > 1 or graph.has_edge(component[0], component[0]):
            edges = nx.find_cycle(graph.subgraph(component), source=component[0])
            cycle = " -> ".join([repr(edges[0][0]), *(repr(edge[1]) for edge in edges)])
            raise StrettoError(
                f"the layers {cycle} form a cycle without delay: each waits for the others within a step",
                fix="Give at least one of these connections a delay of 1 or more.",
            )
    return tuple(nx.lexicographical_topological_sort(graph))


def loops(names: Iterable[str], *, connections: Sequence[Connection]) -> dict[str, int]:
    """The number of the strongly connected component of each layer, delayed connections included."""
    components = nx.strongly_connected_components(_graph(names, connections=connections))
    return {name: number for number, component in enumerate(components) for name in component}


def reached(starts: Iterable[str], *, connections: Sequence[Connection], backwards: bool = False) -> set[str]:
    """The layers that paths from `starts` come to, or with `backwards` those that paths to `starts` come from."""
    graph = _graph(starts, connections=connections)
    ends = nx.ancestors if backwards else nx.descendants
    return set(starts).union(*(ends(graph, start) for start in starts))


def _graph(names: Iterable[str], *, connections: Iterable[Connection]) -> nx.DiGraph:
    """Built in sorted order, so that what is found in it does not depend on how it was declared."""
    graph = nx.DiGraph()
    graph.add_nodes_from(sorted(names))
    graph.add_edges_from(sorted((one.source, one.destination) for one in connections))
    return graph
