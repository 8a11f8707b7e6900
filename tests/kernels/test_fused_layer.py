"""Layers that run by one call of compiled code, compared with the same loops operator by operator.

Shape legend: B sequences, T steps, H units, which are as many as features.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import stretto


class _Shared(nn.Module):
    """One weight and one bias for the input and for the state: their gradients are sums of two."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(size, size) / 3), nn.Parameter(torch.randn(size))

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return self.weight.new_zeros(batch_size, self.weight.shape[0])

    def forward(self, x_t: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fed = functional.linear(x_t, self.weight, self.bias)
        h = torch.tanh(fed + functional.linear(state, self.weight, self.bias))
        return h, h


def _results(rnn: nn.Module, x_BTH: torch.Tensor, lengths: Any, state_BH: torch.Tensor) -> list[torch.Tensor]:
    x_BTH, state_BH = x_BTH.clone().requires_grad_(), state_BH.clone().requires_grad_()
    y, after = rnn(x_BTH, state_BH, lengths=lengths)
    ((y * y.detach().cos()).sum() + (after**3).sum()).backward()
    made = [y.detach(), after.detach(), x_BTH.grad, state_BH.grad, *(p.grad for p in rnn.parameters())]
    rnn.zero_grad()
    return made


@pytest.mark.parametrize("T", [1, 2, 13])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_gradients_of_a_shared_weight_are_added(T: int, ragged: bool, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(T)
    cell = _Shared(19).to(dtype)
    fast, plain = (stretto.RNN(cell, backend=backend, batch_first=True) for backend in ("cpp", "eager"))
    x_BTH, state_BH = torch.randn(5, T, 19, dtype=dtype), torch.randn(5, 19, dtype=dtype)
    lengths = torch.tensor([T, 1, T, 1, T]) if ragged else None
    for _ in range(2):  # the second time, what is to be done is known
        found = _results(fast, x_BTH, lengths, state_BH)
        for one, other in zip(found, _results(plain, x_BTH, lengths, state_BH), strict=True):
            assert float((one - other).abs().max()) <= tolerance * (1 + float(other.abs().max()))


def test_what_needs_no_gradient_is_not_remembered_for_what_does() -> None:
    layer = stretto.accelerate(nn.LSTM(6, 9), backend="cpp")
    plain = nn.LSTM(6, 9)
    plain.load_state_dict(layer.state_dict())
    x_TBF = torch.randn(4, 3, 6)
    for frozen in ({"weight_ih_l0"}, {"bias_hh_l0", "weight_hh_l0"}, set[str]()):
        for needs_x in (False, True):
            made = []
            for module in (layer, plain):
                for name, parameter in module.named_parameters():
                    parameter.requires_grad_(name not in frozen)
                    parameter.grad = None
                own_TBF = x_TBF.clone().requires_grad_(needs_x)
                module(own_TBF)[0].sin().sum().backward()
                made.append([own_TBF.grad, *(parameter.grad for parameter in module.parameters())])
            for one, other in zip(*made, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other)


def test_each_gradient_has_memory_of_its_own() -> None:
    layer = stretto.accelerate(nn.LSTM(6, 9, 2), backend="cpp")
    layer(torch.randn(4, 3, 6))[0].sum().backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    assert all(gradient is not None and gradient.is_contiguous() for gradient in gradients)
    assert all(gradient.untyped_storage().nbytes() == gradient.nbytes for gradient in gradients if gradient is not None)
