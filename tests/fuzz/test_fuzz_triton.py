"""Random cells by generated Triton, interpreted on the CPU: never run on a GPU."""

import pytest
from fuzz_cell import Case, Recipe
from fuzz_comparison import Batch, Net, assert_same, assert_same_without_gradients, by_stretto, is_meaningful
from fuzz_strategies import cases, fuzzed, recipes
from hypothesis import assume, given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.kernels import SaveChoice
from stretto.kernels.backends.triton.emit import Tiles

TINY = Tiles(rows=2, elements=4, columns=4, depth=4, reduced=4, least=2)
"""Random cells are small: with tiles of this size they have several, and batches several programs."""
TEAM = Tiles(rows=2, elements=2, columns=2, depth=4, reduced=4, least=2, shares=2)
RESIDENT = Tiles(rows=2, elements=64, columns=64, depth=64, least=2, resident=True)

TILES = {"ordinary": Tiles(), "tiny": TINY, "resident": RESIDENT, "cooperative": TEAM}

saves: st.SearchStrategy[SaveChoice] = st.sampled_from(("auto", "states"))


def _check(recipe: Recipe, case: Case, save: SaveChoice, chosen: Tiles) -> None:
    net = Net([recipe], seed=case.seed)
    batch = Batch.of(recipe, case)
    wanted = net.by_definition(batch)
    assume(is_meaningful(net, batch, wanted))
    rnn = net.rnn("triton", save)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.kernels.backends.triton.backend.choose_tiles", lambda *_: chosen)
        try:
            found = by_stretto(rnn, net, batch)
        except StrettoError as error:
            assert "no Triton code is generated" in str(error)  # noqa: PT017 - said so, and not wrong
            return
        assert_same(found, wanted)
        assert_same_without_gradients(rnn, net, batch, found)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("name", TILES)
@fuzzed(15, share=0.45)
@given(recipe=recipes(shortest=4), case=cases(), save=saves)
def test_random_cells_agree_with_their_definition(name: str, recipe: Recipe, case: Case, save: SaveChoice) -> None:
    _check(recipe, case, save, TILES[name])


@pytest.mark.usefixtures("interpreter")
@fuzzed(3, share=0.05)
@given(recipes(exotic=True, shortest=4), cases(), saves, st.sampled_from(list(TILES.values())))
def test_cells_of_rare_operators_agree_with_their_definition(
    recipe: Recipe, case: Case, save: SaveChoice, chosen: Tiles
) -> None:
    _check(recipe, case, save, chosen)
