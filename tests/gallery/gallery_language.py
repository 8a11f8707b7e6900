"""Cells of language modelling: gated, multiplicative, highway, orthogonal, hierarchical.

Shape legend: B sequences, F features, H units.
"""

from typing import Any

import torch
from gallery_entry import F, H, shown
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations


@shown(state=(H, H))
class Mogrifier(nn.Module):
    """Melis et al. 2020: x and h gate each other five times: x = 2 sigmoid(Q h) x, h = 2 sigmoid(R x) h; LSTM."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(input_size, hidden_size)
        sizes = [(hidden_size, input_size) if i % 2 == 0 else (input_size, hidden_size) for i in range(5)]
        self.mogrifier_list = nn.ModuleList([nn.Linear(*size) for size in sizes])

    def forward(self, x: torch.Tensor, states: tuple[torch.Tensor, torch.Tensor]) -> Any:
        ht, ct = states
        for i, layer in enumerate(self.mogrifier_list):
            if i % 2 == 0:
                x = 2 * torch.sigmoid(layer(ht)) * x
            else:
                ht = 2 * torch.sigmoid(layer(x)) * ht
        return self.lstm(x, (ht, ct))


class _ScriptedParts(nn.Module):
    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.inward, self.around = nn.Linear(input_size, 3 * hidden_size), nn.Linear(hidden_size, 3 * hidden_size)
        self.slope = 0.5

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.slope * self.inward(x), self.slope * self.around(h)


@torch.jit.script
def _gru_gates(given: torch.Tensor, own: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    i_r, i_z, i_n = given.chunk(3, 1)
    h_r, h_z, h_n = own.chunk(3, 1)
    z = torch.sigmoid(i_z + h_z)
    return (1 - z) * torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n) + z * h


@shown()
class ScriptedGRU(nn.Module):
    """A GRU in TorchScript, as speech toolkits have it: a module and a function, which ran and were optimised before.

    What was optimised has gradients that no operator shows.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.parts = torch.jit.script(_ScriptedParts(input_size, hidden_size))
        h = torch.zeros(2, hidden_size, requires_grad=True)
        for _ in range(3):
            self(torch.zeros(2, input_size), h).sum().backward()

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = _gru_gates(*self.parts(x, h), h)
        return gated


@shown()
class MIGRU(nn.Module):
    """Wu et al. 2016, multiplicative integration: a (W x) (U h) + b1 (U h) + b2 (W x) + b in a GRU's gates."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.W, self.U = (nn.Linear(size, 3 * hidden_size, bias=False) for size in (input_size, hidden_size))
        self.alpha, self.beta1, self.beta2 = (nn.Parameter(torch.ones(3 * hidden_size)) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(3 * hidden_size))
        self.H = hidden_size

    def _mi(self, wx: torch.Tensor, uh: torch.Tensor, part: slice) -> torch.Tensor:
        return self.alpha[part] * wx * uh + self.beta1[part] * uh + self.beta2[part] * wx + self.bias[part]

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        gates, new = slice(0, 2 * self.H), slice(2 * self.H, None)
        wx = self.W(x)
        z, r = torch.sigmoid(self._mi(wx[:, gates], functional.linear(h, self.U.weight[gates]), gates)).chunk(2, 1)
        n = torch.tanh(self._mi(wx[:, new], functional.linear(r * h, self.U.weight[new]), new))
        return (1 - z) * n + z * h


@shown(state=(H, H))
class MultiplicativeLSTM(nn.Module):
    """Krause et al. 2017: m = (W_m x) (U_m h) takes the place of h in an LSTM."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.wmx = nn.Linear(input_size, hidden_size, bias=False)
        self.wmh = nn.Linear(hidden_size, hidden_size, bias=False)
        self.wx, self.wh = nn.Linear(input_size, 4 * hidden_size, bias=False), nn.Linear(hidden_size, 4 * hidden_size)

    def forward(self, x: torch.Tensor, hidden: Any) -> Any:
        hx, cx = hidden
        m = self.wmx(x) * self.wmh(hx)
        i, f, o, u = torch.split(self.wx(x) + self.wh(m), hx.size(1), dim=1)
        cy = torch.sigmoid(f) * cx + torch.sigmoid(i) * torch.tanh(u)
        hy = torch.sigmoid(o) * torch.tanh(cy)
        return hy, cy


