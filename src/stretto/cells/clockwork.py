"""The clockwork network of Koutnik et al. (2014).

Shape legend: B sequences, F features, H hidden units.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Final, final

import torch
from torch.nn.functional import linear

from stretto.cells.arguments import positive
from stretto.cells.cell import State
from stretto.cells.gated import AbstractGatedCell
from stretto.cells.state import several
from stretto.errors import StrettoError


@final
class Clockwork(AbstractGatedCell):
    """An Elman network in modules of H / len(periods) units; the module of period p changes at steps 0, p, 2 p, ...

    A module reads itself and the slower ones, so `weight_hh` counts only where the column's period is not below the
    row's. The state is (h, count), (B, H) and (B, 1): the count is the step, modulo the least common multiple of the
    periods. The output is h.

    Args:
        input_size: F.
        hidden_size: H, a multiple of the number of periods.
        bias: Whether there are biases.
        periods: The period of each module, rising.
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
        self.periods = tuple(positive(period, name="period", cell=self) for period in periods)
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
            StrettoError: If the dtype of the parameters cannot count the steps of a whole cycle of the periods.
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
        h_BH, count_B1 = several(state, 2, cell=self)
        recurrent_BH = linear(h_BH, self.weight_hh * self.mask_HH, self.bias_hh)
        new_BH = torch.tanh(linear(x_t, self.weight_ih, self.bias_ih) + recurrent_BH)
        ticks_BH = torch.remainder(count_B1, self.periods_H) == 0
        h_BH = torch.where(ticks_BH, new_BH, h_BH)
        return h_BH, (h_BH, torch.remainder(count_B1 + 1, self.cycle))
