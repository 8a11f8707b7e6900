"""The training loop stopped at every place there is, and resumed: digit for digit the run that was never stopped.

Shape legend: S steps of all sequences, N sequences.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from stretto.batching import Batch
from stretto.data import Labels, SequenceSet, Transcripts
from stretto.errors import StrettoError
from stretto.tasks import TASKS
from stretto.training import (
    CHECKPOINT_FOLDER,
    EVENTS_FILE,
    MODEL_FILE,
    AbstractTask,
    Event,
    EventLog,
    LossSum,
    Subscriber,
    Trainer,
    read_events,
    validate,
)
from stretto.training.checkpoint import TENSORS_FILE
from stretto.training.trainer import Interrupted, RunResult

EPOCHS, UPDATES = 3, 4
Outcome = dict[str, Any]


def _data(name: str, *, seed: int = 0) -> SequenceSet:
    rng = np.random.default_rng(seed)
    lengths_N = np.where(np.arange(40) % 2, rng.integers(8, 12, 40), rng.integers(2, 5, 40))
    common: dict[str, Any] = {"offsets": np.cumsum([0, *lengths_N]), "split_N": np.repeat([0, 1, 2], [24, 8, 8])}
    if name == "language-model":
        return SequenceSet.from_flat(rng.integers(0, 5, lengths_N.sum()), alphabet="abcde", **common)
    features_SF = rng.normal(size=(lengths_N.sum(), 3)).astype(np.float32)
    if name == "classify":
        return SequenceSet.from_flat(
            features_SF, targets=Labels.check(np.arange(40) % 3, names=None, source=""), **common
        )
    return SequenceSet.from_flat(
        features_SF, targets=Transcripts.of(["ab" if n > 4 else "b" for n in lengths_N]), **common
    )


def _task(name: str, *, data: SequenceSet | None = None, **settings: Any) -> AbstractTask[Any]:
    values = {"epochs": EPOCHS, "batch_size": 6, "hidden_size": 8, "num_buckets": 2, "dropout": 0.3, **settings}
    return TASKS[name](validate(TASKS[name].Config, values, source="the test"), data or _data(name))


def _train(run: Path, task: AbstractTask[Any], *, resume: bool = False, watch: Subscriber | None = None) -> RunResult:
    log = EventLog(run / EVENTS_FILE, subscribers=[watch] if watch else [])
    try:
        return Trainer(task, run=run, log=log, resume=resume).run()
    finally:
        log.close()


def _trainers(folder: Path) -> list[Trainer]:
    runs = [(folder / str(buckets), _task("classify", num_buckets=buckets)) for buckets in (1, 2)]
    return [Trainer(task, run=run, log=EventLog(run / EVENTS_FILE), resume=False) for run, task in runs]


def _losses(trainer: Trainer) -> tuple[float, float]:
    record = trainer.train_epoch()
    return record.train_loss, record.valid_loss


def _outcome(run: Path, result: RunResult) -> Outcome:
    events = read_events(run)
    clocks = ("time", "seconds", "steps_per_second")
    return {
        "recorded": [
            {key: value for key, value in event.items() if key not in clocks}
            for event in events
            if event["event"] in ("update", "epoch", "samples")
        ],
        "metrics": result.metrics,
        "padding": result.padding,
        "epochs": result.epochs,
        "weights": {name: w.numpy().tobytes() for name, w in safetensors.torch.load_file(run / MODEL_FILE).items()},
    }


def _at(update: int, kind: str, act: Callable[[], None]) -> Subscriber:
    acts = iter([act])

    def watch(event: Event) -> None:
        if event["event"] == kind and event["update"] == update:
            next(acts, lambda: None)()

    return watch


def _ask(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _crash() -> None:
    raise RuntimeError("the power is gone")


def _stopped(run: Path, task: AbstractTask[Any], watch: Subscriber, *, resume: bool = False) -> int:
    with pytest.raises(Interrupted) as info:
        _train(run, task, resume=resume, watch=watch)
    assert info.value.run == run
    last = read_events(run)[-1]
    assert (last["event"], last["update"]) == ("interrupted", info.value.update)
    return info.value.update


@pytest.mark.parametrize(
    "settings", [{"num_layers": 2}, pytest.param({"schedule": "constant"}, marks=pytest.mark.slow)]
)
def test_an_interruption_after_any_update_changes_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    task = _task("classify", **settings)
    expected = _outcome(tmp_path / "whole", _train(tmp_path / "whole", task))
    assert [event["update"] for event in expected["recorded"] if event["event"] == "update"] == list(
        range(1, 1 + EPOCHS * UPDATES)
    )
    for update in range(1, EPOCHS * UPDATES):
        run = tmp_path / str(update)
        assert _stopped(run, task, _at(update, "update", _ask(signal.SIGINT))) == update
        torch.manual_seed(1234)
        assert _outcome(run, _train(run, task, resume=True)) == expected, f"after update {update}"


@pytest.mark.parametrize("name", ["handwriting", "language-model"])
@pytest.mark.parametrize("update", [3, 4, 9])
def test_an_interruption_of_the_other_tasks_changes_nothing(tmp_path: Path, name: str, update: int) -> None:
    settings: dict[str, Any] = {"stack": 2} if name == "handwriting" else {}
    task = _task(name, num_layers=2, **settings)
    expected = _outcome(tmp_path / "whole", _train(tmp_path / "whole", task))
    _stopped(tmp_path / "cut", task, _at(update, "update", _ask(signal.SIGTERM)))
    assert _outcome(tmp_path / "cut", _train(tmp_path / "cut", task, resume=True)) == expected


def test_an_interruption_between_epochs_changes_nothing(tmp_path: Path) -> None:
    task = _task("classify")
    expected = _outcome(tmp_path / "whole", _train(tmp_path / "whole", task))
    assert _stopped(tmp_path / "cut", task, _at(UPDATES, "epoch", _ask(signal.SIGINT))) == UPDATES
    assert _outcome(tmp_path / "cut", _train(tmp_path / "cut", task, resume=True)) == expected


def test_an_interruption_when_a_checkpoint_is_on_disk_changes_nothing(tmp_path: Path) -> None:
    """It is written while the next epoch has begun, and told of after one of its updates."""
    task = _task("classify")
    expected = _outcome(tmp_path / "whole", _train(tmp_path / "whole", task))
    assert UPDATES <= _stopped(tmp_path / "cut", task, _at(UPDATES, "checkpoint", _ask(signal.SIGINT))) < 3 * UPDATES
    assert _outcome(tmp_path / "cut", _train(tmp_path / "cut", task, resume=True)) == expected


def test_interrupted_again_and_again(tmp_path: Path) -> None:
    task = _task("classify")
    expected = _outcome(tmp_path / "whole", _train(tmp_path / "whole", task))
    run = tmp_path / "cut"
    for number, update in enumerate([1, 2, 4, 7, 8, 11]):
        assert _stopped(run, task, _at(update, "update", _ask(signal.SIGINT)), resume=number > 0) == update
    assert _outcome(run, _train(run, task, resume=True)) == expected


def test_an_interruption_in_the_last_step_ends_the_run(tmp_path: Path) -> None:
    task = _task("classify")
    expected = _outcome(tmp_path / "whole", _train(tmp_path / "whole", task))
    watch = _at(EPOCHS * UPDATES, "update", _ask(signal.SIGINT))
    assert _outcome(tmp_path / "cut", _train(tmp_path / "cut", task, watch=watch)) == expected


@pytest.mark.parametrize("minutes", [5.0, 1e-9])
@pytest.mark.parametrize(
    ("update", "kind"),
    [
        (5, "update"),
        (8, "epoch"),
        *(pytest.param(*at, marks=pytest.mark.slow) for at in ((7, "update"), (8, "update"), (12, "epoch"))),
    ],
)
def test_a_crash_loses_only_what_came_after_the_last_checkpoint(
    tmp_path: Path, minutes: float, update: int, kind: str
) -> None:
    task = _task("classify", checkpoint_minutes=minutes)
    expected = _outcome(tmp_path / "whole", _train(tmp_path / "whole", task))
    run = tmp_path / "cut"
    with pytest.raises(RuntimeError, match="the power is gone"):
        _train(run, task, watch=_at(update, kind, _crash))
    assert _outcome(run, _train(run, task, resume=True)) == expected
    resumed = [event["update"] for event in read_events(run) if event["event"] == "resumed"]
    whole_epochs = (update - 1) // UPDATES * UPDATES
    assert resumed == [whole_epochs if minutes == 5.0 else max(whole_epochs, update - 1)]


@pytest.mark.parametrize("minutes", [5.0, 1e-9])
def test_a_crash_loses_nothing_that_was_reported_to_be_on_disk(tmp_path: Path, minutes: float) -> None:
    task = _task("classify", checkpoint_minutes=minutes)
    expected = _outcome(tmp_path / "whole", _train(tmp_path / "whole", task))
    run = tmp_path / "cut"
    with pytest.raises(RuntimeError, match="the power is gone"):
        _train(run, task, watch=_at(2 * UPDATES, "checkpoint", _crash))
    assert _outcome(run, _train(run, task, resume=True)) == expected
    (resumed,) = [event["update"] for event in read_events(run) if event["event"] == "resumed"]
    assert resumed == 2 * UPDATES


def test_a_crash_in_the_middle_of_testing_can_be_resumed(tmp_path: Path) -> None:
    task = _task("classify")
    expected = _outcome(tmp_path / "whole", _train(tmp_path / "whole", task))
    run = tmp_path / "cut"
    with pytest.raises(RuntimeError, match="the power is gone"):
        _train(run, task, watch=lambda event: _crash() if event["event"] == "samples" else None)
    resumed = _outcome(run, _train(run, task, resume=True))
    resumed["recorded"] = [event for event in resumed["recorded"] if event["event"] != "samples"] + resumed["recorded"][
        -1:
    ]
    assert resumed == expected


def test_a_damaged_checkpoint_is_reported_and_the_one_before_gives_the_same_run(tmp_path: Path) -> None:
    task = _task("classify")
    expected = _outcome(tmp_path / "whole", _train(tmp_path / "whole", task))
    run = tmp_path / "cut"
    _stopped(run, task, _at(7, "update", _ask(signal.SIGINT)))
    damaged = run / CHECKPOINT_FOLDER / "update-00000007" / TENSORS_FILE
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert _outcome(run, _train(run, task, resume=True)) == expected
    warnings = [event["message"] for event in read_events(run) if event["event"] == "warning"]
    assert len(warnings) == 1
    assert str(damaged.parent) in warnings[0]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"data": _data("classify", seed=5)}, "is not what the run in .* was trained on"),
        ({"hidden_size": 9}, "update-00000002' is of another model"),
        ({"num_layers": 2}, "update-00000002' is of another model"),
        ({"batch_size": 5}, "saved for other lengths or settings"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, other: dict[str, Any], told: str) -> None:
    _stopped(tmp_path, _task("classify"), _at(2, "update", _ask(signal.SIGINT)))
    with pytest.raises(StrettoError, match=told):
        _train(tmp_path, _task("classify", **other), resume=True)


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        _train(tmp_path, _task("classify"), watch=_at(2, "update", _crash))
    with pytest.raises(StrettoError, match="has no checkpoint to resume from"):
        _train(tmp_path, _task("classify"), resume=True)


def test_the_same_seed_gives_the_same_run_and_another_another(tmp_path: Path) -> None:
    first = _outcome(tmp_path / "a", _train(tmp_path / "a", _task("classify")))
    assert _outcome(tmp_path / "b", _train(tmp_path / "b", _task("classify"))) == first
    assert _outcome(tmp_path / "c", _train(tmp_path / "c", _task("classify", seed=1))) != first


def test_trainers_that_take_turns_train_as_each_alone(tmp_path: Path) -> None:
    alone = [[_losses(trainer) for _ in range(EPOCHS)] for trainer in _trainers(tmp_path / "alone")]
    first, second = _trainers(tmp_path / "turns")
    torch.rand(3)
    turns = [(_losses(first), torch.rand(5), _losses(second)) for _ in range(EPOCHS)]
    assert [[turn[0] for turn in turns], [turn[2] for turn in turns]] == alone
    assert alone[0] != alone[1]


def test_the_random_state_of_the_process_is_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    _train(tmp_path / "a", _task("classify"))
    _stopped(tmp_path / "b", _task("classify"), _at(2, "update", _ask(signal.SIGINT)))
    _train(tmp_path / "b", _task("classify"), resume=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_signal_handlers_are_as_they_were_afterwards(tmp_path: Path) -> None:
    before = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    _stopped(tmp_path, _task("classify"), _at(2, "update", _ask(signal.SIGTERM)))
    assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path, _task("classify"), watch=_at(2, "update", twice))
    assert not (tmp_path / CHECKPOINT_FOLDER).exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_nan_or_inf_stops_and_names_the_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    task, run = _task("classify"), tmp_path / "cut"
    plain, trained = task.loss, []

    def loss(output: torch.Tensor, batch: Batch) -> LossSum:
        trained.extend([batch] if output.requires_grad else [])
        summed = plain(output, batch)
        return LossSum(total=summed.total * (value if len(trained) == 7 else 1.0), count=summed.count)

    monkeypatch.setattr(task, "loss", loss)
    with pytest.raises(StrettoError, match=f"is {value} at update 7, on training sequences") as info:
        _train(run, task)
    assert trained[-1].indices is not None
    assert f"sequences {', '.join(map(str, trained[-1].indices.tolist()))}." in str(info.value)
    assert [path.name for path in (run / CHECKPOINT_FOLDER).iterdir()] == ["update-00000004"]
    monkeypatch.undo()
    expected = _outcome(tmp_path / "whole", _train(tmp_path / "whole", task))
    assert _outcome(run, _train(run, task, resume=True)) == expected
