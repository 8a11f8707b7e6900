"""Forecasting with Lightning: a GRU predicts the next day's value and its spread, trained by `Trainer.fit`.

Each shop has one series, with a trend, a weekly cycle and a constant level. `pip install lightning` first.

Shape legend: B windows, T days, H units.
"""

import copy
import logging

import lightning
import torch
from side_by_side import compare, quick_was_asked
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto

UNITS = 40


class Forecaster(lightning.LightningModule):
    """Two GRU layers over the past days, and a normal distribution for the day after each."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, UNITS, num_layers=2, batch_first=True)
        self.head = nn.Linear(UNITS, 2)

    def forward(self, x_BT):
        """Mean and log-spread of the next day."""
        return self.head(self.rnn(x_BT[..., None])[0])

    def loss(self, x_BT):
        """The negative log-likelihood of each day, given those before it."""
        mean_BT, log_BT = self(x_BT[:, :-1]).unbind(dim=-1)
        return (log_BT + 0.5 * ((x_BT[:, 1:] - mean_BT) * (-log_BT).exp()).square()).mean()

    def training_step(self, batch):
        """Called by Lightning."""
        return self.loss(batch[0])

    def validation_step(self, batch):
        """Called by Lightning."""
        self.log("loss", self.loss(batch[0]))

    def configure_optimizers(self):
        """Called by Lightning."""
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def make_windows(count, num_days):
    """Windows of daily sales, each divided by its shop's level."""
    day_BT = torch.arange(num_days) + torch.randint(7, (count, 1))
    week_BT = 1 + 0.4 * torch.sin(2 * torch.pi * day_BT / 7 + torch.rand(count, 1))
    trend_BT = 1 + 0.3 * torch.randn(count, 1) * torch.linspace(0, 1, num_days)
    return week_BT * trend_BT + 0.1 * torch.randn(count, num_days)


def main():
    """Compare the accelerated model with a plain copy, then train it."""
    quick = quick_was_asked(__doc__)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    count, num_days, epochs = (32, 12, 1) if quick else (1024, 60, 4)
    train, valid = (TensorDataset(make_windows(count, num_days)) for _ in range(2))
    model = Forecaster()
    plain = copy.deepcopy(model)
    stretto.accelerate(model)  # the one line

    def share_parameters():
        """Run the copy with the parameters of the model, so that both give gradients of the same parameters."""
        return torch.func.functional_call(plain, dict(model.named_parameters()), (windows,))

    windows = train.tensors[0][:32]
    compare(share_parameters, lambda: model(windows), model, quick=quick)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loaders = [DataLoader(part, batch_size=32, shuffle=part is train) for part in (train, valid)]
    (before,) = trainer.validate(model, loaders[1], verbose=False)
    trainer.fit(model, *loaders)
    (after,) = trainer.validate(model, loaders[1], verbose=False)
    print(f"negative log-likelihood per day: {before['loss']:.2f} before, {after['loss']:.2f} after training")


if __name__ == "__main__":
    main()
