"""One update of the weights: batches of all workers and of several steps, weighted by what they really contain."""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator
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


@dataclasses.dataclass(slots=True, kw_only=True)
class Taken:
    """What went into an update: of one worker, or summed over all.

    Attributes:
        count: Elements that the loss is a sum over.
        loss: Their summed loss.
        bad: Batches whose loss is no number.
        steps_real: Real time steps.
        slots: Slots, padding included.
        rows: Sequences.
        stop: Workers that were asked to stop.
        fault: Workers that met a fault, such as a full disk, since the update before.
    """

    count: float = 0.0
    loss: float = 0.0
    bad: float = 0.0
    steps_real: float = 0.0
    slots: float = 0.0
    rows: float = 0.0
    stop: float = 0.0
    fault: float = 0.0


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Bad:
    """The sequences of a batch, and the loss or gradient that is no number."""

    numbers: list[int]
    value: float


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

    Attributes:
        taken: What went into the last update, over all workers.
        numbers: The sequences of this worker in the update under way, or the last one.
        waited: Seconds that this worker has waited for others, sums of gradients included.
        own_steps: Real time steps of this worker.
        last: Loss, norm and rate of the last update.
        skipped: Updates that were left out.
    """

    def __init__(self, task: AbstractTask[Any], state: TrainState, *, world: World, stop: threading.Event) -> None:
        self._task, self._state, self._world, self._stop = task, state, world, stop
        self._config = task.config
        self._replica = replicated(state.model, world)
        self.taken, self._own = Taken(), Taken()
        self.numbers: list[int] = []
        self._bad: _Bad | None = None
        self.waited = 0.0
        self.own_steps = 0
        self.last: dict[str, float] = {}
        self.skipped = 0
        self._fault: StrettoError | None = None
        self._computed = 0.0
        if world.size > 1:
            for parameter in state.model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note_time)  # type: ignore[no-untyped-call]

    def add(self, batch: Batch, *, is_last: bool) -> None:
        """Add a step's batch; with the last of an update, change the weights.

        Workers wait for each other once an update: while gradients are summed.

        Raises:
            StrettoError: On all workers at once, if the loss of any is no number and such updates are not skipped, or
                if the first one met a fault.
        """
        together = getattr(self._replica, "no_sync", None)
        with contextlib.nullcontext() if is_last or together is None else together(), lost_worker():
            loss = self._loss(batch)
            sums = self._begin_exchange() if is_last else None
            if is_last or not self._bad:
                self._computed = time.perf_counter()
                torch.autograd.backward(loss)
            if sums is None:
                return
            self.taken = Taken(**dict(zip(PARTS, sums(), strict=True)))
            if self._world.size > 1:
                # What is left when the last gradient is there is the sum over workers, and the slowest of them.
                self.waited += time.perf_counter() - self._computed
            if self.taken.fault:
                self.agree()
            self._change()

    def begin(self) -> None:
        """Forget what the last update was made of."""
        self.taken, self._own = Taken(), Taken()
        self.numbers, self._bad = [], None
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

    def _loss(self, batch: Batch) -> torch.Tensor:
        state, world, own = self._state, self._world, self._own
        if world.size > 1:
            # Each worker's own, and the same again when a run resumes at this step.
            seeds = np.random.SeedSequence([self._config.seed, state.epoch, state.used, world.rank])
            torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> 1))
        output = self._replica(batch if len(batch) else None)
        loss = self._task.loss(output, batch) if len(batch) else LossSum(total=output, count=0)
        total = float(loss.total.detach())
        numbers = [] if batch.indices is None else batch.indices.tolist()
        if math.isfinite(total):
            own.loss += total
        else:
            own.bad += 1
            self._bad = self._bad or _Bad(numbers=numbers, value=total)
        own.count += loss.count
        own.steps_real += batch.num_steps
        own.slots += batch.num_slots
        own.rows += len(batch)
        self.numbers += numbers
        self.own_steps += batch.num_steps
        return loss.total

    def _begin_exchange(self) -> Callable[[], list[float]]:
        """Begin to sum what workers have taken, which goes on while gradients are computed."""
        self._own.stop, self._own.fault = float(self._stop.is_set()), float(self._fault is not None)
        return self._world.begin_total([float(getattr(self._own, name)) for name in PARTS])

    def _note_time(self, parameter: torch.Tensor) -> None:  # noqa: ARG002
        self._computed = time.perf_counter()

    def _change(self) -> None:
        state, taken = self._state, self.taken
        if taken.bad:
            self._refuse(self._bad)
        else:
            for parameter in state.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self._world.size / max(1.0, taken.count))
            norm = float(nn.utils.clip_grad_norm_(state.model.parameters(), self._config.clip_norm))
            if not math.isfinite(norm):
                # The gradient is the same on all workers, so all come here.
                taken.bad += 1
                self._refuse(_Bad(numbers=self.numbers, value=norm))
            else:
                self.last = {
                    "loss": taken.loss / max(1.0, taken.count),
                    "gradient_norm": norm,
                    "rate": float(state.schedule.get_last_lr()[0]),
                }
                state.optimizer.step()
        state.schedule.step()

    def _refuse(self, bad: _Bad | None) -> None:
        """Stop all workers in the same step and with the same words, or leave the update out."""
        named = [] if bad is None else bad.numbers[:MOST_NAMED]
        own = [math.nan if bad is None else bad.value, bad is not None, *named, *[-1] * (MOST_NAMED - len(named))]
        found = [row for row in self._world.gathered([float(item) for item in own]) if row[1]]
        if self._config.on_nan == "stop":
            sequences = [int(number) for row in found for number in row[2:] if number >= 0]
            raise diverged(sequences, found[0][0], where=f"at step {self._state.step + 1}, on training sequences")
        self.skipped += 1
        self._state.optimizer.zero_grad(set_to_none=True)


PARTS: Final = tuple(field.name for field in dataclasses.fields(Taken))
