"""A loop's body as a Triton module: one kernel for all steps in each direction.

    first = tl.program_id(0) * ROWS                         a program owns neighbouring rows of the sorted batch, and
    steps = tl.load(lengths + first)                        walks as many steps as the longest of them has
    w0_0 = tl.load(...)                                     resident weights
    for i in range(steps):                                  t = i, or the last step less i backward
        going = b < tl.load(rows + t)                       rows that are still running
        after0_b = p3 + (start + b) * 64                    pointers to the rows of this step
        ...                                                 the step, which `emit.py` writes

Nothing is padded but the rest of a program's rows. In a grid of (rows, shares) the programs of one row of the grid
share its rows of the batch; they count in memory of their own how many of them have arrived where they meet.
"""

import functools
import hashlib
import linecache
import threading
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from stretto.graph import Body
from stretto.kernels.backends.triton import interpreter
from stretto.kernels.backends.triton.emit import BARRIER, MEETING, Products, StepWriter, Tiles, check_supported
from stretto.kernels.backends.triton.ops import FUNCTIONS
from stretto.kernels.backends.triton.package import optional
from stretto.kernels.ir import Buffer, LoopIR, Product, Unsupported, Weight, Where
from stretto.kernels.lower import Way, lower
from stretto.kernels.schedule import Item, Schedule

HEADER: Final = """
import triton
import triton.language as tl
from triton.language.extra import libdevice as math


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    b = b.to(a.dtype)
    if WIDEN:
        a = a.to(acc.dtype)
        b = b.to(acc.dtype)
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
"""
MEET: Final = """
@triton.jit
def meet(team, met, SHARES: tl.constexpr):
    met += SHARES
    tl.debug_barrier()
    tl.atomic_add(team, 1, sem="release", scope="gpu")
    while tl.atomic_add(team, 0, sem="acquire", scope="gpu") < met:
        pass
    tl.debug_barrier()
    return met
"""
"""Programs that share rows wait until all have arrived as often; `met` is how many arrivals that is."""
TEAM_STRIDE: Final = 16
"""Counts of two teams lie so far apart that they are not in one line of a cache."""
_COMBINE: Final = {
    "total": "x + y",
    "largest": "tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)",
    "smallest": "tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)",
}
_REDUCE: Final = {"reduce_sum": "total", "reduce_max": "largest", "reduce_min": "smallest"}
REDUCTIONS: Final = {
    name: (
        f"\n@triton.jit\ndef {combine}(x, y):\n    return {_COMBINE[combine]}\n"
        f"\n\n@triton.jit\ndef {name}(x):\n    return tl.reduce(x, 2, {combine})\n"
    )
    for name, combine in _REDUCE.items()
}
"""Functions that reduce the last dimension of a tile; NaN passes through, as with torch's."""
_lock: Final = threading.Lock()


@final
@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """One direction of a loop.

    Attributes:
        ir: What it reads and writes.
        buffers: Those with a pointer, in order; the last ones are uniform.
        scratch: Elements of scratch memory per row.
        has_integers: Whether scratch memory holds integers, too.
        has_checks: Whether it may find an error.
        passes: Loops over a row's elements per step.
        num_barriers: Barriers of a program, or meetings of several, per step.
        num_fused: Products per step whose results stay in registers.
        products: What is multiplied, in order.
        functions: The functions it calls.
        source: The kernel.
        arguments: The names of its arguments that are no constants, in order.
    """

    ir: LoopIR
    buffers: list[Buffer]
    scratch: int
    has_integers: bool
    has_checks: bool
    passes: int
    num_barriers: int
    num_fused: int
    products: list[Products]
    functions: frozenset[str]
    source: str
    arguments: tuple[str, ...]

    @property
    def weights(self) -> list[Weight]:
        """The matrices of products."""
        return list(self.ir.weights.values())


