"""The sorted window against Python's own sorting."""

import statistics
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import StrettoError
from stretto.large_batch.sorted_window import SortedWindow

NUMBERS = st.lists(st.floats(-1e9, 1e9) | st.sampled_from([0.0, -0.0, 1.0]), max_size=60)


@settings(deadline=None, max_examples=150)
@given(size=st.integers(1, 20), values=NUMBERS, share=st.floats(0, 1))
def test_it_is_the_last_so_many_numbers_in_order(size: int, values: list[float], share: float) -> None:
    window, plain = SortedWindow(size), deque[float](maxlen=size)
    for value in values:
        window.append(value)
        plain.append(value)
        ordered = sorted(plain)
        assert list(window) == list(plain)
        assert (len(window), window.is_full) == (len(plain), len(plain) == size)
        assert window.median == statistics.median(plain)
        assert window.quantile(share) == ordered[int(share * (len(ordered) - 1))]
    assert list(SortedWindow(size, values)) == list(plain)
    window.clear()
    assert list(window) == []
    assert not window.is_full


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(StrettoError, match="size of 0"):
        SortedWindow(0)
