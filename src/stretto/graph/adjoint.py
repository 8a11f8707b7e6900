"""The backward step of a loop: derived by autograd from one step of its body, then split like the step itself.

What leads from the next state's gradient to the state's gradient stays in the backward loop, with the gradients of what
the loop read at each step. The gradients of weights, biases, peepholes and gains are sums over all steps: they are
deferred, and computed once after the loop with the steps laid out as rows. For h' = tanh(p + U h):

    forward loop      h' = tanh(p + U h)                   saved: nothing but the states, h' is one of them
    backward loop     dp = (1 - h'^2) dh';  dh = U^T dp    sequential, from the last step to the first
    deferred          dU = sum over steps of  dp h^T       one product of matrices over all rows and steps

Forward values that the backward step reads are saved or computed again, whichever is cheaper: a minimum cut between the
results of expensive operators and what the backward pass reads. Every path must be cut at a value, which is then saved,
and saving a value costs its size. If the backward pass reads both s = sigmoid(a) and q = 1 - s, each of H elements,

    expensive ==> [ s: H ] ==+==> [ q: H ] ==> backward
                             |                    ^
                             +====================+

cutting at s stops both paths for H; s is saved and q computed again from it. Cutting behind q would cost 2 H.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import networkx as nx
import torch

from stretto.graph.analyse import Loop
from stretto.graph.custom_gradient import CustomGradient
from stretto.graph.node import Node, concrete_shape, evaluate, needed_for
from stretto.graph.operators import DECOMPOSED, EXPENSIVE, is_view, uses_number_of_rows, why_mixed, why_not_rowwise
from stretto.graph.rows import rows_first
from stretto.graph.trace import FunctionMode, StepGraph, Untraceable, record


class Kind(str, Enum):
    """The kind of an input to a loop's body."""

    STATE = "state"
    PER_STEP = "per_step"
    WEIGHT = "weight"
    CONSTANT = "constant"


@dataclass(eq=False, slots=True)
class Port:
    """An input of the body: which node of the step it stands for, and its gradient, if any."""

    kind: Kind
    source: Node
    node: Node
    gradient: Node | None


@dataclass(eq=False, slots=True)
class Body:
    """A loop's step, forward and backward, in one graph. Lists follow the order of the loop's states and outputs."""

    ports: list[Port]  # inputs: states, values of the step, weights, parts of the state that never change
    next_states: list[Node]
    outputs: list[Node]  # values that are read outside the loop
    state_gradients: list[Node]  # inputs of the backward step: the gradient of each next state
    output_gradients: list[Node]  # inputs of the backward step: the gradient of each output
    forward: list[Node] = field(default_factory=list)  # operators of the forward step
    backward: list[Node] = field(default_factory=list)  # operators of the backward step that stay in the loop
    deferred: list[Node] = field(default_factory=list)  # operators that run once after the backward loop
    saved: list[Node] = field(default_factory=list)  # stored for the backward pass, which computes all else again
    to_deferred: list[Node] = field(default_factory=list)  # values of the backward loop that deferred operators read

    shown: tuple[str, int] | None = None
    """Which of the next states ("after") or outputs ("output") is the step's output, if it is one of them."""

    under_autograd: "Body | None" = (
        None  # the step as it was called, where some of its operators have their own gradient
    )

    _by_kind: dict[Kind, list[Port]] = field(default_factory=dict, repr=False)

    def ports_of(self, kind: Kind) -> list[Port]:
        """The inputs of one kind."""
        if not self._by_kind:
            self._by_kind = {each: [port for port in self.ports if port.kind is each] for each in Kind}
        return self._by_kind[kind]

    def nodes_of(self, kind: Kind) -> list[Node]:
        """The nodes of the inputs of one kind."""
        return [port.node for port in self.ports_of(kind)]


