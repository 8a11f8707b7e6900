"""The loop of every script that trains on sequences in shuffled order."""

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import DataLoader, default_collate


class ShuffledScript(abc.ABC):
    """Trains a net on shuffled batches, its gradients clipped; the subclass chooses the optimiser and the schedule.

    `collate` makes a batch of some of `train`, which is what `loss` takes.
    """

    _optimizer: Optimizer
    _schedule: LRScheduler

    def __init__(
        self,
        model: nn.Module,
        train: Any,
        *,
        batch_size: int,
        clip_norm: float,
        seed: int,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self.model = model
        self._train, self._collate, self._clip_norm = train, collate, clip_norm
        order = torch.Generator().manual_seed(seed)
        self._loader: DataLoader[Any] = DataLoader(
            train, batch_size=batch_size, shuffle=True, collate_fn=collate, generator=order
        )

    def _use_one_cycle(self, *, learning_rate: float, epochs: int) -> None:
        """AdamW, its rate rising for 15 % of the run and falling for the rest."""
        self._optimizer = AdamW(self.model.parameters(), lr=learning_rate)
        self._schedule = OneCycleLR(
            self._optimizer, max_lr=learning_rate, total_steps=epochs * len(self._loader) + 1, pct_start=0.15
        )

    @property
    def updates_per_epoch(self) -> int:
        """Updates of one epoch."""
        return len(self._loader)

    def use(self, optimizer: Optimizer, schedule: LRScheduler, *, clip_norm: float) -> None:
        """Train with another optimiser, and with a schedule that is stepped once an update."""
        self._optimizer, self._schedule, self._clip_norm = optimizer, schedule, clip_norm

    def epoch(self) -> None:
        """Train one epoch."""
        self.model.train()
        for batch in self._loader:
            self._optimizer.zero_grad()
            self.loss(*batch).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
            self._optimizer.step()
            self._schedule.step()

    def loss_of_first(self, count: int) -> torch.Tensor:
        """The loss of a batch of the first training sequences."""
        return self.loss(*self._collate([self._train[number] for number in range(count)]))

    @abc.abstractmethod
    def loss(self, *batch: Any, **options: Any) -> torch.Tensor:
        """The mean loss of a batch."""

    @abc.abstractmethod
    def quality(self) -> float:
        """The metric on the validation part."""


def open_forget_gates(*layers: nn.LSTM) -> None:
    """Let LSTMs of one layer begin with open forget gates."""
    with torch.no_grad():
        for lstm in layers:
            lstm.get_parameter("bias_ih_l0")[lstm.hidden_size : 2 * lstm.hidden_size].fill_(1.0)


def reverse(x_BTF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Each sequence from its last step to its first; padding stays behind."""
    steps_T = torch.arange(x_BTF.shape[1])
    reversed_BT = torch.where(steps_T < lengths_B[:, None], lengths_B[:, None] - 1 - steps_T, steps_T)
    return x_BTF.gather(1, reversed_BT[..., None].expand_as(x_BTF))
