"""Loggers: subscribers that pass the numbers of a run on to TensorBoard, Weights & Biases, MLflow or CSV files.

    update  ->  update/loss, update/rate, ...            at the number of the update
    epoch   ->  epoch/train_loss, epoch/valid_cer, ...   at the last update of the epoch
    finished -> test/cer, test/loss

Where they write, and under which project, is configured in their own way: `WANDB_PROJECT`, `MLFLOW_TRACKING_URI`, ...
An active run of theirs is used, and left open. Training does not fail because of a logger: it is closed
with a warning.
"""

import contextlib
import csv
import importlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TextIO, final

from stretto.errors import StrettoError
from stretto.extras import optional
from stretto.files import write_text_atomically
from stretto.training import Event, Interrupted, LoggerName, Subscriber, read_events

IDS_FILE: Final = "loggers.json"
"""Which runs of Weights & Biases and MLflow belong to the run folder, so that a resumed run continues them."""
NOT_LOGGED: Final = frozenset("event time update epoch metric value".split())


@contextlib.contextmanager
def open_logger(name: LoggerName, run: Path, *, warn: Callable[[str], None]) -> Iterator[Subscriber]:
    """A subscriber that logs the run in the folder `run`; `warn` is called if it fails later.

    Raises:
        StrettoError: Its package is missing, or it cannot be opened.
    """
    try:
        logger: AbstractLogger | None = LOGGERS[name](run)
    except StrettoError:
        raise
    except Exception as error:
        raise StrettoError(
            f"the logger {name!r} could not be opened: {error}", fix="Mend that, or leave it out of log."
        ) from error

    def log(event: Event) -> None:
        nonlocal logger
        if logger is None:
            return
        try:
            logger.log(event)
        except Exception as error:  # noqa: BLE001 - of a package or a server that is not ours
            logger = None
            warn(f"the logger {name!r} has failed and logs no more: {error}")

    state = "failed"
    try:
        yield log
        state = "finished"
    except (Interrupted, KeyboardInterrupt):
        state = "interrupted"
        raise
    finally:
        if logger is not None:
            try:
                logger.close(state)
            except Exception as error:  # noqa: BLE001
                warn(f"the logger {name!r} could not be closed: {error}")


class AbstractLogger(ABC):
    """Something that numbers are logged to."""

    @abstractmethod
    def log(self, event: Event) -> None:
        """Log one event."""

    @abstractmethod
    def close(self, state: str) -> None:
        """Close what was opened; the run is "finished", "interrupted" or "failed"."""


