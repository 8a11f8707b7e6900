"""Rows first: values whose rows lie in another dimension than the first are replaced by such with rows first.

People write heads first, time first, or a leading dimension of one. The rows of the batch stay apart all the same:

    h (rows, heads, d) --transpose--> (heads, rows, d) --bmm W--> (heads, rows, e) --transpose--> (rows, heads, e)
    h (rows, heads, d) ------------product_of_heads W---------------------------> (rows, heads, e)

A value that has its rows elsewhere is known by a twin: rows, then all other dimensions that have more than one element.
Its own dimensions are groups of the twin's, so that views of it cost nothing:

    value (4, rows, 12)         twin (rows, 4, 12)          groups (1) (0) (2)
    value (4*rows, 12)          twin (rows, 4, 12)          groups (1 0) (2)
    value (4, 3*rows, 4)        twin (rows, 4, 3, 4)        groups (1) (0 2) (3)

Weights that were expanded to a copy for each row are known as weights, so that their products are products of weights.
What there is no rule for stays as it is, and is then refused where rows must be first.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, final

import torch

from stretto.graph.node import BatchDim, Node, Size, leaves_in, map_leaves
from stretto.graph.operators import DIMENSION_ARGUMENT, is_pointwise
from stretto.graph.trace import constant_fill

aten = torch.ops.aten

Group: TypeAlias = tuple[int, ...]
_ROWS: Final = BatchDim(1)
_ITSELF: Final = frozenset({"alias", "clone", "contiguous"})
_SHAPED: Final = frozenset({"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten"})
_OF_ONE: Final = _ITSELF | _SHAPED | {"t", "transpose", "permute", "expand", "detach", "_to_copy"}
_DIMENSION_OF_RESULT: Final = frozenset({"stack", "select_backward", "slice_backward"})


def product_of_heads(x_PGK: torch.Tensor, weight_GKN: torch.Tensor) -> torch.Tensor:
    """Each head of each row times the matrix of that head."""
    return torch.bmm(x_PGK.transpose(0, 1), weight_GKN).transpose(0, 1).contiguous()


def gradient_of_heads(x_PGK: torch.Tensor, d_PGN: torch.Tensor) -> torch.Tensor:
    """The gradient of the matrices of `product_of_heads`: a sum over rows."""
    return torch.bmm(x_PGK.permute(1, 2, 0), d_PGN.transpose(0, 1))


def rows_first(nodes: list[Node]) -> list[Node]:
    """The nodes, where possible with rows first; replaced nodes that nothing reads any more stay in the list."""
    return _RowsFirst().run(nodes)


@final
@dataclass(frozen=True, slots=True)
class _Layout:
    """How a value is made of its twin.

    Attributes:
        twin: Rows and all dimensions of more than one element; without rows if it is the same for all.
        sizes: Of the twin's dimensions; that of the rows, which come first, is given as 1.
        groups: For each dimension of the value those of the twin, major first; 0 stands for the rows.
    """

    twin: Node
    sizes: tuple[int, ...]
    groups: tuple[Group, ...]

    @property
    def is_uniform(self) -> bool:
        """Whether it is the same for all rows."""
        return not self.twin.has_rows

    @property
    def has_rows(self) -> bool:
        """Whether it has a dimension of rows, be it of copies."""
        return any(0 in group for group in self.groups)

    @property
    def place_of_rows(self) -> "tuple[int | None, tuple[Size, ...]]":
        """The dimension of the rows, and the sizes that it is made of."""
        for place, group in enumerate(self.groups):
            if 0 in group:
                return place, tuple(_ROWS if d == 0 else self.sizes[d] for d in group)
        return None, ()

    def rows_to_front(self) -> list[Group]:
        """Its groups, the rows by themselves first."""
        apart = [part for group in self.groups for part in ([(d,) for d in group] if 0 in group else [group])]
        return [(0,), *(group for group in apart if group != (0,))]

    def size(self, group: Sequence[int]) -> int:
        """Elements of some dimensions, without the rows."""
        return math.prod(self.sizes[d] for d in group)


def _without_rows(group: Group) -> Group:
    return tuple(d for d in group if d != 0)


class _NoRule(Exception):  # noqa: N818 - not an error: the node stays as it is
    """Nothing is known about an operator on values whose rows are elsewhere."""


@final
class _RowsFirst:
    def __init__(self) -> None:
        self.out: list[Node] = []
        self.known: dict[Node, _Layout] = {}
        self.several: dict[Node, tuple[Node, tuple[Size, ...]]] = {}
        self.name = ""
        self.count = 0

    def run(self, nodes: list[Node]) -> list[Node]:
        for node in nodes:
            self.name, self.count = node.name, 0
            if node.label == "baddbmm":
                self._split_baddbmm(node)
            elif node.op is None or not self._concerns(node):
                self.out.append(node)
            else:
                try:
                    self._place(node, self._rule(node))
                except _NoRule:
                    self.out.append(node)
        return self.out

    def _concerns(self, node: Node) -> bool:
        if any(item in self.known or item in self.several for item in node.inputs):
            return True
        if node.label == "expand" and not node.args[0].has_rows:
            return _rows_in(node)
        return any(isinstance(size, BatchDim) for size in node.shape[1:])

    def _place(self, node: Node, layout: "_Layout | None") -> None:
        """Put a node behind those that it is made of now."""
        if layout is not None:
            if layout.has_rows and (layout.is_uniform or layout.groups[0][:1] != (0,)):
                self.known[node] = layout
            else:
                self._replace(node, self._made(layout, layout.groups))
        self.out.append(node)

    def _replace(self, node: Node, value: Node) -> None:
        node.op, node.args, node.kwargs = aten.alias.default, (value,), {}

    def _emit(self, op: Any, args: tuple[Any, ...], shape: Sequence[Size], dtype: torch.dtype | None) -> Node:
        name = f"{self.name}_rows{self.count}"
        self.count += 1
        made = Node(name, op, args, shape=tuple(shape), dtype=dtype)
        self.out.append(made)
        return made

    def _reshaped(self, value: Node, shape: Sequence[Size]) -> Node:
        if tuple(shape) == value.shape:
            return value
        return self._emit(aten.reshape.default, (value, list(shape)), shape, value.dtype)

    # Between values and layouts

    def _layout(self, node: Node) -> _Layout:
        """The layout of any value."""
        if node in self.known:
            return self.known[node]
        if node.dtype is None or any(isinstance(size, BatchDim) for size in node.shape[1:]):
            raise _NoRule
        first = node.shape[0] if node.has_rows else None
        factor = first.factor if isinstance(first, BatchDim) else 1
        others = [size for size in node.shape if isinstance(size, int)]
        inner = [factor, *others] if node.has_rows else others
        kept = [size for size in inner if size != 1]
        sizes = (1, *kept)
        places = iter(range(1, len(sizes)))
        groups = [() if size == 1 else (next(places),) for size in inner]
        if node.has_rows:
            groups = [(0, *groups[0]), *groups[1:]]
        twin = self._reshaped(node, (*([_ROWS] if node.has_rows else []), *kept))
        return _Layout(twin, sizes, tuple(groups))

    def _made(self, layout: _Layout, groups: Sequence[Group]) -> Node:
        """A value with a dimension for each group: rows must be first; without them if it is the same for all."""
        if layout.is_uniform:
            groups = [group for group in map(_without_rows, groups) if group or 0 not in group]
        order = [d for group in groups for d in group]
        value = layout.twin
        shift = int(layout.is_uniform)
        if order != sorted(order):
            shape = [layout.twin.shape[d - shift] for d in order]
            value = self._emit(aten.permute.default, (value, [d - shift for d in order]), shape, value.dtype)
        sizes = [BatchDim(layout.size(group)) if 0 in group else layout.size(group) for group in groups]
        return self._reshaped(value, sizes)

    def _with_rows(self, layout: _Layout, groups: Sequence[Group]) -> Node:
        """A value with a dimension for each group, of which the first one is that of the rows alone."""
        if not layout.is_uniform:
            return self._made(layout, groups)
        value = self._made(layout, groups[1:])
        return self._emit(aten.expand.default, (value, [_ROWS, *value.shape]), (_ROWS, *value.shape), value.dtype)

    def _regrouped(self, layout: _Layout, shape: Sequence[Size]) -> _Layout:
        """The same elements in the same order under another shape; dimensions of the twin are split where needed."""
        waiting: list[tuple[int, ...]] = [(d,) for group in layout.groups for d in group]
        sizes: dict[tuple[int, ...], int] = {(d,): size for d, size in enumerate(layout.sizes)}
        pieces: dict[int, list[tuple[int, ...]]] = {d: [(d,)] for d in range(len(layout.sizes))}
        found: list[list[tuple[int, ...]]] = []
        for size in shape:
            rest, rows = (size.factor, True) if isinstance(size, BatchDim) else (size, False)
            group: list[tuple[int, ...]] = []
            while rest > 1 or rows:
                if not waiting:
                    raise _NoRule
                piece = waiting.pop(0)
                if piece == (0,):
                    if not rows:
                        raise _NoRule
                    rows = False
                elif rest % sizes[piece] == 0:
                    rest //= sizes[piece]
                elif rest > 1 and sizes[piece] % rest == 0:
                    # Split in two: `rest` of it here, and what remains for the next dimension.
                    first, second = (*piece, 0), (*piece, 1)
                    at = pieces[piece[0]].index(piece)
                    pieces[piece[0]][at : at + 1] = [first, second]
                    sizes[first], sizes[second] = rest, sizes[piece] // rest
                    waiting.insert(0, second)
                    piece, rest = first, 1
                else:
                    raise _NoRule
                group.append(piece)
            found.append(group)
        if waiting:
            raise _NoRule
        order = [piece for d in range(len(layout.sizes)) for piece in pieces[d]]
        place = {piece: number for number, piece in enumerate(order)}
        new = tuple(sizes[piece] for piece in order)
        twin = self._reshaped(layout.twin, ([] if layout.is_uniform else [_ROWS]) + list(new[1:]))
        return _Layout(twin, new, tuple(tuple(place[piece] for piece in group) for group in found))

    def _known_as(self, value: Node, sizes: Sequence[Sequence[Size]]) -> _Layout:
        """The layout of what `value`, rows first, stands for: the sizes that each dimension is made of, `_ROWS` too."""
        kept = [size for group in sizes for size in group if isinstance(size, int) and size != 1]
        places = iter(range(1, len(kept) + 1))
        groups = tuple(tuple(0 if size == _ROWS else next(places) for size in group if size != 1) for group in sizes)
        return _Layout(self._reshaped(value, (_ROWS, *kept)), (1, *kept), groups)

    # Rules

    def _rule(self, node: Node) -> _Layout | None:
        name = node.label
        if name in {"mm", "bmm", "addmm"}:
            return self._product(node)
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        if node.op is operator.getitem:
            return self._part(node)
        if source is not None and name in _OF_ONE:
            return self._view(node, self._layout(source))
        if is_pointwise(node):
            return self._pointwise(node.op, node.args, node.kwargs, node.dtype, len(node.shape))
        if name in DIMENSION_ARGUMENT:
            return self._along(node)
        if node.op is constant_fill and _ROWS in node.shape:
            shape = _rows_to_front(node.shape)
            return self._of_result(node, self._emit(node.op, (shape, *node.args[1:]), shape, node.dtype))
        raise _NoRule

    def _view(self, node: Node, layout: _Layout) -> _Layout:
        name = node.label
        if name in _ITSELF:
            return layout
        if name in _SHAPED:
            return self._regrouped(layout, node.shape)
        if name == "expand":
            return self._expanded(node, layout)
        if name in {"detach", "_to_copy"}:
            twin = self._emit(node.op, (layout.twin, *node.args[1:]), layout.twin.shape, node.dtype)
            twin.kwargs = dict(node.kwargs)
            return replace(layout, twin=twin)
        rank = len(node.shape)
        order = list(range(rank))
        if name == "permute":
            order = [d % rank for d in node.args[1]]
        else:
            one, other = (d % rank for d in node.args[1:3]) if name == "transpose" else (0, rank - 1)
            order[one], order[other] = order[other], order[one]
        return replace(layout, groups=tuple(layout.groups[d] for d in order))

    def _expanded(self, node: Node, layout: _Layout) -> _Layout:
        groups: list[Group] = [()] * (len(node.shape) - len(layout.groups)) + list(layout.groups)
        wide: list[int] = []
        for d, size in enumerate(node.shape):
            if groups[d] or size == 1:
                continue
            if isinstance(size, BatchDim):
                if size != _ROWS or not layout.is_uniform or layout.has_rows:
                    raise _NoRule
                groups[d] = (0,)
            else:
                wide.append(size)
                groups[d] = (len(layout.sizes) + len(wide) - 1,)
        twin = layout.twin
        if wide:
            thin = self._reshaped(twin, (*twin.shape, *[1] * len(wide)))
            shape = (*twin.shape, *wide)
            twin = self._emit(aten.expand.default, (thin, list(shape)), shape, twin.dtype)
        return _Layout(twin, (*layout.sizes, *wide), tuple(groups))

    def _pointwise(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None, rank: int
    ) -> _Layout:
        given = {item: self._layout(item) for item in leaves_in((args, kwargs)) if isinstance(item, Node)}
        if all(layout.is_uniform for layout in given.values()):
            raise _NoRule
        # What each dimension is made of: as finely as in any operand.
        sizes: list[list[Size]] = [[] for _ in range(rank)]
        for layout in given.values():
            for d, group in enumerate(layout.groups, start=rank - len(layout.groups)):
                parts = [_ROWS if part == 0 else layout.sizes[part] for part in group]
                if len(parts) > len(sizes[d]):
                    sizes[d] = parts
        flat = [size for group in sizes for size in group]
        if flat.count(_ROWS) != 1:
            raise _NoRule
        values = {item: self._broadcast(layout, sizes[rank - len(layout.groups) :]) for item, layout in given.items()}
        shape = (_ROWS, *(size for size in flat if size != _ROWS))
        made = self._emit(op, (), shape, dtype)
        made.args, made.kwargs = (
            map_leaves(given_to, lambda item: values[item] if isinstance(item, Node) else item)
            for given_to in (args, kwargs)
        )
        return self._known_as(made, sizes)

    def _broadcast(self, layout: _Layout, sizes: Sequence[Sequence[Size]]) -> Node:
        """The value, rows first, with a dimension for each of the others: of size 1 where it has a single element."""
        targets: list[Size] = []
        for group, parts in zip(layout.groups, sizes, strict=True):
            targets += parts if group else [1] * len(parts)
        found = self._regrouped(layout, targets)
        parts_of = [part for group in sizes for part in group]
        others = [group for group, part in zip(found.groups, parts_of, strict=True) if part != _ROWS]
        if found.is_uniform:
            return self._made(found, others)
        return self._made(found, [(0,), *others])

    def _along(self, node: Node) -> _Layout | None:
        """An operator along some dimensions, whose numbers change when rows come first."""
        name, args = node.label, list(node.args)
        layouts = {item: self._layout(item) for item in node.inputs}
        found = {layout.place_of_rows for layout in layouts.values()}
        place, parts = next(iter(found))
        if len(found) != 1 or place is None:
            raise _NoRule
        rank = len(node.inputs[0].shape)
        if name in _DIMENSION_OF_RESULT:
            rank, place = len(node.shape), next(d for d, size in enumerate(node.shape) if isinstance(size, BatchDim))
        position = DIMENSION_ARGUMENT[name]
        if len(args) == position and name in {"stack", "cat", "unbind", "split", "split_with_sizes"}:
            args.append(0)
        given = args[position] if len(args) > position else None
        dims = [d % rank for d in (given if isinstance(given, (list, tuple)) else [given]) if isinstance(d, int)]
        if not dims or (place in dims and (name != "sum" or len(parts) > 1)):
            raise _NoRule
        # Parts that share the dimension of the rows become separate dimensions meanwhile.
        dims = [d + len(parts) - 1 if d > place else d for d in dims]
        place += parts.index(_ROWS)
        moved = [0 if d == place else d + 1 if d < place else d for d in dims]
        args[position] = moved if isinstance(given, (list, tuple)) else moved[0]
        if name in {"select_backward", "slice_backward"}:
            args[1] = _rows_to_front(_split_rows(args[1], parts))
        values = {item: self._with_rows(layout, layout.rows_to_front()) for item, layout in layouts.items()}
        args = list(map_leaves(tuple(args), lambda item: values[item] if isinstance(item, Node) else item))
        if place in dims:
            kept = [size for d, size in enumerate(args[0].shape) if d not in moved]
            total = self._emit(node.op, (args[0], moved), kept, node.dtype)
            self._replace(node, self._reshaped(total, node.shape))
            return None
        shape = _rows_to_front(_split_rows(node.shape, parts))
        made = self._emit(node.op, tuple(args), shape, node.dtype)
        if node.dtype is None:
            made.shape = ()
            self.several[node] = made, parts
            return None
        return self._of_result(node, made, parts)

    def _part(self, node: Node) -> _Layout | None:
        several, number = node.args
        if several not in self.several:
            raise _NoRule
        source, parts = self.several[several]
        shape = _rows_to_front(_split_rows(node.shape, parts))
        made = self._emit(operator.getitem, (source, number), shape, node.dtype)
        return self._of_result(node, made, parts)

    def _of_result(self, node: Node, made: Node, parts: tuple[Size, ...] = (_ROWS,)) -> _Layout:
        made.kwargs = dict(node.kwargs)
        sizes = [parts if isinstance(size, BatchDim) else (size,) for size in node.shape]
        return self._known_as(made, sizes)

    # Products

    def _product(self, node: Node) -> _Layout | None:
        *bias, left_node, right_node = node.args
        if node.label == "mm" and left_node.label == "t" and self._is_plain(left_node.args[0], right_node):
            raise _NoRule
        if node.kwargs:
            raise _NoRule
        left, right = self._layout(left_node), self._layout(right_node)
        if node.label != "bmm":
            left = replace(left, groups=((), *left.groups))
            right = replace(right, groups=((), *right.groups))
        made = self._multiply(node, left, right)
        if made is None or node.label == "bmm":
            return made
        made = replace(made, groups=made.groups[1:])
        if not bias:
            return made
        stand_in = Node(f"{node.name}_product", None, shape=node.shape, dtype=node.dtype)
        self.known[stand_in] = made
        return self._pointwise(aten.add.Tensor, (stand_in, bias[0]), {}, node.dtype, len(node.shape))

    def _is_plain(self, *nodes: Node) -> bool:
        return all(node.has_rows and node not in self.known for node in nodes)

    def _multiply(self, node: Node, left: _Layout, right: _Layout) -> _Layout | None:
        """The product of (g, n, k) and (g, k, m) if rows are kept apart or all of them summed."""
        moves_left, moves_right = not left.is_uniform and left.has_rows, not right.is_uniform and right.has_rows
        if moves_left and not moves_right:
            return self._times_weight(left, right, node.dtype)
        if moves_right and not moves_left:
            made = self._times_weight(_transposed(right), _transposed(left), node.dtype)
            return _transposed(made)
        (g, _, k), (other_g, other_k, _) = left.groups, right.groups
        if moves_left and 0 in g and 0 in other_g and _has_same_parts(left, g, right, other_g):
            return self._row_by_row(left, right, node.dtype)
        if moves_left and 0 in k and 0 in other_k and _has_same_parts(left, k, right, other_k):
            self._sum_over_rows(node, left, right)
            return None
        raise _NoRule

    def _row_by_row(self, left: _Layout, right: _Layout, dtype: torch.dtype | None) -> _Layout:
        """Both change from row to row."""
        (g, n, k), (other_g, other_k, m) = left.groups, right.groups
        a, b = self._made(left, [_rows_leading(g), n, k]), self._made(right, [_rows_leading(other_g), other_k, m])
        made = self._emit(aten.bmm.default, (a, b), (a.shape[0], a.shape[1], b.shape[2]), dtype)
        sizes: list[Size] = [left.sizes[d] if d else _ROWS for d in _rows_leading(g)]
        found = self._known_as(made, [sizes, [left.size(n)], [right.size(m)]])
        place = _places(_rows_leading(g), sizes, found.groups[0])
        return replace(found, groups=(tuple(place[d] for d in g), *found.groups[1:]))

    def _times_weight(self, left: _Layout, right: _Layout, dtype: torch.dtype | None) -> _Layout:
        (g, n, k), (other_g, other_k, m) = left.groups, right.groups
        heads, units = _without_rows(g), _without_rows(n)
        if 0 in k or 0 in other_k or 0 in m or left.size(heads) != right.size(other_g):
            raise _NoRule
        rows, columns = BatchDim(left.size(units)), right.size(m)
        if left.size(heads) == 1:
            matrices = (self._made(left, [(0, *units), k]), self._made(right, [other_k, m]))
            made = self._emit(aten.mm.default, matrices, (rows, columns), dtype)
        else:
            x, weight = (
                self._made(left, [(0, *units), heads, k]),
                self._made(right, [_without_rows(other_g), other_k, m]),
            )
            made = self._emit(product_of_heads, (x, weight), (rows, left.size(heads), columns), dtype)
        sizes: list[list[Size]] = [[left.sizes[d] for d in group] for group in (units, heads)]
        found = self._known_as(made, [[_ROWS], *sizes, [columns]])
        place = {0: 0}
        for group, own, new in zip((units, heads), sizes, found.groups[1:], strict=False):
            place |= _places(group, own, new)
        return replace(found, groups=(tuple(place[d] for d in g), tuple(place[d] for d in n), found.groups[3]))

    def _sum_over_rows(self, node: Node, left: _Layout, right: _Layout) -> None:
        """The gradient of a weight."""
        (g, n, k), (other_g, other_k, m) = left.groups, right.groups
        shape = (left.size(g), left.size(n), right.size(m))
        a, b = self._made(left, [_rows_leading(k), g, n]), self._made(right, [_rows_leading(other_k), other_g, m])
        if shape[0] == 1:
            a, b = (self._reshaped(item, (item.shape[0], item.shape[2])) for item in (a, b))
            turned = self._emit(aten.t.default, (a,), (a.shape[1], a.shape[0]), a.dtype)
            made = self._emit(aten.mm.default, (turned, b), shape[1:], node.dtype)
        else:
            made = self._emit(gradient_of_heads, (a, b), shape, node.dtype)
        self._replace(node, self._reshaped(made, node.shape))

    def _split_baddbmm(self, node: Node) -> None:
        """A sum and a product by themselves."""
        bias, left, right = node.args
        factors = [node.kwargs.get(name, 1) for name in ("beta", "alpha")]
        product = Node(f"{node.name}_product", aten.bmm.default, (left, right), shape=node.shape, dtype=node.dtype)
        made = [product]
        if factors[0] != 1:
            scaled = (bias, factors[0])
            bias = Node(f"{node.name}_bias", aten.mul.Tensor, scaled, shape=bias.shape, dtype=bias.dtype)
            made.append(bias)
        node.op, node.args, node.kwargs = aten.add.Tensor, (bias, product), {}
        if factors[1] != 1:
            node.kwargs = {"alpha": factors[1]}
        self.run([*made, node])


def _rows_in(node: Node) -> bool:
    return any(isinstance(size, BatchDim) for size in node.shape)


def _split_rows(shape: Sequence[Size], parts: tuple[Size, ...]) -> tuple[Size, ...]:
    """A shape in which the dimension of the rows is given by the sizes that it is made of."""
    return tuple(part for size in shape for part in (parts if isinstance(size, BatchDim) else (size,)))


def _rows_to_front(shape: Sequence[Size]) -> tuple[Size, ...]:
    return (_ROWS, *(size for size in shape if not isinstance(size, BatchDim)))


def _rows_leading(group: Group) -> Group:
    return (0, *_without_rows(group))


def _transposed(layout: _Layout) -> _Layout:
    """Matrices with rows and columns exchanged."""
    heads, rows, columns = layout.groups
    return replace(layout, groups=(heads, columns, rows))


def _places(group: Group, sizes: Sequence[Size], new: Group) -> dict[int, int]:
    """Where dimensions of a twin are in that of a result, which has those of more than one element."""
    kept = [d for d, size in zip(group, sizes, strict=True) if size != 1]
    return dict(zip(kept, new, strict=True))


def _has_same_parts(one: _Layout, group: Group, other: _Layout, other_group: Group) -> bool:
    """Whether two dimensions are made of the same parts in the same order."""
    return [(d == 0, one.sizes[d]) for d in group] == [(d == 0, other.sizes[d]) for d in other_group]
