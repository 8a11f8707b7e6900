"""The whole product of settings and sizes; it compiles hundreds of cells, so it runs when STRETTO_SWEEP is set.

Shape legend: B sequences, T steps, H hidden units.
"""

import itertools
import os
import random

import pytest
import torch
from parity_cells import SETTINGS, drawn, layer
from parity_oracle import assert_parity

SWEEP_VARIABLE = "STRETTO_SWEEP"
STEPS, SEQUENCES, UNITS = (1, 2, 63, 100), (1, 2, 3, 17), (1, 7, 8, 33, 100)
STACKS = [*itertools.product((1, 2, 3), (False, True))]
MOST_STEPS = 2000
"""Steps of all sequences, layers and directions, by hand."""

pytestmark = pytest.mark.skipif(not os.environ.get(SWEEP_VARIABLE), reason=f"{SWEEP_VARIABLE} is not set")


def _cases() -> list[tuple[str, int, torch.dtype]]:
    every = itertools.product(SETTINGS, UNITS, (torch.float64, torch.float32))
    # One unit cannot be projected to fewer.
    return [case for case in every if case[1] > 1 or not case[0].startswith("projected")]


@pytest.mark.parametrize(("setting", "H", "dtype"), _cases())
def test_every_setting_at_every_size(setting: str, H: int, dtype: torch.dtype) -> None:
    choice = random.Random(f"{setting} {H} {dtype}")
    for T, B in itertools.product(STEPS, SEQUENCES):
        num_layers, both_ways = choice.choice([s for s in STACKS if T * B * s[0] * (1 + s[1]) <= MOST_STEPS])
        rnn = layer(
            setting,
            H,
            dtype=dtype,
            seed=choice.randrange(1000),
            num_layers=num_layers,
            bidirectional=both_ways,
            save=choice.choice(["auto", "auto", "states"]),
        )
        lengths = choice.choice(
            [None, [choice.randint(0, T) for _ in range(B)], [choice.choice([0, 1, T]) for _ in range(B)], [0] * B]
        )
        batch = drawn(rnn, T=T, B=B, lengths=lengths, given=choice.random() < 0.5)
        assert_parity(rnn, batch, cancels=H == 1 and setting.startswith(("layer-norm", "ligru")))
