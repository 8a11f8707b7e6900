"""A loop's body as a C++ file: one function for all steps in each direction.

forward_pack(call)       lays the weights out in panels, once per call
forward_work(call, ...)  runs all steps for some rows, by one thread or by a team that shares columns
  forward_steps<TEAM>    the loop over time, around the code of a step that `emit.py` writes

for (i = from; i < to; i++) {             t = i, or the last step less i backward
  end = rows[t], start = starts[t]        sequences still running at t, and the first packed row of t
  real* const after0 = ... + start * H    pointers to the rows of this step
  ...                                     the step
}
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final, final

import torch

from stretto.graph import Body
from stretto.kernels.backends.cpp.emit import StepWriter, element_of
from stretto.kernels.ir import Buffer, LoopIR, Product, Root, Weight, Where
from stretto.kernels.lower import Way, lower
from stretto.kernels.schedule import ALIGNMENT, Schedule, loads_in

HEADERS: Final = ("vector.h", "product.h", "team.h")
CPP_TYPES: Final = {torch.float32: "float", torch.float64: "double"}
TEAM_MIN_ELEMENTS: Final = 8192
TEAM_USUAL_ELEMENTS: Final = 32768
"""Elements of the weights of a step from which threads may, and usually do, share the columns of few rows."""
POINTWISE_WORK: Final = 16
"""Multiplications that take about as long as one element of a loop over a row."""


@final
@dataclass(slots=True, eq=False)
class Generated:
    """One direction of a loop.

    Attributes:
        ir: What it reads and writes.
        own_buffers: Role, index and size of the buffers that are not uniform, in order.
        reads: Roles and indices of the buffers that a step reads.
        packed: Where each weight begins in packed memory, and the elements of all of it.
        scratch: Elements of scratch memory per row.
        private: Elements of scratch memory per row and thread.
        room: Elements per row that products need to interleave rows.
        passes: Loops over a row's elements per step.
        work: Multiplications of one row's step; an element of a loop counts as several.
        shares_columns: Whether threads may share few rows, if it turns out to be faster.
        usually_shares_columns: Whether they do over too few steps to measure it.
        has_integers: Whether some values are integers.
        lines: The code.
    """

    ir: LoopIR
    own_buffers: list[tuple[str, int, int]]
    reads: frozenset[tuple[str, int]]
    packed: list[int]
    scratch: int
    private: int
    room: int
    passes: int
    work: int
    shares_columns: bool
    usually_shares_columns: bool
    has_integers: bool
    lines: list[str]


@lru_cache(maxsize=16)
def generate(body: Body, way: Way) -> Generated:
    """The code of a loop in one direction. Cached, for a backend asks whether there is any before it is built.

    Raises:
        Unsupported: If no code can be generated.
    """
    ir = lower(body, way)
    if way == "forward":
        _show(ir, body)
    schedule = Schedule(ir.roots)
    packed = [0]
    for weight in ir.weights.values():
        packed.append(packed[-1] + weight.heads * weight.K * (-(-weight.N // ALIGNMENT) * ALIGNMENT))
    writer = StepWriter(schedule, dict(zip(ir.weights.values(), packed, strict=False)))
    step = writer.lines()
    products = [value for value in schedule.order if isinstance(value, Product)]
    elements = sum(weight.heads * weight.K * weight.N for weight in ir.weights.values())
    pointwise = sum(math.prod(group.dims) for group in schedule.groups if group.kind != "product")
    made = Generated(
        ir=ir,
        own_buffers=[(item.role, item.index, item.size) for item in ir.buffers if item.where is not Where.UNIFORM],
        reads=frozenset(
            (load.buffer.role, load.buffer.index)
            for group in schedule.groups
            for item in group.items
            for load in loads_in(item.expression)
        ),
        packed=packed,
        scratch=schedule.sizes[Where.SCRATCH],
        private=schedule.sizes[Where.PRIVATE],
        # Several vectors of a row are multiplied at once, row by row.
        room=max((math.prod(item.operand.dims) // item.weight.heads for item in products), default=0),
        passes=len(schedule.groups) - len(products),
        work=elements + POINTWISE_WORK * pointwise,
        shares_columns=elements >= TEAM_MIN_ELEMENTS,
        usually_shares_columns=elements >= TEAM_USUAL_ELEMENTS,
        has_integers=any(buffer.integer for buffer in ir.buffers) or any(value.integer for value in schedule.order),
        lines=[],
    )
    made.lines = _function(way, made, step, writer.weight_blocks)
    return made


def _show(ir: LoopIR, body: Body) -> None:
    """Write the step's output to a second buffer, too, while it is in a register.

    The user gets one and the backward pass reads the other. Without a backward pass, both are the same buffer.
    """
    root = next((root for root in ir.roots if (root.buffer.role, root.buffer.index) == body.shown), None)
    if root is not None:
        shown = replace(root.buffer, role="shown", index=0)
        ir.roots.append(Root(root.value, shown))
        ir.buffers.insert(len(ir.buffers) - len(ir.uniforms), shown)


def _function(way: Way, made: Generated, step: list[str], blocks: Mapping[Weight, int]) -> list[str]:
    """The functions around a step: pointers, the loop over time, final states, and packing."""
    buffers = made.ir.buffers
    steady: list[str] = []
    each: list[str] = []
    for position, buffer in enumerate(buffers):
        name, size, element = buffer.name, buffer.size, element_of(buffer)
        base, initial = (f"reinterpret_cast<{element}*>(call.buffers[{at}])" for at in (position, position + 1))
        if not buffer.integer:
            base, initial = f"call.buffers[{position}]", f"call.buffers[{position + 1}]"
        moving = {
            Where.PACKED: f"{base} + start * {size}",
            Where.SAVED: f"{base} + (call.keep ? start : 0) * {size}",
            Where.STRIDED: f"{base} + start * {name}_stride",
            Where.BEFORE: f"t ? {base} + call.starts[t - 1] * {size} : {initial}",
            Where.CARRY_IN: f"{base} + ((t + 1) & 1) * call.num_rows * {size}",
            Where.CARRY_OUT: f"{base} + (t & 1) * call.num_rows * {size}",
        }
        if buffer.where is Where.STRIDED:
            steady.append(f"const int64_t {name}_stride = call.strides[{position}];")
        lines_of = each if buffer.where in moving else steady
        lines_of.append(f"{element}* const {name} = {moving.get(buffer.where, base)};")
    rest = "continue" if way == "backward" else "break"
    arguments = "const Call& call, int64_t first, int64_t last, int64_t from, int64_t to, int rank, int size"
    lines = [
        "template <bool TEAM>",
        f"static void {way}_steps({arguments}, Barrier* barrier) {{",
        f"  constexpr int64_t SCRATCH = {max(made.scratch, 1)}, PRIVATE = {max(made.private, 1)};",
        "  real* const own = call.own + (TEAM ? rank * call.num_rows * PRIVATE : 0);",
        f"  real* const room = call.room + ((TEAM ? rank * call.num_rows : 0) + first) * {made.room};",
        "  (void)SCRATCH, (void)own, (void)room, (void)rank, (void)size, (void)barrier;",
        *(f"  {line}" for line in steady),
        "  for (int64_t i = from; i < to; i++) {",
        f"    const int64_t t = {'call.num_steps - 1 - i' if way == 'backward' else 'i'};",
        "    const int64_t end = call.rows[t] < last ? call.rows[t] : last, start = call.starts[t];",
        f"    if (end <= first) {rest};",
        "    (void)start;",
        *(f"    {line}" for line in each),
        *(f"    {line}" for line in step),
        "  }",
        "}",
    ]
    is_large = "true" if made.usually_shares_columns else "false"
    lines += [
        f'extern "C" Loop* {way}_work(const Call* call, int64_t first, int64_t last, int64_t from, int64_t to,',
        "                               int rank, int size, Barrier* barrier) {",
        f"  static Loop loop{{{made.work}, {is_large}}};",
        "  if (size == 0) return &loop;",
        f"  if (size == 1) {way}_steps<false>(*call, first, last, from, to, 0, 1, barrier);",
    ]
    if made.shares_columns:
        lines += [
            f"  else if (rank > 0) follow(*call, first, last, rank, size, barrier, {way}_steps<true>);",
            f"  else lead(*call, first, last, size, barrier, {way}_steps<true>, {way}_steps<false>, &loop);",
        ]
    lines += [
        "  if (rank > 0 || to < call->num_steps) return &loop;",
        *(f"  {line}" for line in _final_lines(buffers)),
        "  return &loop;",
        "}",
        f'extern "C" void {way}_pack(const Call* call) {{',
        "  (void)call;",
    ]
    at = 0
    for number, weight in enumerate(made.ir.weights.values()):
        source, target = f"call->weights[{number}]", f"call->packed + {made.packed[number]}"
        if weight.heads > 1:
            size = (made.packed[number + 1] - made.packed[number]) // weight.heads
            lines.append(f"  for (int64_t g = 0; g < {weight.heads}; g++)")
            source, target = f"{source} + g * call->weight_strides[{at}]", f"{target} + g * {size}"
            at += 1
        strides = f"call->weight_strides[{at}], call->weight_strides[{at + 1}]"
        sizes = f"{weight.K}, {weight.N}, {target}"
        lines.append(f"  pack_blocks<{blocks.get(weight, 1)}>({source}, {strides}, {sizes});")
        at += 2
    return [*lines, "}"]


def _final_lines(buffers: list[Buffer]) -> list[str]:
    """Copies of each sequence's last state, or of its first if it has no steps."""
    places = {
        (buffer.role, buffer.index): f"reinterpret_cast<{element_of(buffer)}*>(call->buffers[{at}])"
        for at, buffer in enumerate(buffers)
    }
    copies = []
    for buffer in buffers:
        if buffer.role == "final":
            index, size = buffer.index, buffer.size
            after = f"{places['after', index]} + (call->starts[steps - 1] + b) * {size}"
            source = f"steps ? {after} : {places['initial', index]} + b * {size}"
            target, length = f"{places['final', index]} + b * {size}", f"{size} * sizeof({element_of(buffer)})"
            copies.append(f"__builtin_memcpy({target}, {source}, {length});")
    if not copies:
        return []
    return [
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
    headers = [*HEADERS, "integers.h"] if any(function.has_integers for function in functions) else HEADERS
    parts = [f"#define REAL {CPP_TYPES[dtype]}", header_text(*headers)]
    return "\n".join([*parts, *("\n".join(function.lines) for function in functions), ""])
