"""Random views, reductions and products of rows: each function writes a few lines of a recipe."""

from fuzz_operations import ELSEWHERE, EXOTIC_REDUCTION, EXOTIC_SHAPE, HEADS, OVER, REDUCTION
from fuzz_writer import LARGEST, ROWS, Register, Writer


def _axis(w: Writer, index: int) -> int:
    """A dimension within a row, counted from either end."""
    rank = len(w[index].sizes)
    axis = w.number(1, rank)
    return axis - rank - 1 if w.yes() else axis


def _shaped(w: Writer) -> int:
    """Rows that have a dimension."""
    index = w.any_rows()
    return index if w[index].sizes else w.add("unsqueeze", index, settings=(1,))


def window(w: Writer) -> None:
    """Some elements of a dimension, or one."""
    one = _shaped(w)
    axis = w.number(1, len(w[one].sizes))
    size = w[one].sizes[axis - 1]
    start = w.number(0, size - 1)
    kind = w.one_of(("slice", "narrow", "select", "stepped"))
    if kind == "select":
        w.add("select", one, settings=(axis, start - size if w.yes() else start))
    elif kind == "stepped":
        w.add("slice", one, settings=(axis, start, (size - start + 1) // 2, 2))
    else:
        length = w.number(1, size - start)
        w.add(kind, one, settings=(axis, start, length, 1) if kind == "slice" else (axis, start, length))


def parts(w: Writer) -> None:
    """A split in several, and two of them put to use."""
    one = _shaped(w)
    axis = _axis(w, one)
    size = w[one].example.shape[axis]
    kind = w.one_of(("chunk", "split", "unbind"))
    if kind == "chunk":
        made = w.add("chunk", one, settings=(w.number(1, min(size, 4)), axis))
    elif kind == "split":
        first = w.number(1, size)
        made = w.add("split", one, settings=(axis, first, size - first) if first < size else (axis, size))
    elif size <= 6:
        made = w.add("unbind", one, settings=(axis,))
    else:
        return
    count = len(w[made].example)
    first, second = (w.add("part", made, settings=(w.number(0, count - 1),)) for _ in range(2))
    if w[first].sizes == w[second].sizes:
        w.add(w.one_of(("gate", "mul", "add")), first, second)


def turned(w: Writer) -> None:
    """The same elements under other sizes, or in another order."""
    one = w.any_rows()
    sizes = w[one].sizes
    rank = len(sizes)
    kind = w.one_of(("unsqueeze", "transpose", "view", "flatten", "squeeze", "expand", "permute"))
    if kind == "unsqueeze" and rank < 3:
        w.add("unsqueeze", one, settings=(w.number(1, rank + 1),))
    elif kind == "transpose" and rank >= 2:
        w.add("transpose", one, settings=(rank, rank - 1) if w.yes() else (1, -1))
    elif kind == "permute" and rank == 3:
        w.add("permute", one, settings=w.one_of(((0, 3, 1, 2), (0, 2, 3, 1), (0, 1, 3, 2), (0, 3, 2, 1))))
    elif kind == "flatten" and rank >= 2:
        w.add("flatten", one)
    elif kind == "squeeze" and 1 in sizes:
        w.add("squeeze", one, settings=(sizes.index(1) + 1,))
    elif kind == "view" and rank:
        count = w[one].example.numel() // ROWS
        divisors = [d for d in range(1, count + 1) if count % d == 0]
        first = w.one_of(divisors)
        w.add("view", one, settings=(first, count // first))
    elif kind == "expand":
        thin = one if 1 in sizes else w.add("unsqueeze", one, settings=(rank + 1,)) if rank < 3 else None
        if thin is not None:
            wide = list(w[thin].sizes)
            wide[wide.index(1)] = w.number(1, 4)
            if w[thin].example.numel() * 4 <= LARGEST * ROWS:
                w.add("expand", thin, settings=tuple(wide))


def join(w: Writer) -> None:
    """Values concatenated."""
    one = _shaped(w)
    sizes = w[one].sizes
    axis = w.number(0, len(sizes) - 1)

    def fits(register: Register) -> bool:
        if not (register.is_real and register.has_rows and len(register.sizes) == len(sizes)):
            return False
        return all(register.sizes[d] == sizes[d] for d in range(len(sizes)) if d != axis)

    found = [one]
    for _ in range(w.number(1, 3)):
        other = w.pick(fits)
        found.append(one if other is None else other)
    if sum(w[index].example.numel() for index in found) <= LARGEST * ROWS:
        found = found[::-1] if w.yes() else found
        w.add("cat", *found, settings=(axis - len(sizes) if w.yes() else axis + 1,))


def stack(w: Writer) -> None:
    """Values stacked along a new dimension."""
    one = w.any_rows()
    sizes = w[one].sizes
    other = w.pick_rows(sizes=sizes)
    if other is not None and len(sizes) < 3 and w[one].example.numel() * 2 <= LARGEST * ROWS:
        w.add("stack", one, other, settings=(w.number(1, len(sizes) + 1),))


def reduction(w: Writer) -> None:
    """A sum, mean, maximum or minimum over a dimension."""
    one = _shaped(w)
    name = w.one_of([*REDUCTION, *(EXOTIC_REDUCTION if w.exotic else ())])
    w.add(name, one, settings=(_axis(w, one), w.yes()))


def over(w: Writer) -> None:
    """Something done along a dimension."""
    one = _shaped(w)
    w.add(w.one_of(OVER), one, settings=(_axis(w, one),))


def layer_norm(w: Writer) -> None:
    """Layer norm, with or without gain and bias."""
    one = _shaped(w)
    width = w[one].sizes[-1]
    gains = [w.add("parameter", settings=(width,)) for _ in range(w.number(0, 2))]
    w.add("layer_norm", one, *gains, settings=(*(None for _ in range(2 - len(gains))), w.one_of((0.1, 1.0))))


def batched(w: Writer) -> None:
    """Products of what both differs from row to row."""
    matrix = w.pick_rows(2)
    vector = w.pick_rows(1)
    if matrix is None:
        other = w.pick_rows(1)
        if vector is not None and other is not None:
            if w[vector].sizes[0] * w[other].sizes[0] <= LARGEST:
                w.add("outer", vector, other)
            if w[vector].sizes == w[other].sizes:
                w.add("dot", vector, other)
        return
    rows, columns = w[matrix].sizes
    kind = w.one_of(("attend", "read_out", "bmm", "attention"))
    query = w.pick_rows(sizes=(columns,))
    weights = w.pick_rows(sizes=(rows,))
    if kind == "bmm":
        other = w.pick(lambda r: r.is_real and r.has_rows and len(r.sizes) == 2 and r.sizes[0] == columns)
        if other is None:
            other = w.add("transpose", matrix, settings=(1, 2))
        if rows * w[other].sizes[1] <= LARGEST:
            w.add("bmm", matrix, other)
    elif kind == "read_out" and weights is not None:
        w.add("read_out", weights, matrix)
    elif query is not None:
        scores = w.add(w.one_of(("attend", "einsum", "batched")), matrix, query)
        if kind == "attention":
            w.add("read_out", w.add("softmax", scores, settings=(-1,)), matrix)


def heads(w: Writer) -> None:
    """A matrix for each part of a row."""
    one = w.pick_rows(2)
    if one is None:
        vector = _shaped(w)
        count = w[vector].example.numel() // ROWS
        first = w.one_of(divisor for divisor in (2, 3, 1) if count % divisor == 0)
        one = w.add("view", vector, settings=(first, count // first))
    number, size = w[one].sizes
    columns = w.number(1, min(4, LARGEST // max(number, size)))
    w.add(w.one_of(HEADS), one, w.add("parameter", settings=(number, size, columns)))


def elsewhere(w: Writer) -> None:
    """Rows that are not first for a while."""
    w.add(w.one_of(ELSEWHERE), _shaped(w))


def exotic(w: Writer) -> None:
    """An operator that no code is generated for, or not yet."""
    one = _shaped(w)
    width = w[one].sizes[-1]
    if w.yes() and (other := w.pick_rows(sizes=w[one].sizes)) is not None:
        w.add("cosine", one, other)
        return
    kind = w.one_of((*EXOTIC_SHAPE, "rms_norm", "glu", "normalize"))
    if kind in {"repeat", "repeat_interleave", "pad"} and w[one].example.numel() * 3 > LARGEST * ROWS:
        return
    if kind == "glu" and width % 2:
        return
    settings = {
        "roll": (w.number(1, 3),),
        "index": tuple(w.number(0, width - 1) for _ in range(w.number(1, 4))),
        "repeat": (2,),
        "repeat_interleave": (2,),
        "pad": (1, 2),
    }
    w.add(kind, one, settings=settings.get(kind, ()))