def derive(graph: StepGraph, loop: Loop) -> Body:
    """The body of a loop of the step `graph`, with its backward step.

    Raises:
        Untraceable: The body cannot be differentiated as a fixed graph.
    """
    sources = [(Kind.STATE, graph.states[index]) for index in loop.states]
    sources += [(Kind.PER_STEP, node) for node in loop.per_step]
    sources += [(Kind.WEIGHT, node) for node in loop.weights]
    sources += [(Kind.CONSTANT, node) for node in loop.constants]
    # Zero is a valid index into every table, but not a valid divisor of integers: then ones are tried.
    for fill in (0, 1):
        run = partial(_run_both_ways, graph, loop, [node for _, node in sources], fill=fill)
        try:
            recording, found = record(run)
            break
        except RuntimeError as error:
            if fill or "ZeroDivisionError" not in str(error):
                raise Untraceable(f"the loop could not be differentiated: {error}") from error
    ports = [
        Port(kind, source, node, gradient)
        for (kind, source), node, gradient in zip(sources, found["inputs"], found["gradients"], strict=True)
    ]
    count = len(loop.states)
    body = Body(
        ports=ports,
        next_states=found["outputs"][:count],
        outputs=found["outputs"][count:],
        state_gradients=found["cotangents"][:count],
        output_gradients=found["cotangents"][count:],
    )
    made = [*(graph.next_states[index] for index in loop.states), *loop.outputs]
    if graph.y in made:
        at = made.index(graph.y)
        body.shown = ("after", at) if at < count else ("output", at - count)
    if any(isinstance(node.op, CustomGradient) for node in loop.nodes):
        # What was recorded here has their forwards operator by operator: autograd would differentiate those.
        body.under_autograd = Body(
            ports=[Port(kind, source, source, None) for kind, source in sources],
            next_states=[graph.next_states[index] for index in loop.states],
            outputs=list(loop.outputs),
            state_gradients=[],
            output_gradients=[],
            forward=list(loop.nodes),
        )
    nodes = rows_first(recording.nodes)
    try:
        return _partition(nodes, body)
    except Untraceable:
        # Name an operator that the user wrote, if one of those is the cause, and not one of its gradient.
        for node in loop.nodes:
            if reason := why_mixed(node):
                raise Untraceable(reason) from None
        raise


def _run_both_ways(
    graph: StepGraph, loop: Loop, sources: list[Node], recorder: Any, rows: int, *, fill: int
) -> dict[str, Any]:
    """Run the loop's step and its gradient; the nodes of its inputs and outputs, and of the gradients of both."""
    outputs = [*(graph.next_states[index] for index in loop.states), *loop.outputs]
    device = next((tensor.device for tensor in graph.constants.values()), torch.device("cpu"))

    def example(node: Node) -> torch.Tensor:
        return torch.full(concrete_shape(node.shape, rows), fill, dtype=node.dtype, device=device)

    inputs = [example(source) for source in sources]
    cotangents = [example(node) for node in outputs]
    found: dict[str, Any] = {
        "inputs": [recorder.enter(t, s.name) for t, s in zip(inputs, sources, strict=True)],
        "cotangents": [recorder.enter(t, f"d_{n.name}") for t, n in zip(cotangents, outputs, strict=True)],
    }
    for tensor in inputs:
        tensor.requires_grad_(tensor.is_floating_point())
    with recorder, FunctionMode():
        values = dict(zip(sources, inputs, strict=True))
        values.update((node, tensor) for node, tensor in graph.constants.items() if node not in values)
        for node in loop.nodes:
            recorder.line = node.line
            values[node] = evaluate(node, values, rows, op=DECOMPOSED.get(node.label))
        recorder.line = None
        made = [values[node] for node in outputs]
        found["outputs"] = [recorder.look_up(tensor) for tensor in made]
        linked = [(t, d) for t, d in zip(made, cotangents, strict=True) if t.requires_grad]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        gradients = iter(_gradients([t for t, _ in linked], wanted, [d for _, d in linked]))
        # `look_up` leaves None as it is.
        found["gradients"] = [recorder.look_up(next(gradients)) if t.requires_grad else None for t in inputs]
    return found


