"""One run of the experiment with large batches, from weights to test."""

import hashlib
import math
import tempfile
import time
from pathlib import Path
from typing import Any, final

from torch import nn

from stretto.data.sequences import SequenceSet
from stretto.recipes.large_batch_cells import Cell, CellResult
from stretto.recipes.large_batch_measures import MEASURES
from stretto.tasks.registry import task_named
from stretto.training.divergence import Diverged
from stretto.training.events import AbstractLog
from stretto.training.loop import Trainer

"""How the error begins that training ends with when a loss or gradient is no number."""


@final
class _Epochs(AbstractLog):
    """Keeps the metric after each epoch, and nothing else."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def emit(self, kind: str, **values: Any) -> None:
        if kind == "epoch":
            self.values.append(float(values["value"]))

    def close(self) -> None:
        pass


def run_cell(cell: Cell, data: SequenceSet, *, key: str) -> CellResult:
    """Train and measure; a run that diverges has a result, too.

    Args:
        cell: What to run.
        data: Of its application.
        key: Of all that shapes the result.

    Raises:
        StrettoError: It cannot be run.
        Interrupted: It was asked to stop.
    """
    task = task_named(cell.application.name)(cell.config(), data)
    log, why, test = _Epochs(), "", None
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        trainer = Trainer(task, run=Path(folder), log=log, resume=False)
        weights = _digest(trainer.state.model)
        begun = time.perf_counter()
        try:
            test = float(trainer.run().metrics[MEASURES[cell.application.name].metric])
        except Diverged as error:
            why = error.problem
        wall_seconds = time.perf_counter() - begun
    state = trainer.state
    curve = tuple(value for value in log.values if math.isfinite(value))
    if not why and (test is None or not math.isfinite(test) or len(curve) < cell.application.epochs):
        why = f"the {MEASURES[cell.application.name].metric} is no number"
    return CellResult(
        key=key,
        application=cell.application.name,
        multiple=cell.multiple,
        rule=cell.rule,
        factor=cell.factor,
        seed=cell.seed,
        batch_size=cell.batch_size,
        learning_rate=state.recipe.lr,
        warmup_epochs=state.recipe.warmup_epochs,
        updates_per_epoch=trainer.feed.whole_epoch,
        epochs=state.epoch,
        updates=state.step,
        seconds=state.train_seconds,
        wall_seconds=wall_seconds,
        diverged=bool(why),
        why=why,
        valid=None if why else curve[-1],
        test=None if why else test,
        curve=curve,
        weights=weights,
    )


def _digest(model: nn.Module) -> str:
    hasher = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        hasher.update(name.encode())
        hasher.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return hasher.hexdigest()[:16]
