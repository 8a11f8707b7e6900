"""Which tensors look at the same memory, so that writes in place become new values.

A memory has a base, the tensor that was made with it; every other tensor of it is a view, with the operators that lead
to it from the base. A write is kept as the view it went to and the new value. Who reads another view later gets

    the same node as before       if no write since then reached its elements
    the new value                 if the last write that did was to exactly its elements
    a view of the base            with all writes put into it, otherwise

    m = zeros(B, 3)               base                                zeros
    m[:, 0] = h                   view: select(1, 0)                  write: h
    m * 2                         reads all of m                      cat(h, zeros[:, 1:]) * 2

Views of a part are put back by concatenation, so that a read of another part does not depend on them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from stretto.graph.node import Node

aten = torch.ops.aten
Step = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An operator that makes a view, with its arguments but the first."""
SAME: Final = frozenset({"alias", "detach", "lift_fresh", "_conj_physical", "contiguous"})
_RESHAPES: Final = frozenset({"view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "expand"})


class CannotPut(Exception):  # noqa: N818 - becomes the reason why a step is not traced
    """A view cannot be put back into what it is a view of; the message names its operator."""


@dataclass(eq=False, slots=True)
class View:
    """How a tensor looks at a memory."""

    memory: "Memory"
    steps: tuple[Step, ...] = ()
    seen: int = 0  # writes of its memory that its node knows

    def goes_through(self, name: str) -> bool:
        """Whether one of the operators on the way has this name."""
        return any(func.overloadpacket.__name__ == name for func, _, _ in self.steps)


@dataclass(eq=False, slots=True)
class Write:
    """New contents of a part of a memory."""

    place: tuple[Any, ...]
    steps: tuple[Step, ...]
    value: torch.Tensor  # a separate tensor, which nothing writes to


@dataclass(eq=False, slots=True)
class Memory:
    """What several tensors may look at."""

    root: torch.Tensor
    node: Node  # of the root before all writes
    owner: str = ""  # whose it is, in words, if it was not made by the step
    writes: list[Write] = field(default_factory=list)
    base: torch.Tensor | None = None  # the contents after the first `applied` writes, as a separate tensor
    applied: int = 0


def key_of(tensor: torch.Tensor) -> int:
    """Of the memory a tensor looks at; it holds as long as the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which elements of its memory a tensor is."""
    return tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def overlap(memory: Memory, one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two places have an element in common."""
    if one[0] != other[0] or one[0] != memory.root.dtype:
        return True
    size = memory.root.untyped_storage().nbytes() // memory.root.element_size()
    found = []
    for _, offset, shape, stride in (one, other):
        mask = torch.zeros(size, dtype=torch.bool)
        mask.as_strided(shape, stride, offset).fill_(True)
        found.append(mask)
    return bool((found[0] & found[1]).any())


def steps_to(func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Any]) -> list[Step]:
    """The operator that leads to each result of a view; the parts of a split are slices."""
    name = func.overloadpacket.__name__
    rest = args[1:]
    if len(results) == 1 and name not in {"split", "split_with_sizes", "unsafe_split", "unbind"}:
        return [(func, tuple(rest), kwargs)]
    if name == "unbind":
        dimension = rest[0] if rest else kwargs.get("dim", 0)
        return [(aten.select.int, (dimension, index), {}) for index in range(len(results))]
    if name.removeprefix("unsafe_") not in {"split", "split_with_sizes"}:
        return [(func, tuple(rest), kwargs) for _ in results]
    dimension = rest[1] if len(rest) > 1 else kwargs.get("dim", 0)
    steps: list[Step] = []
    start = 0
    for part in results:
        size = part.shape[dimension]
        steps.append((aten.slice.Tensor, (dimension, start, start + size), {}))
        start += size
    return steps


def look_through(value: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
    """The view that `steps` lead to."""
    for func, args, kwargs in steps:
        value = func(value, *args, **kwargs)
    return value


def put(base: torch.Tensor, steps: Sequence[Step], value: torch.Tensor) -> torch.Tensor:
    """`base` with `value` in the place of the view that `steps` lead to.

    Raises:
        CannotPut: A view that this cannot be done for.
    """
    if not steps:
        return value
    func, args, kwargs = steps[0]
    inner = func(base, *args, **kwargs)
    value = put(inner, steps[1:], value)
    name = func.overloadpacket.__name__
    if name in _UNDO:
        return _UNDO[name](base, value, *args, **kwargs)
    if name in SAME:
        return value
    if name in _RESHAPES and value.numel() == base.numel():
        flat = aten.clone.default(value, memory_format=torch.contiguous_format)
        return aten.view.default(flat, list(base.shape))  # type: ignore[no-any-return]
    raise CannotPut(name)


def _put_permuted(base: torch.Tensor, value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    order = [d % base.dim() for d in order]
    return aten.permute.default(value, [order.index(d) for d in range(base.dim())])  # type: ignore[no-any-return]


def _put_transposed(base: torch.Tensor, value: torch.Tensor, one: int = 0, other: int = 1) -> torch.Tensor:
    return value if base.dim() < 2 else value.transpose(one, other)


def _put_slice(  # noqa: PLR0917 - torch's own signature
    base: torch.Tensor, value: torch.Tensor, dim: int = 0, start: int | None = 0, end: int | None = None, step: int = 1
) -> torch.Tensor:
    dim %= base.dim()
    size = base.shape[dim]
    indices = range(*slice(start, end, step).indices(size))
    if len(indices) == size:
        return value
    if not indices:
        return base
    if step == 1:
        return _joined(base, dim, [(indices.start, value)], indices.stop)
    each = [(index, aten.slice.Tensor(value, dim, n, n + 1)) for n, index in enumerate(indices)]
    return _joined(base, dim, each, indices[-1] + 1)


def _put_select(base: torch.Tensor, value: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    dim %= base.dim()
    index %= base.shape[dim]
    return _joined(base, dim, [(index, aten.unsqueeze.default(value, dim))], index + 1)


def _joined(base: torch.Tensor, dim: int, parts: list[tuple[int, torch.Tensor]], end: int) -> torch.Tensor:
    """`base` with new parts along a dimension, each where it begins; `end` is where the last one does."""
    pieces, at = [], 0
    for start, value in parts:
        if start > at:
            pieces.append(aten.slice.Tensor(base, dim, at, start))
        pieces.append(value)
        at = start + value.shape[dim]
    if end < base.shape[dim]:
        pieces.append(aten.slice.Tensor(base, dim, end, base.shape[dim]))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


_UNDO: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "permute": _put_permuted,
    "transpose": _put_transposed,
    "t": _put_transposed,
    "slice": _put_slice,
    "select": _put_select,
}
