"""A recurrent spiking network with surrogate gradients.

Leaky integrate-and-fire neurons classify spike trains in which one of four groups of channels fires more often.
The time step is a plain function, called by a Python loop or by `stretto.scan`: that is the only difference.

Shape legend: B trains, T time steps, C channels, H neurons.
"""

import torch
from side_by_side import compare, quick_was_asked
from torch import nn
from torch.nn import functional

import stretto

CHANNELS, NEURONS, CLASSES = 64, 128, 4


class Spike(torch.autograd.Function):
    """Heaviside step forward, the slope of a fast sigmoid backward."""

    @staticmethod
    def forward(ctx, v):
        """Fire above the threshold."""
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, gradient):
        """The surrogate gradient."""
        (v,) = ctx.saved_tensors
        return gradient / (1 + 10 * v.abs()) ** 2


class SpikingNetwork(nn.Module):
    """One recurrent layer of spiking neurons, read out by a leaky integrator."""

    def __init__(self):
        super().__init__()
        self.synapses = nn.Linear(CHANNELS, NEURONS)
        self.recurrent = nn.Linear(NEURONS, NEURONS, bias=False)
        self.readout = nn.Linear(NEURONS, CLASSES)

    def step(self, state, x_t):
        """One time step: potential, spikes, and the readout's potential."""
        v, spikes, out = state
        v = 0.95 * v * (1 - spikes) + self.synapses(x_t) + self.recurrent(spikes)
        spikes = Spike.apply(v - 1.0)
        out = 0.9 * out + 0.1 * self.readout(spikes)
        return (v, spikes, out), out

    def start(self, batch_size):
        """All neurons at rest."""
        zeros = torch.zeros(batch_size, NEURONS)
        return zeros, zeros, torch.zeros(batch_size, CLASSES)

    def plain(self, x_BTC):
        """The usual Python loop."""
        state, outputs = self.start(len(x_BTC)), []
        for t in range(x_BTC.shape[1]):
            state, out = self.step(state, x_BTC[:, t])
            outputs.append(out)
        return torch.stack(outputs, dim=1)

    def forward(self, x_BTC):
        """The same, compiled."""
        return stretto.scan(self.step, self.start(len(x_BTC)), x_BTC)[1]


def make_batch(batch_size, num_steps):
    """Poisson spikes; the class is the group of channels with the higher rate."""
    labels_B = torch.randint(CLASSES, (batch_size,))
    groups_C = torch.arange(CHANNELS) * CLASSES // CHANNELS
    rate_BC = torch.where(groups_C == labels_B[:, None], 0.06, 0.04)
    return (torch.rand(batch_size, num_steps, CHANNELS) < rate_BC[:, None]).float(), labels_B


def main():
    """Compare both, then train."""
    quick = quick_was_asked(__doc__)
    torch.manual_seed(0)
    network, num_steps = SpikingNetwork(), 10 if quick else 200
    x_BTC, _ = make_batch(32, num_steps)
    compare(lambda: network.plain(x_BTC), lambda: network(x_BTC), network, quick=quick)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    for update in range(2 if quick else 100):
        x_BTC, labels_B = make_batch(32, num_steps)
        outputs_BTK = network(x_BTC)
        loss = functional.cross_entropy(outputs_BTK.mean(dim=1) * 10, labels_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 20 == 0:
            right = (outputs_BTK.mean(dim=1).argmax(dim=1) == labels_B).float().mean()
            print(f"update {update:>3}  loss {loss.item():.3f}  right {right.item():.0%}")


if __name__ == "__main__":
    main()
