"""Lines of pen movement read by a bidirectional LSTM and CTC, in plain PyTorch.

Shape legend: N lines, B lines per batch, T steps, U stacked steps, F features, H units, C classes (blank first).
"""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from .loop import ShuffledScript, open_forget_gates, reverse

Line = tuple[torch.Tensor, torch.Tensor]
"""Stacked steps (U, F) and the classes of the characters."""


@final
class HandwritingNet(nn.Module):
    """An LSTM in each direction, and log-probabilities of the characters at each step.

    Two layers on padded batches, the second on lines reversed within their lengths: right where
    `nn.LSTM(bidirectional=True)` would begin in the padding, and on a CPU several times faster than packing.
    """

    def __init__(self, *, num_features: int, hidden_size: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.ahead = nn.LSTM(num_features, hidden_size, batch_first=True)
        self.behind = nn.LSTM(num_features, hidden_size, batch_first=True)
        open_forget_gates(self.ahead, self.behind)
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Linear(2 * hidden_size, num_classes)

    def forward(self, x_BUF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (B, U, C)."""
        ahead_BUH, _ = self.ahead(x_BUF)
        behind_BUH, _ = self.behind(reverse(x_BUF, lengths_B))
        both_BUH = torch.cat([ahead_BUH, reverse(behind_BUH, lengths_B)], dim=-1)
        log_probs_BUC: torch.Tensor = self.classify(self.dropout(both_BUH)).log_softmax(dim=-1)
        return log_probs_BUC


@final
class PlainHandwriting(ShuffledScript):
    """Trains the net with AdamW over one cycle of the rate, on pen movement (T, F) and the text of each line."""

    def __init__(
        self,
        train: tuple[Sequence[npt.NDArray[Any]], Sequence[str]],
        valid: tuple[Sequence[npt.NDArray[Any]], Sequence[str]],
        *,
        alphabet: str,
        stack: int,
        hidden_size: int,
        dropout: float,
        epochs: int,
        learning_rate: float,
        seed: int,
        **options: Any,
    ) -> None:
        steps_SF = np.concatenate(train[0]).astype(np.float64)
        mean_F, deviation_F = steps_SF.mean(axis=0), steps_SF.std(axis=0)
        scale_F = 1.0 / np.where(deviation_F > 1e-9 * np.maximum(1.0, np.abs(mean_F)), deviation_F, 1.0)
        code_of = {character: 1 + number for number, character in enumerate(alphabet)}

        def prepare(lines: Sequence[npt.NDArray[Any]], texts: Sequence[str]) -> list[Line]:
            return [
                (
                    stack_steps(torch.from_numpy(((line_TF - mean_F) * scale_F).astype(np.float32)), factor=stack),
                    torch.tensor([code_of[character] for character in text]),
                )
                for line_TF, text in zip(lines, texts, strict=True)
            ]

        self._valid = prepare(*valid)
        torch.manual_seed(seed)
        model = HandwritingNet(
            num_features=stack * len(mean_F), hidden_size=hidden_size, num_classes=1 + len(alphabet), dropout=dropout
        )
        super().__init__(model, prepare(*train), collate=pad_lines, seed=seed, **options)
        self._use_one_cycle(learning_rate=learning_rate, epochs=epochs)

    def loss(
        self, x_BUF: torch.Tensor, lengths_B: torch.Tensor, codes: torch.Tensor, code_lengths_B: torch.Tensor
    ) -> torch.Tensor:
        """Negative log-likelihood of the texts, per character."""
        log_probs_BUC = self.model(x_BUF, lengths_B)
        total = functional.ctc_loss(log_probs_BUC.transpose(0, 1), codes, lengths_B, code_lengths_B, reduction="sum")
        return total / code_lengths_B.sum()

    @torch.no_grad()
    def quality(self) -> float:
        """Character error rate of the validation lines, read by the likeliest class of each step."""
        from rapidfuzz.distance import Levenshtein

        self.model.eval()
        errors = count = 0
        loader: DataLoader[Any] = DataLoader(self._valid, batch_size=64, collate_fn=pad_lines)  # type: ignore[arg-type]
        for x_BUF, lengths_B, codes, code_lengths_B in loader:
            best_BU = self.model(x_BUF, lengths_B).argmax(dim=-1)
            texts = codes.split(code_lengths_B.tolist())
            for best_U, length, text in zip(best_BU, lengths_B.tolist(), texts, strict=True):
                found = best_U[:length].unique_consecutive()
                errors += Levenshtein.distance(found[found != 0].tolist(), text.tolist())
                count += len(text)
        return errors / count


def pad_lines(lines: Sequence[Line]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch: padded steps, their numbers, and the classes of all characters with the number of each line's."""
    steps, codes = zip(*lines, strict=True)
    lengths_B, code_lengths_B = (torch.tensor([len(item) for item in items]) for items in (steps, codes))
    return pad_sequence(list(steps), batch_first=True), lengths_B, torch.cat(codes), code_lengths_B


def stack_steps(x_TF: torch.Tensor, *, factor: int) -> torch.Tensor:
    """Concatenate this many steps into one; missing steps at the end are zero."""
    return functional.pad(x_TF, (0, 0, 0, -len(x_TF) % factor)).reshape(-1, factor * x_TF.shape[1])
