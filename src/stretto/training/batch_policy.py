"""Who chooses the batch size of a run: the settings (`BatchPolicy`), or measurements while it trains (`TunedBatch`).

The trainer asks its policy after every update and every epoch, and does what the answer says:

    None         carry on
    Replan       record a decision; if it changes the batch, plan the rest of the epoch with it or from a checkpoint
"""

import copy
import dataclasses
import math
import time
from typing import Any, ClassVar, Final, final

import torch
from torch import distributed

from stretto.batching import Batch
from stretto.distributed import World
from stretto.large_batch import (
    MOMENTUM,
    BatchTuner,
    Decision,
    Guard,
    LargeBatch,
    ThroughputTable,
    local_curvature,
    probe,
)
from stretto.nn import reset_carried
from stretto.training.checkpoint import Checkpoint
from stretto.training.events import AbstractLog
from stretto.training.feeds import AbstractFeed
from stretto.training.state import TrainState
from stretto.training.task import AbstractTask
from stretto.training.update import Update, Updater

PROBE_MULTIPLES: Final = (1, 2, 4, 8, 16)
NUM_PROBE_LENGTHS: Final = 4
PROBE_SECONDS: Final = (0.5, 10.0)
"""The least and the most that a probe may take; in between it follows the run."""
PROBE_SHARE: Final = 0.03
"""Share of the time the run is expected to take at its first batch that the probe may take."""
NOISE_INTERVALS: Final = ((16, 4), (64, 8), (math.inf, 32))
"""(n, k): until n updates were measured, every k-th is. The halves of a small batch take up to twice as long as the
whole, and the first decisions rest on few."""
CURVATURE_INTERVAL: Final = 256
"""Updates between measurements of the curvature, which cost one or two updates of a small batch."""
CURVATURE_SEQUENCES: Final = 8
MOSTLY_CLIPPED: Final = 0.5
"""Share of clipped updates above which the clip norm follows the batch."""
MIN_REPLAN_SHARE: Final = 0.1
"""Don't re-plan an epoch with less than this share left: each re-plan adds batches that are not full."""
STABILITY_LIMITS: Final = {
    "sgd": 2.0,
    "momentum": 2 * (1 + MOMENTUM),
    "nesterov": 2 * (1 + MOMENTUM) / (1 + 2 * MOMENTUM),
}
"""Rate times curvature beyond which a quadratic diverges, for optimisers that do not scale gradients."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """Record a decision and continue with its batch and clip norm, or from a checkpoint, which has its own."""

    decision: Decision
    clip_norm: float
    checkpoint: Checkpoint | None = None


class BatchPolicy:
    """The batch that the settings give: nothing is measured, and nothing changes.

    Answers must be the same on all ranks.
    """

    measures_noise: ClassVar[bool] = False
    """Whether the noise of some updates is to be measured."""

    def __init__(self, *, batch_size: int, accumulate: int) -> None:
        self._batch_size, self._accumulate = batch_size, accumulate

    @property
    def accumulate(self) -> int:
        """Batches of one rank per update."""
        return self._accumulate

    @property
    def batch_size(self) -> int:
        """Most sequences in a batch of one rank."""
        return self._batch_size

    @property
    def can_roll_back(self) -> bool:
        """Whether there is a smaller batch to return to."""
        return False

    def begin_plan(self) -> None:
        """Prepare for the first update of a plan."""

    def wants_noise(self) -> bool:
        """Whether to measure the noise of the next update."""
        return False

    def after_update(self, update: Update, *, left: float) -> Replan | None:  # noqa: ARG002
        """What to do after an update, with `left` of the epoch to come, as a share."""
        return None

    def after_epoch(self, *, clipped: float) -> Replan | None:  # noqa: ARG002
        """What to do after an epoch that is not the last, of which a share of updates was clipped."""
        return None

    def keep(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint at the start of a plan to roll back to, if there is a smaller batch."""

    def to_checkpoint(self) -> Checkpoint:
        """All that later decisions depend on."""
        return Checkpoint()

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""


