"""C++ for a step's schedule."""

from typing import final

from stretto.kernels.expression import AbstractExpression, Apply, Load, Number
from stretto.kernels.pointwise import number
from stretto.kernels.rows import Affine, Buffer, Product, Where, size_of
from stretto.kernels.schedule import Group, Item, Schedule, Scheduler, loads_in
from stretto.kernels.sharing import Sharing

INITIAL = {"sum": "0", "max": "-INFINITE", "min": "INFINITE"}
COMBINED = {"sum": "{0} + {1}", "max": "maximum({1}, {0})", "min": "minimum({1}, {0})"}
FINISHED = {"sum": "sum_of", "max": "maximum_of", "min": "minimum_of"}


WAIT = "if (TEAM) barrier->wait(rank, size);"


@final
class StepWriter:
    """Writes what one step does, for the rows `first` to `end`.

    Args:
        scheduler: Where values lie.
        schedule: The work, in order.
        weights: Names of the packed weights with their place in packed memory.
    """

    def __init__(self, scheduler: Scheduler, schedule: Schedule, weights: dict[str, str]) -> None:
        self.scheduler = scheduler
        self.schedule = schedule
        self.weights = weights
        self.sharing = Sharing(scheduler, schedule.groups)

    def lines(self) -> list[str]:
        """The code, with the barriers that threads sharing a row need."""
        for group in self.schedule.groups:
            if group.kind == "product":
                self._lay_out(group.items[0])
        out: list[str] = []
        waiting: list[Group] = []
        for group in self.schedule.groups:
            wait = self.sharing.must_wait(group)
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
        return [*out, WAIT] if self.sharing.must_wait_at_end() else out

    def _lay_out(self, item: Item) -> None:
        """Let the panels of a product's blocks alternate: each thread's share of all blocks lies in one piece."""
        assert isinstance(item.value, Product)
        weight, block = item.value.weight, self.sharing.block_of(item.value)
        weight.parts = item.buffer.parts = weight.N // block

    def _row_loop(self, groups: list[Group]) -> list[str]:
        if not groups:
            return []
        used: dict[Buffer, None] = {}
        bodies: list[str] = []
        for group in groups:
            writer = LoopWriter(group)
            bodies += writer.lines()
            used.update((buffer, None) for buffer in writer.used)
        pointers = [f"real* const {buffer.name}_b = {row_pointer(buffer, 'b')};" for buffer in used]
        return ["for (int64_t b = first; b < end; b++) {", *_indented(pointers + bodies), "}"]

    def _product(self, group: Group) -> list[str]:
        (item,) = group.items
        assert isinstance(item.value, Product)
        place = self.scheduler.pointer(item.value.operand)
        assert place is not None
        source, offset = place
        weight = item.value.weight
        many = size_of(item.value.dims[:-1])
        parts, panels = weight.parts, f"panels_of({weight.N // weight.parts})"
        share = (
            f"TEAM ? {parts} * ({panels} * rank / size) : 0, "
            f"TEAM ? {parts} * ({panels} * (rank + 1) / size) : {parts} * {panels}"
        )
        target = item.buffer
        call = f"product<{weight.K}, {weight.N}>"
        packed = f"call.packed + {self.weights[weight.name]}"
        if many == 1:
            start = f"{row_pointer(source, 'first')} + {offset}"
            stride = row_stride(source)
            result = f"{row_pointer(target, 'first')}, {row_stride(target)}"
            return [f"{call}({start}, {stride}, {packed}, {result}, end - first, {share}, room);"]
        width = target.strides[-2]
        inner = (
            f"{call}({row_pointer(source, 'b')} + {offset}, {weight.K}, {packed}, "
            f"{row_pointer(target, 'b')}, {width}, {many}, {share}, room);"
        )
        return ["for (int64_t b = first; b < end; b++)", f"  {inner}"]


def _key(place: Affine) -> tuple[int, tuple[int, ...]]:
    return place.constant, place.factors


def row_stride(buffer: Buffer) -> str:
    """Elements from one row to the next."""
    if buffer.where is Where.SCRATCH:
        return "SCRATCH"
    if buffer.where is Where.PRIVATE:
        return "PRIVATE"
    if buffer.where is Where.ARRIVING:
        return f"{buffer.name}_stride"
    return str(buffer.size)


