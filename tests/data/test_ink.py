"""Pen points to features."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stretto.data.ink import POINTS_PER_HEIGHT, line_features, pen_features
from stretto.errors import StrettoError

WHOLE = st.integers(-500, 500)
STROKES = st.lists(
    hnp.arrays(np.float64, st.tuples(st.integers(1, 6), st.just(2)), elements=WHOLE), min_size=1, max_size=4
)


def test_pen_features_are_movements_in_units_of_the_height():
    xy = np.array([[0, 0], [2, 4], [2, 0], [50, 7], [51, 9]])
    features = pen_features(xy, pen_down_S=np.array([1, 0, 1, 1, 0]), offsets=np.array([0, 3, 5]), source="here")
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, [[0, 0, 0], [0.5, 1, 1], [0, -1, 1], [0, 0, 0], [0.5, 1, 1]])


def test_without_pen_flags_each_sequence_is_one_stroke():
    xy = np.array([[0, 0], [0, 1], [0, 2], [5, 5], [5, 6]])
    features = pen_features(xy, pen_down_S=None, offsets=np.array([0, 3, 5]), source="here")
    assert features[:, 2].tolist() == [0, 0, 1, 0, 1]


def test_pen_features_of_a_flat_sequence_stay_finite():
    features = pen_features(np.array([[0, 3], [9, 3]]), pen_down_S=None, offsets=np.array([0, 2]), source="here")
    assert np.isfinite(features).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_position_that_is_no_number_names_its_sequence(wrong, axis):
    xy = np.zeros((5, 2))
    xy[3, axis] = wrong
    with pytest.raises(StrettoError, match="here: sequence 1 has a NaN or infinite position at its point 1"):
        pen_features(xy, pen_down_S=None, offsets=np.array([0, 2, 5]), source="here")


def test_a_straight_stroke_is_cut_into_even_steps():
    features = line_features([np.array([[10.0, 30.0], [10.0, 20.0]])])
    count = round(POINTS_PER_HEIGHT) + 1
    assert features.shape == (count, 3)
    np.testing.assert_allclose(features[0], [0, 0, 0])
    np.testing.assert_allclose(features[1:, 0], 0, atol=1e-6)
    np.testing.assert_allclose(features[1:, 1], 1 / (count - 1), rtol=1e-5)
    assert features[:, 2].tolist() == [0] * (count - 1) + [1]


def test_a_dot_is_one_step():
    features = line_features([np.array([[7.0, 900.0]])])
    np.testing.assert_array_equal(features, [[0, 0, 1]])


@settings(deadline=None, max_examples=60)
@given(STROKES)
def test_the_pen_ends_where_the_strokes_end(strokes):
    features = line_features(strokes)
    unit = float(np.quantile([np.ptp(stroke[:, 1]) for stroke in strokes], 0.75))
    unit = unit or float(np.ptp(np.concatenate(strokes), axis=0).max()) or 1.0
    moved = strokes[-1][-1] - strokes[0][0]
    np.testing.assert_allclose(features[:, :2].sum(axis=0), moved / unit * [1, -1], atol=1e-3, rtol=1e-4)
    assert features[:, 2].sum() == len(strokes)
    assert features[-1, 2] == 1


@settings(deadline=None, max_examples=60)
@given(STROKES, hnp.arrays(np.float64, 2, elements=WHOLE), st.sampled_from([0.25, 2.0, 64.0]))
def test_place_and_size_of_the_page_do_not_matter(strokes, shift, scale):
    here = line_features(strokes)
    there = line_features([(stroke + shift) * scale for stroke in strokes])
    assert here.shape == there.shape
    np.testing.assert_allclose(here, there, atol=1e-4, rtol=1e-4)


def test_a_dash_is_measured_by_its_width_wherever_it_is():
    features = line_features([np.array([[0.0, 5000.0], [50.0, 5000.0]])])
    assert len(features) == round(POINTS_PER_HEIGHT) + 1
    np.testing.assert_allclose(features[:, 0].sum(), 1.0, rtol=1e-5)


@pytest.mark.parametrize("far", [1e9, 1e300, 1.7e308])
def test_coordinates_out_of_all_measure_are_refused(far):
    with pytest.raises(StrettoError, match=r"page 3: the pen travels .* which is over 1000000 steps"):
        line_features([np.array([[-far, 0.0], [far, 1.0]])], source="page 3")
