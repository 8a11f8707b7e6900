"""`--auto`: a `RecipeSearch` carried out with trainers, and the recipes it chooses from.

    trials, in memory ---> parts of one run, each with a trainer of its own ---> the best weights on the test part

What was found is in `auto.json` after every job, so a run resumes in the trial or the epoch where it stopped.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from stretto.batching import Batch
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.files import disk_errors, refuse_special, write_text_atomically
from stretto.large_batch import Job, Muon, Outcome, Recipe, RecipeSearch, first_run_epochs
from stretto.training.checkpoint import CHECKPOINT_FOLDER, load_newest
from stretto.training.evaluate import evaluate
from stretto.training.events import AbstractLog
from stretto.training.feeds import AbstractFeed
from stretto.training.state import TrainState
from stretto.training.task import AbstractTask
from stretto.training.trainer import Part, RunResult, Trainer
from stretto.training.update import Diverged, Updater

AUTO_FILE: Final = "auto.json"
PLANNED: Final[dict[str, Any]] = {
    "schedule": "linear",
    "warmup_epochs": None,
    "decay_factor": None,
    "flat_epochs": None,
    "gates": False,
    "adam_share": 1.0,
    "weight_decay": None,
    "clip_norm": 1.0,
    "rule": "none",
    "base_batch_size": None,
    "base_epochs": None,
}
"""What all recipes but the plain one have in common: a tenth of the run to warm up, then a decay to zero."""
Rates = tuple[tuple[int, float], ...]
MUON_RATES: Final[Rates] = ((1, 0.4), (1, 0.8), (4, 0.4), (1, 0.2), (4, 0.8))
"""Multiples of the plain batch, and rates times the square root of the first run's updates: those expected to be good
first. The best of four tasks and fourteen lengths of runs were 0.15 to 1.3."""
ADAM_SHARE: Final = 0.1
"""Rate of what Adam updates beside Muon, but for embeddings and the output layer. Biases, an input layer and an
embedding tied to the output have a gradient in every update, and at the whole rate move too far in a short run. Rows of
other embeddings are seldom met, and a net that must leave a plateau first, as with CTC, needs a fast output layer."""
ADAM_RATES: Final[Rates] = ((1, 0.003), (1, 0.001), (1, 0.01), (4, 0.006))
"""Multiples of the plain batch, and rates."""
MIN_ADAM_UPDATES: Final = 300
"""Updates of a first run below which Adam takes smaller batches than the plain recipe. Muon does not: it costs the same
whatever the batch."""
MIN_ADAM_BATCH: Final = 16
"""The smallest of these."""
MIN_UPDATES_PER_EPOCH: Final = 25
"""Updates per epoch that a larger batch must leave."""


def make_recipes(task: AbstractTask[Any], model: nn.Module, feed: AbstractFeed, *, world: World) -> list[Recipe]:
    """The plain recipe, which is the task's settings, and others: by Muon if there are recurrent matrices, or Adam.

    A task that can let its output begin at the training frequencies does so in the others.
    """
    config = task.config
    try:
        Muon(model, lr=1.0)
        optimizer, rates = "muon", MUON_RATES
    except StrettoError:
        optimizer, rates = "adam", ADAM_RATES
    common: dict[str, Any] = {**PLANNED, "optimizer": optimizer}
    if optimizer == "muon":
        common["adam_share"] = ADAM_SHARE
    if hasattr(config, "frequency_bias"):
        common["frequency_bias"] = True
    per_epoch = math.ceil(len(feed) / config.accumulate)
    num_updates = per_epoch * first_run_epochs(config.epochs, updates_per_epoch=per_epoch)
    first_batch_size = config.first_batch_size
    while optimizer == "adam" and num_updates < MIN_ADAM_UPDATES and first_batch_size >= 2 * MIN_ADAM_BATCH:
        first_batch_size //= 2
        num_updates *= 2
    recipes = [Recipe(name="plain")]
    for multiple, number in rates:
        batch_size = multiple * first_batch_size
        is_small = batch_size * world.size * config.accumulate * MIN_UPDATES_PER_EPOCH <= feed.num_sequences
        if multiple > 1 and (not is_small or config.max_padded_steps is not None):
            continue
        rate = float(f"{number / math.sqrt(num_updates / multiple):.2g}") if optimizer == "muon" else number
        settings = {**common, "learning_rate": rate, "batch_size": batch_size}
        name = f"{optimizer} {rate:g} x{batch_size}"
        recipes.append(Recipe(name=name, settings=settings, rate_follows_updates=optimizer == "muon"))
    return recipes


def run_auto(
    task: AbstractTask[Any], *, run: Path, log: AbstractLog, world: World, plain: Trainer, resume: bool
) -> RunResult:
    """Search, train and test; `plain` is a trainer of the task as it is, with which nothing was trained."""
    config = task.config
    search = RecipeSearch(
        make_recipes(task, plain.model, plain.feed, world=world),
        epochs=config.epochs,
        updates_per_epoch=math.ceil(len(plain.feed) / config.accumulate),
        target=config.reach,
        higher_is_better=task.higher_is_better,
        seconds=None if config.max_hours is None else 3600 * config.max_hours,
    )
    if resume and (run / AUTO_FILE).exists():
        search.load_state_dict(_read_state(run))
    make = functools.partial(_trainer, task, search=search, run=run, log=log, world=world)
    trainer: Trainer | None = None
    used = [done.recipe for done, _ in search.history if done.kind == "run"]
    while (job := search.ask()) is not None:
        if job.kind == "trial":
            search.tell(_try(_with_recipe(task, job), job, log=log, world=world))
        else:
            trainer = make(job)
            search.tell(_run_part(trainer, job, world=world, is_new=job.recipe not in used))
            used.append(job.recipe)
        world.on_rank0(functools.partial(_write, run / AUTO_FILE, json.dumps(search.state_dict())))
        if trainer is not None:
            trainer.interrupt_if_asked()
    if trainer is None:
        # All was trained when the run was stopped.
        trainer = make(search.history[-1][0], is_done=True)
    trainer.log.emit("auto", action="end", update=trainer.state.num_updates, reason=search.verdict)
    return trainer.finish()


def _try(task: AbstractTask[Any], job: Job, *, log: AbstractLog, world: World) -> Outcome:
    """Train new weights for some updates, with the whole schedule in them, and take the validation loss."""
    config = task.config
    feed = task.feed(world=world)
    num_updates = max(1, round(job.epochs * len(feed) / config.accumulate))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        state = TrainState(
            task.build_model().to(config.device),
            config=config,
            updates_per_epoch=num_updates / config.epochs,
            batch_size=feed.batch_size * world.size * config.accumulate,
        )
        updater = Updater(task, state, world=world)
        updater.weigh(feed, accumulate=config.accumulate)
        state.model.train()
        begun = first_ended = time.perf_counter()
        ended, loss = begun, math.nan
        with contextlib.suppress(Diverged):
            for number, batches in enumerate(itertools.islice(_updates(feed, state), num_updates)):
                updater.update(batches, skip_nonfinite=False)
                ended = time.perf_counter()
                if number == 0:
                    # Which may have waited for a compiler.
                    first_ended = ended
            loss = _validation_loss(task, state.model, share=job.epochs, world=world)
    seconds = (ended - first_ended) * num_updates / (num_updates - 1) if num_updates > 1 else ended - begun
    # Ranks have clocks of their own.
    seconds = round(max(row[0] for row in world.all_gather([seconds])), 3)
    found = {"loss": loss if math.isfinite(loss) else None, "updates": num_updates, "seconds": seconds}
    world.on_rank0(functools.partial(_emit, log, action="trial", update=0, **_described(job), **found))
    epochs = num_updates * config.accumulate / len(feed)
    return Outcome(loss=loss, value=None, best=None, epochs=epochs, seconds=seconds)


def _updates(feed: AbstractFeed, state: TrainState) -> Iterator[Iterator[Batch]]:
    """The batches of one update after another, epoch after epoch."""
    accumulate = state.accumulate
    while True:
        feed.begin_epoch(state.epoch, state.model)
        batches = iter(feed)
        for done in range(0, len(feed), accumulate):
            state.batches_done = done
            yield itertools.islice(batches, accumulate)
        state.epoch += 1


def _validation_loss(task: AbstractTask[Any], model: nn.Module, *, share: float, world: World) -> float:
    """On as many validation sequences, always the same, as have a share of the training part's steps."""
    train, valid = task.data.part("train"), task.data.part("valid")
    count = math.ceil(min(1.0, share * train.num_steps / valid.num_steps) * len(valid))
    chosen = np.random.default_rng(task.config.seed).permutation(len(valid))[:count]
    part = valid.subset(np.sort(chosen))
    return evaluate(task, model, part, device=task.config.device, world=world, loss_only=True).loss


