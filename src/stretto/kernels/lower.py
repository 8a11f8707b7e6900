"""From PyTorch's operators on batches to the loop IR: values of one row, for each direction of a loop.

Nothing here depends on the target. A backend calls `lower` and gets what every step reads, computes and writes.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias, final

import torch

from stretto.graph import BatchDim, Body, Kind, Node, constant_fill, is_view
from stretto.kernels.ir import (
    AbstractValue,
    Affine,
    Buffer,
    Constant,
    Join,
    LoopIR,
    Product,
    Read,
    Reduce,
    Reshape,
    Root,
    Unsupported,
    View,
    Weight,
    Where,
    contiguous,
    identity,
    in_order,
    unit,
)
from stretto.kernels.pointwise import POINTWISE, apply

Way: TypeAlias = Literal["forward", "backward"]

REAL_DTYPES: Final = (torch.float32, torch.float64)
"""Values of a loop are of one of these; truth values and counts of them are stored as such numbers."""
REDUCTIONS: Final = {"sum": "sum", "amax": "max", "amin": "min"}


def value_dtypes(body: Body) -> set[torch.dtype | None]:
    """Dtypes of what a loop reads and writes, and of real numbers in between, where a cast would be lost."""
    made = {node.dtype for node in (*body.forward, *body.backward) if node.op is not constant_fill}
    real = {dtype for dtype in made if dtype is not None and dtype.is_floating_point}
    return real | {node.dtype for node in [*body.next_states, *body.outputs]} | {port.node.dtype for port in body.ports}


def lower(body: Body, way: Way) -> LoopIR:
    """The IR of a loop in one direction.

    Raises:
        Unsupported: If the body has something that the IR cannot say.
    """
    if way == "forward":
        return _lower_forward(_Lowering(body, body.forward), body)
    return _lower_backward(_Lowering(body, body.backward), body)


def _lower_forward(lowering: "_Lowering", body: Body) -> LoopIR:
    lowering.lower()
    for role, where, nodes in (
        ("after", Where.PACKED, body.next_states),
        ("output", Where.PACKED, body.outputs),
        ("saved", Where.SAVED, body.saved),
    ):
        for index, node in enumerate(nodes):
            lowering.root(role, index, where, node, lowering.values[node])
    for index, node in enumerate(body.next_states):
        lowering.buffer("final", index, Where.ROW, node.row_shape)
    return lowering.finish()


def _lower_backward(lowering: "_Lowering", body: Body) -> LoopIR:
    """The gradient of a state is that of the next step's backward step and that of everything outside, added up.

           d_after, d_output (from outside)
                   |
    carry_out <-- step t <-- carry_in (from step t + 1)
                   |
           d_per_step, to_deferred
    """
    values = lowering.values
    for role, nodes in (("after", body.next_states), ("output", body.outputs), ("saved", body.saved)):
        for index, node in enumerate(nodes):
            read = lowering.read(role, index, Where.PACKED, node)
            values.setdefault(node, read)
    for index, node in enumerate(body.state_gradients):
        carry = lowering.read("carry_in", index, Where.CARRY_IN, node)
        arriving = lowering.read("d_after", index, Where.STRIDED, node)
        values[node] = apply("add", node.row_shape, carry, arriving)
    for index, node in enumerate(body.output_gradients):
        values[node] = lowering.read("d_output", index, Where.STRIDED, node)
    lowering.lower()
    for index, port in enumerate(body.ports_of(Kind.STATE)):
        zero = Constant(port.node.row_shape, 0.0)
        value = zero if port.gradient is None else _of_shape(values[port.gradient], port.node)
        lowering.root("carry_out", index, Where.CARRY_OUT, port.node, value)
    per_step = body.ports_of(Kind.PER_STEP)
    for index, port in enumerate(per_step):
        if port.gradient is not None:
            lowering.root("d_per_step", index, Where.PACKED, port.node, _of_shape(values[port.gradient], port.node))
    outgoing = {port.gradient for port in per_step}
    for index, node in enumerate(body.to_deferred):
        if node not in outgoing:
            lowering.root("to_deferred", index, Where.PACKED, node, values[node])
    for index, port in enumerate(body.ports_of(Kind.CONSTANT)):
        if port.gradient is not None:
            shape = port.node.row_shape
            buffer = lowering.buffer("d_constant", index, Where.ROW, shape)
            more = _of_shape(values[port.gradient], port.node)
            lowering.roots.append(Root(apply("add", shape, Read(shape, buffer), more), buffer))
    return lowering.finish()


def _of_shape(value: AbstractValue, node: Node) -> AbstractValue:
    if value.dims != node.row_shape:
        raise Unsupported(f"a gradient of another shape than {node.name}")
    return value


def _check(node: Node) -> None:
    if node.dtype not in REAL_DTYPES and node.dtype is not torch.bool and not _counts(node):
        raise Unsupported(f"the value {node.name} in the loop is of {node.dtype}")


def _counts(node: Node) -> bool:
    """Whether it is a number of true values, which is small enough to be exact as a real number."""
    while is_view(node):
        node = node.inputs[0]
    return node.label == "sum" and node.dtype is torch.int64 and node.inputs[0].dtype is torch.bool


def _has_several_rows(node: Node) -> bool:
    """Whether each row of the batch is several rows of the node's first dimension."""
    first = node.shape[0]
    return isinstance(first, BatchDim) and first.factor > 1


