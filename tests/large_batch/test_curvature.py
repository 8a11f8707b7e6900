"""Curvature along the gradient: right on quadratics, and weights put back to the bit.

Shape legend: D dimensions.
"""

import doctest
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto.errors import StrettoError
from stretto.large_batch import curvature, local_curvature


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), num_dims=st.integers(1, 12), size=st.floats(1e-3, 1e3))
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-5), (torch.float32, 2e-2)])
def test_on_a_quadratic_it_is_how_the_hessian_stretches_the_gradient(
    dtype: torch.dtype, within: float, seed: int, num_dims: int, size: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    root_DD = torch.randn(num_dims, num_dims, generator=generator, dtype=dtype)
    hessian_DD = root_DD @ root_DD.T / num_dims + 0.1 * torch.eye(num_dims, dtype=dtype)
    x_D = size * torch.randn(num_dims, generator=generator, dtype=dtype)
    before_D, gradient_D = x_D.clone(), hessian_DD @ x_D
    found = local_curvature(lambda: [hessian_DD @ x_D], [x_D])
    assert found == pytest.approx(float((hessian_DD @ gradient_D).norm() / gradient_D.norm()), rel=within)
    assert torch.equal(x_D, before_D)


def _net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double(), torch.randn(20, 3).double()


def test_on_a_net_it_agrees_with_the_product_of_hessian_and_gradient() -> None:
    model, x = _net()
    every = list(model.parameters())

    def gradient() -> list[torch.Tensor]:
        with torch.enable_grad():
            return list(torch.autograd.grad((model(x) - 1).square().mean(), every))

    before = [parameter.detach().clone() for parameter in every]
    first = torch.autograd.grad((model(x) - 1).square().mean(), every, create_graph=True)
    norm = math.sqrt(sum(float(g.detach().square().sum()) for g in first))
    inner = sum((g * g.detach() / norm).sum() for g in first)
    product = torch.autograd.grad(inner, every)
    wanted = math.sqrt(sum(float(p.square().sum()) for p in product))
    assert local_curvature(gradient, every) == pytest.approx(wanted, rel=1e-5)
    assert local_curvature(gradient, every, gradients=gradient()) == pytest.approx(wanted, rel=1e-5)
    assert all(torch.equal(parameter, copy) for parameter, copy in zip(every, before, strict=True))


def test_gradients_may_be_the_same_tensors_every_time() -> None:
    model, x = _net()
    every = list(model.parameters())

    def backward() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=False)
        with torch.enable_grad():
            torch.autograd.backward(model(x).square().mean())
        return [parameter.grad for parameter in every if parameter.grad is not None]

    assert local_curvature(backward, every) > 1e-3


def test_weights_are_put_back_also_if_the_gradient_fails() -> None:
    x_D, calls = torch.tensor([0.1, -0.0, 3e-42]), []
    before = x_D.clone().view(torch.int32)

    def gradient() -> list[torch.Tensor]:
        calls.append(0)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return [torch.ones(3)]

    with pytest.raises(KeyboardInterrupt):
        local_curvature(gradient, [x_D])
    assert torch.equal(x_D.view(torch.int32), before)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_without_a_direction_there_is_no_curvature(value: float) -> None:
    assert math.isnan(local_curvature(lambda: [torch.full((2,), value)], [torch.ones(2)]))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(StrettoError, match=r"shapes \[\(3,\)\], parameters \[\(2,\)\]"):
        local_curvature(lambda: [torch.ones(3)], [torch.ones(2)])
    with pytest.raises(StrettoError, match="no parameters"):
        local_curvature(list, [])
    with pytest.raises(StrettoError, match="does not move the weights"):
        local_curvature(lambda: [torch.ones(2)], [torch.ones(2)], distance=1e-12)


def test_the_examples_run() -> None:
    assert doctest.testmod(curvature).failed == 0
