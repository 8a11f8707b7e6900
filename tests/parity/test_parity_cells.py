"""Every cell in every setting equals the definition, forward and backward, in stacks, both ways, over ragged batches.

The quick suite runs some of the cases. The slow one runs all, and sweeps settings, sizes, stacks and dtypes.

Shape legend: B sequences, T steps, H hidden units.
"""

import itertools
import random
from dataclasses import dataclass
from typing import Final

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import assert_parity, assert_same_bits, error_of, errors_of, found

from cell_settings import SETTINGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A stack and a batch."""

    layers: int = 1
    both_ways: bool = False
    T: int
    B: int
    lengths: list[int] | None = None
    given: bool = False


SHAPES: Final = {
    "given": Shape(T=100, B=3, given=True),
    "both-ways": Shape(both_ways=True, T=63, B=2, lengths=[17, 63]),
    "ragged": Shape(layers=2, T=2, B=17, lengths=[1, 2, 0, 2, 1, 1, 2, 2, 0, 1, 2, 1, 0, 2, 1, 1, 2], given=True),
    "three-both-ways": Shape(layers=3, both_ways=True, T=2, B=3, lengths=[1, 0, 2], given=True),
    "three": Shape(layers=3, T=63, B=1),
    "one-step": Shape(layers=2, both_ways=True, T=1, B=17),
    "falling": Shape(T=100, B=2, lengths=[99, 31]),
    "one-empty": Shape(layers=2, both_ways=True, T=63, B=2, lengths=[0, 20], given=True),
    "all-empty": Shape(layers=2, both_ways=True, T=2, B=3, lengths=[0, 0, 0], given=True),
    "many": Shape(T=63, B=17, lengths=[5, 3, 63, 0, 1, 7, 7, 7, 20, 2, 4, 6, 8, 1, 0, 0, 9]),
}
"""Pairs of depth, directions, sizes and raggedness; each setting meets three of them."""


def _three_of(settings: list[str]) -> list[tuple[str, str]]:
    names = list(SHAPES)
    return [
        (setting, names[(number + shift) % len(names)])
        for number, setting in enumerate(settings)
        for shift in (0, 3, 7)
    ]


def _check(setting: str, H: int, shape: Shape, *, dtype: torch.dtype) -> None:
    rnn = layer(setting, H, dtype=dtype, num_layers=shape.layers, bidirectional=shape.both_ways, backend="cpp")
    batch = drawn(rnn, T=shape.T, B=shape.B, lengths=shape.lengths, given=shape.given)
    assert_parity(rnn, batch)


@pytest.mark.parametrize(("setting", "shape"), _three_of(list(SETTINGS)))
def test_every_setting_equals_the_definition(setting: str, shape: str) -> None:
    _check(setting, 7, SHAPES[shape], dtype=torch.float64)


@pytest.mark.parametrize("setting", [name for name in SETTINGS if not name.startswith("projected")])
def test_one_unit_equals_the_definition(setting: str) -> None:
    """Weights of one row and one column, whose gradients come in forms of their own."""
    rnn = layer(setting, 1, num_layers=2)
    assert_parity(rnn, drawn(rnn, T=5, B=3, given=True))


SINGLE: Final = [name for name in SETTINGS if not name.endswith("-bare")]


@pytest.mark.parametrize(("setting", "shape"), _three_of(SINGLE))
def test_every_cell_equals_the_definition_in_single_precision(setting: str, shape: str) -> None:
    _check(setting, 33, SHAPES[shape], dtype=torch.float32)


@pytest.mark.parametrize("setting", ["recurrent-dropout", "recurrent-dropout-elman"])
@pytest.mark.parametrize("shape", ["given", "three-both-ways", "many"])
def test_masks_of_whole_sequences_are_the_definition_s_in_training(setting: str, shape: str) -> None:
    chosen = SHAPES[shape]
    rnn = layer(setting, 7, training=True, num_layers=chosen.layers, bidirectional=chosen.both_ways, backend="cpp")
    batch = drawn(rnn, T=chosen.T, B=chosen.B, lengths=chosen.lengths)
    results = assert_parity(rnn, batch, seed=3)
    other = found(rnn, batch, seed=4)
    assert error_of(other.values["y"], results["eager"].values["y"]) > 0.01


@pytest.mark.parametrize("setting", ["zoneout", "zoneout-gru", "nested"])
@pytest.mark.parametrize("shape", ["given", "three-both-ways", "many"])
def test_what_is_drawn_in_the_loop_is_the_same_for_compiled_code(setting: str, shape: str) -> None:
    chosen = SHAPES[shape]
    rnn = layer(setting, 7, training=True, num_layers=chosen.layers, bidirectional=chosen.both_ways, backend="cpp")
    batch = drawn(rnn, T=chosen.T, B=chosen.B, lengths=chosen.lengths)
    compiled = found(rnn, batch, seed=3)
    assert_same_bits(compiled, found(rnn, batch, seed=3))
    rnn.backend = "eager"
    errors = errors_of(compiled, found(rnn, batch, seed=3))
    assert max(errors.values()) < 1e-10, errors
    assert error_of(found(rnn, batch, seed=4).values["y"], compiled.values["y"]) > 0.01


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


STACKS = [*itertools.product((1, 2, 3), (False, True))]
MAX_STEPS = 2000
"""Steps of all sequences, layers and directions of one case."""


def _cases() -> list[tuple[str, int, torch.dtype]]:
    every = itertools.product(SETTINGS, UNITS, (torch.float64, torch.float32))
    # One unit cannot be projected to fewer.
    return [case for case in every if case[1] > 1 or not case[0].startswith("projected")]


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "H", "dtype"), _cases())
def test_every_setting_at_every_size(setting: str, H: int, dtype: torch.dtype) -> None:
    choice = random.Random(f"{setting} {H} {dtype}")
    for T, B in itertools.product(STEPS, SEQUENCES):
        num_layers, both_ways = choice.choice([s for s in STACKS if T * B * s[0] * (1 + s[1]) <= MAX_STEPS])
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
