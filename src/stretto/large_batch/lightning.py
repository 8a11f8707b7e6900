"""A callback for Lightning: a `BatchTuner` chooses the batch while a `Trainer` fits. Importing this imports Lightning.

Lightning asks the loader for its length when an epoch begins, and holds it to that until the epoch ends. So the batch
changes from epoch to epoch:

    epoch: two halves per update -> norms of both -> tuner.observe      ...      end: tuner.decide -> sampler, schedule
"""

import copy
import math
from typing import Any, final

import lightning
import torch
from torch import nn

from stretto.batching import BucketSampler
from stretto.checks import check_kind
from stretto.errors import StrettoError
from stretto.large_batch.noise import SplitByMicroBatch, squared_norm
from stretto.large_batch.schedules import ScheduleName
from stretto.large_batch.tuner import BatchTuner

HALVES = 2
"""Of each update: how they differ says how noisy gradients are."""


@final
class TuneBatch(lightning.Callback):  # type: ignore[misc]  # Lightning is not looked into
    """Lets a tuner choose the batch of each epoch, of one process.

    The trainer needs `reload_dataloaders_every_n_epochs=1`. Every update is made of two batches of the sampler, so the
    sampler begins with half of the first batch, and the loss is divided by `sampler.batch_size`, so that both halves
    weigh the same. Rate and warm-up follow the batch as the tuner's settings say. After a loss of NaN, or one that has
    exploded, the weights and the optimiser from before the larger batch come back at once.

    Args:
        tuner: Chooses.
        sampler: Of the loader that is trained on.
        decay: Of the schedule that `configure_optimizers` gave.

    Raises:
        StrettoError: An argument is of another kind; later, the trainer cannot be followed.
    """

    def __init__(self, tuner: BatchTuner, sampler: BucketSampler, *, decay: ScheduleName = "constant") -> None:
        check_kind(tuner, BatchTuner, name="tuner", owner="TuneBatch", fix="Give a stretto.BatchTuner.")
        check_kind(sampler, BucketSampler, name="sampler", owner="TuneBatch", fix="Give the loader's BucketSampler.")
        self.tuner, self.sampler, self.decay = tuner, sampler, decay
        self._loss, self._num_rows = 0.0, 0
        self._measured: dict[str, Any] | None = None
        self._before_growth: tuple[dict[str, Any], dict[str, Any]] | None = None

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Refuse what cannot be followed, and begin to measure."""
        if trainer.world_size > 1:
            raise StrettoError(
                f"TuneBatch was given to a trainer of {trainer.world_size} processes",
                fix="Train in one process, or use `stretto train --batch-size auto`, which chooses for all ranks.",
            )
        if trainer.reload_dataloaders_every_n_epochs != 1:
            raise StrettoError(
                f"TuneBatch found reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}, with "
                "which Lightning keeps the length of the first epoch",
                fix="Make the trainer with reload_dataloaders_every_n_epochs=1.",
            )
        counts = len(trainer.optimizers), len(trainer.lr_scheduler_configs)
        if counts != (1, 1):
            raise StrettoError(
                f"TuneBatch found {counts[0]} optimisers and {counts[1]} schedules",
                fix="Let configure_optimizers return one of each, as LargeBatch.build makes them.",
            )
        trainer.accumulate_grad_batches = HALVES * self.tuner.accumulate
        self._split = SplitByMicroBatch(pl_module.parameters(), optimizer=trainer.optimizers[0])

    def on_train_batch_start(self, _trainer: Any, _module: Any, batch: Any, _index: int) -> None:
        """Note how many sequences there are."""
        self._num_rows = len(batch)

    def on_before_backward(self, _trainer: Any, _module: Any, loss: torch.Tensor) -> None:
        """Note the loss."""
        self._loss += loss.item()

    def on_after_backward(self, _trainer: Any, _module: Any) -> None:
        """Note the gradient of one half."""
        self._split.add(self._num_rows)

    def on_before_optimizer_step(self, _trainer: Any, pl_module: nn.Module, _optimizer: Any) -> None:
        """Measure an update, before Lightning clips it."""
        norm = math.sqrt(squared_norm(pl_module.parameters()))
        self._measured = {"loss": self._loss, "gradient_norm": norm, "norms": self._split.take()}
        self._loss = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *_: Any) -> None:
        """Tell the tuner of an update, and turn back if it went wrong."""
        if self._measured and (trouble := self.tuner.observe(**self._measured)):
            self.tuner.roll_back(trouble)
            if self._before_growth is not None:
                weights, optimizer = copy.deepcopy(self._before_growth)
                pl_module.load_state_dict(weights)
                trainer.optimizers[0].load_state_dict(optimizer)
        self._measured = None

    def on_train_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Choose the batch of the next epoch, and let sampler and schedule follow."""
        (optimizer,), (config,) = trainer.optimizers, trainer.lr_scheduler_configs
        epochs = trainer.current_epoch + 1
        if self.tuner.decide(epoch=epochs).action == "grow":
            self._before_growth = copy.deepcopy((pl_module.state_dict(), optimizer.state_dict()))
        parts = trainer.accumulate_grad_batches = HALVES * self.tuner.accumulate
        self.sampler.resize(-(-self.tuner.batch_size // parts))
        updates = -(-self.sampler.batches_per_epoch // parts)
        config.scheduler = self.tuner.settings.schedule(
            optimizer, decay=self.decay, updates=updates, done=round(updates * epochs)
        )

    def state_dict(self) -> dict[str, Any]:
        """What Lightning keeps in its checkpoints."""
        return {"tuner": self.tuner.state_dict(), "before_growth": self._before_growth}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.tuner.load_state_dict(state_dict["tuner"])
        self._before_growth = state_dict["before_growth"]
        self.sampler.resize(-(-self.tuner.batch_size // (HALVES * self.tuner.accumulate)))
