"""Training on several ranks: what is recorded, refused, resumed, and what one rank's error does."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tasks import tiny_task
from worlds import StopAt, rank0_log, run_world

from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.large_batch import search
from stretto.training import AbstractLog, Trainer, auto, read_events, run_auto


def _trainer(
    world: World, run: str, *, resume: bool = False, log: AbstractLog | None = None, **changes: Any
) -> Trainer:
    task = tiny_task("classify", accumulate=1)
    for name, value in {"epochs": 2, "learning_rate": 0.01, "record_sequences": True, **changes}.items():
        object.__setattr__(task.config, name, value)
    return Trainer(task, run=Path(run), log=log or rank0_log(world, run), resume=resume, world=world)


def _sum_of(trainer: Trainer) -> float:
    return sum(float(parameter.detach().double().sum()) for parameter in trainer.state.model.parameters())


def _train(world: World, run: str, resume: bool, changes: dict[str, Any]) -> float:
    trainer = _trainer(world, run, resume=resume, **changes)
    trainer.run()
    return _sum_of(trainer)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_sequence_of_every_epoch_is_recorded_once(tmp_path: Path, accumulate: int) -> None:
    sums = run_world(2, _train, tmp_path / "world", str(tmp_path / "run"), False, {"accumulate": accumulate})
    assert sums[0] == sums[1]
    events = read_events(tmp_path / "run")
    for epoch in range(2):
        updates = [event for event in events if event["event"] == "update" and event["epoch"] == epoch]
        assert sorted(number for event in updates for number in event["sequences"]) == list(range(11))
        assert [len(event["sequences"]) for event in updates] == [event["rows"] for event in updates]


def _train_on_two(world: World, run: str) -> float:
    task = tiny_task("classify", accumulate=1)
    object.__setattr__(task.config, "record_sequences", True)
    object.__setattr__(task, "data", task.data.subset(np.array([0, 5, 12, 15])))
    trainer = Trainer(task, run=Path(run), log=rank0_log(world, run), resume=False, world=world)
    trainer.run()
    return _sum_of(trainer)


@pytest.mark.slow
def test_more_ranks_than_sequences(tmp_path: Path) -> None:
    """Two to train on, one to validate and one to test with, and four ranks."""
    sums = run_world(4, _train_on_two, tmp_path / "world", str(tmp_path / "run"))
    assert all(isinstance(total, float) and np.isfinite(total) for total in sums)
    assert len(set(sums)) == 1
    updates = [event for event in read_events(tmp_path / "run") if event["event"] == "update"]
    assert sorted(number for event in updates for number in event["sequences"]) == [0, 5]


class _Full(AbstractLog):
    """Finds no room from the third update on."""

    def __init__(self) -> None:
        self.updates = 0

    def emit(self, kind: str, **values: Any) -> None:  # noqa: ARG002
        self.updates += kind == "update"
        if self.updates >= 3:
            raise StrettoError("could not write to 'events.jsonl': no space left", fix="Free space.")


def _train_without_room(world: World, run: str) -> float:
    trainer = _trainer(world, run, log=_Full() if world.is_rank0 else None)
    trainer.run()
    return _sum_of(trainer)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_error_on_rank_0_stops_all_with_the_same_message(tmp_path: Path, size: int) -> None:
    said = run_world(size, _train_without_room, tmp_path / "world", str(tmp_path / "run"))
    assert said == ["StrettoError: could not write to 'events.jsonl': no space left. Free space."] * size


def _train_on_other_data(world: World, run: str) -> None:
    if world.rank == 1:
        honest = SequenceSet.digest
        SequenceSet.digest = lambda self: honest(self)[::-1]  # type: ignore[method-assign]
    _trainer(world, run)


def test_other_data_are_refused_on_every_rank(tmp_path: Path) -> None:
    said = run_world(2, _train_on_other_data, tmp_path / "world", str(tmp_path / "run"))
    assert len(set(said)) == 1
    assert said[0].startswith("StrettoError: the data of rank 1 differs from that of rank 0. Give every rank the same")


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    run_world(2, _train, tmp_path / "first", run, False, {})
    said = run_world(2, _train, tmp_path / "second", run, True, {"hidden_size": 5})
    assert len(set(said)) == 1
    assert "is of another model" in said[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), pytest.param(1, 3, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow)],
)
def test_another_number_of_ranks_covers_the_rest_of_the_epoch_once(tmp_path: Path, before: int, after: int) -> None:
    """Stopped in the middle of an epoch, with checkpoints after every update."""
    run = tmp_path / "run"
    run_world(before, _train_a_part, tmp_path / "first", str(run))
    sums = run_world(after, _train, tmp_path / "second", str(run), True, {})
    assert all(isinstance(total, float) and np.isfinite(total) for total in sums)
    assert len(set(sums)) == 1
    events = read_events(run)
    (resumed,) = [event for event in events if event["event"] == "resumed"]
    assert resumed["world_size"] == after
    assert resumed["update"] == 2
    for epoch in range(2):
        numbers = [
            n for event in events if event["event"] == "update" and event["epoch"] == epoch for n in event["sequences"]
        ]
        assert sorted(numbers) == list(range(11))


def _train_a_part(world: World, run: str) -> str:
    """Two updates: several ranks learn in the second that rank 0 was asked to stop in the first."""
    stop_at = 1 if world.size > 1 else 2
    log = StopAt(rank0_log(world, run), update=stop_at if world.is_rank0 else None)
    trainer = log.trainer = _trainer(world, run, log=log)
    try:
        trainer.run()
    except Exception as stopped:  # noqa: BLE001 - of several kinds
        return type(stopped).__name__
    return "it ran to its end"


def _train_auto(world: World, run: str, resume: bool) -> list[Any]:
    search.MIN_TRIAL_UPDATES = 0.1  # type: ignore[misc, assignment]
    # What is chosen is trained to its end, however it fares.
    search.MIN_GAIN, search.MAX_LOSS = -1.0, 10.0  # type: ignore[misc]
    auto.MUON_RATES = ((1, 0.1),)  # type: ignore[misc, assignment]
    task = tiny_task("classify", accumulate=1)
    task.config = dataclasses.replace(task.config, auto=True, epochs=4, learning_rate=0.01)
    plain = Trainer(task, run=Path(run), log=rank0_log(world, run), resume=False, world=world)
    result = run_auto(task, run=Path(run), log=rank0_log(world, run), world=world, plain=plain, resume=resume)
    total = sum(float(parameter.detach().double().sum()) for parameter in result.model.parameters())
    return [total, result.epochs, result.metrics]


@pytest.mark.slow
def test_ranks_try_recipes_and_train_the_best_together(tmp_path: Path) -> None:
    first, second = run_world(2, _train_auto, tmp_path / "world", str(tmp_path / "run"), False)
    assert first == second
    assert first[1] == 4
    events = [event for event in read_events(tmp_path / "run") if event["event"] == "auto"]
    assert [event["action"] for event in events][:5] == [*["trial"] * 4, "run"]
    # Everything is trained: what is left is the test.
    again = run_world(2, _train_auto, tmp_path / "again", str(tmp_path / "run"), True)
    assert again == [first, first]
