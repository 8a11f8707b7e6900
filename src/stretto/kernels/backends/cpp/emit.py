"""C++ for the work of one step.

A step, for the rows `first` to `end`, is written as products over all rows and loops over each row's elements:

    product<K, N>(before0, ..., scratch0, ...);             all rows at once, columns shared out among a team
    for (b = first; b < end; b++)                           then row by row
      sweep<H, TEAM>([&](auto count, int64_t j) { ... });   a lambda over vectors: whole ones, then the rest
    if (TEAM) barrier->wait(rank, size);                    only where threads read each other's elements
"""

import math
from collections.abc import Mapping
from typing import final

from stretto.kernels.backends.cpp.barriers import Barriers
from stretto.kernels.backends.cpp.ops import number, template
from stretto.kernels.ir import Affine, Buffer, Product, Reduce, Weight, Where
from stretto.kernels.schedule import AbstractExpression, Apply, Group, Item, Load, Number, Schedule, loads_in

INITIAL = {"sum": "0", "max": "-INFINITE", "min": "INFINITE"}
COMBINE = {"sum": "{0} + {1}", "max": "maximum({1}, {0})", "min": "minimum({1}, {0})"}
FINISH = {"sum": "reduce_sum", "max": "reduce_max", "min": "reduce_min"}


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
                self.blocks[item.buffer] = self.weight_blocks[weight] = weight.N // self.barriers.block_of(item.value)

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
        pointers = [f"real* const {buffer.name}_b = {_row_pointer(buffer, 'b')};" for buffer in used]
        return ["for (int64_t b = first; b < end; b++) {", *_indent(pointers + bodies), "}"]

    def _product(self, group: Group) -> list[str]:
        (item,) = group.items
        assert isinstance(item.value, Product)
        place = self.schedule.pointer(item.value.operand)
        assert place is not None
        source, offset = place
        weight = item.value.weight
        many = math.prod(item.value.dims[:-1])
        blocks = self.weight_blocks[weight]
        panels = f"panels_of({weight.N // blocks})"
        share = (
            f"TEAM ? {blocks} * ({panels} * rank / size) : 0, "
            f"TEAM ? {blocks} * ({panels} * (rank + 1) / size) : {blocks} * {panels}"
        )
        target = item.buffer
        call = f"product<{weight.K}, {weight.N}>"
        packed = f"call.packed + {self.places[weight]}"
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


