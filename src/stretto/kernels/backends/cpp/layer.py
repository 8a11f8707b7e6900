"""A loop that is fed by linear maps of the input, as one operator of autograd: the shape of LSTM, GRU and most cells.

    forward     feeds: x W' + b of all steps -----> the loop -----> y, final states
    backward    the loop, from the last step on --> gradients of feeds --> of x, W and b
                                                `-> gradients of the loop's own weights

Any program runs part by part (`program.py`, `autograd.py`). For short sequences and small layers the parts cost more
than the arithmetic: an operator of autograd each, and many pieces of memory. Here one operator does all of it by one
call of compiled code (`layer.h`), what it keeps for the backward pass is one piece of memory, and what is to be done,
and where everything lies, is written down once for each size of batch:

    _Pass    code of each layer: operations | loop | operations;  an address is (index of a tensor, offset)
    call     tensors of each layer: work, room, kept, y, layout, x, states, parameters, then what this pass makes

Shape legend: B sequences, P rows of all steps together, F features of the input, K and N features in and out of a map.
"""

import functools
import math
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch

from stretto.graph import Kind, Node, Plan
from stretto.kernels.backends.base import LayerCall, LayerOperator, Program, Shown
from stretto.kernels.backends.cpp.batched import (
    find_library,
    product_memory,
    threads_for,
    weight_gradient_memory,
)
from stretto.kernels.backends.cpp.kernel import CppKernel, aligned, pieces_of, share_out, work_memory
from stretto.kernels.backends.eager import EagerKernel
from stretto.kernels.backward import differentiate_by_torch, is_transformed, wants_weights
from stretto.kernels.batched_ops import is_column_sum
from stretto.kernels.buffer_pool import empty
from stretto.kernels.layout import Layout
from stretto.kernels.lower import Way

MAX_PASSES: Final = 64
"""Sizes of batches that are remembered for each layer."""
OFFSET_BITS: Final = 40
"""As in `layer.h`."""
NOWHERE: Final = -1
PRODUCT, WEIGHT_GRADIENT, COLUMN_SUMS, COPY, ADD, SPREAD = range(6)
WORK, ROOM, KEPT, Y, ROWS, STARTS, LENGTHS, BOUNDS, ZEROS, X = range(10)
"""Tensors of a call, in order; states and parameters come after the input. All that one operation needs is its room."""
Role: TypeAlias = tuple[str, int]
"""What a buffer of generated code is for, and which of those it is; see `ir.py`."""
Stored: TypeAlias = tuple[int, bool]
"""The position of a parameter, and whether its transpose is meant."""


class _CannotFuseError(Exception):
    """The program is not a loop fed by linear maps."""


@final
class _Feed(NamedTuple):
    weight: Stored
    bias: int | None


@final
class _WeightGradient(NamedTuple):
    """The gradient of a weight of the loop: the sum of the rows `d`, or `rows` transposed times `d`."""

    weight: Stored
    d: Role
    rows: Role | None


@final
@dataclass(slots=True)
class _LayerPass:
    """One layer in a pass over batches of one size.

    Attributes:
        code: What is to be done, as `layer.h` reads it.
        pieces: Of rows, which threads take.
        work: Elements of memory for values of all steps.
        room: Elements of memory behind them that one operation or the loop needs.
        kept: Elements of memory for values that the backward pass reads.
        gradients: Which inputs get one, and its shape.
        shifted: States that are needed as they were before each step, in memory of their own.
    """

    code: "array[int]"
    pieces: int
    work: int
    room: int
    kept: int
    gradients: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    shifted: Collection[int] = ()


@final
@dataclass(slots=True)
class _Pass:
    """A pass over layers at once, with so many threads for the loops; `codes` has where the code of each lies."""

    layers: list[_LayerPass]
    threads: int
    codes: "array[int]"


