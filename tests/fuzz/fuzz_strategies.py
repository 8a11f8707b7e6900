"""Random cells and batches for hypothesis."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import torch
from fuzz_operations import (
    BINARY,
    COMPARISON,
    EXOTIC_BINARY,
    EXOTIC_REDUCTION,
    EXOTIC_UNARY,
    LEAVES,
    OVER,
    REDUCTION,
    RUN,
    UNARY,
    WITH_NUMBER,
)
from fuzz_recipe import Case, Op, Recipe, Sizes
from hypothesis import strategies as st

ROWS: Final = 11
"""Rows of the tensors that shapes are found out with: a size that nothing else has."""
LARGEST: Final = 160
"""Elements of a row."""
WIDTHS: Final = (3, 1, 2, 4, 5, 7, 8, 9, 17, 35)
NUMBERS: Final = (0.5, -0.3, 1.0, 2.0, 0.0, 0.1)

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
        """Whether it is one tensor of numbers, not of truth values."""
        return self.is_tensor and self.example.dtype == torch.float64

    @property
    def sizes(self) -> Sizes:
        """Sizes of a row."""
        return tuple(self.example.shape[1:] if self.has_rows else self.example.shape)


@final
class Writer:
    """Writes a recipe operator by operator, keeping track of shapes."""

    def __init__(self, draw: Draw, x: Sizes, states: tuple[Sizes, ...], *, exotic: bool) -> None:
        self.draw = draw
        self.exotic = exotic
        self.code: list[Op] = []
        self.registers = [Register(torch.zeros(ROWS, *sizes, dtype=torch.float64), True) for sizes in (x, *states)]

    def add(self, name: str, *reads: int, settings: tuple[Any, ...] = ()) -> int:
        """Write an operator, and return its register."""
        given = [self.registers[read] for read in reads]
        if name in LEAVES:
            made = Register(torch.zeros(settings, dtype=torch.float64), False)
        else:
            example = RUN[name](*(register.example for register in given), *settings)
            made = Register(example, any(register.has_rows for register in given))
        self.code.append(Op(name, reads, settings))
        self.registers.append(made)
        return len(self.registers) - 1

    def one_of(self, choices: Any) -> Any:
        """One of some choices, the first where it makes no difference."""
        return self.draw(st.sampled_from(list(choices)))

    def find(self, fits: Callable[[Register], bool]) -> list[int]:
        """Registers that fit; the latest are there several times."""
        found = [index for index, register in enumerate(self.registers) if register.is_tensor and fits(register)]
        return found + [index for index in found[-4:] for _ in range(2)]

    def pick(self, fits: Callable[[Register], bool]) -> int | None:
        """A register that fits."""
        found = self.find(fits)
        return self.one_of(found) if found else None

    def pick_rows(self, rank: int | None = None) -> int:
        """Numbers of each row, of some rank."""
        found = self.pick(lambda r: r.is_real and r.has_rows and (rank is None or len(r.sizes) == rank))
        return 0 if found is None else found

    def beside(self, index: int, *, flags: bool = False) -> int | None:
        """A register that can be combined with another one, element by element."""
        shape = self.registers[index].example.shape
        rows = self.registers[index].has_rows

        def fits(other: Register) -> bool:
            if other.is_real == flags or (other.has_rows and rows and other.example.dim() != len(shape)):
                return False
            if rows != other.has_rows and (other.example.dim() > len(shape) if rows else len(shape) > other.example.dim()):
                return False
            try:
                together = torch.broadcast_shapes(shape, other.example.shape)
            except RuntimeError:
                return False
            return torch.Size(together).numel() <= LARGEST * ROWS

        return self.pick(fits)


def _unary(w: Writer) -> None:
    w.add(w.one_of([*UNARY, *(EXOTIC_UNARY if w.exotic else ())]), w.pick_rows())


def _on_a_weight(w: Writer) -> None:
    still = w.pick(lambda r: r.is_real and not r.has_rows)
    if still is not None:
        w.add(w.one_of(("tanh", "times_itself", "sigmoid", "relu", "detach")[::2]), still)


def _number(w: Writer) -> None:
    w.add(w.one_of(WITH_NUMBER), w.pick_rows(), settings=(w.one_of(NUMBERS),))


def _binary(w: Writer) -> None:
    one = w.pick_rows()
    other = w.beside(one)
    pair = (one, one if other is None else other)
    w.add(w.one_of([*BINARY, *(EXOTIC_BINARY if w.exotic else ())]), *(pair if w.draw(st.booleans()) else pair[::-1]))


def _with_parameter(w: Writer) -> None:
    one = w.pick_rows()
    sizes = w.registers[one].sizes
    shape = w.one_of([sizes[-1:], (), sizes, (1, *sizes), (*sizes[:-1], 1)[-len(sizes) :]])
    w.add(w.one_of(("mul", "add", "sub", "maximum", "gate")), one, w.add(w.one_of(LEAVES), settings=tuple(shape)))


def _compare(w: Writer) -> None:
    one = w.pick_rows()
    name = w.one_of(COMPARISON)
    other = w.beside(one)
    if other is None or w.draw(st.booleans()):
        w.add(name, one, settings=(w.one_of(NUMBERS),))
    else:
        w.add(name, one, other)


def _choose(w: Writer) -> None:
    one = w.pick_rows()
    flag = w.beside(one, flags=True)
    if flag is None:
        flag = w.add("gt", one, settings=(w.one_of(NUMBERS),))
    name = w.one_of(("where_number", "where", "masked_fill", "masked", "to_real", "not", "and", "or"))
    if name in {"where_number", "masked_fill"}:
        w.add(name, flag, one, settings=(w.one_of(NUMBERS),))
    elif name in {"to_real", "not"}:
        w.add(name, flag)
    elif name == "masked":
        w.add(name, flag, one)
    elif name in {"and", "or"}:
        other = w.beside(flag, flags=True)
        w.add(name, flag, flag if other is None else other)
    else:
        other = w.beside(one)
        w.add(name, flag, one, one if other is None else other)


def _three(w: Writer) -> None:
    one = w.pick_rows()
    second, third = w.beside(one), w.beside(one)
    if second is not None and third is not None:
        examples = [w.registers[index].example for index in (one, second, third)]
        if torch.broadcast_shapes(*(example.shape for example in examples)) == examples[0].shape:
            w.add(w.one_of(("lerp", "addcmul")), one, second, third)


def _linear(w: Writer) -> None:
    one = w.pick_rows()
    if not w.registers[one].sizes:
        one = w.add("unsqueeze", one, settings=(1,))
    width = w.registers[one].sizes[-1]
    weight = w.pick(lambda r: r.is_real and not r.has_rows and len(r.sizes) == 2 and r.sizes[1] == width)
    if weight is None or w.draw(st.booleans()):
        weight = w.add("parameter", settings=(w.one_of((*WIDTHS, 12, 24)), width))
    out = w.registers[weight].sizes[0]
    many = w.registers[one].example.numel() // ROWS // width
    if many * out > LARGEST:
        return
    if w.draw(st.booleans()):
        w.add("linear", one, weight)
    else:
        bias = w.pick(lambda r: r.is_real and not r.has_rows and r.sizes == (out,))
        w.add("linear", one, weight, w.add("parameter", settings=(out,)) if bias is None else bias)


def _matmul(w: Writer) -> None:
    one = w.pick_rows(1)
    width = w.registers[one].sizes[-1:]
    weight = w.pick(lambda r: r.is_real and not r.has_rows and len(r.sizes) == 2 and r.sizes[:1] == width)
    if width and weight is not None:
        w.add("matmul", one, weight)


def _join(w: Writer) -> None:
    one = w.pick_rows()
    sizes = w.registers[one].sizes
    if not sizes:
        return
    axis = w.draw(st.integers(0, len(sizes) - 1))

    def fits(r: Register) -> bool:
        same = len(r.sizes) == len(sizes) and all(a == b for d, (a, b) in enumerate(zip(r.sizes, sizes, strict=True)) if d != axis)
        return r.is_real and r.has_rows and same

    found = [one, *(w.one_of(w.find(fits)) for _ in range(w.draw(st.integers(1, 3))))]
    if sum(w.registers[index].example.numel() for index in found) <= LARGEST * ROWS:
        w.add("cat", *found, settings=(axis + 1 if w.draw(st.booleans()) else axis - len(sizes),))


def _stack(w: Writer) -> None:
    one = w.pick_rows()
    sizes = w.registers[one].sizes
    other = w.pick(lambda r: r.is_real and r.has_rows and r.sizes == sizes)
    if other is not None and len(sizes) < 3 and w.registers[one].example.numel() * 2 <= LARGEST * ROWS:
        w.add("stack", one, other, settings=(w.draw(st.integers(1, len(sizes) + 1)),))


