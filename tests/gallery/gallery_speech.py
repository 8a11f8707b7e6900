"""Speech: light gated units, quasi-recurrent steps, transducers.

Shape legend: B utterances, F features, H units, U units of a label encoder.
"""

from typing import Any, Final

import torch
from gallery_entry import F, H, shown
from torch import nn
from torch.nn import functional

U: Final = 4


@shown()
class LiGRULayerNorm(nn.Module):
    """Ravanelli et al. 2018: z = sigmoid(w_z), h = z h + (1 - z) relu(w_c); layer norm of the input's part."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.w = nn.Linear(input_size, 2 * hidden_size, bias=False)
        self.u = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.norm = nn.LayerNorm(2 * hidden_size)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        at, zt = (self.norm(self.w(x)) + self.u(h)).chunk(2, 1)
        zt = torch.sigmoid(zt)
        return zt * h + (1 - zt) * torch.relu(at)


@shown(
    constants=lambda n: (torch.rand(n, H) < 0.8).float() / 0.8,
    step=lambda cell, h, x, mask: cell(x, h, mask),
)
class LiGRUDropout(LiGRULayerNorm):
    """The same with one dropout mask for a whole sequence (Moon et al. 2015)."""

    def forward(self, x: torch.Tensor, h: torch.Tensor, drop_mask: torch.Tensor) -> torch.Tensor:
        gates = self.norm(self.w(x)) + self.u(h)
        at, zt = gates.chunk(2, 1)
        zt = torch.sigmoid(zt)
        hcand = torch.relu(at) * drop_mask
        return zt * h + (1 - zt) * hcand


@shown(make=lambda kind: kind(F, H).train(), reason="batch")
class LiGRUBatchNorm(nn.Module):
    """The same as published, with batch norm: in training a row's numbers depend on the other rows."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(input_size, 2 * hidden_size), nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.bn = nn.BatchNorm1d(2 * hidden_size, track_running_stats=False)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        at, zt = (self.bn(self.w(x)) + self.u(h)).chunk(2, 1)
        zt = torch.sigmoid(zt)
        return zt * h + (1 - zt) * torch.relu(at)


@shown(make=lambda kind: kind(F, H).eval())
class LiGRUEvalBatchNorm(nn.Module):
    """The same in evaluation: batch norm with its running numbers is a map of each unit."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(input_size, 2 * hidden_size), nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.bn = nn.BatchNorm1d(2 * hidden_size)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        at, zt = (self.bn(self.w(x)) + self.u(h)).chunk(2, 1)
        zt = torch.sigmoid(zt)
        return zt * h + (1 - zt) * torch.relu(at)


@shown()
class SRU(nn.Module):
    """Lei et al. 2018: f = sigmoid(W x + v c + b), c = f c + (1 - f) W x, h = r c + (1 - r) x."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Linear(input_size, 4 * hidden_size, bias=False)
        self.v = nn.Parameter(torch.randn(2, hidden_size))
        self.bias = nn.Parameter(torch.zeros(2, hidden_size))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> Any:
        u, uf, ur, skip = self.weight(x).view(x.size(0), 4, -1).unbind(1)
        f = torch.sigmoid(uf + self.v[0] * c + self.bias[0])
        r = torch.sigmoid(ur + self.v[1] * c + self.bias[1])
        c = c * f + (1.0 - f) * u
        return r * functional.relu(c) + (1.0 - r) * skip * 3**0.5, c


