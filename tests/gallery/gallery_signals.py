"""Audio, control, finance, graphs and pictures.

Shape legend: B signals, F features, H units, N nodes, C channels.
"""

from typing import Any, Final

import torch
from gallery_entry import F, H, shown
from torch import nn
from torch.nn import functional

N: Final = 4


@shown(state=(4, 6, H), step=lambda cell, state, x: cell(x, *state))
class RNNoise(nn.Module):
    """Valin 2018: three GRUs, for voice, noise and gains, each reading what is below; 'gains' and 'vad' of a frame."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(input_size, 6)
        self.vad_gru, self.noise_gru = nn.GRUCell(6, 4), nn.GRUCell(6 + 4 + input_size, 6)
        self.denoise_gru = nn.GRUCell(4 + 6 + input_size, hidden_size)
        self.vad, self.gains = nn.Linear(4, 1), nn.Linear(hidden_size, 5)

    def forward(self, x: torch.Tensor, v: torch.Tensor, n: torch.Tensor, d: torch.Tensor) -> Any:
        tmp = torch.tanh(self.dense(x))
        v = self.vad_gru(tmp, v)
        n = self.noise_gru(torch.cat([tmp, v, x], dim=-1), n)
        d = self.denoise_gru(torch.cat([v, n, x], dim=-1), d)
        return (v, n, d), {"gains": torch.sigmoid(self.gains(d)), "vad": torch.sigmoid(self.vad(v))}


@shown(inputs=1, state=torch.Size((3, 2)))
class Biquads(nn.Module):
    """Three biquads in series, direct form II transposed: y = b0 x + s1; s1 = b1 x - a1 y + s2; s2 = b2 x - a2 y."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.a = nn.Parameter(torch.rand(3, 3)), nn.Parameter(torch.rand(3, 2) / 2)

    def forward(self, x: torch.Tensor, s: torch.Tensor) -> Any:
        new = []
        x = x.squeeze(-1)
        for stage in range(3):
            b, a = self.b[stage], self.a[stage]
            y = b[0] * x + s[:, stage, 0]
            new.append(torch.stack([b[1] * x - a[0] * y + s[:, stage, 1], b[2] * x - a[1] * y], -1))
            x = y
        return x[:, None], torch.stack(new, 1)


@shown(inputs=(F, lambda *size: torch.randint(16, size)), step=lambda cell, h, inputs: cell(*inputs, h))
class WaveRNN(nn.Module):
    """Kalchbrenner et al. 2018: coarse half and fine half of a GRU's state, the last sample embedded."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.embed, self.R = nn.Embedding(16, 4), nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.inp = nn.Linear(4 + input_size, 3 * hidden_size)
        self.coarse, self.fine = (
            nn.Sequential(nn.Linear(hidden_size // 2, 6), nn.ReLU(inplace=True), nn.Linear(6, 4)) for _ in range(2)
        )

    def forward(self, frame: torch.Tensor, sample: torch.Tensor, h: torch.Tensor) -> Any:
        x = self.inp(torch.cat([self.embed(sample), frame], -1))
        (xu, xr, xe), (hu, hr, he) = x.chunk(3, -1), self.R(h).chunk(3, -1)
        u, r = torch.sigmoid(xu + hu), torch.sigmoid(xr + hr)
        h = u * h + (1 - u) * torch.tanh(r * he + xe)
        coarse, fine = h.split(h.size(-1) // 2, dim=-1)
        return h, torch.log_softmax(torch.cat([self.coarse(coarse), self.fine(fine)], -1), -1)


@shown(inputs=1, state=6)
class KarplusStrong(nn.Module):
    """Karplus & Strong 1983, a delay line with a damped, tuned loop: the line moves on by one sample, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.damping, self.mix = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor, line: torch.Tensor) -> Any:
        mix = torch.sigmoid(self.mix)
        y = x[:, 0] + torch.sigmoid(self.damping) * (mix * line[:, -1] + (1 - mix) * line[:, -2])
        line = torch.roll(line, shifts=1, dims=1).clone()
        line[:, 0] = y
        return y.unsqueeze(-1), line


