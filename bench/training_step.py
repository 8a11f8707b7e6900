"""Contestants of the kernel benchmark: one training step each, forward and backward, of the same net on the same batch.

The loss is the sum of the outputs, each times a fixed number. Its gradient goes to all weights and, as in a first
layer, not to the input.

Shape legend: T steps, B sequences, F features of the input, O of the output, H hidden units.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import nn

from stretto.cells import Cell

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a training step.

    Attributes:
        num_steps: T.
        batch: B.
        input_size: F.
        hidden_size: H.
    """

    num_steps: int
    batch: int
    input_size: int
    hidden_size: int

    def __str__(self) -> str:
        return f"T={self.num_steps}, B={self.batch}, F={self.input_size}, H={self.hidden_size}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What is trained on.

    Attributes:
        x_TBF: Input.
        weight_TBO: What each output counts in the loss.
    """

    x_TBF: torch.Tensor
    weight_TBO: torch.Tensor


class AbstractStep(abc.ABC):
    """A training step that can be run again and again.

    Args:
        name: Shown in tables.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    def run(self) -> None:
        """Forward and backward."""

    @abc.abstractmethod
    def results(self) -> Mapping[str, torch.Tensor]:
        """Outputs and gradients of one step: the output first, then weights in the order of torch's layers."""


@final
class TorchStep(AbstractStep):
    """A step of anything that runs in torch.

    Args:
        name: Shown in tables.
        forward: From the input to the outputs.
        weights: What gradients are wanted of, by name.
        batch: What is trained on.
    """

    def __init__(self, name: str, *, forward: Forward, weights: Mapping[str, nn.Parameter], batch: Batch) -> None:
        super().__init__(name)
        self._forward, self._weights, self._batch = forward, dict(weights), batch

    def run(self) -> None:
        """Forward and backward."""
        self._step()

    def results(self) -> dict[str, torch.Tensor]:
        """Outputs and gradients of one step."""
        y_TBO = self._step().detach().clone()
        zero = torch.zeros(())
        gradients = {
            f"gradient of {name}": (zero if weight.grad is None else weight.grad).detach().clone()
            for name, weight in self._weights.items()
        }
        return {"output": y_TBO, **gradients}

    def _step(self) -> torch.Tensor:
        for weight in self._weights.values():
            weight.grad = None
        y_TBO = self._forward(self._batch.x_TBF)
        (y_TBO * self._batch.weight_TBO).sum().backward()  # type: ignore[no-untyped-call]
        return y_TBO


def drawn_batch(shape: StepShape, *, output_size: int | None = None, seed: int = 0) -> Batch:
    """A batch of normal numbers, the same for the same arguments.

    Args:
        shape: Its sizes.
        output_size: O; H by default.
        seed: Of the numbers.
    """
    drawn = torch.Generator().manual_seed(seed)
    size = (shape.num_steps, shape.batch)
    return Batch(
        x_TBF=torch.randn(*size, shape.input_size, generator=drawn),
        weight_TBO=torch.randn(*size, output_size or shape.hidden_size, generator=drawn),
    )


def step_after_step(cell: Cell) -> Forward:
    """The cell in a plain Python loop, its gradients by autograd: what one writes without a library."""

    def forward(x_TBF: torch.Tensor) -> torch.Tensor:
        state: Any = cell.initial_state(x_TBF.shape[1])
        outputs = []
        for x_BF in x_TBF.unbind(0):
            y_BO, state = cell(x_BF, state)
            outputs.append(y_BO)
        return torch.stack(outputs)

    return forward
