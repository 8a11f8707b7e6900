"""Random cells run operator by operator: what is traced, hoisted, sunk, derived and deferred."""

from fuzz_cell import FuzzCell
from fuzz_comparison import (
    Batch,
    assert_same,
    assert_same_without_gradients,
    by_definition,
    by_stretto,
    is_meaningful,
)
from fuzz_recipe import Case, Recipe
from fuzz_settings import fuzzed
from fuzz_strategies import cases, recipes
from hypothesis import assume, given
from hypothesis import strategies as st

import stretto
from stretto.kernels import SaveChoice

saves: st.SearchStrategy[SaveChoice] = st.sampled_from(("auto", "states"))


def _check(recipe: Recipe, case: Case, save: SaveChoice, *, twice: bool = False) -> stretto.RNN:
    cell = FuzzCell(recipe, seed=case.seed)
    batch = Batch.of(recipe, case, twice=twice)
    wanted = by_definition(cell, batch)
    assume(is_meaningful(cell, batch, wanted))
    rnn = stretto.RNN(cell, backend="eager", save=save)
    found = by_stretto(rnn, cell, batch)
    assert_same(found, wanted)
    assert_same_without_gradients(rnn, cell, batch, found)
    return rnn


@fuzzed(200)
@given(recipes(), cases(), saves)
def test_random_cells_agree_with_their_definition(recipe: Recipe, case: Case, save: SaveChoice) -> None:
    rnn = _check(recipe, case, save)
    explanation = rnn.explain()
    assert explanation.backend == "eager", explanation.reason


@fuzzed(100)
@given(recipes(exotic=True, shortest=3), cases(), saves)
def test_cells_of_rare_operators_agree_with_their_definition(recipe: Recipe, case: Case, save: SaveChoice) -> None:
    _check(recipe, case, save)


@fuzzed(60)
@given(recipes(), cases(), saves)
def test_gradients_can_be_differentiated_again(recipe: Recipe, case: Case, save: SaveChoice) -> None:
    _check(recipe, case, save, twice=True)
