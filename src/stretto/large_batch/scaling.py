"""Large batches without re-tuning: from the settings of a small batch to those of a larger one."""

import dataclasses
import math
import warnings
from collections.abc import Iterable
from typing import Final, Literal, final, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, OneCycleLR

from stretto.checks import check_choice, check_float, check_int, check_kind
from stretto.errors import StrettoError
from stretto.large_batch.optimizers import OptimizerName, make_optimizer
from stretto.large_batch.schedules import Decay, ScheduleName, WarmupThenDecay, check_schedule

ScalingRule = Literal["legw", "sqrt", "linear", "updates", "none"]
ONE_CYCLE_WARMUP_SHARE: Final = 0.15
"""Share of the run that one-cycle spends on rising, unless a warm-up is given."""
LINEAR_WARMUP_SHARE: Final = 0.1
"""The same for linear."""
BOTH_WAYS: Final = ("updates", "none")
"""Rules that hold for a smaller batch than the base as well."""
CONSTANT_WARMUP_UPDATES: Final = 100
"""Updates from a tenth of the rate to the whole in a constant schedule, unless a warm-up is given."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LargeBatch:
    """The settings for a large batch, derived from those tuned for one k times smaller.

    The rule is LEGW (You et al. 2019): the learning rate grows by sqrt(k), and the warm-up by k in epochs, which keeps
    its updates as many as they were. The number of epochs and the decay, counted in epochs, stay.

    | rule | rate | warm-up in epochs |
    |---|---|---|
    | legw | sqrt(k) | k |
    | sqrt | sqrt(k) | unchanged |
    | linear | k | unchanged |
    | updates | sqrt(k E0 / E) | E / E0 |
    | none | unchanged | unchanged |

    The rule "updates", for Muon, also follows the number of epochs, from the E0 of the base to the E of the run: the
    rate is in proportion to one over the square root of the updates, and the warm-up is the same share of the run. The
    batch may be smaller than its base.

    A gradient of B sequences has the mean square norm |G|^2 (1 + phi / B) with the noise scale phi, so a clipping
    threshold bites less often in larger batches, and more of the rate comes through. `clip_norm` stays as it is by
    default: right for a threshold that is there for the rare explosion. With a `noise_scale` it follows the expected
    norm, by sqrt((1 + phi / B) / (1 + phi / B0)), and bites about as often as at the base batch: right if most updates
    are clipped, so that the threshold sets their size.

    Attributes:
        base_batch_size: The batch that the other base settings were tuned for, in sequences over all ranks.
        base_lr: Its peak learning rate.
        base_warmup_epochs: Its warm-up.
        batch_size: The batch to train with.
        rule: How to scale.
        warmup_cap: The largest share of all updates that may be spent on warming up; it needs `epochs`. None, as
            published, sets no bound: with k = 64, a warm-up of 0.1 epochs becomes 6.4.
        epochs: Epochs of the whole run, where known.
        base_epochs: Epochs that the base settings were tuned for, for the rule "updates"; None for as many as `epochs`.
        base_clip_norm: The largest norm of a gradient at the base batch.
        noise_scale: phi, in sequences, by which `clip_norm` follows the batch; see `NoiseScale`.

    Raises:
        StrettoError: A number is out of range, the batch is smaller than its base, or warm-up would fill the run.

    Examples:
        >>> recipe = LargeBatch(base_batch_size=20, base_lr=1.0, base_warmup_epochs=0.2, batch_size=320)
        >>> recipe.scale, recipe.lr, recipe.warmup_epochs
        (16.0, 4.0, 3.2)
        >>> model = torch.nn.LSTM(8, 16)
        >>> optimizer, schedule = recipe.build(model.parameters(), optimizer="sgd", decay="ptb", updates_per_epoch=145)
    """

    base_batch_size: int
    base_lr: float
    base_warmup_epochs: float = 0.0
    batch_size: int
    rule: ScalingRule = "legw"
    warmup_cap: float | None = None
    epochs: float | None = None
    base_epochs: float | None = None
    base_clip_norm: float | None = None
    noise_scale: float | None = None

    def __post_init__(self) -> None:
        check_choice(self.rule, name="rule", choices=get_args(ScalingRule), owner="LargeBatch")
        for name in ("base_batch_size", "batch_size"):
            check_int(getattr(self, name), name=name, owner="LargeBatch")
        check_float(self.base_lr, name="base_lr", above=0.0, owner="LargeBatch")
        check_float(self.base_warmup_epochs, name="base_warmup_epochs", at_least=0.0, owner="LargeBatch")
        for name in ("epochs", "base_epochs", "base_clip_norm"):
            if getattr(self, name) is not None:
                check_float(getattr(self, name), name=name, above=0.0, owner="LargeBatch")
        if self.noise_scale is not None:
            check_float(self.noise_scale, name="noise_scale", at_least=0.0, owner="LargeBatch")
        if self.warmup_cap is not None:
            check_float(self.warmup_cap, name="warmup_cap", at_least=0.0, below=1.0, owner="LargeBatch")
        self._refuse_contradictions()

    @property
    def scale(self) -> float:
        """How many times larger than its base the batch is."""
        return self.batch_size / self.base_batch_size

    @property
    def lr(self) -> float:
        """The peak learning rate."""
        if self.rule == "none":
            return self.base_lr
        return self.base_lr * (self.scale if self.rule == "linear" else math.sqrt(self.scale / self._longer))

    @property
    def warmup_epochs(self) -> float:
        """Epochs until the peak."""
        longest = math.inf if self.warmup_cap is None or self.epochs is None else self.warmup_cap * self.epochs
        return min(self.base_warmup_epochs * (self.scale if self.rule == "legw" else self._longer), longest)

    @property
    def _longer(self) -> float:
        """How many times more epochs the run has than its base, if the rule follows them."""
        return 1.0 if self.base_epochs is None or self.epochs is None else self.epochs / self.base_epochs

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of a gradient; None if the base has none.

        It is unchanged without noise, and smaller by sqrt(k) where everything is noise.
        """
        if self.base_clip_norm is None or self.noise_scale is None:
            return self.base_clip_norm
        here, base = (1.0 + self.noise_scale / size for size in (self.batch_size, self.base_batch_size))
        return self.base_clip_norm * math.sqrt(here / base)

    def warmup_updates(self, *, updates_per_epoch: float) -> int:
        """Updates until the peak, where an epoch has `updates_per_epoch`."""
        check_float(updates_per_epoch, name="updates_per_epoch", above=0.0)
        updates = round(self.warmup_epochs * updates_per_epoch)
        if self.warmup_cap is None or self.epochs is None:
            return updates
        # Rounded down where the cap holds, for it is a bound; but not below a whole number by an error of rounding.
        return min(updates, math.floor(self.warmup_cap * self.epochs * updates_per_epoch * (1 + 1e-12)))

    def build(
        self,
        parameters: nn.Module | Iterable[torch.Tensor],
        *,
        optimizer: OptimizerName = "sgd",
        decay: ScheduleName | Decay = "constant",
        updates_per_epoch: int,
        epochs: float | None = None,
        weight_decay: float = 0.0,
        gates: bool = False,
        adam_share: float = 1.0,
    ) -> tuple[Optimizer, LRScheduler]:
        """An optimiser at the scaled rate and its schedule: step both once per update.

        Args:
            parameters: The model, or its parameters.
            optimizer: "sgd", "momentum", "nesterov", "adam", "adamw", "lars", "lamb" or "muon", which needs the model;
                see `make_optimizer`.
            decay: "constant", "linear", "poly", "exponential", "step", "cosine", "ptb" or "one-cycle"; or a function of
                your own: the factor of the peak rate after so many epochs.
            updates_per_epoch: Updates per epoch at this batch size.
            epochs: Epochs of the whole run, if not given before; "one-cycle", "linear", "poly", "step" and "cosine"
                need them.
            weight_decay: Of matrices; biases and gains have none.
            gates: For "lars" and "lamb", with the model given: a trust ratio for each gate of a recurrent layer.
            adam_share: For "muon": the rate of what Adam updates, but for embeddings and the output layer, as a
                multiple of the rate; see `Muon`.

        Raises:
            StrettoError: Settings are missing or contradict each other, or warm-up would fill the run.
        """
        check_float(updates_per_epoch, name="updates_per_epoch", above=0.0)
        if epochs is not None and self.epochs not in (None, epochs):
            raise StrettoError(
                f"build got epochs={epochs}, and LargeBatch has epochs={self.epochs}", fix="Give one of the two."
            )
        whole = self if epochs is None else dataclasses.replace(self, epochs=epochs)
        made = make_optimizer(
            optimizer, parameters, lr=self.lr, weight_decay=weight_decay, gates=gates, adam_share=adam_share
        )
        return made, whole.schedule(made, decay=decay, updates=updates_per_epoch)

    def schedule(
        self,
        optimizer: Optimizer,
        *,
        decay: ScheduleName | Decay,
        updates: float,
        updates_epochs: float = 1,
        done: int = 0,
        default_warmup: bool = False,
        decay_factor: float | None = None,
        flat_epochs: int | None = None,
    ) -> LRScheduler:
        """The learning rate of every update, as a torch scheduler: the warm-up, then the decay.

        Its state is JSON-ready, and every rate follows from the number of the update alone. An optimiser that had a
        schedule before gets the peak rate `lr` first.

        Args:
            optimizer: At the peak rate.
            decay: As for `build`.
            updates: Updates in `updates_epochs` epochs.
            updates_epochs: One, unless only the updates of several epochs together are known.
            done: Updates already made.
            default_warmup: Warm up as is usual for the schedule, whatever `warmup_epochs` says: 15 % of the run in
                "one-cycle", 10 % in "linear", 100 updates from a tenth of the rate in "constant".
            decay_factor: What "exponential" (0.95), "step" (0.1) and "ptb" (0.5) multiply the rate by when it falls.
            flat_epochs: Epochs between falls in "step" (a third of the run), and before them in "ptb" (4).

        Raises:
            StrettoError: The schedule needs the number of epochs, or does not use a number given.
        """
        check_kind(
            optimizer, Optimizer, name="optimizer", fix="Give an optimiser, as build or make_optimizer makes it."
        )
        check_schedule(decay, epochs=self.epochs, decay_factor=decay_factor, flat_epochs=flat_epochs)
        for group in optimizer.param_groups:
            if group.pop("initial_lr", None) is not None:
                group["lr"] = self.lr
        schedule: LRScheduler
        if decay == "one-cycle":
            epochs = self.epochs or 0.0
            # With plain SGD it would introduce a momentum; Muon, which has two kinds of it, keeps both.
            has_momentum = any(name in optimizer.defaults for name in ("betas", "momentum")) and all(
                "betas" in group or group.get("momentum") for group in optimizer.param_groups
            )
            schedule = OneCycleLR(
                optimizer,
                max_lr=self.lr,
                total_steps=round(updates * epochs / updates_epochs) + 1,
                pct_start=ONE_CYCLE_WARMUP_SHARE if default_warmup else self.warmup_epochs / epochs,
                cycle_momentum=has_momentum,
            )
        elif default_warmup and decay == "constant":
            schedule = LinearLR(optimizer, start_factor=0.1, total_iters=CONSTANT_WARMUP_UPDATES)
        else:
            by_share = default_warmup and decay == "linear"
            total = updates * (self.epochs or 0.0) / updates_epochs
            factors = WarmupThenDecay(
                decay,
                warmup_updates=round(LINEAR_WARMUP_SHARE * total)
                if by_share
                else self.warmup_updates(updates_per_epoch=updates / updates_epochs),
                updates=updates,
                updates_epochs=updates_epochs,
                epochs=self.epochs,
                decay_factor=decay_factor,
                flat_epochs=flat_epochs,
            )
            schedule = LambdaLR(optimizer, factors)
        with warnings.catch_warnings():
            # torch warns when a schedule moves before the optimiser does; it has moved, under another schedule.
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(done):
                schedule.step()
        return schedule

    def _refuse_contradictions(self) -> None:
        if self.rule not in BOTH_WAYS and self.batch_size < self.base_batch_size:
            raise StrettoError(
                f"batch_size={self.batch_size} is smaller than base_batch_size={self.base_batch_size}, and the rule "
                f"{self.rule!r} is for larger ones",
                fix="Give the smaller one as base, with the settings tuned for it, or choose the rule 'none', or "
                "'updates' for Muon.",
            )
        if self.warmup_cap is not None and self.epochs is None:
            raise StrettoError(
                f"warmup_cap={self.warmup_cap} was given without epochs, of which it is a share",
                fix="Give epochs=..., the length of the whole run.",
            )
        if self.base_epochs is not None and (self.rule != "updates" or self.epochs is None):
            raise StrettoError(
                f"base_epochs={self.base_epochs} was given with the rule {self.rule!r} and epochs={self.epochs}",
                fix="Leave it out, or give the rule 'updates' and epochs=..., the length of the run.",
            )
        if self.noise_scale is not None and self.base_clip_norm is None:
            raise StrettoError(
                f"noise_scale={self.noise_scale} was given, and there is no base_clip_norm to scale by it",
                fix="Give base_clip_norm=... too, or leave noise_scale out.",
            )
        if self.epochs is not None and self.warmup_epochs >= self.epochs:
            raise StrettoError(
                f"the warm-up of {self.warmup_epochs:g} epochs ({self.base_warmup_epochs:g} at a batch of "
                f"{self.base_batch_size}, now {self.batch_size}) fills the run of {self.epochs:g} epochs",
                fix="Give warmup_cap, the largest share of all updates to spend on it, such as 0.2, "
                "or a smaller batch or warm-up.",
            )
