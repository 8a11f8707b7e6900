"""What a recurrent cell is: one step from an input and a state to an output and the next state.

Shape legend: B sequences, F features, H hidden units, G gates, R units that the recurrent product reads.
"""

import inspect
import math
from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import torch
from torch import nn
from typing_extensions import Self

from stretto.checks import check_int
from stretto.errors import StrettoError

State: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"


class Cell(nn.Module, ABC):
    """One step of a recurrent network, in plain PyTorch. Subclass it and put it into `stretto.RNN`.

    The step must treat each row of the batch (dimension 0) independently and in the same way. Whatever does not depend
    on the state is moved out of the time loop and the rest is compiled; see `stretto.RNN.explain`.

    Three hooks are optional. A cell has them or not; nothing is registered:

    - `coarse_step(x_t, state, dt)` gives `stretto.Multigrid` its coarse grids. It returns the state after about `dt`
      steps (`dt` > 1), reading only the first of their inputs, in the structure and shapes of `state`. Write the
      step as a differential equation and take one implicit step of it, which stays stable for large `dt`; see
      `stretto.cells.GRU`. Without it, Multigrid relaxes on the fine grid alone.
    - `retention(x_t, state)` gives `stretto.Shooting` the share of each unit that survives a step, in the structure of
      `state`: the gate that multiplies the old state. Shooting then corrects its chunks by products of gates.
    - `passive_parts` counts the tensors at the end of the state that are not units of the net, such as a step counter,
      a mask or a record of earlier states. `Zoneout` leaves them alone.

    Examples:
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

    _init_args: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the arguments, so that `with_input_size` can build the cell again for another layer."""
        cell = super().__new__(cls)
        object.__setattr__(cell, "_init_args", (args, kwargs))
        return cell

    @abstractmethod
    def initial_state(self, batch_size: int) -> State:
        """The state before the first step: a tensor or a tuple of tensors, each with `batch_size` rows."""

    @abstractmethod
    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step: the output and the next state, which has the shapes of `state`."""

    def zeros(self, *size: int) -> torch.Tensor:
        """Zeros with the dtype and device of the cell's parameters."""
        like: torch.Tensor | None = next(self.parameters(), None)
        if like is None:  # those of a copy for `nn.DataParallel` are attributes
            found = (value for module in self.modules() for value in vars(module).values())
            like = next((v for v in found if isinstance(v, torch.Tensor) and v.is_floating_point()), None)
        if like is None:
            return torch.zeros(*size)
        return torch.zeros(*size, dtype=like.dtype, device=like.device)

    def with_input_size(self, input_size: int) -> "Cell":
        """A new cell with fresh parameters, built with the same arguments except `input_size`.

        Raises:
            StrettoError: The cell's constructor has no argument called `input_size`.
        """
        args, kwargs = self._init_args
        try:
            bound = inspect.signature(type(self)).bind(*args, **kwargs)
            bound.apply_defaults()
        except TypeError:
            bound = None
        if bound is None or "input_size" not in bound.arguments:
            raise StrettoError(
                f"{type(self).__name__} cannot be built again for another layer: it takes no argument 'input_size'",
                fix="Name that argument 'input_size', or give a list with one cell for each layer and direction.",
            )
        bound.arguments["input_size"] = input_size
        cell = type(self)(*bound.args, **bound.kwargs)
        like = next(self.parameters(), None)
        return cell if like is None else cell.to(device=like.device, dtype=like.dtype)


class AbstractGatedCell(Cell):
    """Holds `weight_ih` (G H, F), `weight_hh` (G H, R), `bias_ih` and `bias_hh` (G H), as torch names and draws them.

    Args:
        input_size: F.
        hidden_size: H.
        num_gates: G, the blocks of H rows in each parameter.
        bias: Whether there are biases.
        recurrent_size: R, if it is not H.
    """

    bias_ih: nn.Parameter | None
    bias_hh: nn.Parameter | None

    def __init__(
        self, input_size: int, hidden_size: int, *, num_gates: int, bias: bool, recurrent_size: int | None = None
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.input_size = check_int(input_size, name="input_size", owner=name)
        self.hidden_size = check_int(hidden_size, name="hidden_size", owner=name)
        rows = num_gates * self.hidden_size
        self.weight_ih = self.new_parameter(rows, self.input_size)
        self.weight_hh = self.new_parameter(rows, recurrent_size or self.hidden_size)
        self.register_parameter("bias_ih", self.new_parameter(rows) if bias else None)
        self.register_parameter("bias_hh", self.new_parameter(rows) if bias else None)

    def initial_state(self, batch_size: int) -> State:
        """Zeros (B, H)."""
        return self.zeros(batch_size, self.hidden_size)

    def new_parameter(self, *shape: int) -> nn.Parameter:
        """A parameter drawn uniformly within 1/sqrt(H) of zero, as torch draws those of recurrent layers."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))

    def split_hh(self, *rows: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The recurrent weight and bias in blocks of rows, for gates that need products of their own."""
        weights = torch.split(self.weight_hh, list(rows))
        biases = [None] * len(rows) if self.bias_hh is None else torch.split(self.bias_hh, list(rows))
        return list(zip(weights, biases, strict=True))

    def extra_repr(self) -> str:
        """The arguments the cell was built with."""
        args, kwargs = self._init_args
        return ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])


def expect_tensor(state: State, *, cell: nn.Module) -> torch.Tensor:
    """The state of a cell that keeps a single tensor."""
    if not isinstance(state, torch.Tensor):
        raise _wrong_state(state, "one tensor", cell)
    return state


def expect_tuple(state: State, count: int, *, cell: nn.Module) -> tuple[torch.Tensor, ...]:
    """The state of a cell that keeps a tuple of `count` tensors."""
    if isinstance(state, torch.Tensor) or len(state) != count:
        raise _wrong_state(state, f"a tuple of {count} tensors", cell)
    return state


def _wrong_state(state: State, wanted: str, cell: nn.Module) -> StrettoError:
    given = "one tensor" if isinstance(state, torch.Tensor) else f"a tuple of {len(state)}"
    return StrettoError(
        f"{type(cell).__name__} got {given} as its state, which must be {wanted}",
        fix="Start from the cell's initial_state(batch_size) and pass on the state that each step returns.",
    )
