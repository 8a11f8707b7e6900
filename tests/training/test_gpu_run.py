"""Runs with `--device cuda`, by the CPU as a stand-in: what goes where, and that nothing waits for a batch."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import events_of, outcome, stop, train

from gpu_stand_in import GpuStandIn
from small_data import make_task, task_data
from stretto.batching import Batch, collate
from stretto.large_batch import Decision
from stretto.training import AbstractTask, StreamFeed, batch_policy, feeds
from stretto.training.feeds import BucketFeed, read_ahead


def task(name: str, device: str) -> AbstractTask[Any]:
    rng = np.random.default_rng(0)
    data = task_data(name, rng.integers(2, 12, 24), rng, parts=(12, 6, 6))
    options = {"stack": 2} if name == "handwriting" else {}
    return make_task(name, data, epochs=2, batch_size=6, hidden_size=4, dropout=0.3, device=device, **options)


@pytest.mark.parametrize(
    "name", ["classify", *(pytest.param(name, marks=pytest.mark.slow) for name in ("handwriting", "language-model"))]
)
def test_batches_are_pinned_and_copied_while_the_program_goes_on(name: str, tmp_path: Path) -> None:
    outcomes = []
    for device in ("cpu", "cuda"):
        with GpuStandIn() as gpu:
            outcomes.append(outcome(tmp_path / device, train(tmp_path / device, task(name, device))))
        assert gpu.pinned == gpu.asynchronous
        assert (gpu.asynchronous > 0) == (device == "cuda")
        assert gpu.waiting == []
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a_run_goes_on_on_another_device(first: str, second: str, tmp_path: Path) -> None:
    with GpuStandIn():
        expected = outcome(tmp_path / "whole", train(tmp_path / "whole", task("classify", "cpu")))
        stop(tmp_path / "run", task("classify", first), 3)
        assert outcome(tmp_path / "run", train(tmp_path / "run", task("classify", second), resume=True)) == expected


def numbered(number: int) -> Batch:
    return collate([torch.full((1, 1), float(number))])


def number_of(batch: Batch) -> int:
    return int(batch.features_BTF.sum())


def makers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("stretto-batches")]


def test_the_next_batch_is_made_while_one_is_used() -> None:
    """One ahead, in order, by another thread; and no more are asked for than there are."""
    made = [threading.Event() for _ in range(4)]
    threads: set[threading.Thread] = set()

    def batches() -> Iterator[Batch]:
        for number in range(4):
            made[number].set()
            threads.add(threading.current_thread())
            yield numbered(number)

    used, source = [], batches()
    ahead = read_ahead(source, device="cuda", most=3)
    for _ in range(3):
        used.append(number_of(next(ahead)))
        assert made[min(used[-1] + 1, 2)].wait(60)
        assert not any(event.is_set() for event in made[used[-1] + 2 :])
    assert not made[3].is_set()
    assert threading.current_thread() not in threads
    assert number_of(next(ahead)) == 3
    assert threading.current_thread() in threads
    assert used == [0, 1, 2]
    assert not makers()


def test_on_the_cpu_nothing_is_made_ahead() -> None:
    seen: list[int] = []

    def batches() -> Iterator[Batch]:
        for number in range(3):
            assert threading.current_thread() is threading.main_thread()
            seen.append(number)
            yield numbered(number)

    for number, batch in enumerate(read_ahead(batches(), device="cpu", most=3)):
        assert number_of(batch) == number
        assert seen == [*range(number + 1)]


def test_a_batch_that_cannot_be_made_raises_when_it_is_asked_for() -> None:
    failed = threading.Event()

    def batches() -> Iterator[Batch]:
        yield numbered(0)
        failed.set()
        raise OSError("the file is gone")

    ahead = read_ahead(batches(), device="cuda", most=2)
    assert number_of(next(ahead)) == 0
    assert failed.wait(60)
    with pytest.raises(OSError, match="the file is gone"):
        next(ahead)
    assert not makers()


def test_whoever_stops_waits_for_the_batch_that_is_being_made() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def batches() -> Iterator[Batch]:
        yield numbered(0)
        begun.set()
        assert may_end.wait(60)
        ended.set()
        yield numbered(1)

    ahead = read_ahead(batches(), device="cuda", most=2)
    next(ahead)
    assert begun.wait(60)
    threading.Timer(0.01, may_end.set).start()
    ahead.close()
    assert ended.is_set()
    assert not makers()


@pytest.mark.parametrize("name", ["classify", pytest.param("language-model", marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_of_a_run_are_collated_by_another_thread(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_main_thread: list[bool] = []

    def noted(make: Any) -> Any:
        def call(*given: Any) -> Any:
            in_main_thread.append(threading.current_thread() is threading.main_thread())
            return make(*given)

        return call

    monkeypatch.setattr(feeds, "collate", noted(feeds.collate))
    monkeypatch.setattr(feeds._Text, "batch", noted(feeds._Text.batch))
    with GpuStandIn():
        train(tmp_path, task(name, device))
    assert set(in_main_thread) == {device == "cpu"}
    assert not makers()


def test_feeds_of_one_s_own_are_not_read_by_another_thread() -> None:
    """They may draw random numbers for a batch."""
    assert not feeds.AbstractFeed.can_read_ahead
    assert BucketFeed.can_read_ahead
    assert StreamFeed.can_read_ahead


def test_a_batch_size_that_changes_within_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made ahead is dropped, and comes again in batches of the new size."""
    decision = Decision(
        action="shrink",
        batch_size=3,
        accumulate=1,
        lr=0.01,
        warmup_epochs=0.0,
        noise_scale=None,
        predicted_gain=0.0,
        extra_data=0.0,
        reason="a test",
    )
    outcomes = []
    for device in ("cpu", "cuda"):
        updates = iter(range(1, 100))

        def once(self: Any, update: Any, *, left: float, updates: Any = updates) -> Any:
            if next(updates) != 1:
                return None
            self._batch_size = 3
            return batch_policy.Replan(decision=decision, clip_norm=1.0)

        monkeypatch.setattr(batch_policy.BatchPolicy, "after_update", once)
        with GpuStandIn():
            outcomes.append(outcome(tmp_path / device, train(tmp_path / device, task("classify", device))))
        assert len(events_of(tmp_path / device, "batch")) == 1
    assert outcomes[0] == outcomes[1]
