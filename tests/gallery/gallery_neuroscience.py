"""Neuroscience: rate networks, plasticity, reservoirs, oscillators.

Shape legend: B trials, F inputs, H units.
"""

from typing import Any

import torch
from gallery_entry import F, H, shown
from torch import nn
from torch.nn import functional


@shown(is_random=True)
class CTRNN(nn.Module):
    """Leaky rate network with noise: x = (1 - a) x + a (W r + W_in u) + sqrt(2 a) sigma xi, r = relu(x) (Yang 2019)."""

    def __init__(self, input_size: int, hidden_size: int, dt: float = 20.0, tau: float = 100.0) -> None:
        super().__init__()
        self.alpha, self.sigma = dt / tau, 0.05
        self.input2h, self.h2h = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, u: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        pre = self.input2h(u) + self.h2h(h)
        pre += self.sigma * (2 / self.alpha) ** 0.5 * torch.randn_like(pre)
        return h * (1 - self.alpha) + torch.relu(pre) * self.alpha


@shown(state=(H, H))
class DaleRNN(nn.Module):
    """Song et al. 2016, excitatory and inhibitory units: W = |W| * M with the sign of each column; r = relu(x)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden_size, hidden_size) / hidden_size**0.5)
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.inp = nn.Linear(input_size, hidden_size)
        e = int(0.8 * hidden_size)
        mask = torch.cat([torch.ones(hidden_size, e), -torch.ones(hidden_size, hidden_size - e)], 1)
        self.register_buffer("mask", mask - torch.diag(torch.diag(mask)))

    def forward(self, u: torch.Tensor, state: Any) -> Any:
        x, r = state
        effective = torch.abs(self.weight) * self.mask
        x = 0.8 * x + 0.2 * (self.inp(u) + functional.linear(r, effective, self.bias))
        r = torch.relu(x)
        return r, (x, r)


@shown()
class LowRank(nn.Module):
    """Mastrogiuseppe & Ostojic 2018: x' = -x + m n^T phi(x) / N + I u, rank 2."""

    def __init__(self, input_size: int, hidden_size: int, rank: int = 2) -> None:
        super().__init__()
        self.m, self.n = (nn.Parameter(torch.randn(hidden_size, rank)) for _ in range(2))
        self.wi = nn.Parameter(torch.randn(input_size, hidden_size))
        self.wo = nn.Parameter(torch.randn(hidden_size, 2))
        self.hidden_size = hidden_size

    def forward(self, u: torch.Tensor, x: torch.Tensor) -> Any:
        r = torch.tanh(x)
        x = x + 0.2 * (-x + r.matmul(self.n).matmul(self.m.t()) / self.hidden_size + u.matmul(self.wi))
        return torch.tanh(x).matmul(self.wo) / self.hidden_size, x


@shown(state={"h": H, "u": H, "x": H}, step=lambda cell, state, inputs: cell(inputs, state))
class ShortTermPlasticity(nn.Module):
    """Mongillo et al. 2008, as by Masse et al. 2019: x += a_x (1 - x) - u x h dt, u += a_u (U - u) + U (1 - u) h dt."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.w_in, self.w_rnn = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        fast = torch.arange(hidden_size) % 2 == 0
        self.register_buffer("alpha_x", torch.where(fast, 0.05, 0.007))
        self.register_buffer("alpha_u", torch.where(fast, 0.007, 0.05))
        self.register_buffer("U", torch.where(fast, 0.45, 0.15))

    def forward(self, inputs: torch.Tensor, state: dict[str, torch.Tensor]) -> Any:
        h, u, x = state["h"], state["u"], state["x"]
        x = x + self.alpha_x * (1 - x) - 0.01 * u * x * h
        u = u + self.alpha_u * (self.U - u) + 0.01 * self.U * (1 - u) * h
        x, u = torch.clamp(x, 0, 1), torch.clamp(u, 0, 1)
        h = torch.relu(0.9 * h + 0.1 * (self.w_in(inputs) + self.w_rnn(u * x * h)))
        return {"h": h, "u": u, "x": x}, h


@shown()
class EchoState(nn.Module):
    """Jaeger 2001, leaky: h = (1 - a) h + a tanh(W_in u + W h), fixed W of spectral radius 0.9; y = W_out [u, h]."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        W = torch.rand(hidden_size, hidden_size) - 0.5
        W[torch.rand_like(W) > 0.5] = 0
        self.register_buffer("W", 0.9 * W / torch.linalg.eigvals(W).abs().max())
        self.register_buffer("W_in", torch.rand(hidden_size, input_size) - 0.5)
        self.readout = nn.Linear(input_size + hidden_size, 2)

    def forward(self, u: torch.Tensor, h: torch.Tensor) -> Any:
        with torch.no_grad():
            h = 0.7 * h + 0.3 * torch.tanh(u @ self.W_in.T + h @ self.W.T)
        return self.readout(torch.cat([u, h], dim=1)), h


