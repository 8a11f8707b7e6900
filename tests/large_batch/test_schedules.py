"""Decays: shapes in epochs, by name or made by hand, and the warm-up before them."""

import itertools
import json
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.large_batch import (
    AbstractDecay,
    Constant,
    Cosine,
    DecayName,
    Exponential,
    FlatThenDivide,
    Polynomial,
    ScheduleName,
    Step,
    make_decay,
)
from stretto.large_batch.schedules import DECAYS, WarmupThenDecay, decay_from_json

ALL: list[AbstractDecay] = [
    Constant(),
    Polynomial(power=1.0),
    Polynomial(power=2.0),
    Exponential(factor=0.7),
    Step(milestones=(2, 5.5), factor=0.1),
    Cosine(floor=0.1),
    FlatThenDivide(flat_epochs=3, divide_by=1.15),
]


@pytest.mark.parametrize("decay", ALL, ids=repr)
@given(moments=st.lists(st.floats(0, 10), min_size=2, max_size=20))
def test_a_decay_starts_at_the_peak_never_rises_and_never_passes_zero(
    decay: AbstractDecay, moments: list[float]
) -> None:
    assert decay.at(0.0, epochs=10) == 1.0
    factors = [decay.at(moment, epochs=10) for moment in sorted(moments)]
    assert all(0.0 <= later <= earlier <= 1.0 for earlier, later in itertools.pairwise(factors))


@pytest.mark.parametrize(
    ("decay", "done", "expected"),
    [
        (Polynomial(power=2.0), 2.5, 0.75**2),
        (Polynomial(power=1.0), 12.0, 0.0),
        (Exponential(factor=0.5), 1.5, 0.5**1.5),
        (Step(milestones=(3, 6), factor=0.1), 2.999, 1.0),
        (Step(milestones=(3, 6), factor=0.1), 3.0, 0.1),
        (Step(milestones=(3, 6), factor=0.1), 9.0, 0.1**2),
        (Cosine(floor=0.0), 5.0, 0.5),
        (Cosine(floor=0.2), 10.0, 0.2),
    ],
    ids=repr,
)
def test_values_by_hand(decay: AbstractDecay, done: float, expected: float) -> None:
    assert decay.at(done, epochs=10) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("flat", "divide_by", "epochs"), [(4, 2.0, 13), (14, 1.15, 55)])
def test_the_ptb_recipe_is_that_of_the_published_code(flat: int, divide_by: float, epochs: int) -> None:
    decay = FlatThenDivide(flat_epochs=flat, divide_by=divide_by)
    for epoch in range(epochs):
        published = (1 / divide_by) ** max(epoch + 1 - flat, 0.0)
        for within in (0.0, 0.5, 0.999):
            assert decay.at(epoch + within, epochs=None) == pytest.approx(published, rel=1e-12)


@pytest.mark.parametrize("decay", ALL, ids=repr)
def test_a_decay_comes_back_through_json(decay: AbstractDecay) -> None:
    assert decay_from_json(json.loads(json.dumps(decay.to_json()))) == decay


def test_names_stand_for_the_usual_numbers() -> None:
    assert make_decay("constant") == Constant()
    assert make_decay("poly") == Polynomial(power=2.0)
    assert make_decay("exponential", decay_factor=0.9) == Exponential(factor=0.9)
    assert make_decay("step", epochs=9) == Step(milestones=(3.0, 6.0), factor=0.1)
    assert make_decay("step", epochs=10, flat_epochs=4, decay_factor=0.3) == Step(milestones=(4, 8), factor=0.3)
    assert make_decay("step", epochs=4, flat_epochs=4) == Step(milestones=(), factor=0.1)
    assert make_decay("cosine") == Cosine(floor=0.0)
    assert make_decay("ptb") == FlatThenDivide(flat_epochs=4, divide_by=2.0)
    assert make_decay("ptb", flat_epochs=0, decay_factor=0.25) == FlatThenDivide(flat_epochs=0, divide_by=4.0)
    assert set(DECAYS) == set(get_args(DecayName)) == set(get_args(ScheduleName)) - {"one-cycle"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: make_decay("linear"), r"decay='linear'.*'poly'"),
        (lambda: make_decay("poly", decay_factor=0.5), r"decay_factor=0.5 .* 'poly'.*Leave it out"),
        (lambda: make_decay("exponential", flat_epochs=3), r"flat_epochs=3 .* 'exponential'"),
        (lambda: make_decay("ptb", decay_factor=0.0), r"decay_factor=0.0"),
        (lambda: make_decay("step"), r"'step' needs the number of epochs.*epochs="),
        (lambda: make_decay("step", epochs=5, flat_epochs=0), r"flat_epochs=0"),
        (lambda: Polynomial(power=0.0), r"power=0.0"),
        (lambda: Exponential(factor=1.1), r"factor=1.1"),
        (lambda: Exponential(factor=math.nan), r"factor=nan"),
        (lambda: Step(milestones=(3, 2)), r"milestones=\(3, 2\)"),
        (lambda: Step(milestones=(0, 2)), r"milestones=\(0, 2\)"),
        (lambda: Cosine(floor=-0.1), r"floor=-0.1"),
        (lambda: FlatThenDivide(flat_epochs=-1), r"flat_epochs=-1"),
        (lambda: FlatThenDivide(divide_by=0.5), r"divide_by=0.5"),
    ],
)
def test_bad_numbers_are_named(call: object, words: str) -> None:
    with pytest.raises(StrettoError, match=words):
        call()  # type: ignore[operator]


@given(
    warmup=st.integers(0, 30),
    per_epoch=st.integers(1, 17),
    epochs=st.integers(1, 12),
    index=st.integers(0, len(ALL) - 1),
)
def test_the_curve_rises_to_the_peak_and_then_is_the_decay(
    warmup: int, per_epoch: int, epochs: int, index: int
) -> None:
    decay = ALL[index]
    curve = WarmupThenDecay(decay, warmup_updates=warmup, updates=per_epoch, epochs=epochs)
    total = per_epoch * epochs
    by_total = WarmupThenDecay(decay, warmup_updates=warmup, updates=total, updates_epochs=epochs, epochs=epochs)
    for update in range(total):
        expected = (update + 1) / warmup if update < warmup else decay.at(update / per_epoch, epochs=epochs)
        assert curve(update) == expected
        assert by_total(update) == pytest.approx(expected, rel=1e-12)
        if update % per_epoch == 0 and update >= warmup:
            assert by_total(update) == expected
    json.dumps(vars(curve), allow_nan=False)
