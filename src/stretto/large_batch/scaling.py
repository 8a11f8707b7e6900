"""Large batches without re-tuning: from the settings of a small batch to those of a larger one."""

import dataclasses
import math
import numbers
from collections.abc import Iterable
from typing import Literal, NamedTuple, final, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from stretto.errors import StrettoError
from stretto.large_batch.decay import AbstractDecay, Constant, named_decay
from stretto.large_batch.optimizers import OptimizerName, make_optimizer
from stretto.large_batch.rate_curve import RateCurve

Rule = Literal["legw", "sqrt", "linear", "none"]


class Built(NamedTuple):
    """An optimiser, and its schedule, which is stepped once after each update."""

    optimizer: Optimizer
    schedule: LRScheduler


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LargeBatch:
    """The settings for a large batch that follow from those tuned for a small one, k times smaller.

    The rule is LEGW (You et al. 2019): the learning rate grows by sqrt(k), and the warm-up by k in epochs, which keeps
    its updates as many as they were. The number of epochs and the decay, counted in epochs, stay.

    | rule | rate | warm-up in epochs |
    |---|---|---|
    | legw | sqrt(k) | k |
    | sqrt | sqrt(k) | unchanged |
    | linear | k | unchanged |
    | none | unchanged | unchanged |

    A gradient of B sequences has the mean square norm |G|^2 (1 + phi / B) with the noise scale phi, so a clipping
    threshold bites less often in larger batches, and more of the rate comes through. `clip_norm` stays as it is by
    default: right for a threshold that is there for the rare explosion. With `clip="scaled"` it follows the expected
    norm, by sqrt((1 + phi / B) / (1 + phi / B0)), and bites about as often as at the base batch: right for a threshold
    that bites all the time and thereby sets the length of most steps.

    Attributes:
        base_batch_size: The batch that the other base settings were tuned for, in sequences over all workers.
        base_lr: Its peak learning rate.
        base_warmup_epochs: Its warm-up.
        batch_size: The batch to train with.
        rule: How to scale.
        warmup_cap: The largest share of all updates that may be spent on warming up; it needs `epochs`. None, as
            published, sets no bound: with k = 64, a warm-up of 0.1 epochs becomes 6.4.
        epochs: Epochs of the whole run, where known.
        base_clip_norm: The largest norm of a gradient at the base batch.
        clip: Whether that stays "unchanged" or is "scaled", which needs `noise_scale`.
        noise_scale: phi, in sequences; see `stretto.large_batch.noise`.

    Raises:
        StrettoError: A number is out of range, the batch is smaller than its base, or warm-up would fill the run.

    Example:
        >>> recipe = LargeBatch(base_batch_size=20, base_lr=1.0, base_warmup_epochs=0.2, batch_size=320)
        >>> recipe.scale, recipe.lr, recipe.warmup_epochs
        (16.0, 4.0, 3.2)
        >>> model = torch.nn.LSTM(8, 16)
        >>> optimizer, schedule = recipe.build(model.parameters(), optimizer="sgd", decay="ptb", steps_per_epoch=145)
    """

    base_batch_size: int
    base_lr: float
    base_warmup_epochs: float = 0.0
    batch_size: int
    rule: Rule = "legw"
    warmup_cap: float | None = None
    epochs: float | None = None
    base_clip_norm: float | None = None
    clip: Literal["unchanged", "scaled"] = "unchanged"
    noise_scale: float | None = None

    def __post_init__(self) -> None:
        self._refuse_out_of_range()
        if self.rule != "none" and self.batch_size < self.base_batch_size:
            raise StrettoError(
                f"batch_size={self.batch_size} is smaller than base_batch_size={self.base_batch_size}, and the rule "
                f"{self.rule!r} is for larger ones",
                fix="Give the smaller one as base, with the settings tuned for it, or choose the rule 'none'.",
            )
        if self.warmup_cap is not None and self.epochs is None:
            raise StrettoError(
                f"warmup_cap={self.warmup_cap} was given without epochs, of which it is a share",
                fix="Give epochs=..., the length of the whole run.",
            )
        if self.clip == "scaled" and (self.base_clip_norm is None or self.noise_scale is None):
            raise StrettoError(
                f"clip='scaled' was given with base_clip_norm={self.base_clip_norm} and noise_scale={self.noise_scale}",
                fix="Give both, or leave clip out.",
            )
        if self.epochs is not None:
            self._refuse_endless_warmup(self.epochs)

    @property
    def scale(self) -> float:
        """How many times larger than its base the batch is."""
        return self.batch_size / self.base_batch_size

    @property
    def lr(self) -> float:
        """The peak learning rate."""
        if self.rule == "none":
            return self.base_lr
        return self.base_lr * (self.scale if self.rule == "linear" else math.sqrt(self.scale))

    @property
    def warmup_epochs(self) -> float:
        """Epochs until the peak."""
        longest = math.inf if self.warmup_cap is None or self.epochs is None else self.warmup_cap * self.epochs
        return min(self.base_warmup_epochs * (self.scale if self.rule == "legw" else 1.0), longest)

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of a gradient; None if the base has none."""
        if self.clip == "unchanged" or self.noise_scale is None:
            return self.base_clip_norm
        return self.scaled_clip(self.noise_scale)

    def scaled_clip(self, noise_scale: float) -> float:
        """The threshold that bites at this batch about as often as `base_clip_norm` at the base batch.

        It is as large a multiple of the expected norm, the root of |G|^2 (1 + phi / B): unchanged without noise, and
        smaller by sqrt(k) where noise is all there is.

        Args:
            noise_scale: phi, in sequences.

        Raises:
            StrettoError: phi is no number from 0 on, or there is no `base_clip_norm`.
        """
        if self.base_clip_norm is None:
            raise StrettoError("there is no base_clip_norm to scale", fix="Give LargeBatch(base_clip_norm=...).")
        _refuse_unless(0 <= noise_scale < math.inf, "noise_scale", noise_scale, fix="Give a number from 0 on.")
        here, base = (1.0 + noise_scale / size for size in (self.batch_size, self.base_batch_size))
        return self.base_clip_norm * math.sqrt(here / base)

    def warmup_updates(self, *, steps_per_epoch: float) -> int:
        """Updates until the peak, where an epoch has `steps_per_epoch`."""
        updates = round(self.warmup_epochs * steps_per_epoch)
        if self.warmup_cap is None or self.epochs is None:
            return updates
        # Rounded down where the cap holds, for it is a bound; but not below a whole number by an error of rounding.
        return min(updates, math.floor(self.warmup_cap * self.epochs * steps_per_epoch * (1 + 1e-12)))

    def build(
        self,
        parameters: nn.Module | Iterable[torch.Tensor],
        *,
        optimizer: OptimizerName = "sgd",
        decay: AbstractDecay | str | None = None,
        steps_per_epoch: int,
        epochs: float | None = None,
        weight_decay: float = 0.0,
        gates: bool = False,
    ) -> Built:
        """An optimiser at the scaled rate and its schedule: step both once an update.

        Args:
            parameters: The model, or its parameters.
            optimizer: "sgd", "momentum", "nesterov", "adam", "adamw", "lars" or "lamb": `make_optimizer` in
                `stretto.large_batch.optimizers` says what to know of each.
            decay: A decay of `stretto.large_batch.decay` or the name of one; the rate stays at its peak by default.
            steps_per_epoch: Updates of an epoch at this batch size.
            epochs: Epochs of the whole run, if the recipe does not have them; "poly", "step" and "cosine" need them.
            weight_decay: Of matrices; biases and gains have none.
            gates: For "lars" and "lamb", with the model given: a trust ratio for each gate of a recurrent layer.

        Raises:
            StrettoError: Settings are missing or contradict each other, or warm-up would fill the run.
        """
        _refuse_unless(
            0 < steps_per_epoch < math.inf, "steps_per_epoch", steps_per_epoch, fix="Give the updates of an epoch."
        )
        if epochs is not None and self.epochs not in (None, epochs):
            raise StrettoError(
                f"build was given epochs={epochs} and the recipe has epochs={self.epochs}", fix="Give one of the two."
            )
        whole = self if epochs is None else dataclasses.replace(self, epochs=epochs)
        falling = named_decay(decay, epochs=whole.epochs) if isinstance(decay, str) else decay or Constant()
        if not isinstance(falling, AbstractDecay):
            raise StrettoError(
                f"the decay is {decay!r}", fix="Give the name of one, or one of those in stretto.large_batch.decay."
            )
        made = make_optimizer(optimizer, parameters, lr=self.lr, weight_decay=weight_decay, gates=gates)
        return Built(made, whole.schedule(made, decay=falling, updates=steps_per_epoch))

    def schedule(
        self, optimizer: Optimizer, *, decay: AbstractDecay, updates: float, updates_epochs: float = 1
    ) -> LRScheduler:
        """The schedule for an optimiser whose rate is `lr`: the warm-up, then the decay.

        Its state is JSON-ready, and every rate follows from the number of the update alone.

        Args:
            optimizer: What to schedule.
            decay: How the rate falls.
            updates: Updates in `updates_epochs` epochs.
            updates_epochs: One, unless only the updates of several together are known.

        Raises:
            StrettoError: The decay needs the number of epochs and the recipe has none.
        """
        if decay.needs_epochs and self.epochs is None:
            raise StrettoError(
                f"the decay {decay.name!r} needs the number of epochs", fix="Give epochs=... to LargeBatch or build."
            )
        warmup = self.warmup_updates(steps_per_epoch=updates / updates_epochs)
        curve = RateCurve(
            decay, warmup_updates=warmup, updates=updates, updates_epochs=updates_epochs, epochs=self.epochs
        )
        return LambdaLR(optimizer, curve)

    def _refuse_out_of_range(self) -> None:
        if self.rule not in get_args(Rule):
            raise StrettoError(
                f"there is no rule {self.rule!r}", fix=f"Choose one of {', '.join(map(repr, get_args(Rule)))}."
            )
        if self.clip not in ("unchanged", "scaled"):
            raise StrettoError(f"clip is {self.clip!r}", fix="Choose 'unchanged' or 'scaled'.")
        for name in ("base_batch_size", "batch_size"):
            _refuse_unless(
                _is_count(getattr(self, name)), name, getattr(self, name), fix="Give a whole number from 1 on."
            )
        for name in ("base_lr", "epochs", "base_clip_norm"):
            value = getattr(self, name)
            is_left_out = value is None and name != "base_lr"
            _refuse_unless(is_left_out or 0 < value < math.inf, name, value, fix="Give a number above 0.")
        for name in ("base_warmup_epochs", "noise_scale"):
            value = getattr(self, name)
            is_left_out = value is None and name != "base_warmup_epochs"
            _refuse_unless(is_left_out or 0 <= value < math.inf, name, value, fix="Give a number from 0 on.")
        cap = self.warmup_cap
        _refuse_unless(cap is None or 0 <= cap < 1, "warmup_cap", cap, fix="Give a share from 0 to below 1.")

    def _refuse_endless_warmup(self, epochs: float) -> None:
        if self.warmup_epochs >= epochs:
            raise StrettoError(
                f"the warm-up of {self.warmup_epochs:g} epochs ({self.base_warmup_epochs:g} at a batch of "
                f"{self.base_batch_size}, now {self.batch_size}) fills the run of {epochs:g} epochs",
                fix="Give warmup_cap, the largest share of all updates to spend on it, such as 0.2, "
                "or a smaller batch or warm-up.",
            )


def refuse_larger_than_data(batch_size: int, num_sequences: int) -> None:
    """Refuse a batch that the data cannot fill.

    Args:
        batch_size: Sequences of a batch, over all workers.
        num_sequences: Sequences to train on.

    Raises:
        StrettoError: The batch is larger than the data.
    """
    if batch_size > num_sequences:
        raise StrettoError(
            f"a batch of {batch_size} sequences is larger than the data, which has {num_sequences} to train on",
            fix=f"Give a batch size of at most {num_sequences}.",
        )


def _is_count(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral) and int(value) >= 1


def _refuse_unless(is_right: bool, name: str, value: object, *, fix: str) -> None:
    if not is_right:
        raise StrettoError(f"{name} is {value!r}", fix=fix)
