"""Several ranks that choose their batch together: the same choice on all of them, from the noise between them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import rank0_log, run_world

from small_data import labelled, make_task
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.large_batch import ThroughputTable
from stretto.training import Trainer, batch_policy, read_events

SEQUENCES = 800
EPOCHS = 6


def _data() -> SequenceSet:
    rng = np.random.default_rng(5)
    count = SEQUENCES + 20
    features_SF = rng.normal(size=(3 * count, 2)).astype(np.float32)
    sums_N = features_SF[:, 0].reshape(count, 3).sum(axis=1)
    labels_N = ((sums_N > 0) ^ (rng.random(count) < 0.3)).astype(np.int64)
    return labelled(features_SF, np.full(count, 3), labels_N, parts=(SEQUENCES, 10, 10))


def _train(world: World, run: str, settings: dict[str, Any], each: float = 0.0) -> list[Any]:
    def table(run_step: Any, *, batch_sizes: list[int], **_: Any) -> ThroughputTable:
        return ThroughputTable.of({size: 0.01 + each * size for size in batch_sizes})

    batch_policy.probe = table  # type: ignore[assignment]
    values = {
        "epochs": EPOCHS,
        "hidden_size": 4,
        "dropout": 0.0,
        "optimizer": "sgd",
        "schedule": "constant",
        "learning_rate": 0.05,
        "backend": "torch",
        **settings,
    }
    trainer = Trainer(
        make_task("classify", _data(), **values), run=Path(run), log=rank0_log(world, run), resume=False, world=world
    )
    trainer.run()
    total = sum(float(parameter.detach().double().sum()) for parameter in trainer.state.model.parameters())
    return [total, trainer.feed.batch_size, trainer.state.batch_size]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_grow_together(tmp_path: Path, size: int) -> None:
    settings = {"batch_size": "auto", "base_batch_size": 4}
    found = run_world(size, _train, tmp_path / "world", str(tmp_path / "run"), settings)
    assert all(answer == found[0] for answer in found), found
    events = read_events(tmp_path / "run")
    decisions = [event for event in events if event["event"] == "batch"]
    grown = [event for event in decisions if event["action"] == "grow"]
    assert grown
    assert all(event["noise_scale"] > 0 for event in grown)
    assert found[0][2] == size * found[0][1] == decisions[-1]["batch_size"]
    updates = [event for event in events if event["event"] == "update"]
    for event, until in zip(decisions, [*(event["update"] for event in decisions[1:]), math.inf], strict=True):
        assert max(e["rows"] for e in updates if event["update"] < e["update"] <= until) == event["batch_size"]
    for epoch in range(EPOCHS):
        assert sum(e["rows"] for e in updates if e["epoch"] == epoch) == SEQUENCES


@pytest.mark.slow
def test_the_noise_between_ranks_is_that_of_one(tmp_path: Path) -> None:
    """After some epochs at a rate of next to nothing, all that differs is how updates were taken apart."""
    settings = {"batch_size": "auto", "epochs": 12, "learning_rate": 1e-12, "rule": "none"}
    scales = []
    for size, base in ((1, 16), (2, 16)):
        run = tmp_path / str(size)
        own = {**settings, "base_batch_size": base // size}
        # Time in proportion to the batch: it stays.
        run_world(size, _train, tmp_path / f"world-{size}", str(run), own, 1.0)
        scales.append([event["noise_scale"] for event in read_events(run) if event["event"] == "batch"][-1])
    one, two = scales
    assert one == pytest.approx(two, rel=0.5)
