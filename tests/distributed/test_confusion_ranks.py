"""The confusion matrix over several ranks: the counts of one process, whatever is left for the last batches."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import rank0_log, run_world

from small_data import labelled, make_task
from stretto.cli.main import main
from stretto.data import SequenceSet, make_regimes, write_npz
from stretto.distributed import World
from stretto.report import PAGE_NAME, write_run_report
from stretto.tasks.classify import Classify
from stretto.training import AbstractTask, Trainer, evaluate, read_events

NUM_TESTED = 131
"""Two ranks take batches of 64; of the three sequences that are left, one rank has two and the other has one."""
SETTINGS: dict[str, Any] = {"epochs": 1, "batch_size": 4, "hidden_size": 4, "backend": "torch", "num_buckets": 2}


def _data(num_tested: int) -> SequenceSet:
    rng = np.random.default_rng(2)
    lengths_N = rng.integers(2, 9, 12 + num_tested)
    features_SF = rng.normal(size=(lengths_N.sum(), 3)).astype(np.float32)
    return labelled(features_SF, lengths_N, np.arange(len(lengths_N)) % 3, parts=(8, 4, num_tested))


def _task(name: str, num_tested: int) -> AbstractTask[Any]:
    if name == "label-steps":
        return make_task(name, make_regimes(num_train=4, median_length=20), **SETTINGS)
    return make_task(name, _data(num_tested), **SETTINGS)


def _found(world: World, name: str, num_tested: int) -> dict[str, Any]:
    task = _task(name, num_tested)
    torch.manual_seed(1)
    model = task.build_model()
    found = evaluate(task, model, task.data.part("test"), device="cpu", final=True, world=world)
    return dataclasses.asdict(found)


@pytest.mark.parametrize(
    ("name", "num_tested"),
    [
        ("classify", NUM_TESTED),
        pytest.param("classify", 1, id="none for the second rank"),
        pytest.param("classify", 65, marks=pytest.mark.slow),
        ("label-steps", 0),
    ],
)
def test_ranks_count_what_one_process_counts(tmp_path: Path, name: str, num_tested: int) -> None:
    found = run_world(2, _found, tmp_path, name, num_tested)
    expected = json.loads(json.dumps(_found(World(), name, num_tested)))
    for answer in found:
        assert answer["confusion"] == expected["confusion"]
        assert answer["metrics"] == pytest.approx(expected["metrics"])
    counted = sum(count for _, _, count in expected["confusion"]["pairs"])
    if name == "classify":
        assert counted == num_tested
    right = sum(count for true, other, count in expected["confusion"]["pairs"] if true == other)
    assert found[0]["metrics"]["accuracy"] == pytest.approx(right / counted)


class _UnknownClass(Classify):
    """Finds a class that has no name, for a single sequence of the test part."""

    def classes(self, output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        true_P, found_P = super().classes(output, batch)
        return true_P, torch.where(batch.indices == batch.indices.new_tensor(self.bad), 99, found_P)

    bad: int = -1


def _meet_unknown(world: World, bad: int) -> None:
    task = _UnknownClass(Classify.Config(**SETTINGS), _data(NUM_TESTED))
    task.bad = bad
    evaluate(task, task.build_model(), task.data.part("test"), device="cpu", final=True, world=world)


def test_a_class_without_a_name_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    number = int(_data(NUM_TESTED).part("test").numbers_N[7])
    for answer in run_world(2, _meet_unknown, tmp_path, number):
        assert "3 class names and found a class with another number" in answer


def _train(world: World, run: str) -> None:
    task = _task("classify", NUM_TESTED)
    result = Trainer(task, run=Path(run), log=rank0_log(world, run), resume=False, world=world).run()
    if world.is_rank0:
        single = evaluate(task, result.model, task.data.part("test"), device="cpu", final=True)
        assert single.confusion is not None
        (event,) = (event for event in read_events(Path(run)) if event["event"] == "confusion")
        assert event["pairs"] == [list(pair) for pair in single.confusion.pairs]
        assert "Classes taken for others" in write_run_report(Path(run)).read_text(encoding="utf-8")


def test_the_record_and_the_report_of_two_ranks_have_the_counts_of_one(tmp_path: Path) -> None:
    assert run_world(2, _train, tmp_path / "world", str(tmp_path / "run")) == [None, None]


@pytest.mark.slow
def test_a_run_of_two_ranks_and_an_evaluation_of_it_agree(tmp_path: Path) -> None:
    data, run, found = tmp_path / "data.npz", tmp_path / "run", tmp_path / "found.json"
    write_npz(data, _data(NUM_TESTED))
    words = f"--data {data} --out {run} --epochs 1 --batch-size 4 --hidden-size 4 --backend torch --nproc 2"
    assert main(["train", "classify", *words.split()]) == 0
    assert main(["evaluate", str(run), str(data), "--json", str(found)]) == 0
    confusion = json.loads(found.read_text(encoding="utf-8"))["confusion"]
    (event,) = (event for event in read_events(run) if event["event"] == "confusion")
    assert (confusion["names"], confusion["pairs"]) == (event["names"], event["pairs"])
    assert sum(count for _, _, count in confusion["pairs"]) == NUM_TESTED
    assert "Classes taken for others" in (run / PAGE_NAME).read_text(encoding="utf-8")
