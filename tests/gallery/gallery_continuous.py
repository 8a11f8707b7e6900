"""Continuous time and irregular data: liquid, ODE, decaying and oscillating cells.

Shape legend: B series, F features, H units, D a series' time since the last value, M its mask.
"""

import math
from typing import Any

import torch
from gallery_entry import F, H, shown
from torch import nn
from torch.nn import functional


def _elapsed(*size: int) -> torch.Tensor:
    return 0.1 + torch.rand(*size, 1)


def _mask(*size: int) -> torch.Tensor:
    return (torch.rand(*size, F) < 0.6).float()


def _flag(*size: int) -> torch.Tensor:
    return torch.rand(*size, 1) < 0.6


@shown(state=6, make=lambda kind: kind(F, 6))
class LTC(nn.Module):
    """Hasani et al. 2021: v = (cm v + g vl + sum w s E) / (cm + g + sum w s), s = sigmoid(sigma (v - mu)); 3 times."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        for name, size in (("", hidden_size), ("sensory_", input_size)):
            self.register_parameter(f"{name}w", nn.Parameter(torch.rand(size, hidden_size)))
            self.register_parameter(f"{name}sigma", nn.Parameter(3 + torch.rand(size, hidden_size)))
            self.register_parameter(f"{name}mu", nn.Parameter(0.3 + torch.rand(size, hidden_size)))
            self.register_parameter(f"{name}erev", nn.Parameter(torch.randn(size, hidden_size).sign()))
        self.gleak, self.vleak = nn.Parameter(torch.rand(hidden_size)), nn.Parameter(torch.randn(hidden_size))
        self.cm = nn.Parameter(torch.rand(hidden_size) + 0.4)

    def _sigmoid(self, v: torch.Tensor, mu: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(sigma * (torch.unsqueeze(v, -1) - mu))

    def forward(self, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        sensory = functional.softplus(self.sensory_w) * self._sigmoid(x, self.sensory_mu, self.sensory_sigma)
        numerator_in, denominator_in = torch.sum(sensory * self.sensory_erev, dim=1), torch.sum(sensory, dim=1)
        cm_t = functional.softplus(self.cm) * 3
        w, gleak = functional.softplus(self.w), functional.softplus(self.gleak)
        for _ in range(3):
            activation = w * self._sigmoid(v, self.mu, self.sigma)
            numerator = cm_t * v + gleak * self.vleak + torch.sum(activation * self.erev, dim=1) + numerator_in
            v = numerator / (cm_t + gleak + torch.sum(activation, dim=1) + denominator_in + 1e-8)
        return v


@shown(inputs=(F, _elapsed), step=lambda cell, h, inputs: cell(inputs[0], h, inputs[1])[::-1])
class CfC(nn.Module):
    """Hasani et al. 2022: h = f1 (1 - g) + f2 g, g = sigmoid(a t + b), of a backbone with 1.7159 tanh(2/3 x)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.backbone = nn.Linear(input_size + hidden_size, 10)
        self.ff1, self.ff2, self.time_a, self.time_b = (nn.Linear(10, hidden_size) for _ in range(4))

    def forward(self, x: torch.Tensor, h: torch.Tensor, ts: torch.Tensor) -> Any:
        z = 1.7159 * torch.tanh(0.666 * self.backbone(torch.cat([x, h], 1)))
        ff1, ff2 = torch.tanh(self.ff1(z)), torch.tanh(self.ff2(z))
        t_interp = torch.sigmoid(self.time_a(z) * ts + self.time_b(z))
        h = ff1 * (1.0 - t_interp) + t_interp * ff2
        return h, h


@shown(inputs=(F, _elapsed), step=lambda cell, h, inputs: cell(*inputs, h))
class ODERNN(nn.Module):
    """Rubanova et al. 2019: h' = f(h), one step of Runge-Kutta of order 4 over dt, then h = GRU(x, h)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.func = nn.Sequential(nn.Linear(hidden_size, 10), nn.Tanh(), nn.Linear(10, hidden_size))
        self.cell = nn.GRUCell(input_size, hidden_size)

    def forward(self, x: torch.Tensor, dt: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        k1 = self.func(h)
        k2 = self.func(h + dt * k1 / 2)
        k3 = self.func(h + dt * k2 / 2)
        k4 = self.func(h + dt * k3)
        return self.cell(x, h + dt * (k1 + 2 * k2 + 2 * k3 + k4) / 6)


@shown(
    inputs={"x": F, "mask": _mask, "delta": lambda *size: torch.rand(*size, F)},
    state=(H, F),
    step=lambda cell, state, inputs: cell(**inputs, state=state)[::-1],
)
class GRUD(nn.Module):
    """Che et al. 2018: x^ = m x + (1 - m) (g x_last + (1 - g) mean), h = exp(-max(0, W d + b)) h, then a GRU."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.gamma_x = nn.Parameter(torch.rand(input_size))
        self.gamma_h = nn.Linear(input_size, hidden_size)
        self.gru = nn.GRUCell(2 * input_size, hidden_size)
        self.register_buffer("x_mean", torch.randn(input_size))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, delta: torch.Tensor, state: Any) -> Any:
        h, x_last = state
        gamma_x = torch.exp(-torch.relu(self.gamma_x * delta))
        gamma_h = torch.exp(-torch.max(torch.zeros_like(h), self.gamma_h(delta)))
        x_last = torch.where(mask > 0, x, x_last)
        x_hat = mask * x + (1 - mask) * (gamma_x * x_last + (1 - gamma_x) * self.x_mean)
        h = self.gru(torch.cat([x_hat, mask], dim=-1), gamma_h * h)
        return h, (h, x_last)


