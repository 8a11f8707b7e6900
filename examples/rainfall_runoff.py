"""Rainfall-runoff modelling with an EA-LSTM, whose input gate depends on static features (Kratzert et al. 2019).

The catchments are simulated: two reservoirs in series, whose constants depend on five static features.

Shape legend: B catchments, T days, F forcings, S static features, H units.
"""

import torch
from side_by_side import compare, quick_was_asked
from torch import nn
from torch.nn import functional

import stretto

FORCINGS, STATIC, UNITS = 3, 5, 64


class EALSTM(nn.Module):
    """One day of the entity-aware LSTM."""

    def __init__(self):
        super().__init__()
        self.gates, self.input_gate = nn.Linear(FORCINGS + UNITS, 3 * UNITS), nn.Linear(STATIC, UNITS)

    def forward(self, x_t, state, static):
        """Like an LSTM, but the input gate is the same every day."""
        h, c = state
        f, o, g = self.gates(torch.cat([x_t, h], dim=-1)).chunk(3, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(self.input_gate(static)) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, (h, c)


class Model(nn.Module):
    """The cell over a year of days, and the runoff of each day."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = EALSTM(), nn.Linear(UNITS, 1)
        self.rnn = stretto.RNN(self.cell, state=(UNITS, UNITS))

    def plain(self, x_BTF, static_BS):
        """A loop over days."""
        state, outputs = (torch.zeros(len(x_BTF), UNITS), torch.zeros(len(x_BTF), UNITS)), []
        for t in range(x_BTF.shape[1]):
            h, state = self.cell(x_BTF[:, t], state, static_BS)
            outputs.append(h)
        return self.head(torch.stack(outputs, dim=1)).squeeze(-1)

    def forward(self, x_BTF, static_BS):
        """The same, compiled: the input gate is computed once per catchment, not once per day."""
        return self.head(self.rnn(x_BTF, constants=static_BS)[0]).squeeze(-1)


def make_catchments(count, num_days):
    """Rain, temperature and season, and the runoff of two reservoirs."""
    static_BS = torch.rand(count, STATIC)
    day_T = torch.arange(num_days) * 2 * torch.pi / 365
    warmth_BT = torch.sin(day_T) + 0.3 * torch.randn(count, num_days)
    rain_BT = torch.relu(torch.randn(count, num_days)) * (0.5 + static_BS[:, :1])
    fast, slow = 0.3 + 0.4 * static_BS[:, 1], 0.01 + 0.05 * static_BS[:, 2]
    upper, lower, runoff = torch.zeros(count), torch.zeros(count), []
    for t in range(num_days):
        upper = torch.relu(upper + rain_BT[:, t] - 0.2 * static_BS[:, 3] * torch.relu(warmth_BT[:, t]))
        lower = lower + 0.5 * fast * upper
        runoff.append(0.5 * fast * upper + slow * lower)
        upper, lower = upper * (1 - fast), lower * (1 - slow)
    x_BTF = torch.stack([rain_BT, warmth_BT, torch.cos(day_T).expand_as(rain_BT)], dim=-1)
    return x_BTF, static_BS, torch.stack(runoff, dim=1)


def main():
    """Compare both, then train."""
    quick = quick_was_asked(__doc__)
    torch.manual_seed(0)
    model, (count, num_days, warm_up) = Model(), (8, 20, 5) if quick else (64, 365, 60)
    x_BTF, static_BS, runoff_BT = make_catchments(count, num_days)
    compare(lambda: model.plain(x_BTF, static_BS), lambda: model(x_BTF, static_BS), model, quick=quick)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for update in range(2 if quick else 100):
        guess_BT, truth_BT = model(x_BTF, static_BS)[:, warm_up:], runoff_BT[:, warm_up:]
        loss = functional.mse_loss(guess_BT, truth_BT)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if update % 20 == 19:
            spread_B = (truth_BT - truth_BT.mean(dim=1, keepdim=True)).square().mean(dim=1)
            efficiency_B = 1 - (guess_BT - truth_BT).square().mean(dim=1) / spread_B
            print(
                f"update {update + 1:>3}  loss {loss.item():.3f}  median efficiency {efficiency_B.median().item():.2f}"
            )


if __name__ == "__main__":
    main()
