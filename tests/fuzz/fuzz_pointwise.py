"""Random pointwise operators, parameters and products: each function writes a few lines of a recipe."""

from fuzz_operations import (
    BINARY,
    COMPARISON,
    EXOTIC_BINARY,
    EXOTIC_CHOICE,
    EXOTIC_UNARY,
    LEAVES,
    UNARY,
    WITH_NUMBER,
)
from fuzz_writer import LARGEST, ROWS, Writer, go_together

WIDTHS = (3, 1, 2, 4, 5, 7, 8, 9, 17, 35)
NUMBERS = (0.5, -0.3, 1.0, 2.0, 0.0, 0.1)


def unary(w: Writer) -> None:
    """A function of one value."""
    w.add(w.one_of([*UNARY, *(EXOTIC_UNARY if w.exotic else ())]), w.any_rows())


def with_number(w: Writer) -> None:
    """A value and a number."""
    w.add(w.one_of(WITH_NUMBER), w.any_rows(), settings=(w.one_of(NUMBERS),))


def binary(w: Writer) -> None:
    """Two values, one perhaps broadcast, perhaps the same twice."""
    one = w.any_rows()
    other = w.beside(one)
    pair = (one, one if other is None else other)
    w.add(w.one_of([*BINARY, *(EXOTIC_BINARY if w.exotic else ())]), *(pair[::-1] if w.yes() else pair))


def with_leaf(w: Writer) -> None:
    """A value and a parameter, buffer or constant of any shape that fits."""
    one = w.any_rows()
    sizes = w[one].sizes
    shapes = [sizes[-1:], (), sizes, (1, *sizes), (*sizes[:-1], 1)] if sizes else [()]
    other = w.add(w.one_of(LEAVES), settings=w.one_of(shapes))
    if w.yes():
        other = w.add(w.one_of(("tanh", "sigmoid", "square", "detach")), other)
    w.add(w.one_of(("mul", "add", "sub", "maximum", "gate")), one, other)


def comparison(w: Writer) -> None:
    """Truth values."""
    one = w.any_rows()
    other = w.beside(one)
    if other is None or other == one or w.yes():
        w.add(w.one_of(COMPARISON), one, settings=(w.one_of(NUMBERS),))
    else:
        w.add(w.one_of(COMPARISON), one, other)


def choice(w: Writer) -> None:
    """An operation on booleans."""
    one = w.any_rows()
    flag = w.beside(one, flags=True)
    if flag is None:
        flag = w.add("gt", one, settings=(w.one_of(NUMBERS),))
    name = w.one_of(
        (
            "where_number",
            "where",
            "masked_fill",
            "masked",
            "to_real",
            "not",
            "and",
            "or",
            *(EXOTIC_CHOICE if w.exotic else ()),
        )
    )
    if name in {"where_number", "masked_fill"}:
        if name == "masked_fill" and w[flag].example.dim() > w[one].example.dim():
            return
        w.add(name, flag, one, settings=(w.one_of(NUMBERS),))
    elif name in {"to_real", "not"}:
        w.add(name, flag)
    elif name == "masked":
        w.add(name, flag, one)
    elif name in {"and", "or", *EXOTIC_CHOICE}:
        other = w.beside(flag, flags=True)
        w.add(name, flag, flag if other is None else other)
    elif (other := w.beside(one)) is not None:
        shapes = [w[index].example.shape for index in (flag, one, other)]
        if go_together(*shapes):
            w.add(name, flag, one, other)


def three(w: Writer) -> None:
    """A function of three values."""
    one = w.any_rows()
    second, third = w.beside(one), w.beside(one)
    if second is not None and third is not None:
        shapes = [w[index].example.shape for index in (one, second, third)]
        if go_together(*shapes):
            w.add(w.one_of(("lerp", "addcmul")), one, second, third)


def linear(w: Writer) -> None:
    """A product with a weight, an old one or a new one."""
    one = w.any_rows()
    if not w[one].sizes:
        one = w.add("unsqueeze", one, settings=(1,))
    width = w[one].sizes[-1]
    weight = w.still(2, d1=width)
    if weight is None or w.yes():
        weight = w.add("parameter", settings=(w.one_of((*WIDTHS, 12, 24)), width))
    out = w[weight].sizes[0]
    if w[one].example.numel() // width * out > LARGEST * ROWS:
        return
    if w.yes():
        bias = w.still(1, d0=out)
        w.add("linear", one, weight, w.add("parameter", settings=(out,)) if bias is None else bias)
    else:
        w.add("linear", one, weight)


def matmul(w: Writer) -> None:
    """A product with a weight that was used before, the other way round."""
    one = w.pick_rows(1)
    if one is not None and (weight := w.still(2, d0=w[one].sizes[0])) is not None:
        w.add("matmul", one, weight)


def constant_rows(w: Writer) -> None:
    """Rows that are all the same."""
    sizes = w[w.any_rows()].sizes
    if w.yes():
        w.add("each_row", 0, w.add("parameter", settings=sizes), settings=sizes)
    else:
        w.add("new_full", 0, settings=(w.one_of(NUMBERS), *sizes))
