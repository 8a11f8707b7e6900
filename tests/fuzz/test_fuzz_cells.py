"""Random cells run operator by operator (what is traced, hoisted, sunk, derived and deferred) and by generated code."""

import pytest
import torch
from fuzz_cell import Case, Recipe
from fuzz_comparison import (
    Batch,
    Net,
    Results,
    assert_identical,
    assert_same,
    assert_same_without_gradients,
    by_stretto,
    is_meaningful,
)
from fuzz_strategies import cases, fuzzed, recipes
from hypothesis import assume, given
from hypothesis import strategies as st

import stretto
from stretto.kernels import Backend, SaveChoice
from stretto.kernels.backends.cpp import batched, generate

saves: st.SearchStrategy[SaveChoice] = st.sampled_from(("auto", "states"))


def _check_eager(recipe: Recipe, case: Case, save: SaveChoice, *, twice: bool = False) -> stretto.RNN:
    net = Net([recipe], seed=case.seed)
    batch = Batch.of(recipe, case, twice=twice)
    try:
        wanted = net.by_definition(batch)
    except RuntimeError as error:  # some operators are differentiated once only
        assume(not (twice and "is not implemented" in str(error)))
        raise
    assume(is_meaningful(net, batch, wanted))
    rnn = net.rnn("eager", save)
    found = by_stretto(rnn, net, batch)
    assert_same(found, wanted)
    assert_same_without_gradients(rnn, net, batch, found)
    return rnn


@fuzzed(40, share=1.0)
@given(recipes(), cases(), saves)
def test_random_cells_agree_with_their_definition(recipe: Recipe, case: Case, save: SaveChoice) -> None:
    rnn = _check_eager(recipe, case, save)
    explanation = rnn.explain()
    assert explanation.backend == "eager", explanation.reason


@fuzzed(12, share=0.5)
@given(recipes(exotic=True, shortest=3), cases(), saves)
def test_cells_of_rare_operators_agree_with_their_definition(recipe: Recipe, case: Case, save: SaveChoice) -> None:
    _check_eager(recipe, case, save)


@fuzzed(10, share=0.3)
@given(st.one_of(recipes(), recipes(exotic=True, shortest=3)), cases(), saves)
def test_gradients_can_be_differentiated_again(recipe: Recipe, case: Case, save: SaveChoice) -> None:
    _check_eager(recipe, case, save, twice=True)


def _with_two_threads(rnn: stretto.RNN, net: Net, batch: Batch) -> Results:
    """Loops run with two threads; torch's own products stay with one, for theirs are not the same to the last bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        patch.setattr(batched, "MIN_WORK_PER_THREAD", 1)  # however little there is to do
        return by_stretto(rnn, net, batch)


def _check_compiled(recipe: Recipe, some: list[Case], backend: Backend, save: SaveChoice) -> None:
    net = Net([recipe], seed=some[0].seed)
    rnn = net.rnn(backend, save)
    for case in some:
        batch = Batch.of(recipe, case)
        wanted = net.by_definition(batch)
        assume(is_meaningful(net, batch, wanted))
        found = by_stretto(rnn, net, batch)
        assert_same(found, wanted)
        assert_same_without_gradients(rnn, net, batch, found)
        assert_identical(_with_two_threads(rnn, net, batch).all, found.all)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.9)  # the next batch must see new weights


@pytest.mark.usefixtures("quick_compiler")
@fuzzed(12, share=0.5)
@given(recipes(shortest=4), st.lists(cases(), min_size=1, max_size=2), saves)
def test_random_cells_are_compiled_and_agree_with_their_definition(
    recipe: Recipe, some: list[Case], save: SaveChoice
) -> None:
    _check_compiled(recipe, some, "cpp", save)


@pytest.mark.usefixtures("quick_compiler")
@fuzzed(4, share=0.05)
@given(recipes(exotic=True, shortest=4), st.lists(cases(), min_size=1, max_size=2), saves)
def test_cells_of_rare_operators_run_and_agree_with_their_definition(
    recipe: Recipe, some: list[Case], save: SaveChoice
) -> None:
    _check_compiled(recipe, some, "auto", save)


@pytest.mark.usefixtures("quick_compiler")
@fuzzed(3, share=0.06)
@given(recipes(shortest=4), cases(), saves)
def test_threads_that_share_the_columns_of_few_rows_change_nothing(
    recipe: Recipe, case: Case, save: SaveChoice
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "TEAM_MIN_ELEMENTS", 1)
        patch.setattr(generate, "TEAM_USUAL_ELEMENTS", 1)
        alone = Case(lengths=(max(case.lengths),), padding=case.padding, seed=case.seed)
        _check_compiled(recipe, [alone], "cpp", save)
