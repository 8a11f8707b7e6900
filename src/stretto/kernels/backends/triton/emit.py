"""Triton for the work of one step: a program owns some rows, and each group of the schedule is loops over their tiles.

    for n0 in range(0, 64, 32):                             store: tiles [rows, elements]
        j = n0 + tl.arange(0, 32)
        acc0 = tl.full((ROWS, 32), 0.0, dtype=REAL)         a product whose result only this group reads, in blocks such
        for k0 in range(0, 64, 32): acc0 = dot(...)         as gates, stays in registers
        tl.store(after0_b + j[None, :], ...)
    tl.debug_barrier()                                      only where threads read each other's elements

A reduction works on tiles [rows, kept, reduced]. Weights are read tile by tile in each step (streamed), or, where a
product is a single tile, once before the first step (resident): the compiler then keeps them in shared memory.

Several programs may share the elements of the same rows (cooperative): each takes every so-many-th tile of a loop, the
same ones in each step, and where threads would meet at a barrier all these programs do:

    for n0 in range(share * 32, 512, SHARES * 32):          this program's columns, of every gate
        ...
    met = meet(team, met, SHARES)                           instead of tl.debug_barrier()

Rows are counted in 64 bits; positions within a row in 32.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from stretto.kernels.backends.triton.ops import FUNCTIONS, INTEGER_DIVISIONS, number, template
from stretto.kernels.hazards import Accesses, Hazards
from stretto.kernels.ir import Affine, Buffer, Constant, Position, Product, Reduce, Unsupported, Weight, Where
from stretto.kernels.schedule import Apply, Expression, Fetch, Group, Item, Load, Schedule, loads_in, places_in

INITIAL: Final = {"sum": "0.0", "max": "float('-inf')", "min": "float('inf')"}
INITIAL_INTEGER: Final = {"sum": "0", "max": f"-{1 << 63}", "min": f"{(1 << 63) - 1}"}
COMBINE: Final = {"sum": "{0} + {1}", "max": "largest({0}, {1})", "min": "smallest({0}, {1})"}
MAX_BLOCKS: Final = 8
"""Blocks of a product that are in registers at once."""
BARRIER: Final = "tl.debug_barrier()"
MEETING: Final = "met = meet(team, met, SHARES)"
"""The barrier of all programs that share rows."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How large the tiles are, which are powers of two, and how a program is compiled.

    Attributes:
        rows: Rows of the batch that a program owns.
        elements: Elements of a tile of pointwise work.
        columns: Columns of a tile of a product.
        depth: Elements that a tile of a product sums over.
        reduced: Elements that a tile of a reduction reduces, and a quarter of those it keeps and reduces.
        least: Elements of a side of a product's tile, at least: tensor cores take 16.
        resident: Whether products that fit into one tile read their weights once, before the first step.
        warps: Warps of a program.
        stages: Tiles of a product that are under way at once.
        shares: Programs that share the elements of the same rows, all of which must run at once.
    """

    rows: int = 16
    elements: int = 64
    columns: int = 64
    depth: int = 64
    reduced: int = 64
    least: int = 16
    resident: bool = False
    warps: int = 4
    stages: int = 3
    shares: int = 1


@final
@dataclass(frozen=True, slots=True)
class Products:
    """Products with one weight: blocks of so many columns that are in registers at once, and what each sums over."""

    blocks: int
    columns: int
    depth: int
    heads: int


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a step without products: its code, and the buffers that it reads or writes."""

    lines: list[str]
    used: list[Buffer]


def power_of_two(size: int) -> int:
    """The next one."""
    return 1 << max(0, size - 1).bit_length()


_Axis = tuple[int, list[int]]
"""The size of a dimension of a loop, or of several that were merged, and those."""


