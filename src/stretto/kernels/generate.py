"""A loop's body, forward and backward, as C++."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from stretto.graph import Body, Kind, Node, constant_fill, is_view
from stretto.kernels.emit import StepWriter
from stretto.kernels.lower import Lowering, Unsupported
from stretto.kernels.rows import (
    AbstractValue,
    Buffer,
    Constant,
    Map,
    Product,
    Read,
    Root,
    Weight,
    Where,
    contiguous,
    size_of,
)
from stretto.kernels.schedule import Scheduler

HEADERS = ("vector.h", "product.h", "team.h")
REALS = {torch.float32: "float", torch.float64: "double"}
WORTH_TRYING = 8192
LARGE_WEIGHTS = 32768
"""Elements of the weights of a step from which on threads may, and usually do, share the columns of few rows."""


POINTWISE_WORK = 16
"""Multiplications that an element of a loop over a row takes as long as, about."""


@final
@dataclass(frozen=True, slots=True)
class Slot:
    """A pointer that the generated function takes: what it points to, and which one of its kind."""

    role: str
    index: int


@final
@dataclass(slots=True)
class Generated:
    """One direction of a loop.

    Attributes:
        slots: Pointers, in order.
        prepared: Nodes that are computed before the loop, from weights alone.
        weights: Nodes of the matrices to pack, in order.
        packed: Elements of packed memory.
        scratch: Elements of scratch memory a row.
        private: Elements of scratch memory a row and thread.
        room: Elements a row that products need to lay rows side by side.
        products: Products of a step.
        passes: Loops over a row's elements of a step.
        work: Multiplications of a row's step; an element of a loop counts as several.
        shares_columns: Whether threads may share few rows, if it turns out to be faster.
        usually_shares_columns: Whether they do in a walk too short to try.
        lines: The code.
    """

    slots: list[Slot]
    prepared: list[Node]
    weights: list[Node]
    packed: list[int]
    scratch: int
    private: int
    room: int
    products: int
    passes: int
    work: int
    shares_columns: bool
    usually_shares_columns: bool
    lines: list[str]


@final
class _Writer:
    """Collects the buffers and weights of one direction."""

    def __init__(self, body: Body, nodes: list[Node]) -> None:
        self.slots: list[Slot] = []
        self.buffers: list[Buffer] = []
        self.weights: dict[Node, Weight] = {}
        self.once: dict[Node, Buffer] = {}
        self.values: dict[Node, AbstractValue] = {}
        # In order: the code, which names the library in the cache, must be the same for the same body.
        self.still = dict.fromkeys(port.node for port in body.ports_of(Kind.WEIGHT))
        self.prepared: list[Node] = []
        self.moving: list[Node] = []
        for node in nodes:
            if node.op is constant_fill:
                self.values[node] = Constant(node.row_shape, float(node.args[1]))
            elif not node.has_rows and node.inputs and all(item in self.still for item in node.inputs):
                self.still[node] = None
                self.prepared.append(node)
            else:
                self.moving.append(node)

    def buffer(self, role: str, index: int, where: Where, dims: tuple[int, ...]) -> Buffer:
        name = f"{role}{index}"
        found = Buffer(name, where, contiguous(dims), size=size_of(dims))
        self.slots.append(Slot(role, index))
        self.buffers.append(found)
        return found

    def read(self, role: str, index: int, where: Where, node: Node) -> Read:
        _check(node)
        return Read(node.row_shape, self.buffer(role, index, where, node.row_shape))

    def weight(self, node: Node) -> Weight:
        if node not in self.still:
            raise Unsupported("a product of two values that both change from step to step, other than row by row")
        if node not in self.weights:
            rows, columns = node.shape
            assert isinstance(rows, int)
            assert isinstance(columns, int)
            self.weights[node] = Weight(f"weight{len(self.weights)}", rows, columns)
        return self.weights[node]

    def lower(self) -> None:
        for index, node in enumerate(node for node in self.still if node.dtype is not None):
            if node.dtype is not None and len(node.row_shape) <= 3:
                shape = node.row_shape
                buffer = Buffer(f"once{index}", Where.ONCE, contiguous(shape), size=size_of(shape))
                self.once[node] = buffer
                self.values.setdefault(node, Read(shape, buffer))
        lowering = Lowering(self.values, self.weight)
        for node in self.moving:
            if node.dtype is not None:
                _check(node)
            lowering(node)

    def finish(self, name: str, roots: list[Root], *, backward: bool) -> Generated:
        scheduler = Scheduler(roots)
        schedule = scheduler()
        used_once = {value.buffer for value in scheduler.order if isinstance(value, Read)}
        once = [node for node, buffer in self.once.items() if buffer in used_once]
        for node in once:
            self.slots.append(Slot("once", len(self.slots)))
            self.buffers.append(self.once[node])
        places, start = {}, 0
        packed = []
        for weight in self.weights.values():
            places[weight.name] = str(start)
            packed.append(start)
            start += weight.K * (-(-weight.N // 32) * 32)
        writer = StepWriter(scheduler, schedule, places)
        step = writer.lines()
        products = [value for value in scheduler.order if isinstance(value, Product)]
        room = max((product.weight.K for product in products), default=0)
        elements = sum(weight.K * weight.N for weight in self.weights.values())
        made = Generated(
            slots=self.slots,
            prepared=[*self.prepared],
            weights=list(self.weights),
            packed=[*packed, start],
            scratch=schedule.scratch,
            private=schedule.private,
            room=room,
            products=len(products),
            passes=len(schedule.groups) - len(products),
            work=elements + POINTWISE_WORK * sum(size_of(g.dims) for g in schedule.groups if g.kind != "product"),
            shares_columns=elements >= WORTH_TRYING,
            usually_shares_columns=elements >= LARGE_WEIGHTS,
            lines=[],
        )
        made.lines = _function(name, self.buffers, made, step, list(self.weights.values()), backward=backward)
        self.once_nodes = once
        return made


def _check(node: Node) -> None:
    if node.dtype not in REALS and node.dtype is not torch.bool and not _counts(node):
        raise Unsupported(f"the value {node.name} in the loop is of {node.dtype}")


def _counts(node: Node) -> bool:
    """Whether it is a number of true values, which is small enough to be exact as a real number."""
    while is_view(node):
        node = node.inputs[0]
    return node.label == "sum" and node.dtype is torch.int64 and node.inputs[0].dtype is torch.bool


def generate_forward(body: Body) -> tuple[Generated, list[Node]]:
    """The forward loop, and the once-computed vectors it reads."""
    writer = _Writer(body, body.forward)
    _read_ports(writer, body)
    writer.lower()
    roots = [
        Root(writer.values[node], writer.buffer(role, index, where, node.row_shape))
        for role, where, nodes in (
            ("after", Where.PACKED, body.next_states),
            ("emit", Where.PACKED, body.outputs),
            ("saved", Where.STORED, body.saved),
        )
        for index, node in enumerate(nodes)
    ]
    for index, node in enumerate(body.next_states):
        writer.buffer("final", index, Where.ROW, node.row_shape)
    made = writer.finish("forward", roots, backward=False)
    return made, writer.once_nodes


def generate_backward(body: Body) -> tuple[Generated, list[Node]]:
    """The backward loop, and the once-computed vectors it reads."""
    writer = _Writer(body, body.backward)
    _read_ports(writer, body)
    for role, nodes in (("after", body.next_states), ("emit", body.outputs), ("saved", body.saved)):
        for index, node in enumerate(nodes):
            read = writer.read(role, index, Where.PACKED, node)
            writer.values.setdefault(node, read)
    for index, node in enumerate(body.state_gradients):
        carry = writer.read("carry_in", index, Where.CARRY_IN, node)
        arriving = writer.read("d_after", index, Where.ARRIVING, node)
        writer.values[node] = Map(node.row_shape, "{0} + {1}", (carry, arriving))
    for index, node in enumerate(body.output_gradients):
        writer.values[node] = writer.read("d_emit", index, Where.ARRIVING, node)
    writer.lower()
    roots: list[Root] = []
    for index, port in enumerate(body.ports_of(Kind.STATE)):
        gradient = port.gradient
        value = Constant(port.node.row_shape, 0.0) if gradient is None else _shaped(writer.values[gradient], port.node)
        roots.append(Root(value, writer.buffer("carry_out", index, Where.CARRY_OUT, port.node.row_shape)))
    for index, port in enumerate(body.ports_of(Kind.PER_STEP)):
        if port.gradient is not None:
            buffer = writer.buffer("d_step", index, Where.PACKED, port.node.row_shape)
            roots.append(Root(_shaped(writer.values[port.gradient], port.node), buffer))
    outgoing = {port.gradient for port in body.ports_of(Kind.PER_STEP)}
    for index, node in enumerate(body.to_deferred):
        if node not in outgoing:
            roots.append(Root(writer.values[node], writer.buffer("handed", index, Where.PACKED, node.row_shape)))
    for index, port in enumerate(body.ports_of(Kind.CONSTANT)):
        if port.gradient is not None:
            buffer = writer.buffer("d_kept", index, Where.ROW, port.node.row_shape)
            sum_so_far = Read(port.node.row_shape, buffer)
            more = _shaped(writer.values[port.gradient], port.node)
            roots.append(Root(Map(port.node.row_shape, "{0} + {1}", (sum_so_far, more)), buffer))
    made = writer.finish("backward", roots, backward=True)
    return made, writer.once_nodes


def _shaped(value: AbstractValue, node: Node) -> AbstractValue:
    if value.dims != node.row_shape:
        raise Unsupported(f"a gradient of another shape than {node.name}")
    return value


def _read_ports(writer: _Writer, body: Body) -> None:
    for index, port in enumerate(body.ports_of(Kind.STATE)):
        writer.values[port.node] = writer.read("before", index, Where.BEFORE, port.node)
        writer.slots.append(Slot("initial", index))
        writer.buffers.append(Buffer(f"initial{index}", Where.ROW, (), size=port.node.row_size))
    for index, port in enumerate(body.ports_of(Kind.PER_STEP)):
        writer.values[port.node] = writer.read("step", index, Where.PACKED, port.node)
    for index, port in enumerate(body.ports_of(Kind.CONSTANT)):
        writer.values[port.node] = writer.read("kept", index, Where.ROW, port.node)


def _function(
    name: str, buffers: list[Buffer], made: Generated, step: list[str], weights: list[Weight], *, backward: bool
) -> list[str]:
    """The function around a step: pointers, the walk through time, and final states."""
    steady: list[str] = []
    each: list[str] = []
    for position, buffer in enumerate(buffers):
        base = f"call.buffers[{position}]"
        if buffer.where in {Where.ROW, Where.ONCE}:
            steady.append(f"real* const {buffer.name} = {base};")
        elif buffer.where is Where.PACKED:
            each.append(f"real* const {buffer.name} = {base} + start * {buffer.size};")
        elif buffer.where is Where.STORED:
            each.append(f"real* const {buffer.name} = {base} + (call.keep ? start : 0) * {buffer.size};")
        elif buffer.where is Where.ARRIVING:
            steady.append(f"const int64_t {buffer.name}_stride = call.strides[{position}];")
            each.append(f"real* const {buffer.name} = {base} + start * {buffer.name}_stride;")
        elif buffer.where is Where.BEFORE:
            earlier = f"{base} + call.starts[t - 1] * {buffer.size}"
            each.append(f"real* const {buffer.name} = t ? {earlier} : call.buffers[{position + 1}];")
        elif buffer.where is Where.CARRY_IN:
            each.append(f"real* const {buffer.name} = {base} + ((t + 1) & 1) * call.num_rows * {buffer.size};")
        elif buffer.where is Where.CARRY_OUT:
            each.append(f"real* const {buffer.name} = {base} + (t & 1) * call.num_rows * {buffer.size};")
    rest = "continue" if backward else "break"
    arguments = "const Call& call, int64_t first, int64_t last, int64_t from, int64_t to, int rank, int size"
    lines = [
        "template <bool TEAM>",
        f"static void {name}_steps({arguments}, Barrier* barrier) {{",
        f"  constexpr int64_t SCRATCH = {max(made.scratch, 1)}, PRIVATE = {max(made.private, 1)};",
        "  real* const own = call.own + (TEAM ? rank * call.num_rows * PRIVATE : 0);",
        f"  real* const room = call.room + ((TEAM ? rank * call.num_rows : 0) + first) * {made.room};",
        "  (void)SCRATCH, (void)own, (void)room, (void)rank, (void)size, (void)barrier;",
        *(f"  {line}" for line in steady),
        "  for (int64_t i = from; i < to; i++) {",
        f"    const int64_t t = {'call.num_steps - 1 - i' if backward else 'i'};",
        "    const int64_t end = call.rows[t] < last ? call.rows[t] : last, start = call.starts[t];",
        f"    if (end <= first) {rest};",
        "    (void)start;",
        *(f"    {line}" for line in each),
        *(f"    {line}" for line in step),
        "  }",
        "}",
    ]
    team = f"{name}_steps<true>" if made.shares_columns else "nullptr"
    usually = "true" if made.usually_shares_columns else "false"
    lines += [
        f'extern "C" void {name}_work(const Call* call, int64_t first, int64_t last, int rank, int size,',
        "                              Barrier* barrier) {",
        f"  walk(*call, first, last, rank, size, barrier, {team}, {name}_steps<false>, {usually});",
        *(f"  {line}" for line in _final_lines(buffers)),
        "}",
        f'extern "C" void {name}_pack(const Call* call) {{',
        "  (void)call;",
    ]
    for number, weight in enumerate(weights):
        strides = f"call->weight_strides[{2 * number}], call->weight_strides[{2 * number + 1}]"
        place = f"call->packed + {made.packed[number]}"
        lines.append(
            f"  pack_parts<{weight.parts}>(call->weights[{number}], {strides}, {weight.K}, {weight.N}, {place});"
        )
    return [*lines, "}"]


def _final_lines(buffers: list[Buffer]) -> list[str]:
    """Copies of each sequence's last state, or of its first if it has no steps."""
    places = {buffer.name: f"call->buffers[{position}]" for position, buffer in enumerate(buffers)}
    copies = []
    for buffer in buffers:
        if buffer.name.startswith("final"):
            index, size = buffer.name.removeprefix("final"), buffer.size
            after = f"{places[f'after{index}']} + (call->starts[steps - 1] + b) * {size}"
            source = f"steps ? {after} : {places[f'initial{index}']} + b * {size}"
            copies.append(f"__builtin_memcpy({places[buffer.name]} + b * {size}, {source}, {size} * sizeof(real));")
    if not copies:
        return []
    return [
        "if (size > 1) barrier->wait(rank, size);",
        "if (rank > 0) return;",
        "for (int64_t b = first; b < last; b++) {",
        "  const int64_t steps = call->lengths[b];",
        *(f"  {line}" for line in copies),
        "}",
    ]


def header_text(*names: str) -> str:
    """Our headers, one after another, as part of one file."""
    folder = Path(__file__).parent / "headers"
    lines = [line for name in names for line in (folder / name).read_text(encoding="utf-8").splitlines()]
    return "\n".join(line for line in lines if not line.startswith(("#pragma once", '#include "')))


def source_of(functions: list[Generated], dtype: torch.dtype) -> str:
    """A whole C++ file."""
    parts = [f"#define REAL {REALS[dtype]}", header_text(*HEADERS)]
    return "\n".join([*parts, *("\n".join(function.lines) for function in functions), ""])
