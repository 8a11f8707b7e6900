"""The order of a step's work: which values lie in memory, and which loops over a row compute them together.

    value of a row          its home          groups, in order

    Map tanh                after0            1. product   scratch0 = before0 times the weight
      Map add               none              2. loop      after0[j] = tanh(per_step0[j] + scratch0[j])
        Read per_step0      per_step0
        Product             scratch0

A value has a home if it must lie in memory: a root, the result and the operand of a product, a reduction, what is
costly and read more than once, and what a reshape needs in one piece. Everything else is computed where it is read.
Pointwise work over the same sizes joins an earlier loop if what it reads is ready by then, so that few loops are left.

Nothing here depends on the target.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, final

from stretto.kernels.ir import (
    AbstractValue,
    Affine,
    Buffer,
    Constant,
    Gather,
    Join,
    Map,
    Position,
    Product,
    Read,
    Reduce,
    Reshape,
    Root,
    Unsupported,
    View,
    Where,
    contiguous,
    identity,
    in_order,
    operands_of,
    unit,
)

ALIGNMENT: Final = 32
"""Elements that rows of scratch memory are rounded up to: a panel of the widest vectors."""


@final
@dataclass(eq=False, slots=True)
class Load:
    """An element of a buffer; or any of them, if it stands for a `Fetch`."""

    buffer: Buffer
    address: Affine
    anywhere: bool = False


@final
@dataclass(eq=False, slots=True)
class Fetch:
    """An element of a buffer at a computed place: `index` times `stride` behind the address."""

    load: Load
    index: "Expression"
    stride: int
    size: int
    """The index is below it."""


@final
@dataclass(eq=False, slots=True)
class Apply:
    """A pointwise operator of other expressions."""

    op: str
    attrs: Mapping[str, Any]
    operands: "tuple[Expression, ...]"


Expression: TypeAlias = Load | Fetch | Apply | Constant | Position
"""What is computed at every place of a loop."""


@final
@dataclass(eq=False, slots=True)
class Item:
    """One piece of work: a store at every place of a loop over `dims`, a reduction over its `axes`, or a product.

    The expression is what is stored or summed; of a product, its operand, which lies in memory as a run of elements.
    """

    kind: Literal["store", "reduce", "product"]
    value: AbstractValue
    dims: tuple[int, ...]
    axes: tuple[int, ...]
    expression: Expression
    buffer: Buffer
    target: Affine
    """The place in the buffer where the result goes."""


@final
@dataclass(eq=False, slots=True)
class Group:
    """Items that share one loop."""

    kind: Literal["store", "reduce", "product"]
    dims: tuple[int, ...]
    axes: tuple[int, ...]
    items: list[Item] = field(default_factory=list)


@final
class Schedule:
    """The work that leads to some roots, in order.

    Attributes:
        groups: Loops over a row's elements, and products, in order.
        order: All values, each behind its operands.
        homes: Where values lie that lie in memory.
        sizes: Elements of scratch memory per row, shared by the threads or private to each.
    """

    def __init__(self, roots: list[Root]) -> None:
        self.order = in_order(roots)
        self.homes: dict[AbstractValue, Buffer] = {}
        self.sizes = {Where.SCRATCH: 0, Where.PRIVATE: 0}
        copies = self._choose_homes(roots)
        self.groups = self._group(self._items(copies))

    def _scratch(self, value: AbstractValue, *, where: Where = Where.SCRATCH, padded: bool = False) -> Buffer:
        dims = value.dims
        strides = contiguous(dims)
        size = math.prod(dims)
        if padded:
            width = -(-dims[-1] // ALIGNMENT) * ALIGNMENT
            strides = (*(stride // dims[-1] * width for stride in strides[:-1]), 1)
            size = size // dims[-1] * width
        offset = self.sizes[where]
        # Scratch memory is counted in real numbers; an integer is as long as one or two of them.
        self.sizes[where] += -(-size // ALIGNMENT) * ALIGNMENT * (1 + value.integer)
        return Buffer(where.value, offset, where, strides, integer=value.integer)

    def _choose_homes(self, roots: list[Root]) -> list[Root]:
        """Find places in memory; returns the roots that are copies of what lies elsewhere."""
        copies = []
        for root in roots:
            fixed = isinstance(root.value, (Product, Reduce, Read, Constant, Position)) or root.value in self.homes
            if fixed:
                copies.append(root)
            else:
                self.homes[root.value] = root.buffer
        uses: dict[AbstractValue, int] = {}
        for value in self.order:
            for item in operands_of(value):
                uses[item] = uses.get(item, 0) + 1
        for value in self.order:
            self._choose_home(value, often=uses.get(value, 0) > 1)
            self._settle_joins(value)
        # A view or reshape that now has a home may read a join in more than one part.
        for value in self.order:
            if value in self.homes and isinstance(value, (View, Reshape)) and isinstance(value.base, Join):
                self._settle(value.base)
        return copies

    def _choose_home(self, value: AbstractValue, *, often: bool) -> None:
        if isinstance(value, Product):
            self.homes[value] = self._scratch(value, padded=True)
            if self._pointer(value.operand) is None:
                # A product reads its operand from memory, element after element.
                self._settle(value.operand)
        elif isinstance(value, Reduce):
            self.homes[value] = self._scratch(value, where=Where.PRIVATE)
        elif isinstance(value, Map) and value.costly and often:
            self._settle(value)
        elif isinstance(value, Gather):
            self._settle(value.base)
            if often:
                self._settle(value)
        elif isinstance(value, Reshape) and not _can_reshape(value):
            self._settle(value.base, contiguously=True)

    def _settle_joins(self, value: AbstractValue) -> None:
        for item in operands_of(value):
            if isinstance(item, Join) and not (isinstance(value, View) and not _join_needs_memory(value)):
                self._settle(item)

    def _settle(self, value: AbstractValue, *, contiguously: bool = False) -> None:
        if isinstance(value, (Read, Constant)):
            return
        if value not in self.homes:
            self.homes[value] = self._scratch(value)
        elif contiguously and self.homes[value].strides != contiguous(value.dims):
            raise Unsupported("a reshape of padded memory")

    def _pointer(self, value: AbstractValue) -> tuple[Buffer, int] | None:
        """Where a value lies as a run of elements, if it does."""
        if isinstance(value, Read) or value in self.homes:
            buffer = value.buffer if isinstance(value, Read) else self.homes[value]
            return (buffer, 0) if buffer.strides == contiguous(value.dims) or len(value.dims) == 1 else None
        if isinstance(value, Reshape):
            return self._pointer(value.base)
        if isinstance(value, View):
            base = self._pointer(value.base)
            if base is None:
                return None
            place = _address(contiguous(value.base.dims), value.index, len(value.dims))
            steps = zip(value.dims, place.factors, contiguous(value.dims), strict=True)
            if all(size == 1 or found == wanted for size, found, wanted in steps):
                return base[0], base[1] + place.constant
        return None

    def _items(self, copies: list[Root]) -> list[Item]:
        items: list[Item] = []
        for value in self.order:
            if isinstance(value, Product):
                place = self._pointer(value.operand)
                assert place is not None
                operand = Load(place[0], Affine(place[1], ()))
                items.append(Item("product", value, value.dims, (), operand, self.homes[value], Affine(0, ())))
            elif isinstance(value, Reduce):
                dims = value.operand.dims
                whole = _Resolver(self.homes, dims)(value.operand, identity(dims))
                index = tuple(unit(None if d in value.axes else d, len(dims)) for d in range(len(dims)))
                target = _address(self.homes[value].strides, index, len(dims))
                items.append(Item("reduce", value, dims, value.axes, whole, self.homes[value], target))
            elif value in self.homes:
                items += self._stores(value, self.homes[value])
        for root in copies:
            items.append(self._store(root.value, root.value, root.buffer))
        return items

    def _stores(self, value: AbstractValue, buffer: Buffer, offset: int = 0) -> list[Item]:
        """What puts a value into a buffer; the parts of a join go there one by one."""
        if not isinstance(value, Join):
            return [self._store(value, value, buffer, offset, compute=True)]
        made: list[Item] = []
        for part, start in _starts_of(value):
            place = offset + start * buffer.strides[value.axis]
            if isinstance(part, Join) and part not in self.homes:
                made += self._stores(part, buffer, place)
            else:
                made.append(self._store(value, part, buffer, place))
        return made

    def _store(
        self, value: AbstractValue, part: AbstractValue, buffer: Buffer, offset: int = 0, *, compute: bool = False
    ) -> Item:
        index = identity(part.dims)
        expression = _Resolver(self.homes, part.dims)(part, index, compute=compute)
        target = _address(buffer.strides, index, len(index))
        return Item("store", value, part.dims, (), expression, buffer, Affine(target.constant + offset, target.factors))

    def _group(self, items: list[Item]) -> list[Group]:
        """Put each item into the first group of its kind and sizes that comes late enough.

        A store may join the very group that makes what it reads, if it reads the element that was just written: the
        value is still in a register then. Everything else that it reads must come from an earlier group.
        """
        groups: list[Group] = []
        placed: dict[Buffer, list[tuple[Item, int]]] = {}
        for item in items:
            earliest = 0
            for load in loads_in(item.expression):
                makers = placed.get(load.buffer, [])
                same = [
                    at
                    for maker, at in makers
                    if not load.anywhere
                    and maker.kind == "store"
                    and (maker.dims, maker.target) == (item.dims, load.address)
                ]
                if same and item.kind == "store":
                    earliest = max(earliest, same[0])
                else:
                    earliest = max([earliest, *(at + 1 for _, at in makers)])
            for at in range(earliest, len(groups)):
                group = groups[at]
                if item.kind != "product" and (group.kind, group.dims, group.axes) == (item.kind, item.dims, item.axes):
                    break
            else:
                at = len(groups)
                groups.append(Group(item.kind, item.dims, item.axes))
            groups[at].items.append(item)
            placed.setdefault(item.buffer, []).append((item, at))
        return groups


def loads_in(expression: Expression) -> list[Load]:
    """Every load of an expression, each once."""
    return [item for item in _parts(expression) if isinstance(item, Load)]


def places_in(expression: Expression) -> list[Affine]:
    """What an expression has of the positions in the loop: addresses, and positions themselves."""
    items = _parts(expression)
    return [
        item.address if isinstance(item, Load) else item.index for item in items if isinstance(item, (Load, Position))
    ]


def _parts(expression: Expression) -> list[Expression]:
    seen: dict[Expression, None] = {}
    waiting = [expression]
    while waiting:
        item = waiting.pop()
        if item not in seen:
            seen[item] = None
            waiting.extend(item.operands if isinstance(item, Apply) else ())
            waiting.extend((item.load, item.index) if isinstance(item, Fetch) else ())
    return list(seen)


@final
class _Resolver:
    """Finds the expression of a value at an index, an affine function of a loop over `sizes`.

    Values that have homes lie in memory; all others are computed where they are read.
    """

    def __init__(self, homes: dict[AbstractValue, Buffer], sizes: tuple[int, ...]) -> None:
        self.homes = homes
        self.sizes = sizes
        self._made: dict[object, Expression] = {}

    def __call__(self, value: AbstractValue, index: tuple[Affine, ...], *, compute: bool = False) -> Expression:
        """The expression of `value` at `index`; `compute` computes it even if it has a place in memory."""
        key = (value, index, compute)
        if key not in self._made:
            self._made[key] = self._find(value, index, compute)
        return self._made[key]

    def _find(self, value: AbstractValue, index: tuple[Affine, ...], compute: bool) -> Expression:  # noqa: PLR0911 - one return a kind of value
        if isinstance(value, Read):
            return self._load(value.buffer, value.buffer.strides, index)
        if value in self.homes and not compute:
            return self._load(self.homes[value], self.homes[value].strides, index)
        if isinstance(value, Constant):
            return value
        if isinstance(value, Position):
            return Position((), _compose((value.index,), index, len(self.sizes))[0])
        if isinstance(value, Gather):
            return self._fetch(value, index)
        if isinstance(value, Map):
            return Apply(value.op, value.attrs, tuple(self._operand(item, index) for item in value.operands))
        if isinstance(value, View):
            return self(value.base, _compose(value.index, index, len(self.sizes)))
        if isinstance(value, Reshape):
            base = value.base
            through = _reshape_index(base.dims, value.dims, index, len(self.sizes))
            if through is not None:
                return self(base, through)
            buffer = base.buffer if isinstance(base, Read) else self.homes[base]
            return self._load(buffer, contiguous(value.dims), index)
        if isinstance(value, Join):
            for part, start in _starts_of(value):
                shifted = list(index)
                shifted[value.axis] = Affine(index[value.axis].constant - start, index[value.axis].factors)
                if _inside(shifted[value.axis], part.dims[value.axis], self.sizes):
                    return self(part, tuple(shifted))
        raise AssertionError(f"{type(value).__name__} is read without a place in memory")

    def _operand(self, item: AbstractValue, index: tuple[Affine, ...]) -> Expression:
        mine = zip(item.dims, index[len(index) - len(item.dims) :], strict=True)
        return self(item, tuple(unit(None, len(self.sizes)) if size == 1 else part for size, part in mine))

    def _fetch(self, value: Gather, index: tuple[Affine, ...]) -> Fetch:
        base = value.base
        buffer = base.buffer if isinstance(base, Read) else self.homes[base]
        place = _compose(value.place, index, len(self.sizes))
        load = Load(buffer, _address(buffer.strides, place, len(self.sizes)), anywhere=True)
        return Fetch(load, self._operand(value.index, index), buffer.strides[value.axis], base.dims[value.axis])

    def _load(self, buffer: Buffer, strides: tuple[int, ...], index: tuple[Affine, ...]) -> Load:
        return Load(buffer, _address(strides, index, len(self.sizes)))


def _address(strides: tuple[int, ...], index: tuple[Affine, ...], rank: int) -> Affine:
    """The place in memory that an index means."""
    constant = sum(stride * part.constant for stride, part in zip(strides, index, strict=True))
    factors = tuple(
        sum(stride * part.factors[d] for stride, part in zip(strides, index, strict=True)) for d in range(rank)
    )
    return Affine(constant, factors)


def _compose(outer: tuple[Affine, ...], inner: tuple[Affine, ...], rank: int) -> tuple[Affine, ...]:
    """An index into a view as an index into its base."""
    return tuple(
        Affine(
            part.constant + sum(f * item.constant for f, item in zip(part.factors, inner, strict=True)),
            tuple(sum(f * item.factors[d] for f, item in zip(part.factors, inner, strict=True)) for d in range(rank)),
        )
        for part in outer
    )


def _reshape_index(
    base: tuple[int, ...], dims: tuple[int, ...], index: tuple[Affine, ...], rank: int
) -> tuple[Affine, ...] | None:
    """An index under sizes `dims` as one under sizes `base`; None where dimensions were merged."""
    found: list[Affine] = []
    position = 0
    for size in base:
        if size == 1:
            found.append(unit(None, rank))
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
        found.append(_address(strides, tuple(index[d] for d in group), rank))
    return tuple(found)


def _starts_of(join: Join) -> list[tuple[AbstractValue, int]]:
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


def _can_reshape(reshape: Reshape) -> bool:
    """Whether the value can be read through the reshape without lying in memory."""
    return _reshape_index(reshape.base.dims, reshape.dims, identity(reshape.dims), len(reshape.dims)) is not None


def _join_needs_memory(view: View) -> bool:
    """Whether a view of a join reaches into more than one part."""
    join = view.base
    assert isinstance(join, Join)
    rank = len(view.dims)
    through = view.index[join.axis]
    return not any(
        _inside(Affine(through.constant - start, through.factors[:rank]), part.dims[join.axis], view.dims)
        for part, start in _starts_of(join)
    )
