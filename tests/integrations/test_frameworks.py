"""The programs of "In your framework", each as it stands there, against the package itself; SLURM by its variables.

The packages are those of the extra `integrations`, which `make test-all` installs.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from small_data import write_signs

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
QUIET = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}

pytestmark = pytest.mark.slow


def run_program(title: str, folder: Path, *, ranks: int = 1, changed: tuple[str, str] | None = None) -> list[str]:
    """The lines that the program of a section prints; each of several ranks prints to a file of its own.

    Args:
        title: Of the section.
        folder: Where it runs.
        ranks: How many processes run it.
        changed: A piece of the program, and what stands there instead.
    """
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    if changed is not None:
        assert program.count(changed[0]) == 1
        program = program.replace(*changed)
    script = folder / "program.py"
    script.write_text(program, encoding="utf-8")
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["--local-addr=127.0.0.1", "--log-dir", str(folder / "log"), "--redirects", "3"]
    done = subprocess.run(
        [*command, str(script)], cwd=folder, env=os.environ | QUIET, capture_output=True, text=True, check=False
    )
    files = sorted((folder / "log").rglob("std*.log"))
    printed = done.stdout + "".join(file.read_text(encoding="utf-8") for file in files)
    assert done.returncode == 0, done.stderr + printed
    return printed.splitlines()


def test_lightning_on_two_ranks_resumes_in_mid_epoch_with_the_same_weights(tmp_path: Path) -> None:
    said = run_program("Lightning", tmp_path, ranks=2)
    assert sorted(line for line in said if line.startswith("rank ")) == [
        f"rank {rank}: 18 updates, resumed the same: True" for rank in range(2)
    ]


def test_lightning_lets_the_tuner_choose_the_batch_of_each_epoch(tmp_path: Path) -> None:
    *said, end = run_program("Lightning: automatic batch size", tmp_path)
    first, *others = (line for line in said if re.match(r"(keep|grow|shrink|roll-back): batch ", line))
    grown, rate = re.findall(r"^grow: batch (\d+), rate ([\d.]+),", first)[0]
    assert int(grown) in (16, 32)
    assert float(rate) == pytest.approx(0.01 * (int(grown) / 8) ** 0.5, rel=0.01)
    assert "roll-back" not in " ".join(others)
    seen, updates, same = re.findall(r"(\d+) sequences in (\d+) updates, resumed the same: (\w+)", end)[0]
    assert (int(seen), same) == (6 * 640, "True")
    assert int(updates) < 0.6 * 6 * 640 / 8


def test_lightning_rolls_back_from_a_loss_that_is_nan(tmp_path: Path) -> None:
    step = "return loss_sum / self.sampler.batch_size"
    poisoned = f"{step} * (float('nan') if self.trainer.current_epoch == 4 and batch_idx == 3 else 1)"
    *said, end = run_program("Lightning: automatic batch size", tmp_path, changed=(step, poisoned))
    before, back = (next(line for line in said if line.startswith(word)) for word in ("grow", "roll-back"))
    size, back_to = (int(re.findall(r"batch (\d+)", line)[0]) for line in (before, back))
    assert back_to < size
    assert f"only batches below {size} from here" in back
    assert end.startswith(f"{6 * 640} sequences in ")
    assert end.endswith("resumed the same: True")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("reload_dataloaders_every_n_epochs=1,", ""), "every_n_epochs=0, with which Lightning keeps"),
        (("TuneBatch(tuner, sampler,", "TuneBatch(tuner, 4,"), "TuneBatch got sampler=4"),
        (('return {"optimizer": optimizer, "lr', 'return optimizer or {"lr'), "1 optimisers and 0 schedules"),
    ],
)
def test_a_trainer_that_the_tuner_cannot_follow_is_refused(
    changed: tuple[str, str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=words):
        run_program("Lightning: automatic batch size", tmp_path, changed=changed)


def test_accelerate_sees_every_sequence_once_and_may_not_prepare_the_loader(tmp_path: Path) -> None:
    said = run_program("Hugging Face Accelerate", tmp_path, ranks=2)
    for rank in range(2):
        assert f"rank {rank}: 118 sequences in 2 epochs" in said
        (refused,) = (line for line in said if line.startswith(f"rank {rank} refused"))
        assert "Leave the loader out of accelerator.prepare(...)" in refused


def test_the_trainer_resumes_in_mid_epoch_with_the_same_weights(tmp_path: Path) -> None:
    assert run_program("Hugging Face Trainer", tmp_path)[-1] == "24 updates, resumed the same: True"


def test_ray_train_sees_every_sequence_once_on_two_ranks(tmp_path: Path) -> None:
    assert "118 sequences on 2 ranks" in run_program("Ray Train", tmp_path)


def test_skorch_fits_and_predicts_ragged_lists(tmp_path: Path) -> None:
    (said,) = run_program("skorch and scikit-learn", tmp_path)
    accuracies = [float(number) for number in re.findall(r"\d\.\d\d", said)]
    assert len(accuracies) == 2
    assert min(accuracies) > 0.9


@pytest.mark.parametrize(
    ("title", "said", "package"),
    [
        ("sb3-contrib", "weights", "sb3_contrib"),
        ("TorchRL", "gradients", "torchrl"),
        ("neuralforecast", "forecasts", "neuralforecast"),
        ("darts", "forecasts", "darts"),
        ("GluonTS", "weights", "gluonts"),
    ],
)
def test_an_accelerated_library_computes_the_same(title: str, said: str, package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: `make integrations` brings it")
    line = run_program(title, tmp_path)[-1]
    assert line.startswith(f"{said} differ by ")
    assert float(line.split()[-1]) < 1e-4


def test_tasks_of_srun_train_together_and_a_requeued_job_goes_on(tmp_path: Path) -> None:
    write_signs(tmp_path / "signs.npz", count=36)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["train", "classify", "--data", "signs.npz", "--out", "run", "--epochs", "150", "--hidden-size", "4"]
    words += ["--backend", "torch", "--resume"]
    step = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "here", "MASTER_PORT": str(port)}

    def srun() -> list["subprocess.Popen[bytes]"]:
        return [
            subprocess.Popen(
                [sys.executable, "-m", "stretto", *words],
                cwd=tmp_path,
                env=os.environ | QUIET | step | {"SLURM_PROCID": str(rank)},
                stdout=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]

    tasks, record = srun(), tmp_path / "run" / "events.jsonl"
    while not (record.exists() and '"event": "epoch"' in record.read_text(encoding="utf-8")):
        assert all(task.poll() is None for task in tasks)
        time.sleep(0.05)
    for task in tasks:
        task.send_signal(signal.SIGTERM)
    assert [task.wait() for task in tasks] == [130, 130]
    assert [task.wait() for task in srun()] == [0, 0]
    events = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    assert [event["world_size"] for event in events if event["event"] == "started"] == [2]
    assert sum(event["event"] == "resumed" for event in events) == 1
    assert events[-1]["event"] == "finished"


def test_the_versions_are_those_that_the_programs_ran_with() -> None:
    """Of each package of the table the version that is installed has the same first number."""
    table = dict(re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \|", PAGE, flags=re.MULTILINE))
    assert len(table) > 8
    found = {name: importlib.metadata.version(name) for name in table}
    assert {name: version.split(".")[0] for name, version in found.items()} == {
        name: version.split(".")[0] for name, version in table.items()
    }
