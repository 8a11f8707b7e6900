"""The parameters of cells that sum a product with the input and a product with the state.

Shape legend: F features, H hidden units, G gates, R units that the recurrent product reads.
"""

import math

import torch
from torch import nn

from stretto.cells.arguments import positive
from stretto.cells.cell import Cell


class AbstractGatedCell(Cell):
    """Holds `weight_ih` (G H, F), `weight_hh` (G H, R), `bias_ih` and `bias_hh` (G H), named and drawn as torch does.

    Args:
        input_size: F.
        hidden_size: H.
        num_gates: G, the blocks of H rows in each parameter.
        bias: Whether there are biases.
        recurrent_size: R, when it is not H.
    """

    bias_ih: nn.Parameter | None
    bias_hh: nn.Parameter | None

    def __init__(
        self, input_size: int, hidden_size: int, *, num_gates: int, bias: bool, recurrent_size: int | None = None
    ) -> None:
        super().__init__()
        self.input_size = positive(input_size, name="input_size", cell=self)
        self.hidden_size = positive(hidden_size, name="hidden_size", cell=self)
        rows = num_gates * self.hidden_size
        self.weight_ih = self.drawn(rows, self.input_size)
        self.weight_hh = self.drawn(rows, recurrent_size or self.hidden_size)
        self.register_parameter("bias_ih", self.drawn(rows) if bias else None)
        self.register_parameter("bias_hh", self.drawn(rows) if bias else None)

    def drawn(self, *shape: int) -> nn.Parameter:
        """A new parameter, uniform within 1/sqrt(H) of zero."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))

    def split_hh(self, *rows: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The recurrent weight and bias in parts, for gates that cannot be had by one product."""
        weights = torch.split(self.weight_hh, list(rows))
        biases = [None] * len(rows) if self.bias_hh is None else torch.split(self.bias_hh, list(rows))
        return list(zip(weights, biases, strict=True))

    def extra_repr(self) -> str:
        """The arguments the cell was made with."""
        args, kwargs = self._made_with
        return ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