def _of_dims(value: AbstractValue, node: Node) -> AbstractValue:
    return value if value.dims == node.row_shape else Reshape(node.row_shape, value)


@final
class _Lowering:
    """Turns the nodes of one direction into values of a row, and collects its buffers, weights and roots.

    A method `_name` lowers the operator of that name.
    """

    def __init__(self, body: Body, nodes: list[Node]) -> None:
        self.roots: list[Root] = []
        self.buffers: list[Buffer] = []
        self.weights: dict[Node, Weight] = {}
        self.uniform: dict[Node, Buffer] = {}
        self.values: dict[Node, AbstractValue] = {}
        # In order: generated code, whose text is its key in a cache, must be the same for the same body.
        self.still = dict.fromkeys(port.node for port in body.ports_of(Kind.WEIGHT))
        self.prepared: list[Node] = []
        self.moving: list[Node] = []
        for node in nodes:
            if node.op is constant_fill:
                # Rounded to its own dtype: what it is combined with may be of a wider one.
                self.values[node] = Constant(node.row_shape, float(torch.tensor(node.args[1], dtype=node.dtype)))
            elif not node.has_rows and node.inputs and all(item in self.still for item in node.inputs):
                self.still[node] = None
                self.prepared.append(node)
            else:
                self.moving.append(node)
        for index, port in enumerate(body.ports_of(Kind.STATE)):
            self.values[port.node] = self.read("before", index, Where.BEFORE, port.node)
            self.buffers.append(Buffer("initial", index, Where.ROW, (), port.node.row_size))
        for index, port in enumerate(body.ports_of(Kind.PER_STEP)):
            self.values[port.node] = self.read("per_step", index, Where.PACKED, port.node)
        for index, port in enumerate(body.ports_of(Kind.CONSTANT)):
            self.values[port.node] = self.read("constant", index, Where.ROW, port.node)

    def buffer(self, role: str, index: int, where: Where, dims: tuple[int, ...]) -> Buffer:
        found = Buffer(role, index, where, contiguous(dims), math.prod(dims))
        self.buffers.append(found)
        return found

    def read(self, role: str, index: int, where: Where, node: Node) -> Read:
        _check(node)
        return Read(node.row_shape, self.buffer(role, index, where, node.row_shape))

    def root(self, role: str, index: int, where: Where, node: Node, value: AbstractValue) -> None:
        self.roots.append(Root(value, self.buffer(role, index, where, node.row_shape)))

    def weight(self, node: Node) -> Weight:
        if node not in self.still:
            raise Unsupported("a product of two values that both change from step to step, other than row by row")
        if node not in self.weights:
            rows, columns = node.shape
            assert isinstance(rows, int)
            assert isinstance(columns, int)
            self.weights[node] = Weight(rows, columns)
        return self.weights[node]

    def lower(self) -> None:
        for index, node in enumerate(node for node in self.still if node.dtype is not None):
            shape = node.row_shape
            if len(shape) <= 3:
                self.uniform[node] = Buffer("uniform", index, Where.UNIFORM, contiguous(shape), math.prod(shape))
                self.values.setdefault(node, Read(shape, self.uniform[node]))
        for node in self.moving:
            if node.dtype is not None:
                _check(node)
                self.values[node] = self._lowered(node)

    def finish(self) -> LoopIR:
        used = {value.buffer for value in in_order(self.roots) if isinstance(value, Read)}
        uniforms = [node for node, buffer in self.uniform.items() if buffer in used]
        buffers = [*self.buffers, *(self.uniform[node] for node in uniforms)]
        return LoopIR(self.roots, buffers, self.weights, uniforms, self.prepared)

    def _lowered(self, node: Node) -> AbstractValue:
        name = node.label
        if node.op is operator.getitem:
            return self._part(node)
        if name in POINTWISE:
            return POINTWISE[name](node, lambda item: self._operand(item, node))
        if name in REDUCTIONS:
            return _of_dims(self._reduced(REDUCTIONS[name], self.value(node.args[0]), self._axes(node)), node)
        method: Callable[[Node], AbstractValue] | None = getattr(self, f"_{name.strip('_')}", None)
        if method is None:
            raise Unsupported(f"no code is generated for the operator {name}")
        return method(node)

    def value(self, node: Any) -> AbstractValue:
        """The lowered value of a node that was given or lowered before."""
        if node not in self.values:
            raise Unsupported(f"the value {node!r} is not one of a row")
        return self.values[node]

    def _operand(self, item: Any, node: Node) -> AbstractValue:
        """An argument of a pointwise operator."""
        if isinstance(item, Node):
            return self._of_rank(item, len(node.row_shape))
        if isinstance(item, (bool, int, float)):
            return Constant((), float(item))
        raise Unsupported(f"{node.label} with an argument of type {type(item).__name__}")

    def _of_rank(self, node: Node, rank: int) -> AbstractValue:
        """A value that is the same for all rows has a leading dimension of 1 where rows have theirs: it is dropped."""
        value = self.value(node)
        extra = len(value.dims) - rank
        return value if node.has_rows or extra <= 0 else Reshape(value.dims[extra:], value)

    def _axis(self, node: Node, dimension: int) -> int:
        """The dimension of a row that a dimension of the batch is."""
        dimension %= len(node.shape)
        if dimension == 0:
            raise Unsupported(f"{node.label} over the rows of the batch")
        return dimension if _has_several_rows(node) else dimension - 1

    # Views

    def _same(self, node: Node) -> AbstractValue:
        return self.value(node.args[0])

    _alias = _detach = _clone = _same

    def _to_copy(self, node: Node) -> AbstractValue:
        if not (node.dtype.is_floating_point and node.dtype == node.kwargs.get("dtype", node.dtype)):  # type: ignore[union-attr]
            raise Unsupported(f"a conversion to {node.dtype}")
        return self.value(node.args[0])

    def _view(self, node: Node) -> AbstractValue:
        return _of_dims(self.value(node.args[0]), node)

    _unsafe_view = _unsqueeze = _squeeze = _view

    def _permuted(self, node: Node, order: list[int]) -> AbstractValue:
        source = node.args[0]
        base = self.value(source)
        if order[0] != 0:
            raise Unsupported(f"{node.label} of the rows of the batch")
        axes = [*([0] if _has_several_rows(source) else []), *(self._axis(source, d) for d in order[1:])]
        return View(node.row_shape, base, tuple(unit(axes.index(axis), len(axes)) for axis in range(len(axes))))

    def _permute(self, node: Node) -> AbstractValue:
        rank = len(node.shape)
        return self._permuted(node, [d % rank for d in node.args[1]])

    def _transpose(self, node: Node) -> AbstractValue:
        rank = len(node.shape)
        order = list(range(rank))
        one, other = (d % rank for d in node.args[1:3])
        order[one], order[other] = order[other], order[one]
        return self._permuted(node, order)

    def _slice(self, node: Node) -> AbstractValue:
        source, dimension, start, _, step = (*node.args, *(0, 0, None, 1)[len(node.args) - 1 :])[:5]
        if node.args[1:] == () or source.shape == node.shape:
            return self.value(source)
        axis = self._axis(source, dimension)
        size = source.row_shape[axis]
        start = 0 if start is None else start
        start = max(start + size, 0) if start < 0 else min(start, size)
        return self._window(node, axis, start, step)

    def _window(self, node: Node, axis: int, start: int, step: int = 1) -> AbstractValue:
        base = self.value(node.args[0] if node.op is not operator.getitem else node.args[0].args[0])
        index = list(identity(base.dims))
        index[axis] = Affine(start, tuple(step * factor for factor in index[axis].factors))
        return View(node.row_shape, base, tuple(index))

    def _select(self, node: Node) -> AbstractValue:
        source, dimension, position = node.args
        axis = self._axis(source, dimension)
        base = self.value(source)
        position %= source.row_shape[axis]
        index = list(identity(node.row_shape))
        index.insert(axis, Affine(position, (0,) * len(index)))
        return View(node.row_shape, base, tuple(index))

    def _part(self, node: Node) -> AbstractValue:
        several, number = node.args
        source = several.args[0]
        if several.label in {"split", "split_with_sizes"}:
            axis = self._axis(source, several.args[2] if len(several.args) > 2 else 0)
            sizes = several.args[1]
            start = number * sizes if isinstance(sizes, int) else sum(sizes[:number])
            return self._window(node, axis, start)
        if several.label == "unbind":
            dimension = several.args[1] if len(several.args) > 1 else 0
            stand_in = Node(node.name, None, (source, dimension, number), shape=node.shape, dtype=node.dtype)
            return self._select(stand_in)
        raise Unsupported(f"no code is generated for the operator {several.label}")

    def _expand(self, node: Node) -> AbstractValue:
        rank = len(node.row_shape)
        base = self._of_rank(node.args[0], rank)
        shift = rank - len(base.dims)
        index = tuple(unit(d + shift if size != 1 else None, rank) for d, size in enumerate(base.dims))
        return View(node.row_shape, base, index)

    def _cat(self, node: Node) -> AbstractValue:
        dimension = node.args[1] if len(node.args) > 1 else 0
        axis = self._axis(node, dimension)
        if any(not item.has_rows for item in node.args[0]):
            raise Unsupported("cat of rows with something that has none")
        return Join(node.row_shape, tuple(self.value(item) for item in node.args[0]), axis)

    def _stack(self, node: Node) -> AbstractValue:
        axis = self._axis(node, node.args[1] if len(node.args) > 1 else 0)
        parts = []
        for item in node.args[0]:
            base = self.value(item)
            parts.append(Reshape((*base.dims[:axis], 1, *base.dims[axis:]), base))
        return Join(node.row_shape, tuple(parts), axis)

    def _padded(self, dims: tuple[int, ...], axis: int, start: int, value: AbstractValue) -> AbstractValue:
        parts: list[AbstractValue] = []
        width = value.dims[axis]
        for size in (start, dims[axis] - start - width):
            filler = Constant((*dims[:axis], size, *dims[axis + 1 :]), 0.0)
            parts += [filler, value] if not parts else [filler]
        return Join(dims, tuple(part for part in parts if part.dims[axis]), axis)

    def _slice_backward(self, node: Node) -> AbstractValue:
        gradient, _, dimension, start, _, step = node.args
        axis = self._axis(node, dimension)
        size = node.row_shape[axis]
        start = max(start + size, 0) if start < 0 else min(start, size)
        value = self.value(gradient)
        return self._padded(
            node.row_shape, axis, start, value if step == 1 else _spaced(value, axis, step, size - start)
        )

    def _select_backward(self, node: Node) -> AbstractValue:
        gradient, _, dimension, position = node.args
        axis = self._axis(node, dimension)
        base = self.value(gradient)
        thick = Reshape((*base.dims[:axis], 1, *base.dims[axis:]), base)
        return self._padded(node.row_shape, axis, position % node.row_shape[axis], thick)

    def _fill(self, node: Node) -> AbstractValue:
        number = node.args[1]
        if not isinstance(number, Node):
            return Constant(node.row_shape, float(number))
        value = self.value(number)
        if value.dims:
            raise Unsupported("a fill with more than one number per row")
        return View(node.row_shape, value, ())

    # Products and reductions

    def _product(self, left: Node, right: Node) -> AbstractValue:
        weight = self.weight(right)
        dims = (*self.value(left).dims[:-1], weight.N)
        made = Product(dims, self.value(left), weight)
        # Several vectors per row are padded in memory; what needs them contiguous reads this copy.
        return made if len(dims) == 1 else apply("copy", dims, made)

    def _mm(self, node: Node) -> AbstractValue:
        return self._product(*node.args)

    def _addmm(self, node: Node) -> AbstractValue:
        if node.kwargs:
            raise Unsupported("addmm with factors")
        bias, left, right = node.args
        return apply("add", node.row_shape, self._product(left, right), self._of_rank(bias, len(node.row_shape)))

    def _bmm(self, node: Node) -> AbstractValue:
        left, right = (self._matrix(item) for item in node.args)
        (rows, inner), columns = left.dims, right.dims[1]
        # Sum along whichever dimension lies side by side in memory.
        along_columns = columns > 1 and _side_by_side(right)
        dims = (rows, inner, columns) if along_columns else (rows, columns, inner)
        at = (1, 2) if along_columns else (2, 1)
        first = View(dims, left, (unit(0, 3), unit(at[0], 3)))
        second = View(dims, right, (unit(at[0], 3), unit(at[1], 3)))
        return Reshape((rows, columns), self._reduced("sum", apply("mul", dims, first, second), at[:1]))

    def _matrix(self, node: Node) -> AbstractValue:
        if not node.has_rows or node.shape[0] != BatchDim(1) or len(node.row_shape) != 2:
            raise Unsupported("a batched product other than one matrix for each row")
        return self.value(node)

    def _axes(self, node: Node) -> tuple[int, ...]:
        given = node.args[1] if len(node.args) > 1 else None
        if given is None:
            raise Unsupported(f"{node.label} over everything")
        return tuple(sorted(self._axis(node.args[0], d) for d in ([given] if isinstance(given, int) else given)))

    def _reduced(self, kind: str, operand: AbstractValue, axes: tuple[int, ...]) -> AbstractValue:
        dims = tuple(1 if d in axes else size for d, size in enumerate(operand.dims))
        return Reduce(dims, kind, operand, axes)

    def _mean(self, node: Node) -> AbstractValue:
        axes = self._axes(node)
        source = self.value(node.args[0])
        total = self._reduced("sum", source, axes)
        count = math.prod(source.dims[axis] for axis in axes)
        return _of_dims(apply("div", total.dims, total, Constant((), float(count)), costly=False), node)

    def _shifted_exp(self, source: AbstractValue, axes: tuple[int, ...]) -> tuple[AbstractValue, AbstractValue]:
        """`source` less its maximum, so that nothing overflows, and the exponential of that."""
        below = apply("sub", source.dims, source, self._reduced("max", source, axes))
        return below, apply("exp", source.dims, below)

    def _softmax(self, node: Node) -> AbstractValue:
        source = self.value(node.args[0])
        axes = (self._axis(node.args[0], node.args[1]),)
        _, power = self._shifted_exp(source, axes)
        return apply("div", source.dims, power, self._reduced("sum", power, axes))

    def _softmax_backward_data(self, node: Node) -> AbstractValue:
        gradient, result = (self.value(item) for item in node.args[:2])
        axes = (self._axis(node, node.args[2]),)
        weighted = apply("mul", gradient.dims, gradient, result)
        total = self._reduced("sum", weighted, axes)
        return apply("sub", gradient.dims, weighted, apply("mul", gradient.dims, result, total))

    def _log_softmax(self, node: Node) -> AbstractValue:
        source = self.value(node.args[0])
        axes = (self._axis(node.args[0], node.args[1]),)
        below, power = self._shifted_exp(source, axes)
        total = self._reduced("sum", power, axes)
        return apply("sub", source.dims, below, apply("log", total.dims, total), costly=True)

    def _log_softmax_backward_data(self, node: Node) -> AbstractValue:
        gradient, result = (self.value(item) for item in node.args[:2])
        axes = (self._axis(node, node.args[2]),)
        total = self._reduced("sum", gradient, axes)
        share = apply("mul", gradient.dims, apply("exp", gradient.dims, result), total)
        return apply("sub", gradient.dims, gradient, share, costly=True)


def _spaced(value: AbstractValue, axis: int, step: int, size: int) -> AbstractValue:
    """Elements `step` apart along an axis of `size`, with zeros between them."""
    before, count, behind = value.dims[:axis], value.dims[axis], value.dims[axis + 1 :]
    thick = Reshape((*before, count, 1, *behind), value)
    gaps = Constant((*before, count, step - 1, *behind), 0.0)
    flat = Reshape((*before, count * step, *behind), Join((*before, count, step, *behind), (thick, gaps), axis + 1))
    if count * step <= size:
        return flat
    return View((*before, size, *behind), flat, identity((*before, size, *behind)))


def _side_by_side(value: AbstractValue) -> bool:
    """Whether the last dimension's elements are neighbours in memory, as far as views tell."""
    factors = tuple(int(d == len(value.dims) - 1) for d in range(len(value.dims)))
    while isinstance(value, View):
        moving = [sum(f * g for f, g in zip(index.factors, factors, strict=True)) for index in value.index]
        factors = tuple(moving)
        value = value.base
    return not factors or factors[-1] != 0
