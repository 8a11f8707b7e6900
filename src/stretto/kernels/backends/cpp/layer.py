"""A loop that is fed by linear maps of the input, as one operator of autograd: the shape of LSTM, GRU and most cells.

    forward     feeds: x W' + b of all steps -----> the loop -----> y, final states
    backward    the loop, from the last step on --> gradients of feeds --> of x, W and b
                                                `-> gradients of the loop's own weights

Any program runs part by part (`program.py`, `autograd.py`). For short sequences and small layers the parts cost more
than the arithmetic: an operator of autograd each, and many pieces of memory. Here one operator does all of it, what it
keeps for the backward pass is one piece of memory, and where everything lies in it is worked out once for each size of
batch.

Shape legend: B sequences, P rows of all steps together, F features of the input, K and N features in and out of a map.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, final

import torch

from stretto.graph import Kind, Node, Plan
from stretto.kernels.backends.base import LayerCall, LayerOperator, Program
from stretto.kernels.backends.cpp.batched import column_sums, find_library, product, weight_gradient
from stretto.kernels.backends.cpp.kernel import Arguments, CppKernel, aligned, arguments_of, launch, share_out
from stretto.kernels.backends.eager import EagerKernel
from stretto.kernels.backward import differentiate_by_torch, is_batched, version_of, wants_weights
from stretto.kernels.batched_ops import is_column_sum
from stretto.kernels.buffer_pool import empty
from stretto.kernels.layout import Layout
from stretto.kernels.lower import Way

MAX_SIZES: Final = 64
"""Sizes of batches that are remembered."""
Role: TypeAlias = tuple[str, int]
"""What a buffer of generated code is for, and which of those it is; see `ir.py`."""
Stored: TypeAlias = tuple[int, bool]
"""The position of a parameter, and whether its transpose is meant."""


class _OtherShapeError(Exception):
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
@dataclass(frozen=True, slots=True)
class _Sizes:
    """For one size of batch: where the values that are kept lie in their memory, and how much of it there is."""

    kept: dict[Role, int]
    num_kept: int


@final
class FusedLayer(LayerOperator):
    """A plan with a single loop, and the loop's kernel."""

    def __init__(self, plan: Plan, kernel: CppKernel) -> None:
        graph, body, (loop,) = plan.graph, kernel.body, plan.all_loops
        results = [*(graph.next_states[index] for index in loop.states), *loop.outputs]
        values = (graph.x, *graph.states, *results, *body.saved)
        _require(not plan.constants_per_row and loop.states == list(range(len(graph.states))))
        _require({node for level in plan.maps for node in level} == set(loop.per_step))
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
            self.matrices[way] = [self._stored(node, sources) for node in function.ir.weights]
        roles = _roles(kernel)
        self.weight_gradients = [
            _gradient(self._stored(port.source, {}), port.gradient, roles)
            for port in body.ports_of(Kind.WEIGHT)
            if port.gradient is not None
        ]
        read = {item.rows for item in self.weight_gradients}
        read |= kernel.functions["backward"].reads
        self.keeps_feeds = any(role is not None and role[0] == "per_step" for role in read)
        self.num_inputs = 1 + self.num_states + len(self.names)
        read_backward = {*self.vectors["backward"], *(weight[0] for weight, _ in self.feeds)}
        read_backward |= {position for position, _ in self.matrices["backward"]}
        biases = {bias for _, bias in self.feeds if bias is not None}
        self.unread_inputs = {1 + self.num_states + position for position in biases - read_backward}
        """Inputs that the backward pass does not read, which a user may change before it."""
        self.num_kept = 1 + (len(self.feeds) if self.keeps_feeds else 0)
        self._sizes: dict[tuple[int, int, bool], _Sizes] = {}

    @staticmethod
    def of(plan: Plan, kernels: Sequence[CppKernel]) -> "FusedLayer | None":
        """The operator, if the program has this shape."""
        if len(kernels) != 1 or find_library(kernels[0].dtype) is None:
            return None
        try:
            return FusedLayer(plan, kernels[0])
        except _OtherShapeError:
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
        tensors = (x_PF, *call.states, *(call.parameters[name] for name in self.names))
        return all(t.dtype is dtype and t.device.type == "cpu" and (t.dim() == 2 or t.is_contiguous()) for t in tensors)

    @classmethod
    def run_all(cls, calls: Sequence[LayerCall]) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Run layers that do not depend on each other, their loops at once."""
        tensors: list[torch.Tensor] = []
        for call in calls:
            tensors += [call.x_PF, *(state.contiguous() for state in call.states)]
            tensors += [call.parameters[name] for name in _layer_of(call).names]
        made = iter(_FusedLayers.apply(calls, *tensors))  # type: ignore[no-untyped-call]
        return [(next(made), [next(made) for _ in call.states]) for call in calls]

    def sizes(self, total: int, num_rows: int, *, keep: bool) -> _Sizes:
        """Where kept values lie."""
        key = (total, num_rows, keep)
        found = self._sizes.get(key)
        if found is None:
            if len(self._sizes) >= MAX_SIZES:
                self._sizes.clear()
            body = self.kernel.body
            kept: dict[Role, int] = {}
            place = 0
            for role, nodes in (("after", body.next_states), ("output", body.outputs), ("saved", body.saved)):
                for index, node in enumerate(nodes):
                    if (role, index) != self.y_role:
                        kept[role, index] = place
                        # What nothing will read again gets one row for each sequence.
                        place += aligned((total if keep or role != "saved" else num_rows) * node.row_size)
            found = self._sizes[key] = _Sizes(kept, place)
        return found


def _require(holds: bool) -> None:
    if not holds:
        raise _OtherShapeError


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
    """What one layer reads in a pass, and where it lies."""

    def __init__(self, layer: FusedLayer, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        self.layer, self.layout, self.x_PF = layer, layout, tensors[0]
        self.states = tensors[1 : 1 + layer.num_states]
        self.parameters = tensors[1 + layer.num_states :]
        self.addresses: dict[Role, int] = {}
        for index, state in enumerate(self.states):
            self.addresses["initial", index] = state.data_ptr()

    def matrix_KN(self, stored: Stored) -> torch.Tensor:
        """A parameter as the map or loop reads it."""
        position, transposed = stored
        return self.parameters[position].t() if transposed else self.parameters[position]

    def place_kept(self, y: torch.Tensor, kept: torch.Tensor, feeds: Sequence[torch.Tensor], *, keep: bool) -> None:
        """Note where the values lie that are made forward and read backward."""
        start, each = kept.data_ptr(), kept.element_size()
        places = self.layer.sizes(self.layout.total, self.layout.num_rows, keep=keep).kept
        self.addresses.update((role, start + place * each) for role, place in places.items())
        self.addresses[self.layer.y_role] = y.data_ptr()
        for index in range(self.layer.num_states):
            self.addresses["before", index] = self.addresses["after", index]
        for index, feed in enumerate(feeds):
            self.addresses["per_step", index] = feed.data_ptr()

    def arguments(self, way: Way, *, keep: bool, team: int) -> Arguments:
        """Of generated code; a buffer that lies nowhere is read as zeros, or not at all."""
        layer = self.layer
        kernel, function = layer.kernel, layer.kernel.functions[way]
        buffers = layer.buffers[way]
        pointers = [self.addresses.get(role, 0) for role, _ in buffers]
        strides = [size if place else 0 for place, (_, size) in zip(pointers, buffers, strict=True)]
        if 0 in pointers:
            zeros = kernel.zeros.data_ptr()
            pointers = [place or zeros for place in pointers]
        pointers += [self.parameters[position].data_ptr() for position in layer.vectors[way]]
        weights: list[int] = []
        weight_strides: list[int] = []
        for position, transposed in layer.matrices[way]:
            tensor = self.parameters[position]
            weights.append(tensor.data_ptr())
            weight_strides += reversed(tensor.stride()) if transposed else tensor.stride()
        return arguments_of(
            kernel,
            function,
            self.layout,
            lists=(strides, weight_strides, pointers, weights),
            keep=keep,
            team=team,
        )


def _batches(layers: Sequence[FusedLayer], layouts: Sequence[Layout], tensors: Sequence[torch.Tensor]) -> list[_Batch]:
    batches, first = [], 0
    for layer, layout in zip(layers, layouts, strict=True):
        last = first + layer.num_inputs
        batches.append(_Batch(layer, layout, tensors[first:last]))
        first = last
    return batches


def _run_loops(way: Way, batches: Sequence[_Batch], *, keep: bool) -> None:
    runs = [(batch.layout, batch.layer.kernel) for batch in batches]
    threads, team = share_out(way, runs)
    launch(way, runs, [batch.arguments(way, keep=keep, team=team) for batch in batches], threads=threads, team=team)


def _run_forward(batches: Sequence[_Batch], *, keep: bool) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """For each layer, its outputs with the final states, and what is kept for the backward pass."""
    made, alive = [], []
    for batch in batches:
        layer, layout, dtype = batch.layer, batch.layout, batch.layer.kernel.dtype
        feeds = [
            product(batch.x_PF, batch.matrix_KN(weight), None if bias is None else batch.parameters[bias])
            for weight, bias in layer.feeds
        ]
        y = empty(layout.total, *layer.y_shape, dtype=dtype)
        finals = [empty(layout.num_rows, *shape, dtype=dtype) for shape in layer.state_shapes]
        kept = empty(layer.sizes(layout.total, layout.num_rows, keep=keep).num_kept, dtype=dtype)
        batch.place_kept(y, kept, feeds, keep=keep)
        for index, final_state in enumerate(finals):
            batch.addresses["final", index] = final_state.data_ptr()
        alive.append(feeds)
        made.append(([y, *finals], [kept, *(feeds if layer.keeps_feeds else [])]))
    _run_loops("forward", batches, keep=keep)
    return made


def _run_backward(
    batches: Sequence[_Batch], cotangents: Sequence[Sequence[torch.Tensor | None]]
) -> list[tuple[list[torch.Tensor], dict[Role, torch.Tensor]]]:
    """For each layer, gradients of its initial states, and those of each step by their role."""
    made = []
    for batch, (d_y, *d_finals) in zip(batches, cotangents, strict=True):
        layer, total, dtype = batch.layer, batch.layout.total, batch.layer.kernel.dtype
        body, carried = layer.kernel.body, []
        for index, (state, last) in enumerate(zip(batch.states, d_finals, strict=True)):
            # Two, since a step reads one and writes the other. A sequence joins at its last step, whichever is read
            # there: both start as its final gradient.
            carry = empty(2, *state.shape, dtype=dtype)
            carried.append(carry.zero_() if last is None else carry.copy_(last.expand_as(carry)))
            batch.addresses["carry_in", index] = batch.addresses["carry_out", index] = carry.data_ptr()
        rows: dict[Role, torch.Tensor] = {}
        if d_y is not None:
            rows[f"d_{layer.y_role[0]}", layer.y_role[1]] = d_y.contiguous()
        by_node: dict[Node, torch.Tensor] = {}
        for index, port in enumerate(body.ports_of(Kind.PER_STEP)):
            if port.gradient is not None:
                rows["d_per_step", index] = by_node[port.gradient] = empty(total, port.node.row_size, dtype=dtype)
        for index, node in enumerate(body.to_deferred):
            found = by_node.get(node)
            rows["to_deferred", index] = empty(total, *node.row_shape, dtype=dtype) if found is None else found
        batch.addresses.update((role, tensor.data_ptr()) for role, tensor in rows.items())
        made.append(([carry[0] for carry in carried], rows))
    _run_loops("backward", batches, keep=True)
    return made


def _gradients(
    batch: _Batch,
    kept: Sequence[torch.Tensor],
    y: torch.Tensor,
    made: tuple[list[torch.Tensor], dict[Role, torch.Tensor]],
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Of all inputs of a layer."""
    layer, layout = batch.layer, batch.layout
    d_states, rows = made
    found: list[torch.Tensor | None] = [None] * len(needed)
    first_parameter = 1 + layer.num_states
    found[1:first_parameter] = d_states

    def add(position: int, gradient: torch.Tensor) -> None:
        before = found[position]
        found[position] = gradient if before is None else before + gradient

    def wanted(stored: Stored | int | None) -> bool:
        position = stored[0] if isinstance(stored, tuple) else stored
        return position is not None and needed[first_parameter + position] and wants_weights()

    def add_matrix(stored: Stored, gradient_KN: torch.Tensor) -> None:
        position, transposed = stored
        add(first_parameter + position, gradient_KN.t().contiguous() if transposed else gradient_KN)

    sums: dict[int, torch.Tensor] = {}

    def add_sum(position: int, d_PN: torch.Tensor) -> None:
        # The biases of a map and of a loop often get the same gradient.
        known = sums.get(id(d_PN))
        sums[id(d_PN)] = made = column_sums(d_PN) if known is None else known.clone()
        add(first_parameter + position, made)

    for index, (weight, bias) in enumerate(layer.feeds):
        d_PN = rows.get(("d_per_step", index))
        if d_PN is None:
            continue
        if needed[0]:
            add(0, product(d_PN, batch.matrix_KN(weight).t()))
        if wanted(weight):
            add_matrix(weight, weight_gradient(batch.x_PF, d_PN))
        if wanted(bias):
            assert bias is not None
            add_sum(bias, d_PN)
    for weight, d_role, role in layer.weight_gradients:
        if not wanted(weight):
            continue
        d_PN = rows[d_role]
        if role is None:
            add_sum(weight[0], d_PN)
            continue
        name, index = role
        if name == "before":
            after = _kept_value(batch, ("after", index), kept, y)
            initial = batch.states[index]
            if layout.is_even and layout.num_steps > 1:
                add_matrix(weight, weight_gradient(after, d_PN, initial))
            else:
                add_matrix(weight, weight_gradient(layout.shift(after, initial), d_PN))
        else:
            add_matrix(weight, weight_gradient(_kept_value(batch, role, kept, y), d_PN))
    return found


