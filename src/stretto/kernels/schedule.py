"""The order of a step's work: which values lie in memory, and which loops compute them together."""

from dataclasses import dataclass, field
from typing import Literal, final

from stretto.kernels.expression import (
    AbstractExpression,
    Apply,
    Load,
    Resolver,
    address,
    can_reshape,
    join_needs_memory,
    starts_of,
)
from stretto.kernels.lower import Unsupported
from stretto.kernels.rows import (
    AbstractValue,
    Affine,
    Buffer,
    Constant,
    Join,
    Map,
    Product,
    Read,
    Reduce,
    Reshape,
    Root,
    View,
    Where,
    contiguous,
    identity,
    operands_of,
    size_of,
)

ALIGNMENT = 32
"""Elements that rows of scratch memory are rounded up to: a panel of the widest vectors."""


@final
@dataclass(eq=False, slots=True)
class Item:
    """One piece of work: a store at every place of a loop, a reduction, or a product.

    Attributes:
        kind: What it is.
        value: What it computes.
        dims: Sizes of its loop.
        axes: Dimensions of the loop that a reduction sums over.
        expression: What is stored or summed.
        buffer: Where the result goes.
        target: The place there.
    """

    kind: Literal["store", "reduce", "product"]
    value: AbstractValue
    dims: tuple[int, ...]
    axes: tuple[int, ...]
    expression: AbstractExpression | None
    buffer: Buffer
    target: Affine


@final
@dataclass(eq=False, slots=True)
class Group:
    """Items that share one loop."""

    kind: Literal["store", "reduce", "product"]
    dims: tuple[int, ...]
    axes: tuple[int, ...]
    items: list[Item] = field(default_factory=list)


@final
@dataclass(slots=True)
class Schedule:
    """Groups in order, with the scratch memory they need for each row."""

    groups: list[Group]
    homes: dict[AbstractValue, Buffer]
    scratch: int
    private: int


