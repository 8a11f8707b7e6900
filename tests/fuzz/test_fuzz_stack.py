"""Random cells in layers and both directions, at once, in waves and in stretches of time."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from fuzz_comparison import Batch, assert_same, is_meaningful
from fuzz_recipe import Case, Recipe
from fuzz_settings import fuzzed
from fuzz_stack import FuzzStack, stacks
from fuzz_strategies import cases
from hypothesis import assume, given

import stretto
from stretto.kernels import Backend, Layout, Program, SaveChoice
from stretto.kernels.backends.cpp import gemm
from stretto.nn import recompute, stack


def _check(layers: list[list[Recipe]], case: Case, backend: Backend, save: SaveChoice = "auto") -> None:
    net = FuzzStack(layers, seed=case.seed)
    batch = Batch.of(layers[0][0], replace(case, given_state=False))
    wanted = net.by_definition(batch)
    assume(is_meaningful(net, batch, wanted, net.by_definition))
    rnn = stretto.RNN(list(net.cells), len(layers), net.num_directions == 2, backend=backend, save=save)
    assert_same(net.by_stretto(rnn, batch), wanted)


@fuzzed(40)
@given(stacks(), cases())
def test_layers_and_directions_agree_with_their_definition(layers: list[list[Recipe]], case: Case) -> None:
    _check(layers, case, "eager")


def _three(programs: Sequence[Program], layout: Layout) -> int:
    return 1 if len(programs) < 2 else max(1, min(3, layout.num_steps))


@fuzzed(40)
@given(stacks(), cases())
def test_layers_that_run_as_a_wave_agree_with_their_definition(layers: list[list[Recipe]], case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "wavefront_chunks", _three)
        _check(layers, case, "eager")


@fuzzed(40)
@given(stacks(), cases())
def test_stretches_of_time_agree_with_their_definition(layers: list[list[Recipe]], case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "FEWEST_STEPS", 1)
        patch.setattr(recompute, "FEWEST_ROWS", 1)
        _check(layers, case, "eager", "states")


@pytest.mark.usefixtures("quick_compiler")
@fuzzed(8)
@given(stacks(), cases())
def test_compiled_loops_of_several_cells_run_at_once(layers: list[list[Recipe]], case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        patch.setattr(gemm, "MIN_WORK_PER_THREAD", 1)
        _check(layers, case, "auto")
