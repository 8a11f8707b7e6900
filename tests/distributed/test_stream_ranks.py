"""Streams over ranks: two make the gradients of one, and stops with the same or another number of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import StopAt, rank0_log, run_world

from stretto.data import make_text
from stretto.distributed import World
from stretto.tasks.language_model import LanguageModelConfig, LanguageModelling
from stretto.training import CHECKPOINT_FOLDER, Trainer, read_events, validate


def _trainer(
    world: World, run: str, *, resume: bool = False, batch_size: int = 3, stop_at: int | None = None, **changes: Any
) -> Trainer:
    values = {"hidden_size": 4, "embedding_size": 3, "dropout": 0.0, "window": 6, "epochs": 2, "backend": "torch"}
    config = validate(LanguageModelConfig, {**values, "batch_size": batch_size, **changes}, source="the test")
    task = LanguageModelling(config, make_text(num_train=20))
    log = StopAt(rank0_log(world, run), update=stop_at if world.is_rank0 else None)
    log.trainer = Trainer(task, run=Path(run), log=log, resume=resume, world=world)
    return log.trainer


def _train(world: World, run: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Weights at the end, in float64: what differs between one rank and two is the order of sums alone."""
    torch.set_default_dtype(torch.float64)
    trainer = _trainer(world, run, **settings)
    try:
        trainer.run()
    except Exception as stopped:  # noqa: BLE001 - shown by the test
        return {"stopped": type(stopped).__name__}
    return {"weights": [value for w in trainer.state.model.parameters() for value in w.detach().flatten().tolist()]}


def _weights(answers: list[Any]) -> list[float]:
    assert all(isinstance(answer, dict) and "weights" in answer for answer in answers), answers
    assert all(answer == answers[0] for answer in answers)
    weights: list[float] = answers[0]["weights"]
    return weights


def _updates(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == "update"]


def test_two_ranks_train_as_one_with_as_many_streams(tmp_path: Path) -> None:
    two = _weights(run_world(2, _train, tmp_path / "two", str(tmp_path / "a"), {"batch_size": 3}))
    one = _weights(run_world(1, _train, tmp_path / "one", str(tmp_path / "b"), {"batch_size": 6}))
    np.testing.assert_allclose(two, one, rtol=1e-9, atol=1e-12)
    for mine, other in zip(_updates(tmp_path / "a"), _updates(tmp_path / "b"), strict=True):
        assert mine["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-9)
        assert (mine["rows"], mine["steps_real"]) == (other["rows"], other["steps_real"])
    epochs = [[e["valid_loss"] for e in read_events(tmp_path / run) if e["event"] == "epoch"] for run in ("a", "b")]
    assert epochs[0] == pytest.approx(epochs[1], rel=1e-9)


@pytest.mark.parametrize("minutes", [5.0, pytest.param(1e-9, marks=pytest.mark.slow)])
def test_two_ranks_stopped_in_the_middle_continue_as_if_never_stopped(tmp_path: Path, minutes: float) -> None:
    """With a checkpoint after every update, or at the stop alone."""
    settings = {"checkpoint_minutes": minutes, "dropout": 0.3}
    expected = _weights(run_world(2, _train, tmp_path / "whole", str(tmp_path / "a"), settings))
    run = str(tmp_path / "b")
    said = run_world(2, _train, tmp_path / "cut", run, {**settings, "stop_at": 2})
    assert said == [{"stopped": "Interrupted"}] * 2
    assert _weights(run_world(2, _train, tmp_path / "rest", run, {**settings, "resume": True})) == expected


@pytest.mark.slow
def test_as_many_streams_on_one_rank_continue_with_their_states(tmp_path: Path) -> None:
    run = str(tmp_path / "b")
    expected = _weights(run_world(2, _train, tmp_path / "whole", str(tmp_path / "a"), {}))
    run_world(2, _train, tmp_path / "cut", run, {"stop_at": 2})
    resumed = _weights(run_world(1, _train, tmp_path / "rest", run, {"resume": True, "batch_size": 6}))
    np.testing.assert_allclose(resumed, expected, rtol=1e-9, atol=1e-12)
    assert not [event for event in read_events(Path(run)) if event["event"] == "warning"]


@pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 3, marks=pytest.mark.slow)])
def test_other_ranks_read_what_is_left_once_and_say_so(tmp_path: Path, before: int, after: int) -> None:
    run = tmp_path / "run"
    run_world(before, _train, tmp_path / "cut", str(run), {"stop_at": 2})
    (state,) = [json.loads(path.read_text()) for path in (run / CHECKPOINT_FOLDER).glob("update-*/state.json")]
    assert state["sampler"]["streams"]["num_streams"] == 3 * before
    _weights(run_world(after, _train, tmp_path / "rest", str(run), {"resume": True}))
    (message,) = [event["message"] for event in read_events(run) if event["event"] == "warning"]
    assert f"cut into {3 * after} streams, not {3 * before}; each starts from its initial state" in message
    words = make_text(num_train=20).part("train").num_steps - 1
    for epoch in range(2):
        assert sum(event["steps_real"] for event in _updates(run) if event["epoch"] == epoch) == words
