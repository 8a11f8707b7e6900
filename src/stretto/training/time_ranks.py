"""Time laid over the workers of a run: who has which sequences, and which of their steps."""

import dataclasses
from typing import Any, final

import torch
from torch import nn

from stretto.batching import Batch
from stretto.data import StepLabels
from stretto.distributed import TimeMesh, World
from stretto.errors import StrettoError
from stretto.nn import RNN
from stretto.training.solver_config import SolverConfig
from stretto.training.task import AbstractTask


@final
class TimeRanks:
    """The workers as a grid of sequences x steps; by default each has its own sequences, whole.

    Args:
        task: What is trained, and its settings.
        world: The workers.

    Attributes:
        data: Which share of the sequences this worker has, of how many shares.
        time: Which block of their steps it has, of how many blocks.

    Raises:
        StrettoError: On every worker, if the workers, the task or its settings do not allow it.
    """

    def __init__(self, task: AbstractTask[Any], *, world: World) -> None:
        count = task.config.time_parallel
        world.require_equal("time_parallel", str(count), fix="Start all workers with the same --time-parallel.")
        self.data, self.time = world, World()
        self._mesh: TimeMesh | None = None
        if count == 1:
            return
        _refuse(task, size=world.size)
        self._mesh = TimeMesh(time=count, minutes=task.config.rank_timeout_minutes)
        self.data, self.time = self._mesh.data, self._mesh.time

    def take_over(self, model: nn.Module) -> None:
        """Let the model's recurrent layers walk through time over workers."""
        if self._mesh is not None:
            for layer in model.modules():
                if isinstance(layer, RNN):
                    layer.solver = self._mesh.solver()

    def cut(self, batch: Batch) -> Batch:
        """This worker's block of the steps of a batch, which all that share its sequences have whole."""
        if self._mesh is None:
            return batch
        block = self._mesh.block(batch.features_BTF.shape[1], batch.lengths)
        targets = block.of(batch.targets) if isinstance(batch.targets, torch.Tensor) else batch.targets
        return dataclasses.replace(
            batch, features_BTF=block.of(batch.features_BTF), lengths=block.lengths, targets=targets
        )


def _refuse(task: AbstractTask[Any], *, size: int) -> None:
    config, count = task.config, task.config.time_parallel
    if size % count:
        raise StrettoError(
            f"time_parallel={count} does not divide the number of workers, which is {size}",
            fix="Start a multiple of it, with --nproc or torchrun --nproc-per-node.",
        )
    if not isinstance(task.data.targets, StepLabels):
        raise StrettoError(
            f"time_parallel={count} was given and the task {task.name!r} needs whole sequences on one worker",
            fix="Leave --time-parallel out, or train a task with a label for each step: label-steps.",
        )
    if config.backend == "torch":
        raise StrettoError(
            f"time_parallel={count} was given and backend='torch', whose layers walk on one worker alone",
            fix="Leave --backend or --time-parallel out.",
        )
    if isinstance(config, SolverConfig) and config.solver != "serial":
        raise StrettoError(
            f"time_parallel={count} was given and the solver is {config.solver!r}: there is one way through time",
            fix="Leave --solver or --time-parallel out.",
        )