@final
class CsvLogger(AbstractLogger):
    """Two tables in the run folder: a row for each update, and one for each epoch."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._tables: dict[str, tuple[TextIO, Any]] = {}

    def log(self, event: Event) -> None:
        """Add a row."""
        if event["event"] not in ("started", "resumed"):
            self._add(event)
            return
        # Rows of updates that are made again are superseded.
        self.close("")
        for each in read_events(self._run):
            self._add(each)

    def close(self, state: str) -> None:  # noqa: ARG002
        """Close both files."""
        for stream, _ in self._tables.values():
            stream.close()
        self._tables.clear()

    def _add(self, event: Event) -> None:
        if event["event"] not in ("update", "epoch"):
            return
        row = {"update": event["update"], "epoch": event["epoch"], **numbers(event)}
        row = {name.rpartition("/")[2]: value for name, value in row.items()}
        stream, table = self._tables.get(event["event"]) or self._open(event["event"], row)
        table.writerow(row)
        stream.flush()

    def _open(self, kind: str, row: Mapping[str, Any]) -> tuple[TextIO, Any]:
        stream = (self._run / f"{kind}s.csv").open("w", encoding="utf-8", newline="")
        table = csv.DictWriter(stream, list(row), extrasaction="ignore")
        table.writeheader()
        self._tables[kind] = stream, table
        return stream, table


@final
class TensorBoardLogger(AbstractLogger):
    """Curves for `tensorboard --logdir RUN`."""

    def __init__(self, run: Path) -> None:
        optional("tensorboard")
        self._folder = run / "tensorboard"
        self._writer: Any = None

    def log(self, event: Event) -> None:
        """Add points to the curves."""
        if self._writer is None:
            # Points of updates that are made again are superseded.
            after = event["update"] + 1 if event["event"] == "resumed" else None
            tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
            self._writer = tensorboard.SummaryWriter(str(self._folder), purge_step=after)
        if event["event"] == "started":
            lines = [f"| {name} | {value} |" for name, value in describe_run(event).items()]
            self._writer.add_text("settings", "\n".join(["| | |", "|-|-|", *lines]))
        for name, value in numbers(event).items():
            self._writer.add_scalar(name, value, event.get("update", 0), walltime=event["time"])
        if event["event"] == "epoch":
            self._writer.flush()

    def close(self, state: str) -> None:  # noqa: ARG002
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


@final
class WandbLogger(AbstractLogger):
    """A run of Weights & Biases; offline with `WANDB_MODE=offline`."""

    def __init__(self, run: Path) -> None:
        wandb = optional("wandb")
        self._is_ours = wandb.run is None
        self._run = wandb.run or wandb.init(
            project=os.environ.get("WANDB_PROJECT", "stretto"),
            name=run.name,
            dir=os.environ.get("WANDB_DIR", str(run)),
            id=read_ids(run).get("wandb"),
            resume="allow",
        )
        if self._is_ours:
            store_ids(run, wandb=self._run.id)
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")

    def log(self, event: Event) -> None:
        """Log numbers; those of the test part go to the summary."""
        if event["event"] == "started":
            self._run.config.update(describe_run(event), allow_val_change=True)
        elif event["event"] == "finished":
            self._run.summary.update(numbers(event))
        elif values := numbers(event):
            self._run.log({**values, "update": event["update"]})

    def close(self, state: str) -> None:
        """Finish the run, unless it was there before."""
        if self._is_ours:
            self._run.finish(exit_code=0 if state == "finished" else 1)


@final
class MlflowLogger(AbstractLogger):
    """A run of MLflow; updates are sent together, with each epoch."""

    MAX_METRICS: Final = 1000
    """The most that MLflow takes at once."""

    def __init__(self, run: Path) -> None:
        self._mlflow = optional("mlflow")
        self._is_ours = self._mlflow.active_run() is None
        id_ = read_ids(run).get("mlflow")
        active = self._mlflow.active_run() or self._mlflow.start_run(run_id=id_, run_name=None if id_ else run.name)
        if self._is_ours:
            store_ids(run, mlflow=active.info.run_id)
        self._client, self._id = self._mlflow.MlflowClient(), active.info.run_id
        self._waiting: list[Any] = []
        self._last = 0

    def log(self, event: Event) -> None:
        """Collect numbers, and send them at the end of an epoch."""
        if event["event"] == "started":
            param = self._mlflow.entities.Param
            values = describe_run(event).items()
            self._client.log_batch(self._id, params=[param(name, str(value)) for name, value in values])
        self._last = event.get("update", self._last)
        milliseconds = int(1000 * event["time"])
        metric = self._mlflow.entities.Metric
        self._waiting += [metric(name, value, milliseconds, self._last) for name, value in numbers(event).items()]
        if event["event"] in ("epoch", "finished"):
            self._send()

    def close(self, state: str) -> None:
        """Send what is left, and end the run unless it was there before."""
        self._send()
        if self._is_ours:
            self._mlflow.end_run({"finished": "FINISHED", "interrupted": "KILLED"}.get(state, "FAILED"))

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[: self.MAX_METRICS])
            del self._waiting[: self.MAX_METRICS]


LOGGERS: Final[Mapping[LoggerName, Callable[[Path], AbstractLogger]]] = {
    "csv": CsvLogger,
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


def numbers(event: Event) -> dict[str, float]:
    """The numbers of an event, by the names that they are logged under; most events have none."""
    kind = event["event"]
    if kind == "finished":
        return {f"test/{name}": value for name, value in event["metrics"].items()}
    if kind not in ("update", "epoch"):
        return {}
    found = {name: value for name, value in event.items() if name not in NOT_LOGGED and isinstance(value, (int, float))}
    if kind == "epoch":
        found[f"valid_{event['metric']}"] = event["value"]
    return {f"{kind}/{name}": value for name, value in found.items()}


def describe_run(event: Event) -> dict[str, Any]:
    """What is known of a run at its start: the settings, the task, the data and the size of the model."""
    return {
        "task": event["task"],
        **event["settings"],
        "data": event["data"]["name"],
        "parameters": event["parameters"],
    }


def read_ids(run: Path) -> dict[str, str]:
    """The runs of others that belong to the run folder."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((run / IDS_FILE).read_text(encoding="utf-8"))
    return found


def store_ids(run: Path, **added: str) -> None:
    """Note which run of others belongs to the run folder."""
    run.mkdir(parents=True, exist_ok=True)
    write_text_atomically(run / IDS_FILE, json.dumps({**read_ids(run), **added}) + "\n")
