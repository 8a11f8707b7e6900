"""xLSTM, linear attention and state spaces, one step at a time, as in generation.

Shape legend: B sequences, F features, H units, N heads, D units of a head.
"""

import math
from typing import Any, Final

import torch
from gallery_entry import F, H, shown
from torch import nn
from torch.nn import functional

N: Final = 2
D: Final = H // N


@shown(state=(H, H, H, H))
class SLSTM(nn.Module):
    """Beck et al. 2024, sLSTM: exponential gates with stabiliser m, recurrent weights block-diagonal over heads."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.W = nn.Linear(input_size, 4 * hidden_size)
        self.R = nn.Parameter(torch.randn(N, D, 4 * D) / D**0.5)
        self.norm = nn.GroupNorm(N, hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, c, n, m = state
        recurrent = torch.einsum("bnd,nde->bne", h.view(-1, N, D), self.R)
        recurrent = recurrent.view(-1, N, 4, D).transpose(1, 2).reshape(-1, 4 * N * D)
        i, f, z, o = (self.W(x) + recurrent).chunk(4, dim=-1)
        log_f = functional.logsigmoid(f)
        m_new = torch.maximum(log_f + m, i)
        i, f = torch.exp(i - m_new), torch.exp(log_f + m - m_new)
        c = f * c + i * torch.tanh(z)
        n = f * n + i
        h = torch.sigmoid(o) * c / torch.clamp(n, min=1e-6)
        return self.norm(h), (h, c, n, m_new)


@shown(state=(torch.Size((N, D, D)), torch.Size((N, D)), torch.Size((N, 1))))
class MLSTM(nn.Module):
    """Beck et al. 2024, mLSTM: C = f C + i v k^T, n = f n + i k, h = o C q / max(|n^T q|, exp(-m))."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.qkv, self.gates = nn.Linear(input_size, 3 * hidden_size), nn.Linear(input_size, 2 * N)
        self.o = nn.Linear(input_size, hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        C, n, m = state
        q, k, v = (part.view(-1, N, D) for part in self.qkv(x).chunk(3, -1))
        k = k / math.sqrt(D)
        i, f = self.gates(x).view(-1, 2, N, 1).unbind(1)
        log_f = functional.logsigmoid(f)
        m_new = torch.max(log_f + m, i)
        i, f = torch.exp(i - m_new), torch.exp(log_f + m - m_new)
        C = f[..., None] * C + i[..., None] * torch.einsum("bnd,bne->bnde", v, k)
        n = f * n + i * k
        numerator = torch.einsum("bnde,bne->bnd", C, q)
        denominator = torch.maximum((n * q).sum(-1, keepdim=True).abs(), torch.exp(-m_new))
        h = torch.sigmoid(self.o(x)) * (numerator / denominator).flatten(1)
        return h, (C, n, m_new)


@shown(state=torch.Size((H, 4)))
class S4DReal(nn.Module):
    """Gu et al. 2022, S4D with real poles: s = exp(dt A) s + (exp(dt A) - 1) / A B u; y = C s + D u."""

    def __init__(self, input_size: int, hidden_size: int, state_size: int = 4) -> None:
        super().__init__()
        self.inp = nn.Linear(input_size, hidden_size)
        self.log_dt = nn.Parameter(torch.rand(hidden_size) * 2 - 4)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, state_size + 1)).repeat(hidden_size, 1))
        self.B, self.C = (nn.Parameter(torch.randn(hidden_size, state_size)) for _ in range(2))
        self.D = nn.Parameter(torch.randn(hidden_size))

    def forward(self, x: torch.Tensor, s: torch.Tensor) -> Any:
        u = self.inp(x)
        A = -torch.exp(self.A_log)
        dA = torch.exp(self.log_dt).unsqueeze(-1) * A
        s = torch.exp(dA) * s + torch.expm1(dA) / A * self.B * u.unsqueeze(-1)
        return functional.gelu((s * self.C).sum(-1) + self.D * u), s


