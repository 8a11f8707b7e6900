"""Writing a random recipe, operator by operator."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import torch
from fuzz_cell import Op, Sizes
from fuzz_operations import LEAVES, RUN
from hypothesis import strategies as st

ROWS: Final = 11
"""Rows of the tensors that shapes are found out with: a size that nothing else has."""
LARGEST: Final = 160
"""Elements of a row."""

Draw: TypeAlias = "Callable[[st.SearchStrategy[Any]], Any]"


@final
@dataclass(frozen=True, slots=True)
class Register:
    """What is known of a register: an example, and whether it has a row for each sequence."""

    example: Any
    has_rows: bool

    @property
    def is_tensor(self) -> bool:
        """Whether it is one tensor, not several."""
        return isinstance(self.example, torch.Tensor)

    @property
    def is_real(self) -> bool:
        """Whether it is one tensor of numbers, not of booleans."""
        return self.is_tensor and self.example.dtype == torch.float64

    @property
    def sizes(self) -> Sizes:
        """Sizes of a row."""
        return tuple(self.example.shape[1:] if self.has_rows else self.example.shape)


@final
class Writer:
    """Writes a recipe, keeping track of shapes.

    Args:
        draw: Of hypothesis.
        x: Sizes of a row of the input.
        states: Sizes of a row of each state.
        exotic: Whether operators are allowed that no code is generated for.
    """

    def __init__(self, draw: Draw, x: Sizes, states: tuple[Sizes, ...], *, exotic: bool) -> None:
        self.draw = draw
        self.exotic = exotic
        self.code: list[Op] = []
        self.used: set[int] = set()
        self.num_inputs = 1 + len(states)
        self.registers = [Register(torch.zeros(ROWS, *sizes, dtype=torch.float64), True) for sizes in (x, *states)]

    def __getitem__(self, index: int) -> Register:
        return self.registers[index]

    def add(self, name: str, *reads: int, settings: tuple[Any, ...] = ()) -> int:
        """Write an operator, and return its register."""
        given = [self.registers[read] for read in reads]
        if name in LEAVES:
            made = Register(torch.zeros(settings, dtype=torch.float64), False)
        else:
            example = RUN[name](*(register.example for register in given), *settings)
            made = Register(example, any(register.has_rows for register in given))
        self.used.update(reads)
        self.code.append(Op(name, reads, settings))
        self.registers.append(made)
        return len(self.registers) - 1

    def one_of(self, choices: Iterable[Any]) -> Any:
        """One of some choices; the first is the simplest."""
        return self.draw(st.sampled_from(list(choices)))

    def yes(self) -> bool:
        """By chance; no is simpler."""
        return bool(self.draw(st.booleans()))

    def number(self, low: int, high: int) -> int:
        """An integer, both ends included."""
        return int(self.draw(st.integers(low, high)))

    def pick(self, fits: Callable[[Register], bool]) -> int | None:
        """A register that fits, more often one that nothing has read yet."""
        found = [index for index, register in enumerate(self.registers) if register.is_tensor and fits(register)]
        fresh = [index for index in found if index not in self.used]
        return self.one_of(found + fresh * 3) if found else None

    def pick_rows(self, rank: int | None = None, *, sizes: Sizes | None = None) -> int | None:
        """Numbers of each row, of some rank or sizes."""

        def fits(register: Register) -> bool:
            if not (register.is_real and register.has_rows):
                return False
            return (rank is None or len(register.sizes) == rank) and (sizes is None or register.sizes == sizes)

        return self.pick(fits)

    def any_rows(self) -> int:
        """Numbers of each row."""
        found = self.pick_rows()
        assert found is not None
        return found

    def still(self, rank: int, **sizes_at: int) -> int | None:
        """Numbers that are the same for all rows, with sizes known in some dimensions: `d0=3`, `d1=4`."""

        def fits(register: Register) -> bool:
            if not register.is_real or register.has_rows or len(register.sizes) != rank:
                return False
            return all(register.sizes[int(at[1:])] == size for at, size in sizes_at.items())

        return self.pick(fits)

    def beside(self, index: int, *, flags: bool = False) -> int | None:
        """A register that can be combined with another one, element by element."""
        shape, rows = self[index].example.shape, self[index].has_rows

        def fits(other: Register) -> bool:
            rank = other.example.dim()
            if other.is_real == flags or (rows and other.has_rows and rank != len(shape)):
                return False
            if rows != other.has_rows and (rank > len(shape) if rows else len(shape) > rank):
                return False
            return go_together(shape, other.example.shape)

        return self.pick(fits)


def go_together(*shapes: torch.Size) -> bool:
    """Whether shapes can be broadcast to one that is not too large."""
    try:
        size: int = torch.broadcast_shapes(*shapes).numel()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return size <= LARGEST * ROWS
