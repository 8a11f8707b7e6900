"""Runs with `--device cuda`, by the CPU as a stand-in: what goes where, and that nothing waits for a batch's copy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import outcome, stop, train

from gpu_stand_in import GpuStandIn
from small_data import make_task, task_data
from stretto.training import AbstractTask


def task(name: str, device: str) -> AbstractTask[Any]:
    rng = np.random.default_rng(0)
    data = task_data(name, rng.integers(2, 12, 24), rng, parts=(12, 6, 6))
    options = {"stack": 2} if name == "handwriting" else {}
    return make_task(name, data, epochs=2, batch_size=6, hidden_size=4, dropout=0.3, device=device, **options)


@pytest.mark.parametrize(
    "name", ["classify", *(pytest.param(name, marks=pytest.mark.slow) for name in ("handwriting", "language-model"))]
)
def test_batches_are_pinned_and_copied_while_the_program_goes_on(name: str, tmp_path: Path) -> None:
    outcomes = []
    for device in ("cpu", "cuda"):
        with GpuStandIn() as gpu:
            outcomes.append(outcome(tmp_path / device, train(tmp_path / device, task(name, device))))
        assert gpu.pinned == gpu.asynchronous
        assert (gpu.asynchronous > 0) == (device == "cuda")
        assert gpu.waiting == []
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("first", "second"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_run_goes_on_on_another_device(first: str, second: str, tmp_path: Path) -> None:
    with GpuStandIn():
        expected = outcome(tmp_path / "whole", train(tmp_path / "whole", task("classify", "cpu")))
        stop(tmp_path / "run", task("classify", first), 3)
        assert outcome(tmp_path / "run", train(tmp_path / "run", task("classify", second), resume=True)) == expected