@final
class FusedLayer(LayerOperator):
    """A plan with a single loop, and the loop's kernel."""

    def __init__(self, plan: Plan, kernel: CppKernel) -> None:
        graph, body, (loop,) = plan.graph, kernel.body, plan.all_loops
        results = [*(graph.next_states[index] for index in loop.states), *loop.outputs]
        values = (graph.x, *graph.states, *results, *body.saved)
        _require(not plan.constants_per_row and loop.states == list(range(len(graph.states))))
        _require({node for level in plan.maps for node in level} == set(loop.per_step) and not plan.per_row)
        _require(graph.y in results and len(graph.x.row_shape) == 1)
        _require(all(node.dtype is kernel.dtype for node in values))
        self.kernel, self.num_states = kernel, len(graph.states)
        self.names = list(graph.parameters)
        self._positions = {node: index for index, node in enumerate(graph.parameters.values())}
        self.feeds = [self._feed(node, graph.x) for node in loop.per_step]
        at = results.index(graph.y)
        self.y_role = ("after", at) if at < self.num_states else ("output", at - self.num_states)
        self.num_features, self.y_shape = graph.x.row_shape[0], graph.y.row_shape
        self.state_shapes = [node.row_shape for node in graph.states]
        sources = {port.node: port.source for port in body.ports_of(Kind.WEIGHT)}
        self.buffers: dict[Way, list[tuple[Role, int]]] = {}
        self.vectors: dict[Way, list[int]] = {}
        self.matrices: dict[Way, list[Stored]] = {}
        for way, function in kernel.functions.items():
            self.buffers[way] = [((role, index), size) for role, index, size in function.own_buffers]
            self.vectors[way] = [self._stored(node, sources)[0] for node in function.ir.uniforms]
            _require(all(weight.heads == 1 for weight in function.ir.weights.values()))
            self.matrices[way] = [self._stored(node, sources) for node in function.ir.weights]
        roles = _roles(kernel)
        self.weight_gradients = [
            _gradient(self._stored(port.source, {}), port.gradient, roles)
            for port in body.ports_of(Kind.WEIGHT)
            if port.gradient is not None
        ]
        read = {item.rows for item in self.weight_gradients}
        read |= kernel.functions["backward"].reads
        before = ("before", at) if at < self.num_states else self.y_role
        self.reads_y = not read.isdisjoint({self.y_role, before})
        """Whether the backward pass reads the output: it is kept then, and a user gets another one."""
        self.keeps_feeds = any(role is not None and role[0] == "per_step" for role in read)
        kept = {"after": body.next_states, "output": body.outputs, "saved": body.saved}
        if self.keeps_feeds:
            kept["per_step"] = body.nodes_of(Kind.PER_STEP)
        sizes = {(role, index): node.row_size for role, nodes in kept.items() for index, node in enumerate(nodes)}
        self.kept_sizes = {role: size for role, size in sizes.items() if role != self.y_role or self.reads_y}
        """Elements per row of the values that are made forward and read backward."""
        self.num_inputs = 1 + self.num_states + len(self.names)
        read_backward = {*self.vectors["backward"], *(weight[0] for weight, _ in self.feeds)}
        read_backward |= {position for position, _ in self.matrices["backward"]}
        biases = {bias for _, bias in self.feeds if bias is not None}
        self.unread_inputs = [1 + self.num_states + position for position in sorted(biases - read_backward)]
        """Inputs that the backward pass does not read, which a user may change before it."""
        self.read_inputs = [index for index in range(self.num_inputs) if index not in self.unread_inputs]
        self.zeros_address = kernel.zeros.data_ptr()
        library = find_library(kernel.dtype)
        _require(library is not None)
        self.run: Callable[[int, int, int, int], None] = getattr(library, "stretto_layers")  # noqa: B009
        self.passes: dict[Any, _Pass] = {}

    @staticmethod
    def of(plan: Plan, kernels: Sequence[CppKernel]) -> "FusedLayer | None":
        """The operator, if the program has this shape."""
        if len(kernels) != 1:
            return None
        try:
            return FusedLayer(plan, kernels[0])
        except _CannotFuseError:
            return None

    def _feed(self, node: Node, x: Node) -> _Feed:
        _require(node.label in {"mm", "addmm"} and not node.kwargs and node.args[-2] is x)
        has_bias = node.label == "addmm"
        _require(not has_bias or node.args[0].shape == node.shape[-1:])
        return _Feed(self._stored(node.args[-1], {}), self._stored(node.args[0], {})[0] if has_bias else None)

    def _stored(self, node: Node, sources: dict[Node, Node]) -> Stored:
        """The parameter that a value is, or is the transpose of. Values of a body have a source outside of it."""
        transposed = False
        while node not in self._positions:
            if node in sources:
                node = sources[node]
                continue
            _require(node.label in {"t", "detach"})
            transposed ^= node.label == "t"
            node = node.args[0]
        return self._positions[node], transposed

    def fits(self, call: LayerCall) -> bool:
        """Whether these tensors can be read as they are."""
        x_PF, dtype = call.x_PF, self.kernel.dtype
        if x_PF.shape[1:] != (self.num_features,) or x_PF.stride(1) != 1 or call.layout.total == 0:
            return False
        for tensor in (x_PF, *call.states, *[call.parameters[name] for name in self.names]):
            if tensor.dtype is not dtype or not tensor.is_cpu or (tensor.dim() != 2 and not tensor.is_contiguous()):
                return False
        return True

    @classmethod
    def run_all(cls, calls: Sequence[LayerCall]) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Run layers that do not depend on each other, their loops at once."""
        tensors: list[torch.Tensor] = []
        for call in calls:
            tensors += [call.x_PF, *[state.contiguous() for state in call.states]]
            tensors += [call.parameters[name] for name in _layer_of(call).names]
        if not torch.is_grad_enabled():
            layers, layouts = [_layer_of(call) for call in calls], [call.layout for call in calls]
            found = _run_forward(_batches(layers, layouts, [call.shown for call in calls], tensors), keep=False)
            return [(results[0], results[1:]) for results, _ in found]
        made = _FusedLayers.apply(calls, *tensors)  # type: ignore[no-untyped-call]
        if len(calls) == 1:
            return [(made[0], list(made[1:]))]
        rest = iter(made)
        return [(next(rest), [next(rest) for _ in call.states]) for call in calls]

    def keeps_y(self, shown: Shown) -> bool:
        """Whether the output is kept besides the one that is given back."""
        return self.reads_y and shown != ""

    def kept_places(self, total: int, num_rows: int, shown: Shown, *, keep: bool) -> tuple[dict[Role, int], int]:
        """Where the values lie that are made forward and read backward, in elements, and how many there are."""
        places: dict[Role, int] = {}
        end = 0
        for (role, index), size in self.kept_sizes.items():
            if (role, index) == self.y_role and not (keep and self.keeps_y(shown)):
                continue
            places[role, index] = end
            # What nothing will read again gets one row for each sequence.
            end += aligned((total if keep or role != "saved" else num_rows) * size)
        for index in self.kernel.copied_states if keep else []:
            places["copied", index] = end
            end += aligned(num_rows * math.prod(self.state_shapes[index]))
        return places, end

    def kept_shapes(self, total: int, num_rows: int) -> list[tuple[int, ...]]:
        """One piece of memory."""
        return [(self.kept_places(total, num_rows, "rows", keep=True)[1],)]

    @classmethod
    def run_forward(
        cls, operators: Sequence["FusedLayer"], layout: Layout, tensors: Sequence[torch.Tensor], *, keep: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """All loops at once."""
        count = len(operators)
        made = _run_forward(_batches(operators, [layout] * count, ["rows"] * count, tensors), keep=keep)
        for layer, (_, kept) in zip(operators, made, strict=True):
            places = {} if kept is None else layer.kept_places(layout.total, layout.num_rows, "rows", keep=True)[0]
            for role, start in places.items():
                if role[0] == "copied":
                    end = start + layout.num_rows * math.prod(layer.state_shapes[role[1]])
                else:
                    end = start + layout.total * layer.kept_sizes[role]
                kept[end : aligned(end)] = 0.0  # type: ignore[index] # what lies between values is a result, too
        return [t for results, _ in made for t in results], [kept for _, kept in made if kept is not None]

    @classmethod
    def run_backward(
        cls,
        operators: Sequence["FusedLayer"],
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor | None],
        *,
        needed: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """All loops at once."""
        count = len(operators)
        batches = _batches(operators, [layout] * count, ["rows"] * count, tensors)
        return _run_backward(batches, [(own, own) for own in kept], cotangents, needed)


def _require(holds: bool) -> None:
    if not holds:
        raise _CannotFuseError


def _roles(kernel: CppKernel) -> dict[Node, Role]:
    """The buffers of the values that a gradient may be computed from."""
    body = kernel.body
    lists = {"saved": body.saved, "output": body.outputs, "after": body.next_states, "to_deferred": body.to_deferred}
    roles: dict[Node, Role] = {node: (role, index) for role, nodes in lists.items() for index, node in enumerate(nodes)}
    for index, port in enumerate(body.ports_of(Kind.PER_STEP)):
        roles[port.node] = ("per_step", index)
        if port.gradient is not None:
            roles[port.gradient] = ("d_per_step", index)
    return roles | {port.node: ("before", index) for index, port in enumerate(body.ports_of(Kind.STATE))}


def _gradient(weight: Stored, node: Node, roles: dict[Node, Role]) -> _WeightGradient:
    def value(node: Node) -> Node:
        while node not in roles and node.label in {"detach", "view"}:
            node = node.args[0]
        return node

    def row_role(node: Node) -> Role:
        node = value(node)
        _require(node in roles and len(node.row_shape) == 1)
        return roles[node]

    node = value(node)
    if is_column_sum(node):
        return _WeightGradient(weight, row_role(node.args[0]), rows=None)
    _require(node.label == "mm" and not node.kwargs and node.args[0].label == "t" and node.args[0].args[0].has_rows)
    rows, d = row_role(node.args[0].args[0]), row_role(node.args[1])
    _require(d[0] in {"d_per_step", "to_deferred"})
    return _WeightGradient(weight, d, rows)


def _layer_of(call: LayerCall) -> FusedLayer:
    assert isinstance(call.program.operator, FusedLayer)
    return call.program.operator


@final
class _Batch:
    """What one layer reads in a pass."""

    __slots__ = ("layer", "layout", "parameters", "shown", "states", "tensors", "x_PF")

    def __init__(self, layer: FusedLayer, layout: Layout, shown: Shown, tensors: Sequence[torch.Tensor]) -> None:
        self.layer, self.layout, self.shown, self.tensors, self.x_PF = layer, layout, shown, tensors, tensors[0]
        self.states = tensors[1 : 1 + layer.num_states]
        self.parameters = tensors[1 + layer.num_states :]

    @property
    def key(self) -> tuple[Any, ...]:
        """What the code depends on."""
        return self.layer, self.layout.sizes, self.shown != "", *[tensor.stride() for tensor in self.tensors]

    def addresses(
        self, own: _LayerPass, work: torch.Tensor, kept: torch.Tensor | None, y: torch.Tensor, further: Sequence[Any]
    ) -> "array[int]":
        """Where the tensors of a call lie."""
        layout, start = self.layout, work.data_ptr()
        return array(
            "q",
            [
                *(start, start + own.work * work.element_size(), 0 if kept is None else kept.data_ptr(), y.data_ptr()),
                *layout.addresses,
                layout.bounds(own.pieces or 1).buffer_info()[0],
                self.layer.zeros_address,
                *[tensor.data_ptr() for tensor in self.tensors],
                *[0 if tensor is None else tensor.data_ptr() for tensor in further],
            ],
        )


def _batches(
    layers: Sequence[FusedLayer], layouts: Sequence[Layout], shown: Sequence[Shown], tensors: Sequence[torch.Tensor]
) -> list[_Batch]:
    if len(layers) == 1:
        return [_Batch(layers[0], layouts[0], shown[0], tensors)]
    batches, first = [], 0
    for layer, layout, how in zip(layers, layouts, shown, strict=True):
        last = first + layer.num_inputs
        batches.append(_Batch(layer, layout, how, tensors[first:last]))
        first = last
    return batches


class _Writer:
    """Writes the code of one layer."""

    def __init__(self, batch: _Batch, way: Way, *, keep: bool) -> None:
        self.layer, self.layout, self.way, self.keep = batch.layer, batch.layout, way, keep
        self.tensors, self.each = batch.tensors, batch.layer.kernel.dtype.itemsize
        self.parts: list[list[list[int]]] = [[], []]
        """Operations before and after the loop."""
        self.loop: list[int] = []
        self.work = self.room = self.held = 0
        layout, layer = self.layout, self.layer
        places, self.kept = layer.kept_places(layout.total, layout.num_rows, batch.shown, keep=keep)
        start = self.at(KEPT) if keep else self.reserve(self.kept)
        self.places = {role: start + place * self.each for role, place in places.items()}
        self.places["shown", 0] = self.at(Y)
        self.places.setdefault(layer.y_role, self.at(Y))
        self.first_parameter, self.own_tensors = X + 1 + layer.num_states, X + layer.num_inputs
        for index in range(layer.num_states):
            self.places["initial", index] = self.at(X + 1 + index)
            self.places["before", index] = self.places["after", index]

    def at(self, tensor: int, offset: int = 0) -> int:
        """An address, `offset` elements from the start of a tensor."""
        return (tensor << OFFSET_BITS) + offset * self.each

    def reserve(self, size: int) -> int:
        """Memory for so many elements until the end of the pass."""
        self.work += aligned(size)
        return self.at(WORK, self.work - aligned(size))

    def make_room(self, size: int) -> int:
        """Memory for one operation, behind what is held for the next one."""
        self.room = max(self.room, self.held + aligned(size))
        return self.at(ROOM, self.held)

    def add(self, *words: int, after: bool = False) -> None:
        """An operation."""
        self.parts[after].append(list(words))

    def matrix(self, stored: Stored) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Where a parameter lies, its shape and strides, as the map or loop reads it."""
        position, transposed = stored
        tensor, turn = self.tensors[1 + self.layer.num_states + position], -1 if transposed else 1
        return self.at(self.first_parameter + position), tuple(tensor.shape)[::turn], tensor.stride()[::turn]

    def add_product(
        self, x: int, stride: int, weight: Sequence[Any], bias: int, y: int, *, transposed: bool = False
    ) -> None:
        """`y` = `x` times a matrix or its transpose, plus `bias`."""
        place, shape, strides = weight
        (inner, columns), turn = shape[:: -1 if transposed else 1], -1 if transposed else 1
        rows = self.layout.total
        if columns:
            threads = threads_for(rows * inner * columns)
            memory = self.make_room(product_memory(inner, columns, threads))
            words = (x, stride, place, *strides[::turn], bias, y, rows, inner, columns, memory, threads)
            self.add(PRODUCT, *words, after=self.way == "backward")

    def add_loop(self, *, pieces: int, team: int) -> None:
        """The loop; a buffer that lies nowhere is read as zeros, or not at all."""
        layer, layout, way = self.layer, self.layout, self.way
        kernel, function, buffers = layer.kernel, layer.kernel.functions[way], layer.buffers[way]
        places, end = work_memory(function, layout.num_rows, team)
        self.make_room(end)
        matrices = [self.matrix(stored) for stored in layer.matrices[way]]
        weight_strides = [stride for _, _, strides in matrices for stride in strides]
        vectors = [self.at(self.first_parameter + position) for position in layer.vectors[way]]
        self.loop = [
            *(kernel.addresses[f"{way}_pack"], kernel.addresses[f"{way}_work"], pieces, self.at(BOUNDS)),
            *(layout.num_steps, layout.num_rows, int(self.keep), self.at(ROWS), self.at(STARTS), self.at(LENGTHS)),
            *(self.at(ROOM, place) for place in places),
            *(len(buffers), len(weight_strides)),
            *(size if role in self.places else 0 for role, size in buffers),
            *weight_strides,
            *(len(buffers) + len(vectors), len(matrices)),
            *(self.places.get(role, self.at(ZEROS)) for role, _ in buffers),
            *(*vectors, *(place for place, _, _ in matrices)),
        ]

    def finish(self, pieces: int) -> _LayerPass:
        """All of it."""
        before, after = ([len(part), *(word for words in part for word in words)] for part in self.parts)
        code = array("q", [*before, *self.loop, *after])
        return _LayerPass(code, pieces, self.work, self.room, self.kept)


