"""One training run of the large-batch experiment: what identifies it, its result on disk, and its execution.

A result is a file named after its run and a digest of everything that shapes it. A finished run is reused by the same
command, and never by another. A run that was stopped continues from its last checkpoint, bit-identically.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

import pydantic
import torch
from torch import nn

from experiments.large_batch_apps import METRICS, WARMUP_CAP, Application
from stretto.data import SequenceSet
from stretto.errors import StrettoError
from stretto.files import disk_errors, write_text_atomically
from stretto.large_batch import ScalingRule
from stretto.tasks import find_task
from stretto.training import CHECKPOINT_FOLDER as CHECKPOINTS
from stretto.training import (
    AbstractLog,
    Diverged,
    TrainConfig,
    Trainer,
    validate,
    with_preset,
)

FORMAT: Final = 2
IRRELEVANT: Final = ("data", "threads", "checkpoint_minutes", "keep_checkpoints")
"""Settings that do not shape a result, or are part of the digest in another form."""
CURVE_FILE: Final = "curve.json"

RunRule: TypeAlias = Literal[ScalingRule, "baseline", "lamb"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run."""

    application: Application
    data_digest: str
    multiple: int  # the batch, in multiples of the baseline's
    rule: RunRule  # how settings follow the batch; at the baseline's batch all rules but lamb are the same
    factor: float = 1.0  # on the learning rate, in search of a better one
    seed: int

    def __str__(self) -> str:
        rate = "" if self.factor == 1.0 else f", rate x {self.factor:g}"
        return f"{self.application.name} x{self.multiple} {self.rule}{rate}, seed {self.seed}"

    @property
    def batch_size(self) -> int:
        """Sequences or streams per batch."""
        return self.multiple * self.application.batch_size

    def config(self) -> TrainConfig:
        """The settings of the run."""
        application, is_lamb = self.application, self.rule == "lamb"
        values = {
            **application.settings,
            "batch_size": self.batch_size,
            "base_batch_size": application.batch_size,
            "rule": {"baseline": "none", "lamb": "legw"}.get(self.rule, self.rule),
            "learning_rate": self.factor * (application.lamb_rate if is_lamb else application.learning_rate),
            "optimizer": "lamb" if is_lamb else application.optimizer,
            "schedule": application.schedule,
            "warmup_epochs": application.warmup_epochs,
            "warmup_cap": WARMUP_CAP,
            "epochs": application.epochs,
            "seed": self.seed,
        }
        kind = find_task(application.name).Config
        return validate(kind, with_preset(kind, values), source=f"the run {self}")

    @property
    def key(self) -> str:
        """A digest of everything that shapes the result."""
        settings = {name: value for name, value in self.config().recorded().items() if name not in IRRELEVANT}
        shaping = {
            "format": FORMAT,
            "task": self.application.name,
            "settings": settings,
            "data": self.data_digest,
            "threads": torch.get_num_threads(),
            "versions": [importlib.metadata.version("stretto"), torch.__version__],
        }
        return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]

    def path(self, folder: Path) -> Path:
        """The file of the result."""
        rate = "" if self.factor == 1.0 else f"-rate{self.factor:g}"
        name = f"{self.application.name}-x{self.multiple}-{self.rule}{rate}-seed{self.seed}-{self.key}.json"
        return folder / name


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of one run; the first six fields say which."""

    key: str
    application: str
    multiple: int
    rule: RunRule
    factor: float
    seed: int
    batch_size: int
    learning_rate: float  # the peak
    warmup_epochs: float  # until the peak
    updates_per_epoch: int
    epochs: int  # whole ones that were done
    updates: int
    seconds: float  # of the updates
    wall_seconds: float  # of the whole run, with validation
    diverged: bool  # whether it ended early, at a loss or gradient that is NaN or inf
    why: str  # the error in that case
    valid: float | None  # the metric on the validation part after the last epoch; None if it diverged
    test: float | None  # the metric on the test part; None if it diverged
    curve: tuple[float, ...]  # the metric on the validation part after each epoch
    weights: str  # a digest of the weights before the first update

    def __post_init__(self) -> None:
        if not self.diverged and (self.valid is None or self.test is None):
            raise ValueError("a run that did not diverge has values")


_RESULT: Final = pydantic.TypeAdapter(RunResult)


def load_result(run: Run, folder: Path) -> RunResult | None:
    """Read the result of a run, if it is finished.

    Raises:
        StrettoError: If the file is damaged.
    """
    path = run.path(folder)
    with disk_errors(path, doing="read"):
        if not path.exists():
            return None
        content = path.read_bytes()
    try:
        found = _RESULT.validate_json(content)
    except pydantic.ValidationError as error:
        raise _damaged(path, str(error.errors(include_url=False)[0]["msg"])) from error
    expected = (run.key, run.application.name, run.multiple, run.rule, run.factor, run.seed)
    if (found.key, found.application, found.multiple, found.rule, found.factor, found.seed) != expected:
        raise _damaged(path, "it is of another run")
    return found


def _damaged(path: Path, why: str) -> StrettoError:
    return StrettoError(f"{str(path)!r} is damaged ({why})", fix="The run is repeated.")


def save_result(run: Run, result: RunResult, folder: Path, *, data: str) -> None:
    """Write the result of a run, with its settings and the name of its data."""
    facts = {"settings": run.config().recorded(), "data": data}
    text = json.dumps({**dataclasses.asdict(result), "facts": facts}, indent=2, allow_nan=False) + "\n"
    write_text_atomically(run.path(folder), text)


@final
class LearningCurve(AbstractLog):
    """The metric after each epoch, kept in a file next to the checkpoints so that it survives a stop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.weights = ""
        self.values: dict[int, float] = {}

    def begin(self, model: nn.Module) -> None:
        """Start a new curve with a digest of the initial weights."""
        digest = hashlib.sha256()
        for name, tensor in model.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        self.weights = digest.hexdigest()[:16]
        self._write()

    def resume(self) -> None:
        """Continue from the file."""
        stored = json.loads(self._path.read_text(encoding="utf-8"))
        self.weights = stored["weights"]
        self.values = {int(epoch): float(value) for epoch, value in stored["values"].items()}

    def emit(self, kind: str, **values: Any) -> None:
        """Keep the metric of an epoch."""
        if kind == "epoch":
            self.values[int(values["epoch"])] = float(values["value"])
            self._write()

    def _write(self) -> None:
        write_text_atomically(self._path, json.dumps({"weights": self.weights, "values": self.values}) + "\n")


