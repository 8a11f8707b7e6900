"""Well-known recurrent networks as graphs: examples to start from, and subjects for measurements."""

from collections.abc import Sequence

from stretto.errors import StrettoError
from stretto.graph.network.argument import checked_count
from stretto.graph.network.graph import Graph

SKIPPED_STEPS = 2


def lstm(input_size: int, hidden_size: int) -> Graph:
    """An LSTM as `torch.nn.LSTMCell` computes it, with one bias for each gate; its forget gate starts open."""
    graph = Graph()
    x = graph.input("x", input_size)
    for gate in ("input_gate", "forget_gate", "output_gate"):
        start = 1.0 if gate == "forget_gate" else 0.0
        graph.layer(gate, hidden_size, activation="sigmoid", bias=True, initial_bias=start)
    graph.layer("candidate", hidden_size, activation="tanh", bias=True)
    for layer in ("input_gate", "forget_gate", "candidate", "output_gate"):
        graph.connect(x, layer)
        graph.connect("h", layer, delay=1)
    _product(graph, "written", hidden_size, of=("input_gate", "candidate"))
    _product(graph, "kept", hidden_size, of=("forget_gate",), earlier="c")
    graph.layer("c", hidden_size)
    graph.connect("written", "c", kind="identity")
    graph.connect("kept", "c", kind="identity")
    graph.layer("squashed", hidden_size, activation="tanh")
    graph.connect("c", "squashed", kind="identity")
    _product(graph, "h", hidden_size, of=("output_gate", "squashed"))
    graph.output("h")
    return graph


def peephole_lstm(input_size: int, hidden_size: int) -> Graph:
    """An LSTM whose gates also see the cell, unit by unit: the output gate as it is now, the others as it was."""
    graph = lstm(input_size, hidden_size)
    graph.connect("c", "input_gate", kind="diagonal", delay=1)
    graph.connect("c", "forget_gate", kind="diagonal", delay=1)
    graph.connect("c", "output_gate", kind="diagonal")
    return graph


def gru(input_size: int, hidden_size: int) -> Graph:
    """A GRU as `torch.nn.GRUCell` computes it, which resets after the product with the weights."""
    graph = Graph()
    x = graph.input("x", input_size)
    for gate in ("reset_gate", "update_gate"):
        graph.layer(gate, hidden_size, activation="sigmoid", bias=True)
        graph.connect(x, gate)
        graph.connect("h", gate, delay=1)
    graph.layer("recalled", hidden_size, bias=True)
    graph.connect("h", "recalled", delay=1)
    _product(graph, "reset", hidden_size, of=("reset_gate", "recalled"))
    graph.layer("candidate", hidden_size, activation="tanh", bias=True)
    graph.connect(x, "candidate")
    graph.connect("reset", "candidate", kind="identity")
    graph.layer("renewal", hidden_size, activation="one_minus")
    graph.connect("update_gate", "renewal", kind="identity")
    _product(graph, "written", hidden_size, of=("renewal", "candidate"))
    _product(graph, "kept", hidden_size, of=("update_gate",), earlier="h")
    graph.layer("h", hidden_size)
    graph.connect("written", "h", kind="identity")
    graph.connect("kept", "h", kind="identity")
    graph.output("h")
    return graph


def delayed(input_size: int, hidden_size: int, delays: Sequence[int] = (1, 3)) -> Graph:
    """A simple recurrent layer that reads itself of several steps ago, with weights for each delay.

    Raises:
        StrettoError: If `delays` names none, one below 1 or one twice.
    """
    steps = [checked_count(delay, what=f"one of the delays {tuple(delays)}", least=1) for delay in delays]
    if not steps or len(set(steps)) < len(steps):
        raise StrettoError(f"the delays are {tuple(steps)}", fix="Give one or more, each of them once.")
    graph = Graph()
    x = graph.input("x", input_size)
    h = graph.layer("h", hidden_size, activation="tanh", bias=True)
    graph.connect(x, h)
    for delay in steps:
        graph.connect(h, h, delay=delay)
    graph.output(h)
    return graph


def two_loops(input_size: int, hidden_size: int) -> Graph:
    """Two simple recurrent layers, one upon the other.

    The upper one reads the lower one as it is now and as it was two steps ago, and the input past the lower one.
    """
    graph = Graph()
    x = graph.input("x", input_size)
    for name in ("lower", "upper"):
        graph.layer(name, hidden_size, activation="tanh", bias=True)
        graph.connect(x, name)
        graph.connect(name, name, delay=1)
    graph.connect("lower", "upper")
    graph.connect("lower", "upper", delay=SKIPPED_STEPS)
    graph.output("upper")
    return graph


def _product(graph: Graph, name: str, size: int, *, of: Sequence[str], earlier: str | None = None) -> None:
    """A layer that multiplies those named, unit by unit, and `earlier` as it was a step ago."""
    graph.layer(name, size, aggregation="multiply")
    for factor in of:
        graph.connect(factor, name, kind="identity")
    if earlier is not None:
        graph.connect(earlier, name, kind="identity", delay=1)
