"""What a loop over a row's elements computes at each place: loads from buffers, and arithmetic on them."""

from dataclasses import dataclass
from typing import final

from stretto.kernels.rows import (
    AbstractValue,
    Affine,
    Buffer,
    Constant,
    Join,
    Map,
    Read,
    Reshape,
    View,
    contiguous,
    identity,
)


@dataclass(eq=False, slots=True)
class AbstractExpression:
    """Computed at every place of a loop."""


@final
@dataclass(eq=False, slots=True)
class Load(AbstractExpression):
    """An element of a buffer."""

    buffer: Buffer
    address: Affine


@final
@dataclass(eq=False, slots=True)
class Number(AbstractExpression):
    """The same at every place."""

    number: float


@final
@dataclass(eq=False, slots=True)
class Apply(AbstractExpression):
    """Arithmetic on other expressions."""

    template: str
    operands: tuple[AbstractExpression, ...]


@final
class Resolver:
    """Finds the expression of a value at an index.

    Args:
        homes: Values that lie in memory; all others are computed where they are read.
    """

    def __init__(self, homes: dict[AbstractValue, Buffer]) -> None:
        self.homes = homes
        self._made: dict[object, AbstractExpression] = {}

    def __call__(
        self, value: AbstractValue, index: tuple[Affine, ...], *, rank: int, fresh: bool = False
    ) -> AbstractExpression:
        """The expression of `value` at `index`, an affine function of a loop over `rank` dimensions.

        `fresh` computes the value itself even if it has a place in memory.
        """
        key = (id(value), rank, fresh, tuple((part.constant, part.factors) for part in index))
        if key not in self._made:
            self._made[key] = self._find(value, index, rank, fresh)
        return self._made[key]

    def _find(  # noqa: PLR0911 - one return a kind of value
        self, value: AbstractValue, index: tuple[Affine, ...], rank: int, fresh: bool
    ) -> AbstractExpression:
        if isinstance(value, Read):
            return self._load(value.buffer, index, rank)
        if value in self.homes and not fresh:
            return self._load(self.homes[value], index, rank)
        if isinstance(value, Constant):
            return Number(value.number)
        if isinstance(value, Map):
            return Apply(value.template, tuple(self._operand(item, index, rank) for item in value.operands))
        if isinstance(value, View):
            return self(value.base, composed(value.index, index, rank), rank=rank)
        if isinstance(value, Reshape):
            through = reshaped_index(value.base.dims, value.dims, index, rank)
            if through is None:
                return self._flat(value, index, rank)
            return self(value.base, through, rank=rank)
        if isinstance(value, Join):
            for part, start in starts_of(value):
                shifted = list(index)
                shifted[value.axis] = Affine(index[value.axis].constant - start, index[value.axis].factors)
                if _inside(shifted[value.axis], part.dims[value.axis], self._sizes):
                    return self(part, tuple(shifted), rank=rank)
        raise AssertionError(f"{type(value).__name__} is read without a place in memory")

    _sizes: tuple[int, ...] = ()

    def over(self, sizes: tuple[int, ...]) -> "Resolver":
        """The same, for loops of these sizes."""
        self._sizes = sizes
        self._made = {}
        return self

    def _operand(self, item: AbstractValue, index: tuple[Affine, ...], rank: int) -> AbstractExpression:
        mine = index[len(index) - len(item.dims) :]
        still = Affine(0, (0,) * rank)
        return self(
            item, tuple(still if size == 1 else part for size, part in zip(item.dims, mine, strict=True)), rank=rank
        )

    def _load(self, buffer: Buffer, index: tuple[Affine, ...], rank: int) -> Load:
        return Load(buffer, address(buffer.strides, index, rank))

    def _flat(self, value: Reshape, index: tuple[Affine, ...], rank: int) -> Load:
        base = value.base
        buffer = base.buffer if isinstance(base, Read) else self.homes[base]
        return Load(buffer, address(contiguous(value.dims), index, rank))


def address(strides: tuple[int, ...], index: tuple[Affine, ...], rank: int) -> Affine:
    """The place in memory that an index means."""
    constant = sum(stride * part.constant for stride, part in zip(strides, index, strict=True))
    factors = tuple(
        sum(stride * part.factors[d] for stride, part in zip(strides, index, strict=True)) for d in range(rank)
    )
    return Affine(constant, factors)


def composed(outer: tuple[Affine, ...], inner: tuple[Affine, ...], rank: int) -> tuple[Affine, ...]:
    """An index into a view as an index into its base."""
    return tuple(
        Affine(
            part.constant + sum(f * item.constant for f, item in zip(part.factors, inner, strict=True)),
            tuple(sum(f * item.factors[d] for f, item in zip(part.factors, inner, strict=True)) for d in range(rank)),
        )
        for part in outer
    )


def reshaped_index(
    base: tuple[int, ...], dims: tuple[int, ...], index: tuple[Affine, ...], rank: int
) -> tuple[Affine, ...] | None:
    """An index under sizes `dims` as one under sizes `base`; None where dimensions were merged."""
    found: list[Affine] = []
    still = Affine(0, (0,) * rank)
    position = 0
    for size in base:
        if size == 1:
            found.append(still)
            continue
        group: list[int] = []
        product = 1
        while product < size and position < len(dims):
            product *= dims[position]
            group.append(position)
            position += 1
        if product != size:
            return None
        strides = contiguous(tuple(dims[d] for d in group))
        found.append(address(strides, tuple(index[d] for d in group), rank))
    return tuple(found)


def starts_of(join: Join) -> list[tuple[AbstractValue, int]]:
    """The parts with the place along the axis where each begins."""
    found = []
    start = 0
    for part in join.parts:
        found.append((part, start))
        start += part.dims[join.axis]
    return found


def _inside(index: Affine, size: int, sizes: tuple[int, ...]) -> bool:
    low = index.constant + sum(min(f * (n - 1), 0) for f, n in zip(index.factors, sizes, strict=True))
    high = index.constant + sum(max(f * (n - 1), 0) for f, n in zip(index.factors, sizes, strict=True))
    return low >= 0 and high < size


def can_reshape(reshape: Reshape) -> bool:
    """Whether the value can be read through the reshape without lying in memory."""
    return reshaped_index(reshape.base.dims, reshape.dims, identity(reshape.dims), len(reshape.dims)) is not None


def join_needs_memory(view: View) -> bool:
    """Whether a view of a join reaches into more than one part."""
    join = view.base
    assert isinstance(join, Join)
    rank = len(view.dims)
    through = view.index[join.axis]
    return not any(
        _inside(Affine(through.constant - start, through.factors[:rank]), part.dims[join.axis], view.dims)
        for part, start in starts_of(join)
    )
