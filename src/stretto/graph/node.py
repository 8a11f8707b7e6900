"""The nodes of a step: operators of PyTorch on tensors whose leading dimension is the rows of a batch.

A graph is a list of nodes, each after those it reads. It holds for any number of rows: sizes that follow the batch are
`BatchDim`s, and `run` evaluates nodes with PyTorch once the number is known.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar

import torch

from stretto.graph.user_code import Line


@dataclass(frozen=True, slots=True)
class BatchDim:
    """An integer that is `factor` times the number of rows, such as the first size of a batch."""

    factor: int

    def __repr__(self) -> str:
        return "rows" if self.factor == 1 else f"{self.factor}*rows"


Size: TypeAlias = "int | BatchDim"
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Node:
    """A value of the step: what computes it, from what, and what it looks like."""

    name: str  # unique in its graph, and readable
    op: Callable[..., Any] | None  # None for an input
    # Arguments have nodes and `BatchDim` in place of tensors and batch-dependent integers.
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: tuple[Size, ...] = ()  # a leading `BatchDim` says that it has a row for each sequence
    dtype: torch.dtype | None = None  # None for an operator with several outputs, which further nodes take apart
    _inputs: tuple[tuple[Any, ...], list["Node"]] | None = field(default=None, repr=False)
    line: Line | None = field(default=None, repr=False)  # of the user's code, if that is known
    operands: torch.dtype | None = None  # what a product rounds its operands to; None for what they are

    def __repr__(self) -> str:
        return self.name

    @property
    def inputs(self) -> list["Node"]:
        """The nodes it is computed from, in order of appearance."""
        # Read often, and only rewrites change the arguments.
        if self._inputs is None or self._inputs[0] is not self.args:
            self._inputs = (self.args, [leaf for leaf in leaves_in((self.args, self.kwargs)) if isinstance(leaf, Node)])
        return self._inputs[1]

    @property
    def has_rows(self) -> bool:
        """Whether there is a value for each row of the batch."""
        return bool(self.shape) and isinstance(self.shape[0], BatchDim)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The sizes within a row."""
        sizes = tuple(size for size in self.shape if not isinstance(size, BatchDim))
        first = self.shape[0] if self.shape else 0
        return (first.factor, *sizes) if isinstance(first, BatchDim) and first.factor != 1 else sizes

    @property
    def row_size(self) -> int:
        """Elements within a row."""
        return math.prod(self.row_shape)

    @property
    def label(self) -> str:
        """The operator's plain name."""
        return "input" if self.op is None else _operator_name(self.op)

    @property
    def whereabouts(self) -> str:
        """ " at cells.py:12 `y = x.sum()`", or nothing if that is not known."""
        return "" if self.line is None else f" at {self.line}"


@lru_cache(maxsize=4096)
def _operator_name(op: Callable[..., Any]) -> str:
    """`aten.mul.Tensor` as "mul"."""
    packet = getattr(op, "overloadpacket", None)
    return str(getattr(packet or op, "__name__", op)).rpartition(".")[2]


def leaves_in(value: Any) -> Iterator[Any]:
    """Every leaf of nested tuples, lists and dictionaries."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves_in(item)
    else:
        yield value


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested tuples, lists and dictionaries with every leaf passed through `change`."""
    if isinstance(value, tuple):
        return tuple(map_leaves(item, change) for item in value)
    if isinstance(value, list):
        return [map_leaves(item, change) for item in value]
    if isinstance(value, dict):
        return {key: map_leaves(item, change) for key, item in value.items()}
    return change(value)


def needed_for(outputs: list[Node], *, stop: "set[Node] | None" = None) -> set[Node]:
    """The outputs and every node they are computed from, without looking behind those in `stop`."""
    found: set[Node] = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        if stop is None or node not in stop:
            waiting.extend(node.inputs)
    return found


def topological_sort(nodes: Iterable[T], reads: Callable[[T], Iterable[T]]) -> list[T]:
    """The nodes and all that they read, each after what it reads, otherwise in their order."""
    order: dict[T, None] = {}
    for node in nodes:
        waiting = [node]
        while waiting:
            missing = [item for item in reads(waiting[-1]) if item not in order]
            waiting.extend(missing)
            if not missing:
                order[waiting.pop()] = None
    return list(order)


def concrete_shape(shape: tuple[Size, ...], rows: int) -> list[int]:
    """The shape for a given number of rows."""
    return [size.factor * rows if isinstance(size, BatchDim) else size for size in shape]


# The strides of a value may be others than those it had when the step was recorded.
_OF_ANY_STRIDES: Final[dict[Callable[..., Any], Callable[..., Any]]] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}


def evaluate(node: Node, values: dict[Node, Any], rows: int, *, op: Callable[..., Any] | None = None) -> Any:
    """The value of one node, given those it reads; `op` runs in the place of the node's own operator."""

    def look_up(value: Any) -> Any:
        if isinstance(value, Node):
            return values[value]
        return value.factor * rows if isinstance(value, BatchDim) else value

    if node.operands is not None:
        return _evaluate_rounded(node, map_leaves(node.args, look_up), node.operands)
    op = op or _OF_ANY_STRIDES.get(node.op, node.op)  # type: ignore[arg-type]
    assert op is not None
    if not node.kwargs and all(isinstance(item, Node) for item in node.args):
        return op(*(values[item] for item in node.args))
    return op(*map_leaves(node.args, look_up), **map_leaves(node.kwargs, look_up))


def _evaluate_rounded(node: Node, args: Any, operands: torch.dtype) -> torch.Tensor:
    """A product with its operands rounded to a narrower dtype, in the node's own dtype; sums inside are wider still."""

    def rounded(value: Any) -> Any:
        return value.to(operands) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    assert node.op is not None
    made: torch.Tensor = node.op(*map_leaves(args, rounded))
    return made.to(node.dtype)


def run(nodes: Iterable[Node], values: dict[Node, Any], rows: int) -> None:
    """Evaluate `nodes` in order and add their values to `values`."""
    for node in nodes:
        if node not in values:
            values[node] = evaluate(node, values, rows)
