"""Every cell in every setting equals the definition, forward and backward, in stacks, both ways, over ragged batches.

Shape legend: B sequences, T steps, H hidden units.
"""

from dataclasses import dataclass
from typing import Final

import pytest
import torch
from parity_cells import SETTINGS, drawn, layer
from parity_oracle import assert_parity, assert_same_bits, error_of, errors_of, found


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
