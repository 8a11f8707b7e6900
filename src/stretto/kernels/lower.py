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
)
from stretto.kernels.pointwise import POINTWISE, apply

Way: TypeAlias = Literal["forward", "backward"]

REAL_DTYPES: Final = (torch.float32, torch.float64)
"""Values of a loop are of one of these; truth values and counts of them are stored as such numbers."""


def value_dtypes(body: Body) -> set[torch.dtype | None]:
    """Dtypes of what a loop reads and writes."""
    return {node.dtype for node in [*body.next_states, *body.outputs]} | {port.node.dtype for port in body.ports}


def lower(body: Body, way: Way) -> LoopIR:
    """The IR of a loop in one direction.

    Raises:
        Unsupported: If the body has something that the IR cannot say.
    """
    builder = _Builder(body, body.forward if way == "forward" else body.backward)
    return _lower_forward(builder, body) if way == "forward" else _lower_backward(builder, body)


def _lower_forward(builder: "_Builder", body: Body) -> LoopIR:
    builder.lower()
    for role, where, nodes in (
        ("after", Where.PACKED, body.next_states),
        ("output", Where.PACKED, body.outputs),
        ("saved", Where.SAVED, body.saved),
    ):
        for index, node in enumerate(nodes):
            builder.root(role, index, where, node, builder.values[node])
    for index, node in enumerate(body.next_states):
        builder.buffer("final", index, Where.ROW, node.row_shape)
    return builder.finish()


def _lower_backward(builder: "_Builder", body: Body) -> LoopIR:
    """The gradient of a state is that of the next step's backward step and that of everything outside, added up.

           d_after, d_output (from outside)
                   |
    carry_out <-- step t <-- carry_in (from step t + 1)
                   |
           d_per_step, to_deferred
    """
    values = builder.values
    for role, nodes in (("after", body.next_states), ("output", body.outputs), ("saved", body.saved)):
        for index, node in enumerate(nodes):
            read = builder.read(role, index, Where.PACKED, node)
            values.setdefault(node, read)
    for index, node in enumerate(body.state_gradients):
        carry = builder.read("carry_in", index, Where.CARRY_IN, node)
        arriving = builder.read("d_after", index, Where.STRIDED, node)
        values[node] = apply("add", node.row_shape, carry, arriving)
    for index, node in enumerate(body.output_gradients):
        values[node] = builder.read("d_output", index, Where.STRIDED, node)
    builder.lower()
    for index, port in enumerate(body.ports_of(Kind.STATE)):
        zero = Constant(port.node.row_shape, 0.0)
        value = zero if port.gradient is None else _of_shape(values[port.gradient], port.node)
        builder.root("carry_out", index, Where.CARRY_OUT, port.node, value)
    per_step = body.ports_of(Kind.PER_STEP)
    for index, port in enumerate(per_step):
        if port.gradient is not None:
            builder.root("d_per_step", index, Where.PACKED, port.node, _of_shape(values[port.gradient], port.node))
    outgoing = {port.gradient for port in per_step}
    for index, node in enumerate(body.to_deferred):
        if node not in outgoing:
            builder.root("to_deferred", index, Where.PACKED, node, values[node])
    for index, port in enumerate(body.ports_of(Kind.CONSTANT)):
        if port.gradient is not None:
            shape = port.node.row_shape
            buffer = builder.buffer("d_constant", index, Where.ROW, shape)
            more = _of_shape(values[port.gradient], port.node)
            builder.roots.append(Root(apply("add", shape, Read(shape, buffer), more), buffer))
    return builder.finish()


def _of_shape(value: AbstractValue, node: Node) -> AbstractValue:
    if value.dims != node.row_shape:
        raise Unsupported(f"a gradient of another shape than {node.name}")
    return value


@final
class _Builder:
    """Collects the buffers, weights and roots of one direction."""

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
                self.values[node] = Constant(node.row_shape, float(node.args[1]))
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
        lowering = _Lowering(self.values, self.weight)
        for node in self.moving:
            if node.dtype is not None:
                _check(node)
            lowering(node)

    def finish(self) -> LoopIR:
        used = {value.buffer for value in in_order(self.roots) if isinstance(value, Read)}
        uniforms = [node for node, buffer in self.uniform.items() if buffer in used]
        buffers = [*self.buffers, *(self.uniform[node] for node in uniforms)]
        return LoopIR(self.roots, buffers, self.weights, uniforms, self.prepared)


