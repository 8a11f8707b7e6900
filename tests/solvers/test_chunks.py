"""Stretches of time as rows: every step of every sequence is in one chunk, and the way back leads back.

Shape legend: B sequences, T steps, P real steps of all sequences, F features.
"""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.kernels import Layout
from stretto.solvers.chunks import Chunks

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def _layout(lengths: list[int]) -> Layout:
    return Layout(np.array(sorted(lengths, reverse=True), dtype=np.int64))


@given(LENGTHS, st.integers(1, 50))
def test_the_way_back_leads_back(lengths: list[int], num_chunks: int) -> None:
    layout = _layout(lengths)
    chunks = Chunks.cut(layout, num_chunks)
    x_PF = torch.randn(layout.total, 2)
    rows_PF = chunks.to_chunks(x_PF)
    assert torch.equal(chunks.to_sequences(rows_PF), x_PF)
    assert torch.equal(rows_PF, x_PF[chunks.rows_P])
    assert chunks.layout.total == layout.total
    assert chunks.max_per_sequence <= num_chunks
    assert chunks.layout.num_steps <= chunks.length


@given(LENGTHS, st.integers(1, 50))
def test_a_sum_over_chunks_from_the_right_starts_is_the_sum_over_sequences(lengths: list[int], num_chunks: int) -> None:
    """A recurrence that adds up, run chunk by chunk from the ends of the chunks before."""
    layout = _layout(lengths)
    chunks = Chunks.cut(layout, num_chunks)
    x_P = torch.randint(0, 9, (layout.total,)).double()
    initial_B = torch.arange(layout.num_rows).double()
    rows_P, inside = chunks.to_chunks(x_P), chunks.layout
    sums_C = torch.zeros(chunks.num_chunks, dtype=torch.float64).index_add(0, inside.sequence_P, rows_P)
    ends_C = torch.zeros_like(sums_C)
    for _ in range(max(1, chunks.max_per_sequence)):
        ends_C = chunks.starts([initial_B], chunks.previous_ends([ends_C]))[0] + sums_C
    expected_B = initial_B.index_add(0, layout.sequence_P, x_P)
    assert torch.equal(chunks.final_states([initial_B], [ends_C])[0], expected_B)


@given(LENGTHS, st.integers(1, 50))
def test_inner_boundaries_are_in_order(lengths: list[int], num_chunks: int) -> None:
    chunks = Chunks.cut(_layout(lengths), num_chunks)
    seen = 0
    for sequence, places in chunks.later_by_sequence.items():
        assert [int(chunks.sequence_C[place]) for place in places] == [sequence] * len(places)
        assert [int(chunks.number_C[place]) for place in places] == list(range(1, len(places) + 1))
        assert not bool(chunks.is_first_C[places].any())
        seen += len(places)
    assert seen == int((~chunks.is_first_C).sum())
