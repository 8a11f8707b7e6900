"""A task of the user's own, given to `stretto.train` as an object; and one whose count of elements is wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from small_data import labelled
from stretto.batching import Batch
from stretto.data import SequenceSet
from stretto.errors import StrettoError
from stretto.training import AbstractTask, LossSum, Sample, Score, TrainConfig, read_events

SMALL: dict[str, Any] = {"epochs": 2, "batch_size": 6, "hidden_size": 4, "num_buckets": 2, "dropout": 0.0, "threads": 1}
TRAIN = 24


class _Net(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.gru = nn.GRU(2, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        output: torch.Tensor = self.out(self.gru(batch.features_BTF)[0])
        return output


class _NextValue(AbstractTask[TrainConfig]):
    """Predicts the first feature of the next step: as many elements as steps that have a successor."""

    name = "next-value"
    metric = "squared_error"

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        raise NotImplementedError

    def build_model(self) -> nn.Module:
        return _Net(self.config.hidden_size)

    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        steps_T = torch.arange(batch.features_BTF.shape[1] - 1)
        has_next_BT = steps_T < (batch.lengths - 1)[:, None]
        errors_BT = (output[:, :-1, 0] - batch.features_BTF[:, 1:, 0]).square()
        return LossSum(total=errors_BT[has_next_BT].sum(), count=int(has_next_BT.sum()))

    def num_elements(self, part: SequenceSet) -> int:
        return part.num_steps - len(part)

    def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        summed = self.loss(output, batch)
        return {"squared_error": Score(amount=float(summed.total), count=summed.count)}

    def samples(self, output: torch.Tensor, batch: Batch) -> list[Sample]:  # noqa: ARG002
        return [Sample(target="", output="") for _ in range(len(batch))]


class _Forgetful(_NextValue):
    """Leaves `num_elements` as it is: one per sequence."""

    def num_elements(self, part: SequenceSet) -> int:
        return len(part)


@pytest.fixture(scope="module")
def data() -> SequenceSet:
    rng = np.random.default_rng(0)
    lengths_N = np.where(np.arange(TRAIN + 12) % 2, rng.integers(8, 12, TRAIN + 12), rng.integers(2, 5, TRAIN + 12))
    features_SF = rng.normal(size=(lengths_N.sum(), 2)).astype(np.float32)
    return labelled(features_SF, lengths_N, np.arange(TRAIN + 12) % 2, parts=(TRAIN, 6, 6), name="noise")


def test_a_task_object_trains_with_its_settings_and_those_given(tmp_path: Path, data: SequenceSet) -> None:
    task = _NextValue(TrainConfig(**SMALL), data)
    result = stretto.train(task, out=tmp_path / "run", epochs=1)
    assert (result.epochs, result.settings["epochs"], result.settings["hidden_size"]) == (1, 1, 4)
    assert result.metrics["squared_error"] == pytest.approx(result.metrics["loss"])
    assert task.config.epochs == 2
    assert read_events(result.run)[0]["task"] == "next-value"
    with pytest.raises(StrettoError, match=r"data=.other\.npz. was given with a task object"):
        stretto.train(task, out=tmp_path / "other", data="other.npz")


def test_a_task_object_resumes(tmp_path: Path, data: SequenceSet) -> None:
    whole = stretto.train(_NextValue(TrainConfig(**SMALL), data), out=tmp_path / "whole")

    class Crash(_NextValue):
        def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
            if torch.is_grad_enabled() or (tmp_path / "cut/checkpoints").exists():
                raise RuntimeError("the power is gone")
            return super().score(output, batch)

    with pytest.raises(RuntimeError, match="the power is gone"):
        stretto.train(Crash(TrainConfig(**SMALL), data), out=tmp_path / "cut")
    resumed = stretto.train(_NextValue(TrainConfig(**SMALL), data), out=tmp_path / "cut", resume=True)
    assert resumed.metrics == whole.metrics
    with pytest.raises(StrettoError, match="is finished"):
        stretto.train(_NextValue(TrainConfig(**SMALL), data), out=tmp_path / "cut", resume=True)


def test_a_count_of_elements_that_disagrees_with_the_losses_is_an_error(tmp_path: Path, data: SequenceSet) -> None:
    elements = data.part("train").num_steps - TRAIN
    with pytest.raises(StrettoError, match=r"'next-value'.*num_elements") as info:
        stretto.train(_Forgetful(TrainConfig(**SMALL), data), out=tmp_path / "run")
    assert f"num_elements={TRAIN}," in str(info.value)
    assert f"sums over {elements} elements" in str(info.value)
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_without_buckets_the_count_is_not_used(tmp_path: Path, data: SequenceSet) -> None:
    result = stretto.train(_Forgetful(TrainConfig(**SMALL | {"num_buckets": 1}), data), out=tmp_path / "run")
    assert result.epochs == 2


def test_sparse_gradients_train_as_dense_ones_do(tmp_path: Path, data: SequenceSet) -> None:
    class Net(_Net):
        def __init__(self, hidden_size: int, *, sparse: bool) -> None:
            super().__init__(hidden_size)
            self.sign = nn.Embedding(2, hidden_size, sparse=sparse)

        def forward(self, batch: Batch) -> torch.Tensor:
            signs_BTH = self.sign((batch.features_BTF[..., 0] > 0).long())
            output: torch.Tensor = self.out(self.gru(batch.features_BTF)[0] + signs_BTH)
            return output

    losses = []
    for sparse in (False, True):

        class Task(_NextValue):
            def build_model(self, sparse: bool = sparse) -> nn.Module:
                return Net(self.config.hidden_size, sparse=sparse)

        config = TrainConfig(**SMALL, optimizer="sgd", schedule="constant", learning_rate=0.05, clip_norm=0.5)
        losses.append(stretto.train(Task(config, data), out=tmp_path / str(sparse)).metrics["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("amount", [float("nan"), float("inf")])
def test_a_metric_that_is_no_number_is_named(tmp_path: Path, data: SequenceSet, amount: float) -> None:
    class _Undefined(_NextValue):
        def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:  # noqa: ARG002
            return {"squared_error": Score(amount=amount, count=1)}

    words = f"the metric 'squared_error' of the task 'next-value' is {amount} in the evaluation of .*Let score"
    with pytest.raises(StrettoError, match=words):
        stretto.train(_Undefined(TrainConfig(**SMALL), data), out=tmp_path / "run")
