"""A leaky recurrent network under Dale's law decides which of two noisy inputs is stronger, as in neuroscience labs.

Four fifths of the units are excitatory, the others inhibitory; all outgoing weights of a unit have the same sign.
Every unit receives independent noise at every step.

Shape legend: B trials, T time steps, I inputs, H units.
"""

import torch
from side_by_side import compare, quick_was_asked
from torch import nn
from torch.nn import functional

import stretto

UNITS, INPUTS, CHOICES = 100, 3, 3  # inputs: fixation and two stimuli; choices: wait, left, right


class DaleCell(nn.Module):
    """One time step of the network; `stretto.RNN` takes it unchanged."""

    def __init__(self, alpha=0.2, noise=0.05):
        super().__init__()
        self.alpha, self.noise = alpha, noise
        self.inputs = nn.Linear(INPUTS, UNITS)
        self.weights = nn.Parameter(torch.rand(UNITS, UNITS) * 2 / UNITS)
        sign = torch.where(torch.arange(UNITS) < 0.8 * UNITS, 1.0, -4.0)  # few inhibitory units, but strong ones
        self.register_buffer("sign", sign[:, None] * (1 - torch.eye(UNITS)))  # no self-connections

    def forward(self, given, h):
        """Rates decay towards the drive from inputs and other units."""
        x_t, noise_t = given
        drive = torch.relu(h) @ (self.weights.abs() * self.sign) + self.inputs(x_t)
        return (1 - self.alpha) * h + self.alpha * drive + self.noise * noise_t


class Network(nn.Module):
    """The cell over time, and a linear readout of the rates."""

    def __init__(self):
        super().__init__()
        self.cell, self.readout = DaleCell(), nn.Linear(UNITS, CHOICES)
        self.rnn = stretto.RNN(self.cell, state=UNITS)

    def plain(self, x_BTI, noise_BTH):
        """A Python loop over the cell."""
        h, states = torch.zeros(len(x_BTI), UNITS), []
        for t in range(x_BTI.shape[1]):
            h = self.cell((x_BTI[:, t], noise_BTH[:, t]), h)
            states.append(h)
        return self.readout(torch.relu(torch.stack(states, dim=1)))

    def forward(self, x_BTI, noise_BTH):
        """The same, compiled."""
        return self.readout(torch.relu(self.rnn((x_BTI, noise_BTH))[0]))


def make_trials(batch_size, num_steps):
    """Both stimuli are on for two thirds of the trial; when fixation ends, the network reports the stronger one."""
    on = 2 * num_steps // 3
    strength_B = torch.tensor([-0.4, -0.2, 0.2, 0.4])[torch.randint(4, (batch_size,))]
    x_BTI = torch.zeros(batch_size, num_steps, INPUTS)
    x_BTI[:, :on, 0] = 1.0
    x_BTI[:, :on, 1] = 0.5 + strength_B[:, None] / 2
    x_BTI[:, :on, 2] = 0.5 - strength_B[:, None] / 2
    x_BTI += 0.1 * torch.randn_like(x_BTI)
    choice_BT = torch.zeros(batch_size, num_steps, dtype=torch.int64)
    choice_BT[:, on:] = torch.where(strength_B > 0, 1, 2)[:, None]
    return x_BTI, choice_BT, torch.randn(batch_size, num_steps, UNITS)


def main():
    """Compare both, then train."""
    quick = quick_was_asked(__doc__)
    torch.manual_seed(0)
    network, num_steps = Network(), 12 if quick else 150
    x_BTI, _, noise_BTH = make_trials(32, num_steps)
    compare(lambda: network.plain(x_BTI, noise_BTH), lambda: network(x_BTI, noise_BTH), network, quick=quick)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for update in range(2 if quick else 200):
        x_BTI, choice_BT, noise_BTH = make_trials(32, num_steps)
        outputs_BTK = network(x_BTI, noise_BTH)
        loss = functional.cross_entropy(outputs_BTK.flatten(0, 1), choice_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if update % 40 == 0:
            right = (outputs_BTK[:, -1].argmax(dim=1) == choice_BT[:, -1]).float().mean()
            print(f"update {update:>3}  loss {loss.item():.3f}  right {right.item():.0%}")


if __name__ == "__main__":
    main()
