"""A closed-form continuous-time cell (CfC) on irregularly sampled series of unequal length.

Each series has noisy samples of a wave at random times; the class is sine or sawtooth.
The cell receives each sample together with the time since the last one.

Shape legend: B series, T samples of the longest, H units.
"""

import torch
from side_by_side import compare, quick_was_asked
from torch import nn
from torch.nn import functional

import stretto

UNITS, CLASSES = 32, 2


class CfC(nn.Module):
    """The closed-form continuous-time cell of Hasani et al. (2022)."""

    def __init__(self):
        super().__init__()
        self.backbone, self.heads = nn.Linear(1 + UNITS, 64), nn.Linear(64, 4 * UNITS)

    def forward(self, x_t, elapsed_t, h):
        """The state after `elapsed_t`: a mixture of two targets, gated by time."""
        features = torch.tanh(self.backbone(torch.cat([x_t, h], dim=-1)))
        f, g, a, b = self.heads(features).chunk(4, dim=-1)
        gate = torch.sigmoid(a * elapsed_t + b)
        return (1 - gate) * torch.tanh(f) + gate * torch.tanh(g)


class Classifier(nn.Module):
    """The cell over each series, and the class from its last state."""

    def __init__(self):
        super().__init__()
        self.cell, self.readout = CfC(), nn.Linear(UNITS, CLASSES)

    def plain(self, x_BT1, elapsed_BT1, lengths_B):
        """A loop over time; series that have ended keep their state."""
        h = torch.zeros(len(x_BT1), UNITS)
        for t in range(x_BT1.shape[1]):
            new = self.cell(x_BT1[:, t], elapsed_BT1[:, t], h)
            h = torch.where((t < lengths_B)[:, None], new, h)
        return self.readout(h)

    def forward(self, x_BT1, elapsed_BT1, lengths_B):
        """The same, compiled; padding is not computed."""

        def step(h, given):
            return self.cell(*given, h), None

        start = torch.zeros(len(x_BT1), UNITS)
        h, _ = stretto.scan(step, start, (x_BT1, elapsed_BT1), lengths=lengths_B)
        return self.readout(h)


def make_series(batch_size, max_samples):
    """Waves of random frequency and phase, sampled at random times."""
    lengths_B = torch.randint(max_samples // 4, max_samples + 1, (batch_size,))
    elapsed_BT1 = torch.empty(batch_size, max_samples, 1).exponential_(4.0)
    phase_BT1 = torch.rand(batch_size, 1, 1) + (1 + torch.rand(batch_size, 1, 1)) * elapsed_BT1.cumsum(dim=1) / 2
    labels_B = torch.randint(CLASSES, (batch_size,))
    saw = 2 * (phase_BT1 % 1) - 1
    x_BT1 = torch.where(labels_B[:, None, None] == 1, saw, torch.sin(2 * torch.pi * phase_BT1))
    return (x_BT1 + 0.1 * torch.randn_like(x_BT1), elapsed_BT1, lengths_B), labels_B


def main():
    """Compare both, then train."""
    quick = quick_was_asked(__doc__)
    torch.manual_seed(0)
    model, max_samples = Classifier(), 12 if quick else 150
    batch, _ = make_series(32, max_samples)
    compare(lambda: model.plain(*batch), lambda: model(*batch), model, quick=quick)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for update in range(2 if quick else 400):
        batch, labels_B = make_series(32, max_samples)
        outputs_BK = model(*batch)
        loss = functional.cross_entropy(outputs_BK, labels_B)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if update % 80 == 79:
            right = (outputs_BK.argmax(dim=1) == labels_B).float().mean()
            print(f"update {update + 1:>3}  loss {loss.item():.3f}  right {right.item():.0%}")


if __name__ == "__main__":
    main()