def _write_forward(batch: _Batch, *, keep: bool, pieces: int, team: int) -> _LayerPass:
    writer, layer = _Writer(batch, "forward", keep=keep), batch.layer
    for index, (weight, bias) in enumerate(layer.feeds):
        matrix = writer.matrix(weight)
        if not layer.keeps_feeds:
            writer.places["per_step", index] = writer.reserve(batch.layout.total * matrix[1][1])
        bias_place = NOWHERE if bias is None else writer.at(writer.first_parameter + bias)
        x = (writer.at(X), batch.x_PF.stride(0))
        writer.add_product(*x, matrix, bias_place, writer.places["per_step", index])
    for index in range(layer.num_states):
        writer.places["final", index] = writer.at(writer.own_tensors + index)
    for index in layer.kernel.copied_states if keep else []:
        elements = batch.states[index].numel()
        if elements:
            copied = (writer.places["initial", index], writer.places["copied", index])
            writer.add(COPY, *copied, 1, elements, threads_for(elements))
    writer.add_loop(pieces=pieces, team=team)
    return writer.finish(pieces)


@final
class _BackwardWriter(_Writer):
    """Writes a backward pass: the loop, and what the gradients of all inputs are computed with from what it leaves."""

    def __init__(self, batch: _Batch, given: Sequence[bool], needed: Sequence[bool], *, weights: bool) -> None:
        """`given`: results that have a gradient. `needed`: inputs that need one, with parameters only if `weights`."""
        super().__init__(batch, "backward", keep=True)
        self.batch = batch
        first = 1 + self.layer.num_states
        self.needed = [need and (weights or index < first) for index, need in enumerate(needed)]
        # The tensors of this pass: gradients of y and final states, states before each step, gradients that are made.
        self.first_shifted = self.own_tensors + first
        self.first_gradient = self.first_shifted + self.layer.num_states
        for index in self.layer.kernel.copied_states:
            self.places["initial", index] = self.places["copied", index]
        self.gradients: dict[int, tuple[int, ...]] = {}
        self.shifted: set[int] = set()
        self.sums: dict[int, int] = {}
        if given[0]:
            self.places[f"d_{self.layer.y_role[0]}", self.layer.y_role[1]] = self.at(self.own_tensors)
        for index, state in enumerate(batch.states):
            self._add_carry(index, state, given=given[1 + index])
        body, total, by_node = self.layer.kernel.body, self.layout.total, dict[Node, int]()
        for index, port in enumerate(body.ports_of(Kind.PER_STEP)):
            if port.gradient is not None:
                place = self.places["d_per_step", index] = self.reserve(total * port.node.row_size)
                by_node[port.gradient] = place
        for index, node in enumerate(body.to_deferred):
            found = by_node.get(node)
            self.places["to_deferred", index] = self.reserve(total * node.row_size) if found is None else found

    def _add_carry(self, index: int, state: torch.Tensor, *, given: bool) -> None:
        # Two, since a step reads one and writes the other. A sequence joins at its last step, whichever is read there:
        # both start as its final gradient.
        if self.needed[1 + index]:
            carry = self.at(self.first_gradient + len(self.gradients))
            self.gradients[1 + index] = (2, *state.shape)
        else:
            carry = self.reserve(2 * state.numel())
        last = self.at(self.own_tensors + 1 + index) if given else NOWHERE
        self.add(SPREAD, last, carry, state.numel())
        self.places["carry_in", index] = self.places["carry_out", index] = carry

    def _wants(self, position: int | None) -> bool:
        return position is not None and self.needed[1 + self.layer.num_states + position]

    def _add_gradient(self, index: int, size: Sequence[int], write: Callable[[int], None], *, transposed: bool) -> None:
        """Let `write` make a gradient where it belongs, or in passing if it is to be transposed or added to another."""
        is_first, elements = index not in self.gradients, math.prod(size)
        self.gradients.setdefault(index, tuple(self.batch.tensors[index].shape))
        target = self.at(self.first_gradient + list(self.gradients).index(index))
        if elements == 0:
            return
        if is_first and not transposed:
            write(target)
            return
        source = self.make_room(elements)
        self.held = aligned(elements)
        write(source)
        self.held = 0
        shape = size if transposed else (1, elements)
        self.add(COPY if is_first else ADD, source, target, *shape, threads_for(elements), after=True)
        for d in [d for d, place in self.sums.items() if place in {target, source}]:
            del self.sums[d]

    def _add_matrix(self, weight: Stored, x: int, stride: int, d: int, head: Sequence[int] = (NOWHERE, 0, 0)) -> None:
        total, (inner, columns) = self.layout.total, self.matrix(weight)[1]

        def write(out: int) -> None:
            threads = threads_for(total * inner * columns)
            memory = self.make_room(weight_gradient_memory(inner, columns, threads))
            sizes = (total, inner, columns, memory, threads)
            self.add(WEIGHT_GRADIENT, *head, x, stride, d, columns, out, *sizes, after=True)

        self._add_gradient(1 + self.layer.num_states + weight[0], (inner, columns), write, transposed=weight[1])

    def _add_sum(self, position: int, d: int) -> None:
        total, columns = self.layout.total, self.batch.parameters[position].numel()

        def write(out: int) -> None:
            # The biases of a map and of a loop often get the same gradient.
            if d in self.sums:
                self.add(COPY, self.sums[d], out, 1, columns, 1, after=True)
            else:
                self.add(COLUMN_SUMS, d, out, total, columns, threads_for(total * columns), after=True)
                self.sums[d] = out

        self._add_gradient(1 + self.layer.num_states + position, (columns,), write, transposed=False)

    def add_feeds(self) -> None:
        """Gradients of the input, and of the maps' parameters."""
        x_PF = self.batch.x_PF
        for index, (weight, bias) in enumerate(self.layer.feeds):
            d, matrix = self.places.get(("d_per_step", index)), self.matrix(weight)
            if d is None:
                continue
            if self.needed[0]:
                write = functools.partial(self.add_product, d, matrix[1][1], matrix, NOWHERE, transposed=True)
                self._add_gradient(0, x_PF.shape, write, transposed=False)
            if self._wants(weight[0]):
                self._add_matrix(weight, self.at(X), x_PF.stride(0), d)
            if bias is not None and self._wants(bias):
                self._add_sum(bias, d)

    def add_weights(self) -> None:
        """Gradients of the loop's own parameters."""
        places, layout = self.places, self.layout
        for weight, d_role, role in self.layer.weight_gradients:
            if not self._wants(weight[0]):
                continue
            d = places[d_role]
            if role is None:
                self._add_sum(weight[0], d)
                continue
            width = self.matrix(weight)[1][0]
            if role[0] != "before":
                self._add_matrix(weight, places[role], width, d)
            elif layout.num_steps <= 1:
                self._add_matrix(weight, self.at(X + 1 + role[1]), width, d)
            elif layout.is_even:
                head = (self.at(X + 1 + role[1]), width, layout.num_rows)
                self._add_matrix(weight, places["after", role[1]], width, d, head)
            else:
                self.shifted.add(role[1])
                self._add_matrix(weight, self.at(self.first_shifted + role[1]), width, d)


