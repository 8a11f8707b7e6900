"""The optimiser and the schedule that the settings of a run ask for."""

from typing import Final

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, OneCycleLR

from stretto.errors import StrettoError
from stretto.large_batch import LargeBatch, make_optimizer, named_decay
from stretto.training.config import TrainConfig

WARM_UP_SHARE: Final = 0.15
WARM_UP_STEPS: Final = 100
ADAMW_DECAY: Final = 0.01


def made_recipe(config: TrainConfig, *, batch_size: int) -> LargeBatch:
    """The peak rate and the warm-up for the batch in force.

    Args:
        config: The settings; rates belong to its base batch, or to the first one if the batch is to be found, or else
            to any batch.
        batch_size: Sequences of an update, over all workers and accumulated steps.
    """
    base = config.base_batch_size or (config.rows if config.batch_size == "auto" else batch_size)
    return LargeBatch(
        base_batch_size=base,
        base_lr=config.learning_rate,
        base_warmup_epochs=config.warmup_epochs or 0.0,
        batch_size=batch_size,
        rule=config.rule,
        warmup_cap=config.warmup_cap,
        epochs=config.epochs,
    )


def made_optimizer(model: nn.Module, config: TrainConfig, *, lr: float) -> Optimizer:
    """The optimiser of a run."""
    if config.optimizer == "adamw" and not config.gates:
        decay = ADAMW_DECAY if config.weight_decay is None else config.weight_decay
        return AdamW(model.parameters(), lr=lr, weight_decay=decay, fused=True)
    return make_optimizer(config.optimizer, model, lr=lr, weight_decay=config.weight_decay or 0.0, gates=config.gates)


def made_schedule(optimizer: Optimizer, config: TrainConfig, *, recipe: LargeBatch, total_steps: int) -> LRScheduler:
    """The schedule of a run, stepped once an update.

    Args:
        optimizer: At the peak rate.
        config: The settings.
        recipe: The peak rate and the warm-up.
        total_steps: Updates of all epochs.

    Raises:
        StrettoError: There is a setting that the schedule has no use for.
    """
    if config.schedule == "one-cycle":
        for name in ("decay_factor", "flat_epochs"):
            if getattr(config, name) is not None:
                raise StrettoError(
                    f"{name}={getattr(config, name)} was given and the schedule is 'one-cycle'",
                    fix=f"Leave --{name.replace('_', '-')} out, or choose --schedule step or ptb.",
                )
        share = WARM_UP_SHARE if config.warmup_epochs is None else recipe.warmup_epochs / config.epochs
        return OneCycleLR(
            optimizer,
            max_lr=recipe.lr,
            total_steps=total_steps + 1,
            pct_start=share,
            # It would give plain SGD a momentum.
            cycle_momentum=config.optimizer != "sgd",
        )
    decay = named_decay(
        config.schedule, epochs=config.epochs, factor=config.decay_factor, flat_epochs=config.flat_epochs
    )
    if config.schedule == "constant" and config.warmup_epochs is None:
        return LinearLR(optimizer, start_factor=0.1, total_iters=WARM_UP_STEPS)
    return recipe.schedule(optimizer, decay=decay, updates=total_steps, updates_epochs=config.epochs)
