"""The drawn digits: the same for the same settings, kept in the cache, legible, and not too easy.

Shape legend: N images, P points, S rows or columns.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data import PARTS, Labels, SequenceSet, drawn_digits, load_drawn_digits
from stretto.data.drawn_digits import SIDE, DrawnDigitsSettings, cached_path, make_drawn_digits

Array = npt.NDArray[Any]
SMALL = DrawnDigitsSettings(num_train=1200)


def pixels(data: SequenceSet) -> Array:
    places = zip(data.starts_N, data.lengths_N, strict=True)
    return np.stack([data.features_SF[start : start + length] for start, length in places]).astype(np.float64)


def labels(data: SequenceSet) -> Array:
    assert isinstance(data.targets, Labels)
    return data.targets.values_N


@pytest.fixture(scope="module")
def drawn() -> SequenceSet:
    return make_drawn_digits(SMALL)


def test_parts_have_their_share_of_every_digit(drawn: SequenceSet) -> None:
    assert np.bincount(drawn.split_N).tolist() == [1200, 200, 200]
    assert drawn.features_SF.dtype == np.uint8
    assert drawn.num_features == SIDE
    assert set(drawn.lengths_N.tolist()) == {SIDE}
    for part in PARTS:
        counts = np.bincount(labels(drawn.part(part)))
        assert counts.tolist() == [len(drawn.part(part)) // 10] * 10
    assert isinstance(drawn.targets, Labels)
    assert drawn.targets.names == tuple("0123456789")
    assert drawn.notes == ()


@pytest.mark.parametrize("num_train", [1, 7])
def test_few_images_still_have_all_parts(num_train: int) -> None:
    data = make_drawn_digits(DrawnDigitsSettings(num_train=num_train))
    assert np.bincount(data.split_N).tolist() == [num_train, 1, 1]


def test_everything_follows_from_the_settings(drawn: SequenceSet) -> None:
    assert make_drawn_digits(SMALL).digest() == drawn.digest()
    other = make_drawn_digits(DrawnDigitsSettings(num_train=1200, seed=1))
    assert (pixels(other) != pixels(drawn)).any(axis=(1, 2)).all()


def test_no_two_images_are_alike(drawn: SequenceSet) -> None:
    assert len({image.tobytes() for image in pixels(drawn)}) == len(drawn)


def test_every_image_has_ink_on_paper(drawn: SequenceSet) -> None:
    images = pixels(drawn)
    assert (images.max(axis=(1, 2)) > 100).all()
    assert (np.quantile(images, 0.25, axis=(1, 2)) < 30).all()
    inked = np.where(images > 0.5 * images.max(axis=(1, 2), keepdims=True), images, 0.0)
    for axis in (1, 2):
        profile = inked.sum(axis=axis)
        centre = profile @ np.arange(SIDE) / profile.sum(axis=1)
        assert (np.abs(centre - (SIDE - 1) / 2) < 8).all()


def test_digits_can_be_told_apart_but_not_by_their_mean_alone(drawn: SequenceSet) -> None:
    train, test = drawn.part("train"), drawn.part("test")
    means = np.stack([pixels(train)[labels(train) == digit].mean(axis=0) for digit in range(10)])
    apart = ((pixels(test)[:, None] - means) ** 2).sum(axis=(2, 3))
    right = (apart.argmin(axis=1) == labels(test)).mean()
    assert 0.25 < right < 0.9


def test_the_set_is_drawn_once_and_then_mapped(
    monkeypatch: pytest.MonkeyPatch, assert_same_set: Callable[[SequenceSet, SequenceSet], None]
) -> None:
    few = DrawnDigitsSettings(num_train=30, seed=5)
    assert not cached_path(few).exists()
    first = load_drawn_digits(few)
    assert cached_path(few).exists()
    monkeypatch.setattr(drawn_digits, "make_drawn_digits", lambda _: pytest.fail("it was drawn again"))
    again = load_drawn_digits(few)
    assert again.memory_mapped
    assert again.name == "drawn digits"
    assert_same_set(first, again)


polylines = st.lists(st.tuples(st.floats(8.0, 19.0), st.floats(8.0, 19.0)), min_size=2, max_size=12)


@settings(deadline=None, max_examples=60)
@given(points=polylines, width=st.floats(0.6, 1.5), drawn=st.data())
def test_ink_is_the_sum_of_its_blots(points: list[tuple[float, float]], width: float, drawn: st.DataObject) -> None:
    points_P2 = np.array(points)
    count = len(points_P2)
    joined_P = np.array(drawn.draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1)))
    found_SS = drawn_digits._ink(points_P2[None], joined_P[None], width_N=np.array([width]))[0]
    expected_SS, length = np.zeros((SIDE, SIDE)), 0.0
    for number in range(count - 1):
        if not joined_P[number]:
            continue
        way = float(np.linalg.norm(points_P2[number + 1] - points_P2[number]))
        length += way
        for x, y in points_P2[number : number + 2]:
            down_S1, across_S = np.arange(SIDE)[:, None] - y, np.arange(SIDE) - x
            blot_SS = np.exp(-(down_S1**2 + across_S**2) / (2 * width**2))
            expected_SS += way / 2 * blot_SS / (np.sqrt(2 * np.pi) * width)
    np.testing.assert_allclose(found_SS, expected_SS, rtol=1e-9, atol=1e-12)
    # The grid is fine enough for a blot, so that pixels together hold the ink of the whole way.
    assert found_SS.sum() == pytest.approx(length * np.sqrt(2 * np.pi) * width, rel=0.01, abs=1e-9)


@pytest.mark.parametrize("width", [0.6, 1.0, 1.5])
def test_a_long_straight_stroke_is_one_in_its_middle_and_soft_at_its_edges(width: float) -> None:
    across_P = np.linspace(-20.0, 48.0, 200)
    points_P2 = np.stack([across_P, np.full_like(across_P, 14.0)], axis=1)
    joined_P = np.ones(199, dtype=bool)
    ink_SS = drawn_digits._ink(points_P2[None], joined_P[None], width_N=np.array([width]))[0]
    profile_S = np.exp(-0.5 * ((np.arange(SIDE) - 14.0) / width) ** 2)
    np.testing.assert_allclose(ink_SS, np.tile(profile_S[:, None], (1, SIDE)), rtol=1e-3, atol=1e-6)
