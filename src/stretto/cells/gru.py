"""The gated recurrent unit of Cho et al. (2014) and its relatives.

Most of them move h towards a candidate n, at a rate that the update gate z sets:

    h' = (1 - z) n + z h        an explicit Euler step, of length 1, of    dh/dt = (1 - z) (n - h)

An implicit step of length dt of the same equation, z and n held at their values at its start, is the coarse step:

    h' = h + dt (1 - z) (n - h')    =>    h' = (h + q n) / (1 + q)    with    q = dt (1 - z)

Shape legend: B sequences, F features, H hidden units, G = 3 H gate units, D = 2 H units of the gates r and z,
M remembered states.
"""

import math
from typing import ClassVar, Final, Literal, final

import torch
from torch import nn
from torch.nn.functional import linear

from stretto.cells.cell import AbstractGatedCell, State, expect_tensor, expect_tuple
from stretto.checks import check_choice, check_int


def _gates_reset_after(x_BG: torch.Tensor, h_BG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """z and n of `torch.nn.GRU` from the products with the input and the state."""
    xr_BH, xz_BH, xn_BH = x_BG.chunk(3, dim=-1)
    hr_BH, hz_BH, hn_BH = h_BG.chunk(3, dim=-1)
    r_BH = torch.sigmoid(xr_BH + hr_BH)
    z_BH = torch.sigmoid(xz_BH + hz_BH)
    return z_BH, torch.tanh(xn_BH + r_BH * hn_BH)


class _AbstractGRU(AbstractGatedCell):
    """h' = (1 - z) n + z h, or (1 - z) h + z n, for any gate z and candidate n. The state and output are h (B, H)."""

    num_gates: ClassVar[int] = 3
    gate_keeps: ClassVar[bool] = True
    """Whether z weighs the old state h; otherwise it weighs the candidate n."""

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, num_gates=self.num_gates, bias=bias)

    def _gates(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """z and n, each (B, H): by default those of `torch.nn.GRU`."""
        x_BG = linear(x_BF, self.weight_ih, self.bias_ih)
        return _gates_reset_after(x_BG, linear(h_BH, self.weight_hh, self.bias_hh))

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and h."""
        h_BH = expect_tensor(state, cell=self)
        z_BH, n_BH = self._gates(x_t, h_BH)
        open_BH, closed_BH = (h_BH, n_BH) if self.gate_keeps else (n_BH, h_BH)
        h_BH = (1 - z_BH) * closed_BH + z_BH * open_BH
        return h_BH, h_BH

    def coarse_step(self, x_t: torch.Tensor, state: State, dt: float) -> State:
        """One implicit step of dh/dt = (1 - z) (n - h), or z (n - h), over `dt` steps, z and n as at its start."""
        h_BH = expect_tensor(state, cell=self)
        z_BH, n_BH = self._gates(x_t, h_BH)
        q_BH = dt * ((1 - z_BH) if self.gate_keeps else z_BH)
        return (h_BH + q_BH * n_BH) / (1 + q_BH)


@final
class GRU(_AbstractGRU):
    """A reset gate r, an update gate z and a candidate n: h' = (1 - z) n + z h. The state and the output are h (B, H).

    With reset "after", the step of `torch.nn.GRU`, r scales the product with the state: n = tanh(W x + r (U h)). With
    reset "before", as first published, it scales the state: n = tanh(W x + U (r h)); each step then has two dependent
    products instead of one. The parameters are torch's either way, gates in the order r, z, n.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
        reset: "after" or "before".
    """

    def __init__(
        self, input_size: int, hidden_size: int, *, bias: bool = True, reset: Literal["after", "before"] = "after"
    ) -> None:
        super().__init__(input_size, hidden_size, bias=bias)
        check_choice(reset, name="reset", choices=("after", "before"), owner="GRU")
        self.reset = reset

    def retention(self, x_t: torch.Tensor, state: State) -> State:
        """What share of each unit survives a step: the update gate z."""
        return self._gates(x_t, expect_tensor(state, cell=self))[0]

    def _gates(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.reset == "after":
            return super()._gates(x_BF, h_BH)
        x_BG = linear(x_BF, self.weight_ih, self.bias_ih)
        gates, candidate = self.split_hh(2 * self.hidden_size, self.hidden_size)
        xr_BH, xz_BH, xn_BH = x_BG.chunk(3, dim=-1)
        hr_BH, hz_BH = linear(h_BH, *gates).chunk(2, dim=-1)
        r_BH = torch.sigmoid(xr_BH + hr_BH)
        z_BH = torch.sigmoid(xz_BH + hz_BH)
        return z_BH, torch.tanh(xn_BH + linear(r_BH * h_BH, *candidate))


@final
class ImplicitGRU(_AbstractGRU):
    """The GRU of Moon and Cyr (2022), implicit in h: h' = (h + q n) / (1 + q) with q = 1 - z.

    r, z and n are those of `GRU` with reset "after", and so are the names and the order of the parameters. But n has
    the weight q / (1 + q) here, at most a half, so weights trained for one do not fit the other. Grids of
    `stretto.Multigrid` differ only in dt. The state and the output are h (B, H).

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
    """

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """The coarse step with dt = 1."""
        h_BH = expect_tensor(self.coarse_step(x_t, state, 1.0), cell=self)
        return h_BH, h_BH


@final
class LayerNormGRU(_AbstractGRU):
    """A GRU (reset "after") with layer normalisation, after Ba et al. (2016): gates r and z together, n by itself.

    The norms are `norm_ih_rz`, `norm_hh_rz`, `norm_ih_n` and `norm_hh_n`; their biases are the only ones. The state and
    the output are h (B, H).

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether the norms have biases.
        eps: Added to the variance by the norms.
    """

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, eps: float = 1e-5) -> None:
        super().__init__(input_size, hidden_size, bias=False)
        self.norm_ih_rz = nn.LayerNorm(2 * self.hidden_size, eps=eps, bias=bias)
        self.norm_hh_rz = nn.LayerNorm(2 * self.hidden_size, eps=eps, bias=bias)
        self.norm_ih_n = nn.LayerNorm(self.hidden_size, eps=eps, bias=bias)
        self.norm_hh_n = nn.LayerNorm(self.hidden_size, eps=eps, bias=bias)

    def _gates(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = [2 * self.hidden_size, self.hidden_size]
        x_rz_BD, x_n_BH = torch.split(linear(x_BF, self.weight_ih), sizes, dim=-1)
        h_rz_BD, h_n_BH = torch.split(linear(h_BH, self.weight_hh), sizes, dim=-1)
        r_BH, z_BH = torch.sigmoid(self.norm_ih_rz(x_rz_BD) + self.norm_hh_rz(h_rz_BD)).chunk(2, dim=-1)
        return z_BH, torch.tanh(self.norm_ih_n(x_n_BH) + r_BH * self.norm_hh_n(h_n_BH))


@final
class LiGRU(_AbstractGRU):
    """The light GRU of Ravanelli et al. (2018): no reset gate, and a candidate n = relu(norm(W x) + U h).

    The paper normalises W x over the batch, which would make a sequence's result depend on its neighbours. Here each
    row is normalised over its own 2 H units, or not at all. Gates are in the order z, n. The state and the output are
    h (B, H).

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases; with a norm they are the norm's.
        norm: "layer" or "none".
        eps: Added to the variance by the norm.
    """

    num_gates = 2

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        bias: bool = True,
        norm: Literal["layer", "none"] = "layer",
        eps: float = 1e-5,
    ) -> None:
        super().__init__(input_size, hidden_size, bias=bias and norm == "none")
        check_choice(norm, name="norm", choices=("layer", "none"), owner="LiGRU")
        self.norm_ih = nn.LayerNorm(2 * self.hidden_size, eps=eps, bias=bias) if norm == "layer" else nn.Identity()

    def _gates(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        xz_BH, xn_BH = self.norm_ih(linear(x_BF, self.weight_ih, self.bias_ih)).chunk(2, dim=-1)
        hz_BH, hn_BH = linear(h_BH, self.weight_hh, self.bias_hh).chunk(2, dim=-1)
        return torch.sigmoid(xz_BH + hz_BH), torch.relu(xn_BH + hn_BH)


@final
class MinimalGatedUnit(_AbstractGRU):
    """The minimal gated unit of Zhou et al. (2016): one gate f resets and updates. h' = (1 - f) h + f n.

    n = tanh(W x + U (f h)), so each step has two dependent products. Gates are in the order f, n. The state and the
    output are h (B, H).

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
    """

    num_gates = 2
    gate_keeps = False

    def _gates(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, candidate = self.split_hh(self.hidden_size, self.hidden_size)
        xf_BH, xn_BH = linear(x_BF, self.weight_ih, self.bias_ih).chunk(2, dim=-1)
        f_BH = torch.sigmoid(xf_BH + linear(h_BH, *gate))
        return f_BH, torch.tanh(xn_BH + linear(f_BH * h_BH, *candidate))


@final
class AttentionCell(AbstractGatedCell):
    """A GRU (reset "after") that attends over its own last M states, inside the time loop.

    The query Q h scores each remembered state, softmax turns the scores into weights, and the weighted mean, times
    `weight_read` (3 H, H), is added to the input's side of all gates. During the first M steps the memory also
    holds zeros, which take part. The state is (h, memory), (B, H) and (B, M, H), oldest first; the output is h.

    Args:
        input_size: F.
        hidden_size: H.
        bias: Whether there are biases.
        memory_size: M.
    """

    passive_parts: Final = 1

    def __init__(self, input_size: int, hidden_size: int, *, bias: bool = True, memory_size: int = 8) -> None:
        super().__init__(input_size, hidden_size, num_gates=3, bias=bias)
        self.memory_size = check_int(memory_size, name="memory_size", owner="AttentionCell")
        self.weight_query = self.new_parameter(self.hidden_size, self.hidden_size)
        self.weight_read = self.new_parameter(3 * self.hidden_size, self.hidden_size)

    def initial_state(self, batch_size: int) -> State:
        """Zeros."""
        memory_BMH = self.zeros(batch_size, self.memory_size, self.hidden_size)
        return self.zeros(batch_size, self.hidden_size), memory_BMH

    def forward(self, x_t: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One step from x (B, F) and (h, memory)."""
        h_BH, memory_BMH = expect_tuple(state, 2, cell=self)
        query_B1H = linear(h_BH, self.weight_query).unsqueeze(1)
        scores_BM = (memory_BMH * query_B1H).sum(dim=-1) / math.sqrt(self.hidden_size)
        weights_BM = torch.softmax(scores_BM, dim=-1)
        read_BH = (memory_BMH * weights_BM.unsqueeze(-1)).sum(dim=1)

        x_BG = linear(x_t, self.weight_ih, self.bias_ih) + linear(read_BH, self.weight_read)
        z_BH, n_BH = _gates_reset_after(x_BG, linear(h_BH, self.weight_hh, self.bias_hh))
        h_BH = (1 - z_BH) * n_BH + z_BH * h_BH
        return h_BH, (h_BH, torch.cat([memory_BMH[:, 1:], h_BH.unsqueeze(1)], dim=1))
