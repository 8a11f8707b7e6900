"""The batch size of a run, chosen while it trains: probed, measured, decided again and again, and taken back."""

import copy
import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import distributed

from stretto.batching import Batch
from stretto.distributed import World
from stretto.errors import StrettoError
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
from stretto.training.feed import AbstractFeed
from stretto.training.state import TrainState
from stretto.training.task import AbstractTask
from stretto.training.update import Updater

PROBED_MULTIPLES: Final = (1, 2, 4, 8, 16)
PROBED_LENGTHS: Final = 4
PROBE_SECONDS: Final = (0.5, 10.0)
"""The least and the most that a probe may take; between them it follows the run."""
PROBE_SHARE: Final = 0.03
"""Of the time that the run is expected to take at its first batch, what the probe may take."""
NOISE_EVERY: Final = ((16, 4), (64, 8), (math.inf, 32))
"""Of how many updates one is taken apart, until so many were: the halves of a small batch take up to twice as long as
the whole, and the first decisions rest on few."""
CURVATURE_EVERY: Final = 256
"""Updates between looks at the curvature, which cost one or two updates of a small batch."""
CURVATURE_ROWS: Final = 8
MOSTLY: Final = 0.5
STEEPEST: Final = {
    "sgd": 2.0,
    "momentum": 2 * (1 + MOMENTUM),
    "nesterov": 2 * (1 + MOMENTUM) / (1 + 2 * MOMENTUM),
}
"""Rate times curvature beyond which a quadratic diverges, for optimisers that do not scale gradients."""