def execute(run: Run, data: SequenceSet, folder: Path) -> RunResult:
    """Train and measure; a run that diverges has a result, too.

    Args:
        run: What to run.
        data: Of its application.
        folder: For its checkpoints; a run that was stopped continues from there. Removed at the end.

    Raises:
        StrettoError: If it cannot be run.
        Interrupted: If it was asked to stop.
    """
    metric = METRICS[run.application.name].name
    is_resumed = (folder / CHECKPOINTS).is_dir() and (folder / CURVE_FILE).exists()
    if not is_resumed:
        shutil.rmtree(folder, ignore_errors=True)
    curve = LearningCurve(folder / CURVE_FILE)
    task = find_task(run.application.name)(run.config(), data)
    trainer = Trainer(task, run=folder, log=curve, resume=is_resumed)
    if is_resumed:
        curve.resume()
    else:
        curve.begin(trainer.model)
    begin = time.perf_counter() - trainer.state.seconds
    why, test = "", math.nan
    try:
        test = float(trainer.run().metrics[metric])
    except Diverged as error:
        why = error.problem
    wall_seconds = time.perf_counter() - begin
    state = trainer.state
    values = tuple(value for _, value in sorted(curve.values.items()) if math.isfinite(value))
    if not why and (not math.isfinite(test) or len(values) < run.application.epochs):
        why = f"the {metric} is NaN or inf"
    shutil.rmtree(folder)
    return RunResult(
        key=run.key,
        application=run.application.name,
        multiple=run.multiple,
        rule=run.rule,
        factor=run.factor,
        seed=run.seed,
        batch_size=run.batch_size,
        learning_rate=state.recipe.lr,
        warmup_epochs=state.recipe.warmup_epochs,
        updates_per_epoch=trainer.feed.whole_epoch,
        epochs=state.epoch,
        updates=state.num_updates,
        seconds=state.train_seconds,
        wall_seconds=wall_seconds,
        diverged=bool(why),
        why=why,
        valid=None if why else values[-1],
        test=None if why else test,
        curve=values,
        weights=curve.weights,
    )
