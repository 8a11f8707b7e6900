"""Spiking neurons, with the surrogate gradients by which their users train them.

Shape legend: B samples, F inputs, H neurons.
"""

import math
from typing import Any, NamedTuple

import torch
from gallery_entry import H, shown
from torch import nn


class SuperSpike(torch.autograd.Function):
    """Zenke & Ganguli 2018: forward u > 0, backward 1 / (1 + 10 |u|)^2."""

    scale = 10.0

    @staticmethod
    def forward(ctx: Any, u: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(u)
        out = torch.zeros_like(u)
        out[u > 0] = 1.0
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        (u,) = ctx.saved_tensors
        grad_input = grad_output.clone()
        return grad_input / (SuperSpike.scale * torch.abs(u) + 1.0) ** 2


class FastSigmoid(torch.autograd.Function):
    """Forward u > 0, backward 1 / (1 + k |u|)^2, with the slope as an argument."""

    @staticmethod
    def forward(ctx: Any, u: torch.Tensor, slope: float = 25.0) -> torch.Tensor:
        ctx.save_for_backward(u)
        ctx.slope = slope
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        (u,) = ctx.saved_tensors
        return grad_output / (ctx.slope * u.abs() + 1.0).pow(2), None


class ArcTan(torch.autograd.Function):
    """Fang et al. 2021: backward a / 2 / (1 + (pi a u / 2)^2)."""

    @staticmethod
    def forward(ctx: Any, u: torch.Tensor, alpha: float) -> torch.Tensor:
        ctx.alpha = alpha
        ctx.save_for_backward(u)
        return (u >= 0).to(u)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        grad = None
        if ctx.needs_input_grad[0]:
            grad = ctx.alpha / 2 / (1 + (math.pi / 2 * ctx.alpha * ctx.saved_tensors[0]).pow_(2)) * grad_output
        return grad, None


class Boxcar(torch.autograd.Function):
    """Backward 1/2 where |u| < 1/2, as by Kaiser et al. 2020."""

    @staticmethod
    def forward(ctx: Any, u: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(u)
        return u.gt(0).float().to(u.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (u,) = ctx.saved_tensors
        dx = torch.zeros_like(dy)
        inside = (u > -0.5) & (u < 0.5)
        dx[inside] = dy[inside] * 0.5
        return dx


class Triangle(torch.autograd.Function):
    """Bellec et al. 2018: backward 0.3 max(0, 1 - |v|)."""

    @staticmethod
    def forward(ctx: Any, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(v)
        return torch.where(v > 0, torch.ones_like(v), torch.zeros_like(v))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (v,) = ctx.saved_tensors
        return grad * 0.3 * torch.clamp(1 - v.abs(), min=0)


@shown()
class LeakySubtract(nn.Module):
    """Eshraghian et al. 2023, LIF with reset by subtraction: u = beta u + W x - theta s(u), s = H(u - theta)."""

    def __init__(self, input_size: int, hidden_size: int, beta: float = 0.9) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.register_buffer("beta", torch.tensor(beta))
        self.register_buffer("threshold", torch.tensor(1.0))

    def forward(self, x: torch.Tensor, mem: torch.Tensor) -> Any:
        reset = FastSigmoid.apply(mem - self.threshold).detach()
        mem = self.beta.clamp(0, 1) * mem + self.fc(x) - reset * self.threshold
        spk = FastSigmoid.apply(mem - self.threshold, 25.0)
        return (spk, mem), mem


@shown()
class LeakyZero(nn.Module):
    """The same with reset to zero, a learnt beta and threshold for each neuron, and the arctan surrogate."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size, bias=False)
        self.beta = nn.Parameter(torch.rand(hidden_size))
        self.threshold = nn.Parameter(0.5 * torch.ones(hidden_size))

    def forward(self, x: torch.Tensor, mem: torch.Tensor) -> Any:
        base = torch.clamp(self.beta, 0, 1) * mem + self.fc(x)
        reset = (mem > self.threshold).to(mem).detach()
        mem = base * (1 - reset)
        return ArcTan.apply(mem - self.threshold, 2.0), mem


@shown(state=(H, H))
class RecurrentLeaky(nn.Module):
    """Recurrent LIF: u = beta u + W x + V s, reset by the last spikes."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc, self.recurrent = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        spk, mem = state
        mem = 0.8 * mem * (1.0 - spk.detach()) + self.fc(x) + self.recurrent(spk)
        spk = SuperSpike.apply(mem - 0.3)
        return spk, mem


class LIFState(NamedTuple):
    """Spikes, voltage, current."""

    z: torch.Tensor
    v: torch.Tensor
    i: torch.Tensor


@shown(state=LIFState(H, H, H), step=lambda cell, state, x: cell(x, state)[::-1])
class LIFRecurrentCell(nn.Module):
    """Pehle & Pedersen 2021: dv = (v_leak - v + i) dt / tau_m, di = -i dt / tau_s; z = H(v - v_th); a named tuple."""

    def __init__(self, input_size: int, hidden_size: int, dt: float = 0.1) -> None:
        super().__init__()
        self.input_weights = nn.Parameter(torch.randn(hidden_size, input_size) * (2.0 / hidden_size) ** 0.5)
        self.recurrent_weights = nn.Parameter(torch.randn(hidden_size, hidden_size) * (2.0 / hidden_size) ** 0.5)
        self.dt = dt
        with torch.no_grad():
            self.recurrent_weights.fill_diagonal_(0.0)

    def forward(self, x: torch.Tensor, state: LIFState) -> tuple[torch.Tensor, LIFState]:
        dv = self.dt * 5.0 * ((0.0 - state.v) + state.i)
        v_decayed = state.v + dv
        i_decayed = state.i + -self.dt * 2.0 * state.i
        z_new = SuperSpike.apply(v_decayed - 0.2)
        v_new = (1 - z_new.detach()) * v_decayed
        i_new = i_decayed + nn.functional.linear(x, self.input_weights)
        i_new = i_new + nn.functional.linear(state.z, self.recurrent_weights)
        return z_new, LIFState(z_new, v_new, i_new)


@shown(state=(H, H, H))
class LSNN(nn.Module):
    """Bellec et al. 2018, adaptive threshold: A = 1 + 1.7 b, b = rho b + (1 - rho) z, v = alpha v + W x + U z - z A."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(input_size, hidden_size) / input_size**0.5)
        self.w_rec = nn.Parameter(torch.randn(hidden_size, hidden_size) / hidden_size**0.5)
        self.register_buffer("mask", 1.0 - torch.eye(hidden_size))
        self.alpha, self.rho = math.exp(-1 / 20), math.exp(-1 / 200)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        v, b, z = state
        b = self.rho * b + (1 - self.rho) * z
        threshold = 0.6 + 1.7 * b
        current = torch.matmul(x, self.w_in) + torch.matmul(z, self.w_rec * self.mask)
        v = self.alpha * v + current - z * threshold
        z = Triangle.apply((v - threshold) / 0.6)
        return z, (v, b, z)


@shown(state=(H, H))
class Izhikevich(nn.Module):
    """Izhikevich 2003: v' = 0.04 v^2 + 5 v + 140 - u + I, u' = a (b v - u); if v > 30: v = c, u = u + d."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.a, self.b, self.c, self.d = 0.02, 0.2, -65.0, 8.0

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> Any:
        v, u = state
        current = 20 * self.fc(x)
        for _ in range(2):
            v = v + 0.5 * (0.04 * v**2 + 5 * v + 140 - u + current) * 0.1
        u = u + self.a * (self.b * v - u)
        spike = Boxcar.apply(v - 30.0)
        v = torch.where(spike > 0, torch.full_like(v, self.c), v)
        u = u + spike * self.d
        return spike + 0.01 * v, (v, u)


@shown(state={"syn": H, "mem": H}, step=lambda cell, state, x: cell(x, **state))
class Synaptic(nn.Module):
    """Second-order LIF: i = alpha i + W x; u = beta u + i - theta s."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.alpha, self.beta = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.tensor(0.8))

    def forward(self, x: torch.Tensor, *, syn: torch.Tensor, mem: torch.Tensor) -> Any:
        reset = (mem - 1.0).gt(0).to(mem.dtype)
        syn = self.alpha.clamp(0, 1) * syn + self.fc(x)
        mem = self.beta.clamp(0, 1) * mem + syn - reset
        return {"syn": syn, "mem": mem}, {"spikes": FastSigmoid.apply(mem - 1.0), "mem": mem}


@shown(state=(H, H, H))
class AlphaNeuron(nn.Module):
    """Alpha-function synapse: e = a e + x, i = b i + x, u = tau (e - i) log ratio; excitation and inhibition."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.alpha, self.beta = 0.9, 0.8
        self.tau = 1 + math.log(self.alpha) / (math.log(self.beta) - math.log(self.alpha))

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        exc, inh, mem = state
        current = self.fc(x)
        exc = self.alpha * exc + current
        inh = self.beta * inh - current
        mem = self.tau * (exc + inh) - 0.1 * (mem > 0.5).to(mem)
        return ArcTan.apply(mem - 0.5, 2.0), (exc, inh, mem)


@shown(state=torch.Size((4, H)))
class SpikeResponse(nn.Module):
    """Gerstner 1995, SRM0: u = sum eps * (W x) - sum eta * s, double-exponential eps and eta; traces in one tensor."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.register_buffer("decay", torch.tensor([0.95, 0.8, 0.9, 0.5]))

    def forward(self, x: torch.Tensor, traces: torch.Tensor) -> Any:
        traces = traces * self.decay[None, :, None]
        current = self.fc(x)
        u = traces[:, 0] - traces[:, 1] - (traces[:, 2] - traces[:, 3]) + current
        s = SuperSpike.apply(u - 0.4)
        pulses = torch.stack([current, current, s, s], dim=1)
        return s, traces + pulses


@shown(state=(H, H, H))
class AdLIF(nn.Module):
    """Bittar & Garner 2022: w = beta w + a u + b s; u = alpha (u - s) + (1 - alpha) (LN(W x) + V s - w)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.W, self.V = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size, bias=False)
        self.norm = nn.LayerNorm(hidden_size)
        nn.init.orthogonal_(self.V.weight)
        self.alpha, self.beta = nn.Parameter(torch.rand(hidden_size)), nn.Parameter(torch.rand(hidden_size))
        self.a, self.b = nn.Parameter(torch.rand(hidden_size) * 2 - 1), nn.Parameter(torch.rand(hidden_size) * 2)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        ut, wt, st = state
        V = self.V.weight.clone().fill_diagonal_(0)
        alpha = torch.clamp(self.alpha, min=math.exp(-1 / 5), max=math.exp(-1 / 25))
        beta = torch.clamp(self.beta, min=math.exp(-1 / 30), max=math.exp(-1 / 120))
        wt = beta * wt + self.a.clamp(-1, 1) * ut + self.b.clamp(0, 2) * st
        ut = alpha * (ut - st) + (1 - alpha) * (self.norm(self.W(x)) + torch.matmul(st, V) - wt)
        st = Boxcar.apply(ut - 0.1)
        return st, (ut, wt, st)


@shown()
class ParametricLIF(nn.Module):
    """Fang et al. 2021, PLIF: v = v + (x - v) sigmoid(w); hard reset v = (1 - s) v."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.w = nn.Parameter(torch.as_tensor(-math.log(2.0 - 1)))

    def forward(self, x: torch.Tensor, v: torch.Tensor) -> Any:
        v = v + (self.fc(x) - v) * self.w.sigmoid()
        spike = ArcTan.apply(v - 0.2, 2.0)
        v = (1.0 - spike) * v
        return spike, v


@shown(state=(H, H, lambda n: torch.zeros(n, H, dtype=torch.long)))
class RefractoryLIF(nn.Module):
    """LIF with an absolute refractory time of two steps, counted in whole numbers."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc, self.rec = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        v, z, count = state
        v = 0.9 * v + self.fc(x) + self.rec(z)
        z = SuperSpike.apply(v - 0.2)
        z = torch.where(count > 0, torch.zeros_like(z), z)
        count = torch.where(z > 0, torch.full_like(count, 2), torch.clamp(count - 1, min=0))
        v = v * (1 - z.detach())
        return z, (v, z, count)


@shown(state=(H, H))
class ResonateAndFire(nn.Module):
    """Izhikevich 2001: z' = (b + i w) z + x, spike when Im z > 1; the balanced form of Higuchi et al. 2024."""

    def __init__(self, input_size: int, hidden_size: int, dt: float = 0.05) -> None:
        super().__init__()
        self.fc, self.dt = nn.Linear(input_size, hidden_size, bias=False), dt
        self.omega, self.b_offset = nn.Parameter(torch.rand(hidden_size) * 5 + 5), nn.Parameter(torch.rand(hidden_size))

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        u, v = state
        omega = torch.abs(self.omega)
        p = (-1 + torch.sqrt(1 - torch.square(self.dt * omega))) / self.dt
        b = p - torch.abs(self.b_offset)
        x = 10 * self.fc(x)
        u_new = u + b * u * self.dt - omega * v * self.dt + x * self.dt
        v_new = v + omega * u * self.dt + b * v * self.dt
        z = Triangle.apply(u_new - 0.3)
        return z, (u_new, v_new)


@shown(state=(H, H, H))
class AdaptiveExponential(nn.Module):
    """Brette & Gerstner 2005: v' = -(v - E) + D exp((v - T) / D) - w + I; w' = a (v - E) - w, w += b at a spike."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc, self.rec = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        z, v, w = state
        exponential = 0.5 * torch.exp(torch.minimum((v - 1.0) / 0.5, torch.tensor(2.0)))
        dv = -v + exponential - w + self.fc(x) + self.rec(z)
        dw = 0.1 * v - w
        v, w = v + 0.2 * dv, w + 0.05 * dw
        z = SuperSpike.apply(v - 0.5)
        v = (1 - z) * v
        return z, (z, v, w + 0.1 * z)


class Heaviside(torch.autograd.Function):
    """Forward u > 0 as Norse compares it, with a tensor made of a number; backward as SuperSpike's."""

    @staticmethod
    def forward(ctx: Any, u: torch.Tensor, alpha: float) -> torch.Tensor:
        ctx.save_for_backward(u)
        ctx.alpha = alpha
        return torch.gt(u, torch.as_tensor(0.0)).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        (u,) = ctx.saved_tensors
        return grad_output / (ctx.alpha * u.abs() + 1.0).pow(2), None


@shown(state=LIFState(z=H, v=H, i=H))
class CurrentLIF(nn.Module):
    """A recurrent LIF cell with its constants as tensors of one number, which are attributes and no buffers.

    v = v + dt/tau_m ((v_leak - v) + i), z = v > v_th, v = (1 - sg z) v + sg z v_reset,
    i = (1 - dt/tau_s) i + W x + U z.
    """

    def __init__(self, input_size: int, hidden_size: int, dt: float = 0.1) -> None:
        super().__init__()
        self.input_weights = nn.Parameter(torch.randn(hidden_size, input_size))
        self.recurrent_weights = nn.Parameter(0.3 * torch.randn(hidden_size, hidden_size))
        self.tau_mem_inv, self.tau_syn_inv = torch.as_tensor(2.0), torch.as_tensor(5.0)
        self.v_leak, self.v_th, self.v_reset = torch.as_tensor(0.0), torch.as_tensor(0.2), torch.as_tensor(0.0)
        self.dt = dt

    def forward(self, x: torch.Tensor, state: LIFState) -> Any:
        v = state.v + self.dt * self.tau_mem_inv * ((self.v_leak - state.v) + state.i)
        i = state.i - self.dt * self.tau_syn_inv * state.i
        z = Heaviside.apply(v - self.v_th, 100.0)
        v = (1 - z.detach()) * v + z.detach() * self.v_reset
        i = i + nn.functional.linear(x, self.input_weights) + nn.functional.linear(state.z, self.recurrent_weights)
        return z, LIFState(z, v, i)
