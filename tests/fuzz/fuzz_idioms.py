"""What cells are usually made of: each function writes several lines of a recipe that belong together."""

from fuzz_writer import LARGEST, ROWS, Writer


def gates(w: Writer) -> None:
    """One product of inputs and states concatenated, split into gates."""
    found = [index for index in (w.pick_rows(1) for _ in range(w.number(1, 3))) if index is not None]
    if not found:
        return
    joined = w.add("cat", *found, settings=(-1,)) if len(found) > 1 else found[0]
    count, size = w.one_of((2, 3, 4)), w.one_of((3, 2, 5, 9))
    weight = w.add("parameter", settings=(count * size, w[joined].sizes[0]))
    bias = (w.add("parameter", settings=(count * size,)),) if w.yes() else ()
    parts = w.add("chunk", w.add("linear", joined, weight, *bias), settings=(count, -1))
    each = [w.add("part", parts, settings=(index,)) for index in range(count)]
    made = w.add("gate", each[0], each[1])
    for other in each[2:]:
        made = w.add("gate", other, made)
    before = w.pick_rows(sizes=w[made].sizes)
    if before is not None:
        w.add("add", made, w.add("mul", before, w.add("sigmoid", each[0])))


def several_products(w: Writer) -> None:
    """Products of one vector with several weights."""
    one = w.pick_rows(1)
    if one is None:
        return
    width, out = w[one].sizes[0], w.one_of((3, 2, 5, 9))
    made = []
    for _ in range(w.number(2, 3)):
        weight = w.add("parameter", settings=(out, width))
        bias = (w.add("parameter", settings=(out,)),) if w.yes() else ()
        made.append(w.add("linear", one, weight, *bias))
    total = made[0]
    for other in made[1:]:
        total = w.add(w.one_of(("gate", "add", "mul")), total, other)


def sum_of_products(w: Writer) -> None:
    """Products of an input and a state, added up."""
    one, other = w.pick_rows(1), w.pick_rows(1)
    if one is None or other is None:
        return
    out = w.one_of((3, 2, 5, 9))
    first = w.add("linear", one, w.add("parameter", settings=(out, w[one].sizes[0])))
    second = w.add("linear", other, w.add("parameter", settings=(out, w[other].sizes[0])))
    w.add(w.one_of(("tanh", "sigmoid", "relu")), w.add("add", first, second))


def attention(w: Writer) -> None:
    """A query that reads a matrix."""
    matrix = w.pick_rows(2)
    source = w.pick_rows(1)
    if matrix is None or source is None:
        return
    width = w[matrix].sizes[1]
    query = w.add("linear", source, w.add("parameter", settings=(width, w[source].sizes[0])))
    weights = w.add(w.one_of(("softmax", "log_softmax")), w.add("attend", matrix, query), settings=(-1,))
    w.add("read_out", weights, matrix)


def delay_line(w: Writer) -> None:
    """A matrix whose rows move up by one, with something new at its end."""
    matrix = w.pick_rows(2)
    if matrix is None:
        return
    rows, width = w[matrix].sizes
    new = w.pick_rows(sizes=(width,))
    if rows > 1 and new is not None and rows * width <= LARGEST:
        older = w.add("narrow", matrix, settings=(1, 1, rows - 1))
        w.add("cat", older, w.add("unsqueeze", new, settings=(1,)), settings=(1,))


def normalised(w: Writer) -> None:
    """Softmax or layer norm of something that was mixed."""
    one = w.pick_rows(1)
    if one is None or w[one].example.numel() > LARGEST * ROWS:
        return
    if w.yes():
        w.add("layer_norm", one, w.add("parameter", settings=w[one].sizes), settings=(None, 0.1))
    else:
        w.add("mul", one, w.add("softmax", one, settings=(-1,)))