def _write_backward(
    batch: _Batch, given: Sequence[bool], needed: Sequence[bool], *, weights: bool, pieces: int, team: int
) -> _LayerPass:
    writer = _BackwardWriter(batch, given, needed, weights=weights)
    writer.add_loop(pieces=pieces, team=team)
    writer.add_feeds()
    writer.add_weights()
    made = writer.finish(pieces)
    made.gradients, made.shifted = list(writer.gradients.items()), writer.shifted
    return made


def _find_pass(
    way: Way, batches: Sequence[_Batch], key: tuple[Any, ...], write: Callable[[int, int, int], _LayerPass]
) -> _Pass:
    """The code of a pass; `write` makes that of a layer from its number, pieces and the size of a team."""
    known = batches[0].layer.passes
    key = (way, torch.get_num_threads(), key, *[batch.key for batch in batches])
    found = known.get(key)
    if found is None:
        if len(known) >= MAX_PASSES:
            known.clear()
        threads, team = share_out(way, [(batch.layout, batch.layer.kernel) for batch in batches])
        pieces = [pieces_of(batch.layout, len(batches), threads=threads, team=team) for batch in batches]
        layers = [write(index, own, team) for index, own in enumerate(pieces)]
        codes = array("q", [own.code.buffer_info()[0] for own in layers])
        found = known[key] = _Pass(layers, min(threads, max(sum(pieces), team)), codes)
    return found


