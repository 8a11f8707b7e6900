"""One update of the weights: batches of all workers and of several steps, weighted by what they really contain."""

import contextlib
import dataclasses
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import numpy as np
import torch
from torch import nn

from stretto.batching import Batch
from stretto.distributed import World, detect_lost_rank, replicate
from stretto.errors import StrettoError
from stretto.large_batch import AbstractSplit, SplitNorms, make_split
from stretto.nn import in_turn
from stretto.training.divergence import MOST_NAMED, diverged
from stretto.training.feed import AbstractFeed
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

    Batches from buckets are divided by what a batch has on average instead (`weigh`). An element of a long sequence
    would otherwise count for less than one of a short sequence, which comes with fewer others.

    Args:
        task: Model, loss and metric.
        state: What is trained.
        world: The workers.
        stop: Set when this worker is asked to stop.
        sharers: The workers that share its sequences and divide their steps; it alone by default.
        measures_noise: Whether some updates are to be taken apart, to tell how noisy gradients are.

    Attributes:
        norms: Of the parts of the last update, if they were measured.
        skips: Whether updates whose loss or gradient is no number are left out, instead of ending the run.
        taken: What went into the last update, over all workers.
        numbers: The sequences of this worker in the update under way, or the last one.
        waited: Seconds that this worker has waited for others, sums of gradients included.
        own_steps: Real time steps of this worker.
        last: Loss, norm and rate of the last update.
        skipped: Updates that were left out.
    """

    def __init__(
        self,
        task: AbstractTask[Any],
        state: TrainState,
        *,
        world: World,
        stop: threading.Event,
        sharers: World | None = None,
        measures_noise: bool = False,
    ) -> None:
        self._task, self._state, self._world, self._stop = task, state, world, stop
        self._sharers = sharers or World()
        self._config = task.config
        self._replica = replicate(state.model, world)
        self._split = make_split(self._replica, state.optimizer, world=world) if measures_noise else None
        self.norms: SplitNorms | None = None
        self.skips: bool = self._config.on_nan == "skip"
        self.taken, self._own = Taken(), Taken()
        self.numbers: list[int] = []
        self._bad: _Bad | None = None
        self.waited = 0.0
        self.own_steps = 0
        self.last: dict[str, float] = {}
        self.skipped = 0
        self._fault: StrettoError | None = None
        self._num_elements: int | None = None
        self._usual: float | None = None
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
        sums: Callable[[], list[float]] | None = None
        with contextlib.nullcontext() if is_last or together is None else together(), detect_lost_rank():
            if (
                is_last
                and not self._own.rows
                and len(batch) > 1
                and self._split is not None
                and self._split.is_on
                and self._split.needs_halves
            ):
                sums = self._add_halves(batch, self._split)
            else:
                loss = self._loss(batch)
                sums = self._begin_exchange() if is_last else None
                # Those that divide the steps of a sequence pass its gradient on, whatever the loss of one of them.
                if is_last or not self._bad or self._sharers.size > 1:
                    self._computed = time.perf_counter()
                    self._backward(loss, rows=len(batch))
            if sums is None:
                return
            self.taken = Taken(**dict(zip(PARTS, sums(), strict=True)))
            if self._world.size > 1:
                # What is left when the last gradient is there is the sum over workers, and the slowest of them.
                self.waited += time.perf_counter() - self._computed
            if self.taken.fault:
                self.agree()
            self._change()

    def weigh(self, feed: AbstractFeed, *, accumulate: int = 1) -> None:
        """Let every element of an epoch count alike, whichever batch it comes in.

        Args:
            feed: Deals the batches; to be told again when their size changes.
            accumulate: Batches of one worker that make an update.
        """
        self._usual = None
        if feed.is_bucketed:
            if self._num_elements is None:
                self._num_elements = self._task.num_elements(self._task.data.part("train"))
            self._usual = max(1.0, self._num_elements * accumulate / feed.whole_epoch)

    def begin(self, *, measured: bool = False) -> None:
        """Forget what the last update was made of.

        Args:
            measured: Whether to take this one apart, for the noise of its gradient.
        """
        self.taken, self._own = Taken(), Taken()
        self.norms = None
        if self._split is not None:
            self._split.begin(is_on=measured)
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

        self._world.on_rank0(look)

    def _add_halves(self, batch: Batch, split: AbstractSplit) -> Callable[[], list[float]]:
        """The halves of a batch one after the other, so that their gradients can be compared."""
        for rows in in_turn(self._state.model, [slice(0, None, 2), slice(1, None, 2)], num_rows=len(batch)):
            half = batch.take(rows)
            torch.autograd.backward(self._loss(half))
            split.add(len(half))
        return self._begin_exchange()

    def _loss(self, batch: Batch) -> torch.Tensor:
        """The summed loss of a batch, or a part of one, which is counted."""
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
        if self._sharers.is_rank0:
            own.rows += len(batch)
            self.numbers += numbers
        self.own_steps += batch.num_steps
        return loss.total

    def _backward(self, loss: torch.Tensor, *, rows: int) -> None:
        torch.autograd.backward(loss)
        if self._split is not None:
            self._split.add(rows)

    def _begin_exchange(self) -> Callable[[], list[float]]:
        """Begin to sum what workers have taken, which goes on while gradients are computed."""
        self._own.stop, self._own.fault = float(self._stop.is_set()), float(self._fault is not None)
        return self._world.all_reduce_sum_async([float(getattr(self._own, name)) for name in PARTS])

    def _note_time(self, parameter: torch.Tensor) -> None:  # noqa: ARG002
        self._computed = time.perf_counter()

    def _change(self) -> None:
        state, taken = self._state, self.taken
        if taken.bad:
            self._refuse(self._bad)
        else:
            # Workers' sums were averaged; what counts is the mean over all elements of all workers.
            count = self._usual or taken.count
            scale = self._world.size / max(1.0, count)
            if self._split is not None:
                self.norms = self._split.take(scale=1.0 / max(1.0, count))
            gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
            norm = scale * float(nn.utils.get_total_norm(gradients))
            state.clips.add(norm, clip_norm=state.clip_norm)
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
                # Divided and clipped in one pass.
                torch._foreach_mul_(gradients, scale * min(1.0, state.clip_norm / (norm + SMALL)))
                state.optimizer.step()
        with _left_out() if taken.bad else contextlib.nullcontext():
            state.schedule.step()

    def _refuse(self, bad: _Bad | None) -> None:
        """Stop all workers in the same step and with the same words, or leave the update out."""
        named = [] if bad is None else bad.numbers[:MOST_NAMED]
        own = [math.nan if bad is None else bad.value, bad is not None, *named, *[-1] * (MOST_NAMED - len(named))]
        found = [row for row in self._world.all_gather([float(item) for item in own]) if row[1]]
        if not self.skips:
            sequences = list(dict.fromkeys(int(number) for row in found for number in row[2:] if number >= 0))
            raise diverged(sequences, found[0][0], where=f"at step {self._state.step + 1}, on training sequences")
        self.skipped += 1
        self._state.optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _left_out() -> Iterator[None]:
    """The schedule goes on without the optimiser; torch would warn of that if it was the first update."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


SMALL: Final = 1e-6
"""Added to a norm that is divided by, as torch does."""
PARTS: Final = tuple(field.name for field in dataclasses.fields(Taken))
