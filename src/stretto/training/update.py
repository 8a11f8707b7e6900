"""One update of the weights from the batches of all ranks, each weighted by what it really contains.

    batch -> forward -> summed loss -> backward ---- all-reduce of gradients ---.
                             |                                                  +-> divide, clip, optimiser, schedule
                             `------ all-reduce of UpdateStats -----------------'

The numbers of an update travel while gradients are computed. Ranks wait for each other once per update.
"""

import contextlib
import dataclasses
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, final

import numpy as np
import torch

from stretto.batching import Batch
from stretto.distributed import DeferredErrors, World, detect_lost_rank, replicate
from stretto.errors import StrettoError, list_some
from stretto.large_batch import SplitNorms, make_split, squared_norm
from stretto.nn import in_turn
from stretto.training.feeds import AbstractFeed
from stretto.training.solver import TimeParallelSetup
from stretto.training.state import TrainState
from stretto.training.task import AbstractTask, LossSum

MAX_NAMED_SEQUENCES: Final = 64
NORM_EPSILON: Final = 1e-6
"""Added to the norm that a gradient is divided by, as torch's clipping does."""


@final
class Diverged(StrettoError):  # noqa: N818
    """A loss or gradient is NaN or inf."""


def diverged(sequences: Sequence[int], value: float, *, where: str) -> Diverged:
    """The error for a loss or gradient of this value; `where` is, say, "at update 3, on training sequences"."""
    return Diverged(
        f"the loss or gradient is {value} {where} {list_some(sequences, most=MAX_NAMED_SEQUENCES)}",
        fix="Lower --learning-rate or --clip-norm, or look at those sequences; the last checkpoint is untouched.",
    )


def gather_sequences(sequences: Sequence[int], world: World, *, most: int) -> list[int]:
    """The numbers of all ranks' sequences, up to `most` of each."""
    padding = [-1.0] * (most - len(sequences))
    found = world.all_gather([*map(float, sequences[:most]), *padding])
    return [int(number) for row in found for number in row if number >= 0]


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class UpdateStats:
    """What went into an update, on one rank or summed over all.

    `num_stops` are ranks that were asked to stop, and `num_errors` ranks with a deferred error.
    """

    loss_sum: float = 0.0
    num_elements: int = 0
    """Labels, sequences or steps that the loss is a sum over."""
    num_nonfinite: int = 0
    """Batches, or gradients, that are NaN or inf."""
    num_steps: int = 0
    num_padded_steps: int = 0
    num_sequences: int = 0
    num_stops: int = 0
    num_errors: int = 0

    def reduce_async(self, world: World) -> Callable[[], "UpdateStats"]:
        """Start to sum over ranks; the function returned waits for the sums. Counts are exact below 2**53."""
        names = [field.name for field in dataclasses.fields(self)]
        wait = world.all_reduce_sum_async([float(getattr(self, name)) for name in names])

        def finish() -> UpdateStats:
            loss_sum, *counts = wait()
            return UpdateStats(loss_sum=loss_sum, **dict(zip(names[1:], map(int, counts), strict=True)))

        return finish


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """An update that was made, or skipped because the loss or gradient was NaN or inf.

    `num_steps`, `sequences` and the last `batch`, whole and on the CPU, are of this rank alone, as are the seconds that
    it `waited` for others, the sum of gradients included.
    """

    total: UpdateStats
    num_steps: int
    sequences: list[int]
    batch: Batch
    loss: float
    """The mean; NaN if the update was skipped."""
    gradient_norm: float
    """Before clipping; NaN if no gradient was computed."""
    rate: float
    is_skipped: bool
    norms: SplitNorms | None
    """Of the parts of the gradient, if they were measured."""
    waited: float


