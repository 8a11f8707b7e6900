"""Whole runs through `stretto.train`: what they write, what is refused, and that resuming is the same run.

Shape legend: S steps of all sequences, N sequences.
"""

import html
import json
import os
import signal
import threading
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import stretto
from small_data import write_signs
from stretto.cli.main import main
from stretto.data import make_regimes, read_npz, write_npz
from stretto.errors import StrettoError
from stretto.nn.torch_layers import _layer_program
from stretto.runs import run_task
from stretto.tasks import find_task
from stretto.tasks.classify import ClassifyConfig
from stretto.training import (
    CHECKPOINT_FOLDER,
    EVENTS_FILE,
    MODEL_FILE,
    Event,
    Interrupted,
    RunResult,
    Trainer,
    read_events,
)
from stretto.training.checkpoint import STATE_FILE, TENSORS_FILE, _checksum, load_newest

SAVE_FILE = safetensors.torch.save_file
SMALL: dict[str, Any] = {"epochs": 2, "batch_size": 6, "hidden_size": 4, "num_buckets": 2, "dropout": 0.2, "threads": 1}


@pytest.fixture(autouse=True)
def a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def signs(tmp_path: Path) -> Path:
    return write_signs(tmp_path / "signs.npz", count=36)


def _interrupted(out: Path, data: Path, *, update: int, **settings: Any) -> None:
    def stop(event: Event) -> None:
        if event["event"] == "update" and event["update"] == update:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run_task(find_task("classify"), ClassifyConfig(data=data, out=out, **(SMALL | settings)), subscribers=[stop])


def _same(one: RunResult, other: RunResult) -> bool:
    weights = [safetensors.torch.load_file(result.run / MODEL_FILE) for result in (one, other)]
    return one.metrics == other.metrics and all(torch.equal(w, weights[1][name]) for name, w in weights[0].items())


def test_a_run_leaves_record_model_result_and_page(signs: Path) -> None:
    result = stretto.train("classify", data=signs, out="out", **SMALL)
    assert result.run == Path("out")
    names = {path.name for path in result.run.iterdir()}
    assert names == {
        EVENTS_FILE,
        CHECKPOINT_FOLDER,
        *("model.json", "settings.toml", MODEL_FILE, "best.safetensors", "result.json", "report.html"),
    }
    written = json.loads((result.run / "result.json").read_text(encoding="utf-8"))
    assert written == result.to_dict()
    assert {"accuracy", "loss"} == written["metrics"].keys()
    assert written["settings"] == {"task": "classify", **ClassifyConfig(data=signs, **SMALL).recorded()}
    kinds = [event["event"] for event in read_events(result.run)]
    assert (kinds[0], kinds[-1], kinds.count("epoch")) == ("started", "finished", 2)
    finished = read_events(result.run)[-1]
    assert {key: finished[key] for key in written} == written
    assert result.report == Path("out/report.html")
    assert "signs" in result.report.read_text(encoding="utf-8")
    saved = safetensors.torch.load_file(result.run / MODEL_FILE)
    for name, weight in result.model.state_dict().items():
        assert torch.equal(saved[name], weight), name
    files = [path for path in result.run.rglob("*") if path.is_file()]
    assert not any(zipfile.is_zipfile(path) or path.read_bytes().startswith(b"\x80") for path in files), "a pickle"
    assert not any(path.suffix == ".part" for path in files)


