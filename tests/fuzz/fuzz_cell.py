"""A random cell as data, which prints as something that can be pasted, and the cell that runs it.

A recipe is a short list of operators on registers.
Register 0 is the input of the step, the next ones are the states; every operator writes one register more.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, final

import torch
from fuzz_operations import LEAVES, RUN, leaf
from torch import nn

import stretto
from stretto.state import flatten

Sizes: TypeAlias = tuple[int, ...]
Nesting: TypeAlias = Literal["bare", "flat", "nested"]
Initial: TypeAlias = Literal["zeros", "learned"]


@final
@dataclass(frozen=True, slots=True)
class Op:
    """One operator: its name in `fuzz_operations.RUN`, the registers it reads, and its other arguments."""

    name: str
    reads: tuple[int, ...] = ()
    settings: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        arguments = [repr(self.name), *([repr(self.reads)] if self.reads or self.settings else [])]
        return f"Op({', '.join([*arguments, *([repr(self.settings)] if self.settings else [])])})"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A cell.

    Attributes:
        x: Sizes of a row of the input.
        states: Sizes of a row of each state.
        code: Operators.
        after: Registers that become the states.
        y: Register of the output.
        nesting: Whether the state is a tensor, a tuple, or a tuple in a tuple.
        initial: Whether the cell starts from zeros or from parameters.
    """

    x: Sizes
    states: tuple[Sizes, ...]
    code: tuple[Op, ...]
    after: tuple[int, ...]
    y: int
    nesting: Nesting = "flat"
    initial: Initial = "zeros"

    @property
    def first(self) -> int:
        """Register of the first operator."""
        return 1 + len(self.states)

    def pruned(self) -> "Recipe":
        """The same cell without operators that nothing reads."""
        wanted = {self.y, *self.after}
        for register in range(self.first + len(self.code) - 1, self.first - 1, -1):
            if register in wanted:
                wanted.update(self.code[register - self.first].reads)
        kept = [index for index in range(len(self.code)) if index + self.first in wanted]
        place = {register: register for register in range(self.first)}
        place |= {index + self.first: position + self.first for position, index in enumerate(kept)}
        code = tuple(
            replace(self.code[index], reads=tuple(place[register] for register in self.code[index].reads))
            for index in kept
        )
        return replace(self, code=code, after=tuple(place[register] for register in self.after), y=place[self.y])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch for a cell.

    Attributes:
        lengths: Steps of each sequence.
        padding: Steps of the batch beyond the longest sequence.
        given_state: Whether the initial state is given, and has a gradient; otherwise it is the cell's own.
        x_learns: Whether the input has a gradient.
        loss_on: What the loss reads: "y", "last" states, or "both"; or the number of a single state.
        strided: Whether the input and the given state lie scattered in memory.
        packed: Whether the batch is given as a PackedSequence, if no sequence is empty.
        weighted: Whether the loss weighs every element differently; otherwise it is a plain sum.
        resets: Share of the steps before which a sequence is reset.
        seed: Of all random numbers.
    """

    lengths: tuple[int, ...]
    padding: int = 0
    given_state: bool = True
    x_learns: bool = True
    loss_on: "Literal['y', 'last', 'both'] | int" = "both"
    strided: bool = False
    packed: bool = False
    weighted: bool = True
    resets: float = 0.0
    seed: int = 0

    @property
    def num_steps(self) -> int:
        """Steps of the padded batch."""
        return max(self.lengths) + self.padding


def run_code(recipe: Recipe, leaves: list[torch.Tensor | None], registers: list[Any]) -> list[Any]:
    """All registers after the operators of a recipe, from the first ones and what the cell owns."""
    for op, own in zip(recipe.code, leaves, strict=True):
        given = (registers[read] for read in op.reads)
        registers.append(RUN[op.name](*given, *op.settings) if own is None else own)
    return registers


@final
class FuzzCell(stretto.Cell):
    """Runs the operators of a recipe, one after another; `seed` decides its parameters."""

    def __init__(self, recipe: Recipe, *, seed: int = 0) -> None:
        super().__init__()
        self.recipe = recipe
        generator = torch.Generator().manual_seed(seed)
        for index, op in enumerate(recipe.code):
            if op.name in LEAVES:
                tensor = leaf(op.name, op.settings, generator)
                if op.name == "buffer":
                    self.register_buffer(f"r{recipe.first + index}", tensor)
                else:
                    setattr(self, f"r{recipe.first + index}", tensor)
        if recipe.initial == "learned":
            for index, sizes in enumerate(recipe.states):
                values = torch.randn(1, *sizes, dtype=torch.float64, generator=generator)
                setattr(self, f"start{index}", nn.Parameter(0.5 * values))

    def initial_state(self, batch_size: int) -> Any:
        """Zeros, or learnt rows."""
        return self.nested(self.start(batch_size))

    def start(self, batch_size: int) -> list[torch.Tensor]:
        """The parts of the initial state."""
        if self.recipe.initial == "learned":
            return [getattr(self, f"start{i}").expand(batch_size, *s) for i, s in enumerate(self.recipe.states)]
        return [torch.zeros(batch_size, *sizes, dtype=torch.float64) for sizes in self.recipe.states]

    def leaves(self) -> list[torch.Tensor | None]:
        """What the cell owns, beside the operators."""
        first = self.recipe.first
        return [
            getattr(self, f"r{first + index}") if op.name in LEAVES else None
            for index, op in enumerate(self.recipe.code)
        ]

    def nested(self, parts: list[torch.Tensor]) -> Any:
        """Parts of a state in the structure the recipe asks for."""
        if self.recipe.nesting == "bare":
            return parts[0]
        return tuple(parts) if self.recipe.nesting == "flat" else (tuple(parts[:1]), tuple(parts[1:]))

    def forward(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        """One step."""
        registers = run_code(self.recipe, self.leaves(), [x_t, *flatten(state)])
        return registers[self.recipe.y], self.nested([registers[after] for after in self.recipe.after])
