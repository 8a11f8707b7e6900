"""What a recurrent cell is: one step from an input and a state to an output and the next state."""

import inspect
from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import torch
from torch import nn
from typing_extensions import Self

from stretto.errors import StrettoError

State: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"


class Cell(nn.Module, ABC):
    """One step of a recurrent network, in plain PyTorch. Subclass it and put it into `stretto.RNN`.

    The step must treat the rows of the batch (dimension 0) alike and apart. What does not depend on the state is taken
    out of the time loop, the rest is compiled; see `stretto.RNN.explain`.

    A cell may have a method `coarse_step(x_t, state, dt)`, which `stretto.Multigrid` takes on its coarse grids: one
    step that does about what `dt` steps do, `dt` a number above 1, and reads the first of their inputs alone. It
    returns the next state, in the structure and of the shapes of `state`. Write the step as a differential equation
    and solve it implicitly, so that it stays stable for large `dt`; see `stretto.cells.GRU`.

    It may also have a method `carry(x_t, state)`, which tells `stretto.Shooting` how much of each unit of the state the
    step keeps, in the structure of `state`: the gate that the old state is multiplied with.

    Example:
        >>> class Leaky(stretto.Cell):
        ...     def __init__(self, input_size, hidden_size):
        ...         super().__init__()
        ...         self.hidden_size = hidden_size
        ...         self.inward = torch.nn.Linear(input_size, hidden_size)
        ...         self.around = torch.nn.Linear(hidden_size, hidden_size, bias=False)
        ...     def initial_state(self, batch_size):
        ...         return self.zeros(batch_size, self.hidden_size)
        ...     def forward(self, x_t, state):
        ...         new = 0.9 * state + 0.1 * torch.tanh(self.inward(x_t) + self.around(state))
        ...         return new, new
    """

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the arguments, so that further layers can be made of the same cell."""
        cell = super().__new__(cls)
        object.__setattr__(cell, "_made_with", (args, kwargs))
        return cell

    @abstractmethod
    def initial_state(self, batch_size: int) -> State:
        """The state before the first step: a tensor or a tuple of tensors, each with `batch_size` rows."""

    @abstractmethod
    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step: the output and the next state, which has the shapes of `state`."""

    def zeros(self, *size: int) -> torch.Tensor:
        """Zeros of the dtype and on the device of the cell's parameters."""
        like = next(self.parameters(), None)
        if like is None:
            return torch.zeros(*size)
        return torch.zeros(*size, dtype=like.dtype, device=like.device)

    def resized(self, input_size: int) -> "Cell":
        """A new cell with fresh parameters, made with the same arguments but for `input_size`.

        Raises:
            StrettoError: If the cell's constructor has no argument called `input_size`.
        """
        args, kwargs = self._made_with
        try:
            bound = inspect.signature(type(self)).bind(*args, **kwargs)
            bound.apply_defaults()
        except TypeError:
            bound = None
        if bound is None or "input_size" not in bound.arguments:
            raise StrettoError(
                f"{type(self).__name__} cannot be made again for another layer: it takes no argument 'input_size'",
                fix="Name that argument 'input_size', or give one cell for each layer and direction as a list.",
            )
        bound.arguments["input_size"] = input_size
        cell = type(self)(*bound.args, **bound.kwargs)
        like = next(self.parameters(), None)
        return cell if like is None else cell.to(device=like.device, dtype=like.dtype)
