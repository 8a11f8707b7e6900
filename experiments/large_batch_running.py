"""One run of the experiment with large batches, from weights to test; one that was stopped goes on where it was."""

import hashlib
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any, Final, final

from torch import nn

from experiments.large_batch_cells import Cell, CellResult
from experiments.large_batch_measures import MEASURES
from stretto.data import SequenceSet
from stretto.files import write_text_atomically
from stretto.tasks import task_named
from stretto.training import FOLDER as CHECKPOINTS
from stretto.training import AbstractLog, Diverged, Trainer

PROGRESS: Final = "progress.json"
"""What a run that is under way keeps beside its checkpoints."""


@final
class _Epochs(AbstractLog):
    """Keeps the metric after each epoch, on disk too, and nothing else.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.weights = ""
        self._values: dict[int, float] = {}

    @property
    def values(self) -> list[float]:
        """Of all epochs, in order."""
        return [value for _, value in sorted(self._values.items())]

    def begin(self, weights: str) -> None:
        """Begin with a digest of the weights before the first update."""
        self.weights = weights
        self._write()

    def go_on(self) -> None:
        """Go on from the file."""
        known = json.loads(self._path.read_text(encoding="utf-8"))
        self.weights = known["weights"]
        self._values = {int(epoch): float(value) for epoch, value in known["values"].items()}

    def emit(self, kind: str, **values: Any) -> None:
        """Note an epoch."""
        if kind == "epoch":
            self._values[int(values["epoch"])] = float(values["value"])
            self._write()

    def close(self) -> None:
        """Nothing is held."""

    def _write(self) -> None:
        write_text_atomically(self._path, json.dumps({"weights": self.weights, "values": self._values}) + "\n")


def run_cell(cell: Cell, data: SequenceSet, *, key: str, folder: Path) -> CellResult:
    """Train and measure; a run that diverges has a result, too.

    Args:
        cell: What to run.
        data: Of its application.
        key: Of all that shapes the result.
        folder: Of the run: if it was stopped before, it goes on from there. Gone afterwards.

    Raises:
        StrettoError: It cannot be run.
        Interrupted: It was asked to stop.
    """
    task = task_named(cell.application.name)(cell.config(), data)
    why, test = "", None
    is_resumed = (folder / CHECKPOINTS).is_dir() and (folder / PROGRESS).exists()
    if not is_resumed:
        shutil.rmtree(folder, ignore_errors=True)
    log = _Epochs(folder / PROGRESS)
    trainer = Trainer(task, run=folder, log=log, resume=is_resumed)
    if is_resumed:
        log.go_on()
    else:
        log.begin(_digest(trainer.state.model))
    begun = time.perf_counter() - trainer.state.seconds
    try:
        test = float(trainer.run().metrics[MEASURES[cell.application.name].metric])
    except Diverged as error:
        why = error.problem
    wall_seconds = time.perf_counter() - begun
    state = trainer.state
    curve = tuple(value for value in log.values if math.isfinite(value))
    if not why and (test is None or not math.isfinite(test) or len(curve) < cell.application.epochs):
        why = f"the {MEASURES[cell.application.name].metric} is no number"
    shutil.rmtree(folder)
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
        weights=log.weights,
    )


def _digest(model: nn.Module) -> str:
    hasher = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        hasher.update(name.encode())
        hasher.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return hasher.hexdigest()[:16]
