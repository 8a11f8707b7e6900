"""Every number of steps, sequences and hidden units, with a few cells.

Shape legend: B sequences, T steps, H hidden units.
"""

import itertools
import random

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import assert_parity

STEPS, SEQUENCES, UNITS = (1, 2, 63, 100), (1, 2, 3, 17), (1, 7, 8, 33, 100)


@pytest.mark.parametrize("H", UNITS)
@pytest.mark.parametrize(("setting", "dtype"), [("lstm", torch.float64), ("gru-before", torch.float32)])
def test_all_steps_and_sequences(setting: str, dtype: torch.dtype, H: int) -> None:
    rnn = layer(setting, H, dtype=dtype, backend="cpp")
    shuffle = random.Random(H)
    for number, (T, B) in enumerate(itertools.product(STEPS, SEQUENCES)):
        lengths = None if number % 2 else [shuffle.randint(0, T) for _ in range(B)]
        assert_parity(rnn, drawn(rnn, T=T, B=B, lengths=lengths, given=number % 3 == 0), kernels=["cpp"])


@pytest.mark.parametrize("rows", [1, 7])
def test_as_many_rows_as_units(rows: int) -> None:
    rnn = layer("lstm", 7, backend="cpp")
    assert_parity(rnn, drawn(rnn, T=7 // rows, B=rows))