def test_a_run_with_muon_says_which_parameter_is_updated_how(signs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = stretto.train("classify", data=signs, out="out", **{**SMALL, "optimizer": "muon"}, progress=True)
    assert result.report is not None
    page = result.report.read_text(encoding="utf-8")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["parameter", "shape", "kind", "rule"] in lines
    for name, parameter in result.model.named_parameters():
        line = next(line for line in lines if line and line[0] == name)
        assert ("Muon," in line) is (".weight_ih" in name or ".weight_hh" in name)
        assert [str(size) for size in parameter.shape] == [word for word in line[1:] if word.isdecimal()][
            : parameter.dim()
        ]
        assert f">{name}<" in page


def test_a_page_that_cannot_be_written_costs_nothing_else(signs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Path) -> Path:
        raise StrettoError("no plots", fix="Install them.")

    monkeypatch.setattr("stretto.runs.write_run_report", fail)
    result = stretto.train("classify", data=signs, out="out", **SMALL)
    assert result.report is None
    assert Path("out/result.json").exists()
    assert "no plots" in read_events(result.run)[-1]["message"]


def test_a_full_disk_at_the_very_end_is_reported_and_the_run_can_be_resumed(
    signs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensors: dict[str, torch.Tensor], path: Path) -> None:
        raise safetensors.SafetensorError("I/O error: no space left on device")

    def watch(event: Event) -> None:
        if event["event"] == "samples":
            monkeypatch.setattr(safetensors.torch, "save_file", fail)

    with pytest.raises(StrettoError, match=r"model\.safetensors.*no space left"):
        run_task(find_task("classify"), ClassifyConfig(data=signs, out=Path("out"), **SMALL), subscribers=[watch])
    monkeypatch.setattr(safetensors.torch, "save_file", SAVE_FILE)
    # Settings that agree with the stored ones may be given again.
    assert stretto.train("classify", data=signs, out="out", resume=True, **SMALL).epochs == 2


def test_the_padding_of_the_result_is_that_of_the_batches(signs: Path) -> None:
    result = stretto.train("classify", data=signs, out="out", **SMALL)
    updates = [event for event in read_events(result.run) if event["event"] == "update"]
    real, padded_steps = (sum(event[key] for event in updates) for key in ("steps_real", "padded_steps"))
    assert result.padding == pytest.approx(1 - real / padded_steps)
    assert all(event["padded_steps"] == event["rows"] * event["length"] for event in updates)
    plain = stretto.train("classify", data=signs, out="plain", **(SMALL | {"num_buckets": 1}))
    assert plain.padded_steps_ratio == 1.0


def test_runs_without_a_folder_are_numbered_and_a_refused_one_leaves_nothing(signs: Path) -> None:
    one_epoch = SMALL | {"epochs": 1}
    assert stretto.train("classify", data=signs, **one_epoch).run == Path("runs/classify-001")
    with pytest.raises(StrettoError, match="max_padded_steps=1"):
        stretto.train("classify", data=signs, max_padded_steps=1, **one_epoch)
    assert stretto.train("classify", data=signs, **one_epoch).run == Path("runs/classify-002")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["classify-001", "classify-002"]
    Path("runs/classify-1000").mkdir()
    Path("runs/classify-mine").mkdir()
    assert stretto.train("classify", data=signs, **one_epoch).run == Path("runs/classify-1001")


def test_threads_are_as_they_were_afterwards(signs: Path) -> None:
    stretto.train("classify", data=signs, out="out", **(SMALL | {"epochs": 1, "threads": 2}))
    assert torch.get_num_threads() == 1
    assert read_events(Path("out"))[0]["threads"] == 2


@pytest.mark.parametrize(
    "update", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(7, marks=pytest.mark.slow)]
)
def test_a_resumed_run_is_the_run_that_was_not_stopped(signs: Path, update: int) -> None:
    whole = stretto.train("classify", data=signs, out="whole", **SMALL)
    _interrupted(Path("cut"), signs, update=update)
    assert not Path("cut/result.json").exists()
    resumed = stretto.train("classify", out="cut", resume=True)
    assert _same(resumed, whole)
    assert resumed.settings == whole.settings
    assert (resumed.epochs, resumed.padding, resumed.padded_steps_ratio) == (
        whole.epochs,
        whole.padding,
        whole.padded_steps_ratio,
    )


def test_resume_takes_the_latest_run_of_the_task(signs: Path) -> None:
    whole = stretto.train("classify", data=signs, out="whole", **SMALL)
    for number in ("998", "999", "1000"):
        _interrupted(Path(f"runs/classify-{number}"), signs, update=2)
    resumed = stretto.train("classify", resume=True)
    assert resumed.run == Path("runs/classify-1000")
    assert _same(resumed, whole)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"epochs": 5}, "epochs=5 (was 2)"),
        ({"epochs": ClassifyConfig().epochs}, "epochs=12 (was 2)"),
        ({"hidden_size": 9, "learning_rate": 1.0}, "hidden_size=9 (was 4), learning_rate=1.0 (was 0.005)"),
        ({"max_padded_steps": 99}, "max_padded_steps=99 (was None)"),
        ({"num_buckets": "auto"}, "num_buckets='auto' (was 2)"),
        ({"data": "other.npz"}, "data='other.npz'"),
    ],
)
def test_settings_that_conflict_with_the_stored_ones_are_refused(
    signs: Path, changes: dict[str, Any], named: str
) -> None:
    _interrupted(Path("cut"), signs, update=2)
    before = Path("cut", EVENTS_FILE).read_bytes()
    with pytest.raises(StrettoError, match="resumes with the settings it was started with") as info:
        stretto.train("classify", out="cut", resume=True, **changes)
    assert named in str(info.value)
    assert Path("cut", EVENTS_FILE).read_bytes() == before


