"""All that training carries from one update to the next, and its way into a checkpoint and back."""

import dataclasses
from collections import defaultdict
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from stretto.large_batch import LargeBatch, make_optimizer
from stretto.training.checkpoint import Checkpoint
from stretto.training.config import TrainConfig

ADAMW_DECAY: Final = 0.01
POSITION: Final = tuple(
    "num_updates epoch batches_done seconds train_seconds padded_steps steps_real padded_steps_ratio".split()
)


@dataclasses.dataclass(slots=True)
class EpochTotals:
    """Sums over the current epoch."""

    loss: float = 0.0
    count: int = 0
    steps_real: int = 0
    padded_steps: int = 0
    seconds: float = 0.0
    num_norms: int = 0
    """Updates whose gradient had a norm, neither NaN nor inf."""
    num_clipped: int = 0

    @property
    def clipped(self) -> float:
        """The share of updates whose gradient was clipped."""
        return self.num_clipped / max(1, self.num_norms)


@final
class TrainState:
    """Model, optimiser, schedule, position and random state of a run; the trainer alone changes its numbers.

    Args:
        model: The model, on its device.
        config: Rates and lengths of the run.
        updates_per_epoch: Updates of one epoch.
        batch_size: Sequences of an update, over all ranks and accumulated batches; left out, what the settings say for
            one rank.
        first_epoch: Epochs that were trained with other settings before: schedule and warm-up are of those that follow.

    Attributes:
        recipe: The rate and the warm-up that follow from the batch in force.
        num_updates: Updates made, those included that were rolled back.
        epoch: Epochs done.
        batches_done: Batches of one rank done in the feed's current plan.
        seconds: Wall clock so far, of which `train_seconds` in updates.
        padded_steps_ratio: How many times more padded steps shuffled batches would have had.

    Raises:
        StrettoError: Settings of rates contradict each other.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        config: TrainConfig,
        updates_per_epoch: float,
        batch_size: int | None = None,
        first_epoch: int = 0,
    ) -> None:
        self.model = model
        self._config, self._epochs = config, config.epochs - first_epoch
        self.batch_size = config.first_batch_size * config.accumulate if batch_size is None else batch_size
        self.recipe = self._scale_recipe()
        is_adamw = config.optimizer == "adamw"
        weight_decay = config.weight_decay
        if weight_decay is None:
            weight_decay = ADAMW_DECAY if is_adamw else 0.0
        self.optimizer = make_optimizer(
            config.optimizer,
            model,
            lr=self.recipe.lr,
            weight_decay=weight_decay,
            decay_biases=is_adamw,
            gates=config.gates,
            adam_share=config.adam_share,
        )
        self.schedule = self._make_schedule(self._epochs * updates_per_epoch)
        self.num_updates = 0
        self.epoch = first_epoch
        self.batches_done = 0
        self.seconds = 0.0
        self.train_seconds = 0.0
        self.padded_steps = 0
        self.steps_real = 0
        self.padded_steps_ratio = 1.0
        self.totals = EpochTotals()
        self.clip_norm = config.clip_norm

    @property
    def accumulate(self) -> int:
        """Batches of one rank per update, as the settings say."""
        return self._config.accumulate

    def reschedule(self, *, done: int, remaining: int, batch_size: int) -> None:
        """Continue with another batch, after so many updates counted at that batch; the optimiser keeps its moments."""
        self.batch_size = batch_size
        self.recipe = self._scale_recipe()
        self.schedule = self._make_schedule(done + remaining, done=done)

    def hold_rate(self) -> None:
        """Keep the learning rate as it is from here on: for epochs after the last that the schedule was made for."""
        self.schedule = ConstantLR(self.optimizer, factor=1.0)

    def _scale_recipe(self) -> LargeBatch:
        """The peak rate and the warm-up for the batch in force.

        The settings belong to the base batch, or to the first one if the batch is to be found, or else to any batch.
        """
        config = self._config
        base = config.base_batch_size or (config.first_batch_size if config.batch_size == "auto" else self.batch_size)
        return LargeBatch(
            base_batch_size=base,
            base_lr=config.learning_rate,
            base_warmup_epochs=config.warmup_epochs or 0.0,
            batch_size=self.batch_size,
            rule=config.rule,
            warmup_cap=config.warmup_cap,
            epochs=self._epochs,
            base_epochs=config.base_epochs,
        )

    def _make_schedule(self, total_updates: float, *, done: int = 0) -> LRScheduler:
        config = self._config
        return self.recipe.schedule(
            self.optimizer,
            decay=config.schedule,
            updates=total_updates,
            updates_epochs=self._epochs,
            done=done,
            default_warmup=config.warmup_epochs is None,
            decay_factor=config.decay_factor,
            flat_epochs=config.flat_epochs,
        )

    def to_checkpoint(self, *, sampler: dict[str, Any], data_digest: str, world_size: int = 1) -> Checkpoint:
        """Everything that the next update depends on."""
        optimizer = self.optimizer.state_dict()
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, entries in optimizer["state"].items():
            for name, value in entries.items():
                if value is not None:
                    tensor = torch.as_tensor(value)
                    # Scalars of an optimiser may be views of one tensor, which safetensors cannot store.
                    tensors[f"optimizer.{number}.{name}"] = tensor.clone() if tensor.dim() == 0 else tensor
        tensors["random.cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        return Checkpoint(
            tensors=tensors,
            state={
                "batch_size": self.batch_size,
                "clip_norm": self.clip_norm,
                "position": {name: getattr(self, name) for name in POSITION},
                "totals": dataclasses.asdict(self.totals),
                "groups": optimizer["param_groups"],
                "schedule": self.schedule.state_dict(),
                "sampler": sampler,
                "data_digest": data_digest,
                "world_size": world_size,
            },
        )

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint: the next update is the one that would have followed."""
        by_part: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in checkpoint.tensors.items():
            part, _, rest = name.partition(".")
            by_part[part][rest] = tensor
        self.model.load_state_dict(by_part["model"])
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in by_part["optimizer"].items():
            number, _, entry = name.partition(".")
            state.setdefault(int(number), {})[entry] = tensor
        own_groups = self.optimizer.param_groups
        groups = [_restore_types(saved, own) for saved, own in zip(checkpoint.state["groups"], own_groups, strict=True)]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.schedule.load_state_dict(checkpoint.state["schedule"])
        self.batch_size = checkpoint.state["batch_size"]
        self.recipe = self._scale_recipe()
        self.clip_norm = checkpoint.state["clip_norm"]
        position = checkpoint.state["position"]
        if set(position) != set(POSITION) or min(position.values()) < 0:
            raise ValueError(f"the position is {position}")
        for name, value in position.items():
            setattr(self, name, value)
        self.totals = EpochTotals(**checkpoint.state["totals"])
        torch.set_rng_state(by_part["random"]["cpu"])
        if "cuda" in by_part["random"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(by_part["random"]["cuda"])


def _restore_types(saved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The options of a group with tuples where the optimiser has them; JSON made them lists."""
    return {key: tuple(value) if isinstance(own.get(key), tuple) else value for key, value in saved.items()}
