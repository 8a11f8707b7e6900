"""Evaluation: the same as sequence by sequence, and it leaves no trace.

Shape legend: S steps of all sequences, N sequences.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from training_runs import train

from small_data import labelled
from stretto.batching import Batch, collate
from stretto.errors import StrettoError
from stretto.tasks.classify import Classify, ClassifyConfig
from stretto.training import CHECKPOINT_FOLDER, Score, evaluate
from stretto.training.evaluate import sample_predictions
from stretto.training.feeds import EVAL_BATCH_SIZE


def _task(*, huge: int | None = None) -> Classify:
    """150 sequences, 100 of them for validation, so that it takes several batches; one may be huge."""
    rng = np.random.default_rng(0)
    lengths_N = rng.integers(1, 9, 150)
    offsets = np.cumsum([0, *lengths_N])
    features_SF = rng.normal(0.0, 0.01, (lengths_N.sum(), 2)).astype(np.float32)
    if huge is not None:
        features_SF[offsets[huge] : offsets[huge + 1]] = 3e38
    data = labelled(features_SF, lengths_N, rng.integers(0, 3, 150), parts=(40, 100, 10), name="signs")
    return Classify(ClassifyConfig(hidden_size=4, dropout=0.5, epochs=2, backend="torch"), data)


def test_a_part_is_evaluated_as_its_sequences_one_by_one() -> None:
    task = _task()
    torch.manual_seed(0)
    model, part = task.build_model(), task.data.part("valid")
    assert len(part) > EVAL_BATCH_SIZE
    found = evaluate(task, model, part, device="cpu")
    model.eval()
    with torch.no_grad():
        batches = [collate([part[index]]) for index in range(len(part))]
        losses = [float(task.loss(model(batch), batch).total) for batch in batches]
        right = sum(task.score(model(batch), batch)["accuracy"].amount for batch in batches)
    assert found.loss == pytest.approx(sum(losses) / 100, rel=1e-5)
    assert found.metrics == {"accuracy": right / 100}


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_leaves_mode_gradients_and_random_state_as_they_were(training: bool) -> None:
    task = _task()
    model, part = task.build_model().train(training), task.data.part("valid")
    before = torch.get_rng_state()
    first = evaluate(task, model, part, device="cpu")
    assert model.training == training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    assert evaluate(task, model, part, device="cpu") == first
    assert torch.is_grad_enabled()


def test_an_error_in_evaluation_restores_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    task = _task()
    model = task.build_model().train()

    def fail(output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        raise RuntimeError("no score")

    monkeypatch.setattr(task, "score", fail)
    with pytest.raises(RuntimeError, match="no score"):
        evaluate(task, model, task.data.part("valid"), device="cpu")
    assert model.training
    assert torch.is_grad_enabled()


def test_only_the_final_evaluation_asks_for_the_slow_score(monkeypatch: pytest.MonkeyPatch) -> None:
    task = _task()
    model, part = task.build_model(), task.data.part("test")

    def slow_score(output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        return {"accuracy": Score(amount=0.25, count=len(batch))}

    monkeypatch.setattr(task, "final_score", slow_score)
    assert evaluate(task, model, part, device="cpu", final=True).metrics == {"accuracy": 0.25 / 10}
    assert evaluate(task, model, part, device="cpu").metrics != {"accuracy": 0.25 / 10}


def test_every_sequence_is_shown_once() -> None:
    task = _task()
    part = task.data.part("valid")
    shown = sample_predictions(task, task.build_model(), part, device="cpu")
    targets = sorted(str(part[index].target) for index in range(len(part)))
    assert sorted(sample.target for sample in shown) == targets


@pytest.mark.parametrize(("number", "part"), [(47, "valid"), (145, "test")])
def test_a_part_with_a_nan_loss_is_named_with_its_sequences(tmp_path: Path, number: int, part: str) -> None:
    task = _task(huge=number)
    with pytest.raises(StrettoError, match=rf"signs \({part}\), on sequences [\d, ]*\b{number}\b") as info:
        train(tmp_path, task)
    assert "is nan" in str(info.value)
    assert (tmp_path / CHECKPOINT_FOLDER).exists() == (part == "test")
