"""Throughput that is measured: within bounds of memory and time, and never by running out of either."""

import json
import math
from collections.abc import Callable

import pytest
import torch

from stretto.errors import StrettoError
from stretto.large_batch import Entry, ThroughputTable, probe, throughput

MEGABYTE = 1_000_000


class _Clock:
    """A clock that only updates move, so that what a probe finds is exact."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self.now, self.seconds, self.calls = 0.0, seconds, list[tuple[int, int]]()

    def perf_counter(self) -> float:
        return self.now

    def run(self, batch_size: int, length: int) -> None:
        self.calls.append((batch_size, length))
        self.now += self.seconds(batch_size, length)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock(lambda size, length: 0.01 + 0.001 * size * length)
    monkeypatch.setattr(throughput.time, "perf_counter", made.perf_counter)
    return made


def test_lengths_are_weighed_by_their_share_of_sequences(clock: _Clock) -> None:
    table = probe(clock.run, batch_sizes=[4, 1, 2], lengths={10: 3.0, 50: 1.0}, repeats=2)
    assert table.batch_sizes == (1, 2, 4)
    for size in (1, 2, 4):
        assert table.seconds(size) == pytest.approx(0.01 + 0.001 * size * (0.75 * 10 + 0.25 * 50))
    assert {entry.num_steps for entry in table.entries} == {10, 50, 20, 100, 40, 200}


def test_shapes_are_timed_in_rounds_the_longest_of_a_size_first(clock: _Clock) -> None:
    probe(clock.run, batch_sizes=[1, 2], lengths=[5, 9], repeats=2)
    shapes = [(1, 9), (1, 5), (2, 9), (2, 5)]
    # The very first is run once more before anything is measured.
    assert clock.calls == [(1, 9), *shapes, *shapes, *shapes]


def test_the_least_of_all_turns_counts(clock: _Clock) -> None:
    slow = iter([9.0, 5.0, 3.0, 0.5, 4.0])
    clock.seconds = lambda *_: next(slow)
    table = probe(clock.run, batch_sizes=[3], lengths=[7], repeats=3, max_seconds=1000)
    assert table.seconds(3) == 0.5


def test_time_is_bounded_and_what_was_not_reached_is_marked(clock: _Clock) -> None:
    clock.seconds = lambda size, _: 0.1 * size
    table = probe(clock.run, batch_sizes=[1, 2, 4, 8, 16, 32], lengths=[1], repeats=50, max_seconds=3.0)
    assert clock.now <= 3.0 + 1e-9
    assert table.batch_sizes == (1, 2, 4, 8)
    with pytest.raises(StrettoError, match=r"an update of 16 sequences has no time: it would take about 1.6 s"):
        table.seconds(16)


def test_the_smallest_batch_is_timed_at_every_length_whatever_it_takes(clock: _Clock) -> None:
    clock.seconds = lambda size, length: 1.0 * size * length
    table = probe(clock.run, batch_sizes=[2, 4], lengths=[30, 60, 90], max_seconds=0.5)
    assert table.batch_sizes == (2,)
    assert table.seconds(2) == pytest.approx(120.0)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_of_memory_ends_the_growth(error: Exception, clock: _Clock) -> None:
    def run(batch_size: int, length: int) -> None:
        if batch_size >= 4:
            raise error
        clock.run(batch_size, length)

    table = probe(run, batch_sizes=[1, 2, 4, 8], lengths=[3])
    assert table.batch_sizes == (1, 2)
    assert {entry.problem for entry in table.entries if entry.batch_size >= 4} == {"out of memory"}
    with pytest.raises(StrettoError, match="not even a batch of 4 could be timed: out of memory"):
        probe(run, batch_sizes=[4], lengths=[3])


def test_other_faults_are_not_hidden() -> None:
    def run(batch_size: int, length: int) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        probe(run, batch_sizes=[1], lengths=[1])


def test_memory_that_would_be_passed_is_not_asked_for() -> None:
    """Each sequence takes 4 MB that are freed at once: only the peak shows it."""
    asked = []

    def run(batch_size: int, length: int) -> int:
        asked.append(batch_size)
        return int(torch.ones(batch_size * MEGABYTE)[0]) * length

    run(1, 1)
    watch = throughput._MemoryWatch("cpu", max_bytes=None)
    if not watch.now():
        pytest.skip("resident memory cannot be measured here")
    assert watch.now() < watch.limit < math.inf
    limit = watch.now() + 100 * MEGABYTE
    table = probe(run, batch_sizes=[1, 2, 4, 8, 16, 32, 64, 128], lengths=[7], repeats=1, max_bytes=limit)
    assert max(asked) in (8, 16)
    assert table.batch_sizes[-1] == max(asked)
    assert "MB of memory" in table.entries[-1].problem
    assert table.entries[0].num_steps == 7


def test_the_optimiser_is_timed_apart(clock: _Clock) -> None:
    def update() -> None:
        clock.now += 0.004

    assert probe(clock.run, batch_sizes=[1], lengths=[1], update=update).update_seconds == pytest.approx(0.004)
    clock.seconds = lambda *_: 0.001
    assert probe(clock.run, batch_sizes=[1], lengths=[1], update=update).update_seconds == pytest.approx(0.001)


def test_a_table_survives_json() -> None:
    table = ThroughputTable(
        entries=(
            Entry(batch_size=2, length=5, seconds=0.1, num_steps=9),
            Entry(batch_size=2, length=9, seconds=0.3, num_steps=18),
            Entry(batch_size=4, length=5, seconds=0.2, num_steps=20),
            Entry(batch_size=4, length=9, seconds=None, problem="out of memory"),
        ),
        shares={5: 0.25, 9: 0.75},
        update_seconds=0.01,
    )
    assert ThroughputTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table
    assert table.batch_sizes == (2,)
    for content in ({}, {"version": 1, "entries": [3]}, table.to_dict() | {"version": 7}):
        with pytest.raises(StrettoError, match="not a throughput table"):
            ThroughputTable.from_dict(content)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda: ThroughputTable(entries=(Entry(batch_size=1, length=1, seconds=1.0),), shares={1: 0.5}),
            "add up to 1",
        ),
        (
            lambda: ThroughputTable(entries=(Entry(batch_size=1, length=1, seconds=1.0),), shares={2: 1.0}),
            "the lengths",
        ),
        (lambda: ThroughputTable.of({1: 0.0}), r"seconds\[1\]=0\.0"),
        (lambda: ThroughputTable.of({1: 1.0}, update_seconds=-1), "update_seconds=-1"),
        (lambda: probe(lambda *_: None, batch_sizes=[], lengths=[1]), "batch sizes"),
        (lambda: probe(lambda *_: None, batch_sizes=[0], lengths=[1]), "batch_sizes"),
        (lambda: probe(lambda *_: None, batch_sizes=[1], lengths=[]), "lengths"),
        (lambda: probe(lambda *_: None, batch_sizes=[1], lengths=[1], repeats=0), "repeats=0"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(StrettoError, match=problem):
        make()
