"""The training loop: batches in, updates and events out; it can be stopped and resumed after any update.

    feed -> updater -> state, events -> batch policy -> checkpoints

Only the trainer changes the position of a run: epoch, batches done and updates made. Errors of rank 0 alone,
in writing events or checkpoints, are deferred (`DeferredErrors`) until all ranks can raise them in the same update.
"""

import contextlib
import dataclasses
import itertools
import math
import signal
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import safetensors.torch
import torch
from torch import nn

from stretto.batching import Batch, shuffled_padded_steps
from stretto.data import PARTS, SequenceSet, StepLabels
from stretto.distributed import DeferredErrors, World, handle_signals
from stretto.errors import StrettoError
from stretto.files import write_atomically
from stretto.nn import reset_carried
from stretto.training.batch_policy import BatchPolicy, Replan, TunedBatch
from stretto.training.checkpoint import (
    BEST_FILE,
    CHECKPOINT_FOLDER,
    Checkpoint,
    CheckpointWriter,
    FoundCheckpoint,
    load_newest,
    save_tensors,
)
from stretto.training.config import check_compatible
from stretto.training.evaluate import Evaluation, evaluate, sample_predictions
from stretto.training.events import AbstractLog, DeferredLog
from stretto.training.feeds import read_ahead
from stretto.training.solver import SolverMonitor, SolverRecord, TimeParallelSetup, summarize_solver
from stretto.training.state import POSITION, EpochTotals, TrainState
from stretto.training.task import AbstractTask
from stretto.training.update import Update, Updater, gather_sequences

MODEL_FILE: Final = "model.safetensors"
TARGETS: Final = {"accuracy": (0.0, 1.0), "cer": (0.0, 1.0), "perplexity": (1.0, math.inf), "bleu": (0.0, 100.0)}
"""What a metric can be, best and worst values included."""
NUM_SAMPLES: Final = 12
"""Test sequences shown in the report."""


