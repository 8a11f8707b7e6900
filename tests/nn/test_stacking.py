"""Stacked steps against a naive loop.

Shape legend: B sequences, T steps, U stacked steps, F features.
"""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.nn import stack_steps, stacked_lengths


@settings(deadline=None, max_examples=100)
@given(
    num_sequences=st.integers(1, 4),
    num_steps=st.integers(1, 11),
    num_features=st.integers(1, 3),
    factor=st.integers(1, 13),
)
def test_stacking_equals_a_loop(num_sequences: int, num_steps: int, num_features: int, factor: int) -> None:
    shape = (num_sequences, num_steps, num_features)
    x_BTF = torch.arange(1, 1 + math.prod(shape), dtype=torch.float64).reshape(shape)
    stacked_BUF = stack_steps(x_BTF, factor=factor)
    assert stacked_BUF.shape == (num_sequences, math.ceil(num_steps / factor), factor * num_features)
    for row in range(num_sequences):
        for group in range(stacked_BUF.shape[1]):
            expected: list[float] = []
            for step in range(group * factor, (group + 1) * factor):
                expected += x_BTF[row, step].tolist() if step < num_steps else [0.0] * num_features
            assert stacked_BUF[row, group].tolist() == expected


@settings(deadline=None, max_examples=100)
@given(lengths=st.lists(st.integers(0, 100), min_size=1, max_size=8), factor=st.integers(1, 9))
def test_lengths_count_a_last_group_that_is_not_full(lengths: list[int], factor: int) -> None:
    found_B = stacked_lengths(torch.tensor(lengths), factor=factor)
    assert found_B.dtype == torch.int64
    assert found_B.tolist() == [math.ceil(length / factor) for length in lengths]


def test_a_sequence_stacks_alike_in_a_longer_batch() -> None:
    x_BTF = torch.randn(1, 7, 2, generator=torch.Generator().manual_seed(0))
    alone_BUF = stack_steps(x_BTF, factor=3)
    longer_BTF = torch.nn.functional.pad(x_BTF, (0, 0, 0, 6))
    assert torch.equal(stack_steps(longer_BTF, factor=3)[:, : alone_BUF.shape[1]], alone_BUF)
