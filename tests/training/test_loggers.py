"""Loggers: what CSV files, TensorBoard, Weights & Biases and MLflow hold in the end, without a network."""

import csv
import multiprocessing
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from training_runs import at, interrupt

import stretto
from small_data import write_signs
from stretto.errors import StrettoError
from stretto.report import open_logger
from stretto.training import Event, Interrupted, read_events

QUICK: dict[str, Any] = {"epochs": 2, "hidden_size": 4, "batch_size": 8, "backend": "torch", "threads": 1}
UPDATES = 2 * 4


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_signs(tmp_path / "signs.npz", count=42)


def _train(log: list[str], **settings: Any) -> list[Event]:
    stretto.train("classify", data="signs.npz", out="run", log=log, **{**QUICK, **settings})
    return read_events(Path("run"))


def _stop_and_resume(log: list[str]) -> list[Event]:
    """A run that is stopped at its sixth update, and resumed."""
    with pytest.raises(Interrupted):
        _train(log, subscribers=[at(6, "update", interrupt)])
    # wandb names the folders of a run by the second in which it began.
    stopped = int(time.time())
    while int(time.time()) == stopped:
        time.sleep(0.05)
    events = _train(log, resume=True)
    assert "wandb" not in sys.modules or sys.modules["wandb"].run is None
    return events


def _column(events: list[Event], kind: str, name: str) -> list[float]:
    return [event[name] for event in events if event["event"] == kind]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def test_csv_has_a_row_for_each_update_and_epoch() -> None:
    events = _train(["csv"])
    updates, epochs = _rows(Path("run/updates.csv")), _rows(Path("run/epochs.csv"))
    assert [float(row["loss"]) for row in updates] == _column(events, "update", "loss")
    assert [int(row["update"]) for row in updates] == list(range(1, UPDATES + 1))
    assert [float(row["valid_accuracy"]) for row in epochs] == _column(events, "epoch", "value")
    assert {"rate", "gradient_norm"} <= updates[0].keys()


def test_a_resumed_run_has_each_update_once() -> None:
    with pytest.raises(Interrupted):
        _train(["csv"], subscribers=[at(6, "update", interrupt)])
    with Path("run/updates.csv").open("a", encoding="utf-8") as stream:
        stream.write("7,0,of,a,crash\n")
    events = _train(["csv"], resume=True)
    updates = _rows(Path("run/updates.csv"))
    assert [int(row["update"]) for row in updates] == list(range(1, UPDATES + 1))
    assert [float(row["loss"]) for row in updates] == _column(events, "update", "loss")


def test_other_loggers_may_be_named_when_a_run_resumes() -> None:
    with pytest.raises(Interrupted):
        _train([], subscribers=[at(6, "update", interrupt)])
    _train(["csv"], resume=True)
    assert len(_rows(Path("run/updates.csv"))) == UPDATES


def test_subscribers_are_called_with_every_event() -> None:
    seen: list[Event] = []
    events = _train([], subscribers=[seen.append])
    assert [(event["event"], event["time"]) for event in events] == [(event["event"], event["time"]) for event in seen]


def test_an_unknown_logger_is_refused_before_anything_is_written() -> None:
    with pytest.raises(StrettoError, match="log: "):
        _train(["clay tablets"])
    assert not Path("run").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_names_its_extra_before_anything_is_trained(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StrettoError, match=rf"stretto\[{name}\]"):
        _train([name])
    assert not Path("run/events.jsonl").exists()


def test_training_goes_on_without_a_logger_that_fails() -> None:
    def replace_by_folder(event: Event) -> None:
        if event["event"] == "started":
            Path("run/updates.csv").mkdir()

    events = _train(["csv"], subscribers=[replace_by_folder])
    messages = _column(events, "warning", "message")
    assert len(messages) == 1
    assert "'csv' has failed" in str(messages[0])
    assert len(_column(events, "update", "loss")) == UPDATES


def test_a_logger_that_fails_is_called_no_more(tmp_path: Path) -> None:
    warnings: list[str] = []
    with open_logger("csv", tmp_path, warn=warnings.append) as log:
        log({"event": "update"})
        log({"event": "update"})
    assert len(warnings) == 1


@pytest.mark.slow
def test_tensorboard_has_the_curves_settings_and_test_metrics() -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = _stop_and_resume(["tensorboard"])
    found = EventAccumulator("run/tensorboard")
    found.Reload()
    points = found.Scalars("update/loss")
    assert [point.step for point in points] == list(range(1, UPDATES + 1))
    assert [point.value for point in points] == pytest.approx(_column(events, "update", "loss"))
    assert [p.value for p in found.Scalars("epoch/valid_accuracy")] == pytest.approx(_column(events, "epoch", "value"))
    assert found.Scalars("test/accuracy")[0].value == pytest.approx(events[-1]["metrics"]["accuracy"])
    assert b"hidden_size" in found.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.slow
def test_wandb_has_one_run_that_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    # In a process of its own, at whose end all is written.
    process = multiprocessing.get_context("spawn").Process(target=_stop_and_resume, args=(["wandb"],))
    process.start()
    process.join()
    assert process.exitcode == 0
    events = read_events(Path("run"))
    assert _column(events, "warning", "message") == []
    assert len(_column(events, "update", "loss")) == UPDATES
    records = [record for path in sorted(Path("run/wandb").glob("offline-run-*")) for record in _wandb_records(path)]
    assert len({record.run.run_id for record in records if record.HasField("run")}) == 1
    history = [
        {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    losses = {int(row["update"]): float(row["update/loss"]) for row in history if "update/loss" in row}
    assert list(losses.values()) == _column(events, "update", "loss")
    settings = {item.key for record in records for item in record.run.config.update} | {
        item.key for record in records for item in record.config.update
    }
    assert {"hidden_size", "parameters"} <= settings
    summary = {item.key for record in records for item in record.summary.update}
    assert "test/accuracy" in summary


def _wandb_records(folder: Path) -> list[Any]:
    """The records of an offline run: LevelDB's log, after a header of 7 bytes; a record may be in several fragments."""
    from wandb.proto import wandb_internal_pb2

    data, at, fragments = next(folder.glob("*.wandb")).read_bytes(), 7, b""
    records = []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        fragments += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(fragments)
            records.append(record)
            fragments = b""
    return records


@pytest.mark.slow
def test_mlflow_has_one_run_that_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    events = _stop_and_resume(["mlflow"])
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["hidden_size"] == "4"
    assert run.data.metrics["test/accuracy"] == pytest.approx(events[-1]["metrics"]["accuracy"])
    points = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "update/loss")}
    assert [points[step] for step in sorted(points)] == _column(events, "update", "loss")


@pytest.mark.slow
def test_runs_of_ones_own_are_used_and_left_open(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    with mlflow.start_run() as own:
        _train(["mlflow"])
        assert mlflow.active_run().info.run_id == own.info.run_id
    assert "test/accuracy" in mlflow.MlflowClient().get_run(own.info.run_id).data.metrics
