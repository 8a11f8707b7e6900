"""A bidirectional LSTM that is right on padded batches.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from typing import final

import torch
from torch import nn

from stretto.nn.reversal import reverse_padded


@final
class BidirectionalLSTM(nn.Module):
    """Layers of two `torch.nn.LSTM`, one reading forwards, one backwards from each sequence's own end.

    The backward direction of `torch.nn.LSTM(bidirectional=True)` starts in the padding of a padded batch, and packing
    is several times slower than padding on a CPU. Reversing every sequence within its length gives the exact result at
    full speed. Outputs beyond a sequence's end are not defined.

    Args:
        input_size: Features per step.
        hidden_size: Units of each direction; outputs have twice as many.
        num_layers: Layers.
        dropout: Share of a layer's outputs that is dropped.
    """

    def __init__(self, input_size: int, *, hidden_size: int, num_layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        sizes = [input_size] + [2 * hidden_size] * (num_layers - 1)
        self.forwards = nn.ModuleList(nn.LSTM(size, hidden_size, batch_first=True) for size in sizes)
        self.backwards = nn.ModuleList(nn.LSTM(size, hidden_size, batch_first=True) for size in sizes)
        self.dropout = nn.Dropout(dropout)
        for lstm in (*self.forwards, *self.backwards):
            remember_by_default(lstm)

    def forward(self, x_BTF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """Both directions side by side, (B, T, 2 H)."""
        for forwards, backwards in zip(self.forwards, self.backwards, strict=True):
            ahead_BTH, _ = forwards(x_BTF)
            behind_BTH, _ = backwards(reverse_padded(x_BTF, lengths_B))
            x_BTF = self.dropout(torch.cat([ahead_BTH, reverse_padded(behind_BTH, lengths_B)], dim=-1))
        return x_BTF


def remember_by_default(lstm: nn.Module) -> None:
    """Start with open forget gates, the second quarter of torch's gate order."""
    with torch.no_grad():
        for name, bias in lstm.named_parameters():
            if name.startswith("bias_ih"):
                bias[len(bias) // 4 : len(bias) // 2].fill_(1.0)