@functools.lru_cache(maxsize=64)
def generate(body: Body, way: Way, tiles: Tiles) -> Generated:
    """The code of a loop in one direction.

    Raises:
        Unsupported: If no code can be generated.
    """
    ir = lower(body, way)
    schedule = Schedule(ir.roots)
    check_supported(schedule)
    writer = StepWriter(schedule, list(ir.weights.values()), ir.buffers, tiles)
    step = writer.lines()
    scratch, private = (max(schedule.sizes[where], 1) for where in (Where.SCRATCH, Where.PRIVATE))
    befores = [buffer.index for buffer in writer.used if buffer.where is Where.BEFORE]
    passed = {
        buffer: f"p{number}"
        for number, buffer in enumerate(ir.buffers)
        if buffer in writer.used
        or buffer.where is Where.UNIFORM
        or (buffer.role == "initial" and buffer.index in befores)
    }
    strides = [f"{buffer.name}_stride" for buffer in passed if buffer.where is Where.STRIDED]
    weights = [f"w{number}" for number in range(len(ir.weights))]
    memory = ["scratch", "integers", "errors", *(["arrived"] if tiles.shares > 1 else [])]
    tables = ["starts", "rows", "lengths"]
    arguments = (*passed.values(), *strides, *weights, *memory, *tables, "num_rows")
    constants = ["ROWS", "KEEP", "REAL", "WEIGHT", "PRECISION", "WIDEN", *(["SHARES"] if tiles.shares > 1 else [])]
    team = [
        "    share = tl.program_id(1)",
        f"    team = arrived + tl.program_id(0) * {TEAM_STRIDE}",
        "    met = (first * 0).to(tl.int64)",
    ]
    lines = [
        "@triton.jit",
        f"def {way}({', '.join(arguments)}, {', '.join(f'{name}: tl.constexpr' for name in constants)}):",
        "    first = tl.program_id(0) * ROWS",
        "    b = (first + tl.arange(0, ROWS)).to(tl.int64)",
        "    steps = tl.load(lengths + first).to(tl.int32)",
        *(team if tiles.shares > 1 else []),
        *(f"    {line}" for line in writer.ahead),
        "    for i in range(steps):",
        f"        t = {'steps - 1 - i' if way == 'backward' else 'i'}",
        "        start = tl.load(starts + t)",
        "        going = b < tl.load(rows + t)",
        *(f"        {line}" for line in _pointers(writer.used, ir, scratch, scratch + private)),
        *(f"        {line}" for line in step),
    ]
    products = [value for value in schedule.order if isinstance(value, Product)]
    return Generated(
        ir=ir,
        buffers=list(passed),
        scratch=scratch + private,
        has_integers=any(item.buffer.integer for group in schedule.groups for item in group.items),
        has_checks=writer.has_checks,
        passes=len(schedule.groups) - len(products),
        num_barriers=sum(line in {BARRIER, MEETING} for line in step),
        num_fused=writer.num_fused,
        products=writer.products,
        functions=frozenset(writer.functions),
        source="\n".join(lines),
        arguments=arguments,
    )


@final
@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """One direction of a loop in pieces: kernels for one step each, and products between them.

    Attributes:
        ir: What it reads and writes.
        buffers: Those with a pointer, in order; the last ones are uniform.
        scratch: Elements of scratch memory per row.
        private: Elements before those that are private to a thread on a CPU.
        has_integers: Whether scratch memory holds integers, too.
        steps: What a step does, in order: a kernel of the module, by name, or a product.
        source: The module.
        arguments: The names of a kernel's arguments that are no constants, in order; the number of the step follows.
    """

    ir: LoopIR
    buffers: list[Buffer]
    scratch: int
    private: int
    has_integers: bool
    steps: list[str | Item]
    source: str
    arguments: tuple[str, ...]

    @property
    def num_launches(self) -> int:
        """Kernels and products per step."""
        return len(self.steps)

    @property
    def num_products(self) -> int:
        """Products per step."""
        return sum(not isinstance(part, str) for part in self.steps)


