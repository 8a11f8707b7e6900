"""The net of language modelling: what comes next in a text, passage by passage or in streams that go on.

Shape legend: B passages or streams, T steps, U steps that have a next one, E embedding size, H hidden units, P rows of
all steps, C words or characters.
"""

from typing import final

import torch
from torch import nn

from stretto.batching import Batch
from stretto.kernels import Backend
from stretto.nn import CarriedState, remember_by_default
from stretto.nn import torch_layers as accelerated


@final
class TextNet(nn.Module):
    """Words or characters embedded, an LSTM, and scores of what comes next.

    Args:
        num_tokens: Different words or characters.
        embedding_size: Numbers that stand for one.
        hidden_size: Units of each layer.
        num_layers: Layers.
        dropout: Share dropped between layers and before the scores.
        input_dropout: Share of the embedding dropped.
        init_scale: All weights begin uniform between minus and plus this; left out, as torch has them, with open forget
            gates.
        backend: What runs the layers.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        embedding_size: int,
        hidden_size: int,
        num_layers: int,
        dropout: float,
        input_dropout: float = 0.0,
        init_scale: float | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        self.carried = CarriedState(batch_dim=1)
        self.embed = nn.Embedding(num_tokens, embedding_size)
        # torch warns when a single layer is given a dropout that it would not use.
        between = dropout if num_layers > 1 else 0.0
        self.lstm = accelerated.LSTM(embedding_size, hidden_size, num_layers, batch_first=True, dropout=between)
        remember_by_default(self.lstm)
        accelerated.accelerate(self.lstm, backend="cpp" if backend == "auto" else backend)
        self.input_dropout, self.dropout = nn.Dropout(input_dropout), nn.Dropout(dropout)
        self.predict = nn.Linear(hidden_size, num_tokens)
        if init_scale is not None:
            for weight in self.parameters():
                nn.init.uniform_(weight, -init_scale, init_scale)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Of passages, scores (B, U, C) of steps 1 to T - 1; of windows, which have targets, of all T that follow."""
        if batch.targets is not None:
            return self._window(batch)
        embedded_BUE = self.input_dropout(self.embed(batch.features_BTF[:, :-1, 0]))
        hidden_BUH = self.lstm.ragged(embedded_BUE, batch.lengths - 1)
        scores_BUC: torch.Tensor = self.predict(self.dropout(hidden_BUH))
        return scores_BUC

    def _window(self, batch: Batch) -> torch.Tensor:
        """Padding, if there is any, is behind the end of the text: what is made of it is neither used nor carried."""
        embedded_BTE = self.input_dropout(self.embed(batch.features_BTF[:, :, 0]))
        hidden_BTH, state = self.lstm(embedded_BTE, self.carried.rows(slice(len(batch))))
        self.carried.keep(state)
        # The layer leaves its outputs step by step; rows in that order need no copy, nor do scores of them.
        hidden_TBH = hidden_BTH.transpose(0, 1)
        scores_PC: torch.Tensor = self.predict(self.dropout(hidden_TBH.flatten(0, 1)))
        return scores_PC.view(*hidden_TBH.shape[:2], -1).transpose(0, 1)
