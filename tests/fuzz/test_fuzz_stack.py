"""Random cells in layers and both directions, at once, in waves and in stretches of time.

Shape legend: B sequences, T steps, F features.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import pytest
import torch
from fuzz_cell import Case, FuzzCell, Recipe, parts_of
from fuzz_comparison import Batch, Results, assert_same, called, is_meaningful, results_of
from fuzz_settings import fuzzed
from fuzz_strategies import cases, recipes
from fuzz_writer import Draw
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import stretto
from stretto.kernels import Backend, Layout, Program, SaveChoice
from stretto.kernels.backends.cpp import gemm
from stretto.nn import stack


@final
class FuzzStack(nn.Module):
    """Layers of cells, each of one or two directions, of which the second reads backwards."""

    def __init__(self, layers: Sequence[Sequence[Recipe]], *, seed: int = 0) -> None:
        super().__init__()
        self.num_directions = len(layers[0])
        recipes_in_order = [recipe for layer in layers for recipe in layer]
        self.each = [FuzzCell(recipe, seed=seed + index) for index, recipe in enumerate(recipes_in_order)]
        self.cells = nn.ModuleList(self.each)

    def by_definition(self, batch: Batch) -> Results:
        """Each sequence by itself, layer by layer, step by step."""
        rows, last = [], []
        for x_TF, length in zip(batch.x_BTF, batch.lengths, strict=True):
            steps = [x_TF[t : t + 1] for t in range(length)]
            states: list[torch.Tensor] = []
            for first in range(0, len(self.each), self.num_directions):
                made = [self._run(index, steps) for index in range(first, first + self.num_directions)]
                states += [part for _, state in made for part in state]
                steps = [torch.cat(together, -1) for together in zip(*(ys for ys, _ in made), strict=True)]
            rest = torch.zeros(batch.x_BTF.shape[1] - length, self.width, dtype=torch.float64)
            rows.append(torch.cat([*steps, rest]))
            last.append(states)
        finals = [torch.cat(parts) for parts in zip(*last, strict=True)]
        return results_of(self, batch, torch.stack(rows), finals)

    def _run(self, index: int, steps: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        cell = self.each[index]
        order = -1 if index % self.num_directions else 1
        state: Any = cell.initial_state(1)
        ys = []
        for x_1F in steps[::order]:
            y, state = cell(x_1F, state)
            ys.append(y)
        return ys[::order], parts_of(state)

    @property
    def width(self) -> int:
        """Features of the output."""
        return sum(width_of(cell.recipe) for cell in self.each[-self.num_directions :])

    def by_stretto(self, rnn: stretto.RNN, batch: Batch) -> Results:
        """The same with the library."""
        y, after = called(rnn, batch, None)
        return results_of(self, batch, y, parts_of(after))


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
    net = FuzzStack(layers, seed=case.seed)
    batch = Batch.of(layers[0][0], replace(case, given_state=False))
    wanted = net.by_definition(batch)
    assume(is_meaningful(net, batch, wanted, net.by_definition))
    rnn = stretto.RNN(list(net.cells), len(layers), net.num_directions == 2, backend=backend, save=save)
    assert_same(net.by_stretto(rnn, batch), wanted)


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
@fuzzed(3, share=0.04)
@given(stacks(), cases())
def test_compiled_loops_of_several_cells_run_at_once(layers: list[list[Recipe]], case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        patch.setattr(gemm, "MIN_WORK_PER_THREAD", 1)
        _check(layers, case, "auto")
