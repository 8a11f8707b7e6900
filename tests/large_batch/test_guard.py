"""The guard: silent on noise of any kind, and never silent on divergence."""

import doctest
import json
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.large_batch import Guard
from stretto.large_batch import guard as guard_module
from stretto.large_batch.guard import Verdict

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
    for seed in range(8):
        draw, guard = random.Random(seed), Guard()
        for at in range(2000):
            loss, norm = CALM[kind](draw, at)
            verdict = guard.observe(loss=loss, gradient_norm=norm)
            assert not verdict.is_trouble, (seed, at, verdict.reason)


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
        assert not guard.observe(loss=size * (1 + noise * draw.gauss(0, 1))).is_trouble
    for at in range(200):
        if guard.observe(loss=size * (1 + noise * draw.gauss(0, 1)) * rate**at).is_trouble:
            return
    pytest.fail("nothing was said")


def test_it_speaks_when_the_loss_jumps_and_stays() -> None:
    draw, guard = random.Random(0), Guard()
    for _ in range(200):
        guard.observe(loss=draw.gauss(1, 0.05))
    after = next(at for at in range(100) if guard.observe(loss=draw.gauss(2, 0.05)).is_trouble)
    assert 10 <= after <= 25


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_trouble_at_once(value: float) -> None:
    assert Guard().observe(loss=value) == Verdict(state="trouble", reason=f"the loss is {value}")
    assert Guard().observe(loss=1.0, gradient_norm=value).reason == f"the norm of the gradient is {value}"


def test_gradients_that_explode_are_told_sooner_than_the_loss() -> None:
    draw, guard = random.Random(0), Guard()
    for _ in range(100):
        guard.observe(loss=draw.gauss(1, 0.01), gradient_norm=draw.lognormvariate(0, 0.5))
    assert not guard.observe(loss=1.0, gradient_norm=1e6).is_trouble
    verdicts = [guard.observe(loss=1.1, gradient_norm=1e3) for _ in range(12)]
    assert "norm of the gradient is 1e+03" in verdicts[-1].reason
    assert "smoothed loss" not in verdicts[-1].reason


def test_a_rate_too_large_for_the_curvature_is_told_if_it_stays() -> None:
    guard = Guard()
    products = [2.5, 2.5, 1.0, 2.5, math.nan, 2.5]
    assert not any(guard.observe(loss=1.0, rate_times_curvature=product).is_trouble for product in products)
    assert not guard.observe(loss=1.0).is_trouble
    assert "rate times curvature is 2.1, above 2 3 times" in guard.observe(loss=1.0, rate_times_curvature=2.1).reason


@pytest.mark.parametrize("kind", ["normal", "falling"])
def test_a_guard_goes_on_from_its_state(kind: str) -> None:
    draw, guard, restored = random.Random(3), Guard(), Guard()
    for at in range(70):
        loss, norm = CALM[kind](draw, at)
        guard.observe(loss=loss, gradient_norm=norm, rate_times_curvature=3.0 if at > 65 else 1.0)
    restored.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    for at in range(60):
        loss = draw.gauss(1, 0.5) * 1.1**at
        one, other = (each.observe(loss=loss, gradient_norm=1.1**at) for each in (guard, restored))
        assert one == other
    assert one.is_trouble
    with pytest.raises(StrettoError, match="version None"):
        restored.load_state_dict({})


def test_restarting_forgets_the_trouble() -> None:
    guard = Guard()
    losses = [1.0] * 100 + [9.0] * 40
    assert any(guard.observe(loss=loss).is_trouble for loss in losses)
    guard.restart()
    assert not any(guard.observe(loss=9.0).is_trouble for _ in range(50))


def test_what_makes_no_sense_is_refused() -> None:
    for wrong in ({"patience": 0}, {"window": 0}, {"memory": 0}, {"tolerance": -0.1}):
        with pytest.raises(StrettoError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
            Guard(**wrong)  # type: ignore[arg-type]


def test_the_examples_run() -> None:
    assert doctest.testmod(guard_module).failed == 0