@shown(state=lambda n: torch.zeros(n, H, 2))
class LRUReal(nn.Module):
    """Orvieto et al. 2023, the complex diagonal x = lambda x + gamma B u by real and imaginary parts."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.nu_log, self.theta_log = (nn.Parameter(torch.log(torch.rand(hidden_size))) for _ in range(2))
        self.B, self.C = nn.Linear(input_size, 2 * hidden_size, bias=False), nn.Linear(2 * hidden_size, hidden_size)

    def forward(self, u: torch.Tensor, state: torch.Tensor) -> Any:
        modulus, theta = torch.exp(-torch.exp(self.nu_log)), torch.exp(self.theta_log)
        a, b = modulus * torch.cos(theta), modulus * torch.sin(theta)
        gamma = torch.sqrt(1 - modulus.square())
        re, im = state[..., 0], state[..., 1]
        u_re, u_im = self.B(u).chunk(2, -1)
        state = torch.stack((a * re - b * im + gamma * u_re, b * re + a * im + gamma * u_im), -1)
        return self.C(state.flatten(-2)), state


@shown(state=lambda n: torch.zeros(n, H, 2))
class LRUComplex(nn.Module):
    """The same with torch's complex numbers inside: view_as_complex, exp(i theta), and back."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.nu_log, self.theta_log = (nn.Parameter(torch.log(torch.rand(hidden_size))) for _ in range(2))
        self.B_re, self.B_im = (nn.Parameter(torch.randn(hidden_size, input_size)) for _ in range(2))
        self.C_re, self.C_im = (nn.Parameter(torch.randn(hidden_size, hidden_size)) for _ in range(2))

    def forward(self, u: torch.Tensor, state: torch.Tensor) -> Any:
        x = torch.view_as_complex(state)
        lam = torch.exp(torch.complex(-torch.exp(self.nu_log), torch.exp(self.theta_log)))
        gamma = torch.sqrt(1 - lam.abs().square())
        x = lam * x + gamma * functional.linear(u.to(x.dtype), torch.complex(self.B_re, self.B_im))
        y = functional.linear(x, torch.complex(self.C_re, self.C_im)).real
        return y, torch.view_as_real(x)


@shown(state=(torch.Size((H, 4)), torch.Size((H, 3))))
class Mamba(nn.Module):
    """Gu & Dao 2023, a step in generation: rolled convolution window, selective dt, B, C; s = exp(dt A) s + dt B x."""

    def __init__(self, input_size: int, hidden_size: int, d_state: int = 4, d_conv: int = 4) -> None:
        super().__init__()
        self.in_proj = nn.Linear(input_size, 2 * hidden_size)
        self.conv_weight, self.conv_bias = (
            nn.Parameter(torch.randn(hidden_size, d_conv)),
            nn.Parameter(torch.zeros(hidden_size)),
        )
        self.x_proj, self.dt_proj = nn.Linear(hidden_size, 2 + 2 * d_state, bias=False), nn.Linear(2, hidden_size)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, d_state + 1)).repeat(hidden_size, 1))
        self.D, self.d_state = nn.Parameter(torch.ones(hidden_size)), d_state

    def forward(self, u: torch.Tensor, state: Any) -> Any:
        s, window = state
        x, z = self.in_proj(u).chunk(2, dim=-1)
        window = torch.cat([window, x.unsqueeze(-1)], dim=-1)
        x = functional.silu(torch.sum(window * self.conv_weight, dim=-1) + self.conv_bias)
        dt, B, C = torch.split(self.x_proj(x), [2, self.d_state, self.d_state], dim=-1)
        dt = functional.softplus(self.dt_proj(dt))
        dA = torch.exp(torch.einsum("bd,dn->bdn", dt, -torch.exp(self.A_log)))
        dB = torch.einsum("bd,bn->bdn", dt, B)
        s = s * dA + x.unsqueeze(-1) * dB
        y = torch.einsum("bdn,bn->bd", s, C) + self.D * x
        return y * functional.silu(z), (s, window[..., 1:])


