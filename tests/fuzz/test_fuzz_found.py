"""Cells that random search found something with, as small as they could be made."""

from dataclasses import dataclass
from typing import final

import pytest
from fuzz_cell import Case, Op, Recipe
from fuzz_comparison import Batch, Net, assert_same, by_stretto

from stretto.kernels import Backend, SaveChoice


@final
@dataclass(frozen=True, slots=True)
class Found:
    """What to run, and how."""

    recipe: Recipe
    case: Case
    save: SaveChoice = "auto"
    twice: bool = False


FOUND = {
    "the larger one of two numbers of the input": Found(
        Recipe(x=(3,), states=((3,),), code=(Op("fmax", (0, 0)), Op("add", (2, 1))), after=(3,), y=3),
        Case(lengths=(2, 1), x_learns=False),
    ),
    "values that only the backward pass computes are stored": Found(
        Recipe(x=(1,), states=((2,),), code=(Op("erf", (1,)),), after=(2,), y=2), Case(lengths=(1,))
    ),
    "a state follows one that never changes": Found(
        Recipe(x=(1,), states=((1,), (1,)), code=(Op("tanh", (2,)),), after=(1, 1), y=3), Case(lengths=(1,))
    ),
    "a learnt matrix as the initial state": Found(
        Recipe(
            x=(1,),
            states=((3, 9),),
            code=(Op("parameter", (), (9, 9)), Op("linear", (1, 2))),
            after=(3,),
            y=3,
            initial="learned",
        ),
        Case(lengths=(1, 1), given_state=False),
    ),
    "a matrix of the loop is read by a product outside": Found(
        Recipe(
            x=(1,),
            states=((2, 1),),
            code=(Op("add", (1, 1)), Op("parameter", (), (1, 1)), Op("linear", (2, 3)), Op("tanh", (2,))),
            after=(5,),
            y=4,
        ),
        Case(lengths=(1,)),
    ),
    "gradients arrive at several vectors of a row, step after step": Found(
        Recipe(
            x=(1,),
            states=((2, 3),),
            code=(Op("add", (1, 1)), Op("parameter", (), (1, 3)), Op("linear", (2, 3)), Op("tanh", (2,))),
            after=(5,),
            y=4,
        ),
        Case(lengths=(3, 2)),
    ),
    "a matrix made before the loop is read by it": Found(
        Recipe(
            x=(1, 6),
            states=((2, 1),),
            code=(
                Op("expand", (0,), (2, 6)),
                Op("parameter", (), (1, 6)),
                Op("linear", (2, 3)),
                Op("mul", (1, 4)),
            ),
            after=(5,),
            y=5,
        ),
        Case(lengths=(1,)),
    ),
    "a detached state": Found(
        Recipe(
            x=(1,),
            states=((2,),),
            code=(Op("detach", (1,)), Op("parameter", (), (2, 2)), Op("linear", (2, 3))),
            after=(4,),
            y=4,
        ),
        Case(lengths=(1,)),
    ),
    "layer norm of a transposed matrix": Found(
        Recipe(
            x=(1,),
            states=((2, 3),),
            code=(
                Op("transpose", (1,), (1, 2)),
                Op("layer_norm", (2,), (None, None, 1.0)),
                Op("view", (3,), (2, 3)),
            ),
            after=(4,),
            y=4,
        ),
        Case(lengths=(2,)),
    ),
    "a gradient that is carried on transposed": Found(
        Recipe(
            x=(1,),
            states=((2, 2),),
            code=(Op("transpose", (1,), (1, 2)), Op("view", (2,), (4,)), Op("view", (3,), (2, 2))),
            after=(4,),
            y=4,
        ),
        Case(lengths=(2,)),
    ),
    "a parameter before the loop and in it, twice differentiated": Found(
        Recipe(
            x=(2,),
            states=((2,),),
            code=(
                Op("parameter", (), (2,)),
                Op("mul", (0, 2)),
                Op("mul", (1, 2)),
                Op("add", (3, 4)),
                Op("tanh", (5,)),
            ),
            after=(6,),
            y=6,
        ),
        Case(lengths=(2,)),
        twice=True,
    ),
    "a learnt initial state, twice differentiated": Found(
        Recipe(x=(1,), states=((1,),), code=(Op("tanh", (1,)),), after=(2,), y=2, initial="learned"),
        Case(lengths=(1,), given_state=False),
        save="states",
        twice=True,
    ),
    "layer norm, twice differentiated": Found(
        Recipe(x=(1,), states=((2,),), code=(Op("layer_norm", (1,), (None, None, 0.1)),), after=(2,), y=2),
        Case(lengths=(1,)),
        twice=True,
    ),
    "truth values that are stored": Found(
        Recipe(
            x=(3,),
            states=((4,),),
            code=(
                Op("parameter", (), (4, 4)),
                Op("linear", (1, 2)),
                Op("parameter", (), (4,)),
                Op("add", (3, 4)),
                Op("gt", (5,), (0.0,)),
                Op("where_number", (6, 5), (0.1,)),
                Op("tanh", (7,)),
            ),
            after=(8,),
            y=8,
        ),
        Case(lengths=(2,)),
    ),
    "a matrix of products read as a vector by another product": Found(
        Recipe(
            x=(1,),
            states=((4, 1),),
            code=(
                Op("parameter", (), (8, 1)),
                Op("linear", (1, 2)),
                Op("view", (3,), (32,)),
                Op("parameter", (), (4, 32)),
                Op("linear", (4, 5)),
                Op("view", (6,), (4, 1)),
            ),
            after=(7,),
            y=7,
        ),
        Case(lengths=(2,)),
    ),
    "lerp of a state with itself": Found(
        Recipe(x=(1,), states=((1,),), code=(Op("lerp", (1, 1, 1)),), after=(2,), y=2), Case(lengths=(2,))
    ),
    "a product of a single unit over two steps": Found(
        Recipe(
            x=(3,),
            states=((1,),),
            code=(Op("parameter", (), (1, 1)), Op("linear", (1, 2)), Op("tanh", (3,))),
            after=(4,),
            y=4,
        ),
        Case(lengths=(2,), given_state=False),
    ),
    "parts of one split in two loops": Found(
        Recipe(
            x=(1,),
            states=((2,), (2,)),
            code=(
                Op("parameter", (), (4, 2)),
                Op("linear", (1, 3)),
                Op("chunk", (4,), (2, -1)),
                Op("part", (5,), (0,)),
                Op("part", (5,), (1,)),
                Op("add", (2, 7)),
                Op("tanh", (8,)),
            ),
            after=(6, 9),
            y=9,
        ),
        Case(lengths=(2,)),
    ),
}


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("backend", ["eager", "cpp"])
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_stays_right(name: str, backend: Backend) -> None:
    found = FOUND[name]
    net = Net([found.recipe], seed=found.case.seed)
    batch = Batch.of(found.recipe, found.case, twice=found.twice)
    assert_same(by_stretto(net.rnn(backend, found.save), net, batch), net.by_definition(batch))
