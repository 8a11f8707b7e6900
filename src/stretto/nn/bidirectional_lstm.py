"""A bidirectional LSTM that is right on padded batches.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from typing import final

import torch
from torch import nn

from stretto.kernels import Backend
from stretto.nn.ragged import as_rows
from stretto.nn.reversal import reverse_padded
from stretto.nn.stack import Direction, run_stack
from stretto.nn.torch_layers import DTYPES, layer_program, layer_weights


@final
class BidirectionalLSTM(nn.Module):
    """Layers of two LSTMs, one reading forwards, one backwards from each sequence's own end.

    The backward direction of `torch.nn.LSTM(bidirectional=True)` starts in the padding of a padded batch, and packing
    is several times slower than padding on a CPU. Here both directions run on generated kernels, which compute real
    steps only; outputs beyond a sequence's end are zero. Parameters are those of `torch.nn.LSTM` layers.

    Args:
        input_size: Features per step.
        hidden_size: Units of each direction; outputs have twice as many.
        num_layers: Layers.
        dropout: Share of a layer's outputs that is dropped.
        backend: "auto" and "cpp" run generated code; "torch" runs torch's layers on padded batches,
            reversed within their lengths; outputs beyond a sequence's end are then not defined. Other
            devices always use torch's layers.
    """

    def __init__(
        self,
        input_size: int,
        *,
        hidden_size: int,
        num_layers: int = 1,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        sizes = [input_size] + [2 * hidden_size] * (num_layers - 1)
        self.forwards = nn.ModuleList(nn.LSTM(size, hidden_size, batch_first=True) for size in sizes)
        self.backwards = nn.ModuleList(nn.LSTM(size, hidden_size, batch_first=True) for size in sizes)
        self.dropout = nn.Dropout(dropout)
        self.backend = backend
        for lstm in (*self.forwards, *self.backwards):
            remember_by_default(lstm)

    def forward(self, x_BTF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """Both directions side by side, (B, T, 2 H)."""
        if self.backend != "torch" and x_BTF.device.type == "cpu" and x_BTF.dtype in DTYPES:
            return self._compiled(x_BTF, lengths_B)
        for forwards, backwards in zip(self.forwards, self.backwards, strict=True):
            ahead_BTH, _ = forwards(x_BTF)
            behind_BTH, _ = backwards(reverse_padded(x_BTF, lengths_B))
            x_BTF = self.dropout(torch.cat([ahead_BTH, reverse_padded(behind_BTH, lengths_B)], dim=-1))
        return x_BTF

    def _compiled(self, x_BTF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        rows = as_rows(x_BTF, lengths_B, batch_first=True)
        layers = []
        for pair in zip(self.forwards, self.backwards, strict=True):
            layer = []
            for lstm in pair:
                assert isinstance(lstm, nn.LSTM)
                built = layer_program(
                    "LSTM",
                    input_size=lstm.input_size,
                    hidden_size=lstm.hidden_size,
                    dtype=x_BTF.dtype,
                    backend="eager" if self.backend == "eager" else "auto",
                )
                zeros_BH = x_BTF.new_zeros(len(x_BTF), lstm.hidden_size)
                layer.append(Direction(built.program, layer_weights(lstm, 0), [zeros_BH, zeros_BH]))
            layers.append(layer)
        between = self.dropout.p if self.training else 0.0
        result = run_stack(layers, rows.layout, rows.x_PF, dropout=between)
        y_BTH = rows.output(self.dropout(result.y_PF))
        assert isinstance(y_BTH, torch.Tensor)
        return y_BTH


def remember_by_default(lstm: nn.Module) -> None:
    """Start with open forget gates, the second quarter of torch's gate order."""
    with torch.no_grad():
        for name, bias in lstm.named_parameters():
            if name.startswith("bias_ih"):
                bias[len(bias) // 4 : len(bias) // 2].fill_(1.0)
