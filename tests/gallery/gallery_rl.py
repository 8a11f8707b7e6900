"""Reinforcement learning: recurrent policies and the world models of Dreamer.

Shape legend: B environments, F features of an observation, A actions, H hidden units, D deterministic and S stochastic
parts of a model's state, K classes of each of C categorical variables.
"""

from typing import Any, Final

import torch
from gallery_entry import F, H, shown
from torch import nn
from torch.nn import functional

A: Final = 3
S: Final = 4
C: Final = 2
K: Final = 4


def _done(*size: int) -> torch.Tensor:
    return (torch.rand(*size, 1) < 0.2).float()


def _actions(*size: int) -> torch.Tensor:
    return torch.randint(A, size)


@shown(
    inputs=(F, _done),
    state=(torch.Size((1, H)), torch.Size((1, H))),
    step=lambda cell, state, inputs: cell(*inputs, state)[::-1],
)
class PPOAgent(nn.Module):
    """Schulman et al. 2017, with an LSTM: (h, c) <- (1 - done) (h, c); h, c = LSTM(MLP(x), h, c); one step of nn.LSTM.

    The state is kept batch first here, (B, 1, H), and turned for torch's layer.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(input_size, hidden_size), nn.Tanh())
        self.lstm = nn.LSTM(hidden_size, hidden_size)
        self.actor, self.critic = nn.Linear(hidden_size, A), nn.Linear(hidden_size, 1)

    def forward(self, x: torch.Tensor, done: torch.Tensor, state: Any) -> Any:
        hidden = self.network(x)
        keep = (1.0 - done).view(1, -1, 1)
        h, c = state
        out, (h, c) = self.lstm(hidden.unsqueeze(0), (keep * h.transpose(0, 1), keep * c.transpose(0, 1)))
        out = out.squeeze(0)
        return (self.actor(out), self.critic(out)), (h.transpose(0, 1), c.transpose(0, 1))


@shown(state=H)
class GRUPolicy(nn.Module):
    """A recurrent actor-critic after Mnih et al. 2016: h = GRU(relu(W x), h); logits and value of h, as one dict."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(input_size, hidden_size)
        self.gru = nn.GRUCell(hidden_size, hidden_size)
        self.policy, self.value = nn.Linear(hidden_size, A), nn.Linear(hidden_size, 1)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> Any:
        h = self.gru(functional.relu(self.encoder(x)), h)
        return {"logits": functional.log_softmax(self.policy(h), dim=-1), "value": self.value(h).squeeze(-1)}, h


@shown(
    inputs=(F, _actions, torch.Size((1,)), _done),
    state=(H, H),
    step=lambda cell, state, inputs: cell(*inputs, state)[::-1],
)
class ImpalaCore(nn.Module):
    """Espeholt et al. 2018: an LSTM of features, clipped reward and last action, one-hot; reset by done."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.core = nn.LSTMCell(input_size + A + 1, hidden_size)
        self.baseline = nn.Linear(hidden_size, 1)

    def forward(
        self, x: torch.Tensor, action: torch.Tensor, reward: torch.Tensor, done: torch.Tensor, state: Any
    ) -> Any:
        last = functional.one_hot(action, A).to(x.dtype)
        core_input = torch.cat([x, reward.clamp(-1, 1), last], dim=-1)
        state = tuple((1 - done) * part for part in state)
        h, c = self.core(core_input, state)
        return self.baseline(h), (h, c)


@shown(
    inputs=(F, _actions, torch.Size((1,)), _done),
    step=lambda cell, h, inputs: cell(*inputs, h),
)
class RL2(nn.Module):
    """Duan et al. 2016: the GRU sees the observation, an embedding of the last action, the reward and the done flag."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(A, 4)
        self.gru = nn.GRUCell(input_size + 4 + 2, hidden_size)

    def forward(self, x: torch.Tensor, action: torch.Tensor, reward: torch.Tensor, done: torch.Tensor, h: Any) -> Any:
        return self.gru(torch.cat((x, self.embed(action), reward, done), 1), h)


class _RSSM(nn.Module):
    def __init__(self, embed_size: int, deter: int, stoch: int, params: int) -> None:
        super().__init__()
        self.inp = nn.Linear(stoch + A, deter)
        self.gru = nn.GRUCell(deter, deter)
        self.prior = nn.Linear(deter, params)
        self.post = nn.Linear(deter + embed_size, params)


