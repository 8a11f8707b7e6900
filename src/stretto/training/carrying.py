"""Models whose recurrent state goes on from batch to batch.

Shape legend: L layers, B rows of the batch, H hidden units.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn


class Carrying(nn.Module):
    """A model, or a part of one, that remembers its state between the windows of parallel streams.

    The state is no parameter and no buffer: a trained model is the same without it.

    Attributes:
        carried: Tensors (L, B, H), without their graph; empty at the start of a stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.carried: tuple[torch.Tensor, ...] = ()

    def reset(self) -> None:
        """Start afresh, with whatever number of rows comes next."""
        self.carried = ()

    def start(self, num_rows: int) -> tuple[torch.Tensor, ...] | None:
        """The state that the first rows go on from; streams that have ended are the last ones. None is zeros."""
        return tuple(state_LBH[:, :num_rows].contiguous() for state_LBH in self.carried) or None

    def keep(self, state: tuple[torch.Tensor, ...]) -> None:
        """Remember a state for the next window, without its graph."""
        self.carried = tuple(state_LBH.detach() for state_LBH in state)


def carrying_parts(model: nn.Module) -> list[Carrying]:
    """All parts of a model that carry a state."""
    return [part for part in model.modules() if isinstance(part, Carrying)]


def reset_carried(model: nn.Module) -> None:
    """Let all parts of a model start afresh."""
    for part in carrying_parts(model):
        part.reset()


@contextlib.contextmanager
def fresh_state(model: nn.Module) -> Iterator[None]:
    """Within it a model starts afresh; afterwards it carries what it did before."""
    parts = carrying_parts(model)
    earlier = [part.carried for part in parts]
    reset_carried(model)
    try:
        yield
    finally:
        for part, carried in zip(parts, earlier, strict=True):
            part.carried = carried


def in_turn(model: nn.Module, rows: Sequence[slice], *, num_rows: int) -> Iterator[slice]:
    """Let a model compute a batch in parts, each from its own rows of the state; afterwards it carries that of all.

    Args:
        model: Called with a part each time that its rows are given.
        rows: The parts, which together are the batch.
        num_rows: Of the batch.
    """
    parts = carrying_parts(model)
    before = [part.start(num_rows) or () for part in parts]
    after: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in parts]
    for each in rows:
        for part, states in zip(parts, before, strict=True):
            part.carried = tuple(state_LBH[:, each] for state_LBH in states)
        yield each
        for part, found in zip(parts, after, strict=True):
            found.append(part.carried)
    for part, found in zip(parts, after, strict=True):
        whole = []
        for states in zip(*found, strict=True):
            shape = (states[0].shape[0], num_rows, *states[0].shape[2:])
            state_LBH = states[0].new_empty(shape)
            for each, own_LBH in zip(rows, states, strict=True):
                state_LBH[:, each] = own_LBH
            whole.append(state_LBH)
        part.carried = tuple(whole)
