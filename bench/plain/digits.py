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

from .loop import ShuffledScript, open_forget_gates


@final
class DigitsNet(nn.Module):
    """Each row mapped by a linear layer, an LSTM over the rows, and a linear layer on its last state."""

    def __init__(self, *, num_columns: int, row_size: int, hidden_size: int, num_classes: int) -> None:
        super().__init__()
        self.transform = nn.Linear(num_columns, row_size)
        self.lstm = nn.LSTM(row_size, hidden_size, batch_first=True)
        open_forget_gates(self.lstm)
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
class PlainDigits(ShuffledScript):
    """Trains the net with momentum at a constant rate, after a short warm-up.

    Images are (N, T, F), or (N, 1, T, F) for the convolutional net.
    """

    def __init__(
        self,
        train: tuple[npt.NDArray[Any], npt.NDArray[Any]],
        valid: tuple[npt.NDArray[Any], npt.NDArray[Any]],
        *,
        model: nn.Module,
        learning_rate: float,
        warmup_epochs: float,
        **options: Any,
    ) -> None:
        mean, deviation = train[0].mean(dtype=np.float64), train[0].std(dtype=np.float64)
        train_set, self._valid = (
            TensorDataset(
                (torch.from_numpy(images_N).float() - float(mean)) / float(deviation),
                torch.from_numpy(labels_N.astype(np.int64)),
            )
            for images_N, labels_N in (train, valid)
        )
        super().__init__(model, train_set, **options)
        self._optimizer = SGD(self.model.parameters(), lr=learning_rate, momentum=0.9)
        warmup = max(1, round(warmup_epochs * len(self._loader)))
        self._schedule = LambdaLR(self._optimizer, lambda update: min(1.0, (update + 1) / warmup))

    def loss(self, images_B: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of a batch."""
        return functional.cross_entropy(self.model(images_B), labels_B)

    @torch.no_grad()
    def quality(self) -> float:
        """Share of the validation images whose best class is the right one."""
        self.model.eval()
        right = 0
        for images_B, labels_B in DataLoader(self._valid, batch_size=256):
            right += int((self.model(images_B).argmax(dim=1) == labels_B).sum())
        return right / len(self._valid)
