"""Padded batches with lengths in torch's accelerated layers: each sequence as if it were alone, on every backend.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import stretto
from stretto.errors import StrettoError
from stretto.nn import open_forget_gates, reverse_padded, run_ragged

F, H, T = 3, 4, 7
KINDS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "projected": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=2, **options),
    "gru": nn.GRU,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
BACKENDS = ["cpp", "torch", "eager"]
RAGGED = [7, 1, 4, 0]


def _layer(kind: str, backend: str, **options: Any) -> tuple[nn.RNNBase, Any]:
    torch.manual_seed(0)
    theirs = KINDS[kind](F, H, **{"num_layers": 2, "batch_first": True, "bidirectional": True, **options}).double()
    return theirs, stretto.accelerate(copy.deepcopy(theirs), backend=backend)  # type: ignore[arg-type]


def _padded(lengths: list[int]) -> torch.Tensor:
    """Real values on real steps, NaN behind."""
    x_BTF = torch.randn(len(lengths), T, F, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for row, length in enumerate(lengths):
        x_BTF[row, length:] = torch.nan
    return x_BTF.requires_grad_()


def _gradients(module: nn.Module, total: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(total, list(module.parameters()), retain_graph=True))


CASES = [
    *((kind, both_ways, True, RAGGED) for kind in KINDS for both_ways in (True, False)),
    *(("lstm", True, batch_first, lengths) for batch_first in (True, False) for lengths in ([4, 1, 6], [7, 7], [0, 0])),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "both_ways", "batch_first", "lengths"), CASES)
def test_a_padded_batch_is_each_sequence_by_itself(
    kind: str, backend: str, both_ways: bool, batch_first: bool, lengths: list[int]
) -> None:
    theirs, ours = _layer(kind, backend, bidirectional=both_ways, batch_first=batch_first)
    x_BTF = _padded(lengths)
    x = x_BTF if batch_first else x_BTF.transpose(0, 1)
    y, state = ours(x, lengths=lengths)
    for found in (y, run_ragged(ours, x, torch.tensor(lengths))):
        y_BTH = found if batch_first else found.transpose(0, 1)
        assert y_BTH.shape[:2] == (len(lengths), T)
        total = wanted_total = y_BTH.new_zeros(())
        for b, length in enumerate(lengths):
            assert not y_BTH[b, length:].any()
            if length:
                wanted_TH, _ = theirs(x_BTF[b, :length])
                torch.testing.assert_close(y_BTH[b, :length], wanted_TH, atol=1e-10, rtol=0.0)
                total, wanted_total = total + y_BTH[b, :length].square().sum(), wanted_total + wanted_TH.square().sum()
        if not any(lengths):
            continue
        for mine, wanted in zip(_gradients(ours, total), _gradients(theirs, wanted_total), strict=True):
            torch.testing.assert_close(mine, wanted, atol=1e-9, rtol=0.0)
        (d_x_BTF,) = torch.autograd.grad(y_BTH.sum(), x_BTF, retain_graph=True)
        assert not any(d_x_BTF[b, length:].any() for b, length in enumerate(lengths))
    for b, length in enumerate(lengths):
        parts = state if isinstance(state, tuple) else (state,)
        alone = theirs(x_BTF[b, :length])[1] if length else tuple(torch.zeros_like(part[:, b]) for part in parts)
        for part, wanted_LH in zip(parts, alone if isinstance(alone, tuple) else (alone,), strict=True):
            torch.testing.assert_close(part[:, b], wanted_LH, atol=1e-10, rtol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_given_state_is_continued_and_kept_where_there_are_no_steps(backend: str) -> None:
    theirs, ours = _layer("lstm", backend, bidirectional=False)
    x_BTF, given = _padded(RAGGED), tuple(torch.randn(2, 4, H, dtype=torch.float64) for _ in range(2))
    y_BTH, (hidden, cell) = ours(x_BTF, given, lengths=RAGGED)
    for b, length in enumerate(RAGGED):
        before = (given[0][:, b], given[1][:, b])
        wanted_TH, after = theirs(x_BTF[b, :length], before) if length else (torch.zeros(0, H).double(), before)
        torch.testing.assert_close(y_BTH[b, :length], wanted_TH, atol=1e-10, rtol=0.0)
        torch.testing.assert_close((hidden[:, b], cell[:, b]), after, atol=1e-10, rtol=0.0)


def test_gradients_of_both_directions_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    ours: Any = stretto.accelerate(nn.LSTM(1, 2, batch_first=True, bidirectional=True).double(), backend="cpp")
    x_BTF = torch.randn(2, 3, 1, dtype=torch.float64, requires_grad=True)

    def outputs(given_BTF: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        named = dict(zip(dict(ours.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(ours, named, (given_BTF,), {"lengths": [3, 1]})[0]  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(outputs, (x_BTF, *ours.parameters()))


def test_replaced_weights_may_have_another_input_width() -> None:
    """So that a linear layer below can be multiplied into the weights of the input."""
    _, ours = _layer("lstm", "cpp", num_layers=1, bidirectional=False)
    below = nn.Linear(2, F).double()
    x_BTF = torch.randn(3, T, 2, dtype=torch.float64)
    folded = {
        "weight_ih_l0": ours.weight_ih_l0 @ below.weight,
        "bias_ih_l0": ours.bias_ih_l0 + ours.weight_ih_l0 @ below.bias,
    }
    found = torch.func.functional_call(ours, folded, (x_BTF,), {"lengths": [7, 2, 5]})[0]
    wanted = ours(below(x_BTF), lengths=[7, 2, 5])[0]
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0.0)
    every = [*ours.parameters(), *below.parameters()]
    pairs = zip(*(torch.autograd.grad(y.square().sum(), every) for y in (found, wanted)), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, atol=1e-10, rtol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_between_layers_is_for_training_alone(backend: str) -> None:
    _, ours = _layer("lstm", backend, dropout=0.5)
    x_BTF = torch.randn(2, T, F, dtype=torch.float64)
    assert not torch.equal(run_ragged(ours, x_BTF, [7, 3]), run_ragged(ours, x_BTF, [7, 3]))
    ours.eval()
    assert torch.equal(run_ragged(ours, x_BTF, [7, 3]), run_ragged(ours, x_BTF, [7, 3]))


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("lengths", [[3], [8, 1], [-1, 2], [1.5, 2.0]])
def test_lengths_that_do_not_fit_are_refused(lengths: list[Any], backend: str) -> None:
    _, ours = _layer("gru", backend)
    for call in (partial(run_ragged, ours), lambda x, given: ours(x, lengths=given)):
        with pytest.raises(StrettoError, match="length"):
            call(torch.zeros(2, T, F, dtype=torch.float64), lengths)


def test_forget_gates_are_opened_in_all_layers_and_directions() -> None:
    lstm = nn.LSTM(2, 3, 2, bidirectional=True)
    open_forget_gates(lstm)
    biases = [p for name, p in lstm.named_parameters() if "bias_ih" in name]
    assert len(biases) == 4
    assert all(bias[3:6].tolist() == [1.0] * 3 and (bias[:3] != 1.0).all() for bias in biases)


@settings(deadline=None, max_examples=100)
@given(st.data(), st.integers(1, 9), st.integers(1, 4), st.sampled_from([torch.int32, torch.int64]))
def test_reversal_and_its_gradient_equal_a_loop_over_the_sequences(
    data: st.DataObject, num_steps: int, num_features: int, dtype: torch.dtype
) -> None:
    lengths = data.draw(st.lists(st.integers(0, num_steps), min_size=1, max_size=6))

    def by_a_loop(x_BTF: torch.Tensor) -> torch.Tensor:
        rows = zip(x_BTF, lengths, strict=True)
        return torch.stack([torch.cat([x_TF[:length].flip(0), x_TF[length:]]) for x_TF, length in rows])

    x_BTF, weights_BTF = torch.randn(2, len(lengths), num_steps, num_features, dtype=torch.float64)
    found_BTF = reverse_padded(x_BTF.requires_grad_(), torch.tensor(lengths, dtype=dtype))
    assert torch.equal(found_BTF, by_a_loop(x_BTF))
    found_BTF.backward(weights_BTF)
    assert x_BTF.grad is not None
    assert torch.equal(x_BTF.grad, by_a_loop(weights_BTF))


def test_lengths_of_a_packed_batch_are_refused() -> None:
    packed = pack_sequence([torch.zeros(3, F), torch.zeros(2, F)])
    for backend in BACKENDS:
        layer: Any = stretto.accelerate(nn.GRU(F, H), backend=backend)  # type: ignore[arg-type]
        with pytest.raises(StrettoError, match="padded batches"):
            layer(packed, lengths=[3, 2])
