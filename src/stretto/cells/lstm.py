"""Long short-term memory, after Hochreiter and Schmidhuber (1997) and Gers et al. (2000), and its relatives.

All of them forget, write and read. They differ in what the gates see and in how the cell c is read:

    c' = f c + w,   h' = read(o, c')        an explicit Euler step, of length 1, of    dc/dt = w - (1 - f) c

An implicit step of length dt of the same equation, f and w held at their values at its start, is the coarse step:

    c' = c + dt (w - (1 - f) c')    =>    c' = (c + dt w) / (1 + dt (1 - f))

Shape legend: B sequences, F features, H hidden units, P projected units, G = 4 H gate units.
"""

from typing import ClassVar, final

import torch
from torch import nn
from torch.nn.functional import linear

from stretto.cells.cell import AbstractGatedCell, State, expect_tuple
from stretto.checks import check_int
from stretto.errors import StrettoError


class _AbstractLSTM(AbstractGatedCell):
    """The step of `torch.nn.LSTM`, in two methods to override. The state is (h, c), each (B, H); the output is h."""

    num_gates: ClassVar[int] = 4

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, num_gates=self.num_gates, bias=bias)

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        return self.zeros(batch_size, self.weight_hh.shape[1]), self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and (h, c)."""
        h_BH, c_BH = expect_tuple(state, 2, cell=self)
        f_BH, w_BH, o_BH = self._write(x_t, h_BH, c_BH)
        c_BH = f_BH * c_BH + w_BH
        h_BH = self._read(o_BH, c_BH)
        return h_BH, (h_BH, c_BH)

    def coarse_step(self, x_t: torch.Tensor, state: State, dt: float) -> State:
        """One implicit step of dc/dt = w - (1 - f) c over `dt` steps, the gates as they are at its start."""
        h_BH, c_BH = expect_tuple(state, 2, cell=self)
        f_BH, w_BH, o_BH = self._write(x_t, h_BH, c_BH)
        c_BH = (c_BH + dt * w_BH) / (1 + dt * (1 - f_BH))
        return self._read(o_BH, c_BH), c_BH

    def _sums(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What each gate squashes, each (B, H)."""
        gates_BG = linear(x_BF, self.weight_ih, self.bias_ih) + linear(h_BH, self.weight_hh, self.bias_hh)
        return gates_BG.chunk(self.num_gates, dim=-1)

    def _write(self, x_BF: torch.Tensor, h_BH: torch.Tensor, c_BH: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG002
        """The forget gate f, what is written w = i g, and the output gate o before its sigmoid."""
        i_BH, f_BH, g_BH, o_BH = self._sums(x_BF, h_BH)
        return torch.sigmoid(f_BH), torch.sigmoid(i_BH) * torch.tanh(g_BH), o_BH

    def _read(self, o_BH: torch.Tensor, c_BH: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(o_BH) * torch.tanh(c_BH)


@final
class LSTM(_AbstractLSTM):
    """c' = f c + i g, h' = o tanh(c'): the step of `torch.nn.LSTM` with its parameters, gates in the order i, f, g, o.

    The state is (h, c), each (B, H); the output is h.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
    """

    def retention(self, x_t: torch.Tensor, state: State) -> State:
        """What share of each unit survives a step: nothing of h, and of c the forget gate f."""
        h_BH, _ = expect_tuple(state, 2, cell=self)
        return torch.zeros_like(h_BH), torch.sigmoid(self._sums(x_t, h_BH)[1])


@final
class PeepholeLSTM(_AbstractLSTM):
    """An LSTM whose gates see the cell, after Gers and Schmidhuber (2000): i and f add p c, o adds p c'.

    The parameters are those of `LSTM` and a vector (H) for each gate: `peephole_i`, `peephole_f`, `peephole_o`. The
    state is (h, c), each (B, H); the output is h.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, bias=bias)
        self.peephole_i = self.new_parameter(self.hidden_size)
        self.peephole_f = self.new_parameter(self.hidden_size)
        self.peephole_o = self.new_parameter(self.hidden_size)

    def _write(self, x_BF: torch.Tensor, h_BH: torch.Tensor, c_BH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        i_BH, f_BH, g_BH, o_BH = self._sums(x_BF, h_BH)
        i_BH = torch.sigmoid(i_BH + self.peephole_i * c_BH)
        f_BH = torch.sigmoid(f_BH + self.peephole_f * c_BH)
        return f_BH, i_BH * torch.tanh(g_BH), o_BH

    def _read(self, o_BH: torch.Tensor, c_BH: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(o_BH + self.peephole_o * c_BH) * torch.tanh(c_BH)


@final
class LayerNormLSTM(_AbstractLSTM):
    """An LSTM with layer normalisation, after Ba et al. (2016): of both products and of the cell where it is read.

    Gates are LN(W x) + LN(U h) in the order i, f, g, o; then c' = f c + i g and h' = o tanh(LN(c')). The biases of the
    norms `norm_ih`, `norm_hh` and `norm_c` are the only ones. The state is (h, c), each (B, H); the output is h.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether the norms have biases.
        eps: Added to the variance by the norms.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, eps: float = 1e-5) -> None:
        super().__init__(input_size, hidden_size, bias=False)
        self.norm_ih = nn.LayerNorm(4 * self.hidden_size, eps=eps, bias=bias)
        self.norm_hh = nn.LayerNorm(4 * self.hidden_size, eps=eps, bias=bias)
        self.norm_c = nn.LayerNorm(self.hidden_size, eps=eps, bias=bias)

    def _sums(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gates_BG: torch.Tensor = self.norm_ih(linear(x_BF, self.weight_ih)) + self.norm_hh(linear(h_BH, self.weight_hh))
        return gates_BG.chunk(4, dim=-1)

    def _read(self, o_BH: torch.Tensor, c_BH: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(o_BH) * torch.tanh(self.norm_c(c_BH))


@final
class ProjectedLSTM(_AbstractLSTM):
    """An LSTM with a projected output, after Sak et al. (2014): h' = R (o tanh(c')), as `torch.nn.LSTM(proj_size=...)`.

    The parameters are torch's: those of `LSTM` and `weight_hr` (P, H). The state is (h, c), (B, P) and (B, H); the
    output is h.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
        proj_size: P, less than H.
    """

    def __init__(self, input_size: int, hidden_size: int, *, proj_size: int, bias: bool = True) -> None:
        proj_size = check_int(proj_size, name="proj_size", owner="ProjectedLSTM")
        AbstractGatedCell.__init__(self, input_size, hidden_size, num_gates=4, bias=bias, recurrent_size=proj_size)
        if proj_size >= self.hidden_size:
            raise StrettoError(
                f"ProjectedLSTM got proj_size={proj_size} with hidden_size={hidden_size}",
                fix="Give a proj_size below hidden_size, or use LSTM, which has no projection.",
            )
        self.proj_size = proj_size
        self.weight_hr = self.new_parameter(proj_size, self.hidden_size)

    def _read(self, o_BH: torch.Tensor, c_BH: torch.Tensor) -> torch.Tensor:
        return linear(super()._read(o_BH, c_BH), self.weight_hr)


@final
class CoupledLSTM(_AbstractLSTM):
    """An LSTM that writes where it forgets, as compared by Greff et al. (2015): c' = f c + (1 - f) g.

    It has a quarter fewer parameters, gates in the order f, g, o. The state is (h, c), each (B, H); the output is h.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
    """

    num_gates = 3

    def _write(self, x_BF: torch.Tensor, h_BH: torch.Tensor, c_BH: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG002
        f_BH, g_BH, o_BH = self._sums(x_BF, h_BH)
        f_BH = torch.sigmoid(f_BH)
        return f_BH, (1 - f_BH) * torch.tanh(g_BH), o_BH


@final
class MultiplicativeLSTM(_AbstractLSTM):
    """An LSTM whose transition depends on the input, after Krause et al. (2016): it reads m = (W x) (U h) for h.

    The product is elementwise. The parameters are those of `LSTM`, with `weight_hh` applied to m, and `weight_mx`
    (H, F) and `weight_mh` (H, H). Each step has two dependent products. The state is (h, c), each (B, H); the output
    is h.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, bias=bias)
        self.weight_mx = self.new_parameter(self.hidden_size, self.input_size)
        self.weight_mh = self.new_parameter(self.hidden_size, self.hidden_size)

    def _sums(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return super()._sums(x_BF, linear(x_BF, self.weight_mx) * linear(h_BH, self.weight_mh))
