"""Attention decoders and memories.

Shape legend: B sequences, F features, H units, L places of what is attended to or of a memory, E units of each.
"""

from typing import Any, Final

import torch
from gallery_entry import H, shown
from torch import nn
from torch.nn import functional

L: Final = 6
E: Final = 4


def _tokens(*size: int) -> torch.Tensor:
    return torch.randint(9, size)


def _padding(n: int) -> torch.Tensor:
    return torch.arange(L)[None, :] >= torch.randint(1, L + 1, (n, 1))


@shown(
    inputs=_tokens,
    constants=(torch.Size((L, E)), _padding),
    step=lambda cell, h, token, memory: cell(token, h, *memory),
)
class Bahdanau(nn.Module):
    """Bahdanau et al. 2015: e = v^T tanh(W h + U m), masked softmax, context into nn.GRUCell."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.W, self.U, self.v = nn.Linear(hidden_size, 5), nn.Linear(E, 5), nn.Linear(5, 1, bias=False)
        self.gru, self.out = nn.GRUCell(4 + E, hidden_size), nn.Linear(hidden_size + E, 9)

    def forward(self, token: torch.Tensor, h: torch.Tensor, memory: torch.Tensor, padding: torch.Tensor) -> Any:
        scores = self.v(torch.tanh(self.W(h).unsqueeze(1) + self.U(memory))).squeeze(-1)
        scores = scores.masked_fill(padding, float("-inf"))
        weights = functional.softmax(scores, dim=1)
        context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
        h = self.gru(torch.cat([self.embedding(token), context], dim=1), h)
        return h, {"logits": self.out(torch.cat([h, context], 1)), "attention": weights}


@shown(
    state=((H, H), E),
    constants=torch.Size((L, E)),
    step=lambda cell, state, x, memory: cell(x, state, memory)[::-1],
)
class LuongInputFeeding(nn.Module):
    """Luong et al. 2015, general score h^T W m; the attentional vector h~ = tanh(W [c, h]) is fed back."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.lstm, self.W = nn.LSTMCell(input_size + E, hidden_size), nn.Linear(hidden_size, E, bias=False)
        self.combine = nn.Linear(hidden_size + E, E, bias=False)

    def forward(self, x: torch.Tensor, state: Any, memory: torch.Tensor) -> Any:
        hidden, feed = state
        h, c = self.lstm(torch.cat((x, feed), -1), hidden)
        energies = torch.bmm(memory, self.W(h).unsqueeze(2)).squeeze(2)
        alpha = energies.softmax(-1)
        context = (alpha.unsqueeze(-1) * memory).sum(1)
        feed = torch.tanh(self.combine(torch.cat((context, h), -1)))
        return feed, ((h, c), feed)


@shown(
    state={"h": H, "c": H, "alpha": lambda n: torch.full((n, L), 1 / L), "cumulative": L},
    constants=torch.Size((L, E)),
    step=lambda cell, state, x, memory: cell(x, memory, **state),
)
class LocationSensitive(nn.Module):
    """Chorowski et al. 2015, Tacotron 2's: a convolution over last and cumulative weights enters the score."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(input_size + E, hidden_size)
        self.query, self.key = nn.Linear(hidden_size, 5, bias=False), nn.Linear(E, 5, bias=False)
        self.conv, self.location = nn.Conv1d(2, 3, 3, padding=1, bias=False), nn.Linear(3, 5, bias=False)
        self.v = nn.Linear(5, 1)

    def forward(self, x: Any, memory: Any, *, h: Any, c: Any, alpha: Any, cumulative: Any) -> Any:
        context = (alpha.unsqueeze(1) @ memory).squeeze(1)
        h, c = self.lstm(torch.cat([x, context], -1), (h, c))
        location = self.location(self.conv(torch.stack([alpha, cumulative], dim=1)).transpose(1, 2))
        energies = self.v(torch.tanh(self.query(h)[:, None] + self.key(memory) + location)).squeeze(-1)
        alpha = torch.softmax(energies, dim=-1)
        return {"h": h, "c": c, "alpha": alpha, "cumulative": cumulative + alpha}, alpha


@shown(
    state=((H, H), E, lambda n: torch.zeros(n, L, dtype=torch.bool)),
    inputs=1,
    constants=torch.Size((L, E)),
    step=lambda cell, state, x, memory: cell(x, state, memory)[::-1],
)
class PointerNetwork(nn.Module):
    """Vinyals et al. 2015, greedy: the place of the highest score is next input, and masked from then on."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(E + 1, hidden_size)
        self.W1, self.W2, self.vt = nn.Linear(E, 5), nn.Linear(hidden_size, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, state: Any, memory: torch.Tensor) -> Any:
        hidden, chosen, visited = state
        h, c = self.lstm(torch.cat([chosen, x], 1), hidden)
        scores = self.vt(torch.tanh(self.W1(memory) + self.W2(h).unsqueeze(1))).squeeze(-1)
        scores = scores.masked_fill(visited, -1e9)
        index = scores.argmax(dim=1)
        visited = visited | functional.one_hot(index, L).bool()
        chosen = torch.gather(memory, 1, index[:, None, None].expand(-1, 1, E)).squeeze(1)
        return functional.log_softmax(scores, -1), ((h, c), chosen, visited)


