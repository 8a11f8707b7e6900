"""A solver on several ranks: its record covers all of them, and boundaries are carried by one alone."""

from pathlib import Path
from typing import Any

import numpy as np
from worlds import run_world

from stretto.data import SequenceSet, StepLabels
from stretto.distributed import World
from stretto.tasks.label_steps import LabelSteps, LabelStepsConfig
from stretto.training import SilentLog, Trainer, validate


def _epoch(world: World, run: str, way: dict[str, Any]) -> Any:
    rng, lengths_N = np.random.default_rng(0), np.full(9, 40)
    offsets = np.cumsum([0, *lengths_N])
    data = SequenceSet.from_flat(
        rng.normal(size=(offsets[-1], 2)).astype(np.float32),
        offsets=offsets,
        targets=StepLabels.check(rng.integers(1, 3, offsets[-1]), offsets=offsets, names=None, source=""),
        split_N=np.repeat([0, 1, 2], [5, 2, 2]),
    )
    values = {
        "epochs": 2,
        "batch_size": 1,
        "hidden_size": 3,
        "dropout": 0.0,
        "learning_rate": 1e-30,
        "weight_decay": 0.0,
        **way,
    }
    task = LabelSteps(validate(LabelStepsConfig, values, source="the test"), data)
    record = Trainer(task, run=Path(run), log=SilentLog(), resume=False, world=world).train_epoch()
    told = record.solving
    return None if told is None else [told.batches, told.residual_mean, told.residual_max, record.train_loss]


def test_the_record_covers_all_ranks(tmp_path: Path) -> None:
    """Weights stay as they are, so that two workers meet what one meets; one of three steps has an empty share."""
    way = {"solver": "shooting", "chunks": 2, "tolerance": 1e-3}
    (alone,) = run_world(1, _epoch, tmp_path / "one", str(tmp_path / "a"), way)
    both = run_world(2, _epoch, tmp_path / "two", str(tmp_path / "b"), way)
    assert both[0] == both[1]
    assert alone[0] == both[0][0] == 5
    np.testing.assert_allclose(both[0][3], alone[3], rtol=1e-6)
    assert both[0][1] <= both[0][2] <= 1e-3


def test_carried_boundaries_are_refused_on_every_rank(tmp_path: Path) -> None:
    said = run_world(2, _epoch, tmp_path / "world", str(tmp_path / "run"), {"solver": "warm_start", "chunks": 2})
    assert len(set(said)) == 1
    assert said[0].startswith("StrettoError: the solver is 'warm_start' and there are 2 ranks")
