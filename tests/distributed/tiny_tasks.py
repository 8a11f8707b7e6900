"""Every task on a few made sequences, two buckets of them, one with fewer sequences than some worlds have ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stretto.batching import Batch
from stretto.data import Labels, SequenceSet, Transcripts
from stretto.tasks import TASKS
from stretto.training import AbstractTask, LossSum, validate


def _data(name: str) -> SequenceSet:
    rng = np.random.default_rng(3)
    count = 17
    lengths_N = np.where(np.arange(count) % 5 == 0, rng.integers(8, 13, count), rng.integers(3, 6, count))
    common: dict[str, Any] = {"offsets": np.cumsum([0, *lengths_N]), "split_N": np.repeat([0, 1, 2], [11, 3, 3])}
    if name == "language-model":
        return SequenceSet.from_flat(rng.integers(0, 5, lengths_N.sum()), alphabet="abcde", **common)
    features_SF = rng.normal(size=(lengths_N.sum(), 3)).astype(np.float32)
    if name == "classify":
        labels = Labels.check(np.arange(count) % 3, names=None, source="")
        return SequenceSet.from_flat(features_SF, targets=labels, **common)
    return SequenceSet.from_flat(
        features_SF, targets=Transcripts.of(["ab" if n > 5 else "b" for n in lengths_N]), **common
    )


def tiny_task(name: str, *, accumulate: int) -> AbstractTask[Any]:
    """The task, with a rate that leaves the weights as they are, and gradients that are not clipped."""
    values = {
        "epochs": 1,
        "batch_size": 2,
        "hidden_size": 4,
        "num_buckets": 2,
        "dropout": 0.0,
        "accumulate": accumulate,
        "learning_rate": 1e-30,
        "weight_decay": 0.0,
        "clip_norm": 1e30,
        "backend": "torch",
        **({"stack": 1} if name == "handwriting" else {}),
    }
    return TASKS[name](validate(TASKS[name].Config, values, source="the test"), _data(name))


def spoil_loss(task: AbstractTask[Any], is_bad: Callable[[list[int]], bool]) -> None:
    """Make the loss NaN for batches with certain sequences."""
    honest = task.loss

    def loss(output: torch.Tensor, batch: Batch) -> LossSum:
        found = honest(output, batch)
        assert batch.indices is not None
        return LossSum(total=found.total * (torch.nan if is_bad(batch.indices.tolist()) else 1.0), count=found.count)

    task.loss = loss  # type: ignore[method-assign]
