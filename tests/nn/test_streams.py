"""Streams: every step once, in order, in a row that knows where it comes from.

Shape legend: B streams, T steps of a chunk, S steps of a sequence.
"""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from stretto.errors import StrettoError
from stretto.nn import Chunk, Streams

LENGTHS = st.lists(st.integers(1, 23), min_size=1, max_size=9)


def _numbered(lengths: list[int], num_features: int = 0) -> list[torch.Tensor]:
    """Sequences whose every step is another number."""
    ends = [*itertools.accumulate(lengths)]
    flat = torch.arange(1, ends[-1] + 1)
    steps = flat if not num_features else flat[:, None] * 100 + torch.arange(num_features)
    return [steps[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _put_back(chunks: list[Chunk], sequences: list[torch.Tensor], field: str = "x_BT") -> list[torch.Tensor]:
    """Each step where its chunk says that it belongs; refuses a place that is taken."""
    found = [torch.zeros_like(sequence) for sequence in sequences]
    taken = [torch.zeros(len(sequence), dtype=torch.bool) for sequence in sequences]
    for chunk in chunks:
        for row in range(len(chunk)):
            length, number, offset = (int(of[row]) for of in (chunk.lengths, chunk.sequences, chunk.offsets))
            if length:
                assert not taken[number][offset : offset + length].any()
                taken[number][offset : offset + length] = True
                found[number][offset : offset + length] = getattr(chunk, field)[row, :length]
    assert all(row.all() for row in taken)
    return found


def _assert_continuous(chunks: list[Chunk]) -> None:
    """A row goes on where the row before ended, or starts, or has no more steps."""
    assert chunks[0].resets.all()
    for before, after in itertools.pairwise(chunks):
        for row in range(len(before)):
            if after.resets[row]:
                assert after.lengths[row] > 0
            elif after.lengths[row] > 0:
                assert after.sequences[row] == before.sequences[row]
                assert after.offsets[row] == before.offsets[row] + before.lengths[row]
                assert before.lengths[row] == before.x_BT.shape[1]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 120), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2))
def test_one_sequence_is_cut_so_that_every_step_appears_once(
    length: int, num_streams: int, chunk: int, num_features: int
) -> None:
    num_streams = min(num_streams, length)
    (sequence,) = _numbered([length], num_features)
    streams = Streams(sequence, num_streams=num_streams, chunk=chunk)
    chunks = list(streams)
    assert len(chunks) == len(streams) == math.ceil(math.ceil(length / num_streams) / chunk)
    assert torch.equal(_put_back(chunks, [sequence])[0], sequence)
    _assert_continuous(chunks)
    assert not any(later.resets.any() for later in chunks[1:])
    assert all((earlier.lengths == chunk).all() for earlier in chunks[:-1])
    assert sum(int(part.lengths.sum()) for part in chunks) == streams.num_steps == length


@settings(deadline=None, max_examples=100)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 9))
def test_sequences_of_a_list_stay_whole_and_start_at_a_chunk(lengths: list[int], num_streams: int, chunk: int) -> None:
    sequences = _numbered(lengths, 2)
    streams = Streams(sequences, num_streams=min(num_streams, len(lengths)), chunk=chunk)
    chunks = list(streams)
    for found, sequence in zip(_put_back(chunks, sequences), sequences, strict=True):
        assert torch.equal(found, sequence)
    _assert_continuous(chunks)
    started = torch.cat([part.sequences[part.resets] for part in chunks])
    assert sorted(started.tolist()) == list(range(len(lengths)))
    assert all((part.offsets[part.resets] == 0).all() for part in chunks)
    for row in range(streams.num_streams):
        order = [int(part.sequences[row]) for part in chunks if part.resets[row]]
        assert order == sorted(order)
    assert len(chunks) == len(streams)
    padded_steps = sum(part.x_BT.shape[0] * part.x_BT.shape[1] for part in chunks)
    assert streams.padding == pytest.approx(1 - sum(lengths) / padded_steps)
    assert all(part.x_BT.shape[1] == part.lengths.max() for part in chunks)
    assert all((part.x_BT[~part.mask] == 0).all() for part in chunks)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 4))
