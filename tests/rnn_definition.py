"""What a recurrent layer means: the cell called in a Python loop, one sequence at a time.

Shape legend: B sequences, T steps, F features of the input, O of the output.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stretto.state import flatten, map_state


def step(cell: nn.Module, x_BF: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """One step of a cell of Stretto or of torch."""
    if isinstance(cell, nn.LSTMCell):
        h_BH, c_BH = cell(x_BF, state)
        return h_BH, (h_BH, c_BH)
    if isinstance(cell, (nn.RNNCell, nn.GRUCell)):
        h_BH = cell(x_BF, state)
        return h_BH, h_BH
    y_BO, after = cell(x_BF, state)
    return y_BO, after


def by_hand(
    cells: Sequence[nn.Module],
    x_BTF: torch.Tensor,
    *,
    lengths: Sequence[int] | None,
    state: Any,
    num_directions: int,
    resets_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs, zero behind each end, and the tensors of all final states, by the definition.

    Args:
        cells: One for each layer and direction, in the order of torch's states.
        x_BTF: The input, of any rank from 3.
        lengths: Steps of each sequence; None for all T.
        state: As a layer takes it; None for the cells' own.
        num_directions: 1 or 2.
        resets_BT: Before which steps a sequence starts anew; backwards, after which.
    """
    num_rows, num_steps = x_BTF.shape[:2]
    states = fresh = [cell.initial_state(num_rows) for cell in cells]  # type: ignore[operator]
    if state is not None:
        states = [state] if len(cells) == 1 else list(state)
    outputs, finals = [], []
    for row in range(num_rows):
        length = num_steps if lengths is None else lengths[row]
        inputs = list(x_BTF[row : row + 1, :length].unbind(1))
        borders = [False] * (length + 1) if resets_BT is None else [*resets_BT[row, :length].tolist(), False]
        ends = []
        for first in range(0, len(cells), num_directions):
            both = []
            for backwards in range(num_directions):
                index, made = first + backwards, []
                now, new = (map_state(lambda part: part[row : row + 1], all_of[index]) for all_of in (states, fresh))  # noqa: B023
                for t in reversed(range(length)) if backwards else range(length):
                    y_BO, now = step(cells[index], inputs[t], new if borders[t + backwards] else now)
                    made.append(y_BO)
                both.append(made[::-1] if backwards else made)
                ends += flatten(now)
            inputs = [torch.cat(parts, dim=-1) for parts in zip(*both, strict=True)]
        outputs.append(inputs)
        finals.append(ends)
    nothing_1O = x_BTF.new_zeros(1, *_output_shape(cells, x_BTF, num_directions))
    padded = [torch.cat([*made, *[nothing_1O] * (num_steps - len(made))]) for made in outputs]
    return torch.stack(padded), [torch.cat(parts) for parts in zip(*finals, strict=True)]


def _output_shape(cells: Sequence[nn.Module], x_BTF: torch.Tensor, num_directions: int) -> tuple[int, ...]:
    shape = tuple(x_BTF.shape[2:])
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for first in range(0, len(cells), num_directions):
            x_BF, layer = x_BTF.new_zeros(2, *shape), cells[first : first + num_directions]
            made = [step(cell, x_BF, cell.initial_state(2))[0] for cell in layer]  # type: ignore[operator]
            shape = tuple(torch.cat(made, dim=-1).shape[1:])
    return shape