@final
class BatchTuning:
    """Lets a `BatchTuner` choose the batch of a run.

    The settings of rates belong to the first batch, and follow by `LargeBatch`.

    Args:
        task: Model, loss and settings.
        state: What is trained.
        feed: Deals the batches.
        world: The workers that take them.
    """

    def __init__(self, task: AbstractTask[Any], state: TrainState, feed: AbstractFeed, *, world: World) -> None:
        self._task, self._state, self._feed, self._world = task, state, feed, world
        config = task.config
        if config.accumulate > 1 or config.time_parallel > 1:
            raise StrettoError(
                f"--batch-size auto was given with --accumulate {config.accumulate} and "
                f"--time-parallel {config.time_parallel}",
                fix="Leave these out: it accumulates by itself where that pays, and takes whole sequences.",
            )
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
            guard=Guard(max_rate_times_curvature=STEEPEST.get(config.optimizer, 2.0)),
        )

    @property
    def accumulate(self) -> int:
        """Batches of one worker that make an update."""
        return self._tuner.accumulate

    @property
    def rows(self) -> int:
        """Most sequences in a batch of one worker."""
        return math.ceil(self._tuner.batch_size / (self._world.size * self._tuner.accumulate))

    @property
    def is_due(self) -> bool:
        """Whether enough was measured since the last decision for another, the same on all workers."""
        return self._tuner.is_due

    @property
    def is_probed(self) -> bool:
        """Whether it is known what steps of training take."""
        return self._tuner.table is not None

    @property
    def can_go_back(self) -> bool:
        """Whether there is a smaller batch to go back to."""
        return self._tuner.can_roll_back

    def is_measured(self, step: int) -> bool:
        """Whether the update after `step` others is taken apart."""
        every = next(every for until, every in NOISE_EVERY if self._tuner.noise.num_updates < until)
        return step % every == every - 1

    def probe(self) -> dict[str, Any]:
        """Time steps of training, at ever larger batches and at each length, on a copy of the model.

        Returns:
            What was measured, for the record; every worker measures, and the slowest counts.
        """
        begun = time.perf_counter()
        base = -(-self._state.batch_size // self._world.size)
        sizes = [base * multiple for multiple in PROBED_MULTIPLES if base * multiple * self._world.size <= self._most]
        with self._no_trace():
            scratch = self._scratch()
            lengths = _few(self._feed.shares)
            table = probe(
                lambda size, length: self._try(scratch, size, length),
                batch_sizes=sizes or [base],
                lengths=lengths,
                max_seconds=self._allowed_seconds(scratch, base, lengths),
                device=self._task.config.device,
                update=scratch.optimizer.step,
            )
        self._tuner.table = self._slowest(table)
        exchange = self._exchange_seconds()
        self._tuner.exchange_seconds = exchange
        return {
            "seconds": round(time.perf_counter() - begun, 4),
            "exchange_seconds": exchange,
            "table": {} if self._tuner.table is None else self._tuner.table.to_dict(),
        }

    def observe(self, updater: Updater, batch: Batch) -> str:
        """Take an update into account.

        Returns:
            What went wrong, if anything did; empty otherwise. It is the same on all workers.
        """
        bad, last = bool(updater.taken.bad), updater.last
        verdict = self._tuner.observe(
            loss=math.nan if bad else last["loss"],
            gradient_norm=None if bad else last["gradient_norm"],
            norms=updater.norms,
            curvature=None if bad else self._curvature(batch),
            lr=None if bad else last["rate"],
        )
        return verdict.reason if verdict.is_trouble else ""

    def decide(self, epoch: float, *, clipped: float) -> Decision:
        """What is trained with from here on.

        A threshold of gradients that bites all the time sets the length of most steps. It then follows the norm that is
        expected at the new batch, so that it bites as often as before.

        Args:
            epoch: Epochs that are done; 1.5 in the middle of the second.
            clipped: Share of the updates of the last one whose gradient was clipped.
        """
        before = self._state.batch_size
        decision = self._tuner.decide(epoch=epoch)
        if decision.action != "keep" and decision.noise_scale is not None and clipped > MOSTLY:
            recipe = LargeBatch(
                base_batch_size=before,
                base_lr=decision.lr,
                batch_size=decision.batch_size,
                rule="none",
                base_clip_norm=self._state.clip_norm,
            )
            self._state.clip_norm = recipe.scaled_clip(decision.noise_scale)
            told = f"{decision.reason}; {clipped:.0%} of gradients were clipped, now at {self._state.clip_norm:.3g}"
            return dataclasses.replace(decision, reason=told)
        return decision

    def roll_back(self, reason: str) -> Decision:
        """Go back to the batch before; the caller restores weights and position."""
        return self._tuner.roll_back(reason)

    def state_dict(self) -> dict[str, Any]:
        """All that later decisions depend on, ready for JSON."""
        return self._tuner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._tuner.load_state_dict(state)

    @property
    def _most(self) -> int:
        return max(self._state.batch_size, self._feed.num_sequences // 4)

    @contextmanager
    def _no_trace(self) -> Iterator[None]:
        """Random numbers are drawn afterwards as if nothing had been drawn here."""
        earlier = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(earlier)

    def _scratch(self) -> TrainState:
        model = copy.deepcopy(self._state.model)
        config = dataclasses.replace(self._task.config, schedule="constant", decay_factor=None, flat_epochs=None)
        return TrainState(model, config=config, steps_per_epoch=1, batch_size=self._state.batch_size)

    def _try(self, scratch: TrainState, size: int, length: int) -> int:
        """One step of training on real sequences of about this length; its real steps."""
        reset_carried(scratch.model)
        batch = self._feed.example(size, length).to(self._task.config.device)
        updater = Updater(self._task, scratch, world=World(), stop=threading.Event())
        updater.skips = True
        updater.begin()
        updater.add(batch, is_last=True)
        return batch.num_steps

    def _allowed_seconds(self, scratch: TrainState, size: int, lengths: dict[int, float]) -> float:
        """So that short runs are not spent on being measured."""
        middle = sorted(lengths)[len(lengths) // 2]
        # The first step may have to wait for a compiler.
        self._try(scratch, size, middle)
        begun = time.perf_counter()
        self._try(scratch, size, middle)
        run: float = (time.perf_counter() - begun) * len(self._feed) * self._task.config.epochs
        least, most = PROBE_SECONDS
        return min(most, max(least, PROBE_SHARE * run))

    def _slowest(self, table: ThroughputTable) -> ThroughputTable:
        """The same on all workers; what one could not run counts as not measured."""
        own = [math.inf if entry.seconds is None else entry.seconds for entry in table.entries]
        found = self._world.all_gather([*own, table.update_seconds])
        *most, update_seconds = (max(column) for column in zip(*found, strict=True))
        entries = [
            entry if math.isfinite(seconds) else dataclasses.replace(entry, problem=entry.problem or "another worker")
            for entry, seconds in zip(table.entries, most, strict=True)
        ]
        entries = [
            dataclasses.replace(entry, seconds=seconds if math.isfinite(seconds) else None)
            for entry, seconds in zip(entries, most, strict=True)
        ]
        return dataclasses.replace(table, entries=tuple(entries), update_seconds=update_seconds)

    def _exchange_seconds(self) -> float:
        """What workers spend on a sum of all gradients, the least of three times."""
        if self._world.size == 1:
            return 0.0
        count = sum(parameter.numel() for parameter in self._state.model.parameters() if parameter.requires_grad)
        numbers, taken = torch.zeros(count, device=self._world.device), []
        for _ in range(3):
            self._world.barrier()
            begun = time.perf_counter()
            distributed.all_reduce(numbers, group=self._world.group)
            taken.append(time.perf_counter() - begun)
        return max(row[0] for row in self._world.all_gather([min(taken)]))

    def _curvature(self, batch: Batch) -> float | None:
        """Along the gradient of a few sequences, now and then, averaged over workers; None if it is not measured."""
        state = self._state
        if state.step % CURVATURE_EVERY or self._task.config.optimizer not in STEEPEST or self._feed.carries:
            return None
        found = [0.0, 0.0]
        if len(batch):
            few = batch.take(slice(0, CURVATURE_ROWS)).to(self._task.config.device)
            weights = [parameter for parameter in state.model.parameters() if parameter.requires_grad]
            drawn = torch.get_rng_state()

            def gradient() -> tuple[torch.Tensor, ...]:
                torch.set_rng_state(drawn)
                with torch.enable_grad():
                    loss = self._task.loss(state.model(few), few)
                    return torch.autograd.grad(loss.total / max(1, loss.count), weights, materialize_grads=True)

            with self._no_trace():
                curvature = local_curvature(gradient, weights)
            if math.isfinite(curvature):
                found = [curvature, 1.0]
        total, count = self._world.all_reduce_sum(found)
        return total / count if count else None


def _few(shares: dict[int, float]) -> dict[int, float]:
    """At most four lengths, each for about as many sequences: the longest that it stands for."""
    few: dict[int, float] = {}
    waiting = 0.0
    for length, share in sorted(shares.items()):
        waiting += share
        if sum(few.values()) + waiting >= (len(few) + 1) / PROBED_LENGTHS - 1e-9:
            few[length], waiting = waiting, 0.0
    if waiting:
        few[max(shares)] = few.get(max(shares), 0.0) + waiting
    return few
