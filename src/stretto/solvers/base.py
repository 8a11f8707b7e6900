"""What a solver is given, what it returns, and the simplest one.

A recurrent layer is a recurrence over time,

    h_t = cell(x_t, h_{t-1}),     t = 1 ... T,     h_0 given,

and a solver finds its states. `Serial` takes one step at a time. Every other solver splits time into chunks and runs
them in parallel, each from a guess of the state before it. What is left where chunks meet is the residual: a result is
exact up to it, and `Solution` reports it. A solver that does not converge falls back to the sequential run.

To write a solver, subclass `AbstractSolver` and return a `Result` from `solve`.

Shape legend: B sequences, C chunks or other rows of states, P real steps of all sequences, F features.
"""

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias, final

import torch
from torch import nn

from stretto.kernels import LayerCall, Layout, Program, run_by_torch, run_together

Builder: TypeAlias = Callable[[nn.Module, tuple[int, ...], torch.dtype], Program]
"""Compiles a step, once per module: from the module, the shape of a row of its input, and the input's dtype."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CellVariants:
    """Builds and runs other steps made from a cell: its coarse step, or its step with the gates as output."""

    cell: nn.Module
    build: Builder
    modules: dict[str, nn.Module]
    """Those made so far, by name."""

    def run(
        self,
        name: str,
        make: Callable[[nn.Module], nn.Module],
        layout: Layout,
        x_PF: torch.Tensor,
        states: Sequence[torch.Tensor],
        *,
        parameters: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the variant of this name sequentially; `parameters` are the cell's, by their names in the cell.

        It is made if it is missing or was made from another cell. It keeps the cell as its attribute `cell`, and its
        states have the structure of the cell's.
        """
        module = self.modules.get(name)
        if module is None or module.cell is not self.cell:
            module = self.modules[name] = make(self.cell)
        program = self.build(module, tuple(x_PF.shape[1:]), x_PF.dtype)
        named = {f"cell.{name}": tensor for name, tensor in parameters.items()}
        ((y_PF, finals),) = run_together([LayerCall(program, layout, x_PF, states, named)])
        return y_PF, list(finals)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One direction of one layer over a batch.

    Attributes:
        program: Runs the cell.
        layout: Where each step of each sequence lies.
        x_PF: The rows of the input.
        states: Initial states (B, ...), sequences sorted as in `layout`.
        parameters: Parameters and buffers of the cell by name.
        variants: Other steps made from the cell.
        sample_ids: The id of each sequence, sorted as in `layout`; None if there are none.
        name: Identifies the layer and direction within a stack.
        reverse: Whether this direction reads each sequence from its end; `x_PF` is already reversed.
    """

    program: Program
    layout: Layout
    x_PF: torch.Tensor
    states: Sequence[torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    variants: CellVariants
    sample_ids: tuple[int, ...] | None = None
    name: str = ""
    reverse: bool = False

    def run(
        self, layout: Layout, x_PF: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the cell sequentially, over any rows and from any states.

        Returns:
            Outputs of all rows (P, ...), and the states after each sequence's last step (B, ...).
        """
        ((y_PF, finals),) = run_together([LayerCall(self.program, layout, x_PF, states, self.parameters)])
        return y_PF, list(finals)

    def run_all(self, *, by_torch: bool = False) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the whole problem sequentially; with `by_torch`, by torch's operators alone."""
        if by_torch:
            return run_by_torch(LayerCall(self.program, self.layout, self.x_PF, self.states, self.parameters))
        return self.run(self.layout, self.x_PF, self.states)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """All that gradients may be asked for: the rows of the input, the states, then the parameters."""
        return [self.x_PF, *self.states, *self.parameters.values()]

    def with_inputs(self, tensors: Sequence[torch.Tensor]) -> "Problem":
        """The same with other tensors, in the order of `inputs`."""
        end = 1 + len(self.states)
        parameters = dict(zip(self.parameters, tensors[end:], strict=True))
        return dataclasses.replace(self, x_PF=tensors[0], states=tensors[1:end], parameters=parameters)

    def as_leaves(self) -> "Problem":
        """The same, detached: leaves of a new autograd graph, which require a gradient where one is asked for."""
        is_enabled = torch.is_grad_enabled()
        return self.with_inputs([t.detach().requires_grad_(is_enabled and t.requires_grad) for t in self.inputs])


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class Solution:
    """How the states were found.

    Attributes:
        solver: The method.
        iterations: Passes over the whole sequence; 1 for a sequential run.
        residual: The largest difference left between the end of one chunk and the start of the next, relative to
            states above 1. 0 where there is none by construction.
        backward_iterations: The same for the gradient, of the last backward pass; None before there was one.
        backward_residual: What is left there, relative to the largest gradient.
        fell_back: Whether the states were found sequentially in the end.
        reason: Why, or what was chosen.
        work: Steps computed, as a multiple of the steps there are.
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
class Result:
    """Outputs of all rows (P, ...), the states after each sequence (B, ...), and how they were found."""

    y_PF: torch.Tensor
    states: list[torch.Tensor]
    solution: Solution


class AbstractSolver(ABC):
    """Finds the states of a recurrence."""

    @abstractmethod
    def solve(self, problem: Problem) -> Result:
        """Outputs and final states, through which gradients flow to inputs, initial states and parameters."""

    def __repr__(self) -> str:
        """The arguments that differ from their defaults."""
        defaults = {name: given.default for name, given in inspect.signature(type(self)).parameters.items()}
        changed = [
            f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name, value) != value
        ]
        return f"{type(self).__name__}({', '.join(changed)})"


@final
class Serial(AbstractSolver):
    """Takes one step at a time: what every other solver is compared with, and falls back to."""

    def solve(self, problem: Problem) -> Result:
        """One run through all steps."""
        return run_sequentially(problem, Solution(solver="serial"))


def run_sequentially(problem: Problem, solution: Solution) -> Result:
    """One run through all steps."""
    y_PF, states = problem.run_all()
    return Result(y_PF=y_PF, states=states, solution=solution)


def fall_back(problem: Problem, *, solver: str, reason: str, iterations: int = 0, work: float = 0.0) -> Result:
    """A sequential run, after `iterations` of another solver that cost `work`."""
    solution = Solution(solver=solver, iterations=iterations + 1, fell_back=True, reason=reason, work=work + 1.0)
    return run_sequentially(problem, solution)


def why_incomparable(problem: Problem) -> str:
    """Why iterates cannot be compared, so that only a sequential run is right; empty if they can."""
    return "the tensors are on meta, and have no values to compare" if problem.x_PF.is_meta else ""


def residual_norm(
    new: Sequence[torch.Tensor],
    old: Sequence[torch.Tensor],
    *,
    rows_C: torch.Tensor | None = None,
    kind: Literal["state", "gradient"] = "state",
) -> float:
    """The largest difference between two iterates, the parts of states or of their gradients (C, ...).

    States are measured part by part, relative to the part's largest value if that is above 1. Parts that are not
    floating point must be equal: any difference counts as 1. Gradients are measured relative to the largest of all
    parts, whatever its size. `new` sets the scale. Only the rows of the mask `rows_C` count. The norm is NaN if any
    difference is NaN or inf.
    """
    if rows_C is not None:
        new, old = ([part[rows_C.to(part.device)] for part in parts] for parts in (new, old))
    changes, scales, worst = [], [], 0.0
    for one, other in zip(new, old, strict=True):
        if not one.numel():
            continue
        if one.is_floating_point():
            changes.append(float((one - other).abs().max()))
            scales.append(float(one.abs().max()))
        elif kind == "state" and not torch.equal(one, other):
            worst = 1.0
    if not all(map(math.isfinite, changes)):
        return math.nan
    if kind == "gradient":
        largest = max(scales, default=0.0)
        return max(changes, default=0.0) / (largest or 1.0)
    return max([worst, *(change / max(1.0, scale) for change, scale in zip(changes, scales, strict=True))])


def is_finite(parts: Sequence[torch.Tensor]) -> bool:
    """Whether no part of a state is NaN or inf anywhere."""
    return all(bool(part.isfinite().all()) for part in parts)


def format_count(number: int, noun: str) -> str:
    """A number with its noun: "1 cycle", "2 cycles"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def has_halved(values: Sequence[float], *, within: int) -> bool:
    """Whether the lowest of the last values is below half of the lowest before; true while there are too few."""
    early, late = values[:-within], values[-within:]
    return not early or min(late) < min(early) / 2