def test_streams_are_nearly_as_even_as_they_can_be(lengths: list[int], num_streams: int, chunk: int) -> None:
    num_streams = min(num_streams, len(lengths))
    needed = [math.ceil(length / chunk) for length in lengths]
    least = min(
        max(sum(size for size, at in zip(needed, places, strict=True) if at == stream) for stream in range(num_streams))
        for places in itertools.product(range(num_streams), repeat=len(lengths))
    )
    found = len(Streams(_numbered(lengths), num_streams=num_streams, chunk=chunk))
    # Graham's bound for the longest first, 4/3 - 1/(3 num_streams), in whole numbers.
    assert least <= found
    assert 3 * num_streams * found <= (4 * num_streams - 1) * least


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(2, 20), min_size=1, max_size=6), st.integers(1, 4), st.integers(1, 6))
def test_the_next_step_as_target(lengths: list[int], num_streams: int, chunk: int) -> None:
    sequences = _numbered(lengths)
    streams = Streams(sequences, num_streams=min(num_streams, len(lengths)), chunk=chunk, targets="next")
    chunks = list(streams)
    ins, outs = [s[:-1] for s in sequences], [s[1:] for s in sequences]
    assert all(map(torch.equal, _put_back(chunks, ins), ins))
    assert all(map(torch.equal, _put_back(chunks, outs, "targets_BT"), outs))
    assert streams.num_steps == sum(lengths) - len(lengths)


def test_the_next_step_across_the_cuts_of_one_sequence() -> None:
    (part,) = Streams(torch.arange(9), num_streams=2, chunk=4, targets="next")
    assert part.x_BT.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert part.targets_BT is not None
    assert part.targets_BT.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_given_targets_keep_their_own_shape_and_type() -> None:
    x, target = torch.arange(7), torch.randn(7, 3, dtype=torch.float64)
    chunks = list(Streams(x, num_streams=2, chunk=2, targets=target))
    assert torch.equal(_put_back(chunks, [target], "targets_BT")[0], target)
    assert chunks[0].targets_BT is not None
    assert chunks[0].targets_BT.dtype == torch.float64


@pytest.mark.parametrize("dtype", ["<i2", ">i2", ">f8", "u1", "?"])
def test_arrays_of_any_number_type(dtype: str) -> None:
    array = (np.arange(11) % 2).astype(dtype)
    array.flags.writeable = False
    chunks = list(Streams(array, num_streams=2, chunk=4))
    expected = torch.from_numpy((np.arange(11) % 2).astype(np.dtype(dtype).newbyteorder("=")))
    assert torch.equal(_put_back(chunks, [expected])[0], expected)
    assert chunks[0].x_BT.dtype == expected.dtype


def test_a_mapped_file_is_read_chunk_by_chunk(tmp_path: Path) -> None:
    np.save(tmp_path / "long.npy", np.arange(40, dtype=np.float32).reshape(20, 2))
    mapped = np.load(tmp_path / "long.npy", mmap_mode="r")
    streams = Streams(mapped, num_streams=3, chunk=4, targets="next")
    assert torch.equal(_put_back(list(streams), [torch.tensor(mapped[:-1])])[0], torch.tensor(mapped[:-1]))


def test_chunks_do_not_alias_the_data() -> None:
    x = torch.arange(6)
    for part in Streams(x, num_streams=1, chunk=6):
        part.x_BT.zero_()
    assert x.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("used", range(6))
