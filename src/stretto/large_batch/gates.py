"""The gates of recurrent layers, each as a parameter of its own.

Shape legend: G gates, H hidden units, F features.
"""

import copy
from typing import Any, Final, final

import torch
from torch import nn

from stretto.cells import AbstractGatedCell

STACKED: Final = ("weight_ih", "weight_hh", "weight_read")


@final
class Gate(nn.Parameter):
    """Some rows of a packed weight, as a parameter that an optimiser can be given in its place.

    It shares the memory of the packed weight: a step on the one is a step on the other. Its gradient is those rows of
    the packed weight's gradient, whenever it is asked for, so that backward, clipping, the sums over workers and
    `zero_grad` work as ever. Models never see it; `state_dict` of the model has the packed weight alone.

    Args:
        packed: The packed weight (G H, F).
        start: The first row.
        stop: The row after the last.
    """

    packed: nn.Parameter
    start: int
    stop: int

    def __new__(cls, packed: nn.Parameter, start: int, stop: int) -> "Gate":
        """A view, made with the packed weight's own count of changes, which autograd checks."""
        gate = torch.Tensor._make_subclass(cls, packed.detach()[start:stop], packed.requires_grad)
        gate.packed, gate.start, gate.stop = packed, start, stop
        return gate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """All is done when it is made."""

    @property
    def grad(self) -> torch.Tensor | None:
        """These rows of the gradient of the packed weight."""
        self._follow()
        return None if self.packed.grad is None else self.packed.grad[self.start : self.stop]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        """None takes the gradient from the packed weight; all of its gates are zeroed together."""
        if value is None:
            self.packed.grad = None
            return
        if self.packed.grad is None:
            self.packed.grad = torch.zeros_like(self.packed)
        self.packed.grad[self.start : self.stop] = value

    def _follow(self) -> None:
        """A model that was moved since, to a device or into one block of memory, has its weight elsewhere."""
        there = self.packed.detach()[self.start : self.stop]
        if there.data_ptr() != self.data_ptr() or there.device != self.device:
            self.data = there

    def __deepcopy__(self, memo: dict[int, Any]) -> "Gate":
        """Of the copy of the packed weight, which is made with the model's if both are copied together."""
        if id(self) not in memo:
            memo[id(self)] = Gate(copy.deepcopy(self.packed, memo), self.start, self.stop)
        copied: Gate = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Gate, (self.packed, self.start, self.stop)


def parameters_by_gate(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model in their order, packed weights of recurrent layers given as their gates.

    `torch.nn.LSTM` and `GRU` keep the weights of 4 and 3 gates in one matrix, and so do the cells of Stretto and
    accelerated layers. An optimiser that scales each matrix by its own norm would take them for one, although a forget
    gate and a candidate differ in the size of their weights and gradients. Weights that are one matrix stay what they
    are: those of `torch.nn.RNN`, projections, all outside recurrent layers, and biases, which have no trust ratio.
    Cells of your own are taken apart if they are made on `AbstractGatedCell`.

    Args:
        model: Any module.
    """
    rows: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase, AbstractGatedCell)):
            for name, weight in module.named_parameters(recurse=False):
                if name.startswith(STACKED) and weight.dim() == 2 and weight.shape[0] % module.hidden_size == 0:
                    rows[id(weight)] = module.hidden_size
    found: list[nn.Parameter] = []
    for parameter in model.parameters():
        each = rows.get(id(parameter), 0)
        if each and len(parameter) > each:
            found += [Gate(parameter, start, start + each) for start in range(0, len(parameter), each)]
        else:
            found.append(parameter)
    return found
