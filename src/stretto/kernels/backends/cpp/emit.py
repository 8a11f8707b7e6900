"""C++ for the work of one step.

A step, for the rows `first` to `end`, is written as products over all rows and loops over each row's elements:

    product<K, N>(before0, ..., scratch0, ...);             all rows at once, columns shared out among a team
    for (b = first; b < end; b++)                           then row by row
      sweep<H, TEAM>([&](auto count, int64_t j) { ... });   a lambda over vectors: whole ones, then the rest
    if (TEAM) barrier->wait(rank, size);                    only where threads read each other's elements
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

from stretto.kernels.backends.cpp.barriers import Barriers
from stretto.kernels.backends.cpp.ops import integer, number, template
from stretto.kernels.ir import Affine, Buffer, Constant, Position, Product, Reduce, Weight, Where
from stretto.kernels.schedule import ALIGNMENT, Apply, Expression, Fetch, Group, Item, Load, Schedule, places_in

INITIAL = {"sum": "0", "max": "-INFINITE", "min": "INFINITE"}
INITIAL_INTEGER = {"sum": "0", "max": "INT64_MIN", "min": "INT64_MAX"}
COMBINE = {"sum": "{0} + {1}", "max": "maximum({1}, {0})", "min": "minimum({1}, {0})"}
FINISH = {"sum": "reduce_sum", "max": "reduce_max", "min": "reduce_min"}
_Axis: TypeAlias = "tuple[int, int]"
"""The size of a dimension of a loop, or of several that were merged, and the last of them."""
FEW_ELEMENTS = 16
"""A contiguous dimension of fewer elements than this is not the innermost loop if there is a longer one."""
WAIT = "if (TEAM) barrier->wait(rank, size);"


@final
class StepWriter:
    """Writes what one step does, for the rows `first` to `end`.

    Args:
        schedule: The work, in order.
        places: Where each weight begins in packed memory.
    """

    def __init__(self, schedule: Schedule, places: Mapping[Weight, int]) -> None:
        self.schedule = schedule
        self.places = places
        self.barriers = Barriers(schedule)
        # The panels of a product's blocks, such as gates, alternate, so that a thread's share of all lies in one piece.
        self.blocks: dict[Buffer, int] = {}
        self.weight_blocks: dict[Weight, int] = {}
        for group in schedule.groups:
            item = group.items[0]
            if group.kind == "product" and isinstance(item.value, Product):
                weight = item.value.weight
                self.blocks[item.buffer] = self.weight_blocks[weight] = weight.N // self.barriers.blocks[weight]

    def lines(self) -> list[str]:
        """The code, with the barriers that threads sharing a row need."""
        out: list[str] = []
        waiting: list[Group] = []
        for group in self.schedule.groups:
            wait = self.barriers.must_wait(group)
            if wait or group.kind == "product":
                out += self._row_loop(waiting)
                waiting = []
            if wait:
                out.append(WAIT)
            if group.kind == "product":
                out += self._product(group)
            else:
                waiting.append(group)
        out += self._row_loop(waiting)
        return [*out, WAIT] if self.barriers.must_wait_at_end() else out

    def _row_loop(self, groups: list[Group]) -> list[str]:
        if not groups:
            return []
        used: dict[Buffer, None] = {}
        bodies: list[str] = []
        for group in groups:
            writer = _LoopWriter(group, self.blocks)
            bodies += writer.lines()
            used.update((buffer, None) for buffer in writer.used)
        pointers = [f"{element_of(buffer)}* const {buffer.name}_b = {_row_pointer(buffer, 'b')};" for buffer in used]
        return ["for (int64_t b = first; b < end; b++) {", *_indent(pointers + bodies), "}"]

    def _product(self, group: Group) -> list[str]:
        (item,) = group.items
        assert isinstance(item.value, Product)
        assert isinstance(item.expression, Load)
        source, offset = item.expression.buffer, item.expression.address.constant
        weight = item.value.weight
        heads = weight.heads
        many = math.prod(item.value.dims[:-1]) // heads
        blocks = self.weight_blocks[weight]
        panels = f"panels_of({weight.N // blocks})"
        share = (
            f"TEAM ? {blocks} * ({panels} * rank / size) : 0, "
            f"TEAM ? {blocks} * ({panels} * (rank + 1) / size) : {blocks} * {panels}"
        )
        target = item.buffer
        call = f"product<{weight.K}, {weight.N}>"
        packed = f"call.packed + {self.places[weight]}"
        if heads > 1:
            return self._product_of_heads(item, item.expression, many)
        if many == 1:
            start = f"{_row_pointer(source, 'first')} + {offset}"
            stride = _row_stride(source)
            result = f"{_row_pointer(target, 'first')}, {_row_stride(target)}"
            return [f"{call}({start}, {stride}, {packed}, {result}, end - first, {share}, room);"]
        width = target.strides[-2]
        inner = (
            f"{call}({_row_pointer(source, 'b')} + {offset}, {weight.K}, {packed}, "
            f"{_row_pointer(target, 'b')}, {width}, {many}, {share}, room);"
        )
        return ["for (int64_t b = first; b < end; b++)", f"  {inner}"]

    def _product_of_heads(self, item: Item, operand: Load, many: int) -> list[str]:
        """A product for each head; threads share out the heads."""
        assert isinstance(item.value, Product)
        weight, target = item.value.weight, item.buffer
        width = target.strides[-2]
        size = weight.K * (-(-weight.N // ALIGNMENT) * ALIGNMENT)
        row = "first" if many == 1 else "b"
        source = f"{_row_pointer(operand.buffer, row)} + {operand.address.constant} + g * {weight.K}"
        packed = f"call.packed + {self.places[weight]} + g * {size}"
        result = f"{_row_pointer(target, row)} + g * {width}"
        strides = (_row_stride(operand.buffer), _row_stride(target), "end - first")
        if many > 1:
            strides = (str(weight.heads * weight.K), str(weight.heads * width), str(many))
        panels = f"0, panels_of({weight.N})"
        call = (
            f"product<{weight.K}, {weight.N}>({source}, {strides[0]}, {packed}, {result}, {strides[1]}, {strides[2]}, "
            f"{panels}, room);"
        )
        share = (
            f"TEAM ? {weight.heads} * rank / size : 0; g < (TEAM ? {weight.heads} * (rank + 1) / size : {weight.heads})"
        )
        lines = [f"for (int64_t g = {share}; g++)", f"  {call}"]
        return lines if many == 1 else ["for (int64_t b = first; b < end; b++)", *_indent(lines)]


def element_of(buffer: Buffer) -> str:
    """The type of its elements."""
    return "int64_t" if buffer.integer else "real"


def _row_stride(buffer: Buffer) -> str:
    """Elements from one row to the next."""
    if buffer.where is Where.SCRATCH:
        return "SCRATCH"
    if buffer.where is Where.PRIVATE:
        return "PRIVATE"
    if buffer.where is Where.STRIDED:
        return f"{buffer.name}_stride"
    return str(buffer.size)


def _row_pointer(buffer: Buffer, row: str) -> str:
    """Where a row begins."""
    if buffer.where in {Where.SCRATCH, Where.PRIVATE}:
        memory, size = ("call.scratch", "SCRATCH") if buffer.where is Where.SCRATCH else ("own", "PRIVATE")
        place = f"({memory} + {row} * {size} + {buffer.index})"
        return f"reinterpret_cast<int64_t*>{place}" if buffer.integer else place
    if buffer.where is Where.UNIFORM:
        return buffer.name
    return f"({buffer.name} + {row} * {_row_stride(buffer)})"


@final
class _LoopWriter:
    """Writes the loop of one group over the elements of a row; `blocks` are those of products, see `StepWriter`."""

    def __init__(self, group: Group, blocks: Mapping[Buffer, int]) -> None:
        self.group = group
        self.blocks = blocks
        self.used: dict[Buffer, None] = {}
        self.names: dict[object, str] = {}
        self.body: list[str] = []
        self.axes = self._axes()

    def _all_places(self) -> list[Affine]:
        places = [place for item in self.group.items for place in places_in(item.expression)]
        return places + [item.target for item in self.group.items]

    def _axes(self) -> list[_Axis]:
        """Dimensions of the loop that count, merged where all that is read and written lies in one piece."""
        dims, reduced, places = self.group.dims, self.group.axes, self._all_places()
        merged: list[_Axis] = []
        for d in (d for d, size in enumerate(dims) if size != 1):
            size, last = merged[-1] if merged else (1, d)
            if (
                merged
                and (last in reduced) == (d in reduced)
                and all(place.factors[last] == place.factors[d] * dims[d] for place in places)
            ):
                merged.pop()
                merged.append((size * dims[d], d))
            else:
                merged.append((dims[d], d))
        return merged

    def lines(self) -> list[str]:
        """The code."""
        return self._store_lines() if self.group.kind == "store" else self._reduction_lines()

    def _store_lines(self) -> list[str]:
        axes = self._longest_last(self.axes)
        outer, (size, inner) = axes[:-1], axes[-1] if axes else (1, None)
        for item in self.group.items:
            value = self._code(item.expression, outer, inner)
            self.names["load", item.buffer, item.target] = value
            self.body.append(self._write(item, value, outer, inner))
        team = "TEAM" if not outer else "false"
        guarded = self._nest(_sweep(size, self.body, team=team), outer)
        return guarded if not outer else ["if (!TEAM || rank == 0) {", *_indent(guarded), "}"]

    def _longest_last(self, axes: list[_Axis]) -> list[_Axis]:
        """The dimensions, last the one that is best for vectors: few elements, as a small window has, are not."""
        if not axes or axes[-1][0] >= FEW_ELEMENTS or min(size for size, _ in axes) == 0:
            return axes
        places = self._all_places()

        def cost(axis: _Axis) -> float:
            size, d = axis
            together = (size // 8 + size % 8) / size
            return sum(together if place.factors[d] in {0, 1} else 1.0 for place in places) + 4 / size

        best = min(reversed(axes), key=cost)
        return [*(axis for axis in axes if axis is not best), best]

    def _nest(self, lines: list[str], outer: Sequence[_Axis]) -> list[str]:
        for size, d in reversed(outer):
            lines = [f"for (int64_t i{d} = 0; i{d} < {size}; i{d}++) {{", *_indent(lines), "}"]
        return lines

    def _reduction_lines(self) -> list[str]:
        """Sums, maxima or minima over the dimensions that the group reduces."""
        axes = self.axes or [(1, len(self.group.dims) - 1)]
        reduced = [axis for axis in axes if axis[1] in self.group.axes]
        kept = self._longest_last([axis for axis in axes if axis[1] not in self.group.axes])
        # Either lanes hold parts of one sum, which are added up at the end, or each lane holds a separate sum.
        across_lanes = (bool(reduced) and axes[-1] is reduced[-1]) or not kept
        size, inner = (reduced[-1] if reduced else (1, None)) if across_lanes else kept[-1]
        outer = kept + reduced[:-1] if across_lanes else kept[:-1] + reduced
        starts, ends = [], []
        for n, item in enumerate(self.group.items):
            assert isinstance(item.value, Reduce)
            kind = item.value.kind
            initial = (INITIAL_INTEGER if item.value.integer else INITIAL)[kind]
            starts.append(f"auto sum{n} = {'broadcast_integer' if item.value.integer else 'broadcast'}({initial});")
            value = self._code(item.expression, outer, inner)
            if across_lanes:
                value = f"keep<L>({value}, {initial})"
                ends.append(f"{item.buffer.name}_b[{self._place(item.target, kept, None)}] = {FINISH[kind]}(sum{n});")
                self.used[item.buffer] = None
            else:
                ends.append(self._write(item, f"sum{n}", kept[:-1], inner))
            self.body.append(f"sum{n} = {COMBINE[kind].format(f'sum{n}', value)};")
        if across_lanes:
            sums = self._nest(_sweep(size, self.body), reduced[:-1])
            return self._nest(["{", *_indent([*starts, *sums, *ends]), "}"], kept)
        return self._nest(_sweep(size, [*starts, *self._nest(self.body, reduced), *ends]), kept[:-1])

    def _place(self, place: Affine, outer: Sequence[_Axis], inner: int | None) -> str:
        """An address without the innermost dimension, or with it where it moves by single elements."""
        terms = [str(place.constant)]
        moving = [(place.factors[d], f"i{d}") for _, d in outer]
        moving.append((_factor(place, inner), "j"))
        terms += [name if factor == 1 else f"{factor} * {name}" for factor, name in moving if factor]
        return " + ".join(terms)

    def _code(self, expression: Expression, outer: Sequence[_Axis], inner: int | None) -> str:
        """Write what computes `expression` and name the result; what was computed before is used again."""
        if isinstance(expression, Constant):
            return integer(int(expression.number)) if expression.integer else number(expression.number)
        if isinstance(expression, Position):
            text = f"broadcast_integer({self._place(expression.index, outer, inner)})"
            factor = _factor(expression.index, inner)
            return text if factor == 0 else f"({text} + lane_numbers<{factor}>())"
        if isinstance(expression, Fetch):
            return self._fetch(expression, outer, inner)
        if isinstance(expression, Load):
            key: object = ("load", expression.buffer, expression.address)
            if key not in self.names:
                self.used[expression.buffer] = None
                factor = _factor(expression.address, inner)
                pointer = f"{expression.buffer.name}_b"
                place = self._place(expression.address, outer, inner)
                if (blocks := self.blocks.get(expression.buffer, 1)) > 1:
                    block = expression.address.constant // self.axes[-1][0]
                    place = f"interleaved<{blocks}>(j) + {block} * PANEL"
                if factor == 0:
                    text = f"broadcast{'_integer' if expression.buffer.integer else ''}({pointer}[{place}])"
                elif factor == 1:
                    text = f"load<L>({pointer} + {place})"
                else:
                    text = f"load_strided<L>({pointer} + {place}, {factor})"
                self.names[key] = self._assign(text)
            return self.names[key]
        operands = tuple(self._code(item, outer, inner) for item in expression.operands)
        text = template(expression.op, expression.attrs).format(*operands)
        key = ("apply", text)
        if key not in self.names:
            self.names[key] = self._assign(text)
        return self.names[key]

    def _fetch(self, fetch: Fetch, outer: Sequence[_Axis], inner: int | None) -> str:
        index = self._code(fetch.index, outer, inner)
        load, factor = fetch.load, _factor(fetch.load.address, inner)
        self.used[load.buffer] = None
        place = f"{load.buffer.name}_b + {self._place(load.address, outer, inner)}"
        same = inner is None or not _moves(fetch.index, inner)
        # Where all lanes have one index, such as that of a row of a table, they read from one stretch of memory.
        checked = f"in_range<{1 if same else 'L'}>({index}, {fetch.size})"
        text = f"gather<L>({place}, {factor}, {checked}, {fetch.stride})"
        if same:
            place = f"{place} + {fetch.stride} * {checked}[0]"
            text = f"load<L>({place})" if factor == 1 else f"load_strided<L>({place}, {factor})"
        key = ("fetch", text)
        if key not in self.names:
            self.names[key] = self._assign(text)
        return self.names[key]

    def _assign(self, text: str) -> str:
        name = f"v{len(self.body)}"
        self.body.append(f"const auto {name} = {text};")
        return name

    def _write(self, item: Item, value: str, outer: Sequence[_Axis], inner: int | None) -> str:
        self.used[item.buffer] = None
        factor = _factor(item.target, inner)
        place = self._place(item.target, outer, inner)
        pointer = f"{item.buffer.name}_b"
        if factor in {0, 1}:
            return f"store<L>({pointer} + {place}, {value});"
        return f"store_strided<L>({pointer} + {place}, {factor}, {value});"


def _moves(expression: Expression, inner: int) -> bool:
    """Whether its value depends on the place along the innermost dimension."""
    if isinstance(expression, Position):
        return expression.index.factors[inner] != 0
    if isinstance(expression, Apply):
        return any(_moves(item, inner) for item in expression.operands)
    if isinstance(expression, Fetch):
        return expression.load.address.factors[inner] != 0 or _moves(expression.index, inner)
    return isinstance(expression, Load) and expression.address.factors[inner] != 0


def _factor(place: Affine, inner: int | None) -> int:
    """How far the place moves from one element of the innermost dimension to the next."""
    return 0 if inner is None else place.factors[inner]


def _sweep(size: int, body: list[str], *, team: str = "false") -> list[str]:
    """A loop over `size` elements in vectors; `body` is for the L elements from j on, fewer at the end."""
    return [
        f"sweep<{size}, {team}>([&](auto count, int64_t j) __attribute__((always_inline)) {{",
        *_indent(["constexpr int L = decltype(count)::value;", "(void)j;", *body]),
        "}, rank, size);",
    ]


def _indent(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
