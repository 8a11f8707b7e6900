"""Whole runs in processes of their own, some of them killed or stopped on the way."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto
from bench import faults
from bench.quick_python import QuickPython
from quick_starts import quick_starts
from small_data import write_signs
from stretto.cli.main import main
from stretto.errors import StrettoError
from stretto.runs import run_task
from stretto.tasks import TASKS, find_task
from stretto.tasks.classify import ClassifyConfig
from stretto.training import EVENTS_FILE, Event, read_events

Train = Callable[..., tuple[int, str]]
SMALL: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 8,
    "hidden_size": 4,
    "num_buckets": 2,
    "threads": 1,
    "backend": "torch",
    "checkpoint_minutes": 1e-9,
}
SETTINGS = ["--batch-size", "4", "--hidden-size", "4", "--num-buckets", "2", "--backend", "torch"]


@pytest.fixture(scope="module")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_signs(tmp_path_factory.mktemp("data") / "signs.npz", count=60)


def words_for(data: Path, out: Path) -> list[str]:
    return ["--data", str(data), "--out", str(out), *SETTINGS]


def start(data: Path, out: Path, *words: str) -> "subprocess.Popen[str]":
    """`stretto train` in a process of its own."""
    command = [sys.executable, "-m", "stretto", "train", "classify", *words_for(data, out), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def train(capfd: pytest.CaptureFixture[str]) -> Train:
    """`stretto train` by this process, which starts ranks if asked to: its exit code, and all that was said."""

    def call(*words: str) -> tuple[int, str]:
        capfd.readouterr()
        code = main(["train", "classify", *words])
        return code, "".join(capfd.readouterr())

    return call


def updates_of(run: Path) -> list[Event]:
    """Updates that a run has recorded, as they count in the end."""
    return [event for event in read_events(run) if event["event"] == "update"] if (run / EVENTS_FILE).exists() else []


def wait_for_updates(process: "subprocess.Popen[str]", run: Path, number: int) -> None:
    """Until a run of this process has come so far."""
    while len(updates_of(run)) < number:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def _train_until_killed(data: str, out: str) -> None:
    """Train until the tenth update is recorded, then be killed, while a checkpoint may be under way."""

    def watch(event: Event) -> None:
        if event["event"] == "update" and event["update"] == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    run_task(find_task("classify"), ClassifyConfig(data=Path(data), out=Path(out), **SMALL), subscribers=[watch])


def test_a_killed_process_resumes_to_the_same_weights(signs: Path, tmp_path: Path) -> None:
    process = quick_starts().Process(target=_train_until_killed, args=(str(signs), str(tmp_path / "cut")))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert read_events(tmp_path / "cut")[-1]["event"] == "update"
    resumed = stretto.train("classify", out=tmp_path / "cut", resume=True)
    whole = stretto.train("classify", data=signs, out=tmp_path / "whole", **SMALL)
    assert resumed.metrics == whole.metrics
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight), name


@pytest.mark.slow
def test_two_ranks_train_and_leave_one_record(signs: Path, tmp_path: Path, train: Train) -> None:
    code, said = train(*words_for(signs, tmp_path / "run"), "--nproc", "2", "--epochs", "2")
    assert code == 0, said
    assert said.count("epoch   1") == 1, said
    events = read_events(tmp_path / "run")
    assert [event["event"] for event in events].count("finished") == 1
    assert sum(event["rows"] for event in events if event["event"] == "update") == 2 * 40
    ranks = [event for event in events if event["event"] == "ranks"]
    assert len(ranks) == 2
    assert all(len(event["steps_real"]) == 2 and sum(event["steps_real"]) > 0 for event in ranks)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["epochs"] == 2


@pytest.mark.slow
def test_ranks_hit_by_faults_are_restarted_and_the_result_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One killed, all killed, killed while saving, and a full disk; two in each of two runs."""
    monkeypatch.setattr(faults, "MAX_FAULTS_PER_RUN", 2)
    settings = faults.FaultsSettings(kills=4, stops=False, nodes=False)
    with QuickPython() as python:
        outcome = faults.inject_faults(settings, python=python, progress=lambda _: None)
    assert len(outcome.faults) == 4
    assert set(outcome.faults) <= {"one", "all", "saving", "full"}
    assert (outcome.survived, outcome.exit_code, outcome.runs) == (4, 0, 2)
    assert outcome.resumed >= 4
    assert outcome.usage == faults.Usage(epochs=2 * 3 * faults.EPOCHS_PER_FAULT, lost=0, repeated=0)
    assert outcome.same_weights