def _key(place: Affine) -> tuple[int, tuple[int, ...]]:
    return place.constant, place.factors


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
    if buffer.where is Where.SCRATCH:
        return f"(call.scratch + {row} * SCRATCH + {buffer.index})"
    if buffer.where is Where.PRIVATE:
        return f"(own + {row} * PRIVATE + {buffer.index})"
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
        self.loads = {load: load for item in group.items for load in loads_in(item.expression)}
        places = [load.address for load in self.loads] + [item.target for item in group.items]
        self.axes = self._axes(places)

    def _axes(self, places: list[Affine]) -> list[tuple[int, list[int]]]:
        """Dimensions of the loop that count, as sizes with the original dimensions merged in each."""
        dims, reduced = self.group.dims, set(self.group.axes)
        kept = [d for d, size in enumerate(dims) if size != 1]
        merged: list[tuple[int, list[int]]] = []
        for d in kept:
            if merged and (merged[-1][1][-1] in reduced) == (d in reduced):
                last = merged[-1][1][-1]
                if all(place.factors[last] == place.factors[d] * dims[d] for place in places):
                    merged[-1] = (merged[-1][0] * dims[d], [*merged[-1][1], d])
                    continue
            merged.append((dims[d], [d]))
        return merged

    def lines(self) -> list[str]:
        """The code."""
        if self.group.kind == "store":
            return self._store()
        return self._reduce()

    def _store(self) -> list[str]:
        *outer, (size, inner) = self.axes or [(1, [])]
        for item in self.group.items:
            assert item.expression is not None
            value = self._code(item.expression, outer, inner)
            self.names["load", item.buffer, _key(item.target)] = value
            self.body.append(self._write(item, value, outer, inner))
        team = "TEAM" if not outer else "false"
        guarded = self._nest(_sweep(size, self.body, team=team), outer)
        return guarded if not outer else ["if (!TEAM || rank == 0) {", *_indent(guarded), "}"]

    def _nest(self, lines: list[str], outer: list[tuple[int, list[int]]]) -> list[str]:
        for position in reversed(range(len(outer))):
            name = f"i{outer[position][1][-1]}"
            lines = [f"for (int64_t {name} = 0; {name} < {outer[position][0]}; {name}++) {{", *_indent(lines), "}"]
        return lines

    def _reduce(self) -> list[str]:
        reduced = set(self.group.axes)
        axes = self.axes or [(1, [len(self.group.dims) - 1])]
        summed = [axis for axis in axes if axis[1][0] in reduced]
        kept = [axis for axis in axes if axis[1][0] not in reduced]
        # Either lanes hold parts of one sum, which are added up at the end, or each lane holds a sum of its own.
        across = (bool(summed) and axes[-1] is summed[-1]) or not kept
        kinds = [item.value.kind for item in self.group.items if isinstance(item.value, Reduce)]
        starts = [f"vec sum{n} = broadcast({INITIAL[kind]});" for n, kind in enumerate(kinds)]
        if across:
            inner = summed[-1] if summed else (1, [])
            outer = kept + summed[:-1]
            for n, (item, kind) in enumerate(zip(self.group.items, kinds, strict=True)):
                assert item.expression is not None
                value = f"keep<L>({self._code(item.expression, outer, inner[1])}, {INITIAL[kind]})"
                self.body.append(f"sum{n} = {COMBINE[kind].format(f'sum{n}', value)};")
            loop = _sweep(inner[0], self.body)
            ends = []
            for n, (item, kind) in enumerate(zip(self.group.items, kinds, strict=True)):
                where = self._place(item.target, kept, [])
                self.used[item.buffer] = None
                ends.append(f"{item.buffer.name}_b[{where}] = {FINISH[kind]}(sum{n});")
            return self._nest(["{", *_indent([*starts, *self._nest(loop, summed[:-1]), *ends]), "}"], kept)
        inner = kept[-1]
        outer = kept[:-1] + summed
        ends = []
        for n, (item, kind) in enumerate(zip(self.group.items, kinds, strict=True)):
            assert item.expression is not None
            value = self._code(item.expression, outer, inner[1])
            self.body.append(f"sum{n} = {COMBINE[kind].format(f'sum{n}', value)};")
            ends.append(self._write(item, f"sum{n}", kept[:-1], inner[1]))
        loop = _sweep(inner[0], [*starts, *self._nest(self.body, summed), *ends])
        return self._nest(loop, kept[:-1])

    def _place(self, place: Affine, outer: list[tuple[int, list[int]]], inner: list[int]) -> str:
        """An address without the innermost dimension, or with it where it moves by single elements."""
        terms = [str(place.constant)]
        for _, dims in outer:
            factor = place.factors[dims[-1]]
            if factor:
                terms.append(f"{factor} * i{dims[-1]}" if factor != 1 else f"i{dims[-1]}")
        factor = place.factors[inner[-1]] if inner else 0
        if factor:
            terms.append(f"{factor} * j" if factor != 1 else "j")
        return " + ".join(terms)

    def _code(self, expression: AbstractExpression, outer: list[tuple[int, list[int]]], inner: list[int]) -> str:
        """Write what computes `expression` and name the result; what was computed before is used again."""
        if isinstance(expression, Number):
            return number(expression.number)
        if isinstance(expression, Load):
            key: object = ("load", expression.buffer, _key(expression.address))
            if key not in self.names:
                self.used[expression.buffer] = None
                factor = expression.address.factors[inner[-1]] if inner else 0
                pointer = f"{expression.buffer.name}_b"
                place = self._place(expression.address, outer, inner)
                if (blocks := self.blocks.get(expression.buffer, 1)) > 1:
                    block = expression.address.constant // self.axes[-1][0]
                    place = f"interleaved<{blocks}>(j) + {block} * PANEL"
                if factor == 0:
                    text = f"broadcast({pointer}[{place}])"
                elif factor == 1:
                    text = f"load<L>({pointer} + {place})"
                else:
                    text = f"load_strided<L>({pointer} + {place}, {factor})"
                self.names[key] = self._assign(text)
            return self.names[key]
        assert isinstance(expression, Apply)
        operands = tuple(self._code(item, outer, inner) for item in expression.operands)
        text = template(expression.op, expression.attrs).format(*operands)
        key = ("apply", text)
        if key not in self.names:
            self.names[key] = self._assign(text)
        return self.names[key]

    def _assign(self, text: str) -> str:
        name = f"v{len(self.body)}"
        self.body.append(f"const vec {name} = {text};")
        return name

    def _write(self, item: Item, value: str, outer: list[tuple[int, list[int]]], inner: list[int]) -> str:
        self.used[item.buffer] = None
        factor = item.target.factors[inner[-1]] if inner else 1
        place = self._place(item.target, outer, inner)
        pointer = f"{item.buffer.name}_b"
        if factor in {0, 1}:
            return f"store<L>({pointer} + {place}, {value});"
        return f"store_strided<L>({pointer} + {place}, {factor}, {value});"


def _sweep(size: int, body: list[str], *, team: str = "false") -> list[str]:
    """A loop over `size` elements in vectors; `body` is for the L elements from j on, fewer at the end."""
    return [
        f"sweep<{size}, {team}>([&](auto count, int64_t j) __attribute__((always_inline)) {{",
        *_indent(["constexpr int L = decltype(count)::value;", "(void)j;", *body]),
        "}, rank, size);",
    ]


def _indent(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