@shown(state=(F, H, H, lambda n: torch.full((n, H), -1e30)))
class RWKV4(nn.Module):
    """Peng et al. 2023, time mixing: token shift, wkv = sum exp(w + k) v with a running maximum p, gated by r."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.decay, self.first = nn.Parameter(torch.rand(hidden_size)), nn.Parameter(torch.rand(hidden_size))
        self.mix_k, self.mix_v, self.mix_r = (nn.Parameter(torch.rand(input_size)) for _ in range(3))
        self.key, self.value, self.receptance = (nn.Linear(input_size, hidden_size, bias=False) for _ in range(3))
        self.output = nn.Linear(hidden_size, input_size, bias=False)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        last, aa, bb, pp = state
        k = self.key(x * self.mix_k + last * (1 - self.mix_k))
        v = self.value(x * self.mix_v + last * (1 - self.mix_v))
        r = torch.sigmoid(self.receptance(x * self.mix_r + last * (1 - self.mix_r)))
        ww = self.first + k
        qq = torch.maximum(pp, ww)
        e1, e2 = torch.exp(pp - qq), torch.exp(ww - qq)
        wkv = (e1 * aa + e2 * v) / (e1 * bb + e2)
        ww = pp - torch.exp(self.decay)
        qq = torch.maximum(ww, k)
        e1, e2 = torch.exp(ww - qq), torch.exp(k - qq)
        return self.output(r * wkv), (x, e1 * aa + e2 * v, e1 * bb + e2, qq)


@shown(state=torch.Size((N, D, D)))
class RetNet(nn.Module):
    """Sun et al. 2023, retention: S_n = gamma_n S_n + k^T v, y = q S, group norm, swish gate; a decay for each head."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.g = (nn.Linear(input_size, hidden_size, bias=False) for _ in range(4))
        self.register_buffer("gamma", 1 - 2.0 ** (-5 - torch.arange(N)))
        self.group_norm = nn.GroupNorm(N, hidden_size)

    def forward(self, x: torch.Tensor, S: torch.Tensor) -> Any:
        q, k, v = (layer(x).view(-1, N, D) for layer in (self.q, self.k, self.v))
        S = self.gamma.view(1, N, 1, 1) * S + k.unsqueeze(-1) * D**-0.5 @ v.unsqueeze(-2)
        y = (q.unsqueeze(-2) @ S).squeeze(-2)
        return functional.silu(self.g(x)) * self.group_norm(y.flatten(1)), S


@shown(state=torch.Size((N, D, D)))
class GatedDelta(nn.Module):
    """Yang et al. 2025: S = alpha S (I - beta k k^T) + beta v k^T with normalised keys, y = S q."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(input_size, 3 * hidden_size, bias=False)
        self.a, self.b = nn.Linear(input_size, N), nn.Linear(input_size, N)
        self.A_log = nn.Parameter(torch.rand(N))
        self.norm = nn.RMSNorm(D)

    def forward(self, x: torch.Tensor, S: torch.Tensor) -> Any:
        q, k, v = self.qkv(x).reshape(-1, 3, N, D).unbind(dim=1)
        q, k = functional.normalize(functional.silu(q), dim=-1), functional.normalize(functional.silu(k), p=2, dim=-1)
        alpha = torch.exp(-self.A_log.exp() * functional.softplus(self.a(x)))[..., None, None]
        beta = self.b(x).sigmoid()[..., None]
        S = alpha * S
        old = torch.einsum("bhvk,bhk->bhv", S, k)
        S = S + torch.einsum("bhv,bhk->bhvk", beta * (v - old), k)
        y = torch.einsum("bhvk,bhk->bhv", S, q)
        return self.norm(y).flatten(1), S


@shown()
class HGRN(nn.Module):
    """Qin et al. 2023: f = lb + (1 - lb) sigmoid(W x), lb = cumsum(softmax) over layers; h = f h + (1 - f) silu(c)."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_size, 3 * hidden_size)
        self.lower_bounds = nn.Parameter(torch.randn(3, hidden_size))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> Any:
        lower = self.lower_bounds.softmax(0).cumsum(0)[1]
        c, f, g = self.proj(x).chunk(3, -1)
        f = lower + (1 - lower) * f.sigmoid()
        h = f * h + (1 - f) * functional.silu(c)
        return h * torch.sigmoid(g), h


