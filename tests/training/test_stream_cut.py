"""Every word of a text is in exactly one window, in order, whatever the streams, windows and workers.

Shape legend: B streams of one worker, T steps.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.training.stream_cut import StreamCut

Rows = dict[int, list[int]]


def _read(cut: StreamCut, *, size: int, windows: range) -> Rows:
    """The places that each stream has read."""
    streams: Rows = {}
    for number in windows:
        for rank in range(size):
            share = cut.share(rank=rank, size=size)
            window = cut.read(number, share)
            assert window.places_BT.shape == (len(window.lengths_B), max([0, *window.lengths_B.tolist()]))
            assert (window.lengths_B[1:] <= window.lengths_B[:-1]).all()
            assert (window.lengths_B > 0).all()
            assert len(window.lengths_B) <= share.stop - share.start
            for row, length in enumerate(window.lengths_B.tolist()):
                streams.setdefault(share.start + row, []).extend(window.places_BT[row, :length].tolist())
    return streams


def _end_to_end(streams: Rows) -> list[int]:
    return [place for number in sorted(streams) for place in streams[number]]


@settings(deadline=None, max_examples=150)
@given(
    num_steps=st.integers(1, 300),
    num_streams=st.integers(1, 40),
    window=st.integers(1, 25),
    size=st.integers(1, 5),
)
def test_every_word_is_read_once_and_in_order(num_steps: int, num_streams: int, window: int, size: int) -> None:
    cut = StreamCut(((0, num_steps),), num_streams=num_streams, window=window)
    streams = _read(cut, size=size, windows=range(cut.num_windows))
    assert _end_to_end(streams) == list(range(num_steps))
    assert len(streams) == cut.num_streams == min(num_streams, num_steps)
    lengths = [len(places) for places in streams.values()]
    assert max(lengths) - min(lengths) <= 1
    assert cut.num_windows == -(-max(lengths) // window)
    shares = [cut.share(rank=rank, size=size) for rank in range(size)]
    assert [number for share in shares for number in range(share.start, share.stop)] == list(range(cut.num_streams))


@settings(deadline=None, max_examples=150)
@given(
    num_steps=st.integers(1, 300),
    window=st.integers(1, 12),
    legs=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4), st.floats(0, 1)), min_size=1, max_size=4),
)
def test_what_is_left_when_cut_anew_is_read_once(
    num_steps: int, window: int, legs: list[tuple[int, int, float]]
) -> None:
    """Again and again, with other streams and workers each time; the last ones read to the end."""
    runs, seen = ((0, num_steps),), []
    for at, (num_streams, size, share) in enumerate(legs):
        cut = StreamCut(runs, num_streams=num_streams, window=window)
        used = cut.num_windows if at == len(legs) - 1 else int(share * cut.num_windows)
        seen += _end_to_end(_read(cut, size=size, windows=range(used)))
        runs = cut.rest(used)
        assert all(begin < end for begin, end in runs)
        assert sum(end - begin for begin, end in runs) == num_steps - len(seen)
    assert runs == ()
    assert sorted(seen) == list(range(num_steps))


def test_the_windows_of_a_small_text() -> None:
    cut = StreamCut(((0, 11),), num_streams=3, window=3)
    window = cut.read(0, slice(0, 3))
    assert window.places_BT.tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    window = cut.read(1, slice(0, 3))
    assert (window.places_BT.tolist(), window.lengths_B.tolist()) == ([[3], [7]], [1, 1])
    assert cut.rest(1) == ((3, 4), (7, 8))