def test_resuming_yields_the_rest_and_then_whole_passes(used: int) -> None:
    def make() -> Streams:
        return Streams(torch.arange(30), num_streams=2, chunk=3)

    streams = make()
    whole = [part.x_BT.tolist() for part in streams]
    assert len(whole) == 5
    if used:
        for _ in itertools.islice(streams, used):
            saved = json.loads(json.dumps(streams.state_dict()))
    else:
        saved = streams.state_dict()
    resumed = make()
    resumed.load_state_dict(saved)
    assert resumed.state_dict() == saved == streams.state_dict(used=used)
    assert [part.x_BT.tolist() for part in resumed] == whole[used:]
    assert [part.x_BT.tolist() for part in resumed] == whole
    assert [part.x_BT.tolist() for part in streams] == whole


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 25), st.integers(1, 5))
def test_ranks_divide_the_streams_of_one_sequence(length: int, num_streams: int, chunk: int, size: int) -> None:
    num_streams = min(num_streams, length)
    ranks = [
        Streams(torch.arange(length), num_streams=num_streams, chunk=chunk, rank=rank, world_size=size)
        for rank in range(size)
    ]
    (alone,) = {len(streams) for streams in ranks}
    whole = Streams(torch.arange(length), num_streams=num_streams, chunk=chunk)
    assert alone == len(whole)
    for part, *parts in zip(whole, *ranks, strict=True):
        assert torch.equal(torch.cat([one.lengths for one in parts]), part.lengths)
        assert torch.equal(torch.cat([one.offsets for one in parts]), part.offsets)
        rows = [row[:n].tolist() for one in parts for row, n in zip(one.x_BT, one.lengths, strict=True)]
        assert rows == [row[:n].tolist() for row, n in zip(part.x_BT, part.lengths, strict=True)]
        assert all((one.lengths[1:] <= one.lengths[:-1]).all() for one in parts)
    padded_steps = sum(one.x_BT.shape[0] * one.x_BT.shape[1] for streams in ranks for one in streams)
    assert ranks[0].padding == pytest.approx(1 - length / padded_steps)


@settings(deadline=None, max_examples=100)
@given(
    length=st.integers(1, 200),
    chunk=st.integers(1, 12),
    legs=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4), st.floats(0, 1)), min_size=1, max_size=4),
)
def test_what_is_left_when_the_number_of_streams_changes_is_read_once(
    length: int, chunk: int, legs: list[tuple[int, int, float]]
) -> None:
    """Again and again, with other streams and ranks each time; the last ones read to the end."""
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for at, (wanted, size, share) in enumerate(legs):
        num_streams, planned = min(wanted, length), length - len(seen)
        ranks = []
        for rank in range(size):
            before = num_streams if state is None else state["num_streams"]
            streams = Streams(torch.arange(length), num_streams=before, chunk=chunk, rank=rank, world_size=size)
            if state is not None:
                streams.load_state_dict(state)
                streams.resize(num_streams)
            assert streams.planned_steps == planned
            ranks.append(streams)
        used = len(ranks[0]) if at == len(legs) - 1 else int(share * len(ranks[0]))
        for streams in ranks:
            for part in itertools.islice(streams, used):
                assert part.resets.all() == (part.index == 0 or not len(part))
                seen += [int(x) for row, n in zip(part.x_BT, part.lengths, strict=True) for x in row[:n]]
        state = json.loads(json.dumps(ranks[0].state_dict(used=used)))
    assert sorted(seen) == list(range(length))


def test_another_number_of_streams_holds_for_later_passes() -> None:
    streams = Streams(torch.arange(11), num_streams=3, chunk=3)
    first = next(iter(streams))
    assert first.x_BT.tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    streams.resize(1)
    (rest,) = streams
    assert rest.x_BT.tolist() == [[3, 7]]
    assert (rest.offsets.tolist(), rest.resets.tolist()) == ([3], [True])
    assert [part.x_BT.tolist() for part in streams] == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]], [[9, 10]]]
    with pytest.raises(StrettoError, match="whole sequences"):
        Streams([torch.arange(3), torch.arange(3)], num_streams=2, chunk=3).resize(1)
    with pytest.raises(StrettoError, match="only 11 steps"):
        streams.resize(12)