@functools.lru_cache(maxsize=64)
def generate_pieces(body: Body, way: Way, tiles: Tiles) -> Pieces:
    """The code of a loop in one direction, without its products.

    Raises:
        Unsupported: If no code can be generated, or a step may find an error, for which nobody could wait.
    """
    ir = lower(body, way)
    schedule = Schedule(ir.roots)
    check_supported(schedule)
    writer = StepWriter(schedule, list(ir.weights.values()), ir.buffers, tiles)
    found = writer.pieces()
    if writer.has_checks:
        raise Unsupported("a step that may find an error, such as an index out of range")
    scratch, private = (max(schedule.sizes[where], 1) for where in (Where.SCRATCH, Where.PRIVATE))
    used = {buffer for part in found if not isinstance(part, Item) for buffer in part.used}
    befores = [buffer.index for buffer in used if buffer.where is Where.BEFORE]
    names = {
        buffer: f"p{number}"
        for number, buffer in enumerate(ir.buffers)
        if buffer in used or buffer.where is Where.UNIFORM or (buffer.role == "initial" and buffer.index in befores)
    }
    strides = [f"{buffer.name}_stride" for buffer in names if buffer.where is Where.STRIDED]
    weights = [f"w{number}" for number in range(len(ir.weights))]
    memory = ["scratch", "integers", "errors", "starts", "rows", "lengths"]
    arguments = (*names.values(), *strides, *weights, *memory, "num_rows")
    constants = ["ROWS", "KEEP", "REAL", "WEIGHT", "PRECISION", "WIDEN", *(["SHARES"] if tiles.shares > 1 else [])]
    steps: list[str | Item] = []
    texts: list[str] = []
    for part in found:
        if isinstance(part, Item):
            steps.append(part)
            continue
        steps.append(f"{way}{len(texts)}")
        lines = [
            '@triton.jit(do_not_specialize=["t"])',
            f"def {steps[-1]}({', '.join(arguments)}, t, {', '.join(f'{name}: tl.constexpr' for name in constants)}):",
            "    b = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)",
            *(["    share = tl.program_id(1)"] if tiles.shares > 1 else []),
            "    start = tl.load(starts + t)",
            "    going = b < tl.load(rows + t)",
            *(f"    {line}" for line in _pointers(part.used, ir, scratch, scratch + private)),
            *(f"    {line}" for line in part.lines),
        ]
        texts.append("\n".join(lines))
    functions = REDUCTIONS | FUNCTIONS
    called = [functions[name] for name in sorted(writer.functions)]
    return Pieces(
        ir=ir,
        buffers=list(names),
        scratch=scratch + private,
        private=scratch,
        has_integers=any(item.buffer.integer for group in schedule.groups for item in group.items),
        steps=steps,
        source="\n".join([HEADER, *called, *(f"\n{text}\n" for text in texts)]),
        arguments=arguments,
    )


def _pointers(used: Iterable[Buffer], ir: LoopIR, scratch: int, width: int) -> list[str]:
    """Where the rows of this step begin in each buffer."""
    places = {buffer: f"p{number}" for number, buffer in enumerate(ir.buffers)}
    lines: list[str] = []
    for buffer in used:
        base, name, size = places.get(buffer, ""), f"{buffer.name}_b", buffer.size
        if buffer.where is Where.BEFORE:
            initial = f"p{ir.buffers.index(buffer) + 1}"
            lines += ["if t > 0:", f"    {name} = {base} + (tl.load(starts + t - 1) + b) * {size}"]
            lines += ["else:", f"    {name} = {initial} + b * {size}"]
        elif buffer.where is Where.SAVED:
            lines += ["if KEEP:", f"    {name} = {base} + (start + b) * {size}"]
            lines += ["else:", f"    {name} = {base} + b * {size}"]
        else:
            memory = "integers" if buffer.integer else "scratch"
            text = {
                Where.ROW: f"{base} + b * {size}",
                Where.PACKED: f"{base} + (start + b) * {size}",
                Where.STRIDED: f"{base} + (start + b) * {buffer.name}_stride",
                Where.CARRY_IN: f"{base} + (((t + 1) & 1) * num_rows + b) * {size}",
                Where.CARRY_OUT: f"{base} + ((t & 1) * num_rows + b) * {size}",
                Where.SCRATCH: f"{memory} + b * {width} + {buffer.index}",
                Where.PRIVATE: f"{memory} + b * {width} + {scratch + buffer.index}",
            }[buffer.where]
            lines.append(f"{name} = {text}")
    return lines


def source_of(functions: list[Generated]) -> str:
    """A whole module."""
    called = sorted({name for function in functions for name in function.functions})
    functions_of = REDUCTIONS | FUNCTIONS
    meets = any("arrived" in function.arguments for function in functions)
    parts = [HEADER, *([MEET] if meets else []), *(functions_of[name] for name in called)]
    return "\n".join([*parts, *(f"\n{function.source}\n" for function in functions)])


def load(source: str, *, interpreted: bool) -> types.ModuleType:
    """A module of kernels, to compile or to interpret.

    Triton reads the text of functions where tracebacks do, so that it need not be in a file. Whether a function will be
    interpreted is settled where it is decorated.
    """
    with _lock:
        return _load(source, interpreted)


@functools.lru_cache(maxsize=256)
def _load(source: str, interpreted: bool) -> types.ModuleType:
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    name = f"<stretto triton {digest}{' interpreted' if interpreted else ''}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = types.ModuleType(f"stretto_triton_{digest}")
    knobs = optional("triton").knobs
    with knobs.runtime.scope():
        knobs.runtime.interpret = interpreted
        exec(compile(source, name, "exec"), module.__dict__)  # noqa: S102 - text that is generated above, from numbers
    if interpreted:
        interpreter.complete(module)
    return module