@shown(
    state=(H, 3),
    constants=torch.Size((L, E)),
    step=lambda cell, state, x, memory: cell(x, state, memory)[::-1],
)
class GaussianWindow(nn.Module):
    """Graves 2013, handwriting: w = sum_u sum_k a_k exp(-b_k (kappa_k - u)^2) c_u, kappa = kappa + exp(.)."""

    def __init__(self, input_size: int, hidden_size: int, mixtures: int = 3) -> None:
        super().__init__()
        self.cell, self.window = nn.GRUCell(input_size, hidden_size), nn.Linear(hidden_size, 3 * mixtures)

    def forward(self, x: torch.Tensor, state: Any, memory: torch.Tensor) -> Any:
        h, kappa = state
        h = self.cell(x, h)
        alpha, beta, step = torch.exp(self.window(h)).chunk(3, dim=-1)
        kappa = kappa + step
        u = torch.arange(memory.size(1), dtype=x.dtype)
        phi = (alpha.unsqueeze(-1) * torch.exp(-beta.unsqueeze(-1) * (kappa.unsqueeze(-1) - u) ** 2)).sum(1)
        return torch.cat([h, torch.einsum("bl,ble->be", phi, memory)], -1), (h, kappa)


@shown(constants=torch.Size((L, H)), step=lambda cell, h, x, memory: cell(x, h, memory))
class MultiHeadDecoder(nn.Module):
    """A GRU whose query reads a memory by nn.MultiheadAttention (Vaswani et al. 2017) with two heads."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.gru = nn.GRUCell(input_size + hidden_size, hidden_size)
        self.attention = nn.MultiheadAttention(hidden_size, 2, batch_first=True)

    def forward(self, x: torch.Tensor, h: torch.Tensor, memory: torch.Tensor) -> Any:
        read, weights = self.attention(h.unsqueeze(1), memory, memory)
        h = self.gru(torch.cat([x, read.squeeze(1)], 1), h)
        return h, weights.squeeze(1)


@shown(state=(H, torch.Size((L, E)), lambda n: torch.full((n, L), 1 / L)))
class NTM(nn.Module):
    """Graves et al. 2014: cosine content addressing, interpolation, circular shift, sharpening; erase and add."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.controller = nn.GRUCell(input_size + E, hidden_size)
        self.head = nn.Linear(hidden_size, E + 1 + 1 + 3 + 1 + E + E)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, M, w = state
        read = torch.matmul(w.unsqueeze(1), M).squeeze(1)
        h = self.controller(torch.cat([x, read], dim=1), h)
        k, beta, g, s, gamma, erase, add = torch.split(self.head(h), [E, 1, 1, 3, 1, E, E], dim=1)
        similarity = functional.cosine_similarity(M + 1e-16, k.unsqueeze(1) + 1e-16, dim=-1)
        content = functional.softmax(functional.softplus(beta) * similarity, dim=1)
        g = torch.sigmoid(g)
        w = g * content + (1 - g) * w
        s = functional.softmax(s, dim=1)
        w = s[:, :1] * torch.roll(w, 1, dims=1) + s[:, 1:2] * w + s[:, 2:] * torch.roll(w, -1, dims=1)
        w = w ** (1 + functional.softplus(gamma))
        w = w / (w.sum(dim=1, keepdim=True) + 1e-16)
        M = M * (1 - w.unsqueeze(-1) * torch.sigmoid(erase).unsqueeze(1)) + w.unsqueeze(-1) * add.unsqueeze(1)
        return read, (h, M, w)


