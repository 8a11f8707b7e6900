"""Batches of all kinds: packed, without a batch, steps first, lengths of any kind, no steps, no sequences.

Shape legend: B sequences, T steps, F features, H hidden units, O features of the output.
"""

from collections.abc import Callable

import pytest
import torch
from parity_cells import layer
from parity_oracle import KERNELS, assert_close, assert_equal, defined, noise
from torch.nn.utils.rnn import pack_padded_sequence

import stretto
from cell_settings import F
from stretto.state import flatten, map_state

H, T, B = 7, 11, 4
LENGTHS = [5, 11, 0, 8]


def test_packed_state_goes_round(lstm: stretto.RNN) -> None:
    x_BTF, lengths = noise(B, T, F), torch.tensor([5, 11, 1, 8])
    packed = pack_padded_sequence(x_BTF, lengths, batch_first=True, enforce_sorted=False)
    given = (noise(B, H), 2 * noise(B, H))
    _, ours = lstm(packed, given)
    _, theirs = defined(lstm, x_BTF, lengths.tolist(), given)
    assert_close(flatten(ours), theirs)


@pytest.mark.parametrize("batch_first", [True, False])
def test_one_sequence_without_a_batch(lstm: stretto.RNN, batch_first: bool) -> None:
    lstm.batch_first = batch_first
    x_TF, given = noise(T, F), (noise(H), noise(H) - 1)
    y_TH, state = lstm(x_TF, given)
    hand_BTH, ends = defined(lstm, x_TF[None], state=(given[0][None], given[1][None]))
    assert_close([y_TH, *flatten(state)], [hand_BTH[0], *(end[0] for end in ends)])
    assert [tuple(part.shape) for part in flatten(state)] == [(H,), (H,)]


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_steps_first(lstm: stretto.RNN, lengths: list[int] | None) -> None:
    x_BTF = noise(B, T, F)
    y_BTH, state = lstm(x_BTF, lengths=lengths)
    lstm.batch_first = False
    y_TBH, same = lstm(x_BTF.transpose(0, 1), lengths=lengths)
    assert_equal([y_TBH.transpose(0, 1), *flatten(same)], [y_BTH, *flatten(state)])


@pytest.mark.parametrize("as_what", [list, tuple, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_lengths_of_any_kind(lstm: stretto.RNN, as_what: Callable[[list[int]], object]) -> None:
    x_BTF = noise(B, T, F)
    assert torch.equal(lstm(x_BTF, lengths=as_what(LENGTHS))[0], lstm(x_BTF, lengths=LENGTHS)[0])


def test_what_lies_behind_the_end_does_not_matter(lstm: stretto.RNN) -> None:
    x_BTF = noise(B, T, F)
    spoilt_BTF = x_BTF.clone()
    for row, length in enumerate(LENGTHS):
        spoilt_BTF[row, length:] = torch.nan
    leaf_BTF = spoilt_BTF.requires_grad_()
    y_BTH, state = lstm(leaf_BTF, lengths=LENGTHS)
    clean_BTH, clean_state = lstm(x_BTF, lengths=LENGTHS)
    assert_equal([y_BTH, *flatten(state)], [clean_BTH, *flatten(clean_state)])
    (gradient_BTF,) = torch.autograd.grad(y_BTH.sum(), [leaf_BTF])
    for row, length in enumerate(LENGTHS):
        assert not gradient_BTF[row, length:].any()
        assert bool(gradient_BTF[row, :length].isfinite().all())


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("setting", ["lstm", "gru-before", "clockwork"])
def test_no_steps(setting: str, backend: str, both_ways: bool) -> None:
    rnn = layer(setting, H, backend=backend, num_layers=2, bidirectional=both_ways)
    states = tuple(cell.initial_state(B) for cell in rnn.cells)  # type: ignore[operator]
    given = [(part + torch.arange(B)[:, None]).requires_grad_() for part in flatten(states)]
    remaining = iter(given)
    state = map_state(lambda _: next(remaining), states)
    x_BTF = noise(B, 0, F).requires_grad_()
    y_BTO, after = rnn(x_BTF, state)
    assert y_BTO.shape[:2] == (B, 0)
    assert_equal(flatten(after), given)
    total = y_BTO.sum() + sum(part.square().sum() for part in flatten(after))
    gradients = torch.autograd.grad(total, [*given, x_BTF, *rnn.parameters()], allow_unused=True)
    assert_equal(gradients[: len(given)], [2 * part for part in given])
    assert not any(gradient is not None and bool(gradient.any()) for gradient in gradients[len(given) :])


@pytest.mark.parametrize("lengths", [None, []])
@pytest.mark.parametrize("T", [0, 3])
@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("backend", KERNELS)
def test_no_sequences(backend: str, both_ways: bool, T: int, lengths: list[int] | None) -> None:
    rnn = layer("lstm", H, backend=backend, num_layers=2, bidirectional=both_ways)
    y_BTO, state = rnn(noise(0, T, F).requires_grad_(), lengths=lengths)
    assert y_BTO.shape == (0, T, H * (1 + both_ways))
    assert [tuple(part.shape) for part in flatten(state)] == [(0, H)] * (8 if both_ways else 4)
    y_BTO.sum().backward()
    assert not any(p.grad is not None and bool(p.grad.any()) for p in rnn.parameters())