@final
class Interrupted(Exception):  # noqa: N818
    """Training was asked to stop; everything is saved."""

    def __init__(self, run: Path, *, update: int) -> None:
        super().__init__(f"stopped at update {update}, saved in {run}")
        self.run = run
        self.update = update


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """One epoch in numbers, as in its event; `value` is the task's metric on the validation part."""

    epoch: int
    """Epochs done, with this one."""
    update: int
    train_loss: float
    valid_loss: float
    metric: str
    value: float
    seconds: float
    """Of the updates, without evaluation."""
    steps_per_second: float
    """Real time steps."""
    padding: float
    """Share of padded steps that were padding."""
    clipped: float
    """Share of updates whose gradient was clipped."""
    solving: SolverRecord | None = None
    """None, and not in the event, if all layers ran sequentially."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended: what `stretto.train` returns, the event `finished` and `result.json`.

    Attributes:
        metrics: On the test part: the task's metric, and `loss`; of the last weights, or of the best with `patience` or
            `auto`.
        epochs: Passes over the training data.
        seconds: Wall clock, resumed parts included, opening the data excluded.
        padding: Share of padded steps that were padding.
        steps_per_second: Real time steps trained per second.
        checkpoint_overhead: Share of the time in which training waited for checkpoints, since it was last resumed.
        padded_steps_ratio: How many times more padded steps shuffled batches would have had.
        solving: What the solver of the recurrent layers reported: batches, those that fell back, the last and the
            largest residual, the mean of each epoch, and memory; None where all ran sequentially.
        settings: As they were used.
        run: The folder with the events, the model, checkpoints and `result.json`.
        report: The HTML page; None if it was not written, for example without plotly.
        model: The trained model.
    """

    metrics: dict[str, float]
    epochs: int
    seconds: float
    padding: float
    steps_per_second: float
    checkpoint_overhead: float
    padded_steps_ratio: float
    solving: dict[str, Any] | None
    settings: dict[str, Any]
    run: Path
    report: Path | None = None
    model: nn.Module = dataclasses.field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the model and the page, JSON-ready."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("report", "model")]
        return {name: getattr(self, name) for name in names} | {"run": str(self.run)}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a run, with settings of its own: its number, and the epochs and the time before it.

    Later parts begin with the best weights so far, or with new ones, and with a new optimiser and schedule.
    """

    number: int = 0
    first_epoch: int = 0
    first_seconds: float = 0.0
    begins_anew: bool = False


@final
class Trainer:
    """Trains one model on one task.

    Args:
        task: Model, loss and metric.
        run: The run folder; checkpoints go there.
        log: Where events go.
        resume: Continue from the newest complete checkpoint in `run`.
        world: The ranks that train together; one alone by default.
        part: Which part of the run in `run` this is; `epochs` of the settings is where it ends.

    Attributes:
        model: What is trained.
        feed: Gives the batches.
        state: Model, optimiser, schedule and position.
        policy: Chooses the batch size.
        part: Which part of the run this is.
        updates_per_epoch: Updates of an epoch, with the batch of the settings.
        digest: Of the data.
        log: Where events go; its errors are deferred.
    """

    def __init__(
        self,
        task: AbstractTask[Any],
        *,
        run: Path,
        log: AbstractLog,
        resume: bool,
        world: World | None = None,
        part: Part | None = None,
    ) -> None:
        self._task, self._run, self._config, self.part = task, run, task.config, part or Part()
        self._world = world = world or World()
        config = self._config
        fix = "Start all ranks with the same --time-parallel."
        world.require_equal("time_parallel", str(config.time_parallel), fix=fix)
        check_compatible(
            config,
            task=task.name,
            world_size=world.size,
            has_step_labels=isinstance(task.data.targets, StepLabels),
        )
        for name in PARTS:
            # Before anything is written: an epoch ends with the validation part, and a run with the test part.
            task.data.part(name)
        self._errors = DeferredErrors(world)
        self.log: AbstractLog = DeferredLog(log, self._errors)
        self._time = TimeParallelSetup(config.time_parallel, world=world, timeout_minutes=config.rank_timeout_minutes)
        self.feed = task.feed(world=self._time.data)
        batch_size, most = self.feed.batch_size * self._time.data.size * config.accumulate, self.feed.num_sequences
        if (config.base_batch_size is not None or config.batch_size == "auto") and batch_size > most:
            # The learning rate would follow a batch that cannot be filled.
            raise StrettoError(
                f"a batch of {batch_size} sequences is larger than the data, which has {most} to train on",
                fix=f"Give a batch size of at most {most}.",
            )
        lowest, highest = TARGETS.get(task.metric, (-math.inf, math.inf))
        if config.reach is not None and not lowest <= config.reach <= highest:
            raise StrettoError(
                f"reach={config.reach:g} cannot be reached: {task.metric} is between {lowest:g} and {highest:g}",
                fix="Give a value in that range.",
            )
        # Once: it reads all the data, and a checkpoint should not have to.
        self.digest = task.data.digest()
        world.require_equal("the data", self.digest, fix="Give every rank the same data, --seed and sizes.")
        self._stop = threading.Event()
        self._writer = CheckpointWriter(run, keep=config.keep_checkpoints, log=self.log, errors=self._errors)
        self._own_steps, self._waited = 0, 0.0
        self._best: dict[str, float] = {}
        self._best_model: dict[str, torch.Tensor] = {}
        self._run_start = self._part_start = time.perf_counter()
        self._random = torch.get_rng_state()
        with self._own_randomness():
            torch.manual_seed(config.seed)
            self.model = model = task.build_model().to(config.device)
            self._time.set_solvers(model)
            self.updates_per_epoch = math.ceil(len(self.feed) / config.accumulate)
            self.state = TrainState(
                model,
                config=config,
                updates_per_epoch=self.updates_per_epoch,
                batch_size=batch_size,
                first_epoch=self.part.first_epoch,
            )
            self._monitor = SolverMonitor(model, config=config, world=world, edges=self.feed.edges)
            self.policy = (
                TunedBatch(task, self.state, self.feed, world=self._time.data, log=self.log)
                if config.batch_size == "auto"
                else BatchPolicy(batch_size=self.feed.batch_size, accumulate=config.accumulate)
            )
            if resume:
                self._resume()
            else:
                self.state.seconds = self.part.first_seconds
                self.state.padded_steps_ratio = self._padded_steps_ratio()
                if self.part.number and any((run / CHECKPOINT_FOLDER).glob("update-*")):
                    self._begin_part()
        self._updater = Updater(
            task,
            self.state,
            world=world,
            stop=self._stop,
            errors=self._errors,
            time_parallel=self._time,
            measures_noise=self.policy.measures_noise,
            on_batch=self._monitor.observe,
        )

    def run(self) -> RunResult:
        """Train to the last epoch and evaluate on the test part."""
        self.train()
        return self.finish()

    def train(self) -> dict[str, float]:
        """Train to the last epoch of the part; the metric after it and after the part's best: `value` and `best`."""
        self._part_start = time.perf_counter()
        self._run_start = self._part_start - self.state.seconds
        try:
            with stop_on_signals(self._stop):
                while not self._is_over():
                    self._train_epoch()
        finally:
            # However training ends, a checkpoint that is being written is completed.
            self._writer.wait()
        self._errors.raise_on_all()
        return {"value": self._best.get("last", math.nan), "best": self._best.get("of_part", math.nan)}

    def interrupt_if_asked(self) -> None:
        """Stop here, where a part has ended, if any rank was asked to stop in its last epoch."""
        if self._world.all_reduce_sum([float(self._stop.is_set())])[0]:
            self._interrupt()

    def finish(self) -> RunResult:
        """Evaluate on the test part, and write the model."""
        try:
            return self._finish()
        finally:
            self._writer.wait()

    def _is_over(self) -> bool:
        """Whether the last epoch is done, or one that settings make the last."""
        config, epoch = self._config, self.state.epoch
        if epoch >= config.epochs:
            return True
        reason = ""
        best = self._best.get("value", math.nan)
        if config.reach is not None and (best == config.reach or self._is_better(best, than=config.reach)):
            reason = f"{self._task.metric} has reached {config.reach:.4g}"
        elif config.patience is not None and epoch - self._best.get("epoch", epoch) >= config.patience:
            reason = f"{config.patience} epochs without a better {self._task.metric}"
        elif config.max_hours is not None and epoch:
            # Ranks have clocks of their own.
            late = self._elapsed() >= 3600 * config.max_hours
            if self._world.all_reduce_sum([float(late and self._world.is_rank0)])[0]:
                reason = f"{config.max_hours:g} hours are over"
        if reason:
            self.log.emit("stopped_early", epoch=epoch, update=self.state.num_updates, reason=reason)
        return bool(reason)

    def train_epoch(self) -> EpochRecord:
        """Train to the end of the current epoch, evaluate on the validation part, and save.

        Epochs beyond those of the settings are trained at the last rate of the schedule.
        """
        if self.state.epoch >= self._config.epochs:
            self.state.hold_rate()
        record = self._train_epoch()
        self._writer.wait()
        return record

    def _train_epoch(self) -> EpochRecord:
        with self._own_randomness():
            is_done = False
            while not is_done:
                is_done = self._run_plan()
            record = self._end_epoch()
            # All ranks stop if any was asked to.
            stops = self._world.all_reduce_sum([float(self._stop.is_set())])[0]
            if stops and self.state.epoch < self._config.epochs:
                self._interrupt()
            return record

    def _run_plan(self) -> bool:
        """Make the updates of the feed's current plan; whether the epoch is done, or was re-planned on the way."""
        state, policy = self.state, self.policy
        policy.begin_plan()
        self.feed.begin_epoch(state.epoch, state.model)
        self._updater.weigh(self.feed, accumulate=policy.accumulate)
        self._monitor.begin_epoch(state.epoch)
        state.model.train()
        with contextlib.closing(self._batches()) as batches:
            return self._run_batches(batches, num_batches=len(self.feed))

    def _batches(self) -> Generator[Batch, None, None]:
        """Those of the current plan that are not done."""
        most = len(self.feed) - self.state.batches_done
        device = self._config.device if self.feed.can_read_ahead else "cpu"
        return read_ahead(iter(self.feed), device=device, most=most)

    def _run_batches(self, batches: Generator[Batch, None, None], *, num_batches: int) -> bool:
        """Make an update of each batch, or of several; whether none are left."""
        state, policy, is_alone = self.state, self.policy, self._world.size == 1
        saved = clock = time.perf_counter()
        while state.batches_done < num_batches:
            update = self._updater.update(
                itertools.islice(batches, policy.accumulate),
                measure_noise=policy.wants_noise(),
                skip_nonfinite=self._config.on_nan == "skip" or policy.can_roll_back,
            )
            now = time.perf_counter()
            seconds, clock = now - clock, now
            self._count(update, num_batches=min(policy.accumulate, num_batches - state.batches_done), seconds=seconds)
            self._record(update)
            replan = policy.after_update(update, left=self._share_left)
            if replan is not None and replan.decision.action != "keep":
                # The feed changes: nobody may be reading ahead.
                batches.close()
            if self._apply(replan):
                self._save()
                return False
            if state.batches_done == num_batches:
                break
            if self._stop.is_set() if is_alone else update.total.num_stops:
                # Several ranks stop in the update in which all learn of it.
                self._interrupt()
            if self._is_checkpoint_due(clock - saved):
                self._save()
                saved = clock = time.perf_counter()
        return True

    def _count(self, update: Update, *, num_batches: int, seconds: float) -> None:
        state, total = self.state, update.total
        state.num_updates += 1
        state.batches_done += num_batches
        if math.isfinite(update.gradient_norm):
            state.totals.num_norms += 1
            state.totals.num_clipped += update.gradient_norm > state.clip_norm
        state.totals.loss += total.loss_sum
        state.totals.count += total.num_elements
        state.totals.seconds += seconds
        state.train_seconds += seconds
        for sums in (state.totals, state):
            sums.steps_real += total.num_steps
            sums.padded_steps += total.num_padded_steps
        self._own_steps += update.num_steps
        self._waited += update.waited

    def _record(self, update: Update) -> None:
        """Record an update, and a checkpoint that has been written meanwhile."""
        state, total = self.state, update.total
        sequences: dict[str, list[int]] = {}
        if self._config.record_sequences:
            most = self.feed.batch_size * self.policy.accumulate
            sequences["sequences"] = gather_sequences(update.sequences, self._world, most=most)
        if update.is_skipped:
            # A carried state that is NaN would spoil all that follow.
            reset_carried(state.model)
            self.log.emit(
                "warning", message=f"update {state.num_updates} was skipped: its loss or gradient is NaN or inf"
            )
        else:
            self.log.emit(
                "update",
                update=state.num_updates,
                epoch=state.epoch,
                rows=total.num_sequences,
                length=update.batch.features_BTF.shape[1],
                steps_real=total.num_steps,
                padded_steps=total.num_padded_steps,
                seconds=round(self._elapsed(), 4),
                loss=update.loss,
                gradient_norm=update.gradient_norm,
                rate=update.rate,
                **self._monitor.last,
                **sequences,
            )
        self._writer.poll()

    def _apply(self, replan: Replan | None) -> bool:
        """Do what the batch policy asks for; whether the rest of the epoch was re-planned."""
        if replan is None:
            return False
        state, decision, checkpoint = self.state, replan.decision, replan.checkpoint
        state.clip_norm = replan.clip_norm
        if checkpoint is not None:
            # Updates that are rolled back count: they have numbers of their own, and took time.
            num_updates, seconds = state.num_updates, state.train_seconds
            state.load(checkpoint)
            state.num_updates, state.train_seconds = num_updates, seconds
            self._monitor.load(checkpoint)
            self.feed.load_state_dict(checkpoint.state["sampler"])
            self.feed.load_carried(checkpoint, state.model)
        if not state.batches_done:
            self.feed.begin_epoch(state.epoch, state.model)
        if decision.action != "keep":
            self.feed.resize(self.policy.batch_size, batches_done=state.batches_done)
            state.batches_done = 0
            self._reschedule()
        values = {key: value for key, value in dataclasses.asdict(decision).items() if key not in ("lr", "epoch")}
        self.log.emit(
            "batch",
            epoch=state.epoch if decision.epoch is None else round(decision.epoch, 3),
            update=state.num_updates,
            rate=decision.lr,
            updates_left=self._updates_left,
            **values,
        )
        return decision.action != "keep"

    @property
    def _share_left(self) -> float:
        """The share of the current epoch that is left."""
        return self.feed.left * (1 - self.state.batches_done / max(1, len(self.feed)))

    @property
    def _updates_left(self) -> int:
        """Updates until the end of the run, if batches stay as they are."""
        plans = [len(self.feed) - self.state.batches_done]
        plans += [self.feed.whole_epoch] * (self._config.epochs - self.state.epoch - 1)
        return sum(math.ceil(num_batches / self.policy.accumulate) for num_batches in plans)

    def _reschedule(self) -> None:
        """Let the schedule keep its place in the run, counted in updates of the batches from now on."""
        left = self._updates_left
        first = self.part.first_epoch
        progress = (self.state.epoch + 1 - self._share_left - first) / (self._config.epochs - first)
        self.state.reschedule(
            done=round(left * progress / (1 - progress)),
            remaining=left,
            batch_size=self.feed.batch_size * self._time.data.size * self.policy.accumulate,
        )

    def _end_epoch(self) -> EpochRecord:
        state, totals = self.state, self.state.totals
        self._check_num_elements()
        evaluation = self._evaluate(self._task.data.part("valid"))
        state.epoch += 1
        state.batches_done = 0
        state.totals = EpochTotals()
        record = EpochRecord(
            epoch=state.epoch,
            update=state.num_updates,
            train_loss=totals.loss / max(1, totals.count),
            valid_loss=evaluation.loss,
            metric=self._task.metric,
            value=evaluation.metrics[self._task.metric],
            seconds=totals.seconds,
            steps_per_second=totals.steps_real / max(1e-9, totals.seconds),
            padding=1.0 - totals.steps_real / max(1, totals.padded_steps),
            clipped=totals.clipped,
            solving=self._monitor.end_epoch(),
        )
        values = dataclasses.asdict(record)
        if record.solving is None:
            del values["solving"]
        self.log.emit("epoch", **values)
        self._record_ranks(totals.seconds)
        if state.epoch < self._config.epochs:
            self._apply(self.policy.after_epoch(clipped=totals.clipped))
        self._save(is_best=self._is_best(record))
        self._errors.raise_on_all()
        return record

    def _is_best(self, record: EpochRecord) -> bool:
        """Whether no epoch before had as good a metric; if so it is remembered."""
        self._best["last"] = record.value
        if self._is_better(record.value, than=self._best.get("of_part")):
            self._best["of_part"] = record.value
        if not self._is_better(record.value, than=self._best.get("value")):
            return False
        self._best |= {"value": record.value, "epoch": record.epoch}
        if self._config.tests_best:
            self._best_model = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        return True

    def _is_better(self, value: float, *, than: float | None) -> bool:
        """Whether a value of the metric is better than another, or is the first."""
        if than is None:
            return True
        return value > than if self._task.higher_is_better else value < than

    def _record_ranks(self, seconds: float) -> None:
        """Record how each of several ranks did: its own real steps, and the time it waited for the slowest."""
        found = self._world.all_gather([float(self._own_steps), self._waited, seconds])
        self._own_steps, self._waited = 0, 0.0
        if self._world.size > 1:
            self.log.emit(
                "ranks",
                epoch=self.state.epoch,
                update=self.state.num_updates,
                steps_real=[int(row[0]) for row in found],
                waited=[round(row[1], 4) for row in found],
                seconds=[round(row[2], 4) for row in found],
            )

    def _check_num_elements(self) -> None:
        """Compare the task's count of elements, which updates are divided by, with the losses of the first epoch."""
        counted, said = self.state.totals.count, self._updater.num_elements
        if self.state.epoch == 0 and said is not None and counted != said:
            raise StrettoError(
                f"the task {self._task.name!r} says that its training part has num_elements={said}, but its losses of "
                f"the first epoch were sums over {counted} elements, so all updates were scaled wrongly",
                fix=f"Let {type(self._task).__name__}.num_elements return the sum of LossSum.count over all sequences.",
            )

    def _evaluate(self, part: SequenceSet, **options: bool) -> Evaluation:
        return evaluate(self._task, self.state.model, part, device=self._config.device, world=self._world, **options)

    def _finish(self) -> RunResult:
        state, test = self.state, self._task.data.part("test")
        last = state.model.state_dict()
        if self._best_model:
            last = {name: tensor.clone() for name, tensor in last.items()}
            state.model.load_state_dict(self._best_model)
        evaluation = self._evaluate(test, final=True)
        metrics = {**evaluation.metrics, "loss": evaluation.loss}
        if self._monitor.differs_in_use:
            metric = self._task.metric
            metrics[f"{metric}_parallel"] = self._evaluate(test, final=True, by_solver=True).metrics[metric]
        self._writer.wait()
        if self._world.is_rank0:
            with self._errors.defer():
                if evaluation.confusion is not None:
                    self.log.emit("confusion", **dataclasses.asdict(evaluation.confusion))
                self._record_samples(test)
                write_atomically(self._run / MODEL_FILE, lambda path: save_tensors(last, path))
        self._errors.raise_on_all()
        return RunResult(
            metrics=metrics,
            epochs=state.epoch,
            seconds=round(self._elapsed(), 3),
            padding=1.0 - state.steps_real / max(1, state.padded_steps),
            steps_per_second=round(state.steps_real / max(1e-9, state.train_seconds), 1),
            checkpoint_overhead=round(self._writer.seconds / max(1e-9, time.perf_counter() - self._part_start), 6),
            padded_steps_ratio=state.padded_steps_ratio,
            solving=summarize_solver(self._monitor.epochs),
            settings={"task": self._task.name, **self._config.recorded()},
            run=self._run,
            model=state.model,
        )

    def _record_samples(self, test: SequenceSet) -> None:
        state = self.state
        chosen = np.random.default_rng(self._config.seed).permutation(len(test))[:NUM_SAMPLES]
        samples = sample_predictions(self._task, state.model, test.subset(chosen), device=self._config.device)
        self.log.emit("samples", items=[dataclasses.asdict(sample) for sample in samples])

    def _padded_steps_ratio(self) -> float:
        lengths, config = self._task.bucket_lengths(self._task.data.part("train")), self._config
        shuffled = shuffled_padded_steps(
            lengths,
            batch_size=config.first_batch_size,
            max_padded_steps=config.max_padded_steps,
            seed=config.seed,
        )
        padding: float = self.feed.report()["padding"]
        return shuffled * (1.0 - padding) / int(lengths.sum())

    def _elapsed(self) -> float:
        return time.perf_counter() - self._run_start

    def _is_checkpoint_due(self, seconds: float) -> bool:
        """Whether to save within an epoch. Where states are carried, all ranks must, so rank 0's clock decides."""
        due: bool = seconds >= 60 * self._config.checkpoint_minutes
        if not self.feed.carries:
            return due
        return self._world.all_reduce_sum([float(due and self._world.is_rank0)])[0] > 0

    def _save(self, *, is_best: bool = False) -> None:
        """Begin to write a checkpoint; where states are carried, all ranks must call."""
        state, world = self.state, self._world
        start, state.seconds = time.perf_counter(), self._elapsed()
        # An epoch begins with nothing carried.
        carried = self.feed.carried(state.model) if state.batches_done else Checkpoint()
        if not (world.is_rank0 or self.policy.can_roll_back):
            return
        saved = state.to_checkpoint(
            sampler=self.feed.state_dict(epoch=state.epoch, batches_done=state.batches_done),
            data_digest=self.digest,
            world_size=self._time.data.size,
        )
        saved.state["best"] = dict(self._best)
        saved.state["part"] = dataclasses.asdict(self.part)
        checkpoint = saved.merge(self._monitor.to_checkpoint(), self.policy.to_checkpoint(), carried).copy()
        if not state.batches_done:
            self.policy.keep(checkpoint)
        if world.is_rank0:
            seconds = time.perf_counter() - start
            self._writer.begin(checkpoint, update=state.num_updates, seconds=seconds, is_best=is_best)

    def _begin_part(self) -> None:
        """Begin a part with the best weights so far or new ones, after the updates and epochs of the part before."""
        state, last = self.state, load_newest(self._run).checkpoint.state
        for name in POSITION:
            setattr(state, name, last["position"][name])
        state.seconds = max(state.seconds, self.part.first_seconds)
        state.batches_done = 0
        self._best = {name: value for name, value in last["best"].items() if name != "of_part"}
        self._best_model = safetensors.torch.load_file(self._run / BEST_FILE)
        if not self.part.begins_anew:
            state.model.load_state_dict(self._best_model)

    def _resume(self) -> None:
        found = load_newest(self._run)
        checkpoint = found.checkpoint
        for message in found.refused:
            self.log.emit("warning", message=message)
        try:
            self._continue_from(found, checkpoint)
        except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
            # Files that a run wrote have the form that is read here; others may have been signed as well.
            raise StrettoError(
                f"the checkpoint {str(found.path)!r} is of another form ({error!r})",
                fix="Remove it to resume from the one before, or start a new run.",
            ) from error

    def _continue_from(self, found: FoundCheckpoint, checkpoint: Checkpoint) -> None:
        if checkpoint.state["data_digest"] != self.digest:
            raise StrettoError(
                f"the data {self._task.data.name!r} is not what the run in {str(self._run)!r} was trained on",
                fix="Resume with the same data, or start a new run.",
            )
        try:
            self.state.load(checkpoint)
            self._monitor.load(checkpoint)
        except (KeyError, RuntimeError, ValueError) as error:
            raise StrettoError(
                f"the checkpoint {str(found.path)!r} is of another model",
                fix="Resume with the data and settings that the run was started with.",
            ) from error
        self._world.require_equal(
            "the checkpoint to resume from",
            f"{found.path.name} {checkpoint.state['position']}",
            fix="Put the run folder where all ranks see the same.",
        )
        self._best = checkpoint.state.get("best", {})
        if self._best and self._config.tests_best:
            self._best_model = safetensors.torch.load_file(self._run / BEST_FILE)
        self.policy.load(checkpoint)
        is_replanned, message = self.feed.load_state_dict(checkpoint.state["sampler"])
        self.feed.load_carried(checkpoint, self.state.model)
        if message:
            self.log.emit("warning", message=message)
        if is_replanned:
            self.state.batches_done = 0
            self._reschedule()
        self.log.emit(
            "resumed",
            world_size=self._world.size,
            update=self.state.num_updates,
            epoch=self.state.epoch,
            batches=len(self.feed),
            epochs=self._config.epochs,
        )

    def _interrupt(self) -> None:
        self._save()
        self._writer.wait()
        self.log.emit("interrupted", update=self.state.num_updates)
        self._errors.raise_on_all()
        raise Interrupted(self._run, update=self.state.num_updates)

    @contextlib.contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """The trainer's random state instead of the process's, so that others can draw, and other trainers too."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            try:
                yield
            finally:
                self._random = torch.get_rng_state()


@contextlib.contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM set `stop`, so that the current update ends first; a second signal stops at once."""

    def request_stop(number: int) -> None:
        if stop.is_set():
            signal.default_int_handler(number, None)
        stop.set()

    with handle_signals(request_stop):
        yield
