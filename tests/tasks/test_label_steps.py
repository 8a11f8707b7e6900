"""Labels of steps: padding and unlabelled steps change nothing, and labels of steps are needed.

Shape legend: B sequences, T steps, F features, C classes, N sequences of the set.
"""

from typing import Any

import numpy as np
import pytest
import torch
from task_gradients import assert_padding_changes_nothing, built, ragged, whole
from torch import nn

import stretto
from stretto.batching import collate
from stretto.data import StepLabels, make_regimes
from stretto.errors import StrettoError
from stretto.tasks.label_steps import LabelSteps, LabelStepsConfig

pytestmark = pytest.mark.usefixtures("quick_compiler")

LENGTHS = [1, 8, 3, 5, 1, 13]
OFFSETS = np.cumsum([0, *LENGTHS])
VALUES = np.random.default_rng(1).integers(0, 4, OFFSETS[-1])


def _task(values: Any = VALUES, **settings: Any) -> LabelSteps:
    config = LabelStepsConfig(**{"hidden_size": 5, "dropout": 0.0, **settings})
    names = ["none", "sit", "walk", "lie"]
    targets = StepLabels.check(values, offsets=OFFSETS, names=names, source="here")
    return LabelSteps(config, ragged(LENGTHS, num_features=2, targets=targets, name="moves"))


WAYS: list[dict[str, Any]] = [
    {},
    {"bidirectional": True, "num_layers": 2},
    {"backend": "torch"},
    {"backend": "torch", "bidirectional": True},
    {"solver": "shooting", "chunks": 3, "tolerance": 1e-13},
]


@pytest.mark.parametrize("settings", WAYS)
def test_padding_changes_nothing(settings: dict[str, Any]) -> None:
    rubbish = [1e30, float("inf"), float("nan")]
    assert_padding_changes_nothing(_task(**settings), count=int((VALUES > 0).sum()), rubbish=rubbish, targets=2)


@pytest.mark.parametrize("both_ways", [False, True])
def test_kernels_and_the_plain_definition_agree(both_ways: bool) -> None:
    """Against torch's GRU on each sequence alone, with the same weights."""
    task = _task(bidirectional=both_ways)
    model = built(task)
    rnn: Any = model.gru.rnn
    plain = nn.GRU(2, 5, batch_first=True, bidirectional=both_ways).double()
    with torch.no_grad():
        for cell, suffix in zip(rnn.cells, ("", "_reverse"), strict=False):
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                getattr(plain, f"{name}_l0{suffix}").copy_(getattr(cell, name))
    batch = whole(task)
    output_BTC = model(batch)
    x_BTF = model.standardise(batch.features_BTF, batch.mask)  # type: ignore[operator]
    for row, length in enumerate(LENGTHS):
        hidden_1TH, _ = plain(x_BTF[row : row + 1, :length])
        expected_TC = model.classify(hidden_1TH[0])  # type: ignore[operator]
        torch.testing.assert_close(output_BTC[row, :length], expected_TC, rtol=1e-10, atol=1e-12)


def test_unlabelled_steps_are_neither_learned_nor_measured() -> None:
    task = _task()
    batch = collate([task.data[0], task.data[1]])
    output_BTC = torch.zeros(2, 8, 3)
    output_BTC[..., 1] = 1.0
    labelled = batch.targets[batch.mask]
    labelled = labelled[labelled > 0]
    score = task.score(output_BTC, batch)["accuracy"]
    assert (score.amount, score.count) == (int((labelled == 2).sum()), len(labelled))
    loss = task.loss(output_BTC, batch)
    scores_P = output_BTC[0, 0].log_softmax(dim=0)
    assert float(loss.total) == pytest.approx(-float(scores_P[labelled - 1].sum()), rel=1e-6)
    assert loss.count == len(labelled)
    assert any("have the label 0 and count as unlabelled" in note for note in task.data.notes)


def test_every_label_may_be_taken_or_another_left_out() -> None:
    every = _task(unlabelled=None)
    batch = whole(every)
    assert every.loss(every.build_model()(batch), batch).count == sum(LENGTHS)
    assert every.build_model()(batch).shape == (6, 13, 4)
    assert every.data.notes == ()
    other = _task(unlabelled=2)
    assert other.loss(other.build_model()(batch), batch).count == int((VALUES != 2).sum())
    assert other.class_names == ("none", "sit", "lie")
    none = _task(unlabelled=9)
    assert none.loss(none.build_model()(batch), batch).count == sum(LENGTHS)


def test_a_batch_without_a_label_counts_nothing() -> None:
    values = VALUES.copy()
    values[1:9] = 0
    task = _task(values)
    batch = collate([task.data[1]])
    loss = task.loss(built(task)(batch), batch)
    assert (loss.total.item(), loss.count) == (0.0, 0)
    assert task.score(built(task)(batch), batch)["accuracy"].count == 0


def test_samples_are_runs_of_labels() -> None:
    values = VALUES.copy()
    values[OFFSETS[5] :] = [0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 0, 3]
    task = _task(values)
    output_1TC = torch.zeros(1, 13, 3)
    output_1TC[0, :5, 0] = 1.0
    output_1TC[0, 5:, 1] = 1.0
    (sample,) = task.samples(output_1TC, collate([task.data[5]]))
    assert sample.track is not None
    assert sample.track.names == ["sit", "walk", "lie"]
    assert sample.track.target == [[-1, 2], [0, 3], [1, 4], [2, 2], [-1, 1], [2, 1]]
    assert sample.track.output == [[0, 5], [1, 8]]
    assert sample.track.right == pytest.approx(7 / 10)
    assert (sample.target, sample.output) == ("sit, then walk, then lie, then lie", "sit, then walk")


def test_a_set_without_any_label_to_learn_is_refused() -> None:
    with pytest.raises(StrettoError, match=r"no step of the training sequences has a label but 0.*--unlabelled"):
        _task(np.zeros_like(VALUES))


def test_the_embedded_set_is_learned_by_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "stretto.tasks.label_steps.make_regimes", lambda: make_regimes(num_train=24, median_length=60, mean_stay=30)
    )
    result = stretto.train("label-steps", out=tmp_path / "run", epochs=1, hidden_size=5, threads=1)
    assert 0.0 < result.metrics["accuracy"] < 1.0
    assert result.solving is None
