"""What a task makes of batches, in double precision: the same however its sequences are padded and put together."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from stretto.batching import Batch
from stretto.training import AbstractTask


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Summed over batches: the loss, what it counts, and its gradients."""

    loss: float
    count: int
    gradients: list[torch.Tensor]


def built(task: AbstractTask[Any]) -> nn.Module:
    """The task's model, the same each time."""
    torch.manual_seed(0)
    return task.build_model().double()


def loss_and_gradients(task: AbstractTask[Any], model: nn.Module, batches: list[Batch]) -> Found:
    """Of all batches together."""
    model.zero_grad()
    total, count = 0.0, 0
    for batch in batches:
        loss = task.loss(model(batch), batch)
        torch.autograd.backward(loss.total)
        total, count = total + loss.total.item(), count + loss.count
    gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    return Found(loss=total, count=count, gradients=gradients)


def assert_same(found: Found, expected: Found, *, atol: float = 1e-13) -> None:
    """Equal but for rounding."""
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert found.count == expected.count
    assert len(found.gradients) == len(expected.gradients) > 0
    for mine, other in zip(found.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=atol)