def _trainer(
    task: AbstractTask[Any],
    job: Job,
    *,
    search: RecipeSearch,
    run: Path,
    log: AbstractLog,
    world: World,
    is_done: bool = False,
) -> Trainer:
    """For the part of the run that a job is, from its beginning or where it was stopped."""
    outcomes = [outcome for done, outcome in search.history if done.kind == "run"]
    number = len(outcomes) - is_done
    part = Part(number=number, first_seconds=sum(outcome.seconds for _, outcome in search.history))
    newest = load_newest(run).checkpoint.state if any((run / CHECKPOINT_FOLDER).glob("update-*")) else None
    resume = newest is not None and newest["part"]["number"] == number
    if newest is not None:
        first_epoch = newest["position"]["epoch"]
        begun = dataclasses.replace(part, first_epoch=first_epoch, begins_anew=job.begins_anew)
        part = Part(**newest["part"]) if resume else begun
    task = _with_recipe(task, job, epochs=part.first_epoch + round(job.epochs))
    return Trainer(task, run=run, log=log, resume=resume, world=world, part=part)


def _run_part(trainer: Trainer, job: Job, *, world: World, is_new: bool) -> Outcome:
    """Train a part of the run to its end."""
    state, part = trainer.state, trainer.part
    optimizer = state.optimizer
    trainer.log.emit(
        "auto",
        action="run",
        update=state.num_updates,
        **_described(job),
        updates_left=round(job.epochs * trainer.updates_per_epoch),
        rate=trainer.state.recipe.lr,
        batch_size=state.batch_size,
        **({"rules": optimizer.rules()} if is_new and isinstance(optimizer, Muon) else {}),
    )
    loss, found = 0.0, dict[str, float]()
    try:
        found = trainer.train()
    except Diverged:
        if not job.recipe.settings:
            # There is nothing else to go on with.
            raise
        loss = math.nan
    seconds = max(row[0] for row in world.all_gather([state.seconds - part.first_seconds]))
    epochs = state.epoch - part.first_epoch
    return Outcome(loss=loss, value=found.get("value"), best=found.get("best"), epochs=epochs, seconds=seconds)


def _with_recipe(task: AbstractTask[Any], job: Job, **settings: Any) -> AbstractTask[Any]:
    task = copy.copy(task)
    config = dataclasses.replace(task.config, **{**job.recipe.settings, **settings})
    task.config = dataclasses.replace(config, learning_rate=job.rate_factor * config.learning_rate)
    return task


def _described(job: Job) -> dict[str, Any]:
    return {"recipe": job.recipe.name, "epochs": round(job.epochs, 4), "reason": job.reason}


def _emit(log: AbstractLog, **values: Any) -> str:
    log.emit("auto", **values)
    return ""


def _write(path: Path, text: str) -> str:
    write_text_atomically(path, text)
    return ""


def _read_state(run: Path) -> dict[str, Any]:
    path = run / AUTO_FILE
    try:
        with disk_errors(path, doing="read"):
            refuse_special(path)
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StrettoError(f"{str(path)!r} is damaged: {error}", fix="Start a new run with another --out.") from error
    return state