@shown(
    inputs=(F, 2),
    state=(H, torch.Size((H, 2)), lambda n: torch.eye(H).expand(n, H, H).clone()),
    step=lambda cell, state, inputs: cell(*inputs, state)[::-1],
)
class Force(nn.Module):
    """Sussillo & Abbott 2009, FORCE: P -= P r r^T P / (1 + r^T P r); w -= e P r, e = w^T r - f, by least squares."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.J = nn.Parameter(1.2 * torch.randn(hidden_size, hidden_size) / hidden_size**0.5)
        self.feedback = nn.Parameter(torch.rand(hidden_size, 2) - 0.5)
        self.inp = nn.Linear(input_size, hidden_size, bias=False)

    def forward(self, u: torch.Tensor, target: torch.Tensor, state: Any) -> Any:
        x, w, P = state
        r = torch.tanh(x)
        z = torch.einsum("bhk,bh->bk", w, r)
        x = x + 0.1 * (-x + r @ self.J.t() + z @ self.feedback.t() + self.inp(u))
        r = torch.tanh(x)
        k = torch.bmm(P, r.unsqueeze(-1)).squeeze(-1)
        c = 1.0 / (1.0 + (r * k).sum(-1, keepdim=True))
        P = P - c.unsqueeze(-1) * torch.einsum("bi,bj->bij", k, k)
        error = torch.einsum("bhk,bh->bk", w, r) - target
        w = w - (c * k).unsqueeze(-1) * error.unsqueeze(1)
        return z, (x, w, P)


@shown(state=(H, H))
class FitzHughNagumo(nn.Module):
    """FitzHugh 1961, Nagumo et al. 1962, coupled: v' = v - v^3 / 3 - w + I + G v; w' = (v + a - b w) / tau."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.drive = nn.Linear(input_size, hidden_size)
        self.coupling = nn.Parameter(0.1 * torch.rand(hidden_size, hidden_size))

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        v, w = state
        laplacian = self.coupling - torch.diag(self.coupling.sum(dim=1))
        for _ in range(2):
            dv = v - v.pow(3) / 3 - w + self.drive(x) + v @ laplacian.T
            dw = (v + 0.7 - 0.8 * w) / 12.5
            v, w = v + 0.1 * dv, w + 0.1 * dw
        return v, (v, w)


@shown(state=(H, 3))
class WilsonCowan(nn.Module):
    """Wilson & Cowan 1972: E' = -E + (1 - E) S(w_ee E - w_ei I + P), I likewise; S a shifted sigmoid."""

    def __init__(self, input_size: int, hidden_size: int, inhibitory: int = 3) -> None:
        super().__init__()
        self.w_ee = nn.Parameter(torch.rand(hidden_size, hidden_size))
        self.w_ei = nn.Parameter(torch.rand(inhibitory, hidden_size))
        self.w_ie = nn.Parameter(torch.rand(hidden_size, inhibitory))
        self.w_ii = nn.Parameter(torch.rand(inhibitory, inhibitory))
        self.inp = nn.Linear(input_size, hidden_size)
        self.log_tau = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        E, I = state  # noqa: E741
        tau_e, tau_i = torch.exp(self.log_tau)

        def response(z: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(1.3 * (z - 2.0)) - torch.sigmoid(torch.tensor(-2.6))

        dE = -E + (1 - E) * response(E @ self.w_ee - I @ self.w_ei.abs() + self.inp(x))
        dI = -I + (1 - I) * response(E @ self.w_ie - I @ self.w_ii)
        return torch.cat((E, I), -1), (E + 0.2 * dE / tau_e, I + 0.2 * dI / tau_i)


@shown(state=(H, torch.Size((H, H))))
class DifferentiablePlasticity(nn.Module):
    """Miconi et al. 2018: h' = tanh(W x + h (w + a Hebb)); Hebb = (1 - eta) Hebb + eta h h'^T."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.i2h = nn.Linear(input_size, hidden_size)
        self.w = nn.Parameter(0.3 * torch.randn(hidden_size, hidden_size))
        self.alpha = nn.Parameter(0.3 * torch.randn(hidden_size, hidden_size))
        self.eta = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, hebb = state
        new = torch.tanh(self.i2h(x) + h.unsqueeze(1).bmm(self.w + torch.mul(self.alpha, hebb)).squeeze(1))
        hebb = (1 - self.eta) * hebb + self.eta * torch.bmm(h.unsqueeze(2), new.unsqueeze(1))
        return new, (new, hebb)


@shown(state=(H, torch.Size((H, H)), torch.Size((H, H))))
class Backpropamine(nn.Module):
    """Miconi et al. 2019, neuromodulated: E = 0.9 E + 0.1 h h'^T, Hebb = clip(Hebb + M(h') E)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.i2h, self.modulator = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, 1)
        self.w, self.alpha = (nn.Parameter(0.3 * torch.randn(hidden_size, hidden_size)) for _ in range(2))

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, hebb, trace = state
        new = torch.tanh(self.i2h(x) + (h[:, None] @ (self.w + self.alpha * hebb))[:, 0])
        m = torch.tanh(self.modulator(new))
        hebb = torch.clamp(hebb + m[:, :, None] * trace, min=-2.0, max=2.0)
        trace = 0.9 * trace + 0.1 * h[:, :, None] * new[:, None, :]
        return new, (new, hebb, trace)