@shown(state=(H, F))
class QRNN(nn.Module):
    """Bradbury et al. 2017, a window of two: z, f, o of [x_{t-1}, x_t]; c = f c + (1 - f) z; h = o c."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * input_size, 3 * hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        c, x_prev = state
        z, f, o = self.linear(torch.cat([x_prev, x], 1)).chunk(3, 1)
        z, f, o = z.tanh(), f.sigmoid(), o.sigmoid()
        c = torch.lerp(z, c, f)
        return o * c, (c, x)


@shown()
class FastGRNN(nn.Module):
    """Kusupati et al. 2018: z = sigmoid(p + b_z), h~ = tanh(p + b_h), h = (s(zeta) (1 - z) + s(nu)) h~ + z h."""

    def __init__(self, input_size: int, hidden_size: int, rank: int = 3) -> None:
        super().__init__()
        self.W1, self.W2 = nn.Parameter(torch.randn(rank, input_size)), nn.Parameter(torch.randn(hidden_size, rank) / 2)
        self.U1, self.U2 = (nn.Parameter(torch.randn(*s) / 2) for s in ((rank, hidden_size), (hidden_size, rank)))
        self.bias_gate, self.bias_update = (nn.Parameter(torch.ones(1, hidden_size)) for _ in range(2))
        self.zeta, self.nu = nn.Parameter(torch.ones(1, 1)), nn.Parameter(-4 * torch.ones(1, 1))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        wComp = torch.matmul(torch.matmul(x, self.W1.t()), self.W2.t())
        uComp = torch.matmul(torch.matmul(h, torch.t(self.U1)), torch.t(self.U2))
        pre = wComp + uComp
        z = torch.sigmoid(pre + self.bias_gate)
        c = torch.tanh(pre + self.bias_update)
        return z * h + (torch.sigmoid(self.zeta) * (1.0 - z) + torch.sigmoid(self.nu)) * c


@shown()
class MinGRU(nn.Module):
    """Feng et al. 2024: z = sigmoid(W_z x), h~ = g(W_h x), h = (1 - z) h + z h~; g(x) = x + 1/2 or sigmoid."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.to_hidden_and_gate = nn.Linear(input_size, 2 * hidden_size, bias=False)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        hidden, gate = self.to_hidden_and_gate(x).chunk(2, dim=-1)
        hidden = torch.where(hidden >= 0, hidden + 0.5, hidden.sigmoid())
        return torch.lerp(h, hidden, gate.sigmoid())


@shown()
class ATR(nn.Module):
    """Zhang et al. 2018, addition-subtraction twin gates: p = W x, q = U h; h = sigmoid(p + q) p + sigmoid(p - q) h."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        p, q = self.w(x), self.u(h)
        return torch.sigmoid(p + q) * p + torch.sigmoid(p - q) * h


@shown(
    inputs=(F, lambda *size: torch.randint(9, size)),
    state=(H, H),
    constants=torch.Size((6, U)),
    step=lambda cell, state, inputs, labels: cell(*inputs, state, labels)[::-1],
)
class Transducer(nn.Module):
    """Graves 2012, RNN-T: an LSTM predicts from the last label; log softmax(W tanh(f + g)) over 6 encoder frames."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=0)
        self.predictor = nn.LSTMCell(4 + input_size, hidden_size)
        self.f, self.g, self.out = nn.Linear(U, 6), nn.Linear(hidden_size, 6), nn.Linear(6, 9)

    def forward(self, x: torch.Tensor, label: torch.Tensor, state: Any, encoded: torch.Tensor) -> Any:
        h, c = self.predictor(torch.cat([self.embed(label), x], 1), state)
        joint = torch.tanh(self.f(encoded) + self.g(h).unsqueeze(1))
        return functional.log_softmax(self.out(joint), dim=-1), (h, c)


@shown(state={"conv": torch.Size((3, F)), "h": H}, step=lambda cell, state, x: cell(x, state)[::-1])
class ConvGRUFront(nn.Module):
    """A causal depthwise convolution over the last four frames, kept as a buffer, before a GRU (streaming)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(input_size, input_size, kernel_size=4, groups=input_size)
        self.gru = nn.GRUCell(input_size, hidden_size)

    def forward(self, x: torch.Tensor, state: dict[str, torch.Tensor]) -> Any:
        window = torch.cat([state["conv"], x.unsqueeze(1)], dim=1)
        y = functional.silu(self.conv(window.transpose(1, 2)).squeeze(-1))
        h = self.gru(y, state["h"])
        return h, {"conv": window[:, 1:], "h": h}
