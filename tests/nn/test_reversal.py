"""Reversal of ragged rows against a loop over the sequences.

Shape legend: B sequences, T steps, F features.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.nn import reverse_padded


@st.composite
def ragged(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    num_steps, num_features = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(0, num_steps), min_size=1, max_size=6))
    x_BTF = torch.arange(len(lengths) * num_steps * num_features, dtype=torch.float64)
    return x_BTF.reshape(len(lengths), num_steps, num_features), torch.tensor(lengths)


def _reversed_by_a_loop(x_BTF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    rows = []
    for x_TF, length in zip(x_BTF, lengths_B.tolist(), strict=True):
        rows.append(torch.cat([x_TF[:length].flip(0), x_TF[length:]]))
    return torch.stack(rows)


@settings(deadline=None, max_examples=100)
@given(ragged())
def test_reversal_equals_a_loop_over_the_sequences(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    x_BTF, lengths_B = case
    before_BTF = x_BTF.clone()
    assert torch.equal(reverse_padded(x_BTF, lengths_B), _reversed_by_a_loop(x_BTF, lengths_B))
    assert torch.equal(x_BTF, before_BTF)


@settings(deadline=None, max_examples=50)
@given(ragged())
def test_reversing_twice_changes_nothing(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    x_BTF, lengths_B = case
    assert torch.equal(reverse_padded(reverse_padded(x_BTF, lengths_B), lengths_B), x_BTF)


@settings(deadline=None, max_examples=50)
@given(ragged())
def test_gradients_go_back_to_where_the_values_came_from(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    x_BTF, lengths_B = case
    x_BTF = x_BTF.requires_grad_()
    weights_BTF = torch.randn(x_BTF.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.autograd.backward((reverse_padded(x_BTF, lengths_B) * weights_BTF).sum())
    assert x_BTF.grad is not None
    assert torch.equal(x_BTF.grad, _reversed_by_a_loop(weights_BTF, lengths_B))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_of_either_integer_type(dtype: torch.dtype) -> None:
    x_BTF = torch.tensor([[[1.0], [2.0], [3.0]], [[4.0], [5.0], [9.0]]])
    found_BTF = reverse_padded(x_BTF, torch.tensor([3, 2], dtype=dtype))
    assert found_BTF.squeeze(-1).tolist() == [[3.0, 2.0, 1.0], [5.0, 4.0, 9.0]]


def test_what_is_behind_the_end_never_comes_before_it() -> None:
    x_BTF = torch.full((2, 5, 1), float("nan"))
    x_BTF[0, :2], x_BTF[1, :1] = 1.0, 2.0
    found_BT = reverse_padded(x_BTF, torch.tensor([2, 1])).squeeze(-1)
    assert found_BT.isfinite().tolist() == [[True, True, False, False, False], [True, False, False, False, False]]
