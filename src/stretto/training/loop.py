"""The training loop: batches in, updates and events out; stoppable and resumable at any step."""

import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from stretto.batching.collate import Batch, collate
from stretto.batching.sampler import BucketSampler
from stretto.data.sequences import SequenceSet
from stretto.distributed.world import World
from stretto.errors import StrettoError
from stretto.storage import write_atomically
from stretto.training.background import BackgroundWriter
from stretto.training.checkpoint import load_newest, save_checkpoint, save_tensors
from stretto.training.evaluate import Evaluation, evaluate, show_readings
from stretto.training.events import AbstractLog
from stretto.training.state import EpochTotals, TrainState
from stretto.training.stopping import stop_on_signals
from stretto.training.task import AbstractTask
from stretto.training.update import Updater

MODEL_FILE: Final = "model.safetensors"


@final
class Interrupted(Exception):  # noqa: N818
    """Training was asked to stop; everything is saved."""

    def __init__(self, run: Path, *, step: int) -> None:
        super().__init__(f"stopped at step {step}, saved in {run}")
        self.run = run
        self.step = step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """One epoch in numbers, as the event of that name has them.

    Attributes:
        epoch: How many are done with this one.
        step: Updates since the start.
        train_loss: Mean over the epoch.
        valid_loss: On the validation part, after the epoch.
        metric: The task's metric.
        value: Its value on the validation part.
        seconds: Of the updates, the measuring left out.
        steps_per_second: Real time steps a second.
        padding: Share of slots that were padding.
    """

    epoch: int
    step: int
    train_loss: float
    valid_loss: float
    metric: str
    value: float
    seconds: float
    steps_per_second: float
    padding: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """How training ended; `saving` is the share of the time in which it stood still for checkpoints."""

    metrics: dict[str, float]
    epochs: int
    seconds: float
    padding: float
    steps_per_second: float
    saving: float
    model: nn.Module