def _kept_value(batch: _Batch, role: Role, kept: Sequence[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    """A value of all steps, of one dimension per row, that the forward pass left."""
    layer, total = batch.layer, batch.layout.total
    if role == layer.y_role:
        return y
    if role[0] == "per_step":
        return kept[1 + role[1]]
    body = layer.kernel.body
    nodes = {"after": body.next_states, "output": body.outputs, "saved": body.saved}[role[0]]
    size = nodes[role[1]].row_size
    start = layer.sizes(total, batch.layout.num_rows, keep=True).kept[role]
    return kept[0][start : start + total * size].view(total, size)


class _FusedLayers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, calls: Sequence[LayerCall], *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        keep = any(ctx.needs_input_grad) and not torch.is_inference_mode_enabled()
        layers, layouts = [_layer_of(call) for call in calls], [call.layout for call in calls]
        made = _run_forward(_batches(layers, layouts, tensors), keep=keep)
        if keep:
            outputs = [results[0] for results, _ in made]
            ctx.programs, ctx.layers, ctx.layouts = [call.program for call in calls], layers, layouts
            ctx.watched, ctx.versions = [version_of(y) for y in outputs], [y._version for y in outputs]
            kept = [tensor for _, own in made for tensor in own]
            is_read = [index not in layer.unread_inputs for layer in layers for index in range(layer.num_inputs)]
            ctx.unread = [None if read else (t, t._version) for t, read in zip(tensors, is_read, strict=True)]
            read = [tensor for tensor, read in zip(tensors, is_read, strict=True) if read]
            ctx.save_for_backward(*read, *(y.data for y in outputs), *kept)
        return tuple(tensor for results, _ in made for tensor in results)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        layers: list[FusedLayer] = ctx.layers
        needed = ctx.needs_input_grad[1:]
        # Read once: what autograd stores elsewhere, or computes again, is brought back at each read.
        rest = iter(ctx.saved_tensors)
        tensors = [next(rest) if unread is None else unread[0] for unread in ctx.unread]
        if torch.is_grad_enabled() or any(is_batched(item) for item in cotangents):
            _check_unchanged(ctx.unread)
            run = functools.partial(_run_by_torch, ctx.programs, layers, ctx.layouts)
            return None, *differentiate_by_torch(run, tensors, cotangents, needed)
        batches = _batches(layers, ctx.layouts, tensors)
        outputs = [next(rest) for _ in layers]
        kept = [[next(rest) for _ in range(layer.num_kept)] for layer in layers]
        if any(item._version != version for item, version in zip(ctx.watched, ctx.versions, strict=True)):
            _check_unchanged(ctx.unread)
            made = _run_forward(_batches(layers, ctx.layouts, tensors), keep=True)
            outputs, kept = [results[0] for results, _ in made], [own for _, own in made]
        for batch, y, own in zip(batches, outputs, kept, strict=True):
            batch.place_kept(y, own[0], own[1:], keep=True)
        remaining = iter(cotangents)
        arriving = [[next(remaining) for _ in range(1 + layer.num_states)] for layer in layers]
        found: list[torch.Tensor | None] = []
        first = 0
        for batch, y, own, made_here in zip(batches, outputs, kept, _run_backward(batches, arriving), strict=True):
            last = first + batch.layer.num_inputs
            found += _gradients(batch, own, y, made_here, needed[first:last])
            first = last
        return None, *found


def _check_unchanged(unread: Sequence[tuple[torch.Tensor, int] | None]) -> None:
    """An error, as autograd has it, if the forward pass is needed again and an input is not what it was."""
    if any(item is not None and item[0]._version != item[1] for item in unread):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            "the bias of a recurrent layer, which has to be run again since its output was modified too, or since its "
            "gradient is differentiated"
        )


def _run_by_torch(
    programs: Sequence[Program], layers: Sequence[FusedLayer], layouts: Sequence[Layout], tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The same results by torch's operators."""
    made: list[torch.Tensor] = []
    for program, batch in zip(programs, _batches(layers, layouts, tensors), strict=True):
        parameters = dict(zip(batch.layer.names, batch.parameters, strict=True))
        coroutine = program.coroutine(batch.layout, batch.x_PF, batch.states, parameters)
        asked = next(coroutine)
        try:
            while True:
                asked = coroutine.send([EagerKernel(call.kernel.body).forward(call, keep=False) for call in asked])
        except StopIteration as end:
            y, finals = end.value
            made += [y, *finals]
    return made
