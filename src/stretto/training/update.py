"""One update of the weights: batches of all workers and of several steps, weighted by what they really contain."""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np
import torch
from torch import nn

from stretto.batching.collate import Batch
from stretto.distributed.joining import lost_worker
from stretto.distributed.replica import replicated
from stretto.distributed.world import World
from stretto.errors import StrettoError
from stretto.training.divergence import MOST_NAMED, diverged
from stretto.training.state import TrainState
from stretto.training.task import AbstractTask, LossSum

PARTS: Final = ("count", "loss", "bad", "steps_real", "slots", "rows", "stop", "fault")


@dataclasses.dataclass(slots=True, kw_only=True)
class Taken:
    """What went into an update so far, over all workers.

    Attributes:
        count: Elements that the loss is a sum over.
        loss: Their summed loss.
        bad: Workers whose loss is no number.
        steps_real: Real time steps.
        slots: Slots, padding included.
        rows: Sequences.
        stop: Workers that were asked to stop.
        fault: Workers that met a fault, such as a full disk, since the step before.
    """

    count: float = 0.0
    loss: float = 0.0
    bad: float = 0.0
    steps_real: float = 0.0
    slots: float = 0.0
    rows: float = 0.0
    stop: float = 0.0
    fault: float = 0.0

    def add(self, sums: list[float]) -> None:
        """Add the sums of one step, in the order of `PARTS`."""
        for name, value in zip(PARTS, sums, strict=True):
            setattr(self, name, getattr(self, name) + value)


@final
class Updater:
    """Adds up gradients and takes the step of the optimiser.

    Gradients are summed, not averaged, over workers and accumulated steps, and divided once by the number of elements
    in all of them: any number of workers, with any shares, makes the update that one worker makes of everything.

    Args:
        task: Model, loss and metric.
        state: What is trained.
        world: The workers.
        stop: Set when this worker is asked to stop.
    """

    def __init__(self, task: AbstractTask[Any], state: TrainState, *, world: World, stop: threading.Event) -> None:
        self._task, self._state, self._world, self._stop = task, state, world, stop
        self._config = task.config
        self._replica = replicated(state.model, world)
        self.taken = Taken()
        self.numbers: list[int] = []
        self.waited = 0.0
        self.own_steps = 0
        self.last: dict[str, float] = {}
        self.skipped = 0
        self._fault: StrettoError | None = None

    def add(self, batch: Batch, *, is_last: bool) -> None:
        """Add a step's batch; with the last of an update, change the weights.

        Raises:
            StrettoError: On all workers at once, if the loss of any is no number and such updates are not skipped, or
                if the first one met a fault.
        """
        together = getattr(self._replica, "no_sync", None)
        with contextlib.nullcontext() if is_last or together is None else together(), lost_worker():
            self._add(batch)
            if is_last:
                self._change()

    def begin(self) -> None:
        """Forget what the last update was made of."""
        self.taken = Taken()
        self.numbers = []
        self._state.optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def told_to_all(self) -> Iterator[None]:
        """What the first worker does alone; of several, all hear of its fault at the next exchange, and in one step."""
        try:
            yield
        except StrettoError as error:
            if self._world.size == 1:
                raise
            self._fault = self._fault or error

    def agree(self) -> None:
        """Go on, on all workers, or raise the first one's fault, on all of them."""

        def look() -> str:
            if self._fault is not None:
                raise self._fault
            return ""

        self._world.by_first(look)

    def _add(self, batch: Batch) -> None:
        state, world = self._state, self._world
        if world.size > 1:
            # Each worker's own, and the same again when a run resumes at this step.
            seeds = np.random.SeedSequence([self._config.seed, state.epoch, state.used, world.rank])
            torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> 1))
        output = self._replica(batch if len(batch) else None)
        loss = self._task.loss(output, batch) if len(batch) else LossSum(total=output, count=0)
        total = float(loss.total.detach())
        bad = not math.isfinite(total)
        own = [
            loss.count,
            0.0 if bad else total,
            bad,
            batch.num_steps,
            batch.num_slots,
            len(batch),
            self._stop.is_set(),
            self._fault is not None,
        ]
        begun = time.perf_counter()
        sums = world.total([float(value) for value in own])
        self.waited += time.perf_counter() - begun
        self.taken.add(sums)
        if sums[PARTS.index("fault")]:
            self.agree()
        self.own_steps += batch.num_steps
        own_numbers = [] if batch.indices is None else batch.indices.tolist()
        self.numbers += own_numbers
        if sums[PARTS.index("bad")]:
            self._refuse(own_numbers if bad else [], total if bad else None)
        if not self.taken.bad:
            torch.autograd.backward(loss.total)

    def _change(self) -> None:
        state, taken = self._state, self.taken
        gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
        if taken.bad:
            state.optimizer.zero_grad(set_to_none=True)
        else:
            for gradient in gradients:
                gradient.mul_(self._world.size / max(1.0, taken.count))
            norm = float(nn.utils.clip_grad_norm_(state.model.parameters(), self._config.clip_norm))
            if not math.isfinite(norm):
                # The gradient is the same on all workers, so all come here.
                self._refuse(self.numbers, norm)
            else:
                self.last = {
                    "loss": taken.loss / max(1.0, taken.count),
                    "gradient_norm": norm,
                    "rate": float(state.schedule.get_last_lr()[0]),
                }
                state.optimizer.step()
        state.schedule.step()

    def _refuse(self, numbers: list[int], value: float | None) -> None:
        """Stop all workers in the same step and with the same words, or note that the update is left out."""
        named = numbers[:MOST_NAMED]
        own = [math.nan if value is None else value, value is not None, *named, *[-1] * (MOST_NAMED - len(named))]
        found = [row for row in self._world.gathered([float(item) for item in own]) if row[1]]
        if self._config.on_nan == "stop":
            sequences = [int(number) for row in found for number in row[2:] if number >= 0]
            raise diverged(sequences, found[0][0], where=f"at step {self._state.step + 1}, on training sequences")
        self.taken.bad += 1
        self.skipped += 1
