"""Decays by name: their shapes in epochs, the warm-up before them, and numbers that they do not take."""

import itertools
import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.large_batch import DecayName, ScheduleName
from stretto.large_batch.schedules import WarmupThenDecay, check_schedule

NAMES = get_args(DecayName)


def _decay(name: Any, done: float, *, epochs: float | None = 10, **numbers: Any) -> float:
    return WarmupThenDecay(name, warmup_updates=0, updates=1000, epochs=epochs, **numbers)(round(1000 * done))


@pytest.mark.parametrize("name", NAMES)
@given(moments=st.lists(st.floats(0, 10), min_size=2, max_size=20))
def test_a_decay_starts_at_the_peak_never_rises_and_never_passes_zero(name: str, moments: list[float]) -> None:
    assert _decay(name, 0.0) == 1.0
    factors = [_decay(name, moment) for moment in sorted(moments)]
    assert all(0.0 <= later <= earlier <= 1.0 for earlier, later in itertools.pairwise(factors))


@pytest.mark.parametrize(
    ("name", "done", "expected"),
    [
        ("poly", 2.5, 0.75**2),
        ("poly", 12.0, 0.0),
        ("linear", 2.5, 0.75),
        ("linear", 12.0, 0.0),
        ("exponential", 1.5, 0.95**1.5),
        ("step", 3.333, 1.0),
        ("step", 3.334, 0.1),
        ("step", 9.0, 0.1**2),
        ("cosine", 5.0, 0.5),
        ("cosine", 11.0, 0.0),
    ],
)
def test_values_by_hand(name: str, done: float, expected: float) -> None:
    assert _decay(name, done) == pytest.approx(expected, rel=1e-12)


def test_numbers_take_the_place_of_the_usual_ones() -> None:
    steps = [_decay("step", done, flat_epochs=4, decay_factor=0.5) for done in (3.9, 4.0, 8.0, 99.0)]
    assert steps == [1.0, 0.5, 0.25, 0.25]
    assert _decay("step", 4.0, epochs=4, flat_epochs=4) == 1.0
    assert _decay("ptb", 0.0, flat_epochs=0, decay_factor=0.25) == 0.25
    assert _decay("exponential", 2.0, decay_factor=0.5) == 0.25
    assert set(NAMES) == set(get_args(ScheduleName)) - {"one-cycle"}


@pytest.mark.parametrize(("flat", "divide_by", "epochs"), [(4, 2.0, 13), (14, 1.15, 55)])
def test_the_ptb_recipe_is_that_of_the_published_code(flat: int, divide_by: float, epochs: int) -> None:
    for epoch in range(epochs):
        published = (1 / divide_by) ** max(epoch + 1 - flat, 0.0)
        for within in (0.0, 0.5, 0.999):
            found = _decay("ptb", epoch + within, epochs=None, flat_epochs=flat, decay_factor=1 / divide_by)
            assert found == pytest.approx(published, rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "numbers", "words"),
    [
        ("triangle", {}, r"decay='triangle'.*'poly'"),
        (0.5, {}, r"decay=0.5.*'poly'"),
        ("one-cycle", {"decay_factor": 0.5}, r"decay_factor=0.5 .* 'one-cycle'.*Leave it out"),
        ("poly", {"decay_factor": 0.5}, r"decay_factor=0.5 .* 'poly'"),
        ("exponential", {"flat_epochs": 3}, r"flat_epochs=3 .* 'exponential'"),
        (float, {"decay_factor": 0.5}, r"decay_factor=0.5 .* <class 'float'>"),
        ("ptb", {"decay_factor": 0.0}, r"decay_factor=0.0"),
        ("ptb", {"flat_epochs": -1}, r"flat_epochs=-1"),
        ("step", {"flat_epochs": 0}, r"flat_epochs=0"),
        ("step", {"epochs": None}, r"'step' needs the number of epochs.*epochs="),
    ],
)
def test_what_a_schedule_does_not_take_is_refused(schedule: Any, numbers: dict[str, Any], words: str) -> None:
    with pytest.raises(StrettoError, match=words):
        check_schedule(schedule, **{"epochs": 5, "decay_factor": None, "flat_epochs": None, **numbers})


@given(warmup=st.integers(0, 30), per_epoch=st.integers(1, 17), epochs=st.integers(1, 12), name=st.sampled_from(NAMES))
def test_the_curve_rises_to_the_peak_and_then_is_the_decay(warmup: int, per_epoch: int, epochs: int, name: Any) -> None:
    decay = WarmupThenDecay(name, warmup_updates=0, updates=per_epoch, epochs=epochs)
    curve = WarmupThenDecay(name, warmup_updates=warmup, updates=per_epoch, epochs=epochs)
    total = per_epoch * epochs
    by_total = WarmupThenDecay(name, warmup_updates=warmup, updates=total, updates_epochs=epochs, epochs=epochs)
    for update in range(total):
        expected = (update + 1) / warmup if update < warmup else decay(update)
        assert curve(update) == expected
        assert by_total(update) == pytest.approx(expected, rel=1e-12)
        if update % per_epoch == 0 and update >= warmup:
            assert by_total(update) == expected
    json.dumps(vars(curve), allow_nan=False)