def _launch(found: _Pass, batches: Sequence[_Batch], tensors: "Sequence[array[int]]") -> None:
    addresses = array("q", [own.buffer_info()[0] for own in tensors])
    batches[0].layer.run(found.codes.buffer_info()[0], addresses.buffer_info()[0], len(tensors), found.threads)


def _run_forward(batches: Sequence[_Batch], *, keep: bool) -> list[tuple[list[torch.Tensor], torch.Tensor | None]]:
    """For each layer, its outputs with the final states, and what is kept for the backward pass."""
    found = _find_pass(
        "forward",
        batches,
        (keep,),
        lambda index, pieces, team: _write_forward(batches[index], keep=keep, pieces=pieces, team=team),
    )
    made: list[tuple[list[torch.Tensor], torch.Tensor | None]] = []
    alive, tensors = [], []
    for batch, own in zip(batches, found.layers, strict=True):
        layer, layout, dtype = batch.layer, batch.layout, batch.layer.kernel.dtype
        sizes = (layout.num_steps, layout.num_rows) if batch.shown == "steps" else (layout.total,)
        y = empty(*sizes, *layer.y_shape, dtype=dtype)
        finals = [empty(layout.num_rows, *shape, dtype=dtype) for shape in layer.state_shapes]
        kept = empty(own.kept, dtype=dtype) if keep else None
        alive.append(empty(own.work + own.room, dtype=dtype))
        tensors.append(batch.addresses(own, alive[-1], kept, y, finals))
        made.append(([y, *finals], kept))
    _launch(found, batches, tensors)
    return made


