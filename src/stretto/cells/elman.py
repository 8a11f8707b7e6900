"""The simple recurrent network of Elman (1990) and two relatives without gates: IndRNN and the clockwork network.

Shape legend: B sequences, F features, H hidden units.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Final, Literal, final

import torch
from torch import nn
from torch.nn.functional import linear

from stretto.cells.cell import AbstractGatedCell, Cell, State, expect_tensor, expect_tuple
from stretto.checks import check_choice, check_int
from stretto.errors import StrettoError

_NONLINEARITIES: Final = {"tanh": torch.tanh, "relu": torch.relu}


@final
class Elman(AbstractGatedCell):
    """h' = tanh(W x + U h + b), the step of `torch.nn.RNN` with its parameters. The state and the output are h (B, H).

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
        nonlinearity: "tanh" or "relu".
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
    ) -> None:
        super().__init__(input_size, hidden_size, num_gates=1, bias=bias)
        check_choice(nonlinearity, name="nonlinearity", choices=_NONLINEARITIES, owner="Elman")
        self.nonlinearity = nonlinearity

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and h."""
        h_BH = expect_tensor(state, cell=self)
        sum_BH = linear(x_t, self.weight_ih, self.bias_ih) + linear(h_BH, self.weight_hh, self.bias_hh)
        h_BH = _NONLINEARITIES[self.nonlinearity](sum_BH)
        return h_BH, h_BH


@final
class IndRNN(Cell):
    """The independently recurrent network of Li et al. (2018): h' = relu(W x + u h + b) with u h elementwise.

    No unit sees another except through the layers above. The parameters are `weight_ih` (H, F), `weight_hh` (H), drawn
    from 0 to 1, and `bias_ih` (H). The state and the output are h (B, H).

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there is a bias.
        nonlinearity: "relu" or "tanh".
    """

    bias_ih: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        nonlinearity: Literal["relu", "tanh"] = "relu",
    ) -> None:
        super().__init__()
        self.input_size = check_int(input_size, name="input_size", owner="IndRNN")
        self.hidden_size = check_int(hidden_size, name="hidden_size", owner="IndRNN")
        check_choice(nonlinearity, name="nonlinearity", choices=_NONLINEARITIES, owner="IndRNN")
        self.nonlinearity = nonlinearity
        bound = 1.0 / math.sqrt(self.hidden_size)
        self.weight_ih = nn.Parameter(torch.empty(self.hidden_size, self.input_size).uniform_(-bound, bound))
        self.weight_hh = nn.Parameter(torch.empty(self.hidden_size).uniform_(0, 1))
        self.register_parameter("bias_ih", nn.Parameter(torch.zeros(self.hidden_size)) if bias else None)

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        return self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and h."""
        h_BH = expect_tensor(state, cell=self)
        sum_BH = linear(x_t, self.weight_ih, self.bias_ih) + self.weight_hh * h_BH
        h_BH = _NONLINEARITIES[self.nonlinearity](sum_BH)
        return h_BH, h_BH


@final
class Clockwork(AbstractGatedCell):
    """The clockwork network of Koutnik et al. (2014): an Elman network in modules that change at their own periods.

    Each module has H / len(periods) units; that of period p changes at steps 0, p, 2 p, ... A module reads itself and
    slower ones, so `weight_hh` counts only where the column's period is at least the row's:

                 fast  slow  slowest
        fast       x     x      x
        slow       .     x      x
        slowest    .     .      x

    The state is (h, count), (B, H) and (B, 1): the count is the step, modulo the least common multiple of the periods.
    The output is h.

    Args:
        input_size: F.
        hidden_size: H, a multiple of the number of periods.
        bias: Whether there are biases.
        periods: The period of each module, in rising order.
    """

    passive_parts: Final = 1

    mask_HH: torch.Tensor
    periods_H: torch.Tensor

    def __init__(
        self, input_size: int, hidden_size: int, *, bias: bool = True, periods: Sequence[int] = (1, 2, 4, 8)
    ) -> None:
        super().__init__(input_size, hidden_size, num_gates=1, bias=bias)
        if not isinstance(periods, Sequence) or not periods:
            raise StrettoError(f"Clockwork got periods={periods!r}", fix="Give a tuple of at least one period.")
        self.periods = tuple(check_int(period, name="period", owner="Clockwork") for period in periods)
        if any(earlier >= later for earlier, later in itertools.pairwise(self.periods)):
            raise StrettoError(f"Clockwork got periods={periods!r}", fix="Give each period above the one before.")
        if self.hidden_size % len(self.periods):
            raise StrettoError(
                f"Clockwork cannot share {hidden_size} hidden units evenly among {len(self.periods)} periods",
                fix="Give a hidden_size that is a multiple of the number of periods.",
            )
        self.cycle = math.lcm(*self.periods)
        periods_H = torch.tensor(self.periods).repeat_interleave(self.hidden_size // len(self.periods))
        mask_HH = periods_H[None, :] >= periods_H[:, None]
        self.register_buffer("periods_H", periods_H.to(self.weight_hh.dtype), persistent=False)
        self.register_buffer("mask_HH", mask_HH.to(self.weight_hh.dtype), persistent=False)

    def initial_state(self, batch_size: int) -> State:
        """Zeros, before step 0.

        Raises:
            StrettoError: The dtype of the parameters cannot count the steps of a whole cycle of the periods.
        """
        dtype = self.weight_hh.dtype
        if self.cycle > 2 / torch.finfo(dtype).eps:
            raise StrettoError(
                f"Clockwork with periods {self.periods} repeats every {self.cycle} steps, more than {dtype} can count",
                fix="Use periods with a smaller common multiple, such as powers of 2, or a wider dtype.",
            )
        return self.zeros(batch_size, self.hidden_size), self.zeros(batch_size, 1)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and (h, count)."""
        h_BH, count_B1 = expect_tuple(state, 2, cell=self)
        recurrent_BH = linear(h_BH, self.weight_hh * self.mask_HH, self.bias_hh)
        new_BH = torch.tanh(linear(x_t, self.weight_ih, self.bias_ih) + recurrent_BH)
        ticks_BH = torch.remainder(count_B1, self.periods_H) == 0
        h_BH = torch.where(ticks_BH, new_BH, h_BH)
        return h_BH, (h_BH, torch.remainder(count_B1 + 1, self.cycle))
