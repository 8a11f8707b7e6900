"""Random cells in layers and both directions, at once, in waves and in stretches of time.

Shape legend: B sequences, T steps, F features.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from fuzz_cell import Case, FuzzCell, Recipe
from fuzz_comparison import Batch, Net, assert_same, by_stretto, is_meaningful
from fuzz_strategies import cases, fuzzed, recipes
from fuzz_writer import Draw
from hypothesis import assume, given
from hypothesis import strategies as st

from stretto.kernels import Backend, Layout, Program, SaveChoice
from stretto.kernels.backends.cpp import batched
from stretto.nn import stack


def width_of(recipe: Recipe) -> int:
    """Features of the output of a cell."""
    cell = FuzzCell(recipe)
    with torch.no_grad():
        y, _ = cell(torch.zeros(1, *recipe.x, dtype=torch.float64), cell.initial_state(1))
    return int(y.shape[-1])


@st.composite
def stacks(draw: Draw) -> list[list[Recipe]]:
    """One to three layers, of one direction or two."""
    num_directions = draw(st.integers(1, 2))
    width = draw(st.sampled_from((3, 1, 5, 8)))
    layers: list[list[Recipe]] = []
    for _ in range(draw(st.integers(1, 3))):
        layers.append([draw(recipes(width=width, longest=6)) for _ in range(num_directions)])
        width = sum(width_of(recipe) for recipe in layers[-1])
    return layers


def _check(layers: list[list[Recipe]], case: Case, backend: Backend, save: SaveChoice = "auto") -> None:
    net = Net(*layers, seed=case.seed)
    batch = Batch.of(layers[0][0], replace(case, given_state=False))
    wanted = net.by_definition(batch)
    assume(is_meaningful(net, batch, wanted))
    assert_same(by_stretto(net.rnn(backend, save), net, batch), wanted)


@fuzzed(10, share=0.2)
@given(stacks(), cases())
def test_layers_and_directions_agree_with_their_definition(layers: list[list[Recipe]], case: Case) -> None:
    _check(layers, case, "eager")


def _three(programs: Sequence[Program], layout: Layout) -> int:
    return 1 if len(programs) < 2 else max(1, min(3, layout.num_steps))


@fuzzed(10, share=0.2)
@given(stacks(), cases())
def test_layers_that_run_as_a_wave_agree_with_their_definition(layers: list[list[Recipe]], case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "wavefront_chunks", _three)
        _check(layers, case, "eager")


@fuzzed(10, share=0.2)
@given(stacks(), cases())
def test_stretches_of_time_agree_with_their_definition(layers: list[list[Recipe]], case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "MIN_STRETCH_STEPS", 1)
        patch.setattr(stack, "MIN_STRETCH_ROWS", 1)
        _check(layers, case, "eager", "states")


@pytest.mark.usefixtures("quick_compiler")
@fuzzed(2, share=0.04)
@given(stacks(), cases())
def test_compiled_loops_of_several_cells_run_at_once(layers: list[list[Recipe]], case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        patch.setattr(batched, "MIN_WORK_PER_THREAD", 1)
        _check(layers, case, "auto")
