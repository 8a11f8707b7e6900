"""Values of one row of the batch: what generated code computes, step by step.

A row's value has dimensions of its own, without the batch. Views, products and reductions are kept apart from pointwise
work, so that the latter can be fused into whatever reads it.
"""

from dataclasses import dataclass
from enum import Enum
from typing import final


class Where(str, Enum):
    """How a buffer's rows are found."""

    PACKED = "packed"  # a row for each step of each sequence
    STORED = "stored"  # like PACKED, or one row for each sequence where nothing is to be kept
    BEFORE = "before"  # the rows of a state's packed buffer one step earlier, or its initial rows at step 0
    ROW = "row"  # a row for each sequence
    ARRIVING = "arriving"  # like PACKED, with a distance between rows that is known when the loop runs
    CARRY_IN = "carry_in"  # the gradient of a state, from the step that ran before
    CARRY_OUT = "carry_out"  # the gradient of a state, for the step that runs next
    ONCE = "once"  # the same for all
    SCRATCH = "scratch"  # a row for each sequence that lives within a step
    PRIVATE = "private"  # likewise, one for each thread


@final
@dataclass(eq=False, slots=True)
class Buffer:
    """Memory that rows are read from or written to.

    Attributes:
        name: Its name in the generated code.
        where: How its rows are found.
        strides: Of its dimensions within a row.
        offset: Of the row's start, in scratch memory.
        size: Elements of a row.
        parts: Blocks of equal size, such as gates, whose panels alternate.
    """

    name: str
    where: Where
    strides: tuple[int, ...]
    offset: int = 0
    size: int = 0
    parts: int = 1


@final
@dataclass(eq=False, slots=True)
class Affine:
    """An index: a constant and a multiple of each dimension's position."""

    constant: int
    factors: tuple[int, ...]


@dataclass(eq=False, slots=True)
class AbstractValue:
    """Something a row has, of sizes `dims`."""

    dims: tuple[int, ...]


@final
@dataclass(eq=False, slots=True)
class Read(AbstractValue):
    """What lies in a buffer."""

    buffer: Buffer


@final
@dataclass(eq=False, slots=True)
class Constant(AbstractValue):
    """One number everywhere."""

    number: float


@final
@dataclass(eq=False, slots=True)
class Map(AbstractValue):
    """Pointwise work: a C++ expression in which `{0}`, `{1}`, ... stand for the operands."""

    template: str
    operands: tuple[AbstractValue, ...]
    costly: bool = False


@final
@dataclass(eq=False, slots=True)
class View(AbstractValue):
    """Another value looked at differently: an index for each of its dimensions."""

    base: AbstractValue
    index: tuple[Affine, ...]


@final
@dataclass(eq=False, slots=True)
class Reshape(AbstractValue):
    """Another value's elements, in the same order, under other sizes."""

    base: AbstractValue


@final
@dataclass(eq=False, slots=True)
class Reduce(AbstractValue):
    """A sum, maximum or minimum over some dimensions, which stay with size 1."""

    kind: str
    operand: AbstractValue
    axes: tuple[int, ...]


@final
@dataclass(eq=False, slots=True)
class Weight:
    """A matrix that stays the same over all steps: K rows, N columns, packed once; see `Buffer` for `parts`."""

    name: str
    K: int
    N: int
    parts: int = 1


@final
@dataclass(eq=False, slots=True)
class Product(AbstractValue):
    """Row vectors times a weight matrix."""

    operand: AbstractValue
    weight: Weight


@final
@dataclass(eq=False, slots=True)
class Join(AbstractValue):
    """Values side by side along one dimension."""

    parts: tuple[AbstractValue, ...]
    axis: int


@final
@dataclass(eq=False, slots=True)
class Root:
    """A value that must end up in a buffer."""

    value: AbstractValue
    buffer: Buffer


def contiguous(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of sizes laid out one after another."""
    strides: list[int] = []
    step = 1
    for size in reversed(dims):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def size_of(dims: tuple[int, ...]) -> int:
    """Elements."""
    count = 1
    for size in dims:
        count *= size
    return count


def identity(dims: tuple[int, ...]) -> tuple[Affine, ...]:
    """The index that changes nothing."""
    rank = len(dims)
    return tuple(Affine(0, tuple(int(i == d) for i in range(rank))) for d in range(rank))


def operands_of(value: AbstractValue) -> tuple[AbstractValue, ...]:
    """The values that `value` is computed from."""
    if isinstance(value, Map):
        return value.operands
    if isinstance(value, (View, Reshape)):
        return (value.base,)
    if isinstance(value, (Reduce, Product)):
        return (value.operand,)
    if isinstance(value, Join):
        return value.parts
    return ()