@final
class TunedBatch(BatchPolicy):
    """Lets a `BatchTuner` choose the batch.

    The learning rate and warm-up of the settings belong to the first batch, and follow it by `LargeBatch`. The state
    is read, not written: only the trainer changes it.
    """

    measures_noise: ClassVar[bool] = True

    def __init__(
        self, task: AbstractTask[Any], state: TrainState, feed: AbstractFeed, *, world: World, log: AbstractLog
    ) -> None:
        self._task, self._state, self._feed, self._world, self._log = task, state, feed, world, log
        config = task.config
        self._tuner = BatchTuner(
            LargeBatch(
                base_batch_size=state.batch_size,
                base_lr=state.recipe.lr,
                base_warmup_epochs=state.recipe.warmup_epochs,
                batch_size=state.batch_size,
                rule=config.rule,
                warmup_cap=config.warmup_cap,
                epochs=config.epochs,
            ),
            num_sequences=feed.num_sequences,
            world_size=world.size,
            guard=Guard(max_rate_times_curvature=STABILITY_LIMITS.get(config.optimizer, 2.0)),
        )
        self._kept: Checkpoint | None = None

    @property
    def accumulate(self) -> int:
        """Batches of one rank per update."""
        return self._tuner.accumulate

    @property
    def batch_size(self) -> int:
        """Most sequences in a batch of one rank."""
        return math.ceil(self._tuner.batch_size / (self._world.size * self._tuner.accumulate))

    @property
    def can_roll_back(self) -> bool:
        """Whether there is a smaller batch to return to."""
        return self._tuner.can_roll_back

    def begin_plan(self) -> None:
        """Measure throughput, once per run."""
        if self._tuner.table is None:
            found = self._probe()
            self._log.emit("probe", update=self._state.num_updates, batch_size=self._state.batch_size, **found)

    def wants_noise(self) -> bool:
        """Whether to measure the noise of the next update."""
        every = next(every for until, every in NOISE_INTERVALS if self._tuner.noise.num_updates < until)
        return self._state.num_updates % every == every - 1

    def after_update(self, update: Update, *, left: float) -> Replan | None:
        """Take an update into account: roll back from trouble, or decide again once enough was measured."""
        skipped = update.is_skipped
        trouble = self._tuner.observe(
            loss=update.loss,
            gradient_norm=None if skipped else update.gradient_norm,
            norms=update.norms,
            curvature=None if skipped else self._measure_curvature(update.batch),
            lr=None if skipped else update.rate,
        )
        if trouble:
            can_roll_back = self.can_roll_back
            decision = self._tuner.roll_back(trouble)
            if can_roll_back and self._kept is not None:
                return Replan(decision=decision, clip_norm=self._state.clip_norm, checkpoint=self._kept)
            self._log.emit("warning", message=f"at update {self._state.num_updates}: {trouble}")
        if self._tuner.is_due and left >= MIN_REPLAN_SHARE:
            return self._decide(self._state.epoch + 1 - left, clipped=self._state.totals.clipped)
        return None

    def after_epoch(self, *, clipped: float) -> Replan:
        """Decide again."""
        return self._decide(self._state.epoch, clipped=clipped)

    def keep(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint to roll back to, if there is a smaller batch."""
        if self.can_roll_back:
            self._kept = checkpoint

    def to_checkpoint(self) -> Checkpoint:
        """All that later decisions depend on."""
        return Checkpoint(state={"tuner": self._tuner.state_dict()})

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint, which is also what to roll back to."""
        self._tuner.load_state_dict(checkpoint.state["tuner"])
        self._kept = checkpoint if self.can_roll_back else None

    def _decide(self, epoch: float, *, clipped: float) -> Replan:
        """Decide on the batch.

        If most updates are clipped, the clip norm sets the step size. It then follows the gradient norm expected at the
        new batch, so that as many updates are clipped as before.
        """
        before, clip_norm = self._state.batch_size, self._state.clip_norm
        decision = self._tuner.decide(epoch=epoch)
        if decision.action != "keep" and decision.noise_scale is not None and clipped > MOSTLY_CLIPPED:
            scaled = LargeBatch(
                base_batch_size=before,
                base_lr=decision.lr,
                batch_size=decision.batch_size,
                rule="none",
                base_clip_norm=clip_norm,
                noise_scale=decision.noise_scale,
            )
            clip_norm = scaled.clip_norm or clip_norm
            reason = f"{decision.reason}; {clipped:.0%} of gradients were clipped, now at {clip_norm:.3g}"
            decision = dataclasses.replace(decision, reason=reason)
        return Replan(decision=decision, clip_norm=clip_norm)

    def _probe(self) -> dict[str, Any]:
        """Time updates on a copy of the model, at growing batches and at each length; the slowest rank counts."""
        start = time.perf_counter()
        base = -(-self._state.batch_size // self._world.size)
        largest = max(self._state.batch_size, self._feed.num_sequences // 4)
        sizes = [base * multiple for multiple in PROBE_MULTIPLES if base * multiple * self._world.size <= largest]
        with torch.random.fork_rng(devices=[]):
            scratch = self._copy_state()
            lengths = representative_lengths(self._feed.shares)
            table = probe(
                lambda size, length: self._try(scratch, size, length),
                batch_sizes=sizes or [base],
                lengths=lengths,
                max_seconds=self._probe_budget(scratch, base, lengths),
                device=self._task.config.device,
                update=scratch.optimizer.step,
            )
        self._tuner.table = self._merge_ranks(table)
        exchange = self._time_exchange()
        self._tuner.exchange_seconds = exchange
        return {
            "seconds": round(time.perf_counter() - start, 4),
            "exchange_seconds": exchange,
            "table": {} if self._tuner.table is None else self._tuner.table.to_dict(),
        }

    def _copy_state(self) -> TrainState:
        """A copy of the model with a new optimiser, to be trained on while sizes are measured."""
        model = copy.deepcopy(self._state.model)
        config = dataclasses.replace(self._task.config, schedule="constant", decay_factor=None, flat_epochs=None)
        return TrainState(model, config=config, updates_per_epoch=1, batch_size=self._state.batch_size)

    def _try(self, scratch: TrainState, size: int, length: int) -> int:
        """One update on real sequences of about this length; its real steps."""
        reset_carried(scratch.model)
        batch = self._feed.example(size, length)
        Updater(self._task, scratch, world=World()).update([batch], skip_nonfinite=True)
        return self._task.count_steps(batch)[0]

    def _probe_budget(self, scratch: TrainState, size: int, lengths: dict[int, float]) -> float:
        """Seconds for measuring, so that a short run does not spend its time on it."""
        middle = sorted(lengths)[len(lengths) // 2]
        # The first update may have to wait for a compiler.
        self._try(scratch, size, middle)
        start = time.perf_counter()
        self._try(scratch, size, middle)
        run: float = (time.perf_counter() - start) * len(self._feed) * self._task.config.epochs
        least, most = PROBE_SECONDS
        return min(most, max(least, PROBE_SHARE * run))

    def _merge_ranks(self, table: ThroughputTable) -> ThroughputTable:
        """The same table on all ranks; what one rank could not run counts as not measured."""
        own = [math.inf if entry.seconds is None else entry.seconds for entry in table.entries]
        found = self._world.all_gather([*own, table.update_seconds])
        *most, update_seconds = (max(column) for column in zip(*found, strict=True))
        entries = [
            dataclasses.replace(entry, seconds=seconds)
            if math.isfinite(seconds)
            else dataclasses.replace(entry, seconds=None, problem=entry.problem or "another rank")
            for entry, seconds in zip(table.entries, most, strict=True)
        ]
        return dataclasses.replace(table, entries=tuple(entries), update_seconds=update_seconds)

    def _time_exchange(self) -> float:
        """What an all-reduce of all gradients takes, the least of three times."""
        if self._world.size == 1:
            return 0.0
        count = sum(parameter.numel() for parameter in self._state.model.parameters() if parameter.requires_grad)
        numbers, seconds = torch.zeros(count, device=self._world.device), []
        for _ in range(3):
            self._world.barrier()
            start = time.perf_counter()
            distributed.all_reduce(numbers, group=self._world.group)
            seconds.append(time.perf_counter() - start)
        return max(row[0] for row in self._world.all_gather([min(seconds)]))

    def _measure_curvature(self, batch: Batch) -> float | None:
        """Along the gradient of a few sequences, averaged over ranks; None for most updates."""
        state, config = self._state, self._task.config
        if state.num_updates % CURVATURE_INTERVAL or config.optimizer not in STABILITY_LIMITS or self._feed.carries:
            return None
        found = [0.0, 0.0]
        if len(batch):
            few = batch.take(slice(0, CURVATURE_SEQUENCES)).to(config.device)
            weights = [parameter for parameter in state.model.parameters() if parameter.requires_grad]
            random = torch.get_rng_state()

            def gradient() -> tuple[torch.Tensor, ...]:
                torch.set_rng_state(random)
                with torch.enable_grad():
                    loss = self._task.loss(state.model(few), few)
                    return torch.autograd.grad(loss.total / max(1, loss.count), weights, materialize_grads=True)

            with torch.random.fork_rng(devices=[]):
                curvature = local_curvature(gradient, weights)
            if math.isfinite(curvature):
                found = [curvature, 1.0]
        total, count = self._world.all_reduce_sum(found)
        return total / count if count else None


def representative_lengths(shares: dict[int, float]) -> dict[int, float]:
    """At most four lengths, each for about as many sequences: the longest of those it stands for."""
    few: dict[int, float] = {}
    waiting = 0.0
    for length, share in sorted(shares.items()):
        waiting += share
        if sum(few.values()) + waiting >= (len(few) + 1) / NUM_PROBE_LENGTHS - 1e-9:
            few[length], waiting = waiting, 0.0
    if waiting:
        few[max(shares)] = few.get(max(shares), 0.0) + waiting
    return few