def test_a_state_of_other_streams_is_refused() -> None:
    saved = Streams(torch.arange(30), num_streams=2, chunk=3).state_dict()
    for other in (
        Streams(torch.arange(30), num_streams=3, chunk=3),
        Streams(torch.arange(30), num_streams=2, chunk=4),
        Streams(torch.arange(31), num_streams=2, chunk=3),
        Streams(torch.arange(31), num_streams=2, chunk=3, targets="next"),
        Streams([torch.arange(15), torch.arange(15)], num_streams=2, chunk=3),
    ):
        with pytest.raises(StrettoError, match="other streams"):
            other.load_state_dict(saved)
    for used in (-1, 6, None, "2"):
        with pytest.raises(StrettoError, match="chunks are used"):
            Streams(torch.arange(30), num_streams=2, chunk=3).load_state_dict({**saved, "used": used})


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("used", [0, 3])
def test_a_loader_yields_the_chunks_in_order(num_workers: int, used: int) -> None:
    streams = Streams(_numbered([17, 4, 9, 8]), num_streams=2, chunk=3, targets="next")
    expected = list(streams)[used:]
    streams.load_state_dict(streams.state_dict(used=used))
    found = list(DataLoader(streams, batch_size=None, num_workers=num_workers))
    assert [part.index for part in found] == [part.index for part in expected]
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, Chunk)
        assert torch.equal(one.x_BT, other.x_BT)
        assert torch.equal(one.resets, other.resets)


def test_moving_a_chunk_leaves_what_describes_it_on_the_cpu() -> None:
    (part,) = Streams(torch.arange(5), num_streams=2, chunk=9, targets="next")
    moved = part.to("meta")
    assert moved.targets_BT is not None
    assert (moved.x_BT.device.type, moved.targets_BT.device.type) == ("meta", "meta")
    assert {tensor.device.type for tensor in (moved.lengths, moved.resets, moved.offsets)} == {"cpu"}
    assert torch.equal(moved.lengths, part.lengths)


@pytest.mark.parametrize(
    ("sequence", "options", "message"),
    [
        (torch.arange(5), {"num_streams": 0}, "num_streams=0"),
        (torch.arange(5), {"num_streams": True}, "num_streams=True"),
        (torch.arange(5), {"chunk": 1.5}, "chunk=1.5"),
        (torch.arange(5), {"num_streams": 6}, "only 5 steps"),
        (torch.arange(5), {"rank": 1}, "rank=1 of world_size=1"),
        ([torch.arange(5)], {"num_streams": 2}, "only 1 sequences"),
        ([], {}, "empty list"),
        ([1, 2, 3], {}, "sequence 0 is int"),
        ("text", {}, "sequence is str 'text'"),
        (np.array(["a", "b"]), {}, "<U1 values"),
        (torch.tensor(3), {}, "not a sequence"),
        (torch.zeros(0, 3), {}, "0 steps"),
        ([torch.zeros(4), torch.zeros(0)], {}, "sequence 1 has 0 steps"),
        ([torch.zeros(4), torch.zeros(1)], {"targets": "next"}, "sequence 1 has 1 steps, none"),
        ([torch.zeros(4, 2), torch.zeros(4, 3)], {}, r"sequence 1 has torch.float32 steps of shape \(3,\)"),
        ([torch.zeros(4), torch.zeros(4).double()], {}, "torch.float64"),
        (torch.arange(5), {"targets": torch.arange(4)}, r"targets have \[4\] steps"),
        (torch.arange(5), {"targets": "previous"}, "targets is str"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(sequence: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        Streams(sequence, **{"num_streams": 1, "chunk": 2, **options})  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "streams.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(example, "streams.md", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] in page
    short, long = map(float, re.findall(r"loss (\S+)", printed))
    assert short > 0.67
    assert long < 0.5
