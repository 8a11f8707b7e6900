"""All that training carries from one step to the next, and its way into a checkpoint and back."""

import dataclasses
import warnings
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR, LRScheduler, OneCycleLR

from stretto.training.checkpoint import Checkpoint
from stretto.training.config import TrainConfig

WARM_UP_SHARE: Final = 0.15
WARM_UP_STEPS: Final = 100


@dataclasses.dataclass(slots=True)
class EpochTotals:
    """Sums over the epoch under way."""

    loss: float = 0.0
    count: int = 0
    steps_real: int = 0
    slots: int = 0
    seconds: float = 0.0


@final
class TrainState:
    """Model, optimiser, schedule, position and random state of a run.

    Args:
        model: The model, on its device.
        config: Rates and lengths of the run.
        steps_per_epoch: Updates of one epoch.
    """

    def __init__(self, model: nn.Module, *, config: TrainConfig, steps_per_epoch: int) -> None:
        self.model = model
        self.optimizer = AdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        self.schedule = _schedule(self.optimizer, config=config, total_steps=config.epochs * steps_per_epoch)
        self.step = 0
        self.epoch = 0
        self.used = 0
        self.seconds = 0.0
        self.train_seconds = 0.0
        self.slots = 0
        self.steps_real = 0
        self.totals = EpochTotals()

    def reschedule(self, config: TrainConfig, *, done: int, remaining: int) -> None:
        """Go on with a schedule of `remaining` updates after `done` of them."""
        for group in self.optimizer.param_groups:
            group.pop("initial_lr", None)
            group["lr"] = config.learning_rate
        with warnings.catch_warnings():
            # torch warns when a schedule moves before the optimiser does; it did move, under another schedule.
            warnings.simplefilter("ignore", UserWarning)
            self.schedule = _schedule(self.optimizer, config=config, total_steps=done + remaining)
            for _ in range(done):
                self.schedule.step()

    def to_checkpoint(self, *, sampler: dict[str, Any], data_digest: str, world_size: int = 1) -> Checkpoint:
        """Everything that the next step depends on."""
        optimizer = self.optimizer.state_dict()
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for number, entries in optimizer["state"].items():
            tensors |= {f"optimizer.{number}.{name}": torch.as_tensor(value) for name, value in entries.items()}
        tensors["random.cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        return Checkpoint(
            tensors=tensors,
            state={
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
        """Continue from a checkpoint: the next step is the one that would have followed."""
        by_part: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}, "random": {}}
        for name, tensor in checkpoint.tensors.items():
            part, _, rest = name.partition(".")
            by_part[part][rest] = tensor
        self.model.load_state_dict(by_part["model"])
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in by_part["optimizer"].items():
            number, _, entry = name.partition(".")
            state.setdefault(int(number), {})[entry] = tensor
        groups = [{**group, "betas": tuple(group["betas"])} for group in checkpoint.state["groups"]]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.schedule.load_state_dict(checkpoint.state["schedule"])
        for name, value in checkpoint.state["position"].items():
            setattr(self, name, value)
        self.totals = EpochTotals(**checkpoint.state["totals"])
        torch.set_rng_state(by_part["random"]["cpu"])
        if "cuda" in by_part["random"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(by_part["random"]["cuda"])


def _schedule(optimizer: AdamW, *, config: TrainConfig, total_steps: int) -> LRScheduler:
    if config.schedule == "constant":
        return LinearLR(optimizer, start_factor=0.1, total_iters=WARM_UP_STEPS)
    return OneCycleLR(optimizer, max_lr=config.learning_rate, total_steps=total_steps + 1, pct_start=WARM_UP_SHARE)


POSITION: Final = ("step", "epoch", "used", "seconds", "train_seconds", "slots", "steps_real")
