"""The recurrent layers of the tasks' models, on the backend that the settings name.

Shape legend: B sequences, T steps, F features, H hidden units of all directions.
"""

from typing import final

import torch
from torch import nn

from stretto import cells
from stretto.batching import Batch
from stretto.nn import RNN, accelerate, open_forget_gates, run_ragged
from stretto.training import SolverConfig, TrainConfig


def make_lstm(
    input_size: int,
    hidden_size: int,
    *,
    config: TrainConfig,
    num_layers: int | None = None,
    bidirectional: bool = False,
) -> nn.LSTM:
    """An accelerated `torch.nn.LSTM`, batch first, that begins with open forget gates.

    It has as many layers as the settings say, unless `num_layers` is given. "auto" means generated code where there is
    some. It is not decided by timing, so that runs are repeatable to the last digit.
    """
    count = config.num_layers if num_layers is None else num_layers
    # torch warns when a single layer is given a dropout that it would not use.
    between = config.dropout if count > 1 else 0.0
    lstm = nn.LSTM(input_size, hidden_size, count, batch_first=True, dropout=between, bidirectional=bidirectional)
    open_forget_gates(lstm)
    return accelerate(lstm, backend=config.backend, measure=False)


@final
class GRULayers(nn.Module):
    """Layers of GRUs over a ragged batch: a `stretto.RNN`, which takes a solver, or torch's own layers."""

    def __init__(self, input_size: int, *, config: SolverConfig, bidirectional: bool = False) -> None:
        super().__init__()
        size, num_layers = config.hidden_size, config.num_layers
        between = config.dropout if num_layers > 1 else 0.0
        solver = config.make_solver()
        self.rnn: RNN | nn.GRU
        if config.backend == "torch":
            gru = nn.GRU(input_size, size, num_layers, batch_first=True, dropout=between, bidirectional=bidirectional)
            self.rnn = accelerate(gru, backend="torch")
        else:
            cell = cells.GRU(input_size, size)
            self.rnn = RNN(cell, num_layers, bidirectional, dropout=between, backend=config.backend, solver=solver)

    def forward(self, x_BTF: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Outputs (B, T, H), zero after each sequence's end."""
        if isinstance(self.rnn, RNN):
            y_BTH, _ = self.rnn(x_BTF, lengths=batch.lengths, sample_ids=batch.indices)
        else:
            y_BTH = run_ragged(self.rnn, x_BTF, batch.lengths)
        return y_BTH  # type: ignore[no-any-return]


def mean_over_steps(y_BTH: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The mean (B, H) over the real steps of each sequence, given outputs that are zero after its end."""
    return y_BTH.sum(dim=1) / batch.lengths.to(y_BTH)[:, None]
