"""Layers of every cell in every setting, and batches for them."""

from typing import Any

import torch
from parity_oracle import Batch

import stretto
from cell_settings import SETTINGS, F
from stretto.state import map_state


def layer(
    setting: str, H: int, *, dtype: torch.dtype = torch.float64, seed: int = 0, training: bool = False, **options: Any
) -> stretto.RNN:
    """A layer, or a stack of layers, of one of the cells."""
    torch.manual_seed(seed)
    rnn = stretto.RNN(SETTINGS[setting](H).to(dtype), **options).train(training)
    with torch.no_grad():
        for parameter in rnn.parameters():
            # Gains of one and shifts of zero would hide a mix-up.
            if bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return rnn


def drawn(
    rnn: stretto.RNN, *, T: int, B: int, lengths: list[int] | None = None, given: bool = False, seed: int = 1
) -> Batch:
    """A random batch for a layer, with a random state if `given`."""
    torch.manual_seed(seed)
    dtype = next(rnn.parameters()).dtype
    states = tuple(cell.initial_state(B) for cell in rnn.cells)  # type: ignore[operator]
    state = map_state(_moved, states if len(states) > 1 else states[0]) if given else None
    features = getattr(rnn.cells[0], "input_size", F)
    return Batch(x_BTF=torch.randn(B, T, features, dtype=dtype), lengths=lengths, state=state)


def _moved(part: torch.Tensor) -> torch.Tensor:
    if not part.is_floating_point():
        return part
    # A part of one unit may be a step counter, so that it is moved by integers.
    shift = torch.rand_like(part) if part.shape[-1] > 1 else torch.randint_like(part, 4)
    return (part + shift).detach()