def _run_backward(
    batches: Sequence[_Batch],
    made: Sequence[tuple[torch.Tensor, torch.Tensor]],
    cotangents: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Gradients of all inputs, from the output and what is kept of each layer, and the gradients of results.

    The output of a layer that keeps it besides is not read.
    """
    weights = wants_weights()
    arriving, asked, first = [], [], 0
    for batch in batches:
        count = 1 + batch.layer.num_states
        arriving.append([None if d is None else d.contiguous() for d in cotangents[:count]])
        asked.append(tuple(needed[first : first + batch.layer.num_inputs]))
        cotangents, first = cotangents[count:], first + batch.layer.num_inputs
    given = [tuple(d is not None for d in own) for own in arriving]
    found = _find_pass(
        "backward",
        batches,
        (weights, *given, *asked),
        lambda index, pieces, team: _write_backward(
            batches[index], given[index], asked[index], weights=weights, pieces=pieces, team=team
        ),
    )
    results: list[torch.Tensor | None] = []
    alive, tensors = [], []
    for batch, own, (y, kept), ds in zip(batches, found.layers, made, arriving, strict=True):
        layer, layout, dtype = batch.layer, batch.layout, batch.layer.kernel.dtype
        shifted: list[torch.Tensor | None] = [None] * layer.num_states
        for index in own.shifted:
            shifted[index] = layout.shift(_after(batch, index, kept, y), batch.states[index])
        gradients = [empty(*shape, dtype=dtype) for _, shape in own.gradients]
        alive += [shifted, work := empty(own.work + own.room, dtype=dtype)]
        tensors.append(batch.addresses(own, work, kept, y, [*ds, *shifted, *gradients]))
        mine: list[torch.Tensor | None] = [None] * layer.num_inputs
        for (index, _), gradient in zip(own.gradients, gradients, strict=True):
            mine[index] = gradient[0] if 1 <= index <= layer.num_states else gradient
        results += mine
    _launch(found, batches, tensors)
    return results


def _after(batch: _Batch, index: int, kept: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A state after each step, as the forward pass left it."""
    layer, layout = batch.layer, batch.layout
    start = layer.kept_places(layout.total, layout.num_rows, batch.shown, keep=True)[0].get(("after", index))
    if start is None:
        return y
    (size,) = layer.state_shapes[index]
    return kept[start : start + layout.total * size].view(layout.total, size)


class _FusedLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, calls: Sequence[LayerCall], *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        keep = any(ctx.needs_input_grad) and not torch.is_inference_mode_enabled()
        layers, layouts = [_layer_of(call) for call in calls], [call.layout for call in calls]
        batches = _batches(layers, layouts, [call.shown for call in calls], tensors)
        made = _run_forward(batches, keep=keep)
        if keep:
            ctx.programs, ctx.layers, ctx.layouts = [call.program for call in calls], layers, layouts
            ctx.shown = [call.shown for call in calls]
            ctx.unread = [
                [(batch.tensors[index], batch.tensors[index]._version) for index in batch.layer.unread_inputs]
                for batch in batches
            ]
            read = [batch.tensors[index] for batch in batches for index in batch.layer.read_inputs]
            outputs = [
                kept if batch.shown else results[0].data for batch, (results, kept) in zip(batches, made, strict=True)
            ]
            ctx.save_for_backward(*read, *outputs, *(kept for _, kept in made))
        return tuple(tensor for results, _ in made for tensor in results)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        layers: list[FusedLayer] = ctx.layers
        needed = ctx.needs_input_grad[1:]
        # Read once: what autograd stores elsewhere, or computes again, is brought back at each read.
        rest = iter(ctx.saved_tensors)
        tensors: list[torch.Tensor] = []
        for layer, unread in zip(layers, ctx.unread, strict=True):
            own = dict(zip(layer.unread_inputs, [tensor for tensor, _ in unread], strict=True))
            tensors += [own[index] if index in own else next(rest) for index in range(layer.num_inputs)]
        if torch.is_grad_enabled() or any(is_transformed(item) for item in cotangents):
            _check_unchanged(ctx.unread)
            run = functools.partial(_run_by_torch, ctx.programs, layers, ctx.layouts, ctx.shown)
            return None, *differentiate_by_torch(run, tensors, cotangents, needed)
        batches = _batches(layers, ctx.layouts, ctx.shown, tensors)
        outputs = [next(rest) for _ in layers]
        made = list(zip(outputs, rest, strict=True))
        return None, *_run_backward(batches, made, cotangents, needed)


def _check_unchanged(unread: Sequence[Sequence[tuple[torch.Tensor, int]]]) -> None:
    """An error, as autograd has it, if the forward pass is needed again and an input is not what it was."""
    if any(tensor._version != version for own in unread for tensor, version in own):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            "the bias of a recurrent layer, which has to be run again since its gradient is differentiated"
        )


def _run_by_torch(
    programs: Sequence[Program],
    layers: Sequence[FusedLayer],
    layouts: Sequence[Layout],
    shown: Sequence[Shown],
    tensors: list[torch.Tensor],
) -> list[torch.Tensor]:
    """The same results by torch's operators."""
    made: list[torch.Tensor] = []
    for program, batch in zip(programs, _batches(layers, layouts, shown, tensors), strict=True):
        parameters = dict(zip(batch.layer.names, batch.parameters, strict=True))
        coroutine = program.coroutine(batch.layout, batch.x_PF, batch.states, parameters)
        asked = next(coroutine)
        try:
            while True:
                asked = coroutine.send(
                    [EagerKernel.under_autograd(call.kernel.body).forward(call, keep=False) for call in asked]
                )
        except StopIteration as end:
            y, finals = end.value
            made += [y.reshape(batch.layout.num_steps, -1, *y.shape[1:]) if batch.shown == "steps" else y, *finals]
    return made