def test_a_run_resumes_on_another_device(signs: Path) -> None:
    """Which is the same by another name here."""
    whole = stretto.train("classify", data=signs, out="whole", **SMALL)
    _interrupted(Path("cut"), signs, update=2)
    assert _same(stretto.train("classify", out="cut", resume=True, device="cpu:0"), whole)


@pytest.mark.parametrize("cut", ["no folder", "an empty folder", "no first line", "no checkpoint"])
def test_where_nothing_can_be_resumed_the_run_starts_over(signs: Path, cut: str) -> None:
    settings = SMALL | {"backend": "torch"}
    whole = stretto.train("classify", data=signs, out="whole", **settings)
    if cut != "no folder":
        Path("cut").mkdir()
    lines = Path("whole", EVENTS_FILE).read_text(encoding="utf-8").splitlines(keepends=True)
    if cut.startswith("no first") or cut == "no checkpoint":
        kept = lines[0][:50] if cut == "no first line" else "".join(lines[:3])
        Path("cut", EVENTS_FILE).write_text(kept, encoding="utf-8")
    resumed = stretto.train("classify", data=signs, out="cut", resume=True, **settings)
    assert _same(resumed, whole)
    events = read_events(Path("cut"))
    assert [event["event"] for event in events[:2]] == ["started", "warning"]
    assert "nothing to resume" in events[1]["message"]


@pytest.mark.slow
def test_ranks_in_python_train_as_those_of_the_command_line_do(signs: Path) -> None:
    settings = SMALL | {"epochs": 3, "batch_size": 3, "max_restarts": 0}
    result = stretto.train("classify", data=signs, out="ranks", ranks=2, **settings)
    assert read_events(Path("ranks"))[0]["world_size"] == 2
    assert (result.run, result.epochs, result.report) == (Path("ranks"), 3, Path("ranks/report.html"))
    saved = safetensors.torch.load_file(result.run / MODEL_FILE)
    assert all(torch.equal(saved[name], weight) for name, weight in result.model.state_dict().items())
    words = "--out line --nproc 2 --epochs 3 --batch-size 3 --hidden-size 4 --num-buckets 2 --dropout 0.2 --threads 1"
    assert main(["train", "classify", "--data", str(signs), *words.split()]) == 0
    again = safetensors.torch.load_file(Path("line", MODEL_FILE))
    assert all(torch.equal(saved[name], weight) for name, weight in again.items())
    with pytest.raises(StrettoError, match="'ranks' holds a run already"):
        stretto.train("classify", data=signs, out="ranks", ranks=2, **settings)


def _forge(run: Path, **changes: Any) -> None:
    """Change the newest checkpoint and sign it again."""
    path = load_newest(run).path
    state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    version = state.pop("version")
    del state["sha256"]
    state = {key: value for key, value in (state | changes).items() if value is not None}
    forged = {"version": version, "sha256": _checksum(path / TENSORS_FILE, state), **state}
    (path / STATE_FILE).write_text(json.dumps(forged), encoding="utf-8")


@pytest.mark.parametrize(
    "changes",
    [
        {"data_digest": None},
        {"position": 3},
        {"position": {}},
        {"position": {"epoch": -1}},
        {"sampler": None},
        {"sampler": []},
        {"sampler": {"version": "a"}},
        {"totals": 3},
        {"schedule": "x"},
    ],
    ids=str,
)
def test_a_checkpoint_that_was_changed_and_signed_again_is_refused(signs: Path, changes: dict[str, Any]) -> None:
    _interrupted(Path("cut"), signs, update=2)
    state = json.loads((load_newest(Path("cut")).path / STATE_FILE).read_text(encoding="utf-8"))
    assert changes.keys() <= state.keys()
    _forge(Path("cut"), **changes)
    with pytest.raises(StrettoError):
        stretto.train("classify", out="cut", resume=True)


