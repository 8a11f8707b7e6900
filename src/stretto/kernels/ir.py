"""The loop IR: what a step computes for one row of the batch, in named operators and without any target's text.

    body of a loop --lower--> values of one row --schedule--> loops over a row's elements --backend--> code

A value is that of one row, without the batch dimension. Views, products and reductions are kept apart from pointwise
work, so that the latter can be fused into whatever reads it: `h = tanh(x + W h)` is

    Map tanh -- Map add -+- Read per_step0
                         +- Product weight0 -- Read before0
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, final

from stretto.graph import Node, topological_sort


class Unsupported(Exception):  # noqa: N818 - not an error: another backend runs instead, and the message says why
    """A backend cannot run something; the message says what."""


class Where(str, Enum):
    """How a buffer's rows are found."""

    PACKED = "packed"  # a row for each step of each sequence
    SAVED = "saved"  # like PACKED, or one row for each sequence where no backward pass will follow
    BEFORE = "before"  # the rows of a state's packed buffer one step earlier, or its initial rows at step 0
    ROW = "row"  # a row for each sequence
    STRIDED = "strided"  # like PACKED, with a distance between rows that is known when the loop runs
    CARRY_IN = "carry_in"  # the gradient of a state, from the step that ran before
    CARRY_OUT = "carry_out"  # the gradient of a state, for the step that runs next
    UNIFORM = "uniform"  # the same for all rows and steps
    SCRATCH = "scratch"  # a row for each sequence that lives within a step
    PRIVATE = "private"  # likewise, one for each thread


@final
@dataclass(eq=False, slots=True)
class Buffer:
    """Memory that rows of `size` elements are read from or written to; its role is "after" or "d_output", say."""

    role: str
    index: int
    """Which one of its role; the offset within a row, for scratch memory."""
    where: Where
    strides: tuple[int, ...]
    size: int = 0
    integer: bool = False
    """Whether its elements are 64-bit integers; all others are real numbers."""

    @property
    def name(self) -> str:
        """Unique within a loop."""
        return f"{self.role}{self.index}"


@final
@dataclass(frozen=True, slots=True)
class Affine:
    """An index: a constant and a multiple of each dimension's position."""

    constant: int
    factors: tuple[int, ...]


@dataclass(eq=False, slots=True)
class AbstractValue:
    """A value of a row, of sizes `dims`: real numbers, or 64-bit integers. Booleans are real numbers, 1 and 0."""

    dims: tuple[int, ...]
    integer: bool = field(default=False, kw_only=True)


@final
@dataclass(eq=False, slots=True)
class Read(AbstractValue):
    """What lies in a buffer."""

    buffer: Buffer

    def __post_init__(self) -> None:
        self.integer = self.buffer.integer


@final
@dataclass(eq=False, slots=True)
class Constant(AbstractValue):
    """One number everywhere."""

    number: float | int


@final
@dataclass(eq=False, slots=True)
class Position(AbstractValue):
    """The integer that an affine function of the position is."""

    index: Affine

    def __post_init__(self) -> None:
        self.integer = True


@final
@dataclass(eq=False, slots=True)
class Gather(AbstractValue):
    """Elements of a value in memory, whose place along `axis` is computed: `base[place]` with `index` added there.

    The place along `axis` itself is zero. The index has the rank of the result and broadcasts to it.
    """

    base: AbstractValue
    index: AbstractValue
    place: tuple[Affine, ...]
    axis: int

    def __post_init__(self) -> None:
        self.integer = self.base.integer


@final
@dataclass(eq=False, slots=True)
class Map(AbstractValue):
    """A pointwise operator; see `pointwise.py` for the names. Operands broadcast as PyTorch's do."""

    op: str
    operands: tuple[AbstractValue, ...]
    attrs: Mapping[str, Any]
    """Numbers and choices that are known now, such as the slope of a leaky ReLU."""
    costly: bool
    """Whether it is worth a place in memory if it is read more than once."""


@final
@dataclass(eq=False, slots=True)
class View(AbstractValue):
    """A view of another value: an index for each of its dimensions."""

    base: AbstractValue
    index: tuple[Affine, ...]

    def __post_init__(self) -> None:
        self.integer = self.base.integer


@final
@dataclass(eq=False, slots=True)
class Reshape(AbstractValue):
    """Another value's elements, in the same order, under other sizes."""

    base: AbstractValue

    def __post_init__(self) -> None:
        self.integer = self.base.integer


@final
@dataclass(eq=False, slots=True)
class Reduce(AbstractValue):
    """A "sum", "max" or "min" over some dimensions, which stay with size 1."""

    kind: str
    operand: AbstractValue
    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        self.integer = self.operand.integer


@final
@dataclass(eq=False, slots=True)
class Weight:
    """A matrix that stays the same over all steps: K rows, N columns; or one for each head."""

    K: int
    N: int
    heads: int = 1


@final
@dataclass(eq=False, slots=True)
class Product(AbstractValue):
    """Row vectors times a weight matrix; with heads, the last dimension but one is theirs, and each has a matrix."""

    operand: AbstractValue
    weight: Weight


@final
@dataclass(eq=False, slots=True)
class Join(AbstractValue):
    """Values side by side along one dimension."""

    parts: tuple[AbstractValue, ...]
    axis: int

    def __post_init__(self) -> None:
        self.integer = self.parts[0].integer


@final
@dataclass(eq=False, slots=True)
class Root:
    """A value that must end up in a buffer."""

    value: AbstractValue
    buffer: Buffer


@final
@dataclass(eq=False, slots=True)
class LoopIR:
    """One direction of a loop: what every step reads and writes.

    Attributes:
        roots: What a step computes, and where it goes.
        buffers: All memory that is not scratch, in the order in which generated code takes pointers to it.
        weights: The matrices of products, by the node that computes each.
        uniforms: Nodes of the buffers that are the same for all rows and steps, which come last in `buffers`.
        prepared: Nodes to compute before the loop, from weights alone, in order.
    """

    roots: list[Root]
    buffers: list[Buffer]
    weights: dict[Node, Weight]
    uniforms: list[Node]
    prepared: list[Node]


def contiguous(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of sizes laid out one after another."""
    strides: list[int] = []
    step = 1
    for size in reversed(dims):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def unit(dimension: int | None, rank: int) -> Affine:
    """The position along one of `rank` dimensions; always 0 for None."""
    return Affine(0, tuple(int(i == dimension) for i in range(rank)))


def identity(dims: tuple[int, ...]) -> tuple[Affine, ...]:
    """The index that changes nothing."""
    return tuple(unit(d, len(dims)) for d in range(len(dims)))


def operands_of(value: AbstractValue) -> tuple[AbstractValue, ...]:
    """The values that `value` is computed from."""
    if isinstance(value, Map):
        return value.operands
    if isinstance(value, (View, Reshape)):
        return (value.base,)
    if isinstance(value, (Reduce, Product)):
        return (value.operand,)
    if isinstance(value, Gather):
        return (value.base, value.index)
    if isinstance(value, Join):
        return value.parts
    return ()


def in_order(roots: Iterable[Root]) -> list[AbstractValue]:
    """All values that the roots need, each behind its operands."""
    return topological_sort((root.value for root in roots), operands_of)
