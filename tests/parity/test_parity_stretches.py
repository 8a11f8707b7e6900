"""Storing states alone: stretches of time are computed again in the backward pass, and nothing else changes.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from collections.abc import Callable

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import (
    KERNELS,
    Batch,
    assert_close,
    assert_parity,
    assert_same_bits,
    defined,
    found,
    noise,
)
from parity_own_cells import (
    ConstantState,
    Counting,
    DelayLine,
    LearnedStart,
    Noisy,
    Stateless,
    WritesToParts,
    own_layer,
)

from cell_settings import F
from stretto.cells import Cell
from stretto.state import flatten

LENGTHS = [70, 1, 33, 64, 0, 32, *[1] * 28, *[2] * 6]
"""Forty rows make stretches of 32 steps and more."""


@pytest.mark.parametrize(
    "setting", ["lstm", "gru-before", "layer-norm-lstm", "attention", "clockwork", "recurrent-dropout", "indrnn"]
)
def test_stretches_equal_the_definition(setting: str) -> None:
    rnn = layer(setting, 7, save="states")
    assert_parity(rnn, drawn(rnn, T=100, B=len(LENGTHS), lengths=LENGTHS, given=True))


@pytest.mark.parametrize("lengths", [None, [5, 0, 8], [0, 0, 0]])
def test_one_stretch_both_ways_in_layers(lengths: list[int] | None) -> None:
    rnn = layer("lstm", 7, save="states", num_layers=3, bidirectional=True)
    assert_parity(rnn, drawn(rnn, T=8, B=3, lengths=lengths, given=True))


def test_stretches_both_ways_in_layers() -> None:
    rnn = layer("gru", 7, save="states", num_layers=2, bidirectional=True)
    assert_parity(rnn, drawn(rnn, T=100, B=len(LENGTHS), lengths=LENGTHS, given=True), kernels=["cpp"])


@pytest.mark.parametrize("cell", [ConstantState, Counting, DelayLine, LearnedStart, Stateless, WritesToParts])
def test_stretches_of_own_cells(cell: type[Cell]) -> None:
    rnn = own_layer(cell, save="states")
    assert_parity(rnn, drawn(rnn, T=100, B=len(LENGTHS), lengths=LENGTHS, given=True), kernels=["auto"])


@pytest.mark.parametrize("backend", KERNELS)
def test_random_numbers_are_the_same_when_computed_again(backend: str) -> None:
    """The slope along a line is that of the values on it, which are drawn with the same seed."""
    rnn = own_layer(Noisy, save="states", backend=backend)
    x_BTF = noise(40, 70, F)
    around_HH = rnn.cells[0].around.weight
    line_HH, start_HH = torch.randn_like(around_HH), around_HH.detach().clone()

    def total(place: float) -> torch.Tensor:
        with torch.no_grad():
            around_HH.copy_(start_HH + place * line_HH)
        torch.manual_seed(3)
        y_BTH: torch.Tensor = rnn(x_BTF)[0]
        return y_BTH.sum()

    (slope_HH,) = torch.autograd.grad(total(0.0), [around_HH])
    between = (total(1e-6) - total(-1e-6)).item() / 2e-6
    assert (slope_HH * line_HH).sum().item() == pytest.approx(between, rel=1e-6)


def test_random_numbers_afterwards_are_those_that_would_have_come() -> None:
    rnn = layer("zoneout", 7, save="states", training=True)
    x_BTF = noise(40, 70, F)
    torch.manual_seed(3)
    y_BTH, _ = rnn(x_BTF)
    after_forward = torch.get_rng_state()
    y_BTH.sum().backward()
    assert torch.equal(torch.get_rng_state(), after_forward)


def test_second_derivatives_through_stretches() -> None:
    rnn = layer("lstm", 7, save="states")
    x_BTF = noise(40, 70, F).requires_grad_()
    lengths = [70, 40, *[1] * 38]
    results = []
    for y_BTO in (rnn(x_BTF, lengths=lengths)[0], defined(rnn, x_BTF, lengths)[0]):
        (slope_BTF,) = torch.autograd.grad(y_BTO.square().sum(), [x_BTF], create_graph=True)
        results.append(torch.autograd.grad(slope_BTF.square().sum(), [x_BTF, *rnn.parameters()]))
    assert_close(*results)


@pytest.mark.parametrize("frozen", ["x", "weight_hh", "all"])
def test_stretches_where_not_all_is_learned(frozen: str) -> None:
    rnn = layer("lstm", 7, save="states")
    x_BTF = noise(40, 70, F).requires_grad_(frozen == "weight_hh")
    if frozen == "all":
        rnn.requires_grad_(False)
    if frozen == "weight_hh":
        rnn.cells[0].get_parameter("weight_hh").requires_grad_(False)
    y_BTH, state = rnn(x_BTF, lengths=LENGTHS)
    assert y_BTH.requires_grad == (frozen != "all")
    hand_BTH, ends = defined(rnn, x_BTF, LENGTHS)
    assert_close([y_BTH, *flatten(state)], [hand_BTH, *ends])
    inputs = [tensor for tensor in (x_BTF, *rnn.parameters()) if tensor.requires_grad]
    if inputs:
        assert_close(*(torch.autograd.grad(y.square().sum(), inputs) for y in (y_BTH, hand_BTH)))


@pytest.mark.usefixtures("poisoned_memory")
def test_stretches_read_nothing_unwritten() -> None:
    rnn = layer("lstm", 7, save="states")
    assert_parity(rnn, drawn(rnn, T=100, B=len(LENGTHS), lengths=LENGTHS, given=True), kernels=["cpp"])


def test_stretches_make_the_same_bits(set_threads: Callable[[int], None]) -> None:
    rnn = layer("lstm", 7, save="states", backend="cpp", num_layers=2)
    batch = Batch(x_BTF=drawn(rnn, T=100, B=len(LENGTHS)).x_BTF, lengths=LENGTHS)
    results = []
    for threads in (1, 2, 4):
        set_threads(threads)
        results += [found(rnn, batch), found(rnn, batch)]
    for other in results[1:]:
        assert_same_bits(results[0], other)
