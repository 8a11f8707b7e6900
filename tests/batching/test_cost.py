"""The cost of a sequence padded to a length: fitted, measured, and refused when it cannot be used."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.batching import BucketSampler, StepCost, optimal_edges, padded_cost
from stretto.batching.cost import evaluate_cost
from stretto.errors import StrettoError

SHAPES = [(rows, steps) for steps in (20, 100, 700) for rows in (1, 8, 32)]
terms = st.sampled_from([0.0, 1e-7, 3e-6, 2e-5, 1e-3, 0.5])


def seconds(shape: tuple[int, int], *, per_batch: float, per_step: float, per_padded_step: float) -> float:
    rows, steps = shape
    return per_batch + steps * (per_step + per_padded_step * rows)


@settings(deadline=None, max_examples=80)
@given(per_batch=terms, per_step=terms, per_padded_step=terms)
def test_fit_recovers_the_terms(per_batch: float, per_step: float, per_padded_step: float) -> None:
    given_terms = {"per_batch": per_batch, "per_step": per_step, "per_padded_step": per_padded_step}
    if not any(given_terms.values()):
        return
    fitted = StepCost.fit(SHAPES, [seconds(shape, **given_terms) for shape in SHAPES], max_padded_steps=1000)
    for shape in SHAPES:
        again = seconds(
            shape, per_batch=fitted.per_batch, per_step=fitted.per_step, per_padded_step=fitted.per_padded_step
        )
        assert again == pytest.approx(seconds(shape, **given_terms), rel=1e-6)
    shortest = min(seconds(shape, **given_terms) for shape in SHAPES)
    for name, share in (("per_batch", 1.0), ("per_step", 20.0), ("per_padded_step", 20.0)):
        assert getattr(fitted, name) == pytest.approx(given_terms[name], rel=1e-6, abs=1e-6 * shortest / share)
    assert fitted.max_padded_steps == 1000


def test_fit_keeps_every_term_at_zero_or_above() -> None:
    falling = [1.0 / (rows * steps) for rows, steps in SHAPES]
    fitted = StepCost.fit(SHAPES, falling, batch_size=8)
    assert min(fitted.per_batch, fitted.per_step, fitted.per_padded_step) >= 0
    rng = np.random.default_rng(0)
    for _ in range(20):
        noisy = StepCost.fit(SHAPES, rng.lognormal(0.0, 2.0, len(SHAPES)).tolist(), batch_size=8)
        assert min(noisy.per_batch, noisy.per_step, noisy.per_padded_step) >= 0


@settings(deadline=None, max_examples=100)
@given(
    per_batch=terms,
    per_step=terms,
    per_padded_step=terms,
    max_padded_steps=st.integers(1, 10**6),
    lengths=st.sets(st.integers(1, 10**6), min_size=2, max_size=60),
)
def test_budget_cost_never_falls(
    per_batch: float, per_step: float, per_padded_step: float, max_padded_steps: int, lengths: set[int]
) -> None:
    cost = StepCost(
        per_batch=per_batch, per_step=per_step, per_padded_step=per_padded_step, max_padded_steps=max_padded_steps
    )
    rising = sorted(lengths)
    costs = cost(rising)
    assert (np.diff(costs) >= 0).all()
    for length, found in zip(rising, costs.tolist(), strict=True):
        rows = max(1, max_padded_steps // length)
        assert found == pytest.approx((per_batch + per_step * length) / rows + per_padded_step * length, rel=1e-12)


def test_fixed_batch_shares_the_batch_evenly() -> None:
    cost = StepCost(per_batch=8.0, per_step=4.0, per_padded_step=1.0, batch_size=4)
    assert cost([1, 10]).tolist() == [2.0 + 1.0 + 1.0, 2.0 + 10.0 + 10.0]
    assert float(cost(np.uint8(200))) == 2.0 + 200.0 + 200.0


def test_step_cost_is_a_cost_for_edges_and_sampler() -> None:
    lengths = np.random.default_rng(0).integers(1, 400, 2000)
    cost = StepCost(per_batch=1e-3, per_step=1e-4, per_padded_step=1e-6, max_padded_steps=4000)
    by_time, by_steps = optimal_edges(lengths, 6, cost), optimal_edges(lengths, 6)
    assert by_time.tolist() != by_steps.tolist()
    assert padded_cost(lengths, by_time, cost) < padded_cost(lengths, by_steps, cost)
    sampler = BucketSampler(lengths, max_padded_steps=4000, num_buckets=6, cost=cost)
    assert sampler.edges.tolist() == by_time.tolist()


@pytest.mark.parametrize("size", [{"batch_size": 16}, {"max_padded_steps": 6400}])
def test_measure_fits_the_shortest_of_the_repeats(monkeypatch: pytest.MonkeyPatch, size: dict[str, int]) -> None:
    clock, calls = [100.0], []
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def train_step(rows: int, steps: int) -> None:
        calls.append((rows, steps))
        slow = 50.0 if len(calls) <= 9 else 0.0
        clock[0] += slow + seconds((rows, steps), per_batch=0.25, per_step=0.5, per_padded_step=0.125)

    fitted = StepCost.measure(train_step, longest=400, repeats=2, **size)
    assert fitted.per_batch == pytest.approx(0.25, rel=1e-6)
    assert fitted.per_step == pytest.approx(0.5, rel=1e-6)
    assert fitted.per_padded_step == pytest.approx(0.125, rel=1e-6)
    assert (fitted.batch_size, fitted.max_padded_steps) == (size.get("batch_size"), size.get("max_padded_steps"))
    assert len(calls) == 27
    assert len(set(calls)) == 9
    assert calls[:9] == calls[9:18] == calls[18:]
    assert all(rows <= 16 and steps <= 400 for rows, steps in calls)


@pytest.mark.parametrize("longest", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("size", [{"batch_size": 1}, {"batch_size": 2}, {"max_padded_steps": 20}])
def test_measure_copes_with_tiny_shapes(monkeypatch: pytest.MonkeyPatch, longest: int, size: dict[str, int]) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def train_step(rows: int, steps: int) -> None:
        clock[0] += seconds((rows, steps), per_batch=1.0, per_step=0.5, per_padded_step=0.25)

    fitted = StepCost.measure(train_step, longest=longest, **size)
    rows = size.get("batch_size") or max(1, 20 // longest)
    wanted = seconds((rows, longest), per_batch=1.0, per_step=0.5, per_padded_step=0.25) / rows
    assert float(fitted(longest)) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("times", "named"),
    [
        ([0.0, 1.0, 1.0], "0"),
        ([1.0, math.nan, 1.0], "nan"),
        ([1.0, 1.0, math.inf], "inf"),
        ([1.0, -1.0, 1.0], "-1"),
    ],
)
def test_times_that_are_no_times_are_refused(monkeypatch: pytest.MonkeyPatch, times: list[float], named: str) -> None:
    solve = np.linalg.lstsq

    def guarded(design: Any, wanted: Any, **options: Any) -> Any:
        # LAPACK may never return from an infinite or NaN entry.
        assert np.isfinite(design).all()
        return solve(design, wanted, **options)

    monkeypatch.setattr("numpy.linalg.lstsq", guarded)
    with np.errstate(divide="ignore"), pytest.raises(StrettoError, match=named):
        StepCost.fit([(1, 1), (1, 2), (2, 2)], times, batch_size=2)


TERMS: dict[str, float] = {"per_batch": 1.0, "per_step": 1.0, "per_padded_step": 1.0}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: StepCost.fit([(1, 1), (1, 2)], [1.0, 2.0], batch_size=2), "2 shapes with 2 times"),
        (lambda: StepCost.fit([(1, 1), (1, 2), (2, 2)], [1.0, 2.0], batch_size=2), "3 shapes with 2 times"),
        *(
            (lambda size=size: StepCost(**TERMS, **size), r"max_padded_steps=.*batch_size=")
            for size in ({}, {"max_padded_steps": 4, "batch_size": 4}, {"max_padded_steps": 0}, {"batch_size": -1})
        ),
        *(
            (lambda name=name, value=value: StepCost(**TERMS | {name: value}, batch_size=2), f"{value}.*negative")
            for name in TERMS
            for value in (-1e-9, math.nan, math.inf)
        ),
    ],
)
def test_sizes_and_terms_that_cannot_be_used_are_named(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(StrettoError, match=named):
        make()


@pytest.mark.parametrize(
    "cost",
    [
        lambda length: 3.0 * length,
        lambda length: 3.0 * float(length),
        lambda length: 3 * length if length < 10**9 else 0,
        lambda length: math.fsum([length, length, length]),
        lambda length: [3 * value for value in length] if isinstance(length, np.ndarray) else 3 * length,
    ],
)
def test_costs_of_arrays_and_of_numbers_agree(cost: Callable[[Any], Any]) -> None:
    assert evaluate_cost(np.array([1, 5, 200]), cost).tolist() == [3.0, 15.0, 600.0]
    assert evaluate_cost(np.array([4]), cost).tolist() == [12.0]
    assert evaluate_cost(np.array([1, 5]), lambda _: 2.5).tolist() == [2.5, 2.5]


@pytest.mark.parametrize(
    ("cost", "named"),
    [
        (lambda length: -length, "-5.0 at length 5"),
        (lambda length: np.where(length == 9, 0, length), "0.0 at length 9"),
        (lambda length: np.where(length == 9, math.nan, length), "nan at length 9"),
        (lambda length: np.where(length == 9, math.inf, length), "inf at length 9"),
        (lambda _: math.nan, "nan at length 2"),
        (lambda length: np.where(np.asarray(length) > 4, 1e308, 1.0), "too much to add up"),
        (lambda _: None, "NoneType"),
        (lambda _: "high", "high"),
        ("high", "not callable"),
    ],
)
@pytest.mark.parametrize("consumer", [optimal_edges, lambda *args: BucketSampler(args[0], batch_size=2, cost=args[2])])
def test_costs_that_cannot_be_used_are_named(cost: Any, named: str, consumer: Callable[..., Any]) -> None:
    with pytest.raises(StrettoError, match=named):
        consumer([9, 2, 5], "auto", cost)


@pytest.mark.parametrize("num_buckets", ["auto", 2])
def test_a_rising_cost_below_zero_works(num_buckets: Any) -> None:
    lengths = [1, 2, 8, 9]
    shifted = optimal_edges(lengths, num_buckets, lambda length: length - 100.0, bucket_price=3.0)
    assert shifted.tolist() == [2, 9]
    assert optimal_edges(lengths, "auto", lambda length: length - 100.0)[-1] == 9
    assert BucketSampler(lengths, batch_size=2, cost=lambda length: length - 100.0).edges[-1] == 9