def test_without_any_run_of_the_task_resuming_starts_the_first(signs: Path) -> None:
    assert stretto.train("classify", data=signs, resume=True, **SMALL).run == Path("runs/classify-001")


@pytest.mark.parametrize("left", [EVENTS_FILE, CHECKPOINT_FOLDER])
def test_a_folder_with_a_run_is_not_written_over(signs: Path, left: str) -> None:
    _interrupted(Path("cut"), signs, update=2)
    for path in (Path("cut", EVENTS_FILE), Path("cut", CHECKPOINT_FOLDER)):
        if path.name != left:
            path.rename(f"moved-{path.name}")
    before = sorted(Path("cut").rglob("*"))
    with pytest.raises(StrettoError, match=r"'cut' holds a run already.*--resume"):
        stretto.train("classify", data=signs, out="cut", **SMALL)
    assert sorted(Path("cut").rglob("*")) == before


def test_an_empty_folder_and_one_with_other_files_are_taken(signs: Path) -> None:
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine", encoding="utf-8")
    stretto.train("classify", data=signs, out="out", **SMALL)
    assert Path("out/notes.txt").read_text(encoding="utf-8") == "mine"


def test_a_run_works_in_another_thread(signs: Path) -> None:
    results: list[RunResult] = []
    worker = threading.Thread(target=lambda: results.append(stretto.train("classify", data=signs, out="out", **SMALL)))
    worker.start()
    worker.join()
    assert [result.epochs for result in results] == [2]


def test_progress_is_shown_when_it_is_asked_for(signs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stretto.train("classify", data=signs, out="quiet", **SMALL)
    assert capsys.readouterr() == ("", "")
    result = stretto.train("classify", data=signs, out="loud", progress=True, **SMALL)
    shown = capsys.readouterr().out
    assert "classify: signs, 24 train, 6 valid, 6 test sequences" in shown
    assert f"{result.metrics['accuracy']:.2%}" in shown


def test_too_little_memory_is_reported(signs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Trainer) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")

    monkeypatch.setattr(Trainer, "run", fail)
    with pytest.raises(StrettoError, match=r"not enough memory.*--batch-size"):
        stretto.train("classify", data=signs, out="out", **SMALL)


def test_the_cap_names_the_sequence_of_the_file(signs: Path) -> None:
    data = read_npz(signs)
    longest = int(data.lengths_N.argmax())
    cap = int(data.lengths_N.max()) - 1
    with pytest.raises(StrettoError, match=rf"sequence {longest} has {cap + 1} steps"):
        stretto.train("classify", data=signs, out="out", max_padded_steps=cap, **SMALL)
    assert not Path("out").exists()


@pytest.mark.parametrize("task", ["classify", "label-steps"])
def test_a_path_that_is_slower_than_expected_is_told_everywhere(
    signs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    _layer_program.cache_clear()
    data = {"data": signs} if task == "classify" else {"data": _step_labels(Path("steps.npz"))}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = stretto.train(task, out="shown", progress=True, **data, **SMALL)
    told = "runs as torch's own layer: no C++ compiler was found (no-such-compiler)"
    messages = [event["message"] for event in read_events(result.run) if event["event"] == "warning"]
    assert [told in message for message in messages] == [True], "once"
    assert f"warning: {messages[0]}" in capsys.readouterr().out
    assert result.report is not None
    assert html.escape(told, quote=True) in result.report.read_text(encoding="utf-8")
    with pytest.warns(UserWarning, match="no-such-compiler"):
        stretto.train(task, out="silent", **data, **SMALL)
    # It is the same net, up to rounding.
    monkeypatch.delenv("CXX")
    _layer_program.cache_clear()
    compiled = stretto.train(task, out="compiled", **data, **SMALL)
    assert not any(event["event"] == "warning" for event in read_events(compiled.run))
    for name, weight in result.model.state_dict().items():
        torch.testing.assert_close(compiled.model.state_dict()[name], weight, rtol=1e-3, atol=1e-4)


def _step_labels(path: Path) -> Path:
    data = make_regimes()
    write_npz(path, data.subset(np.concatenate([np.flatnonzero(data.split_N == part)[:12] for part in range(3)])))
    return path
