"""Every graph that makes no sense is refused, with the names of its layers."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

from stretto.errors import StrettoError
from stretto.graph import Graph, delayed_graph


def _sound() -> Graph:
    """x (3) -> h (4) -> h, with h as the output."""
    graph = Graph()
    graph.input("x", 3)
    graph.layer("h", 4, activation="tanh")
    graph.connect("x", "h")
    graph.connect("h", "h", delay=1)
    graph.output("h")
    return graph


def _triangle(graph: Graph) -> None:
    for source, destination in (("b", "c"), ("c", "a"), ("a", "b"), ("x", "a"), ("c", "h")):
        graph.connect(source, destination)
    for name in ("a", "b", "c"):
        graph.layer(name, 2)


def _island(graph: Graph) -> None:
    for name in ("p", "q"):
        graph.layer(name, 2)
    graph.connect("p", "q")
    graph.connect("q", "p", delay=1)
    graph.connect("q", "h")


def _dead_end(graph: Graph) -> None:
    graph.layer("lost", 2)
    graph.connect("h", "lost")


def _unfed(graph: Graph) -> None:
    graph.layer("part", 5)
    graph.connect("x", "part", kind="identity", destination_range=(0, 3))
    graph.connect("x", "part", source_range=(0, 1), destination_range=(4, 5))
    graph.connect("part", "h")


def _into_constant(graph: Graph) -> None:
    graph.constant("one")
    graph.connect("x", "one")


def _late_constant(graph: Graph) -> None:
    graph.constant("one")
    graph.connect("one", "h", delay=2)


def _initial_for_nothing(graph: Graph, **settings: Any) -> None:
    graph.layer("top", 2, **settings)
    graph.connect("h", "top")
    graph.output("top")


AT_ONCE: dict[str, tuple[Callable[[Graph], object], str]] = {
    "duplicate layer": (lambda graph: graph.layer("h", 2), "there is a layer 'h' already"),
    "duplicate output": (lambda graph: graph.output("h"), "layer 'h' is an output already"),
    "output of no name": (lambda graph: graph.output(["h"]), r"name of an output is \['h'\]"),
    "name with a dot": (lambda graph: graph.layer("a.b", 2), "name of a layer is 'a.b'"),
    "empty name": (lambda graph: graph.input("", 2), "name of a layer is ''"),
    "name that is a number": (lambda graph: graph.layer(3, 2), "name of a layer is 3"),
    "no size": (lambda graph: graph.layer("a", 0), "layer 'a' got size=0"),
    "aggregation": (
        lambda graph: graph.layer("a", 2, aggregation="max"),
        "layer 'a' got aggregation='max'.*multiply",
    ),
    "activation": (lambda graph: graph.layer("a", 2, activation="tan"), "layer 'a' got activation='tan'.*one_minus"),
    "activation of another type": (lambda graph: graph.layer("a", 2, activation=[]), "layer 'a' got activation="),
    "bias that is a number": (lambda graph: graph.layer("a", 2, bias=1.0), "layer 'a' got bias=1.0"),
    "bias in a product": (
        lambda graph: graph.layer("a", 2, aggregation="multiply", bias=True),
        "layer 'a' multiplies and has a bias",
    ),
    "start of no bias": (lambda graph: graph.layer("a", 2, initial_bias=1.0), "'a' has an 'initial_bias' and no bias"),
    "initial nan": (lambda graph: graph.layer("a", 2, initial=math.nan), "layer 'a' got initial=nan"),
    "initial too large": (lambda graph: graph.layer("a", 2, initial=10**400), "layer 'a' got initial=1000"),
    "initial text": (lambda graph: graph.layer("a", 2, initial="zero"), "layer 'a' got initial='zero'"),
    "kind": (lambda graph: graph.connect("x", "h", kind="sparse"), "the connection 'x' -> 'h' got kind='sparse'"),
    "negative delay": (lambda graph: graph.connect("x", "h", delay=-1), "the connection 'x' -> 'h' got delay=-1"),
    "source that is no name": (lambda graph: graph.connect(None, "h"), "source of a connection is None"),
    "destination that is no name": (lambda graph: graph.connect("x", 4), "destination of a connection is 4"),
    "range with a step": (
        lambda graph: graph.connect("x", "h", source_range=slice(0, 3, 2)),
        "the connection 'x' -> 'h' got source_range=slice",
    ),
    "range without an end": (
        lambda graph: graph.connect("x", "h", source_range=slice(1, None)),
        "'x' -> 'h' got a unit of source_range=None",
    ),
    "range from the end": (
        lambda graph: graph.connect("x", "h", destination_range=(-2, 4)),
        "'x' -> 'h' got a unit of destination_range=-2",
    ),
    "range of three": (
        lambda graph: graph.connect("x", "h", source_range=(0, 1, 2)),
        "the connection 'x' -> 'h' got source_range=",
    ),
    "empty range": (
        lambda graph: graph.connect("x", "h", source_range=(2, 2)),
        "'x' -> 'h' got source_range=.* holds no unit",
    ),
}

WHEN_WHOLE: dict[str, tuple[Callable[[Graph], object], str]] = {
    "unknown source": (lambda graph: graph.connect("z", "h"), "'z' -> 'h' names 'z', which is not a layer.*'x', 'h'"),
    "unknown destination": (lambda graph: graph.connect("x", "z"), "'x' -> 'z' names 'z', which is not a layer"),
    "unknown output": (lambda graph: graph.output("z"), "output 'z' is not a layer"),
    "into an input": (lambda graph: graph.connect("h", "x"), "'h' -> 'x' ends at a layer with the role 'input'"),
    "into a constant": (_into_constant, "'x' -> 'one' ends at a layer with the role 'constant'"),
    "delayed constant": (_late_constant, "reads the constant layer 'one' with delay 2"),
    "identity of other sizes": (
        lambda graph: graph.connect("x", "h", kind="identity"),
        "identity connection 'x' -> 'h' goes from 3 to 4 units",
    ),
    "diagonal of other sizes": (
        lambda graph: graph.connect("x", "h", kind="diagonal", source_range=(0, 2), destination_range=(0, 3)),
        "diagonal connection 'x' -> 'h' goes from 2 to 3 units",
    ),
    "broadcast of many": (
        lambda graph: graph.connect("x", "h", kind="broadcast"),
        "broadcast connection 'x' -> 'h' reads 3 units",
    ),
    "range outside the source": (
        lambda graph: graph.connect("x", "h", source_range=(1, 4)),
        "'x' -> 'h' uses units 1 to 4 of 'x', which has 3",
    ),
    "range outside the destination": (
        lambda graph: graph.connect("x", "h", destination_range=(4, 6)),
        "'x' -> 'h' uses units 4 to 6 of 'h', which has 4",
    ),
    "cycle without delay": (_triangle, "'a' -> 'b' -> 'c' -> 'a' form a cycle without delay"),
    "layer that waits for itself": (
        lambda graph: graph.connect("h", "h", kind="identity"),
        "'h' -> 'h' form a cycle without delay",
    ),
    "layer without input": (lambda graph: graph.layer("alone", 2), "nothing is connected to layer 'alone'"),
    "units without input": (_unfed, "no connection arrives at unit 3 of layer 'part'"),
    "layers that nothing reaches": (_island, "no input or constant leads to: 'p', 'q'"),
    "layer that reaches nothing": (_dead_end, "no output depends on: 'lost'"),
    "input that reaches nothing": (lambda graph: graph.input("y", 2), "no output depends on: 'y'"),
    "initial value that is not read": (
        lambda graph: _initial_for_nothing(graph, initial=1.0),
        "'top' has an initial value",
    ),
    "learned value that is not read": (
        lambda graph: _initial_for_nothing(graph, learn_initial=True),
        "'top' has an initial value",
    ),
}


@pytest.mark.parametrize(("spoil", "problem"), AT_ONCE.values(), ids=AT_ONCE)
def test_what_is_wrong_in_itself_is_refused_at_once(spoil: Callable[[Graph], object], problem: str) -> None:
    graph = _sound()
    with pytest.raises(StrettoError, match=problem):
        spoil(graph)
    assert graph == _sound()


@pytest.mark.parametrize(("spoil", "problem"), WHEN_WHOLE.values(), ids=WHEN_WHOLE)
def test_what_does_not_fit_is_refused_when_the_graph_is_used(spoil: Callable[[Graph], object], problem: str) -> None:
    graph = _sound()
    graph.cell()
    spoil(graph)
    for use in (graph.cell, graph.wiring, graph.to_dict):
        with pytest.raises(StrettoError, match=problem):
            use()


def test_a_graph_needs_an_input_and_an_output() -> None:
    graph = Graph()
    with pytest.raises(StrettoError, match="the graph has no input"):
        graph.cell()
    graph.input("x", 2)
    with pytest.raises(StrettoError, match="the graph has no output"):
        graph.cell()


def _without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda document: document.pop(key)


def _set(*path: str | int, to: object) -> Callable[[dict[str, Any]], object]:
    def change(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = to

    return change


DOCUMENTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no format": (_without("format"), "does not describe a graph: .*'connections', 'layers', 'outputs'"),
    "another format": (_set("format", to="stretto.Graph 2"), "does not describe a graph"),
    "no layers": (_without("layers"), "does not describe a graph"),
    "more than there is": (_set("weights", to=[]), "does not describe a graph"),
    "layers that are no list": (_set("layers", to={"x": 3}), "'layers' of the graph is"),
    "layer that is no mapping": (_set("layers", 0, to="x"), "'x' among the 'layers' of the graph"),
    "layer without a name": (lambda document: document["layers"][0].pop("name"), "among the 'layers'.*name and size"),
    "unknown setting": (_set("layers", 0, "colour", to="red"), "'colour': 'red'.* among the 'layers'"),
    "connection without a source": (
        lambda document: document["connections"][0].pop("source"),
        "among the 'connections'.*destination and source",
    ),
    "role": (_set("layers", 0, "role", to="output"), "layer 'x' got role='output'"),
    "input that computes": (_set("layers", 0, "activation", to="tanh"), "input layer 'x' has an aggregation, an activ"),
    "constant that learns": (
        lambda document: document["layers"][0].update(role="constant", learn_initial=True),
        "constant layer 'x' has 'learn_initial'",
    ),
    "range that is text": (
        _set("connections", 0, "source_range", to="01"),
        "the connection 'x' -> 'h' got source_range=",
    ),
    "output that is no name": (_set("outputs", to=[{}]), "name of an output is {}"),
    "cycle": (_set("connections", 1, "delay", to=0), "'h' -> 'h' form a cycle"),
}


@pytest.mark.parametrize(("spoil", "problem"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents_are_checked(spoil: Callable[[dict[str, Any]], object], problem: str) -> None:
    document = copy.deepcopy(_sound().to_dict())
    assert Graph.from_dict(document) == _sound()
    spoil(document)
    with pytest.raises(StrettoError, match=problem):
        Graph.from_dict(document)


def test_a_document_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(StrettoError, match="does not describe a graph: list"):
        Graph.from_dict([])


@pytest.mark.parametrize(
    ("delays", "problem"),
    [((), r"delays are \(\)"), ((1, 1), r"delays are \(1, 1\)"), ((0, 1), r"delays=\(0, 1\) got delay=0")],
)
def test_delays_are_checked(delays: tuple[int, ...], problem: str) -> None:
    with pytest.raises(StrettoError, match=problem):
        delayed_graph(2, 3, delays=delays)
