"""Classification: padding changes nothing, and labels are needed.

Shape legend: B sequences, T steps, F features, C classes.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from task_gradients import assert_same, built, loss_and_gradients

from stretto.batching import collate
from stretto.data import AbstractTargets, Labels, SequenceSet, Transcripts
from stretto.errors import StrettoError
from stretto.tasks.classify import Classify, ClassifyConfig

LENGTHS = [1, 8, 3, 5, 1, 13]
LABELS = np.array([0, 2, 1, 1, 0, 2])


def _set(targets: AbstractTargets | None) -> SequenceSet:
    features_SF = np.random.default_rng(0).normal(size=(sum(LENGTHS), 2))
    split_N = np.arange(len(LENGTHS)) % 3
    return SequenceSet.from_flat(
        features_SF, offsets=np.cumsum([0, *LENGTHS]), targets=targets, split_N=split_N, name="signs"
    )


def _task(**settings: Any) -> Classify:
    config = ClassifyConfig(hidden_size=5, dropout=0.0, **settings)
    return Classify(config, _set(Labels(values_N=LABELS, names=("left", "right", "stop"))))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_padded_batch_is_the_sum_of_its_sequences(num_layers: int) -> None:
    task = _task(num_layers=num_layers)
    model, items = built(task), [task.data[index] for index in range(len(LENGTHS))]
    alone = loss_and_gradients(task, model, [collate([item]) for item in items])
    assert alone.count == len(LENGTHS)
    assert_same(loss_and_gradients(task, model, [collate(items)]), alone)
    assert_same(loss_and_gradients(task, model, [collate(items, edges=[29])]), alone)


@pytest.mark.parametrize("rubbish", [1e30, float("inf"), float("nan")])
def test_what_stands_in_padded_slots_is_ignored(rubbish: float) -> None:
    task = _task(num_layers=2)
    model, batch = built(task), collate([task.data[index] for index in range(len(LENGTHS))], edges=[20])
    loud_BTF = batch.features_BTF.clone()
    loud_BTF[~batch.mask] = rubbish
    clean = loss_and_gradients(task, model, [batch])
    assert_same(loss_and_gradients(task, model, [dataclasses.replace(batch, features_BTF=loud_BTF)]), clean)


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


@pytest.mark.parametrize("targets", [None, Transcripts.of(list("abcdef"))])
def test_a_set_without_labels_is_refused(targets: AbstractTargets | None) -> None:
    with pytest.raises(StrettoError, match="signs has no labels"):
        Classify(ClassifyConfig(), _set(targets))


def test_there_is_no_embedded_set_and_the_way_out_is_named() -> None:
    with pytest.raises(StrettoError, match="--data PATH"):
        Classify.embedded_data()