@shown(inputs=(F, _flag), step=lambda cell, h, inputs: cell(h, *inputs))
class GRUODEBayes(nn.Module):
    """De Brouwer et al. 2019: h' = (1 - z) (u - h) between observations, by Euler; a GRU's jump where there is one."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hz, self.hr, self.hu = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(3))
        self.p = nn.Linear(hidden_size, 2 * input_size)
        self.prep = nn.Parameter(torch.randn(input_size, 3))
        self.jump = nn.GRUCell(3 * input_size, hidden_size)

    def forward(self, h: torch.Tensor, x: torch.Tensor, observed: torch.Tensor) -> Any:
        for _ in range(2):
            z, r = torch.sigmoid(self.hz(h)), torch.sigmoid(self.hr(h))
            h = h + 0.1 * (1 - z) * (torch.tanh(self.hu(r * h)) - h)
        mean, logvar = torch.chunk(self.p(h), 2, dim=1)
        error = (x - mean) / torch.exp(0.5 * logvar)
        prepared = torch.relu((torch.stack([x, mean, error], dim=2) * self.prep).flatten(1))
        h = torch.where(observed, self.jump(prepared, h), h)
        return h, torch.cat([mean, 0.5 * error**2], -1)


@shown(state=(H, H))
class CoRNN(nn.Module):
    """Rusch & Mishra 2021: z = z + dt (tanh(W y + V z + U x) - gamma y - eps z); y = y + dt z."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.dt, self.gamma, self.epsilon = 0.1, 2.7, 4.7
        self.i2h = nn.Linear(input_size + 2 * hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        hy, hz = state
        hz = hz + self.dt * (torch.tanh(self.i2h(torch.cat((x, hz, hy), 1))) - self.gamma * hy - self.epsilon * hz)
        hy = hy + self.dt * hz
        return hy, (hy, hz)


@shown(state=(H, H))
class UniCORNN(nn.Module):
    """Rusch & Mishra 2021: z -= dt s(c) (tanh(w y + V x) + alpha y), y += dt s(c) z; w a vector."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight_hh, self.c = nn.Parameter(torch.rand(hidden_size)), nn.Parameter(torch.randn(hidden_size) * 0.1)
        self.i2h = nn.Linear(input_size, hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        hy, hz = state
        step = 0.1 * self.c.sigmoid()
        hz = hz - step * (torch.tanh(hy * self.weight_hh + self.i2h(x)) + 0.9 * hy)
        return hy + step * hz, hz


@shown(inputs=(F, _elapsed), state=(H, H, 1), step=lambda cell, state, inputs: cell(*inputs, state)[::-1])
class PhasedLSTM(nn.Module):
    """Neil et al. 2016: a rhythmic gate k of the phase ((t - s) mod tau) / tau opens the LSTM: c = k c~ + (1 - k) c."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(input_size, hidden_size)
        self.tau = nn.Parameter(torch.exp(torch.rand(hidden_size) * 2))
        self.shift = nn.Parameter(torch.rand(hidden_size))
        self.ratio, self.leak = 0.4, 1e-3

    def forward(self, x: torch.Tensor, dt: torch.Tensor, state: Any) -> Any:
        h, c, t = state
        t = t + dt
        phase = torch.remainder(t - self.shift, self.tau) / self.tau
        up = 2 * phase / self.ratio
        k = torch.where(phase < self.ratio / 2, up, torch.where(phase < self.ratio, 2 - up, self.leak * phase))
        new_h, new_c = self.lstm(x, (h, c))
        h, c = k * new_h + (1 - k) * h, k * new_c + (1 - k) * c
        return h, (h, c, t)


@shown(inputs=(F, _elapsed), state=(H, H), step=lambda cell, state, inputs: cell(*inputs, state))
class TimeAwareLSTM(nn.Module):
    """Baytas et al. 2017: short memory c_s = tanh(W c), decayed by g(dt) = 1 / log(e + dt), before an LSTM's step."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.W_all, self.U_all = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(input_size, 4 * hidden_size)
        self.W_d = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, dt: torch.Tensor, state: Any) -> Any:
        h, c = state
        c_short = torch.tanh(self.W_d(c))
        c_adjusted = c - c_short + c_short * (1.0 / torch.log(math.e + dt))
        f, i, o, g = torch.chunk(self.W_all(h) + self.U_all(x), 4, 1)
        c = torch.sigmoid(f) * c_adjusted + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h, c), h


@shown(state=(H, H))
class LEM(nn.Module):
    """Rusch et al. 2022, long expressive memory: two learnt time steps, z and y by turns."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.inp2hid = nn.Linear(input_size, 4 * hidden_size)
        self.hid2hid = nn.Linear(hidden_size, 3 * hidden_size)
        self.transform_z = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        y, z = state
        i_dt1, i_dt2, i_z, i_y = self.inp2hid(x).chunk(4, 1)
        h_dt1, h_dt2, h_y = self.hid2hid(y).chunk(3, 1)
        ms_dt_bar = 0.9 * torch.sigmoid(i_dt1 + h_dt1)
        ms_dt = 0.9 * torch.sigmoid(i_dt2 + h_dt2)
        z = (1.0 - ms_dt) * z + ms_dt * torch.tanh(i_y + h_y)
        y = (1.0 - ms_dt_bar) * y + ms_dt_bar * torch.tanh(self.transform_z(z) + i_z)
        return y, z


@shown(inputs=(F, _mask), state=(H, H), step=lambda cell, state, inputs: cell(*state, *inputs))
class LatentGRUUnit(nn.Module):
    """Rubanova et al. 2019, the recogniser's unit: a GRU of mean and std of a latent state, updated where observed."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        wide = 2 * hidden_size + 2 * input_size
        self.update_gate = nn.Sequential(nn.Linear(wide, 10), nn.Tanh(), nn.Linear(10, hidden_size), nn.Sigmoid())
        self.reset_gate = nn.Sequential(nn.Linear(wide, 10), nn.Tanh(), nn.Linear(10, hidden_size), nn.Sigmoid())
        self.new_state = nn.Sequential(nn.Linear(wide, 10), nn.Tanh(), nn.Linear(10, 2 * hidden_size))

    def forward(self, mean: torch.Tensor, std: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> Any:
        y_concat = torch.cat([mean, std, x, mask], -1)
        update, reset = self.update_gate(y_concat), self.reset_gate(y_concat)
        new, new_std = self.new_state(torch.cat([mean * reset, std * reset, x, mask], -1)).split(mean.shape[-1], -1)
        new_mean = (1 - update) * new + update * mean
        new_std = (1 - update) * new_std.abs() + update * std
        observed = (torch.sum(mask, -1, keepdim=True) > 0).type_as(x)
        new_mean = observed * new_mean + (1 - observed) * mean
        new_std = torch.abs(observed * new_std + (1 - observed) * std)
        return (new_mean, new_std), new_mean


@shown()
class NeuralCDE(nn.Module):
    """Kidger et al. 2020, by Euler: h = h + f(h) dX, f(h) a matrix (H, F) of each row."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(hidden_size, 8), nn.Linear(8, input_size * hidden_size)
        self.input_size, self.hidden_size = input_size, hidden_size

    def forward(self, dx: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        z = self.linear2(self.linear1(h).relu()).tanh()
        z = z.view(h.size(0), self.hidden_size, self.input_size)
        return h + (z @ dx.unsqueeze(-1)).squeeze(-1)


@shown(inputs=(F, _elapsed), state=(H, H, H, H), step=lambda cell, state, inputs: cell(*inputs, state)[::-1])
class NeuralHawkes(nn.Module):
    """Mei & Eisner 2017, continuous-time LSTM: c(t) = cbar + (c - cbar) exp(-delta dt); intensity softplus(w h)."""

    def __init__(self, input_size: int, hidden_size: int, num_types: int = 3) -> None:
        super().__init__()
        self.rec = nn.Linear(input_size + hidden_size, 7 * hidden_size)
        self.wa = nn.Linear(hidden_size, num_types, bias=False)

    def forward(self, x: torch.Tensor, dt: torch.Tensor, state: Any) -> Any:
        c, cbar, delta, o = state
        decayed = cbar + (c - cbar) * torch.exp(-functional.softplus(delta) * dt)
        h = torch.sigmoid(o) * torch.tanh(decayed)
        intensity = functional.softplus(self.wa(h), beta=2.0)
        i, f, z, o, ibar, fbar, delta = torch.chunk(self.rec(torch.cat((x, h), dim=1)), 7, -1)
        z = torch.tanh(z)
        c = torch.sigmoid(f) * decayed + torch.sigmoid(i) * z
        cbar = torch.sigmoid(fbar) * cbar + torch.sigmoid(ibar) * z
        return intensity, (c, cbar, delta, o)


@shown(inputs=(F, _elapsed), step=lambda cell, h, inputs: cell(*inputs, h))
class GRUDecay(nn.Module):
    """Mozer et al. 2017, a GRU whose state fades: h = exp(-dt softplus(w)) h before each step."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.gru, self.decay = nn.GRUCell(input_size, hidden_size), nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: torch.Tensor, dt: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        h = h.mul(torch.exp(-dt * nn.Softplus()(self.decay)))
        return self.gru(x, h)
