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

from stretto.batching import Batch
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.files import write_atomically
from stretto.large_batch import Decision, refuse_larger_than_data
from stretto.nn import reset_carried
from stretto.training.background import BackgroundWriter
from stretto.training.batch_tuning import BatchTuning
from stretto.training.checkpoint import Checkpoint, load_newest, save_checkpoint, save_tensors
from stretto.training.evaluate import Evaluation, evaluate, sample_predictions
from stretto.training.events import AbstractLog
from stretto.training.outcome import EpochRecord, Interrupted, LoopResult
from stretto.training.position import Position
from stretto.training.solving import Solving
from stretto.training.state import EpochTotals, TrainState
from stretto.training.stopping import stop_on_signals
from stretto.training.task import AbstractTask
from stretto.training.time_ranks import TimeRanks
from stretto.training.update import Updater

__all__ = ["MODEL_FILE", "EpochRecord", "Interrupted", "LoopResult", "Trainer"]

MODEL_FILE: Final = "model.safetensors"
WORTH_DEALING: Final = 0.1
"""The least share of an epoch that is dealt anew in other batches: every deal ends in some that are not full."""


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
        feed: Deals the batches.
        state: What is trained.
        saving: Seconds in which training stood still for checkpoints.
    """

    def __init__(
        self, task: AbstractTask[Any], *, run: Path, log: AbstractLog, resume: bool, world: World | None = None
    ) -> None:
        self._task, self._run, self._log = task, run, log
        self._tuning: BatchTuning | None = None
        self._world = world or World()
        self._config = task.config
        self._valid = task.data.part("valid")
        self._time = TimeRanks(task, world=self._world)
        self.feed = task.feed(world=self._time.data)
        if self._config.base_batch_size is not None or self._config.batch_size == "auto":
            # The rate would be that of a batch which there is not.
            refuse_larger_than_data(self._first_batch, self.feed.num_sequences)
        # Once: it reads all the data, and a checkpoint should not have to.
        self._digest = task.data.digest()
        self._world.require_equal(
            "the data", self._digest, fix="Give every worker the same data, and the same --seed and sizes."
        )
        self._stop = threading.Event()
        self._writer = BackgroundWriter()
        self.saving = 0.0
        self._good: Checkpoint | None = None
        self._begun = self._started = time.perf_counter()
        self._random = torch.get_rng_state()
        with self._own_randomness():
            torch.manual_seed(self._config.seed)
            model = task.build_model().to(self._config.device)
            self._time.take_over(model)
            self.state = TrainState(
                model,
                config=self._config,
                steps_per_epoch=math.ceil(len(self.feed) / self._config.accumulate),
                batch_size=self._first_batch,
            )
            self._solving = Solving(model, config=self._config, world=self._world, edges=self.feed.edges)
            if self._config.batch_size == "auto":
                self._tuning = BatchTuning(task, self.state, self.feed, world=self._time.data)
            self._position = Position(
                self.state,
                self.feed,
                config=self._config,
                workers=self._time.data.size,
                tuning=self._tuning,
            )
            if resume:
                self._restore()
        self._updater = Updater(
            task,
            self.state,
            world=self._world,
            stop=self._stop,
            sharers=self._time.time,
            measures_noise=self._tuning is not None,
        )

    @property
    def _first_batch(self) -> int:
        """Sequences of an update at the beginning, over all workers and accumulated steps."""
        return int(self.feed.batch_size * self._time.data.size * self._config.accumulate)

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
            record = self._epoch()
            while record is None:
                record = self._epoch()
            return record

    def _epoch(self) -> EpochRecord | None:
        """Train to the end of the epoch under way; None if it is to go on with other batches."""
        state, tuning = self.state, self._tuning
        if tuning is not None and not tuning.is_probed:
            self._log.emit("probe", step=state.step, batch_size=state.batch_size, **tuning.probe())
        self.feed.begin_epoch(state.epoch, state.model)
        accumulate = self._position.accumulate
        self._updater.weigh(self.feed, accumulate=accumulate)
        self._solving.begin_epoch(state.epoch)
        saved = ended = time.perf_counter()
        num_batches = len(self.feed)
        state.model.train()
        for batch in self.feed:
            if state.used % accumulate == 0:
                self._updater.begin(measured=tuning is not None and tuning.is_measured(state.step))
                self._updater.skips = self._config.on_nan == "skip" or (tuning is not None and tuning.can_go_back)
            is_last = (state.used + 1) % accumulate == 0 or state.used + 1 == num_batches
            self._updater.add(self._time.cut(batch).to(self._config.device), is_last=is_last)
            self._solving.note(num_rows=len(batch))
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
            trouble = "" if tuning is None else tuning.observe(self._updater, batch)
            if trouble and self._is_taken_back(trouble):
                return None
            if state.used == num_batches:
                continue
            if tuning is not None and tuning.is_due and self._is_dealt_anew(tuning):
                return None
            if self._updater.taken.stop or (self._world.size == 1 and self._stop.is_set()):
                # Several workers stop at the step in which all hear of it.
                self._interrupt()
            if self._is_due(ended - saved):
                with self._updater.told_to_all():
                    self._save()
                saved = ended = time.perf_counter()
        record = self._end_epoch()
        asked_to_stop = bool(self._world.all_reduce_sum([float(self._stop.is_set())])[0])
        if asked_to_stop and state.epoch < self._config.epochs:
            self._interrupt()
        return record

    def _is_due(self, seconds: float) -> bool:
        """Whether to save within an epoch; where workers carry states, all must have a part in it."""
        due: bool = seconds >= 60 * self._config.checkpoint_minutes
        return self._world.all_reduce_sum([float(due and self._world.is_rank0)])[0] > 0 if self.feed.carries else due

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
        room = self.feed.batch_size * self._position.accumulate - len(numbers)
        found = self._world.all_gather([*map(float, numbers), *[-1.0] * room])
        return {"sequences": [int(number) for row in found for number in row if number >= 0]}

    def _emit_step(self, batch: Batch, sequences: dict[str, list[int]]) -> None:
        taken = self._updater.taken
        if taken.bad:
            # A state that is no number would spoil all that follow.
            reset_carried(self.state.model)
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
            **self._solving.last,
            **sequences,
        )

    def _end_epoch(self) -> EpochRecord:
        state, totals = self.state, self.state.totals
        evaluation = self._evaluate(self._valid)
        state.epoch += 1
        state.used = 0
        state.totals, clipped = EpochTotals(), state.clips.share or 0.0
        state.clips.reset()
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
            clipped=clipped,
            solving=self._solving.end_epoch(),
        )
        ranks = self._ranks(totals)
        with self._updater.told_to_all():
            self._log.emit("epoch", **record.to_event())
            if ranks:
                self._log.emit("ranks", epoch=state.epoch, step=state.step, **ranks)
        if self._tuning is not None and state.epoch < self._config.epochs:
            self._go_on(self._tuning.decide(state.epoch, clipped=record.clipped))
        with self._updater.told_to_all():
            self._save()
        self._updater.agree()
        return record

    def _ranks(self, totals: EpochTotals) -> dict[str, list[float]]:
        """How each of several workers fared: its own real steps, and the time it waited for the slowest."""
        waited, self._updater.waited = self._updater.waited, 0.0
        mine, self._updater.own_steps = self._updater.own_steps, 0
        found = self._world.all_gather([float(mine), waited, totals.seconds])
        if self._world.size == 1:
            return {}
        return {
            "steps_real": [int(row[0]) for row in found],
            "waited": [round(row[1], 4) for row in found],
            "seconds": [round(row[2], 4) for row in found],
        }

    def _evaluate(self, part: SequenceSet, *, final: bool = False, by_solver: bool = False) -> Evaluation:
        return evaluate(
            self._task,
            self.state.model,
            part,
            device=self._config.device,
            final=final,
            world=self._world,
            by_solver=by_solver,
        )

    def _finish(self) -> LoopResult:
        state, test = self.state, self._task.data.part("test")
        evaluation = self._evaluate(test, final=True)
        metrics = {**evaluation.metrics, "loss": evaluation.loss}
        if self._solving.differs_in_use:
            metric = self._task.metric
            metrics[f"{metric}_parallel"] = self._evaluate(test, final=True, by_solver=True).metrics[metric]
        with self._updater.told_to_all():
            self._wait_for_writer()
            if self._world.is_rank0:
                self._show(test)
        self._updater.agree()
        return LoopResult(
            metrics=metrics,
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
        samples = sample_predictions(self._task, state.model, test.subset(shown), device=self._config.device)
        self._log.emit("samples", items=[dataclasses.asdict(sample) for sample in samples])
        write_atomically(self._run / MODEL_FILE, lambda path: save_tensors(state.model.state_dict(), path))

    def _save(self) -> None:
        """Save what there is; it is written in the background."""
        state = self.state
        state.seconds = self._elapsed()
        begun = time.perf_counter()
        # An epoch begins with nothing carried.
        carried = self.feed.carried(state.model) if state.used else Checkpoint(tensors={}, state={})
        if self._tuning is None and not self._world.is_rank0:
            return
        taken = state.to_checkpoint(
            sampler=self.feed.state_dict(epoch=state.epoch, used=state.used),
            data_digest=self._digest,
            world_size=self._time.data.size,
        )
        taken = taken.joined(self._solving.to_checkpoint()).joined(carried)
        if self._tuning is not None:
            taken = taken.joined(Checkpoint(tensors={}, state={"tuning": self._tuning.state_dict()}))
        taken = taken.copied()
        if self._tuning is not None and self._tuning.can_go_back and not state.used:
            self._good = taken
        if not self._world.is_rank0:
            return
        step, keep = state.step, self._config.keep_checkpoints
        # What was told to be on disk is the newest there: another is begun after that.
        self._tell_saved(self._writer.wait())
        self._writer.begin(lambda: save_checkpoint(self._run, taken, step=step, keep=keep))
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
            self._solving.load(found.checkpoint)
        except (KeyError, RuntimeError, ValueError) as error:
            raise StrettoError(
                f"the checkpoint {str(found.path)!r} is of another model",
                fix="Resume with the data and settings that the run was started with.",
            ) from error
        self._world.require_equal(
            "the checkpoint to go on from",
            f"{found.path.name} {found.checkpoint.state['position']}",
            fix="Put the run folder where all workers see the same.",
        )
        if self._tuning is not None:
            self._tuning.load_state_dict(found.checkpoint.state["tuning"])
            self._good = found.checkpoint if self._tuning.can_go_back else None
        resumed = self.feed.load_state_dict(found.checkpoint.state["sampler"])
        self.feed.load_carried(found.checkpoint, self.state.model)
        if resumed.told:
            self._log.emit("warning", message=resumed.told)
        if resumed.is_dealt_anew:
            self.state.used = 0
            self._position.keep_schedule()
        self._log.emit(
            "resumed",
            world_size=self._world.size,
            step=self.state.step,
            epoch=self.state.epoch,
            batches=len(self.feed),
            epochs=self._config.epochs,
        )

    def _is_dealt_anew(self, tuning: BatchTuning) -> bool:
        """Decide on the batch within an epoch; whether what is left of it comes in other batches."""
        state, left = self.state, self._position.left
        if left < WORTH_DEALING:
            return False
        decision = tuning.decide(state.epoch + 1 - left, clipped=state.clips.share or 0.0)
        self._go_on(decision)
        if decision.action == "keep":
            return False
        with self._updater.told_to_all():
            self._save()
        return True

    def _go_on(self, decision: Decision) -> None:
        self._position.go_on(decision)
        told = {key: value for key, value in dataclasses.asdict(decision).items() if key not in ("lr", "epoch")}
        self._log.emit(
            "batch",
            epoch=self.state.epoch if decision.epoch is None else round(decision.epoch, 3),
            step=self.state.step,
            rate=decision.lr,
            steps_left=self._position.updates_left,
            **told,
        )

    def _is_taken_back(self, trouble: str) -> bool:
        """Return to the last good point and a smaller batch, if there is one."""
        state, good, tuning = self.state, self._good, self._tuning
        assert tuning is not None
        if good is None or not tuning.can_go_back:
            self._log.emit("warning", message=f"at step {state.step}: {trouble}")
            tuning.roll_back(trouble)
            return False
        # What was done in vain counts: updates have numbers of their own, and time is time.
        step, seconds = state.step, state.train_seconds
        state.load(good)
        state.step, state.train_seconds = step, seconds
        self._solving.load(good)
        self.feed.load_state_dict(good.state["sampler"])
        self.feed.load_carried(good, state.model)
        self._go_on(tuning.roll_back(trouble))
        with self._updater.told_to_all():
            self._save()
        return True

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