def _check(node: Node) -> None:
    if node.dtype not in REAL_DTYPES and node.dtype is not torch.bool and not _counts(node):
        raise Unsupported(f"the value {node.name} in the loop is of {node.dtype}")


def _counts(node: Node) -> bool:
    """Whether it is a number of true values, which is small enough to be exact as a real number."""
    while is_view(node):
        node = node.inputs[0]
    return node.label == "sum" and node.dtype is torch.int64 and node.inputs[0].dtype is torch.bool


@final
class _Lowering:
    """Turns nodes into values of a row, one after another.

    Args:
        values: What is there from the start: inputs of the body.
        weight: Makes the packed matrix of a node that is the same for all steps.
    """

    def __init__(self, values: dict[Node, AbstractValue], weight: Callable[[Node], Weight]) -> None:
        self.values = values
        self.weight = weight

    def __call__(self, node: Node) -> None:
        """Lower one node.

        Raises:
            Unsupported: If the operator is not known.
        """
        if node.dtype is None:
            return
        name = node.label
        if node.op is operator.getitem:
            self.values[node] = self._part(node)
        elif node.op is constant_fill:
            self.values[node] = Constant(node.row_shape, float(node.args[1]))
        elif name in POINTWISE:
            self.values[node] = self._pointwise(node)
        elif (method := getattr(self, f"_{name.strip('_')}", None)) is not None:
            self.values[node] = method(node)
        else:
            raise Unsupported(f"no code is generated for the operator {name}")

    def value(self, node: Any) -> AbstractValue:
        """The lowered value of a node that was given or lowered before."""
        if node not in self.values:
            raise Unsupported(f"the value {node!r} is not one of a row")
        return self.values[node]

    def _pointwise(self, node: Node) -> AbstractValue:
        rank = len(node.row_shape)

        def operand(item: Any) -> AbstractValue:
            if isinstance(item, Node):
                value = self.value(item)
                if not item.has_rows:
                    dims = value.dims
                    extra = len(dims) - rank
                    if extra > 0:
                        return Reshape(dims[extra:], value)
                return value
            if isinstance(item, (bool, int, float)):
                return Constant((), float(item))
            raise Unsupported(f"{node.label} with an argument of type {type(item).__name__}")

        return POINTWISE[node.label](node, operand)

    def _axis(self, node: Node, dimension: int, *, rank: int | None = None) -> int:
        """The dimension of a row that a dimension of the batch is."""
        rank = len(node.shape) if rank is None else rank
        dimension %= rank
        first = node.shape[0]
        merged = isinstance(first, BatchDim) and first.factor > 1
        if dimension == 0:
            raise Unsupported(f"{node.label} over the rows of the batch")
        return dimension if merged else dimension - 1

    # Views

    def _same(self, node: Node) -> AbstractValue:
        return self.value(node.args[0])

    _alias = _detach = _clone = _same

    def _to_copy(self, node: Node) -> AbstractValue:
        if not (node.dtype.is_floating_point and node.dtype == node.kwargs.get("dtype", node.dtype)):  # type: ignore[union-attr]
            raise Unsupported(f"a conversion to {node.dtype}")
        return self.value(node.args[0])

    def _view(self, node: Node) -> AbstractValue:
        base = self.value(node.args[0])
        return base if base.dims == node.row_shape else Reshape(node.row_shape, base)

    _unsafe_view = _unsqueeze = _squeeze = _view

    def _permuted(self, node: Node, order: list[int]) -> AbstractValue:
        source = node.args[0]
        base = self.value(source)
        if order[0] != 0:
            raise Unsupported(f"{node.label} of the rows of the batch")
        axes = [self._axis(source, d) for d in order[1:]]
        if isinstance(source.shape[0], BatchDim) and source.shape[0].factor > 1:
            axes = [0, *axes]
        factors: list[tuple[int, ...]] = [()] * len(axes)
        for position, axis in enumerate(axes):
            factors[axis] = tuple(int(i == position) for i in range(len(axes)))
        return View(node.row_shape, base, tuple(Affine(0, factor) for factor in factors))

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
        rank = len(base.dims) - 1
        index = []
        for d in range(len(base.dims)):
            place = d if d < axis else d - 1
            if d == axis:
                index.append(Affine(position, (0,) * rank))
            else:
                index.append(Affine(0, tuple(int(i == place) for i in range(rank))))
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
        source = node.args[0]
        base = self.value(source)
        dims = base.dims
        target = node.row_shape
        if not source.has_rows and len(dims) > len(target):
            dims = dims[len(dims) - len(target) :]
            base = Reshape(dims, base)
        shift = len(target) - len(dims)
        index = tuple(
            Affine(0, tuple(int(i == d + shift and size != 1) for i in range(len(target))))
            for d, size in enumerate(dims)
        )
        return View(target, base, index)

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
        total = self._product(left, right)
        added = self.value(bias)
        if not bias.has_rows and len(added.dims) > len(node.row_shape):
            added = Reshape(added.dims[1:], added)
        return apply("add", node.row_shape, total, added)

    def _bmm(self, node: Node) -> AbstractValue:
        left, right = (self._matrix(item) for item in node.args)
        (rows, inner), columns = left.dims, right.dims[1]
        # Sum along whichever dimension lies side by side in memory.
        along_columns = columns > 1 and _side_by_side(right)
        dims = (rows, inner, columns) if along_columns else (rows, columns, inner)
        at = (1, 2) if along_columns else (2, 1)
        first = View(dims, left, (_unit(0, 3), _unit(at[0], 3)))
        second = View(dims, right, (_unit(at[0], 3), _unit(at[1], 3)))
        axis = at[0]
        total = Reduce(
            tuple(1 if d == axis else size for d, size in enumerate(dims)),
            "sum",
            apply("mul", dims, first, second),
            (axis,),
        )
        return Reshape((rows, columns), total)

    def _matrix(self, node: Node) -> AbstractValue:
        if not node.has_rows or node.shape[0] != BatchDim(1) or len(node.row_shape) != 2:
            raise Unsupported("a batched product other than one matrix for each row")
        return self.value(node)

    def _axes(self, node: Node) -> tuple[tuple[int, ...], bool]:
        source = node.args[0]
        given = node.args[1] if len(node.args) > 1 else None
        if given is None:
            raise Unsupported(f"{node.label} over everything")
        dimensions = [given] if isinstance(given, int) else list(given)
        keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
        return tuple(sorted(self._axis(source, d) for d in dimensions)), keep

    def _reduced(self, kind: str, operand: AbstractValue, axes: tuple[int, ...]) -> AbstractValue:
        dims = tuple(1 if d in axes else size for d, size in enumerate(operand.dims))
        return Reduce(dims, kind, operand, axes)

    def _shaped(self, node: Node, value: AbstractValue) -> AbstractValue:
        return value if value.dims == node.row_shape else Reshape(node.row_shape, value)

    def _sum(self, node: Node) -> AbstractValue:
        axes, _ = self._axes(node)
        return self._shaped(node, self._reduced("sum", self.value(node.args[0]), axes))

    def _amax(self, node: Node) -> AbstractValue:
        axes, _ = self._axes(node)
        return self._shaped(node, self._reduced("max", self.value(node.args[0]), axes))

    def _amin(self, node: Node) -> AbstractValue:
        axes, _ = self._axes(node)
        return self._shaped(node, self._reduced("min", self.value(node.args[0]), axes))

    def _mean(self, node: Node) -> AbstractValue:
        axes, _ = self._axes(node)
        source = self.value(node.args[0])
        total = self._reduced("sum", source, axes)
        count = math.prod(source.dims[axis] for axis in axes)
        mean = apply("div", total.dims, total, Constant((), float(count)), costly=False)
        return self._shaped(node, mean)

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


def _unit(position: int, rank: int) -> Affine:
    return Affine(0, tuple(int(i == position) for i in range(rank)))


def _side_by_side(value: AbstractValue) -> bool:
    """Whether the last dimension's elements are neighbours in memory, as far as views tell."""
    factors = tuple(int(d == len(value.dims) - 1) for d in range(len(value.dims)))
    while isinstance(value, View):
        moving = [sum(f * g for f, g in zip(index.factors, factors, strict=True)) for index in value.index]
        factors = tuple(moving)
        value = value.base
    return not factors or factors[-1] != 0