@shown(inputs=2, state=(N, lambda n: torch.eye(N).repeat(n, 1, 1)))
class KalmanFilter(nn.Module):
    """Kalman 1960, two measured of four: predict F x, F P F^T + Q; gain P H^T S^-1, update in Joseph's form."""

    def __init__(self) -> None:
        super().__init__()
        self.F = nn.Parameter(torch.eye(N) + 0.1 * torch.randn(N, N))
        self.H = nn.Parameter(torch.randn(2, N))
        self.log_q, self.log_r = nn.Parameter(torch.zeros(N)), nn.Parameter(torch.zeros(2))

    def forward(self, z: torch.Tensor, state: Any) -> Any:
        x, P = state
        x = x @ self.F.T
        P = self.F @ P @ self.F.T + torch.diag_embed(self.log_q.exp())
        innovation = z - x @ self.H.T
        R = torch.diag(self.log_r.exp())
        S = self.H @ P @ self.H.T + R
        inverse = torch.linalg.inv(S)
        K = P @ self.H.T @ inverse
        x = x + torch.einsum("bij,bj->bi", K, innovation)
        I_KH = torch.eye(N) - K @ self.H
        P = I_KH @ P @ I_KH.transpose(-1, -2) + K @ R @ K.mT
        loglik = -0.5 * (torch.einsum("bi,bij,bj->b", innovation, inverse, innovation) + torch.logdet(S))
        return (x, loglik), (x, P)


@shown(inputs=1, state=(lambda n: torch.full((n, 1), 0.5), 1))
class GARCH(nn.Module):
    """Bollerslev 1986, with Glosten's leverage: s2 = w + (a + g 1[e < 0]) e^2 + b s2; y is the log likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.tensor([-2.0, -2.0, -2.0, 1.0, 0.0]))

    def forward(self, r: torch.Tensor, state: Any) -> Any:
        variance, e = state
        omega, alpha, gamma, beta = functional.softplus(self.raw[:4])
        leverage = torch.where(e < 0, gamma, torch.zeros_like(gamma))
        variance = omega + (alpha + leverage) * e**2 + beta.clamp(max=0.95) * variance
        e = r - self.raw[4]
        return -0.5 * (torch.log(2 * torch.pi * variance) + e.square() / variance), (variance, e)


@shown(
    inputs={"setpoint": 1, "load": 1},
    state={"plant": 2, "integral": 1, "last": 1},
    step=lambda cell, state, inputs: cell(state, **inputs),
)
class PID(nn.Module):
    """A PID controller with anti-windup in loop with a second-order plant (Åström & Hägglund 1995), gains learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.tensor([1.0, 0.2, 0.1]))
        self.plant = nn.Linear(3, 2)

    def forward(self, state: dict[str, torch.Tensor], setpoint: torch.Tensor, load: torch.Tensor) -> Any:
        kp, ki, kd = self.gains.abs().unbind()
        error = setpoint - state["plant"][:, :1]
        integral = state["integral"] + 0.1 * error
        raw = kp * error + ki * integral + kd * (error - state["last"]) / 0.1
        u = raw.clamp(-1.0, 1.0)
        integral = torch.where((raw - u).abs() > 0, state["integral"], integral)
        plant = state["plant"] + 0.1 * self.plant(torch.cat([state["plant"], u + load], 1))
        return {"plant": plant, "integral": integral, "last": error}, {"u": u, "y": plant[:, :1]}


@shown(inputs=1, state=(1, torch.Size((4,))))
class ExponentialSmoothing(nn.Module):
    """Smyl 2020, ES-RNN's smoothing: level and four seasons, l = a y / s + (1 - a) l, s = g y / l + (1 - g) s."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.gamma = nn.Parameter(torch.tensor(0.2)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, y: torch.Tensor, state: Any) -> Any:
        log_level, log_seasons = state
        y, level, season = y.exp(), log_level.exp(), log_seasons[:, :1].exp()
        a, g = self.alpha.sigmoid(), self.gamma.sigmoid()
        level = a * y / season + (1 - a) * level
        season = g * y / level + (1 - g) * season
        return y / (level * season), (level.log(), torch.cat([log_seasons[:, 1:], season.log()], dim=1))


@shown(
    inputs=torch.Size((N, 3)),
    state=torch.Size((N, 4)),
    constants=lambda n: (torch.rand(n, N, N) < 0.5).float(),
    step=lambda cell, h, x, adjacency: cell(x, adjacency, h),
)
class GatedGraph(nn.Module):
    """Li et al. 2016, GGNN on each row's own graph: messages A (W h) / degree, then nn.GRUCell for every node."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.gru = nn.Linear(4, 4), nn.GRUCell(4 + 3, 4)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        degree = adjacency.sum(-1, keepdim=True).clamp(min=1)
        messages = adjacency @ self.message(h) / degree
        return self.gru(torch.cat([messages, x], -1).view(-1, 7), h.reshape(-1, 4)).view_as(h)