@shown()
class Kuramoto(nn.Module):
    """Kuramoto 1975: theta_i' = omega_i + sum_j K_ij sin(theta_j - theta_i)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.omega = nn.Linear(input_size, hidden_size)
        self.K = nn.Parameter(torch.randn(hidden_size, hidden_size) / hidden_size)

    def forward(self, x: torch.Tensor, theta: torch.Tensor) -> Any:
        difference = theta.unsqueeze(1) - theta.unsqueeze(2)
        theta = theta + 0.1 * (self.omega(x) + (self.K * torch.sin(difference)).sum(dim=2))
        return torch.stack([theta.cos(), theta.sin()], -1), theta


@shown(state=(lambda n: torch.full((n, H), -65.0), H, H, H))
class HodgkinHuxley(nn.Module):
    """Hodgkin & Huxley 1952: C v' = I - g_Na m^3 h (v - 50) - g_K n^4 (v + 77) - g_L (v + 54.4); rates of gates."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.g = nn.Parameter(torch.tensor([120.0, 36.0, 0.3]))

    def forward(self, x: torch.Tensor, state: Any, dt: float = 0.02) -> Any:
        v, m, h, n = state
        alpha_m = 0.1 * (v + 40) / (1 - torch.exp(-(v + 40) / 10))
        alpha_n = 0.01 * (v + 55) / (1 - torch.exp(-(v + 55) / 10))
        m = m + dt * (alpha_m * (1 - m) - 4 * torch.exp(-(v + 65) / 18) * m)
        h = h + dt * (0.07 * torch.exp(-(v + 65) / 20) * (1 - h) - h / (1 + torch.exp(-(v + 35) / 10)))
        n = n + dt * (alpha_n * (1 - n) - 0.125 * torch.exp(-(v + 65) / 80) * n)
        g_na, g_k, g_l = functional.softplus(self.g).unbind()
        current = g_na * m**3 * h * (v - 50) + g_k * n**4 * (v + 77) + g_l * (v + 54.387)
        v = v + dt * (10 * self.fc(x) - current)
        return v, (v, m, h, n)


@shown(state=(H, H))
class Organics(nn.Module):
    """Heeger & Mackey 2019, divisive normalisation: y' = -y + b z / (s^2 + W (z^2))^1/2 + recurrent drive, gated."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.wz, self.wb = nn.Linear(input_size, hidden_size), nn.Linear(input_size, hidden_size)
        self.wr = nn.Parameter(torch.eye(hidden_size))
        self.pool = nn.Parameter(torch.rand(hidden_size, hidden_size))

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        y, a = state
        z, b = self.wz(x), torch.sigmoid(self.wb(x))
        drive = b * z + (1 - b) * functional.linear(y, self.wr) / (1 + functional.relu(a))
        norm = torch.sqrt(0.1 + functional.linear(y.square(), self.pool.abs()))
        return y + 0.3 * (-y + drive / norm), a + 0.3 * (-a + norm)