@shown(state={"h": H, "M": torch.Size((L, E)), "usage": L, "w": L}, step=lambda cell, state, x: cell(x, state))
class DNCAllocation(nn.Module):
    """Graves et al. 2016, allocation by sorted usage: a[phi_j] = (1 - u[phi_j]) prod_{i<j} u[phi_i]; one head."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.controller = nn.GRUCell(input_size, hidden_size)
        self.interface = nn.Linear(hidden_size, 3 * E + 3)

    def forward(self, x: torch.Tensor, state: dict[str, torch.Tensor]) -> Any:
        h, M, usage, w = state["h"], state["M"], state["usage"], state["w"]
        h = self.controller(x, h)
        k, erase, add, gates = self.interface(h).split([E, E, E, 3], -1)
        allocation_gate, write_gate, free = torch.sigmoid(gates).split(1, -1)
        usage = torch.sigmoid(usage) * (1 - free * w)
        order, indices = torch.sort(usage, dim=1)
        product = torch.cumprod(torch.cat([torch.ones_like(order[:, :1]), order[:, :-1]], 1), dim=1)
        allocation = torch.zeros_like(usage).scatter(1, indices, (1 - order) * product)
        content = torch.softmax(torch.einsum("ble,be->bl", functional.normalize(M, dim=-1), k), 1)
        w = write_gate * (allocation_gate * allocation + (1 - allocation_gate) * content)
        M = M * (1 - w[:, :, None] * erase.sigmoid()[:, None, :]) + w[:, :, None] * add[:, None, :]
        return {"h": h, "M": M, "usage": usage, "w": w}, torch.einsum("bl,ble->be", content, M)


@shown(state=(H, torch.Size((H, H))))
class FastWeights(nn.Module):
    """Ba et al. 2016: A = 0.95 A + 0.5 h h^T; h_{s+1} = relu(LN(W h + C x + A h_s)), one inner step."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.W, self.C = nn.Linear(hidden_size, hidden_size), nn.Linear(input_size, hidden_size)
        self.ln = nn.LayerNorm(hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, A = state
        boundary = self.W(h) + self.C(x)
        inner = torch.relu(boundary)
        A = 0.95 * A + 0.5 * torch.einsum("bi,bj->bij", inner, inner)
        h = torch.relu(self.ln(boundary + (inner.unsqueeze(1) @ A).squeeze(1)))
        return h, (h, A)


@shown(state=(H, torch.Size((L, E))))
class StackRNN(nn.Module):
    """Joulin & Mikolov 2015: push, pop, no-op by a softmax; s = p [new, s_{<}] + q [s_{>}, 0] + n s."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.cell, self.action = nn.RNNCell(input_size + E, hidden_size), nn.Linear(hidden_size, 3)
        self.value = nn.Linear(hidden_size, E)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, stack = state
        h = self.cell(torch.cat([x, stack[:, 0]], 1), h)
        action = torch.softmax(self.action(h), -1)
        push, pop, noop = (part[:, :, None] for part in action.split(1, dim=-1))
        pushed = torch.cat([torch.sigmoid(self.value(h))[:, None], stack[:, :-1]], dim=1)
        popped = functional.pad(stack[:, 1:], (0, 0, 0, 1))
        return h, (h, push * pushed + pop * popped + noop * stack)


@shown(constants=torch.Size((L, H)), step=lambda cell, h, x, patterns: cell(x, h, patterns))
class Hopfield(nn.Module):
    """Ramsauer et al. 2021: xi = X^T softmax(beta X xi), two retrievals of a mix of state and input."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.inp, self.beta = nn.Linear(input_size, hidden_size), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, h: torch.Tensor, patterns: torch.Tensor) -> Any:
        xi = 0.5 * h + self.inp(x)
        for _ in range(2):
            xi = torch.einsum(
                "bl,blh->bh", torch.softmax(self.beta * torch.einsum("blh,bh->bl", patterns, xi), -1), patterns
            )
        energy = -torch.logsumexp(self.beta * torch.einsum("blh,bh->bl", patterns, xi), -1) + 0.5 * xi.pow(2).sum(-1)
        return xi, {"xi": xi, "energy": energy}


@shown(state=torch.Size((L, E)), inputs=E)
class EntityNetwork(nn.Module):
    """Henaff et al. 2017: g_j = sigmoid(s^T h_j + s^T w_j), h_j = h_j + g_j prelu(U h_j + V w_j + W s), h_j / |h_j|."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(L, E))
        self.U, self.V, self.W = (nn.Linear(E, E, bias=False) for _ in range(3))
        self.prelu = nn.PReLU(E, init=1.0)

    def forward(self, s: torch.Tensor, memory: torch.Tensor) -> Any:
        gate = torch.sigmoid((s.unsqueeze(1) * memory).sum(-1) + s @ self.keys.t())
        candidate = self.U(memory) + self.V(self.keys) + self.W(s)[:, None, :]
        candidate = self.prelu(candidate.reshape(-1, E)).view_as(candidate)
        memory = functional.normalize(memory + gate.unsqueeze(-1) * candidate, dim=-1)
        return memory.mean(dim=1), memory


@shown(state=torch.Size((3, H)))
class RelationalMemory(nn.Module):
    """Santoro et al. 2018: self-attention of memory slots over [M, x], two heads, MLP, LSTM-like gates per slot."""

    def __init__(self, input_size: int, hidden_size: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.inp, self.qkv = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, 3 * hidden_size)
        self.norm, self.mlp = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, hidden_size)
        self.gate_x, self.gate_m = nn.Linear(hidden_size, 2 * hidden_size), nn.Linear(hidden_size, 2 * hidden_size)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> Any:
        x = self.inp(x).unsqueeze(1)
        rows = torch.cat([memory, x], dim=1)
        b, places, h = rows.shape
        q, k, v = self.qkv(rows).view(b, places, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-2, -1) / (h // self.heads) ** 0.5, dim=-1)
        attended = (weights @ v).transpose(1, 2).reshape(b, places, h)[:, :-1]
        new = self.norm(memory + attended)
        new = self.norm(new + torch.relu(self.mlp(new)))
        i, f = (self.gate_x(x) + self.gate_m(torch.tanh(memory))).chunk(2, dim=-1)
        memory = torch.sigmoid(i) * torch.tanh(new) + torch.sigmoid(f + 1.0) * memory
        return memory.flatten(1), memory


@shown(state=torch.Size((4, 6)))
class RIM(nn.Module):
    """Goyal et al. 2021: of four GRUs with weights of their own, the two that attend most to the input go on."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(input_size, 4), nn.Linear(input_size, 4)
        self.query = nn.Parameter(torch.randn(4, 6, 4))
        self.w_x, self.w_h = nn.Parameter(torch.randn(4, 4, 18) / 2), nn.Parameter(torch.randn(4, 6, 18) / 2)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> Any:
        queries = torch.einsum("bmh,mhk->bmk", h, self.query)
        scores = (queries * self.key(x)[:, None]).sum(-1) / 2
        chosen = torch.topk(scores, 2, dim=1).indices
        mask = torch.zeros_like(scores).scatter(1, chosen, 1.0).unsqueeze(-1)
        inputs = torch.sigmoid(scores).unsqueeze(-1) * self.value(x).unsqueeze(1)
        gi = torch.einsum("bmi,mio->bmo", inputs, self.w_x)
        gh = torch.bmm(h.transpose(0, 1), self.w_h).transpose(0, 1)
        i_r, i_z, i_n = gi.chunk(3, -1)
        h_r, h_z, h_n = gh.chunk(3, -1)
        r, z = torch.sigmoid(i_r + h_r), torch.sigmoid(i_z + h_z)
        new = (1 - z) * torch.tanh(i_n + r * h_n) + z * h
        h = mask * new + (1 - mask) * h
        return h.flatten(1), h


@shown(state=(torch.Size((L, E)), lambda n: torch.zeros(n, dtype=torch.long)), inputs=E)
class RingMemory(nn.Module):
    """Attention over the last six inputs (Weston et al. 2015), in a ring buffer written at a counter's place."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(E, 3), nn.Linear(E, 3)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        buffer, position = state
        place = functional.one_hot(position % L, L).to(x.dtype).unsqueeze(-1)
        buffer = (1 - place) * buffer + place * x.unsqueeze(1)
        position = position + 1
        empty = torch.arange(L)[None] >= position[:, None]
        scores = (self.k(buffer) @ self.q(x)[..., None]).squeeze(-1).masked_fill(empty, -1e9)
        y = (scores.softmax(dim=-1)[:, None] @ buffer)[:, 0]
        return y, (buffer, position)


@shown(state=(H, torch.Size((L, E))))
class SlotMemory(nn.Module):
    """A memory of one-hot addresses in the manner of Gulcehre et al. 2017 (TARDIS), greedy: the slot of the largest
    score is read, and that of the smallest score overwritten; slots are named by [rows, slots].
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(input_size + E, hidden_size)
        self.score, self.write = nn.Linear(hidden_size, L), nn.Linear(hidden_size, E)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, memory = state
        rows = torch.arange(x.size(0), device=x.device)
        where = self.score(h).argmax(-1)
        read = memory[rows, where]
        h = self.cell(torch.cat([x, read], dim=-1), h)
        memory = memory.clone()
        memory[rows, self.score(h).argmin(dim=-1)] = torch.tanh(self.write(h))
        memory[rows, where, 1] += h[:, 0]
        return read, (h, memory)


@shown()
class SparseActive(nn.Module):
    """A GRU of which the three largest units stay active at each step, by a mask written at [rows, units]."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(input_size, hidden_size)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        h = self.cell(x, h)
        mask = torch.zeros_like(h)
        mask[torch.arange(h.shape[0]).unsqueeze(1), torch.topk(h.abs(), 3, dim=1).indices] = 1.0
        return h * mask
