"""Digits read row by row by an LSTM, or seen whole by a small convolutional net, in plain PyTorch.

Shape legend: N images, B images per batch, T rows, F columns, L layers, H units, C classes.
"""

from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


@final
class DigitsNet(nn.Module):
    """Each row mapped by a linear layer, an LSTM over the rows, and a linear layer on its last state."""

    def __init__(self, *, num_columns: int, row_size: int, hidden_size: int, num_classes: int) -> None:
        super().__init__()
        self.transform = nn.Linear(num_columns, row_size)
        self.lstm = nn.LSTM(row_size, hidden_size, batch_first=True)
        with torch.no_grad():
            self.lstm.get_parameter("bias_ih_l0")[hidden_size : 2 * hidden_size].fill_(1.0)  # forget gates begin open
        self.classify = nn.Linear(hidden_size, num_classes)

    def forward(self, x_BTF: torch.Tensor) -> torch.Tensor:
        """Scores of the classes (B, C)."""
        _, (last_LBH, _) = self.lstm(self.transform(x_BTF))
        scores_BC: torch.Tensor = self.classify(last_LBH[-1])
        return scores_BC


def digit_images_net(*, num_rows: int, num_columns: int, hidden_size: int, num_classes: int) -> nn.Sequential:
    """Two convolutions, each with pooling, a linear layer, and a linear layer for the classes."""
    num_places = -(-num_rows // 4) * -(-num_columns // 4)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(32 * num_places, hidden_size),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Linear(hidden_size, num_classes),
    )


@final
class PlainDigits:
    """Trains the net with momentum at a constant rate, after a short warm-up.

    Args:
        train: Images (N, T, F), or (N, 1, T, F) for the convolutional net, and their classes.
        valid: The same, to measure on.
        model: The net.
        batch_size: Images per batch.
        learning_rate: Of SGD with a momentum of 0.9.
        warmup_epochs: In which the rate rises.
        clip_norm: Largest norm of a gradient.
        seed: Of the order of images.
    """

    def __init__(
        self,
        train: tuple[npt.NDArray[Any], npt.NDArray[Any]],
        valid: tuple[npt.NDArray[Any], npt.NDArray[Any]],
        *,
        model: nn.Module,
        batch_size: int = 128,
        learning_rate: float = 0.1,
        warmup_epochs: float = 0.1,
        clip_norm: float = 1.0,
        seed: int = 0,
    ) -> None:
        mean, deviation = train[0].mean(dtype=np.float64), train[0].std(dtype=np.float64)
        self._train, self._valid = (
            TensorDataset(
                (torch.from_numpy(images_N).float() - float(mean)) / float(deviation),
                torch.from_numpy(labels_N.astype(np.int64)),
            )
            for images_N, labels_N in (train, valid)
        )
        self.model = model
        order = torch.Generator().manual_seed(seed)
        self._loader = DataLoader(self._train, batch_size=batch_size, shuffle=True, generator=order)
        self._optimizer = SGD(self.model.parameters(), lr=learning_rate, momentum=0.9)
        warmup = max(1, round(warmup_epochs * len(self._loader)))
        self._schedule = LambdaLR(self._optimizer, lambda update: min(1.0, (update + 1) / warmup))
        self._clip_norm = clip_norm

    def epoch(self) -> None:
        """Train one epoch."""
        self.model.train()
        for images_B, labels_B in self._loader:
            self._optimizer.zero_grad()
            self.loss(images_B, labels_B).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
            self._optimizer.step()
            self._schedule.step()

    def loss(self, images_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of a batch."""
        return functional.cross_entropy(self.model(images_B), labels_B)

    def loss_of(self, numbers: list[int]) -> torch.Tensor:
        """The loss of a batch of these training images."""
        return self.loss(*self._train[numbers])

    @torch.no_grad()
    def quality(self) -> float:
        """Share of the validation images whose best class is the right one."""
        self.model.eval()
        right = 0
        for images_B, labels_B in DataLoader(self._valid, batch_size=256):
            right += int((self.model(images_B).argmax(dim=1) == labels_B).sum())
        return right / len(self._valid)