def row_pointer(buffer: Buffer, row: str) -> str:
    """Where a row begins."""
    if buffer.where is Where.SCRATCH:
        return f"(call.scratch + {row} * SCRATCH + {buffer.offset})"
    if buffer.where is Where.PRIVATE:
        return f"(own + {row} * PRIVATE + {buffer.offset})"
    if buffer.where is Where.ONCE:
        return buffer.name
    return f"({buffer.name} + {row} * {row_stride(buffer)})"


@final
class LoopWriter:
    """Writes the loop of one group over the elements of a row."""

    def __init__(self, group: Group) -> None:
        self.group = group
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
        loop = [
            f"sweep<{size}, {team}>([&](auto count, int64_t j) __attribute__((always_inline)) {{",
            *_indented(["constexpr int L = decltype(count)::value;", "(void)j;", *self.body]),
            "}, rank, size);",
        ]
        guarded = self._nested(loop, outer)
        return guarded if not outer else ["if (!TEAM || rank == 0) {", *_indented(guarded), "}"]

    def _nested(self, lines: list[str], outer: list[tuple[int, list[int]]]) -> list[str]:
        for position in reversed(range(len(outer))):
            name = f"i{outer[position][1][-1]}"
            lines = [f"for (int64_t {name} = 0; {name} < {outer[position][0]}; {name}++) {{", *_indented(lines), "}"]
        return lines

    def _reduce(self) -> list[str]:
        reduced = set(self.group.axes)
        axes = self.axes or [(1, [len(self.group.dims) - 1])]
        summed = [axis for axis in axes if axis[1][0] in reduced]
        kept = [axis for axis in axes if axis[1][0] not in reduced]
        across = (bool(summed) and axes[-1] is summed[-1]) or not kept
        kinds = [item.value.kind for item in self.group.items]  # type: ignore[attr-defined]
        starts = [f"vec sum{n} = all({INITIAL[kind]});" for n, kind in enumerate(kinds)]
        if across:
            inner = summed[-1] if summed else (1, [])
            outer = kept + summed[:-1]
            for n, (item, kind) in enumerate(zip(self.group.items, kinds, strict=True)):
                assert item.expression is not None
                value = f"keep<L>({self._code(item.expression, outer, inner[1])}, {INITIAL[kind]})"
                self.body.append(f"sum{n} = {COMBINED[kind].format(f'sum{n}', value)};")
            loop = [
                f"sweep<{inner[0]}, false>([&](auto count, int64_t j) __attribute__((always_inline)) {{",
                *_indented(["constexpr int L = decltype(count)::value;", "(void)j;", *self.body]),
                "}, rank, size);",
            ]
            ends = []
            for n, (item, kind) in enumerate(zip(self.group.items, kinds, strict=True)):
                where = self._place(item.target, kept, [])
                self.used[item.buffer] = None
                ends.append(f"{item.buffer.name}_b[{where}] = {FINISHED[kind]}(sum{n});")
            return self._nested(["{", *_indented([*starts, *self._nested(loop, summed[:-1]), *ends]), "}"], kept)
        inner = kept[-1]
        outer = kept[:-1] + summed
        ends = []
        for n, (item, kind) in enumerate(zip(self.group.items, kinds, strict=True)):
            assert item.expression is not None
            value = self._code(item.expression, outer, inner[1])
            self.body.append(f"sum{n} = {COMBINED[kind].format(f'sum{n}', value)};")
            ends.append(self._write(item, f"sum{n}", kept[:-1], inner[1]))
        loop = [
            f"sweep<{inner[0]}, false>([&](auto count, int64_t j) __attribute__((always_inline)) {{",
            *_indented(
                [
                    "constexpr int L = decltype(count)::value;",
                    "(void)j;",
                    *starts,
                    *self._nested(self.body, summed),
                    *ends,
                ]
            ),
            "}, rank, size);",
        ]
        return self._nested(loop, kept[:-1])

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
                if expression.buffer.parts > 1:
                    part = expression.address.constant // self.axes[-1][0]
                    place = f"apart<{expression.buffer.parts}>(j) + {part} * PANEL"
                if factor == 0:
                    text = f"all({pointer}[{place}])"
                elif factor == 1:
                    text = f"load<L>({pointer} + {place})"
                else:
                    text = f"load_strided<L>({pointer} + {place}, {factor})"
                self.names[key] = self._named(text)
            return self.names[key]
        assert isinstance(expression, Apply)
        operands = tuple(self._code(item, outer, inner) for item in expression.operands)
        key = ("apply", expression.template, operands)
        if key not in self.names:
            self.names[key] = self._named(expression.template.format(*operands))
        return self.names[key]

    def _named(self, text: str) -> str:
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


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