@shown(inputs=torch.Size((N, 3)))
class DeepSetGRU(nn.Module):
    """Zaheer et al. 2017: a step sees a set, rho(sum and max of phi(x_i)), gated into a state."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(3, 6), nn.SiLU(), nn.Linear(6, 5))
        self.rho, self.gate = nn.Linear(10, hidden_size), nn.Linear(10 + hidden_size, hidden_size)

    def forward(self, items: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        phi = self.phi(items)
        pooled = torch.cat([phi.mean(dim=1), phi.max(dim=1).values], dim=-1)
        g = self.gate(torch.cat([pooled, h], -1)).sigmoid()
        return torch.lerp(h, torch.tanh(self.rho(pooled)), g)


@shown(inputs=torch.Size((2, 4, 4)), state=(torch.Size((3, 4, 4)), torch.Size((3, 4, 4))))
class ConvLSTM(nn.Module):
    """Shi et al. 2015: the gates of an LSTM are one 3 x 3 convolution of [x, h], here 3 channels of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2 + 3, 4 * 3, kernel_size=3, padding=1)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, c = state
        cc_i, cc_f, cc_o, cc_g = torch.split(self.conv(torch.cat([x, h], dim=1)), 3, dim=1)
        c = torch.sigmoid(cc_f) * c + torch.sigmoid(cc_i) * torch.tanh(cc_g)
        h = torch.sigmoid(cc_o) * torch.tanh(c)
        return h, c


@shown(
    inputs=(2, lambda *size: torch.rand(*size, 1)),
    state={"s": 4},
    step=lambda cell, state, inputs: cell(*inputs, **state),
)
class NeuralSpaceModel(nn.Module):
    """A learnt vehicle model in control: s = s + dt (f(s, u) + known physics), angle kept in (-pi, pi] by atan2."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4 + 2, 8), nn.ELU(), nn.Linear(8, 2))

    def forward(self, u: torch.Tensor, dt: torch.Tensor, s: torch.Tensor) -> Any:
        x, y, theta, v = s.unbind(dim=-1)
        acceleration, turn = self.f(torch.cat((s, u), -1)).unbind(-1)
        dt = dt[:, 0]
        x, y = x + dt * v * torch.cos(theta), y + dt * v * torch.sin(theta)
        theta = theta + dt * turn
        theta = torch.atan2(torch.sin(theta), torch.cos(theta))
        new = torch.stack([x, y, theta, v + dt * acceleration], dim=-1)
        return {"s": new}, new[:, :2]


@shown(inputs=torch.Size((4, 2)), state=4 * 3, step=lambda cell, h, x: cell(x.flatten(1), h))
class DiffusionGRU(nn.Module):
    """Li et al. 2018, DCRNN: gates are diffusion convolutions, sum_k T_k(S) [x, h] W_k for S forward and backward.

    Nodes come first while supports are applied, and features lie beside sequences: (nodes, features x sequences).
    """

    def __init__(self, nodes: int = 4, units: int = 3, steps: int = 2) -> None:
        super().__init__()
        adjacency = torch.rand(nodes, nodes)
        self.register_buffer("there", adjacency / adjacency.sum(1, keepdim=True))
        self.register_buffer("back", adjacency.T / adjacency.sum(0)[:, None])
        self.nodes, self.units, self.steps = nodes, units, steps
        self.gates = nn.Linear((2 * steps + 1) * (2 + units), 2 * units)
        self.candidate = nn.Linear((2 * steps + 1) * (2 + units), units)

    def diffuse(self, x: torch.Tensor, h: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        count = x.shape[0]
        both = torch.cat([x.reshape(count, self.nodes, -1), h.reshape(count, self.nodes, -1)], dim=2)
        size = both.size(2)
        x0 = both.permute(1, 2, 0).reshape(self.nodes, size * count)
        found = x0.unsqueeze(0)
        for support in (self.there, self.back):
            before, x1 = x0, torch.mm(support, x0)
            found = torch.cat([found, x1.unsqueeze(0)], dim=0)
            for _ in range(2, self.steps + 1):
                before, x1 = x1, 2 * torch.mm(support, x1) - before
                found = torch.cat([found, x1.unsqueeze(0)], dim=0)
        orders = found.shape[0]
        rows = found.reshape(orders, self.nodes, size, count).permute(3, 1, 2, 0)
        return layer(rows.reshape(count * self.nodes, size * orders)).reshape(count, -1)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> Any:
        gates = torch.sigmoid(self.diffuse(x, h, self.gates)).reshape(-1, self.nodes, 2 * self.units)
        r, u = (part.reshape(-1, self.nodes * self.units) for part in torch.split(gates, self.units, dim=-1))
        c = torch.tanh(self.diffuse(x, r * h, self.candidate))
        h = u * h + (1 - u) * c
        return h, h
