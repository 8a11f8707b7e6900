"""The training loop stopped at every place there is, and resumed: digit for digit the run that was never stopped.

Shape legend: N sequences.
"""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import at, crash, events_of, interrupt, outcome, stop, train

from small_data import make_task, task_data
from stretto.batching import Batch
from stretto.data import SequenceSet
from stretto.errors import StrettoError
from stretto.training import (
    CHECKPOINT_FOLDER,
    EVENTS_FILE,
    AbstractTask,
    EventLog,
    LossSum,
    SilentLog,
    Trainer,
    read_events,
)
from stretto.training.checkpoint import TENSORS_FILE

EPOCHS, UPDATES = 3, 4


def _data(name: str, *, seed: int = 0) -> SequenceSet:
    rng = np.random.default_rng(seed)
    lengths_N = np.where(np.arange(40) % 2, rng.integers(8, 12, 40), rng.integers(2, 5, 40))
    return task_data(name, lengths_N, rng, parts=(24, 8, 8))


def _task(name: str, *, data: SequenceSet | None = None, **settings: Any) -> AbstractTask[Any]:
    values = {"epochs": EPOCHS, "batch_size": 6, "hidden_size": 8, "num_buckets": 2, "dropout": 0.3, **settings}
    return make_task(name, data or _data(name), **values)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of the task "classify" when nothing stops it."""
    run = tmp_path_factory.mktemp("whole")
    return outcome(run, train(run, _task("classify")))


def _resumed(run: Path, task: AbstractTask[Any] | None = None) -> dict[str, Any]:
    return outcome(run, train(run, task or _task("classify"), resume=True))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"num_layers": 2}, {"schedule": "constant"}])
def test_an_interruption_after_any_update_changes_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    task = _task("classify", **settings)
    expected = outcome(tmp_path / "whole", train(tmp_path / "whole", task))
    updates = [event["update"] for event in expected["recorded"] if event["event"] == "update"]
    assert updates == list(range(1, 1 + EPOCHS * UPDATES))
    for update in range(1, EPOCHS * UPDATES):
        run = tmp_path / str(update)
        assert stop(run, task, update) == update
        torch.manual_seed(1234)
        assert _resumed(run, task) == expected, f"after update {update}"


@pytest.mark.parametrize("name", ["handwriting", "language-model"])
def test_an_interruption_of_the_other_tasks_changes_nothing(tmp_path: Path, name: str) -> None:
    settings: dict[str, Any] = {"stack": 2} if name == "handwriting" else {}
    task = _task(name, num_layers=2, **settings)
    expected = outcome(tmp_path / "whole", train(tmp_path / "whole", task))
    for update in (3, 4, 9):
        run = tmp_path / str(update)
        stop(run, task, update, act=lambda: signal.raise_signal(signal.SIGTERM))
        assert _resumed(run, task) == expected, f"after update {update}"


def test_an_interruption_between_epochs_changes_nothing(tmp_path: Path, expected: dict[str, Any]) -> None:
    assert stop(tmp_path, _task("classify"), UPDATES, kind="epoch") == UPDATES
    assert _resumed(tmp_path) == expected


def test_an_interruption_when_a_checkpoint_is_on_disk_changes_nothing(tmp_path: Path, expected: dict[str, Any]) -> None:
    """It is written while the next epoch has begun, and recorded after one of its updates."""
    assert UPDATES <= stop(tmp_path, _task("classify"), UPDATES, kind="checkpoint") < 3 * UPDATES
    assert _resumed(tmp_path) == expected


def test_interrupted_again_and_again(tmp_path: Path) -> None:
    task = _task("classify", num_layers=2)
    expected = outcome(tmp_path / "whole", train(tmp_path / "whole", task))
    for number, update in enumerate([1, 2, 4, 7, 8, 11]):
        assert stop(tmp_path / "cut", task, update, resume=number > 0) == update
    assert _resumed(tmp_path / "cut", task) == expected


def test_an_interruption_in_the_last_update_ends_the_run(tmp_path: Path, expected: dict[str, Any]) -> None:
    watch = at(EPOCHS * UPDATES, "update", interrupt)
    assert outcome(tmp_path, train(tmp_path, _task("classify"), watch=watch)) == expected


@pytest.mark.parametrize("minutes", [5.0, 1e-9])
@pytest.mark.parametrize(
    ("update", "kind"),
    [
        (5, "update"),
        (8, "epoch"),
        (8, "checkpoint"),
        *(pytest.param(*place, marks=pytest.mark.slow) for place in ((7, "update"), (8, "update"), (12, "epoch"))),
    ],
)
def test_a_crash_loses_only_what_came_after_the_last_checkpoint(
    tmp_path: Path, expected: dict[str, Any], minutes: float, update: int, kind: str
) -> None:
    task = _task("classify", checkpoint_minutes=minutes)
    with pytest.raises(RuntimeError, match="the power is gone"):
        train(tmp_path, task, watch=at(update, kind, crash))
    assert _resumed(tmp_path, task) == expected
    resumed = [event["update"] for event in read_events(tmp_path) if event["event"] == "resumed"]
    whole_epochs = (update - 1) // UPDATES * UPDATES
    lost_nothing = update if kind == "checkpoint" else whole_epochs
    assert resumed == [lost_nothing if minutes == 5.0 else max(lost_nothing, update - 1)]


def test_a_crash_in_the_middle_of_testing_can_be_resumed(tmp_path: Path, expected: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="the power is gone"):
        train(tmp_path, _task("classify"), watch=lambda event: crash() if event["event"] == "samples" else None)
    resumed = _resumed(tmp_path)
    *others, last = resumed["recorded"]
    resumed["recorded"] = [*(event for event in others if event["event"] != "samples"), last]
    assert resumed == expected


def test_a_damaged_checkpoint_is_reported_and_the_one_before_gives_the_same_run(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    stop(tmp_path, _task("classify"), 7)
    damaged = tmp_path / CHECKPOINT_FOLDER / "update-00000007" / TENSORS_FILE
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert _resumed(tmp_path) == expected
    (warning,) = [event["message"] for event in read_events(tmp_path) if event["event"] == "warning"]
    assert str(damaged.parent) in warning


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"data": _data("classify", seed=5)}, "is not what the run in .* was trained on"),
        ({"hidden_size": 9}, "update-00000002' is of another model"),
        ({"num_layers": 2}, "update-00000002' is of another model"),
        ({"batch_size": 5}, "saved for other lengths or settings"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    stop(tmp_path, _task("classify"), 2)
    with pytest.raises(StrettoError, match=message):
        train(tmp_path, _task("classify", **other), resume=True)


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path: Path, expected: dict[str, Any]) -> None:
    assert outcome(tmp_path / "a", train(tmp_path / "a", _task("classify"))) == expected
    assert outcome(tmp_path / "b", train(tmp_path / "b", _task("classify", seed=1))) != expected


def test_trainers_that_take_turns_train_as_each_alone(tmp_path: Path) -> None:
    def trainers() -> list[Trainer]:
        tasks = [_task("classify", num_buckets=buckets) for buckets in (1, 2)]
        return [Trainer(task, run=tmp_path / "run", log=SilentLog(), resume=False) for task in tasks]

    def losses(trainer: Trainer) -> tuple[float, float]:
        record = trainer.train_epoch()
        return record.train_loss, record.valid_loss

    alone = [[losses(trainer) for _ in range(EPOCHS)] for trainer in trainers()]
    first, second = trainers()
    torch.rand(3)
    turns = [(losses(first), torch.rand(5), losses(second)) for _ in range(EPOCHS)]
    assert [[turn[0] for turn in turns], [turn[2] for turn in turns]] == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize("schedule", ["one-cycle", "ptb"])
def test_epochs_after_the_last_have_its_rate(tmp_path: Path, schedule: str) -> None:
    task = _task("classify", schedule=schedule, epochs=1)
    trainer = Trainer(task, run=tmp_path, log=EventLog(tmp_path / EVENTS_FILE), resume=False)
    assert [trainer.train_epoch().epoch for _ in range(3)] == [1, 2, 3]
    rates = [event["rate"] for event in events_of(tmp_path, "update")]
    end = trainer.state.optimizer.param_groups[0]["lr"]
    assert rates[UPDATES:] == [end] * (2 * UPDATES)


def test_random_state_and_signal_handlers_are_as_they_were_afterwards(tmp_path: Path) -> None:
    random = torch.get_rng_state()
    handlers = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    stop(tmp_path, _task("classify"), 2, act=lambda: signal.raise_signal(signal.SIGTERM))
    train(tmp_path, _task("classify"), resume=True)
    assert torch.equal(torch.get_rng_state(), random)
    assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_the_share_of_clipped_updates_is_recorded_also_if_the_run_is_stopped(tmp_path: Path) -> None:
    task = _task("classify", clip_norm=0.3)
    stop(tmp_path, task, 6)
    train(tmp_path, task, resume=True)
    for epoch in events_of(tmp_path, "epoch"):
        updates = [event for event in events_of(tmp_path, "update") if event["epoch"] == epoch["epoch"] - 1]
        assert epoch["clipped"] == sum(event["gradient_norm"] > 0.3 for event in updates) / len(updates)
    assert 0.0 < epoch["clipped"] < 1.0


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        interrupt()
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, _task("classify"), watch=at(2, "update", twice))
    assert not (tmp_path / CHECKPOINT_FOLDER).exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_nan_or_inf_stops_and_names_the_sequences(
    tmp_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    task = _task("classify")
    plain, trained = task.loss, []

    def loss(output: torch.Tensor, batch: Batch) -> LossSum:
        trained.extend([batch] if output.requires_grad else [])
        summed = plain(output, batch)
        return LossSum(total=summed.total * (value if len(trained) == 7 else 1.0), count=summed.count)

    monkeypatch.setattr(task, "loss", loss)
    with pytest.raises(StrettoError, match=f"is {value} at update 7, on training sequences") as info:
        train(tmp_path, task)
    assert trained[-1].indices is not None
    assert f"sequences {', '.join(map(str, trained[-1].indices.tolist()))}." in str(info.value)
    assert [path.name for path in (tmp_path / CHECKPOINT_FOLDER).iterdir()] == ["update-00000004"]
    monkeypatch.undo()
    assert _resumed(tmp_path, task) == expected
