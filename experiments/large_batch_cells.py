"""The runs of the experiment with large batches, and their results on disk: one file a run.

A file is named after its run and a digest of all that shapes it, so that a finished run is taken as it is by the same
command, and never by another.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any, Final, Literal, final

import pydantic
import torch

from experiments.large_batch_applications import WARMUP_CAP, Application
from stretto.errors import StrettoError
from stretto.files import disk_errors, write_text_atomically
from stretto.tasks import CONFIGS
from stretto.training import TrainConfig, checked, with_preset

FOLDER: Final = "cells"
FORMAT: Final = 1
NO_MATTER: Final = ("data", "threads", "checkpoint_minutes", "keep_checkpoints")
"""Settings that do not shape a result, or are counted in another way."""

CellRule = Literal["baseline", "none", "linear", "sqrt", "legw", "lamb"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run.

    Attributes:
        application: Which, with its sizes.
        multiple: The batch, in multiples of the baseline's.
        rule: How settings follow the batch; at the baseline's batch all rules but lamb are the same.
        factor: What the rate is multiplied with besides, in search of a better one.
        seed: Of weights and batches.
    """

    application: Application
    multiple: int
    rule: CellRule
    factor: float = 1.0
    seed: int

    @property
    def title(self) -> str:
        """As shown in a line of progress."""
        rate = "" if self.factor == 1.0 else f", rate x {self.factor:g}"
        return f"{self.application.name} x{self.multiple} {self.rule}{rate}, seed {self.seed}"

    @property
    def batch_size(self) -> int:
        """Sequences or streams of a batch."""
        return self.multiple * self.application.batch_size

    def config(self) -> TrainConfig:
        """The settings of the run."""
        application, lamb = self.application, self.rule == "lamb"
        values = {
            **application.settings,
            "batch_size": self.batch_size,
            "base_batch_size": application.batch_size,
            "rule": {"baseline": "none", "lamb": "legw"}.get(self.rule, self.rule),
            "learning_rate": self.factor * (application.lamb_rate if lamb else application.learning_rate),
            "optimizer": "lamb" if lamb else application.optimizer,
            "schedule": application.schedule,
            "warmup_epochs": application.warmup_epochs,
            "warmup_cap": WARMUP_CAP,
            "epochs": application.epochs,
            "seed": self.seed,
        }
        kind = CONFIGS[application.name]
        return checked(kind, with_preset(kind, values), source=f"the run {self.title}")

    def key(self, data_digest: str) -> str:
        """A digest of all that shapes the result.

        Args:
            data_digest: Of the data.
        """
        settings = {name: value for name, value in self.config().recorded().items() if name not in NO_MATTER}
        shaping = {
            "format": FORMAT,
            "task": self.application.name,
            "settings": settings,
            "data": data_digest,
            "threads": torch.get_num_threads(),
            "versions": [importlib.metadata.version("stretto"), torch.__version__],
        }
        return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]

    def file_name(self, key: str) -> str:
        """Of the result."""
        rate = "" if self.factor == 1.0 else f"-rate{self.factor:g}"
        return f"{self.application.name}-x{self.multiple}-{self.rule}{rate}-seed{self.seed}-{key}.json"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What came of one run.

    Attributes:
        key: Of all that shaped it.
        application: As in `Cell`.
        multiple: As in `Cell`.
        rule: As in `Cell`.
        factor: As in `Cell`.
        seed: As in `Cell`.
        batch_size: Sequences or streams of a batch.
        learning_rate: The peak.
        warmup_epochs: Until the peak.
        updates_per_epoch: At this batch.
        epochs: Whole ones that were done.
        updates: That were done.
        seconds: Of the updates.
        wall_seconds: Of the whole run, with measuring.
        diverged: Whether it ended early, at a loss or gradient that is no number.
        why: What was said then; else empty.
        valid: The metric on the validation part after the last epoch; None if it diverged.
        test: The metric on the test part; None if it diverged.
        curve: The metric on the validation part after every epoch.
        weights: A digest of the weights before the first update.
    """

    key: str
    application: str
    multiple: int
    rule: CellRule
    factor: float
    seed: int
    batch_size: int
    learning_rate: float
    warmup_epochs: float
    updates_per_epoch: int
    epochs: int
    updates: int
    seconds: float
    wall_seconds: float
    diverged: bool
    why: str
    valid: float | None
    test: float | None
    curve: tuple[float, ...]
    weights: str

    def __post_init__(self) -> None:
        if not self.diverged and (self.valid is None or self.test is None):
            raise ValueError("a run that did not diverge has values")


@final
class CellStore:
    """The finished runs of a folder.

    Args:
        folder: Of the experiment; the files are in `cells` below it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    def find(self, cell: Cell, key: str) -> CellResult | None:
        """The result of a run, if it is finished.

        Raises:
            StrettoError: There is a file, and it is damaged.
        """
        path = self._folder / cell.file_name(key)
        with disk_errors(path, doing="read"):
            if not path.exists():
                return None
            content = path.read_bytes()
        try:
            found = _RESULT.validate_json(content)
        except pydantic.ValidationError as error:
            raise _damaged(path, str(error.errors(include_url=False)[0]["msg"])) from error
        same = [key, cell.application.name, cell.multiple, cell.rule, cell.factor, cell.seed]
        if [found.key, found.application, found.multiple, found.rule, found.factor, found.seed] != same:
            raise _damaged(path, "it is of another run")
        return found

    def keep(self, cell: Cell, result: CellResult, *, facts: dict[str, Any]) -> None:
        """Write a result, whole or not at all.

        Args:
            cell: The run.
            result: What came of it.
            facts: What a reader of the file may want to know besides: its settings, the data.
        """
        values = {**dataclasses.asdict(result), "facts": facts}
        text = json.dumps(values, indent=2, allow_nan=False) + "\n"
        write_text_atomically(self._folder / cell.file_name(result.key), text)


_RESULT: Final = pydantic.TypeAdapter(CellResult)


def _damaged(path: Path, why: str) -> StrettoError:
    return StrettoError(f"{str(path)!r} is damaged ({why})", fix="It is run again.")
