"""Where points of one grid are on the next, beside a search for them.

Shape legend: B sequences, C chunks, P steps of a grid, Q those of the coarser one.
"""

import itertools
import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.kernels import Layout
from stretto.solvers.multigrid.levels import Level, levels
from stretto.solvers.multigrid.outlook import Outlook

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=5).map(lambda lengths: sorted(lengths, reverse=True))


def _times(layout: Layout) -> dict[tuple[int, int], int]:
    """The row of each step of each sequence."""
    found, row = {}, 0
    for step in range(layout.num_steps):
        for sequence, length in enumerate(layout.lengths_B):
            if step < length:
                found[sequence, step] = row
                row += 1
    return found


@given(lengths=LENGTHS, coarsening=st.integers(2, 7))
def test_a_coarse_step_spans_a_chunk(lengths: list[int], coarsening: int) -> None:
    level = Level(Layout(np.array(lengths, dtype=np.int64)), coarsening)
    fine, coarse = _times(level.layout), _times(level.coarser)
    chunks = level.chunks
    places = {key: place for place, key in enumerate(zip(chunks.sequence_C.tolist(), chunks.number_C, strict=True))}
    # All points that a chunk begins at, but those before which there is no step.
    assert len(coarse) == sum(max(0, math.ceil(length / coarsening) - 1) for length in lengths)
    for (sequence, step), row in coarse.items():
        assert int(level.chunk_Q[row]) == places[sequence, step]
        assert int(level.next_Q[row]) == places[sequence, step + 1]
        assert int(level.first_Q[row]) == fine[sequence, step * coarsening]
    for (sequence, number), place in places.items():
        assert int(level.ahead_C[place]) == number
        assert int(level.behind_C[place]) == math.ceil(lengths[sequence] / coarsening) - 1 - number


@given(lengths=LENGTHS, coarsening=st.integers(2, 7))
def test_states_before_chunks_are_those_of_either_grid(lengths: list[int], coarsening: int) -> None:
    """With states that say where they are: the number of steps before, and a thousand for each sequence."""
    level = Level(Layout(np.array(lengths, dtype=np.int64)), coarsening)
    initial_BD = 1000.0 * torch.arange(len(lengths))[:, None]
    after_PD = initial_BD[level.layout.sequence_P] + level.layout.step_P[:, None] + 1
    after_QD = initial_BD[level.coarser.sequence_P] + coarsening * (level.coarser.step_P[:, None] + 1)
    expected_CD = initial_BD[level.chunks.sequence_C] + coarsening * torch.from_numpy(level.chunks.number_C)[:, None]
    if level.layout.total:
        assert torch.equal(level.starts(initial_BD, after_PD), expected_CD)
    assert torch.equal(level.refined(initial_BD, after_QD), expected_CD)


@given(lengths=LENGTHS, coarsening=st.integers(2, 7), num_levels=st.integers(1, 5))
def test_there_are_as_many_grids_as_make_sense(lengths: list[int], coarsening: int, num_levels: int) -> None:
    found = levels(Layout(np.array(lengths, dtype=np.int64)), num_levels=num_levels, coarsening=coarsening)
    assert 1 <= len(found) <= num_levels
    steps = [level.layout.num_steps for level in found]
    assert all(after == math.ceil(before / coarsening) - 1 for before, after in itertools.pairwise(steps))
    assert all(count >= 1 for count in steps[1:])
    assert len(found) == num_levels or steps[-1] <= coarsening


def test_cycles_that_would_take_too_long_are_foretold() -> None:
    outlook = Outlook(tolerance=1e-8, cycle=10, allowed=100)
    # A tenth is left each time, so that six more are needed.
    assert outlook.given_up(made=4, residual=1e-2, before=1e-1, left=50) == ""
    told = outlook.given_up(made=5, residual=1e-2, before=1e-1, left=50)
    assert told == "11 cycles of 10 steps one after another would take longer than 100 steps"
    # All is certain before that.
    assert outlook.given_up(made=5, residual=1e-2, before=1e-1, left=5) == ""
    # It does not get better.
    assert "22 cycles" in outlook.given_up(made=2, residual=1.0, before=1.0, left=20)
    assert outlook.given_up(made=2, residual=1.0, before=1.0, left=8) == ""
    # Nothing is foretold from the first, but that there will be one more.
    assert outlook.given_up(made=1, residual=1.0, before=1.0, left=20) == ""
    assert "1 cycle of" in Outlook(tolerance=1e-8, cycle=101, allowed=100).given_up(
        made=0, residual=1.0, before=math.inf, left=20
    )
