"""The benchmarks of ranks and of faults: what they read from a run's events, and a whole run of each."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from bench_reports import column, measure

from bench import faults, workers
from bench.harness import bench
from small_data import write_signs
from stretto.errors import StrettoError


def test_speed_and_waiting_are_read_from_the_events() -> None:
    events = [
        {"event": "epoch", "steps_per_second": 10.0},
        {"event": "ranks", "waited": [0.1, 0.3], "seconds": [1.0, 1.0]},
        {"event": "epoch", "steps_per_second": 20.0},
        {"event": "ranks", "waited": [0.2, 0.2], "seconds": [1.0, 1.0]},
    ]
    assert workers.steps_per_second(events) == 15.0
    assert workers.waiting_share(events) == pytest.approx(0.2)


def test_two_ranks_are_measured_beside_one(tmp_path: Path) -> None:
    data = write_signs(tmp_path / "signs.npz", count=60)
    report = measure("workers", "--task", "classify", "--data", str(data), "--batch-size", "4")
    assert column(report.tables, "contender") == list(workers.CONTENDERS)
    assert all(speed > 0 for speed in column(report.tables, "median"))


def test_training_that_fails_is_reported(tmp_path: Path) -> None:
    settings = bench.parse("workers", ["--task", "classify", "--data", str(tmp_path / "nowhere.npz")])
    with pytest.raises(StrettoError, match="training exited with code 2"):
        workers.train(workers.Contender(), settings)


def _events(*epochs: list[int]) -> list[dict[str, Any]]:
    return [{"event": "update", "epoch": number, "sequences": used} for number, used in enumerate(epochs)]


def test_lost_and_repeated_sequences_are_counted() -> None:
    every = list(range(faults.NUM_TRAINED))
    assert faults.Usage.count(_events(every, every)) == faults.Usage(epochs=2, lost=0, repeated=0)
    found = faults.Usage.count(_events(every[2:], [*every, 5]))
    assert found == faults.Usage(epochs=2, lost=2, repeated=1)
    assert not found.is_exact


@pytest.mark.parametrize(
    "change", [{"same_weights": False}, {"exit_code": 1}, {"usage": faults.Usage(epochs=1, lost=1, repeated=0)}]
)
def test_anything_lost_fails_the_benchmark(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    outcome = faults.Outcome(
        faults=("one", "all"),
        resumed=2,
        usage=faults.Usage(epochs=1, lost=0, repeated=0),
        same_weights=True,
        exit_code=0,
    )
    monkeypatch.setattr(faults, "inject_faults", lambda *_, **__: outcome)
    assert not measure("faults").failed
    monkeypatch.setattr(faults, "inject_faults", lambda *_, **__: dataclasses.replace(outcome, **change))
    assert measure("faults").failed