@shown()
class RecurrentHighway(nn.Module):
    """Zilly et al. 2017, depth 3: s = h t + s (1 - t) in each micro step; x enters the first."""

    def __init__(self, input_size: int, hidden_size: int, depth: int = 3) -> None:
        super().__init__()
        self.x2 = nn.Linear(input_size, 2 * hidden_size)
        self.layers = nn.ModuleList(nn.Linear(hidden_size, 2 * hidden_size) for _ in range(depth))

    def forward(self, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        for depth, layer in enumerate(self.layers):
            pre = layer(s) + (self.x2(x) if depth == 0 else 0)
            h, t = torch.tanh(pre[:, : pre.shape[1] // 2]), torch.sigmoid(pre[:, pre.shape[1] // 2 :] - 2)
            s = h * t + s * (1 - t)
        return s


@shown(state=(H, H))
class NASCell(nn.Module):
    """Zoph & Le 2017: the tree of eight gates that the search found."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(input_size, 8 * hidden_size, bias=False)
        self.m = nn.Linear(hidden_size, 8 * hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, c = state
        i, m = self.inputs(x).chunk(8, -1), self.m(h).chunk(8, -1)
        layer1 = [
            torch.sigmoid(i[0] + m[0]), torch.relu(i[1] + m[1]), torch.sigmoid(i[2] + m[2]), torch.relu(i[3] * m[3]),
            torch.tanh(i[4] + m[4]), torch.sigmoid(i[5] + m[5]), torch.tanh(i[6] + m[6]), torch.sigmoid(i[7] + m[7]),
        ]  # fmt: skip
        l2_0, l2_1 = torch.tanh(layer1[0] * layer1[1]), torch.tanh(layer1[2] + layer1[3])
        l2_2, l2_3 = torch.tanh(layer1[4] * layer1[5]), torch.sigmoid(layer1[6] + layer1[7])
        l2_0 = torch.tanh(l2_0 + c)
        new_c = l2_0 * l2_1
        return torch.tanh(new_c * torch.tanh(l2_2 + l2_3)), new_c


class _Mutant(nn.Module):
    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.xz, self.xr, self.xh = (nn.Linear(input_size, hidden_size) for _ in range(3))
        self.hz, self.hr, self.hh = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(3))
        self.project = nn.Linear(input_size, hidden_size)


@shown()
class MUT1(_Mutant):
    """Jozefowicz et al. 2015: z of x alone, the candidate of tanh(x)."""

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        z, r = torch.sigmoid(self.xz(x)), torch.sigmoid(self.xr(x) + self.hr(h))
        return torch.tanh(self.hh(r * h) + torch.tanh(self.project(x))) * z + h * (1 - z)


@shown()
class MUT2(_Mutant):
    """Jozefowicz et al. 2015: r = sigmoid(x + U h)."""

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        z, r = torch.sigmoid(self.xz(x) + self.hz(h)), torch.sigmoid(self.project(x) + self.hr(h))
        return torch.tanh(self.hh(r * h) + self.xh(x)) * z + h * (1 - z)


@shown()
class MUT3(_Mutant):
    """Jozefowicz et al. 2015: z of tanh(h)."""

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        z = torch.sigmoid(self.xz(x) + self.hz(torch.tanh(h)))
        r = torch.sigmoid(self.xr(x) + self.hr(h))
        return torch.tanh(self.hh(r * h) + self.xh(x)) * z + h * (1 - z)


@shown()
class MinimalGated(nn.Module):
    """Zhou et al. 2016: one gate f, h = (1 - f) h + f tanh(W [f h, x])."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.f, self.n = (nn.Linear(hidden_size + input_size, hidden_size) for _ in range(2))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        f = self.f(torch.cat([h, x], dim=-1)).sigmoid_()
        return torch.lerp(h, self.n(torch.cat([f * h, x], dim=-1)).tanh_(), f)


@shown()
class Janet(nn.Module):
    """Van der Westhuizen & Lasenby 2018, forget gate alone: c = sigmoid(s) c + (1 - sigmoid(s - 1)) tanh(.)."""

    def __init__(self, input_size: int, hidden_size: int, t_max: int = 100) -> None:
        super().__init__()
        self.i2h, self.h2h = nn.Linear(input_size, 2 * hidden_size), nn.Linear(hidden_size, 2 * hidden_size)
        with torch.no_grad():  # chrono initialisation
            self.i2h.bias[:hidden_size] = torch.log(torch.empty(hidden_size).uniform_(1, t_max - 1))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        s, n = torch.chunk(self.i2h(x) + self.h2h(c), 2, dim=1)
        return torch.sigmoid(s) * c + (1.0 - torch.sigmoid(s - 1.0)) * torch.tanh(n)


@shown(state=(H, 4))
class SCRN(nn.Module):
    """Mikolov et al. 2015: slow context s = 0.95 s + 0.05 B x; h = sigmoid(P s + A x + R h); y = U h + V s."""

    def __init__(self, input_size: int, hidden_size: int, context: int = 4) -> None:
        super().__init__()
        self.A, self.R = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.B, self.P = nn.Linear(input_size, context), nn.Linear(context, hidden_size)
        self.U, self.V = nn.Linear(hidden_size, 3), nn.Linear(context, 3)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, s = state
        s = 0.05 * self.B(x) + 0.95 * s
        h = torch.sigmoid(self.P(s) + self.A(x) + self.R(h))
        return self.U(h) + self.V(s), (h, s)


@shown(state=(H, lambda n: torch.zeros(n, 1, dtype=torch.long)))
class Clockwork(nn.Module):
    """Koutník et al. 2014: module g works when t mod T_g is 0 and reads modules as slow as itself or slower."""

    def __init__(self, input_size: int, hidden_size: int, periods: tuple[int, ...] = (1, 2, 4, 8)) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        group = torch.arange(hidden_size) // (hidden_size // len(periods))
        self.register_buffer("mask", (group[None, :] >= group[:, None]).float())
        self.register_buffer("periods", torch.tensor(periods)[group])

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, t = state
        active = t % self.periods == 0
        new = torch.tanh(self.inp(x) + functional.linear(h, self.rec.weight * self.mask, self.rec.bias))
        h = torch.where(active, new, h)
        return h, (h, t + 1)


@shown(state=(H, torch.Size((4, 2))))
class OrderedNeurons(nn.Module):
    """Shen et al. 2019, ON-LSTM: master gates cumax(.) = cumsum(softmax(.)) over chunks of two units."""

    def __init__(self, input_size: int, hidden_size: int, chunk_size: int = 2) -> None:
        super().__init__()
        self.chunk_size, self.n_chunk = chunk_size, hidden_size // chunk_size
        size = 4 * hidden_size + 2 * self.n_chunk
        self.ih, self.hh = nn.Linear(input_size, size), nn.Linear(hidden_size, size)

    def forward(self, x: torch.Tensor, hidden: Any) -> Any:
        hx, cx = hidden
        gates = self.ih(x) + self.hh(hx)
        cingate, cforgetgate = gates[:, : self.n_chunk * 2].chunk(2, 1)
        outgate, cell, ingate, forgetgate = (
            gates[:, self.n_chunk * 2 :].view(-1, self.n_chunk * 4, self.chunk_size).chunk(4, 1)
        )
        cingate = 1.0 - torch.cumsum(functional.softmax(cingate, dim=-1), dim=-1)
        cforgetgate = torch.cumsum(functional.softmax(cforgetgate, dim=-1), dim=-1)
        cingate, cforgetgate = cingate[:, :, None], cforgetgate[:, :, None]
        ingate, forgetgate, outgate = torch.sigmoid(ingate), torch.sigmoid(forgetgate), torch.sigmoid(outgate)
        overlap = cforgetgate * cingate
        forgetgate = forgetgate * overlap + (cforgetgate - overlap)
        ingate = ingate * overlap + (cingate - overlap)
        cy = forgetgate * cx + ingate * cell.tanh()
        hy = (outgate * torch.tanh(cy)).reshape(-1, self.n_chunk * self.chunk_size)
        return (hy, (cforgetgate.mean(1), cingate.mean(1))), (hy, cy)


@shown(state=(4, H))
class ProjectedPeepholeLSTM(nn.Module):
    """Sak et al. 2014: peepholes from c to the gates, h projected to fewer units."""

    def __init__(self, input_size: int, hidden_size: int, proj_size: int = 4) -> None:
        super().__init__()
        self.x2h = nn.Linear(input_size, 4 * hidden_size)
        self.h2h = nn.Linear(proj_size, 4 * hidden_size, bias=False)
        self.peep = nn.Parameter(torch.rand(3, hidden_size))
        self.proj = nn.Linear(hidden_size, proj_size, bias=False)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, c = state
        i, f, g, o = (self.x2h(x) + self.h2h(h)).unflatten(1, (4, -1)).unbind(1)
        i, f = torch.sigmoid(i + self.peep[0] * c), torch.sigmoid(f + self.peep[1] * c)
        c = (f * c).addcmul(i, g.tanh())
        h = self.proj(torch.sigmoid(o + self.peep[2] * c) * c.tanh())
        return h, (h, c)


@shown(state=(H, H))
class LayerNormLSTM(nn.Module):
    """Ba et al. 2016: LN(W x) + LN(U h) + b in the gates, LN(c) before the output."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.ih, self.hh = (nn.Linear(size, 4 * hidden_size, bias=False) for size in (input_size, hidden_size))
        self.ln_ih, self.ln_hh, self.ln_c = (nn.LayerNorm(size * hidden_size) for size in (4, 4, 1))

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, c = state
        i, f, o, g = (self.ln_ih(self.ih(x)) + self.ln_hh(self.hh(h))).chunk(4, dim=1)
        c = torch.sigmoid(f + 1.0) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(self.ln_c(c)), c


@shown(state=(8, 8), is_random=True)
class ZoneoutLSTM(nn.Module):
    """Krueger et al. 2017: each unit keeps its old value with probability p while training."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(input_size, hidden_size)
        self.zoneout = 0.2

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, c = state
        h_new, c_new = self.cell(x, (h, c))
        mask = torch.bernoulli(torch.full_like(h, self.zoneout))
        return mask * h + (1 - mask) * h_new, mask * c + (1 - mask) * c_new


@shown()
class IndRNN(nn.Module):
    """Li et al. 2018: h = relu(W x + u h) with a vector u."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc, self.u = nn.Linear(input_size, hidden_size), nn.Parameter(torch.rand(hidden_size))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.fc(x) + self.u * h, inplace=True)


@shown(state=(H, H))
class RecurrentAdditive(nn.Module):
    """Lee et al. 2017, RAN: c = i (W x) + f c, h = tanh(c)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.content = nn.Linear(input_size, hidden_size)
        self.gates = nn.Linear(input_size + hidden_size, 2 * hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, c = state
        i, f = torch.sigmoid(self.gates(torch.hstack((x, h)))).tensor_split(2, dim=1)
        c = i * self.content(x) + f * c
        return torch.tanh(c), c


@shown()
class Bistable(nn.Module):
    """Vecoven et al. 2021, BRC: a = 1 + tanh(W x + w h), c = sigmoid(U x + u h), h = c h + (1 - c) tanh(V x + a h)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.x = nn.Linear(input_size, 3 * hidden_size)
        self.w = nn.Parameter(torch.randn(2, hidden_size))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        xa, xc, xh = torch.tensor_split(self.x(x), 3, dim=-1)
        a, c = torch.tanh(xa + self.w[0] * h) + 1, torch.sigmoid(xc + self.w[1] * h)
        return c * h + (1 - c) * torch.tanh(xh + a * h)


@shown()
class NeuromodulatedBistable(nn.Module):
    """The same with matrices in the gates: nBRC."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(input_size, 3 * hidden_size), nn.Linear(hidden_size, 2 * hidden_size, bias=False)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        xa, xc, xh = self.x(x).chunk(3, dim=-1)
        ha, hc = self.h(h).chunk(2, dim=-1)
        a, c = 1 + torch.tanh(xa + ha), torch.sigmoid(xc + hc)
        return c * h + (1 - c) * torch.tanh(xh + a * h)


@shown()
class DeltaRNN(nn.Module):
    """Ororbia et al. 2017: z = phi(a (V h) (W x) + b1 (V h) + b2 (W x)), r = sigmoid(W x + b), h = phi((1-r)z + rh)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.W, self.V = nn.Linear(input_size, hidden_size, bias=False), nn.Linear(hidden_size, hidden_size, bias=False)
        self.alpha, self.beta1, self.beta2, self.b, self.br = (nn.Parameter(torch.rand(hidden_size)) for _ in range(5))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        wx, vh = self.W(x), self.V(h)
        z = torch.tanh(self.alpha * vh * wx + self.beta1 * vh + self.beta2 * wx + self.b)
        r = torch.sigmoid(wx + self.br)
        return torch.tanh((1 - r) * z + r * h)


@shown()
class AntisymmetricRNN(nn.Module):
    """Chang et al. 2019, gated: h = h + eps sigmoid(.) tanh((W - W^T - gamma I) h + V x)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.Vh, self.Vz = nn.Linear(input_size, hidden_size), nn.Linear(input_size, hidden_size)
        self.W = nn.Parameter(torch.randn(hidden_size, hidden_size))
        self.register_buffer("gamma_I", 0.01 * torch.eye(hidden_size))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        W = torch.triu(self.W, diagonal=1)
        Wh = h @ (W - W.T - self.gamma_I)
        return h + 0.1 * torch.sigmoid(Wh + self.Vz(x)) * torch.tanh(Wh + self.Vh(x))


@shown()
class LipschitzRNN(nn.Module):
    """Erichson et al. 2021: h' = A h + tanh(W h + U x), A and W = (1 - b)(M + M^T) + b (M - M^T) - gamma I."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.C, self.B = (nn.Parameter(torch.randn(hidden_size, hidden_size) / hidden_size) for _ in range(2))
        self.E = nn.Linear(input_size, hidden_size)
        self.register_buffer("I", torch.eye(hidden_size))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        A = 0.35 * (self.C + self.C.transpose(1, 0)) + 0.65 * (self.C - self.C.transpose(1, 0)) - 0.001 * self.I
        W = 0.35 * (self.B + self.B.transpose(1, 0)) + 0.65 * (self.B - self.B.transpose(1, 0)) - 0.001 * self.I
        z = self.E(x)
        k = h + 0.1 * (h.matmul(A) + torch.tanh(h.matmul(W) + z))
        return h + 0.05 * (h.matmul(A) + torch.tanh(h.matmul(W) + z) + k.matmul(A) + torch.tanh(k.matmul(W) + z))


@shown()
class ExpRNN(nn.Module):
    """Lezcano-Casado & Martínez-Rubio 2019: h = modrelu(exp(A - A^T) h + U x), a matrix exponential."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.A = nn.Parameter(0.3 * torch.randn(hidden_size, hidden_size))
        self.inp, self.b = nn.Linear(input_size, hidden_size, bias=False), nn.Parameter(0.1 * torch.randn(hidden_size))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        skew = self.A.triu(1)
        z = h @ torch.matrix_exp(skew - skew.t()) + self.inp(x)
        return torch.sign(z) * functional.relu(torch.abs(z) + self.b)


@shown()
class OrthogonalRNN(nn.Module):
    """Helfrich et al. 2018 in torch's words: a recurrent matrix kept orthogonal by a parametrisation."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.inp = nn.Linear(input_size, hidden_size)
        self.rec = parametrizations.orthogonal(nn.Linear(hidden_size, hidden_size, bias=False), orthogonal_map="cayley")

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inp(x) + self.rec(h))


@shown(state=(H, 6))
class LMU(nn.Module):
    """Voelker et al. 2019: u = e_x x + e_h h + e_m m; m = A m + B u by zero-order hold; h = tanh(W x + W h + W m)."""

    def __init__(self, input_size: int, hidden_size: int, memory: int = 6, theta: float = 8.0) -> None:
        super().__init__()
        Q = torch.arange(memory, dtype=torch.float64)
        R = (2 * Q + 1)[:, None] / theta
        i, j = torch.meshgrid(Q, Q, indexing="ij")
        A = R * torch.where(i < j, -1.0, (-1.0) ** (i - j + 1))
        Ad = torch.matrix_exp(A)
        Bd = torch.linalg.solve(A, (Ad - torch.eye(memory)) @ (R * ((-1.0) ** Q)[:, None]))
        self.register_buffer("A", Ad.float())
        self.register_buffer("B", Bd.float())
        self.e_x, self.e_h, self.e_m = (nn.Linear(size, 1, bias=False) for size in (input_size, hidden_size, memory))
        self.W_x, self.W_h, self.W_m = (nn.Linear(size, hidden_size) for size in (input_size, hidden_size, memory))

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, m = state
        u = self.e_x(x) + self.e_h(h) + self.e_m(m)
        m = functional.linear(m, self.A) + functional.linear(u, self.B)
        return torch.tanh(self.W_x(x) + self.W_h(h) + self.W_m(m)), m


@shown(state=((H, H), (4, 4)), step=lambda cell, state, x: cell(x, state)[::-1])
class HyperLSTM(nn.Module):
    """Ha et al. 2017: a small LSTM gives the scales of a large one's gates; its states are a tuple of tuples."""

    def __init__(self, input_size: int, hidden_size: int, hyper: int = 4) -> None:
        super().__init__()
        self.hyper = nn.LSTMCell(input_size + hidden_size, hyper)
        self.w_x, self.w_h = nn.Linear(input_size, 4 * hidden_size), nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.d_x, self.d_h, self.d_b = (nn.Linear(hyper, 4 * hidden_size) for _ in range(3))
        self.norm = nn.GroupNorm(4, 4 * hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        (h, c), small = state
        small = self.hyper(torch.cat([x, h], -1), small)
        s = small[0]
        gates = self.norm(self.d_x(s) * self.w_x(x) + self.d_h(s) * self.w_h(h) + self.d_b(s))
        i, f, g, o = gates.chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, ((h, c), small)


@shown(state=(H, H), constants=(F, H), step=lambda cell, state, x, masks: cell(x, state, masks)[::-1])
class VariationalLSTM(nn.Module):
    """Gal & Ghahramani 2016: one dropout mask of x and one of h for a whole sequence, before nn.LSTMCell."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(input_size, hidden_size)

    def forward(self, x: torch.Tensor, state: Any, masks: Any) -> Any:
        h, c = self.cell(x * masks[0], (state[0] * masks[1], state[1]))
        return h, (h, c)


@shown(state=[H, H, H], step=lambda cell, state, x: cell(x, state)[::-1])
class StackedGRU(nn.Module):
    """Three nn.GRUCells with residual connections and a list of states (Wu et al. 2016)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(input_size if i == 0 else hidden_size, hidden_size) for i in range(3))

    def forward(self, x: torch.Tensor, hidden: list[torch.Tensor]) -> Any:
        new = []
        for i, cell in enumerate(self.cells):
            h = cell(x, hidden[i])
            new.append(h)
            x = h if i == 0 else x + h
        return x, new


@shown(state=(H, 1), reason="while bool((total < 0.99).any())")
class AdaptiveComputation(nn.Module):
    """Graves 2016: as many micro steps as a halting probability asks for, by a Python loop over its value."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.cell, self.halt = nn.GRUCell(input_size, hidden_size), nn.Linear(hidden_size, 1)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, ponder = state
        total = torch.zeros_like(ponder)
        while bool((total < 0.99).any()):
            h = self.cell(x, h)
            total = total + torch.sigmoid(self.halt(h)) + 0.3
        return h, (h, total)


@shown(state=(H, H))
class UGRNN(nn.Module):
    """Collins et al. 2017: one update gate; here with a CIFG-LSTM's coupled gate above it (Greff et al. 2017)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.lower = nn.Linear(input_size + hidden_size, 2 * hidden_size)
        self.upper = nn.Linear(2 * hidden_size, 2 * hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        a, b = state
        g, c = self.lower(torch.cat([x, a], 1)).split([a.size(1)] * 2, dim=1)
        g = torch.sigmoid(g)
        a = g * a + (1 - g) * functional.hardtanh(c)
        f, n = self.upper(torch.cat([a, b], 1)).split(b.size(1), dim=1)
        f = functional.hardsigmoid(f)
        b = f * b + (1 - f) * functional.mish(n)
        return functional.gelu(b), (a, b)
