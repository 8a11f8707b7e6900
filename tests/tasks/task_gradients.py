"""What a task makes of batches, in double precision: the same however its sequences are padded and put together."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stretto.batching import Batch, collate
from stretto.data import AbstractTargets, SequenceSet
from stretto.training import AbstractTask


def ragged(lengths: list[int], *, num_features: int, targets: AbstractTargets | None, name: str) -> SequenceSet:
    """Sequences of random numbers, every third in each part of the split."""
    return SequenceSet.from_flat(
        np.random.default_rng(0).normal(size=(sum(lengths), num_features)),
        offsets=np.cumsum([0, *lengths]),
        targets=targets,
        split_N=np.arange(len(lengths)) % 3,
        name=name,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Summed over batches: the loss, what it counts, and its gradients."""

    loss: float
    count: int
    gradients: dict[str, torch.Tensor]


def built(task: AbstractTask[Any]) -> nn.Module:
    """The task's model, the same each time."""
    torch.manual_seed(0)
    return task.build_model().double()


def whole(task: AbstractTask[Any], **padding: Any) -> Batch:
    """All sequences in one batch."""
    return collate([task.data[index] for index in range(len(task.data))], **padding)


def loss_and_gradients(task: AbstractTask[Any], model: nn.Module, batches: list[Batch]) -> Found:
    """Of all batches together."""
    model.zero_grad()
    total, count = 0.0, 0
    for batch in batches:
        loss = task.loss(model(batch), batch)
        torch.autograd.backward(loss.total)
        total, count = total + loss.total.item(), count + loss.count
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return Found(loss=total, count=count, gradients=gradients)


def assert_same(found: Found, expected: Found, *, atol: float = 1e-13) -> None:
    """Equal but for rounding."""
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert found.count == expected.count
    assert found.gradients.keys() == expected.gradients.keys() != set()
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-10, atol=atol, msg=name)


def assert_padding_changes_nothing(
    task: AbstractTask[Any], *, count: int, rubbish: list[float], targets: int | None = None, atol: float = 1e-13
) -> Found:
    """A batch is the sum of its sequences, however far it is padded and whatever the padding holds.

    Args:
        task: On data of several lengths.
        count: What the loss of all sequences counts.
        rubbish: Values that the padding of the features is filled with.
        targets: What the padding of the targets is filled with, if there is a target per step.
        atol: Of the gradients.
    """
    model = built(task)
    alone = loss_and_gradients(task, model, [collate([task.data[index]]) for index in range(len(task.data))])
    assert alone.count == count
    assert_same(loss_and_gradients(task, model, [whole(task)]), alone, atol=atol)
    batch = whole(task, edges=[int(task.data.lengths_N.max()) + 17])
    assert_same(loss_and_gradients(task, model, [batch]), alone, atol=atol)
    for value in rubbish:
        # Pixels are whole numbers, which cannot be NaN or inf.
        loud_BTF = batch.features_BTF.double() if isinstance(value, float) else batch.features_BTF.clone()
        loud_BTF[~batch.mask] = value
        loud = dataclasses.replace(batch, features_BTF=loud_BTF)
        if targets is not None:
            loud.targets[~batch.mask] = targets
        assert_same(loss_and_gradients(task, model, [loud]), alone, atol=atol)
    return alone