@final
class Scheduler:
    """Orders the work that leads to some roots."""

    def __init__(self, roots: list[Root]) -> None:
        self.roots = roots
        self.order = _in_order([root.value for root in roots])
        self.homes: dict[AbstractValue, Buffer] = {}
        self.sizes = {Where.SCRATCH: 0, Where.PRIVATE: 0}
        self.copies: list[Root] = []

    def __call__(self) -> Schedule:
        """The schedule."""
        self._choose_homes()
        items = self._items()
        groups = self._grouped(items)
        return Schedule(groups, self.homes, self.sizes[Where.SCRATCH], self.sizes[Where.PRIVATE])

    def _scratch(self, dims: tuple[int, ...], *, where: Where = Where.SCRATCH, padded: bool = False) -> Buffer:
        strides = contiguous(dims)
        size = size_of(dims)
        if padded:
            width = -(-dims[-1] // ALIGNMENT) * ALIGNMENT
            strides = (*(stride // dims[-1] * width for stride in strides[:-1]), 1)
            size = size // dims[-1] * width
        offset = self.sizes[where]
        self.sizes[where] += -(-size // ALIGNMENT) * ALIGNMENT
        return Buffer(f"{where.value}{offset}", where, strides, offset)

    def _choose_homes(self) -> None:
        for root in self.roots:
            fixed = isinstance(root.value, (Product, Reduce, Read, Constant)) or root.value in self.homes
            if fixed:
                self.copies.append(root)
            else:
                self.homes[root.value] = root.buffer
        uses: dict[AbstractValue, int] = {}
        for value in self.order:
            for item in operands_of(value):
                uses[item] = uses.get(item, 0) + 1
        for value in self.order:
            self._choose_home(value, often=uses.get(value, 0) > 1)
            self._settle_joins(value)
        # What became a place in memory of its own may be read through a view of a join.
        for value in self.order:
            if value in self.homes and isinstance(value, (View, Reshape)) and isinstance(value.base, Join):
                self._settle(value.base)

    def _choose_home(self, value: AbstractValue, *, often: bool) -> None:
        if isinstance(value, Product):
            self.homes[value] = self._scratch(value.dims, padded=True)
            if self.pointer(value.operand) is None:
                # A product reads its operand from memory, element after element.
                self._settle(value.operand)
        elif isinstance(value, Reduce):
            self.homes[value] = self._scratch(value.dims, where=Where.PRIVATE)
        elif isinstance(value, Map) and value.costly and often:
            self._settle(value)
        elif isinstance(value, Reshape) and not can_reshape(value):
            self._settle(value.base, contiguously=True)

    def _settle_joins(self, value: AbstractValue) -> None:
        for item in operands_of(value):
            if isinstance(item, Join) and not (isinstance(value, View) and not join_needs_memory(value)):
                self._settle(item)

    def _settle(self, value: AbstractValue, *, contiguously: bool = False) -> None:
        if isinstance(value, (Read, Constant)):
            return
        if value not in self.homes:
            self.homes[value] = self._scratch(value.dims)
        elif contiguously and self.homes[value].strides != contiguous(value.dims):
            raise Unsupported("a reshape of padded memory")

    def pointer(self, value: AbstractValue) -> tuple[Buffer, int] | None:
        """Where a value lies as a run of elements, if it does."""
        if isinstance(value, Read) or value in self.homes:
            buffer = value.buffer if isinstance(value, Read) else self.homes[value]
            return (buffer, 0) if buffer.strides == contiguous(value.dims) or len(value.dims) == 1 else None
        if isinstance(value, Reshape):
            return self.pointer(value.base)
        if isinstance(value, View):
            base = self.pointer(value.base)
            if base is None:
                return None
            rank = len(value.dims)
            place = address(contiguous(value.base.dims), value.index, rank)
            moving = tuple(0 if size == 1 else factor for size, factor in zip(value.dims, place.factors, strict=True))
            wanted = tuple(
                0 if size == 1 else factor for size, factor in zip(value.dims, contiguous(value.dims), strict=True)
            )
            return (base[0], base[1] + place.constant) if moving == wanted else None
        return None

    def _items(self) -> list[Item]:
        items: list[Item] = []
        resolve = Resolver(self.homes)
        for value in self.order:
            if isinstance(value, Product):
                items.append(Item("product", value, value.dims, (), None, self.homes[value], Affine(0, ())))
            elif isinstance(value, Reduce):
                dims = value.operand.dims
                whole = resolve.over(dims)(value.operand, identity(dims), rank=len(dims))
                index = tuple(
                    Affine(0, tuple(int(i == d and d not in value.axes) for i in range(len(dims))))
                    for d in range(len(dims))
                )
                target = address(self.homes[value].strides, index, len(dims))
                items.append(Item("reduce", value, dims, value.axes, whole, self.homes[value], target))
            elif value in self.homes:
                items += self._stores(value, self.homes[value], resolve)
        for root in self.copies:
            items += self._stores(root.value, root.buffer, resolve, copy=True)
        return items

    def _stores(
        self, value: AbstractValue, buffer: Buffer, resolve: Resolver, *, copy: bool = False, offset: int = 0
    ) -> list[Item]:
        if isinstance(value, Join) and not copy:
            made: list[Item] = []
            for part, start in starts_of(value):
                place = offset + start * buffer.strides[value.axis]
                if isinstance(part, Join) and part not in self.homes:
                    made += self._stores(part, buffer, resolve, offset=place)
                    continue
                rank = len(part.dims)
                expression = resolve.over(part.dims)(part, identity(part.dims), rank=rank)
                target = address(buffer.strides, identity(part.dims), rank)
                target = Affine(place, target.factors)
                made.append(Item("store", value, part.dims, (), expression, buffer, target))
            return made
        rank = len(value.dims)
        expression = resolve.over(value.dims)(value, identity(value.dims), rank=rank, fresh=not copy)
        target = address(buffer.strides, identity(value.dims), rank)
        target = Affine(target.constant + offset, target.factors)
        return [Item("store", value, value.dims, (), expression, buffer, target)]

    def _grouped(self, items: list[Item]) -> list[Group]:
        groups: list[Group] = []
        placed: dict[Buffer, list[tuple[Item, int]]] = {}
        for item in items:
            earliest = 0
            for load in self._reads(item):
                makers = placed.get(load.buffer, [])
                same = [
                    (maker, at)
                    for maker, at in makers
                    if maker.kind == "store" and _same_place(maker, item, load.address)
                ]
                if same and item.kind == "store":
                    earliest = max(earliest, same[0][1])
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

    def _reads(self, item: Item) -> list[Load]:
        if isinstance(item.value, Product) and item.kind == "product":
            place = self.pointer(item.value.operand)
            assert place is not None
            return [Load(place[0], Affine(place[1], ()))]
        return loads_in(item.expression)


def _same_place(maker: Item, item: Item, at: Affine) -> bool:
    return maker.dims == item.dims and (maker.target.constant, maker.target.factors) == (at.constant, at.factors)


def loads_in(expression: AbstractExpression | None) -> list[Load]:
    """Every load of an expression, each once."""
    found: dict[Load, None] = {}
    seen: set[AbstractExpression] = set()
    waiting = [expression]
    while waiting:
        item = waiting.pop()
        if item is None or item in seen:
            continue
        seen.add(item)
        if isinstance(item, Load):
            found[item] = None
        elif isinstance(item, Apply):
            waiting.extend(item.operands)
    return list(found)


def _in_order(roots: list[AbstractValue]) -> list[AbstractValue]:
    done: dict[AbstractValue, None] = {}
    for root in roots:
        waiting = [root]
        while waiting:
            top = waiting[-1]
            missing = [item for item in operands_of(top) if item not in done]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            done[top] = None
    return list(done)
