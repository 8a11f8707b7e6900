"""How far each rank of a relay walks, found by one process: all blocks of time side by side, as rows of a batch.

It does what `stretto.solvers.ranks.relay` does, round by round and piece by piece, and counts; nothing is sent. What it
counts depends on the net and its input, and on no clock.

Shape legend: R ranks, each with a block of time; N steps of a block, F features, H hidden units, K pieces of a block.
"""

import copy
import dataclasses
from typing import Final, final

import torch

from stretto.cells import GRU
from stretto.nn import RNN
from stretto.solvers import PIECE

TOLERANCE: Final = 1e-6


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The longest way that a rank walks in a round.

    Attributes:
        steps: Time steps.
        pieces: In so many pieces.
    """

    steps: int
    pieces: int


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Relayed:
    """What a relay over so many ranks has to do.

    Attributes:
        ranks: R.
        num_steps: T, of all blocks.
        ahead: Rounds forwards.
        back: Rounds backwards.
    """

    ranks: int
    num_steps: int
    ahead: tuple[Round, ...]
    back: tuple[Round, ...]

    @property
    def block(self) -> int:
        """Steps of a block."""
        return self.num_steps // self.ranks

    @property
    def work(self) -> float:
        """Steps that the busiest rank walks forwards, over those of its block."""
        return sum(one.steps for one in self.ahead) / self.block

    @property
    def work_back(self) -> float:
        """The same backwards."""
        return sum(one.steps for one in self.back) / self.block


def relayed(
    cell: GRU,
    x_TF: torch.Tensor,
    weight_TH: torch.Tensor,
    *,
    ranks: int,
    tolerance: float = TOLERANCE,
    piece: int = PIECE,
) -> Relayed:
    """Count what ranks would walk.

    Args:
        cell: The net.
        x_TF: Input; ranks must divide its steps.
        weight_TH: What each output counts in the loss.
        ranks: How many, from 1 on.
        tolerance: Of the relay.
        piece: Of the relay.
    """
    simulation = _Simulation(cell, x_TF, weight_TH, ranks=ranks, tolerance=tolerance, piece=piece)
    ahead = simulation.walk()
    return Relayed(ranks=ranks, num_steps=len(x_TF), ahead=tuple(ahead), back=tuple(simulation.back()))


@final
class _Simulation:
    def __init__(
        self, cell: GRU, x_TF: torch.Tensor, weight_TH: torch.Tensor, *, ranks: int, tolerance: float, piece: int
    ) -> None:
        self._rnn = RNN(copy.deepcopy(cell)).requires_grad_(False)
        self._tolerance = tolerance
        self._ranks, self._block = ranks, len(x_TF) // ranks
        self._x_RNF = x_TF.reshape(ranks, self._block, -1)
        self._weight_RNH = weight_TH.reshape(ranks, self._block, -1)
        self._bounds = [(first, min(first + piece, self._block)) for first in range(0, self._block, piece)]
        first_RH = torch.zeros(ranks, cell.hidden_size)
        self._starts_KRH = [first_RH.clone() for _ in self._bounds]
        self._ends_RH = first_RH.clone()
        self._initial_RH = first_RH

    def walk(self) -> list[Round]:
        """Rounds until blocks agree."""
        now_RH = self._initial_RH
        found = [self._walk(now_RH, known=False)]
        while len(found) < self._ranks:
            arrived_RH = torch.cat([now_RH[:1], self._ends_RH[:-1]])
            if bool((_gap(arrived_RH, now_RH) <= self._tolerance).all()):
                break
            now_RH = arrived_RH
            found.append(self._walk(now_RH, known=True))
        return found

    def _walk(self, starts_RH: torch.Tensor, *, known: bool) -> Round:
        """Each block from these states, until it meets the walk before."""
        now_RH, going_R = starts_RH, torch.ones(self._ranks, dtype=torch.bool)
        steps = pieces = 0
        for number, (first, last) in enumerate(self._bounds):
            if known:
                going_R = going_R & (_gap(now_RH, self._starts_KRH[number]) > self._tolerance)
                if not bool(going_R.any()):
                    return Round(steps=steps, pieces=pieces)
            self._starts_KRH[number][going_R] = now_RH[going_R]
            with torch.no_grad():
                now_RH = self._rnn(self._x_RNF[:, first:last], now_RH)[1]
            steps, pieces = last, pieces + 1
        self._ends_RH[going_R] = now_RH[going_R]
        return Round(steps=steps, pieces=pieces)

    def back(self) -> list[Round]:
        """Rounds until no gradient moves on from block to block."""
        moving_RH = torch.zeros_like(self._initial_RH)
        walked, moving_RH = self._back(moving_RH, negligible=None)
        found, sums_RH = [walked], moving_RH.clone()
        while len(found) < self._ranks:
            late_RH = torch.cat([moving_RH[1:], torch.zeros_like(moving_RH[:1])])
            largest = float(sums_RH.abs().max())
            if float(late_RH.abs().max()) <= self._tolerance * largest:
                break
            walked, moving_RH = self._back(late_RH, negligible=self._tolerance * largest)
            sums_RH += moving_RH
            found.append(walked)
        return found

    def _back(self, d_ends_RH: torch.Tensor, *, negligible: float | None) -> tuple[Round, torch.Tensor]:
        """Gradients of the states before each block: of outputs too, or of what arrives late, as far as it is felt."""
        carried_RH, going_R = d_ends_RH, torch.ones(self._ranks, dtype=torch.bool)
        steps = pieces = 0
        for number in range(len(self._bounds) - 1, -1, -1):
            first, last = self._bounds[number]
            if negligible is not None:
                going_R = going_R & (carried_RH.abs().amax(dim=1) > negligible)
                carried_RH = torch.where(going_R[:, None], carried_RH, 0.0)
                if not bool(going_R.any()):
                    break
            start_RH = self._starts_KRH[number].detach().requires_grad_()
            y_RNH, end_RH = self._rnn(self._x_RNF[:, first:last], start_RH)
            made = [(end_RH, carried_RH)]
            if negligible is None:
                made.append((y_RNH, self._weight_RNH[:, first:last]))
            (carried_RH,) = torch.autograd.grad(
                [tensor for tensor, _ in made], [start_RH], [gradient for _, gradient in made]
            )
            steps, pieces = self._block - first, pieces + 1
        return Round(steps=steps, pieces=pieces), carried_RH


def _gap(arrived_RH: torch.Tensor, assumed_RH: torch.Tensor) -> torch.Tensor:
    """The largest difference of each row, relative to states above 1."""
    return ((arrived_RH - assumed_RH).abs() / arrived_RH.abs().clamp(min=1.0)).amax(dim=1)