def _gradients(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], cotangents: list[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    if not outputs or not inputs:
        return [None] * len(inputs)
    try:
        from torch.autograd.graph import _engine_run_backward
    except ImportError:
        return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    # What `torch.autograd.grad` calls in the end. Given cotangents, that one first imports sympy.
    given = (tuple(outputs), tuple(cotangents), False, False, tuple(inputs))
    found: Sequence[torch.Tensor | None] = _engine_run_backward(*given, allow_unreachable=True, accumulate_grad=False)
    return found


def _partition(nodes: list[Node], body: Body) -> Body:
    """Sort the operators of both directions into those that stay in a loop and those that are deferred."""
    outputs = [*body.next_states, *body.outputs]
    # Late is whatever depends on a gradient; all else is forward work.
    late = set(body.state_gradients + body.output_gradients)
    for node in nodes:
        if node.op is not None and any(item in late for item in node.inputs):
            late.add(node)
    # Gradients of states and of values per step are needed at every step. Those of weights are sums: what only they
    # need is deferred.
    in_loop = needed_for([p.gradient for p in body.ports if p.kind is not Kind.WEIGHT and p.gradient is not None])
    sums = [port.gradient for port in body.ports if port.kind is Kind.WEIGHT and port.gradient is not None]
    deferred = {node for node in needed_for(sums) - in_loop if node in late and node.op is not None}
    for node in in_loop:
        if node.op is not None and node in late and (reason := why_not_rowwise(node)):
            raise Untraceable(reason)
    for node in deferred:
        if reason := _why_not_a_sum(node):
            raise Untraceable(reason)
    for node in nodes:
        if node in late and uses_number_of_rows(node):
            raise Untraceable(f"the gradient is computed with {node.label}, which uses the number of rows")
    # Inputs, states and outputs are stored anyway, so the backward pass reads them for free.
    free = {port.node for port in body.ports} | set(outputs)
    read = {item for node in nodes if node in late and (node in in_loop or node in deferred) for item in node.inputs}
    wanted = {node for node in read if node not in late and node not in free and node.dtype is not None}
    forward = [node for node in nodes if node not in late and node.op is not None]
    body.saved = _choose_saved(forward, wanted, free)
    # With what is saved, either part of the backward pass computes the rest of the forward values it reads again.
    early = needed_for([*outputs, *body.saved])
    available = free | set(body.saved)
    again = _recompute(in_loop, late, available)
    again_deferred = _recompute(deferred, late, available)
    to_deferred = {item for node in deferred for item in node.inputs if item in late and item not in deferred}
    to_deferred |= {gradient for gradient in sums if gradient in late and gradient not in deferred}
    operators = [node for node in nodes if node.op is not None]
    body.forward = [node for node in operators if node in early]
    body.backward = [node for node in operators if node in again or (node in in_loop and node in late)]
    body.deferred = [node for node in operators if node in again_deferred or node in deferred]
    body.to_deferred = [node for node in nodes if node in to_deferred]
    return body


_SAME_ELEMENTS = frozenset("t transpose permute getitem detach alias clone unsqueeze squeeze".split())


def _why_not_a_sum(node: Node) -> str | None:
    """None if running the operator over the rows of all steps gives the sum, or the rows, of running it for each step.

    After the first sum over rows everything is linear: a gradient is linear in the gradients it is computed from.
    """
    if why_not_rowwise(node) is None or node.label in _SAME_ELEMENTS:
        return None
    if node.label == "convolution_backward" and list(node.args[-1]) == [False, True, False]:
        return None
    if node.label in {"mm", "sum", "gradient_of_heads", "embedding_dense_backward"} and not node.has_rows:
        return None
    return f"the gradient of a weight is computed with {node.label}, which is not known to be a sum over rows"


def _recompute(wanted: set[Node], late: set[Node], available: set[Node]) -> set[Node]:
    """Forward values that `wanted` reads and that have to be computed again from what is available."""
    reads = [item for node in wanted if node in late for item in node.inputs if item not in late]
    found = needed_for(reads, stop=available)
    return {node for node in found if node not in available and node.op is not None}


def _choose_saved(forward: list[Node], wanted: set[Node], free: set[Node]) -> list[Node]:
    """The smallest set of forward values from which the backward pass can get all it needs without expensive work.

    A minimum cut; see the drawing at the top of this file. Each value is an edge from its "in" to its "out", of the
    capacity it would take to save it. An expensive operator is fed by the source, and what it reads does not matter.
    """
    network = nx.DiGraph()
    network.add_nodes_from(["expensive", "backward"])
    for node in forward:
        if node in free:
            continue
        fits = node.dtype is not None and node.has_rows
        # Of two values of the same size, save the one that is not a view of the other.
        capacity = {"capacity": node.row_size + 0.01 * is_view(node)} if fits else {}
        network.add_edge((node, "in"), (node, "out"), **capacity)
        if node.label in EXPENSIVE:
            network.add_edge("expensive", (node, "in"))
        if node in wanted:
            network.add_edge((node, "out"), "backward")
        for item in node.inputs:
            if item not in free and item.op is not None and node.label not in EXPENSIVE:
                network.add_edge((item, "out"), (node, "in"))
    if not wanted or not nx.has_path(network, "expensive", "backward"):
        return []
    _, (near, _) = nx.minimum_cut(network, "expensive", "backward")
    cut = {node for node in forward if (node, "in") in near and (node, "out") not in near and node not in free}
    return [node for node in forward if node in cut]
