"""Classification: padding changes nothing; and of all tasks, which data they refuse.

Shape legend: B sequences, C classes.
"""

from typing import Any

import numpy as np
import pytest
import torch
from task_gradients import assert_padding_changes_nothing, ragged

from stretto.batching import collate
from stretto.data import AbstractTargets, Labels, SequenceSet, Transcripts
from stretto.errors import StrettoError
from stretto.tasks import Digits, Handwriting, LabelSteps, LanguageModelling, Translate, Video
from stretto.tasks.classify import Classify, ClassifyConfig
from stretto.training import AbstractTask

LENGTHS = [1, 8, 3, 5, 1, 13]
LABELS = np.array([0, 2, 1, 1, 0, 2])


def _set(targets: AbstractTargets | None) -> SequenceSet:
    return ragged(LENGTHS, num_features=2, targets=targets, name="signs")


def _task(**settings: Any) -> Classify:
    config = ClassifyConfig(hidden_size=5, dropout=0.0, **settings)
    return Classify(config, _set(Labels(values_N=LABELS, names=("left", "right", "stop"))))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_padding_changes_nothing(num_layers: int) -> None:
    rubbish = [1e30, float("inf"), float("nan")]
    assert_padding_changes_nothing(_task(num_layers=num_layers), count=len(LENGTHS), rubbish=rubbish)


def test_the_score_is_the_share_of_right_classes() -> None:
    task = _task()
    batch = collate([task.data[index] for index in range(4)])
    output_BC = torch.eye(3)[torch.tensor([0, 2, 0, 1])]
    scores = task.score(output_BC, batch)
    assert (scores["accuracy"].amount, scores["accuracy"].count) == (3, 4)
    assert task.summary(task.final_score(output_BC, batch)) == {"accuracy": 0.75}
    samples = task.samples(output_BC, batch)
    assert [(sample.target, sample.output) for sample in samples] == [
        ("left", "left"),
        ("stop", "stop"),
        ("right", "left"),
        ("right", "right"),
    ]


def test_a_class_that_only_the_test_part_has_gets_an_output() -> None:
    labels = Labels(values_N=np.array([0, 0, 4, 0, 0, 0]), names=tuple("abcde"))
    task = Classify(ClassifyConfig(hidden_size=2), _set(labels))
    batch = collate([task.data[2]])
    assert task.build_model()(batch).shape == (1, 5)


TEXTS = Transcripts.of(list("abcdef"))
PLAIN = Labels(values_N=LABELS, names=tuple("abc"))


@pytest.mark.parametrize(
    ("task", "unfit", "message"),
    [
        (Classify, [None, TEXTS], "has no labels.*as `y`"),
        (Digits, [None, TEXTS], "has no labels.*`x_train`"),
        (Video, [None, TEXTS], r"has no labels.*class/clip\.npy"),
        (LabelSteps, [None, TEXTS, PLAIN], "has no labels of steps.*one label per step"),
        (Handwriting, [None, PLAIN], "has no transcripts"),
        (Translate, [None, TEXTS, PLAIN], r"is not parallel text.*train\.en and train\.de"),
        (LanguageModelling, [None, TEXTS, PLAIN], "is no text"),
    ],
)
def test_data_that_a_task_cannot_use_are_refused(
    task: type[AbstractTask[Any]], unfit: list[AbstractTargets | None], message: str
) -> None:
    for targets in unfit:
        with pytest.raises(StrettoError, match=f"signs {message}"):
            task(task.Config(), _set(targets))
