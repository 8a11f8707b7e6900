"""Every task on a few made sequences, two buckets of them, one with fewer sequences than some worlds have ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from small_data import make_task, task_data
from stretto.batching import Batch
from stretto.data import SequenceSet
from stretto.training import AbstractTask, LossSum


def _data(name: str) -> SequenceSet:
    rng = np.random.default_rng(3)
    lengths_N = np.where(np.arange(17) % 5 == 0, rng.integers(8, 13, 17), rng.integers(3, 6, 17))
    return task_data(name, lengths_N, rng, parts=(11, 3, 3))


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
    return make_task(name, _data(name), **values)


def spoil_loss(task: AbstractTask[Any], is_bad: Callable[[list[int]], bool]) -> None:
    """Make the loss NaN for batches with certain sequences."""
    honest = task.loss

    def loss(output: torch.Tensor, batch: Batch) -> LossSum:
        found = honest(output, batch)
        assert batch.indices is not None
        return LossSum(total=found.total * (torch.nan if is_bad(batch.indices.tolist()) else 1.0), count=found.count)

    task.loss = loss  # type: ignore[method-assign]