@final
class Updater:
    """Sums gradients over batches and ranks, and updates the weights.

    Losses are summed, not averaged, and divided once by the number of elements of all ranks and batches: any number of
    ranks, with any shares, makes the update that one process makes of everything.

    With length buckets they are divided by the mean number of elements per update instead (`weigh`). Otherwise an
    element of a long sequence would count for less than one of a short sequence, which comes with fewer others.

    Args:
        task: Loss and settings.
        state: What is trained; its position is read, not written.
        world: All ranks.
        stop: Set when this rank is asked to stop; all ranks learn of it in the next update.
        errors: Deferred errors of rank 0, which all ranks raise in the next update.
        time_parallel: How ranks divide the steps of sequences; by default they do not.
        measures_noise: Whether some updates are to be split into parts, to measure the noise of gradients.
        on_batch: Called with the number of sequences after each batch of this rank.

    Attributes:
        num_elements: Elements of an epoch as the task counts them; None if updates are not divided by it.
    """

    def __init__(
        self,
        task: AbstractTask[Any],
        state: TrainState,
        *,
        world: World,
        stop: threading.Event | None = None,
        errors: DeferredErrors | None = None,
        time_parallel: TimeParallelSetup | None = None,
        measures_noise: bool = False,
        on_batch: Callable[[int], None] = lambda num_sequences: None,  # noqa: ARG005
    ) -> None:
        self._task, self._state, self._world, self._config = task, state, world, task.config
        self._stop, self._errors = stop or threading.Event(), errors or DeferredErrors(world)
        self._time = time_parallel or TimeParallelSetup(1, world=World())
        self._on_batch = on_batch
        self._replica = replicate(state.model, world)
        self._split = make_split(self._replica, state.optimizer, world=world) if measures_noise else None
        self._own, self._sequences = UpdateStats(), list[int]()
        self._bad: tuple[float, list[int]] | None = None
        self.num_elements: int | None = None
        self._divisor: float | None = None
        self._computed = 0.0
        if world.size > 1:
            for parameter in state.model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._record_time)  # type: ignore[no-untyped-call]

    def weigh(self, feed: AbstractFeed, *, accumulate: int = 1) -> None:
        """Let every element of an epoch count alike, whichever batch it comes in; call again when batches change."""
        self._divisor = None
        if len(feed.edges) > 1:
            if self.num_elements is None:
                self.num_elements = self._task.num_elements(self._task.data.part("train"))
            self._divisor = max(1.0, self.num_elements * accumulate / feed.whole_epoch)

    def update(
        self, batches: Iterable[Batch], *, measure_noise: bool = False, skip_nonfinite: bool | None = None
    ) -> Update:
        """Make one update.

        Args:
            batches: Of this rank, at least one.
            measure_noise: Whether to measure the parts of the gradient.
            skip_nonfinite: Whether to leave the weights as they are if the loss or gradient is NaN or inf, instead of
                raising; by default as the settings say.

        Raises:
            StrettoError: On all ranks at once: the loss or gradient is NaN or inf, or rank 0 has a deferred error.
        """
        self._own, self._sequences, self._bad = UpdateStats(), [], None
        if self._split is not None:
            self._split.begin(is_on=measure_noise)
        self._state.optimizer.zero_grad(set_to_none=True)
        with detect_lost_rank():
            drawn = list(batches)
            for number, batch in enumerate(drawn):
                reduced = self._add(batch, number=number, is_last=number == len(drawn) - 1)
                self._on_batch(len(batch))
            total = reduced()
            # What follows the last gradient is the all-reduce, and waiting for the slowest rank.
            waited = time.perf_counter() - self._computed if self._world.size > 1 else 0.0
            if total.num_errors:
                self._errors.raise_on_all()
            rate = float(self._state.schedule.get_last_lr()[0])
            norm, norms = (math.nan, None) if total.num_nonfinite else self._apply_gradient(total)
            if total.num_nonfinite or not math.isfinite(norm):
                # The gradient is the same on all ranks, so all come here.
                self._bad = self._bad or (None if total.num_nonfinite else (norm, self._sequences))
                total.num_nonfinite = max(1, total.num_nonfinite)
                self._skip_or_raise(skip=self._config.on_nan == "skip" if skip_nonfinite is None else skip_nonfinite)
            self._advance_schedule(is_skipped=total.num_nonfinite > 0)
        return Update(
            total=total,
            num_steps=self._own.num_steps,
            sequences=self._sequences,
            batch=batch,
            loss=math.nan if total.num_nonfinite else total.loss_sum / max(1, total.num_elements),
            gradient_norm=norm,
            rate=rate,
            is_skipped=total.num_nonfinite > 0,
            norms=norms,
            waited=waited,
        )

    def _add(self, batch: Batch, *, number: int, is_last: bool) -> Callable[[], UpdateStats]:
        """Add the gradient of a batch; with the last one, start to sum over ranks what the update is made of."""
        split, own = self._split, self._own
        needs_halves = split is not None and split.is_on and split.needs_halves
        in_halves = needs_halves and is_last and number == 0 and len(batch) > 1
        reduced: Callable[[], UpdateStats] = UpdateStats
        no_sync = getattr(self._replica, "no_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if is_last else no_sync():
            for piece in self._cut_batch(self._time.cut(batch).to(self._config.device), in_halves=in_halves):
                loss = self._forward(piece, number=number)
                if is_last:
                    # Twice for halves, but these are computed by one process alone, which sends nothing.
                    own.num_stops, own.num_errors = int(self._stop.is_set()), int(self._errors.is_pending)
                    reduced = own.reduce_async(self._world)
                # Ranks that divide the steps of a sequence pass its gradient on, whatever the loss of one of them is.
                if is_last or self._bad is None or self._time.time.size > 1:
                    self._computed = time.perf_counter()
                    torch.autograd.backward(loss)
                    if split is not None:
                        split.add(len(piece))
        return reduced

    def _cut_batch(self, batch: Batch, *, in_halves: bool) -> Iterator[Batch]:
        """The batch, or its halves one after the other, so that their gradients can be compared."""
        if not in_halves:
            yield batch
            return
        for rows in in_turn(self._state.model, [slice(0, None, 2), slice(1, None, 2)], num_rows=len(batch)):
            yield batch.take(rows)

    def _forward(self, batch: Batch, *, number: int) -> torch.Tensor:
        """The summed loss of a batch, or a part of one, which is counted."""
        state, world, own = self._state, self._world, self._own
        if world.size > 1:
            # A seed for each rank and batch, and the same again when a run resumes here.
            seeds = np.random.SeedSequence([self._config.seed, state.epoch, state.batches_done + number, world.rank])
            torch.manual_seed(int(seeds.generate_state(1, np.uint64)[0] >> 1))
        output = self._replica(batch if len(batch) else None)
        loss = self._task.loss(output, batch) if len(batch) else LossSum(total=output, count=0)
        value = float(loss.total.detach())
        sequences = [] if batch.indices is None else batch.indices.tolist()
        if math.isfinite(value):
            own.loss_sum += value
        else:
            own.num_nonfinite += 1
            self._bad = self._bad or (value, sequences)
        own.num_elements += loss.count
        num_steps, num_padded_steps = self._task.count_steps(batch)
        own.num_steps += num_steps
        own.num_padded_steps += num_padded_steps
        if self._time.time.is_rank0:
            own.num_sequences += len(batch)
            self._sequences += sequences
        return loss.total

    def _apply_gradient(self, total: UpdateStats) -> tuple[float, SplitNorms | None]:
        """Divide, clip and apply the gradient, unless it is NaN or inf; its norm, and those of its parts."""
        state, count = self._state, self._divisor or max(1, total.num_elements)
        norms = None if self._split is None else self._split.take(scale=1.0 / count)
        gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
        # DDP averaged the ranks' sums; the gradient wanted is the mean over all elements of all ranks.
        scale = self._world.size / count
        norm = scale * math.sqrt(squared_norm(state.model.parameters()))
        if math.isfinite(norm):
            # Divided and clipped in one pass.
            torch._foreach_mul_(gradients, scale * min(1.0, state.clip_norm / (norm + NORM_EPSILON)))
            state.optimizer.step()
        return norm, norms

    def _skip_or_raise(self, *, skip: bool) -> None:
        """Leave the update out, or stop all ranks in the same update with the same message."""
        self._state.optimizer.zero_grad(set_to_none=True)
        if skip:
            return
        value, sequences = self._bad or (math.nan, [])
        found = self._world.all_gather([value, float(self._bad is not None)])
        numbers = dict.fromkeys(gather_sequences(sequences, self._world, most=MAX_NAMED_SEQUENCES))
        first = next(value for value, is_bad in found if is_bad)
        raise diverged([*numbers], first, where=f"at update {self._state.num_updates + 1}, on training sequences")

    def _advance_schedule(self, *, is_skipped: bool) -> None:
        with warnings.catch_warnings() if is_skipped else contextlib.nullcontext():
            if is_skipped:
                # torch warns if the schedule advances before the optimiser, as when the first update is skipped.
                warnings.simplefilter("ignore", UserWarning)
            self._state.schedule.step()

    def _record_time(self, parameter: torch.Tensor) -> None:  # noqa: ARG002
        self._computed = time.perf_counter()
