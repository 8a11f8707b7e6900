"""The guard is silent on noise of any kind and never silent on divergence; curvature is measured right.

Shape legend: D dimensions.
"""

import json
import math
import random
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto.errors import StrettoError
from stretto.large_batch import Guard, local_curvature

Draw = Callable[[random.Random, int], tuple[float, float]]
CALM: dict[str, Draw] = {
    "normal": lambda draw, _: (draw.gauss(1, 0.5), draw.lognormvariate(0, 0.7)),
    "around zero": lambda draw, _: (draw.gauss(0, 0.5), draw.lognormvariate(0, 0.7)),
    "outliers": lambda draw, _: (1 + 0.1 * draw.gauss(0, 1) / draw.random(), draw.lognormvariate(0, 1)),
    "skewed": lambda draw, _: (draw.lognormvariate(0, 1), draw.lognormvariate(0, 1)),
    "levels": lambda draw, _: (draw.choice([1.0, 1.0, 1.0, 1.0, 5.0]), 1.0),
    "constant": lambda _, __: (2.0, 1.0),
    "falling": lambda draw, at: (4 * math.exp(-at / 500) + 0.5 + draw.gauss(0, 0.2), draw.lognormvariate(0, 0.7)),
    "to nothing": lambda draw, at: ((math.exp(-at / 200) + 1e-6) * draw.lognormvariate(0, 0.5), math.exp(-at / 200)),
    "below zero": lambda draw, at: (-3 + 3 * math.exp(-at / 300) + draw.gauss(0, 0.5), draw.lognormvariate(0, 0.7)),
    "begins to learn": lambda draw, at: (
        2.3 / (1 + math.exp((at - 300) / 20)) + draw.gauss(0, 0.02),
        0.01 + 2 * math.exp(-(((at - 300) / 30) ** 2)),
    ),
}


@pytest.mark.parametrize("kind", CALM)
def test_it_is_silent_on_noise(kind: str) -> None:
    for seed in range(3):
        draw, guard = random.Random(seed), Guard()
        for at in range(2000):
            loss, norm = CALM[kind](draw, at)
            trouble = guard.observe(loss=loss, gradient_norm=norm)
            assert not trouble, (seed, at, trouble)


@pytest.mark.parametrize("memory", [4, 128])
@given(losses=st.lists(st.floats(1, 2) | st.sampled_from([1.0, 1.5]), max_size=200))
def test_smoothed_loss_and_its_noise_are_quantiles_of_the_last_updates(losses: list[float], memory: int) -> None:
    guard, gaps = Guard(memory=memory, tolerance=1e9), []
    for at, loss in enumerate(losses):
        guard.observe(loss=loss)
        if at < 14:
            assert guard.smoothed is None
            continue
        assert guard.smoothed == statistics.median(losses[at - 14 : at + 1])
        gaps.append(abs(loss - guard.smoothed))
        ordered = sorted(gaps[-memory:])
        half, most = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.9))
        known = len(ordered) >= min(15, memory)
        assert guard.spread == (max(1.4826 * half, 0.608 * most) if known else math.inf)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    calm=st.integers(0, 400),
    rate=st.floats(1.03, 3.0),
    noise=st.floats(0.0, 0.3),
    size=st.floats(1e-3, 1e3),
)
def test_it_speaks_when_the_loss_explodes(seed: int, calm: int, rate: float, noise: float, size: float) -> None:
    draw, guard = random.Random(seed), Guard()
    for _ in range(calm):
        assert not guard.observe(loss=size * (1 + noise * draw.gauss(0, 1)))
    for at in range(200):
        if guard.observe(loss=size * (1 + noise * draw.gauss(0, 1)) * rate**at):
            return
    pytest.fail("nothing was said")


def test_it_speaks_when_the_loss_jumps_and_stays() -> None:
    draw, guard = random.Random(0), Guard()
    for _ in range(200):
        guard.observe(loss=draw.gauss(1, 0.05))
    after = next(at for at in range(100) if guard.observe(loss=draw.gauss(2, 0.05)))
    assert 10 <= after <= 25


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_trouble_at_once(value: float) -> None:
    assert Guard().observe(loss=value) == f"the loss is {value}"
    assert Guard().observe(loss=1.0, gradient_norm=value) == f"the norm of the gradient is {value}"


def test_gradients_that_explode_are_reported_sooner_than_the_loss() -> None:
    draw, guard = random.Random(0), Guard()
    for _ in range(100):
        guard.observe(loss=draw.gauss(1, 0.01), gradient_norm=draw.lognormvariate(0, 0.5))
    assert not guard.observe(loss=1.0, gradient_norm=1e6)
    troubles = [guard.observe(loss=1.1, gradient_norm=1e3) for _ in range(12)]
    assert "norm of the gradient is 1e+03" in troubles[-1]
    assert "smoothed loss" not in troubles[-1]


def test_a_rate_too_large_for_the_curvature_is_reported_if_it_stays() -> None:
    guard = Guard()
    products = [2.5, 2.5, 1.0, 2.5, math.nan, 2.5]
    assert not any(guard.observe(loss=1.0, rate_times_curvature=product) for product in products)
    assert not guard.observe(loss=1.0)
    assert "rate times curvature is 2.1, above 2 3 times" in guard.observe(loss=1.0, rate_times_curvature=2.1)


@pytest.mark.parametrize("kind", ["normal", "falling"])
def test_a_guard_continues_from_its_state(kind: str) -> None:
    draw, guard, restored = random.Random(3), Guard(), Guard()
    for at in range(70):
        loss, norm = CALM[kind](draw, at)
        guard.observe(loss=loss, gradient_norm=norm, rate_times_curvature=3.0 if at > 65 else 1.0)
    restored.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    for at in range(60):
        loss = draw.gauss(1, 0.5) * 1.1**at
        one, other = (each.observe(loss=loss, gradient_norm=1.1**at) for each in (guard, restored))
        assert one == other
    assert one
    with pytest.raises(StrettoError, match="version None"):
        restored.load_state_dict({})


def test_restarting_forgets_the_trouble() -> None:
    guard = Guard()
    losses = [1.0] * 100 + [9.0] * 40
    assert any(guard.observe(loss=loss) for loss in losses)
    guard.restart()
    assert not any(guard.observe(loss=9.0) for _ in range(50))


def test_what_makes_no_sense_is_refused() -> None:
    for wrong in ({"patience": 0}, {"window": 0}, {"memory": 0}, {"tolerance": -0.1}):
        with pytest.raises(StrettoError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
            Guard(**wrong)  # type: ignore[arg-type]


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


def test_weights_are_restored_also_if_the_gradient_fails() -> None:
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


def test_curvature_refuses_what_makes_no_sense() -> None:
    with pytest.raises(StrettoError, match=r"shapes \[\(3,\)\], parameters \[\(2,\)\]"):
        local_curvature(lambda: [torch.ones(3)], [torch.ones(2)])
    with pytest.raises(StrettoError, match="no parameters"):
        local_curvature(list, [])
