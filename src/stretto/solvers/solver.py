"""What a solver is: it finds the states of a chain of steps, and says how.

Shape legend: B sequences, P real steps of all sequences, F features.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

import torch

from stretto.kernels import Layout, PlainProgram, Program, run_together
from stretto.solvers.variants import Variants


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """One direction of one layer over a batch.

    Attributes:
        program: Runs the cell.
        layout: Where each step of each sequence lies.
        x_PF: The input's rows.
        states: Initial states (B, ...), sequences sorted as in `layout`.
        parameters: Parameters and buffers of the cell by name.
        variants: Other steps made of the cell.
        sample_ids: What each sequence is known by, sorted as in `layout`; None if they are not known.
        name: Tells the chains of one layer stack apart.
        backwards: Whether it reads each sequence from its end; `x_PF` is turned round already.
    """

    program: Program | PlainProgram
    layout: Layout
    x_PF: torch.Tensor
    states: Sequence[torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    variants: Variants
    sample_ids: tuple[int, ...] | None = None
    name: str = ""
    backwards: bool = False

    def run(self, layout: Layout, x_PF: torch.Tensor, states: Sequence[torch.Tensor]) -> "Walked":
        """Walk step after step, over other rows and from other states than the chain's own."""
        ((y_PF, finals),) = run_together([self.program.parts(layout, x_PF, states, self.parameters)])
        return Walked(y_PF=y_PF, states=list(finals))


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """Outputs of all rows (P, ...), and the states after each sequence's last step (B, ...)."""

    y_PF: torch.Tensor
    states: list[torch.Tensor]


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class Solution:
    """How the states of a chain were found.

    Attributes:
        solver: By which method.
        iterations: Passes over the whole sequence; 1 is step after step.
        residual: The largest mismatch that is left between the end of one stretch of time and the start of the next,
            relative to states above 1; 0 where there is none by construction.
        backward_iterations: The same for the gradient, of the last backward pass; None before there was one.
        backward_residual: What is left there, relative to the largest.
        fell_back: Whether the states were found step after step in the end.
        reason: Why, or what was chosen.
        work: Steps that were walked, over those that there are.
    """

    solver: str
    iterations: int = 1
    residual: float = 0.0
    backward_iterations: int | None = None
    backward_residual: float | None = None
    fell_back: bool = False
    reason: str = ""
    work: float = 1.0


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What was found, and how."""

    walked: Walked
    solution: Solution


class AbstractSolver(ABC):
    """Finds the states of a chain of steps."""

    @abstractmethod
    def solve(self, chain: Chain) -> Solved:
        """Outputs and final states, through which gradients flow to inputs, initial states and parameters."""