@final
class Trainer:
    """Trains one model on one task.

    Args:
        task: Model, loss and metric.
        run: The run folder; checkpoints go there.
        log: Where events go.
        resume: Continue from the newest whole checkpoint in `run`.
        world: The workers that train together; one alone by default.

    Attributes:
        sampler: Deals the batches.
        state: What is trained.
        saving: Seconds in which training stood still for checkpoints.
    """

    def __init__(
        self, task: AbstractTask[Any], *, run: Path, log: AbstractLog, resume: bool, world: World | None = None
    ) -> None:
        self._task, self._run, self._log = task, run, log
        self._world = world or World()
        self._config = task.config
        _refuse_too_long(task.data, max_steps=self._config.max_steps)
        self._train = task.data.part("train")
        self._valid = task.data.part("valid")
        self.sampler = self._fresh_sampler()
        # Once: it reads all the data, and a checkpoint should not have to.
        self._digest = task.data.digest()
        self._world.refuse_differences(
            "the data", self._digest, fix="Give every worker the same data, and the same --seed and sizes."
        )
        self._stop = threading.Event()
        self._writer = BackgroundWriter()
        self.saving = 0.0
        self._begun = self._started = time.perf_counter()
        self._random = torch.get_rng_state()
        with self._own_randomness():
            torch.manual_seed(self._config.seed)
            model = task.build_model().to(self._config.device)
            self.state = TrainState(model, config=self._config, steps_per_epoch=self._updates(len(self.sampler)))
            if resume:
                self._restore()
        self._updater = Updater(task, self.state, world=self._world, stop=self._stop)

    def _fresh_sampler(self) -> BucketSampler:
        return BucketSampler(
            self._train.lengths_N,
            batch_size=self._config.batch_size,
            max_steps=self._config.max_steps,
            num_buckets=self._config.num_buckets,
            seed=self._config.seed,
            rank=self._world.rank,
            world_size=self._world.size,
        )

    def _updates(self, steps: int) -> int:
        each: int = self._config.accumulate
        return math.ceil(steps / each)

    def run(self) -> LoopResult:
        """Train to the last epoch and measure the test part."""
        self._started = time.perf_counter()
        self._begun = self._started - self.state.seconds
        try:
            with stop_on_signals(self._stop):
                while self.state.epoch < self._config.epochs:
                    self._train_epoch()
            return self._finish()
        finally:
            # Whatever ends it: a checkpoint that was begun is finished.
            self._writer.wait()

    def train_epoch(self) -> EpochRecord:
        """Train to the end of the epoch under way, measure the validation part, and save."""
        record = self._train_epoch()
        self._wait_for_writer()
        return record

    def _train_epoch(self) -> EpochRecord:
        with self._own_randomness():
            return self._epoch()

    def _epoch(self) -> EpochRecord:
        state = self.state
        self.sampler.set_epoch(state.epoch)
        saved = ended = time.perf_counter()
        loader: DataLoader[Batch] = DataLoader(
            self._train,  # type: ignore[arg-type]
            batch_sampler=self.sampler,
            collate_fn=collate,
            # A loader draws a seed when it begins; from the common generator, a resumed epoch would draw once more.
            generator=torch.Generator(),
        )
        num_batches = len(self.sampler)
        state.model.train()
        for batch in loader:
            if state.used % self._config.accumulate == 0:
                self._updater.begin()
            is_last = (state.used + 1) % self._config.accumulate == 0 or state.used + 1 == num_batches
            self._updater.add(batch.to(self._config.device), is_last=is_last)
            state.used += 1
            begun, ended = ended, time.perf_counter()
            state.totals.seconds += ended - begun
            state.train_seconds += ended - begun
            if not is_last:
                continue
            self._count()
            sequences = self._sequences()
            with self._updater.told_to_all():
                self._emit_step(batch, sequences)
                self._tell_saved(self._writer.poll())
            if state.used == num_batches:
                continue
            if self._updater.taken.stop or (self._world.size == 1 and self._stop.is_set()):
                # Several workers stop at the step in which all hear of it.
                self._interrupt()
            if ended - saved >= 60 * self._config.checkpoint_minutes:
                with self._updater.told_to_all():
                    self._save()
                saved = ended = time.perf_counter()
        record = self._end_epoch()
        asked_to_stop = bool(self._world.total([float(self._stop.is_set())])[0])
        if asked_to_stop and state.epoch < self._config.epochs:
            self._interrupt()
        return record

    def _count(self) -> None:
        state, taken = self.state, self._updater.taken
        state.step += 1
        state.totals.loss += taken.loss
        state.totals.count += int(taken.count)
        for sums in (state.totals, state):
            sums.steps_real += int(taken.steps_real)
            sums.slots += int(taken.slots)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._begun

    def _sequences(self) -> dict[str, list[int]]:
        """The sequences of the update, over all workers, if they are to be recorded."""
        if not self._config.record_sequences:
            return {}
        numbers = self._updater.numbers
        room = self._config.batch_size * self._config.accumulate - len(numbers)
        found = self._world.gathered([*map(float, numbers), *[-1.0] * room])
        return {"sequences": [int(number) for row in found for number in row if number >= 0]}

    def _emit_step(self, batch: Batch, sequences: dict[str, list[int]]) -> None:
        taken = self._updater.taken
        if taken.bad:
            self._log.emit("warning", message=f"step {self.state.step} was skipped: its loss or gradient is no number")
            return
        self._log.emit(
            "step",
            step=self.state.step,
            epoch=self.state.epoch,
            rows=int(taken.rows),
            length=batch.features_BTF.shape[1],
            steps_real=int(taken.steps_real),
            slots=int(taken.slots),
            seconds=round(self._elapsed(), 4),
            **self._updater.last,
            **sequences,
        )

    def _end_epoch(self) -> EpochRecord:
        state, totals = self.state, self.state.totals
        evaluation = self._evaluate(self._valid)
        state.epoch += 1
        state.used = 0
        state.totals = EpochTotals()
        record = EpochRecord(
            epoch=state.epoch,
            step=state.step,
            train_loss=totals.loss / max(1, totals.count),
            valid_loss=evaluation.loss,
            metric=self._task.metric,
            value=evaluation.metrics[self._task.metric],
            seconds=totals.seconds,
            steps_per_second=totals.steps_real / max(1e-9, totals.seconds),
            padding=1.0 - totals.steps_real / max(1, totals.slots),
        )
        ranks = self._ranks(totals)
        with self._updater.told_to_all():
            self._log.emit("epoch", **dataclasses.asdict(record))
            if ranks:
                self._log.emit("ranks", epoch=state.epoch, step=state.step, **ranks)
            self._save()
        self._updater.agree()
        return record

    def _ranks(self, totals: EpochTotals) -> dict[str, list[float]]:
        """How each of several workers fared: its own real steps, and the time it waited for the slowest."""
        waited, self._updater.waited = self._updater.waited, 0.0
        mine, self._updater.own_steps = self._updater.own_steps, 0
        found = self._world.gathered([float(mine), waited, totals.seconds])
        if self._world.size == 1:
            return {}
        return {
            "steps_real": [int(row[0]) for row in found],
            "waited": [round(row[1], 4) for row in found],
            "seconds": [round(row[2], 4) for row in found],
        }

    def _evaluate(self, part: SequenceSet, *, final: bool = False) -> Evaluation:
        return evaluate(self._task, self.state.model, part, device=self._config.device, final=final, world=self._world)

    def _finish(self) -> LoopResult:
        state, test = self.state, self._task.data.part("test")
        evaluation = self._evaluate(test, final=True)
        with self._updater.told_to_all():
            self._wait_for_writer()
            if self._world.is_first:
                self._show(test)
        self._updater.agree()
        return LoopResult(
            metrics={**evaluation.metrics, "loss": evaluation.loss},
            epochs=state.epoch,
            seconds=self._elapsed(),
            padding=1.0 - state.steps_real / max(1, state.slots),
            steps_per_second=state.steps_real / max(1e-9, state.train_seconds),
            saving=self.saving / max(1e-9, time.perf_counter() - self._started),
            model=state.model,
        )

    def _show(self, test: SequenceSet) -> None:
        state = self.state
        shown = np.random.default_rng(self._config.seed).permutation(len(test))[:12]
        readings = show_readings(self._task, state.model, test.subset(shown), device=self._config.device)
        self._log.emit("samples", items=[dataclasses.asdict(reading) for reading in readings])
        write_atomically(self._run / MODEL_FILE, lambda path: save_tensors(state.model.state_dict(), path))

    def _save(self) -> None:
        """Save what there is; it is written in the background."""
        state = self.state
        state.seconds = self._elapsed()
        if not self._world.is_first:
            return
        begun = time.perf_counter()
        taken = state.to_checkpoint(
            sampler=self.sampler.state_dict(epoch=state.epoch, used=state.used),
            data_digest=self._digest,
            world_size=self._world.size,
        ).copied()
        step, keep = state.step, self._config.keep_checkpoints
        self._tell_saved(self._writer.begin(lambda: save_checkpoint(self._run, taken, step=step, keep=keep)))
        self.saving += time.perf_counter() - begun

    def _wait_for_writer(self) -> None:
        """Until the last checkpoint is on disk."""
        begun = time.perf_counter()
        self._tell_saved(self._writer.wait())
        self.saving += time.perf_counter() - begun

    def _tell_saved(self, path: Path | None) -> None:
        if path is not None:
            step = int(path.name.rpartition("-")[2])
            self._log.emit("checkpoint", step=step, path=str(path.relative_to(self._run)))

    def _restore(self) -> None:
        found = load_newest(self._run)
        for message in found.refused:
            self._log.emit("warning", message=message)
        if found.checkpoint.state["data_digest"] != self._digest:
            raise StrettoError(
                f"the data {self._task.data.name!r} is not what the run in {str(self._run)!r} was trained on",
                fix="Resume with the same data, or start a new run.",
            )
        try:
            self.state.load(found.checkpoint)
        except (KeyError, RuntimeError, ValueError) as error:
            raise StrettoError(
                f"the checkpoint {str(found.path)!r} is of another model",
                fix="Resume with the data and settings that the run was started with.",
            ) from error
        self._world.refuse_differences(
            "the checkpoint to go on from",
            f"{found.path.name} {found.checkpoint.state['position']}",
            fix="Put the run folder where all workers see the same.",
        )
        self.sampler.load_state_dict(found.checkpoint.state["sampler"])
        if found.checkpoint.state["world_size"] != self._world.size:
            self._go_on_with_other_workers()
        self._log.emit(
            "resumed",
            workers=self._world.size,
            step=self.state.step,
            epoch=self.state.epoch,
            batches=len(self.sampler),
            epochs=self._config.epochs,
        )

    def _go_on_with_other_workers(self) -> None:
        """What is left of the epoch was dealt anew; the schedule keeps its place, counted in the new, other updates."""
        state, epochs = self.state, self._config.epochs
        state.used = 0
        left = len(self.sampler.plan.unused(0)) / max(1, len(self._train))
        remaining = self._updates(len(self.sampler)) + (epochs - state.epoch - 1) * self._updates(
            len(self._fresh_sampler())
        )
        progress = (state.epoch + 1 - left) / epochs
        state.reschedule(self._config, done=round(remaining * progress / (1 - progress)), remaining=remaining)

    def _interrupt(self) -> None:
        with self._updater.told_to_all():
            self._save()
            self._wait_for_writer()
        self._updater.agree()
        self._log.emit("interrupted", step=self.state.step)
        raise Interrupted(self._run, step=self.state.step)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """The trainer's random state instead of the process's, from which others draw, and other trainers too."""
        earlier = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            yield
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(earlier)


def _refuse_too_long(data: SequenceSet, *, max_steps: int | None) -> None:
    """The cap holds for training and measuring alike, and the message has the sequence's number in the file."""
    longest = int(data.lengths_N.argmax())
    if max_steps is not None and data.lengths_N[longest] > max_steps:
        raise StrettoError(
            f"{data.name}: sequence {data.numbers_N[longest]} has {data.lengths_N[longest]} steps, "
            f"more than max_steps={max_steps}",
            fix="Raise --max-steps to at least that, or shorten or remove the sequence.",
        )