@shown(
    inputs=(F, A),
    state={"deter": H, "stoch": S},
    step=lambda cell, state, inputs: cell.obs_step(state, *inputs),
    make=lambda kind: kind(F, H, S, 2 * S),
)
class DreamerV1(_RSSM):
    """Hafner et al. 2020, RSSM: d = GRU(elu(W [s, a]), d); mean, std of prior(d) and posterior(d, e); s = mean.

    The mean is taken for the sample, as in evaluation; std = softplus(.) + 0.1.
    """

    def _normal(self, params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, std = params.chunk(2, -1)
        return mean, functional.softplus(std) + 0.1

    def obs_step(self, state: dict[str, torch.Tensor], embed: torch.Tensor, action: torch.Tensor) -> Any:
        hidden = functional.elu(self.inp(torch.cat([state["stoch"], action], dim=-1)))
        deter = self.gru(hidden, state["deter"])
        prior_mean, prior_std = self._normal(self.prior(deter))
        mean, std = self._normal(self.post(torch.cat([deter, embed], -1)))
        kl = torch.log(prior_std / std) + (std**2 + (mean - prior_mean) ** 2) / (2 * prior_std**2) - 0.5
        return {"deter": deter, "stoch": mean}, {"mean": mean, "std": std, "kl": kl.sum(-1, keepdim=True)}


@shown(
    inputs=(F, A),
    state={"deter": H, "stoch": 8},
    step=lambda cell, state, inputs: cell.obs_step(state, *inputs),
    make=lambda kind: kind(F, H, 8, 16),
    is_random=True,
)
class DreamerV1Sampled(DreamerV1):
    """The same with samples: s = mean + std eps, eps ~ N(0, 1)."""

    def obs_step(self, state: dict[str, torch.Tensor], embed: torch.Tensor, action: torch.Tensor) -> Any:
        new, out = super().obs_step(state, embed, action)
        return {"deter": new["deter"], "stoch": out["mean"] + out["std"] * torch.randn_like(out["std"])}, out


@shown(
    inputs=(F, A),
    state=(H, torch.Size((C, K))),
    step=lambda cell, state, inputs: cell(*inputs, state)[::-1],
    make=lambda kind: kind(F, H, C * K, C * K),
)
class DreamerV2(_RSSM):
    """Hafner et al. 2021: s is C one-hot vectors of K classes, straight-through: s = onehot(p) + p - sg(p).

    The mode is taken for the sample, as in evaluation.
    """

    def forward(self, embed: torch.Tensor, action: torch.Tensor, state: Any) -> Any:
        deter, stoch = state
        x = functional.elu(self.inp(torch.cat([stoch.flatten(1), action], -1)))
        deter = self.gru(x, deter)
        logits = self.post(torch.cat([deter, embed], -1)).view(-1, C, K)
        probs = torch.softmax(logits, -1)
        hard = functional.one_hot(probs.argmax(-1), K).to(probs)
        stoch = hard + probs - probs.detach()
        prior = self.prior(deter).view(-1, C, K).log_softmax(-1)
        return (deter, prior), (deter, stoch)


@shown(
    inputs=(F, A, _done),
    state={"deter": H, "stoch": torch.Size((C, K))},
    step=lambda cell, state, inputs: cell(state, *inputs),
    make=lambda kind: kind(F, H),
)
class DreamerV3(nn.Module):
    """Hafner et al. 2023: symlog inputs, RMS-normalised GRU with update bias -1, 1 % uniform mix, reset by is_first."""

    def __init__(self, embed_size: int, deter: int) -> None:
        super().__init__()
        self.inp = nn.Linear(C * K + A, deter, bias=False)
        self.norm_in, self.norm = nn.RMSNorm(deter), nn.LayerNorm(3 * deter)
        self.core = nn.Linear(2 * deter, 3 * deter, bias=False)
        self.post = nn.Linear(deter + embed_size, C * K)

    def forward(self, state: dict[str, torch.Tensor], embed: torch.Tensor, action: torch.Tensor, first: Any) -> Any:
        embed = torch.sign(embed) * torch.log1p(embed.abs())
        state = {name: part * (1 - first.view(-1, *[1] * (part.dim() - 1))) for name, part in state.items()}
        action = action / torch.clamp(action.abs(), min=1.0).detach()
        x = functional.silu(self.norm_in(self.inp(torch.cat([state["stoch"].reshape(len(action), -1), action], -1))))
        parts = self.norm(self.core(torch.cat([x, state["deter"]], -1)))
        reset, cand, update = parts.chunk(3, -1)
        reset = torch.sigmoid(reset)
        cand = torch.tanh(reset * cand)
        update = torch.sigmoid(update - 1)
        deter = update * cand + (1 - update) * state["deter"]
        probs = self.post(torch.cat([deter, embed], -1)).unflatten(-1, (C, K)).softmax(-1)
        probs = 0.99 * probs + 0.01 / K
        onehot = functional.one_hot(torch.argmax(probs.detach(), dim=-1), num_classes=K).to(probs.dtype)
        stoch = onehot + (probs - probs.detach())
        entropy = -(probs * probs.log()).sum((-1, -2))
        return {"deter": deter, "stoch": stoch}, {"feat": torch.cat([deter, stoch.flatten(-2)], -1), "entropy": entropy}


@shown(state=(H, lambda n: torch.zeros(n, dtype=torch.long)))
class OptionPolicy(nn.Module):
    """Bacon et al. 2017, options: the option goes on until beta(h) > 1/2, then the best one by Q(h) begins."""

    def __init__(self, input_size: int, hidden_size: int, num_options: int = 3) -> None:
        super().__init__()
        self.gru = nn.GRUCell(input_size, hidden_size)
        self.q, self.beta = nn.Linear(hidden_size, num_options), nn.Linear(hidden_size, num_options)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, option = state
        h = self.gru(x, h)
        q = self.q(h)
        beta = torch.sigmoid(self.beta(h)).gather(1, option.unsqueeze(1)).squeeze(1)
        option = torch.where(beta > 0.5, q.argmax(dim=-1), option)
        return q.gather(-1, option[:, None]), (h, option)


@shown(state=(torch.Size((H, 2)), lambda n: torch.zeros(n, 1)))
class FastForgetfulMemory(nn.Module):
    """Morad et al. 2023: S' = exp(-|a| + i w) S + x, complex numbers as pairs; y = mix(S), with a step counter."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.linspace(0.01, 1, hidden_size)), nn.Parameter(torch.randn(hidden_size))
        self.pre, self.gate_in = nn.Linear(input_size, hidden_size), nn.Linear(input_size, hidden_size)
        self.mix = nn.Linear(2 * hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        memory, count = state
        x = self.pre(x) * self.gate_in(x).sigmoid()
        decay = torch.exp(-self.a.abs())
        cos, sin = torch.cos(self.b), torch.sin(self.b)
        re, im = memory.unbind(-1)
        memory = torch.stack([decay * (cos * re - sin * im) + x, decay * (sin * re + cos * im)], dim=-1)
        count = count + 1
        return functional.leaky_relu(self.mix(memory.flatten(1) / count.sqrt())), (memory, count)
