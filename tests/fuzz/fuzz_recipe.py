"""A random cell as data: a short list of operators on registers, which prints as something that can be pasted.

Register 0 is the input of the step, the next ones are the states; every operator writes one register more.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, final

Sizes: TypeAlias = tuple[int, ...]
Nesting: TypeAlias = Literal["bare", "flat", "nested"]
Initial: TypeAlias = Literal["zeros", "learnt"]


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
    seed: int = 0

    @property
    def num_steps(self) -> int:
        """Steps of the padded batch."""
        return max(self.lengths) + self.padding
