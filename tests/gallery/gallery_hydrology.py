"""Hydrology: LSTMs with static attributes and mass balance, and the buckets of conceptual models.

Shape legend: B basins, F forcings, A static attributes, H units, D ditches that hold mass.
"""

from typing import Any, Final

import torch
from gallery_entry import F, H, shown
from torch import nn
from torch.nn import functional

A: Final = 4
D: Final = 6


def _rain(*size: int) -> torch.Tensor:
    return 10 * torch.rand(*size, 1)


def _parameters(*size: int) -> torch.Tensor:
    return torch.rand(*size, 6)


def _storage(*size: int) -> torch.Tensor:
    return 10 * torch.rand(*size, 3)


@shown(
    state=(H, H),
    constants=A,
    step=lambda cell, state, x, static: cell(x, static, state)[::-1],
)
class EALSTM(nn.Module):
    """Kratzert et al. 2019: the input gate is sigmoid(W s) of static attributes, the same at every step."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_gate = nn.Linear(A, hidden_size)
        self.weight_ih = nn.Parameter(torch.randn(input_size, 3 * hidden_size) / 2)
        self.weight_hh = nn.Parameter(torch.eye(hidden_size).repeat(1, 3))
        self.bias = nn.Parameter(torch.zeros(3 * hidden_size))

    def forward(self, x: torch.Tensor, static: torch.Tensor, state: Any) -> Any:
        h_0, c_0 = state
        i = torch.sigmoid(self.input_gate(static))
        gates = torch.addmm(self.bias, h_0, self.weight_hh) + x @ self.weight_ih
        f, g, o = gates.chunk(3, 1)
        c_1 = torch.sigmoid(f) * c_0 + i * torch.tanh(g)
        h_1 = torch.sigmoid(o) * torch.tanh(c_1)
        return h_1, (h_1, c_1)


@shown(inputs=(_rain, F), state=D, step=lambda cell, c, inputs: cell(*inputs, c)[::-1], make=lambda kind: kind(F, D))
class MCLSTM(nn.Module):
    """Hoedt et al. 2021: mass m enters by i (sums to 1), moves by R (columns sum to 1), leaves by o: h = o m."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        size = hidden_size + input_size
        self.i, self.o = nn.Linear(size, hidden_size), nn.Linear(size, hidden_size)
        self.r = nn.Linear(size, hidden_size * hidden_size)
        self.hidden_size = hidden_size

    def forward(self, mass: torch.Tensor, x: torch.Tensor, c: torch.Tensor) -> Any:
        features = torch.cat([x, c / (c.norm(p=1, dim=1, keepdim=True) + 1e-5)], dim=-1)
        i = functional.normalize(torch.sigmoid(self.i(features)), p=1, dim=-1)
        r = functional.normalize(torch.relu(self.r(features)).view(-1, self.hidden_size, self.hidden_size), p=1, dim=-1)
        o = torch.sigmoid(self.o(features))
        m_in = mass * i
        m_sys = torch.matmul(c.unsqueeze(1), r).squeeze(1)
        m_new = m_in + m_sys
        return o * m_new, (1 - o) * m_new


@shown(
    inputs={"p": _rain, "t": 1, "pet": lambda *size: 3 * torch.rand(*size, 1)},
    state=_storage,
    constants=_parameters,
    step=lambda cell, storage, forcing, parameters: cell(storage, forcing, parameters),
)
class HBV(nn.Module):
    """Bergström 1976: snow melts above a threshold, soil takes (S / FC)^beta, two zones drain; parameters per basin."""

    def __init__(self) -> None:
        super().__init__()
        self.correction = nn.Parameter(torch.zeros(6))

    def forward(self, storage: torch.Tensor, forcing: dict[str, torch.Tensor], parameters: torch.Tensor) -> Any:
        fc, beta, k0, k1, cfmax, tt = torch.sigmoid(parameters + self.correction).split(1, dim=-1)
        snow, soil, upper = storage[:, :1], storage[:, 1:2], storage[:, 2:3]
        p, t, pet = forcing["p"], forcing["t"], forcing["pet"]
        is_rain = (t >= tt - 0.5).type(p.dtype)
        snow = snow + p * (1 - is_rain)
        melt = torch.min(torch.clamp(5 * cfmax * (t - tt + 0.5), min=0.0), snow)
        snow = snow - melt
        water = p * is_rain + melt
        capacity = 50 * fc + 10
        wetness = torch.clamp((soil / capacity) ** (1 + 4 * beta), min=1e-5, max=1.0)
        recharge = water * wetness
        soil = soil + water - recharge
        excess = torch.clamp(soil - capacity, min=0)
        soil = soil - excess
        evaporation = torch.minimum(soil, pet * torch.clamp(soil / (0.7 * capacity), 0, 1))
        soil = torch.clamp(soil - evaporation, min=1e-5)
        upper = upper + recharge + excess
        q0 = k0 * torch.relu(upper - 20)
        upper = upper - q0
        q1 = 0.5 * k1 * upper
        upper = upper - q1
        return torch.cat([snow, soil, upper], dim=1), {"discharge": q0 + q1, "evaporation": evaporation}


@shown(state=(H, H))
class CustomLSTM(nn.Module):
    """Hochreiter & Schmidhuber 1997 with forget gate (Gers 2000), giving all gates of each step as a dict."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.w_ih, self.w_hh = nn.Linear(input_size, 4 * hidden_size), nn.Linear(hidden_size, 4 * hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h_0, c_0 = state
        i, f, g, o = torch.chunk(self.w_ih(x) + self.w_hh(h_0), 4, dim=-1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c_1 = f * c_0 + i * g
        h_1 = o * torch.tanh(c_1)
        return {"h_n": h_1, "c_n": c_1, "i": i, "f": f, "g": g, "o": o}, (h_1, c_1)


@shown(
    inputs=(_rain, lambda *size: 3 * torch.rand(*size, 1)),
    state=(lambda n: 100 * torch.rand(n, 1), lambda n: 30 * torch.rand(n, 1)),
    step=lambda cell, state, inputs: cell(*inputs, *state),
)
class GR4J(nn.Module):
    """Perrin et al. 2003, production and routing stores: tanh of net rain over X1, fourth powers drain."""

    def __init__(self) -> None:
        super().__init__()
        self.x1, self.x2, self.x3 = (nn.Parameter(torch.tensor(v)) for v in (300.0, 0.1, 60.0))

    def forward(self, rain: torch.Tensor, pet: torch.Tensor, s: torch.Tensor, r: torch.Tensor) -> Any:
        net, dry = (rain - pet).clamp_min(0), (pet - rain).clamp_min(0)
        fill, ratio = torch.tanh(net / self.x1), s / self.x1
        ps = self.x1 * (1 - ratio**2) * fill / (1 + ratio * fill)
        thirst = torch.tanh(dry / self.x1)
        es = s * (2 - ratio) * thirst / (1 + (1 - ratio) * thirst)
        s = s - es + ps
        perc = s * (1 - (1 + (4.0 / 9.0 * s / self.x1) ** 4).pow(-0.25))
        s = s - perc
        exchange = self.x2 * (r / self.x3).pow(3.5)
        r = torch.maximum(torch.zeros_like(r), r + 0.9 * (perc + net - ps) + exchange)
        q = r * (1 - (1 + (r / self.x3) ** 4) ** -0.25)
        return (s, r - q), q + 0.1 * (perc + net - ps)