@shown(state=torch.Size((N, D, D)))
class GatedLinearAttention(nn.Module):
    """Yang et al. 2024: S = diag(a) S + k^T v, a = sigmoid(W2 W1 x)^(1/16), a gate for each row of S."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(input_size, hidden_size) for _ in range(3))
        self.gk = nn.Sequential(nn.Linear(input_size, 2, bias=False), nn.Linear(2, hidden_size))

    def forward(self, x: torch.Tensor, S: torch.Tensor) -> Any:
        q, k, v, gk = (m(x).view(x.shape[0], N, -1) for m in (self.q, self.k, self.v, self.gk))
        gk = functional.logsigmoid(gk) / 16
        S = S * gk.exp().unsqueeze(-1) + k.unsqueeze(-1) * v.unsqueeze(-2)
        return (q.unsqueeze(-1) * S).sum(-2).flatten(1), S


@shown(state=(torch.Size((N, D, D)), torch.Size((N, D))))
class LinearTransformer(nn.Module):
    """Katharopoulos et al. 2020: S += phi(k) v^T, z += phi(k), y = phi(q) S / phi(q) z, phi = elu + 1."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(input_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        S, z = state
        q, k, v = self.qkv(x).view(-1, 3, N, D).permute(1, 0, 2, 3)
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        S = S + torch.einsum("nhd,nhm->nhmd", k, v)
        z = z + k
        Z = 1 / (torch.einsum("nhd,nhd->nh", q, z) + 1e-6)
        y = torch.einsum("nhd,nhmd,nh->nhm", q, S, Z)
        return self.out(y.contiguous().view(len(x), -1)), (S, z)


@shown()
class GriffinRGLRU(nn.Module):
    """De et al. 2024: a = sigmoid(Lambda)^(c r), h = a h + sqrt(1 - a^2) (i x); gates block-diagonal over heads."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.inp = nn.Linear(input_size, hidden_size)
        self.w = nn.Parameter(torch.randn(2, N, D, D) / D**0.5)
        self.b = nn.Parameter(torch.zeros(2, N, D))
        self.lam = nn.Parameter(torch.rand(hidden_size) + 2)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        heads = x.unflatten(-1, (N, D))
        r, i = (
            torch.sigmoid(torch.einsum("...hi,hij->...hj", heads, self.w[j]) + self.b[j]).flatten(-2) for j in (0, 1)
        )
        log_a = -8.0 * r * functional.softplus(self.lam)
        a = torch.exp(log_a)
        return a * h + torch.sqrt(-torch.expm1(2 * log_a)) * (i * x)


@shown(state=torch.Size((N, D, D)))
class RWKV7(nn.Module):
    """Peng et al. 2025: S = S (diag(w) - k^ (a k^)^T) + v k^T, with normalised removal key k^; y = S r."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.r, self.w, self.k, self.v, self.a = (nn.Linear(input_size, hidden_size) for _ in range(5))
        self.k_k, self.k_a = nn.Parameter(torch.rand(hidden_size)), nn.Parameter(torch.rand(hidden_size))
        self.ln = nn.GroupNorm(N, hidden_size, eps=64e-5)

    def forward(self, x: torch.Tensor, S: torch.Tensor) -> Any:
        r, k, v = self.r(x), self.k(x), self.v(x)
        w = torch.exp(-0.606531 * torch.sigmoid(torch.tanh(self.w(x))))
        a = torch.sigmoid(self.a(x))
        kk = functional.normalize((k * self.k_k).view(-1, N, D), dim=-1, p=2.0)
        k = (k * (1 + (a - 1) * self.k_a)).view(-1, N, D)
        vk = v.view(-1, N, D, 1) @ k.view(-1, N, 1, D)
        ab = (-kk).view(-1, N, D, 1) @ (kk * a.view(-1, N, D)).view(-1, N, 1, D)
        S = S * w.view(-1, N, 1, D) + S @ ab + vk
        y = (S @ r.view(-1, N, D, 1)).view(-1, N * D)
        return self.ln(y), S
