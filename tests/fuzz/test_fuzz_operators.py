"""Every operator in a loop: several of them in one cell, each on a part of a product of input and state."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import pytest
from fuzz_cell import Case, Recipe
from fuzz_comparison import Batch, Net, assert_same, by_stretto
from fuzz_operations import (
    BINARY,
    COMPARISON,
    EXOTIC_BINARY,
    EXOTIC_UNARY,
    OVER,
    REDUCTION,
    UNARY,
    WITH_NUMBER,
)
from fuzz_strategies import LONG_RUN
from fuzz_writer import Writer
from hypothesis import strategies as st

from stretto.kernels import Backend

WIDTH = 4
TOGETHER = 1 if LONG_RUN else 8
Piece: TypeAlias = "Callable[[Writer, int, int], int]"


def _never(_: st.SearchStrategy[Any]) -> NoReturn:
    raise AssertionError("nothing is left to chance here")


def _along(name: str, axis: int, *settings: Any) -> Piece:
    """An operator along a dimension of a matrix, brought back to a vector."""

    def write(w: Writer, one: int, other: int) -> int:
        matrix = w.add("outer", one, other)
        made = w.add(name, matrix, settings=(axis, *settings))
        return w.add("sum", made, settings=(axis, False)) if w[made].sizes != (WIDTH,) else made

    return write


def _chosen(name: str, choice: str, *settings: float) -> Piece:
    def write(w: Writer, one: int, other: int) -> int:
        flag = w.add(name, one, settings=(0.1,))
        return w.add(choice, flag, one, *([] if settings or choice == "masked" else [other]), settings=settings)

    return write


def _pieces() -> Iterator[tuple[str, Piece]]:
    for name in (*UNARY, *EXOTIC_UNARY):
        yield name, lambda w, one, _, name=name: w.add(name, one)  # type: ignore[misc]
    for name in (*BINARY, *EXOTIC_BINARY):
        yield name, lambda w, one, other, name=name: w.add(name, one, other)  # type: ignore[misc]
    for name in WITH_NUMBER:
        yield name, lambda w, one, _, name=name: w.add(name, one, settings=(0.3,))  # type: ignore[misc]
    for name in COMPARISON:
        yield f"where {name}", _chosen(name, "where")
        yield f"where_number {name}", _chosen(name, "where_number", 0.1)
    yield "masked_fill", _chosen("gt", "masked_fill", 0.1)
    yield "masked", _chosen("lt", "masked")
    for name in REDUCTION:
        for axis in (1, 2):
            yield f"{name} {axis}", _along(name, axis, False)
            yield f"{name} {axis} kept", _along(name, axis, True)
    for name in OVER:
        for axis in (1, 2):
            yield f"{name} {axis}", _along(name, axis)


PIECES = dict(_pieces())
CORE = [name for name in PIECES if name not in EXOTIC_UNARY and name not in EXOTIC_BINARY]


def _groups(names: list[str]) -> list[str]:
    return [", ".join(names[start : start + TOGETHER]) for start in range(0, len(names), TOGETHER)]


def _recipe(names: list[str]) -> Recipe:
    w = Writer(_never, (3,), ((WIDTH,),), exotic=True)
    count = len(names)
    weight, bias = (
        w.add("parameter", settings=(count * WIDTH, 3 + WIDTH)),
        w.add("parameter", settings=(count * WIDTH,)),
    )
    joined = w.add("cat", 0, 1, settings=(-1,))
    parts = w.add("chunk", w.add("linear", joined, weight, bias), settings=(count, -1))
    total = w.add("times", 1, settings=(0.3,))
    for index, name in enumerate(names):
        part = w.add("part", parts, settings=(index,))
        total = w.add("add", total, PIECES[name](w, part, total))
    state = w.add("tanh", total)
    return Recipe(x=(3,), states=((WIDTH,),), code=tuple(w.code), after=(state,), y=state)


def _check(names: str, backend: Backend) -> None:
    recipe = _recipe(names.split(", "))
    net, batch = Net([recipe], seed=3), Batch.of(recipe, Case(lengths=(4, 2, 3), seed=3))
    assert_same(by_stretto(net.rnn(backend), net, batch), net.by_definition(batch))


@pytest.mark.parametrize("name", PIECES)
def test_every_operator_agrees_with_its_definition(name: str) -> None:
    _check(name, "eager")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("names", _groups(CORE))
def test_every_operator_is_compiled(names: str) -> None:
    _check(names, "cpp")


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("names", _groups([*EXOTIC_UNARY, *EXOTIC_BINARY]))
def test_every_rare_operator_is_compiled(names: str) -> None:
    _check(names, "cpp")
