"""Calling any recurrent net on rows of unequal length.

Shape legend: B rows, M rows that have steps, T steps; dimensions of a step follow behind B and T.
"""

import inspect
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from stretto.errors import StrettoError
from stretto.nn.carried_state import NestedState, put_rows, take_rows


@final
class RaggedCall:
    """Calls a net on rows of unequal length, so that each row's state stops at its last real step.

    What torch has is packed; any other net is called with `lengths`. Neither sees a row that has no steps.

    Args:
        rnn: `y, state = rnn(x, state)` and, if it is to know of unequal lengths, `rnn(x, state, lengths=lengths)`.
        batch_dim: Where each tensor of the state has its rows.
        rows_needed: Whether rows of the state will have to be told apart.
        lengths_needed: Whether to refuse a net that cannot be told the lengths, instead of running it on past the ends.
    """

    def __init__(self, rnn: Callable[..., Any], *, batch_dim: int, rows_needed: bool, lengths_needed: bool) -> None:
        name = type(rnn).__name__
        if getattr(rnn, "bidirectional", False):
            raise StrettoError(
                f"{name} is bidirectional: it needs the end of a sequence before its beginning",
                fix="Give a net that runs forward only.",
            )
        if not getattr(rnn, "batch_first", True):
            raise StrettoError(f"{name} has batch_first=False", fix="Make it with batch_first=True.")
        of_torch = isinstance(rnn, nn.RNNBase)
        if of_torch and batch_dim != 1 and rows_needed:
            raise StrettoError(f"the state of {name} has its rows in dimension 1", fix="Give batch_dim=1.")
        self._rnn, self._of_torch, self._batch_dim = rnn, of_torch, batch_dim
        self._takes_lengths = of_torch or _has_lengths(rnn)
        if lengths_needed and not self._takes_lengths:
            raise StrettoError(
                f"lengths are given, but {name} takes none, so the states after each row's end would be wrong",
                fix="Let it take `lengths`, or leave them out and mask the loss if the last state is not needed.",
            )

    def run(
        self, x_BT: torch.Tensor, state: NestedState | None, lengths_B: torch.Tensor
    ) -> tuple[torch.Tensor, NestedState]:
        """The outputs, and the state after each row's last real step if the net can know of it."""
        if not self._takes_lengths or bool((lengths_B == x_BT.shape[1]).all()):
            return self._call(x_BT, state, None)
        rows_M = lengths_B.nonzero().flatten()
        if state is None or len(rows_M) == len(lengths_B):
            return self._call(x_BT, state, lengths_B)
        there_M = rows_M.to(x_BT.device)
        before = take_rows(state, rows_M, of=len(lengths_B), batch_dim=self._batch_dim)
        y_MT, after = self._call(x_BT[there_M], before, lengths_B[rows_M])
        y_BT = y_MT.new_zeros((len(lengths_B), *y_MT.shape[1:])).index_copy(0, there_M, y_MT)
        return y_BT, put_rows(state, rows_M, after, batch_dim=self._batch_dim)

    def _call(
        self, x_BT: torch.Tensor, state: NestedState | None, lengths_B: torch.Tensor | None
    ) -> tuple[torch.Tensor, NestedState]:
        if lengths_B is None:
            answer = self._rnn(x_BT, state)
        elif self._of_torch:
            packed = pack_padded_sequence(x_BT, lengths_B, batch_first=True, enforce_sorted=False)
            y, after = self._rnn(packed, state)
            answer = pad_packed_sequence(y, batch_first=True, total_length=x_BT.shape[1])[0], after
        else:
            answer = self._rnn(x_BT, state, lengths=lengths_B)
        if not isinstance(answer, tuple | list) or len(answer) != 2 or not isinstance(answer[0], torch.Tensor):
            raise StrettoError(
                f"{type(self._rnn).__name__} gave {type(answer).__name__} instead of outputs and state",
                fix="Let it return (y, state).",
            )
        if answer[0].shape[:2] != x_BT.shape[:2]:
            raise StrettoError(
                f"{type(self._rnn).__name__} gave outputs of shape {tuple(answer[0].shape)} for {tuple(x_BT.shape)}",
                fix="Let it be batch first and give one output a step.",
            )
        return answer[0], answer[1]


def _has_lengths(rnn: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(rnn.forward if isinstance(rnn, nn.Module) else rnn).parameters
    except (TypeError, ValueError):
        return False
    return "lengths" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