@final
class StepWriter:
    """Writes what a program does in one step.

    Attributes:
        used: The buffers that are read or written.
        functions: The functions that are called.
        ahead: What comes before the first step.
        has_checks: Whether the step may find an error, such as an index out of range.
        num_fused: Products whose results stay in registers.
        products: What is multiplied, in order.
    """

    def __init__(self, schedule: Schedule, weights: Sequence[Weight], buffers: Sequence[Buffer], tiles: Tiles) -> None:
        self.schedule = schedule
        self.tiles = tiles
        self.used: dict[Buffer, None] = {}
        self.functions: dict[str, None] = {}
        self.ahead: list[str] = []
        self.has_checks = False
        self.num_fused = 0
        self.products: list[Products] = []
        self._weights = {weight: f"w{number}" for number, weight in enumerate(weights)}
        self._places = {buffer: f"p{number}" for number, buffer in enumerate(buffers)}
        self._resident: set[str] = set()
        self._num_dots = 0
        self._barrier = MEETING if tiles.shares > 1 else BARRIER

    def lines(self) -> list[str]:
        """The code, with the barriers that the threads of a program need, or the programs that share rows."""
        out: list[str] = []
        hazards = Hazards()
        for group, fused in self._units():
            if hazards.must_wait(_accesses(group, fused)):
                out.append(self._barrier)
            if group.kind == "product":
                out += self._product(group.items[0])
            elif group.kind == "store":
                out += self._store(group, fused)
            else:
                out += self._reduce(group)
        return [*out, self._barrier] if hazards.must_wait_at_end() else out

    def pieces(self) -> "list[Item | Piece]":
        """The code cut into kernels: at products, which somebody else makes, and where programs would have to wait."""
        out: list[Item | Piece] = []
        lines: list[str] = []
        hazards = Hazards()

        def cut() -> None:
            if lines:
                out.append(Piece([*lines], [*self.used]))
            lines.clear()
            self.used.clear()

        for group in self.schedule.groups:
            if group.kind == "product":
                cut()
                out.append(group.items[0])
                hazards = Hazards()
                continue
            if hazards.must_wait(_accesses(group, {})):
                cut()
                hazards = Hazards()
                hazards.must_wait(_accesses(group, {}))
            lines += self._store(group, {}) if group.kind == "store" else self._reduce(group)
        cut()
        return out

    # Which products stay in registers

    def _units(self) -> "list[tuple[Group, dict[Item, list[int]]]]":
        """Groups in order, with the products that each takes in, and the first columns of the blocks it reads."""
        units: list[tuple[Group, dict[Item, list[int]]]] = []
        waiting: list[Group] = []
        for group in self.schedule.groups:
            if group.kind == "product":
                waiting.append(group)
                continue
            taken: dict[Item, list[int]] = {}
            for product in waiting:
                item = product.items[0]
                blocks = self._blocks(item, group)
                assert isinstance(item.value, Product)
                weight = item.value.weight
                if blocks is not None and sum(map(len, taken.values())) + len(blocks) <= MAX_BLOCKS:
                    taken[item] = blocks
                    columns = math.prod(group.dims)
                    self.products.append(Products(len(blocks), columns, weight.K, weight.heads))
                else:
                    units.append((product, {}))
                    self.products.append(Products(1, weight.N, weight.K, weight.heads))
            units.append((group, taken))
            waiting = []
            self.num_fused += len(taken)
        for product in waiting:
            assert isinstance(product.items[0].value, Product)
            weight = product.items[0].value.weight
            self.products.append(Products(1, weight.N, weight.K, weight.heads))
        return [*units, *((product, {}) for product in waiting)]

    def _blocks(self, item: Item, after: Group) -> list[int] | None:
        """Blocks of a product's columns that a group reads element by element; None if anything reads it otherwise."""
        assert isinstance(item.value, Product)
        weight, axes = item.value.weight, _axes(after)
        if after.kind != "store" or math.prod(item.value.dims[:-1]) != 1 or len(axes) > 1:
            return None
        size, inner = axes[0] if axes else (1, [])
        found = set()
        for group in self.schedule.groups:
            for load in (load for part in group.items for load in loads_in(part.expression)):
                if load.buffer is item.buffer:
                    start = load.address.constant
                    if group is not after or load.anywhere or start % size or start + size > weight.N:
                        return None
                    if size > 1 and load.address.factors[inner[-1]] != 1:
                        return None
                    found.add(start)
        # What the product reads as a whole must not be what the same group writes tile by tile.
        assert isinstance(item.expression, Load)
        if not found or any(part.buffer is item.expression.buffer for part in after.items):
            return None
        return sorted(found)

    # Loops over tiles, and memory

    def _tiles(self, size: int, tile: int) -> str:
        """The first elements of the tiles that a program takes: all of them, or its share."""
        if self.tiles.shares == 1:
            return f"range(0, {size}, {tile})"
        return f"range(share * {tile}, {size}, SHARES * {tile})"

    def cache(self, buffer: Buffer) -> str:
        """How a tile is read that another program may have written: past the first cache, which is not coherent."""
        return ', cache_modifier=".cg"' if self.tiles.shares > 1 and buffer.where is not Where.UNIFORM else ""

    def row(self, buffer: Buffer, expand: str = "[:, None]") -> str:
        """The text of pointers to a buffer's rows, of one more dimension for each of a tile."""
        if buffer.where is Where.UNIFORM:
            return self._places[buffer]
        self.used[buffer] = None
        return f"{buffer.name}_b{expand}"

    # Products

    def _product(self, item: Item) -> list[str]:
        """A product whose result goes to memory."""
        assert isinstance(item.value, Product)
        weight, target = item.value.weight, item.buffer
        heads, N = weight.heads, weight.N
        many = math.prod(item.value.dims[:-1]) // heads
        width = target.strides[-2] if len(target.strides) > 1 else 0
        source = [f"m * {heads * weight.K}"] * (many > 1) + [f"g * {weight.K}"] * (heads > 1)
        place = [f"m * {heads * width}"] * (many > 1) + [f"g * {width}"] * (heads > 1)
        BN = min(self.tiles.columns, max(self.tiles.least, power_of_two(N)))
        body = [
            f"for n0 in {self._tiles(N, BN)}:",
            f"    j = n0 + tl.arange(0, {BN})",
            f"    acc = tl.full((ROWS, {BN}), 0.0, dtype=REAL)",
            *_indent(self._dots(item, source, [("acc", 0)], N, BN)),
            f"    tl.store({self.row(target)} + ({' + '.join([*place, 'j'])})[None, :], acc, "
            f"mask=going[:, None] & (j < {N})[None, :])",
        ]
        if heads > 1:
            body = [f"for g in range({heads}):", *_indent(body)]
        return [f"for m in range({many}):", *_indent(body)] if many > 1 else body

    def _dots(self, item: Item, source: list[str], targets: list[tuple[str, int]], size: int, BN: int) -> list[str]:
        """Add a row's products with tiles of a weight to accumulators, each of which begins at a column."""
        assert isinstance(item.value, Product)
        assert isinstance(item.expression, Load)
        weight, name = item.value.weight, self._weights[item.value.weight]
        K, N = weight.K, weight.N
        BK = min(self.tiles.depth, max(self.tiles.least, power_of_two(K)))
        offset = item.expression.address.constant
        # Names of their own: a loop must not change the shape of what has a name outside of it.
        self._num_dots += 1
        k, a = f"k{self._num_dots}", f"a{self._num_dots}"
        places = " + ".join([*([str(offset)] if offset else []), *source, k])
        rows = f"tl.load({self.row(item.expression.buffer)} + ({places})[None, :], "
        rows += f"mask=going[:, None] & ({k} < {K})[None, :], other=0.0{self.cache(item.expression.buffer)}).to(WEIGHT)"

        def tile(start: int, k: str, j: str) -> str:
            head = f"g * {K * N} + " if weight.heads > 1 else ""
            columns = f"{start} + {j}" if start else j
            inside = f"({k} < {K})[:, None] & ({j} < {size})[None, :]"
            return f"tl.load({name} + {head}{k}[:, None] * {N} + ({columns})[None, :], mask={inside}, other=0.0)"

        if self.tiles.resident and K <= BK and size <= self.tiles.shares * BN and weight.heads == 1:
            first = f"share * {BN} + " if self.tiles.shares > 1 else ""
            for _, start in targets:
                held = f"{name}_{start}"
                if held not in self._resident:
                    self._resident.add(held)
                    self.ahead += [f"{held}_k = tl.arange(0, {BK})", f"{held}_j = {first}tl.arange(0, {BN})"]
                    self.ahead.append(f"{held} = {tile(start, f'{held}_k', f'{held}_j')}")
            return [
                f"{k} = tl.arange(0, {BK})",
                f"{a} = {rows}",
                *(f"{acc} = dot({a}, {name}_{start}, {acc}, PRECISION, WIDEN)" for acc, start in targets),
            ]
        return [
            f"for k0 in range(0, {K}, {BK}):",
            f"    {k} = k0 + tl.arange(0, {BK})",
            f"    {a} = {rows}",
            *(f"    {acc} = dot({a}, {tile(start, k, 'j')}, {acc}, PRECISION, WIDEN)" for acc, start in targets),
        ]

    # Loops over a row's elements

    def _store(self, group: Group, fused: dict[Item, list[int]]) -> list[str]:
        axes = _axes(group)
        total = math.prod(size for size, _ in axes)
        BE = min(self.tiles.elements, power_of_two(total))
        if fused:
            BE = min(self.tiles.columns, max(self.tiles.least, power_of_two(total)))
        index = _positions(axes, "j")
        inside = f"(j < {total})[None, :]"
        body = [f"mask = going[:, None] & {inside}"]
        coder = _Coder(self, index, body, rank=2, mask="mask", inside=inside)
        accumulate: list[str] = []
        for n, (item, blocks) in enumerate(fused.items()):
            targets = [(f"acc{n}_{start}", start) for start in blocks]
            accumulate += [f"{acc} = tl.full((ROWS, {BE}), 0.0, dtype=REAL)" for acc, _ in targets]
            accumulate += self._dots(item, [], targets, total, BE)
            coder.accumulators |= {(item.buffer, start): acc for acc, start in targets}
        for item in group.items:
            value = coder(item.expression)
            coder.names["load", item.buffer, item.target] = value
            body.append(f"tl.store({coder.address(item.buffer, item.target)}, {value}, mask=mask)")
        return [f"for n0 in {self._tiles(total, BE)}:", f"    j = n0 + tl.arange(0, {BE})", *_indent(accumulate + body)]

    def _reduce(self, group: Group) -> list[str]:
        axes, reduced = _axes(group), set(group.axes)
        over = [axis for axis in axes if axis[1][0] in reduced]
        kept = [axis for axis in axes if axis[1][0] not in reduced]
        R, Q = (math.prod(size for size, _ in some) for some in (over, kept))
        BR = min(self.tiles.reduced, power_of_two(R))
        BQ = max(1, min(power_of_two(Q), 4 * self.tiles.reduced // BR))
        index = _positions(kept, "q[:, None]") | _positions(over, "r[None, :]")
        inner = [
            f"r = r0 + tl.arange(0, {BR})",
            f"inside = ((q < {Q})[:, None] & (r < {R})[None, :])[None, :, :]",
            "mask = going[:, None, None] & inside",
        ]
        coder = _Coder(self, index, inner, rank=3, mask="mask", inside="inside")
        starts, ends = [], []
        flat = _positions(kept, "q")
        for n, item in enumerate(group.items):
            assert isinstance(item.value, Reduce)
            kind, integer = item.value.kind, item.value.integer
            dtype, initial = ("tl.int64", INITIAL_INTEGER[kind]) if integer else ("REAL", INITIAL[kind])
            self.functions[f"reduce_{kind}"] = None
            starts.append(f"sum{n} = tl.full((ROWS, {BQ}), {initial}, dtype={dtype})")
            value = coder(item.expression)
            inner.append(f"part{n} = tl.where(mask, {value}, tl.full((1, 1, 1), {initial}, dtype={dtype}))")
            inner.append(f"sum{n} = {COMBINE[kind].format(f'sum{n}', f'reduce_{kind}(part{n})')}")
            where = _place(item.target, flat)
            moves = any(factor for d, factor in enumerate(item.target.factors) if d in flat)
            wide = f"({where})[None, :]" if moves else f"{where} + tl.full((1, {BQ}), 0, dtype=tl.int32)"
            ends.append(f"tl.store({self.row(item.buffer)} + {wide}, sum{n}, mask=going[:, None] & (q < {Q})[None, :])")
        loop = [f"for r0 in range(0, {R}, {BR}):", *_indent(inner)]
        return [
            f"for q0 in {self._tiles(Q, BQ)}:",
            f"    q = q0 + tl.arange(0, {BQ})",
            *_indent([*starts, *loop, *ends]),
        ]


@final
class _Coder:
    """Writes what computes an expression at every place of a tile; what was computed before is used again.

    Attributes:
        names: What was computed, by what it is.
        accumulators: Results of products in registers, by buffer and the first column of the block.
    """

    def __init__(
        self, writer: StepWriter, index: dict[int, str], out: list[str], *, rank: int, mask: str, inside: str
    ) -> None:
        self.writer = writer
        self.index = index
        self.out = out
        self.mask = mask
        self.inside = inside
        self.rows = "[:, None]" if rank == 2 else "[:, None, None]"
        self.wide = "[None, :]" if rank == 2 else "[None, :, :]"
        self.ones = ", ".join("1" * rank)
        self.names: dict[object, str] = {}
        self.accumulators: dict[tuple[Buffer, int], str] = {}

    def _moves(self, place: Affine) -> bool:
        return any(factor for d, factor in enumerate(place.factors) if d in self.index)

    def address(self, buffer: Buffer, place: Affine) -> str:
        """Pointers to the places of a tile."""
        where = _place(place, self.index)
        zeros = next((name for name in self.index.values()), None)
        wide = f"({where}){self.wide}" if self._moves(place) else where
        if not self._moves(place) and zeros is not None:
            wide = f"({where} + 0 * {zeros}){self.wide}"
        elif zeros is None:
            wide = f"{where} + 0 * j{self.wide}"
        return f"{self.writer.row(buffer, self.rows)} + {wide}"

    def __call__(self, expression: Expression) -> str:
        """The name of a tile, or of what spreads over one."""
        if isinstance(expression, Constant):
            value = int(expression.number) if expression.integer else number(expression.number)
            return self._named(f"tl.full(({self.ones}), {value}, dtype={'tl.int64' if expression.integer else 'REAL'})")
        if isinstance(expression, Position):
            where = _place(expression.index, self.index)
            if self._moves(expression.index):
                return self._named(f"({where}){self.wide}.to(tl.int64)")
            return self._named(f"tl.full(({self.ones}), {where}, dtype=tl.int64)")
        if isinstance(expression, Fetch):
            return self._fetch(expression)
        if isinstance(expression, Load):
            found = self.accumulators.get((expression.buffer, expression.address.constant))
            return found or self._load(expression)
        operands = tuple(self(item) for item in expression.operands)
        own = expression.operands[1:] if expression.op == "where" else expression.operands
        integer = any(_is_integer(item) for item in own)
        text = template(expression.op, expression.attrs, integer=integer).format(*operands)
        if expression.op in FUNCTIONS:
            self.writer.functions[expression.op] = None
        if expression.op in INTEGER_DIVISIONS:
            self._check(f"{operands[1]} == 0", 1)
        return self._named(text)

    def _load(self, load: Load) -> str:
        buffer, key = load.buffer, ("load", load.buffer, load.address)
        if key not in self.names:
            where, moves = _place(load.address, self.index), self._moves(load.address)
            wide = f"({where}){self.wide}" if moves else where
            if buffer.where is not Where.UNIFORM:
                mask = f", mask={self.mask if moves else f'going{self.rows}'}, other=0"
            else:
                mask = f", mask={self.inside}, other=0" if moves else ""
            pointers = f"{self.writer.row(buffer, self.rows)} + {wide}"
            self.names[key] = self._named(f"tl.load({pointers}{mask}{self.writer.cache(buffer)})")
        return self.names[key]

    def _fetch(self, fetch: Fetch) -> str:
        """An element at a computed place; one out of range is told, and the first is read."""
        index = self(fetch.index)
        self._check(f"({index} < 0) | ({index} >= {fetch.size})", 0)
        at = self._named(f"tl.where(({index} < 0) | ({index} >= {fetch.size}), 0, {index})")
        where = _place(fetch.load.address, self.index)
        wide = f"({where}){self.wide}" if self._moves(fetch.load.address) else where
        # Pointers of the tile's shape, as the mask is.
        zero = f"{self.mask}.to(tl.int32) * 0"
        pointers = f"{self.writer.row(fetch.load.buffer, self.rows)} + {wide} + {at} * {fetch.stride} + {zero}"
        cache = self.writer.cache(fetch.load.buffer)
        return self._named(f"tl.load({pointers}, mask={self.mask}, other=0{cache})")

    def _check(self, problem: str, place: int) -> None:
        self.writer.has_checks = True
        # Pointers of the tile's shape: all that find the problem write the same.
        self.out.append(f"tl.store(errors + {place} + {self.mask}.to(tl.int32) * 0, 1, mask={self.mask} & ({problem}))")

    def _named(self, text: str) -> str:
        key = ("text", text)
        if key not in self.names:
            self.names[key] = f"v{len(self.out)}"
            self.out.append(f"{self.names[key]} = {text}")
        return self.names[key]


def _is_integer(expression: Expression) -> bool:
    """Whether an expression's values are integers."""
    if isinstance(expression, (Load, Fetch)):
        return (expression if isinstance(expression, Load) else expression.load).buffer.integer
    if isinstance(expression, Apply):
        if expression.op in {"to_real", "gt", "ge", "lt", "le", "eq", "ne"}:
            return False
        own = expression.operands[1:] if expression.op == "where" else expression.operands
        return expression.op == "to_integer" or any(_is_integer(item) for item in own)
    return expression.integer


def _axes(group: Group) -> list[_Axis]:
    """Dimensions of a loop that count, merged where all that is read and written lies in one piece."""
    dims, reduced = group.dims, set(group.axes)
    places = [place for item in group.items for place in (*places_in(item.expression), item.target)]
    merged: list[_Axis] = []
    for d in (d for d, size in enumerate(dims) if size != 1):
        size, inner = merged[-1] if merged else (1, [d])
        if (
            merged
            and (inner[-1] in reduced) == (d in reduced)
            and all(place.factors[inner[-1]] == place.factors[d] * dims[d] for place in places)
        ):
            merged[-1] = (size * dims[d], [*inner, d])
        else:
            merged.append((dims[d], [d]))
    return merged


def _positions(axes: list[_Axis], variable: str) -> dict[int, str]:
    """The position along the last dimension of each axis, of a place that is counted through all of them."""
    found: dict[int, str] = {}
    stride = 1
    for at in reversed(range(len(axes))):
        size, dims = axes[at]
        text = variable if stride == 1 else f"({variable} // {stride})"
        found[dims[-1]] = text if at == 0 else f"({text} % {size})"
        stride *= size
    return found


def _place(place: Affine, index: dict[int, str]) -> str:
    moving = [(factor, index[d]) for d, factor in enumerate(place.factors) if factor and d in index]
    terms = [name if factor == 1 else f"{factor} * {name}" for factor, name in moving]
    return " + ".join([*terms, *([str(place.constant)] if place.constant or not terms else [])])


def _accesses(group: Group, fused: dict[Item, list[int]]) -> Accesses:
    """What a group reads from memory and writes there; any thread may touch any element of it."""
    found = Accesses()
    made = {(item.buffer, item.target) for item in group.items}
    registers = {item.buffer for item in fused}
    for item in (*fused, *group.items):
        for load in loads_in(item.expression):
            is_own = group.kind == "store" and not load.anywhere and (load.buffer, load.address) in made
            if load.buffer.where is not Where.UNIFORM and load.buffer not in registers:
                # A group reads what it writes only at the place where it has just written it, from registers, or
                # before it writes there.
                found.reads += [] if is_own and load.buffer.where is not Where.ROW else [(load.buffer.name, None)]
    found.writes += [(item.buffer.name, None) for item in group.items]
    return found


def check_supported(schedule: Schedule) -> None:
    """An error for what tiles cannot say.

    Raises:
        Unsupported: If there is such a thing.
    """
    for group in schedule.groups:
        if math.prod(group.dims) >= 1 << 31:
            raise Unsupported(f"a loop over {math.prod(group.dims)} elements of a row")


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
