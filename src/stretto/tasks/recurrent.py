"""The recurrent layers of the tasks' models, on the backend that the settings name.

Shape legend: B sequences, T steps, F features, H hidden units of all directions.
"""

from typing import final

import torch
from torch import nn

from stretto import cells
from stretto.batching import Batch
from stretto.kernels import why_nothing_is_compiled
from stretto.nn import RNN, accelerate, open_forget_gates, run_padded, run_ragged, warn_once
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
class Unpadded:
    """A batch of sequences of one length, as a model is exported: the length is the size of a tensor, not data."""

    lengths = targets = indices = None

    def __init__(self, features_BTF: torch.Tensor) -> None:
        self.features_BTF = features_BTF

    @property
    def mask(self) -> torch.Tensor:
        """(B, T), all true."""
        return torch.ones_like(self.features_BTF[..., 0], dtype=torch.bool)

    def __len__(self) -> int:
        return len(self.features_BTF)


def run_layers(layers: nn.LSTM | nn.GRU, x_BTF: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """Outputs (B, T, H), zero after each sequence's end; None for sequences as long as the tensor."""
    if lengths is None:
        return layers(x_BTF)[0]  # type: ignore[no-any-return]
    return run_ragged(layers, x_BTF, lengths)


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
        rnn = self.rnn
        if not isinstance(rnn, RNN) or batch.lengths is None:
            return run_layers(rnn, x_BTF, batch.lengths)
        if self._needs_torch(rnn, x_BTF):
            weights: list[list[torch.Tensor]] = [[*cell.parameters()] for cell in rnn.cells]
            dropout = rnn.dropout if self.training else 0.0
            return run_padded("GRU", weights, x_BTF, batch.lengths, bidirectional=rnn.bidirectional, dropout=dropout)
        return rnn(x_BTF, lengths=batch.lengths, sample_ids=batch.indices)[0]  # type: ignore[no-any-return]

    @staticmethod
    def _needs_torch(rnn: RNN, x_BTF: torch.Tensor) -> bool:
        """Whether no code can be compiled here: torch's own GRU is then far faster than a cell called step by step."""
        if rnn.backend != "auto" or rnn.solver != "serial" or x_BTF.device.type != "cpu":
            return False
        reason = why_nothing_is_compiled(x_BTF.device)
        if reason:
            warn_once(f"GRU runs as torch's own layer: {reason.rstrip('.')}; see `stretto doctor`")
        return bool(reason)

    def to_torch(self) -> nn.GRU:
        """The same layers as torch's own, with copies of the weights."""
        if not isinstance(self.rnn, RNN):
            return self.rnn
        cell, both = self.rnn.cells[0], self.rnn.bidirectional
        assert isinstance(cell, cells.GRU)
        gru = nn.GRU(cell.input_size, cell.hidden_size, self.rnn.num_layers, batch_first=True, bidirectional=both)
        for index, each in enumerate(self.rnn.cells):
            assert isinstance(each, cells.GRU)
            layer, reverse = divmod(index, 2 if both else 1)
            cells.store_layer(each, gru, layer=layer, reverse=bool(reverse))
        return gru.eval()


def mean_over_steps(y_BTH: torch.Tensor, batch: Batch | Unpadded) -> torch.Tensor:
    """The mean (B, H) over the real steps of each sequence, given outputs that are zero after its end."""
    if isinstance(batch, Unpadded):
        return y_BTH.mean(dim=1)
    return y_BTH.sum(dim=1) / batch.lengths.to(y_BTH)[:, None]