@pytest.mark.slow
def test_runs_of_every_task_are_killed_at_every_moment_and_resumed_to_the_same_bits() -> None:
    """With one rank and with two; each kill met a run that was going on."""
    settings = faults.FaultsSettings(kills=2 * len(TASKS))
    with QuickPython() as python:
        kills = faults.kill_tasks(settings, python=python, progress=lambda _: None)
    assert [kill for kill in kills if not kill.is_same] == []
    assert {(kill.task, kill.ranks) for kill in kills} == {(task, ranks) for task in TASKS for ranks in (1, 2)}
    assert {kill.moment for kill in kills} == set(faults.MOMENTS)


@pytest.mark.slow
def test_a_node_is_dropped_and_comes_back() -> None:
    try:
        world_sizes, usage, exit_codes = faults.drop_a_node(progress=lambda _: None)
    except StrettoError as error:
        if "unshare" not in str(error):
            raise
        pytest.skip(str(error))
    assert world_sizes == [2, 1, 2]
    assert usage == faults.Usage(epochs=faults.NODE_EPOCHS, lost=0, repeated=0)
    assert exit_codes == [0, 0]


def listening(processes: list[int]) -> set[str]:
    """Addresses, as Linux writes them, on which these processes wait for connections."""
    found = set()
    for process in processes:
        links = [str(link.readlink()) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()]
        sockets = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in sockets:
                    found.add(fields[1].partition(":")[0])
    return found


@pytest.mark.slow
def test_ranks_listen_on_loopback_only_and_save_when_asked_to_stop_and_one_process_resumes(
    signs: Path, tmp_path: Path, train: Train
) -> None:
    run = tmp_path / "run"
    process = start(signs, run, "--nproc", "2", "--epochs", "40")
    try:
        wait_for_updates(process, run, 12)
        ranks = [rank for rank, _ in faults.ranks_below(process.pid)]
        launcher = {int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{w}/status").read_text())[0]) for w in ranks}
        assert len(ranks) == 2
        addresses = listening([process.pid, *launcher, *ranks])
        assert addresses <= {"0100007F", "00000000000000000000000001000000"}
        assert addresses, "gloo listens, so there is something to see"
    finally:
        process.terminate()
        said, _ = process.communicate()
    assert process.returncode == 130, said
    assert "everything is saved" in said
    code, said = train("--out", str(run), "--resume")
    assert code == 0, said
    for epoch in range(40):
        assert sum(event["rows"] for event in updates_of(run) if event["epoch"] == epoch) == 40, epoch


@pytest.mark.slow
def test_a_gradient_that_is_nan_stops_all_ranks_in_the_same_update(signs: Path, tmp_path: Path, train: Train) -> None:
    words = ["--nproc", "2", "--epochs", "4", "--learning-rate", "1e38"]
    code, said = train(*words_for(signs, tmp_path / "run"), *words)
    assert code == 2, said
    errors = re.findall(r"error: the loss or gradient is \S+ at update (\d+), on training sequences (.*)", said)
    assert len(errors) == 2, said
    assert errors[0] == errors[1]


@pytest.mark.slow
def test_a_folder_in_use_is_refused(signs: Path, tmp_path: Path, train: Train) -> None:
    process = start(signs, tmp_path / "run", "--epochs", "2000")
    try:
        wait_for_updates(process, tmp_path / "run", 2)
        code, said = train(*words_for(signs, tmp_path / "run"), "--resume", "--epochs", "2000")
        assert code == 2, said
        assert "another run is writing to" in said
    finally:
        process.kill()
        process.wait()


def test_far_more_ranks_than_cores_are_refused(signs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "classify", "--data", str(signs), "--out", str(tmp_path / "run"), "--nproc", "5000"]
    assert main(words) == 2
    assert "5000 ranks" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
