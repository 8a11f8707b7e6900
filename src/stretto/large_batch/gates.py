"""The gates of a recurrent layer: blocks of rows of packed weights, each a matrix of its own to an optimiser.

Shape legend: G gates, H hidden units, F features.
"""

import copy
from typing import Any, Final, final

import torch
from torch import nn

from stretto.cells import AbstractGatedCell

PACKED_WEIGHTS: Final = ("weight_ih", "weight_hh", "weight_read")


@final
class Gate(nn.Parameter):
    """Some rows of a packed weight, as a parameter that an optimiser can hold in its place.

    It shares the memory of the packed weight: an update of the one is an update of the other. Its gradient is those
    rows of the packed weight's gradient, looked up whenever it is read, so that backward, clipping, all-reduce and
    `zero_grad` work as usual. Models never see it; the model's `state_dict` has the packed weight alone.
    """

    packed: nn.Parameter
    """The packed weight (G H, F)."""
    start: int
    stop: int

    def __new__(cls, packed: nn.Parameter, start: int, stop: int) -> "Gate":
        """A view with the packed weight's own version counter, which autograd checks."""
        gate = torch.Tensor._make_subclass(cls, packed.detach()[start:stop], packed.requires_grad)
        gate.packed, gate.start, gate.stop = packed, start, stop
        return gate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything is done in `__new__`; `nn.Parameter` would make another tensor."""

    @property
    def grad(self) -> torch.Tensor | None:
        """These rows of the gradient of the packed weight."""
        self._follow()
        return None if self.packed.grad is None else self.packed.grad[self.start : self.stop]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        """None removes the gradient of the packed weight; all of its gates are zeroed together."""
        if value is None:
            self.packed.grad = None
            return
        if self.packed.grad is None:
            self.packed.grad = torch.zeros_like(self.packed)
        self.packed.grad[self.start : self.stop] = value

    def _follow(self) -> None:
        """The packed weight has other memory if the model was moved to a device or into one block of memory."""
        there = self.packed.detach()[self.start : self.stop]
        if there.data_ptr() != self.data_ptr() or there.device != self.device:
            self.data = there

    def __deepcopy__(self, memo: dict[int, Any]) -> "Gate":
        """Of the copy of the packed weight, which is the model's copy if both are copied together."""
        if id(self) not in memo:
            memo[id(self)] = Gate(copy.deepcopy(self.packed, memo), self.start, self.stop)
        copied: Gate = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Gate, (self.packed, self.start, self.stop)


def parameters_by_gate(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model in their order, packed weights of recurrent layers replaced by their gates.

    `torch.nn.LSTM` and `GRU` keep the weights of 4 and 3 gates in one matrix, and so do the cells of Stretto and
    accelerated layers. An optimiser that scales each matrix by its own norm would treat them as one, although a forget
    gate and a candidate differ in the size of their weights and gradients. Weights that are one matrix stay as they
    are: those of `torch.nn.RNN`, projections, everything outside recurrent layers, and biases, which have no trust
    ratio. Your own cells are split if they derive from `AbstractGatedCell`.
    """
    rows = gate_rows(model)
    found: list[nn.Parameter] = []
    for parameter in model.parameters():
        each = rows.get(id(parameter), 0)
        if each and len(parameter) > each:
            found += [Gate(parameter, start, start + each) for start in range(0, len(parameter), each)]
        else:
            found.append(parameter)
    return found


def gate_rows(model: nn.Module) -> dict[int, int]:
    """The rows of each gate, by the `id` of the packed weight that holds them."""
    rows: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase, AbstractGatedCell)):
            for name, weight in module.named_parameters(recurse=False):
                if name.startswith(PACKED_WEIGHTS) and weight.dim() == 2 and weight.shape[0] % module.hidden_size == 0:
                    rows[id(weight)] = module.hidden_size
    return rows
