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
    Gather,
    Join,
    LoopIR,
    Position,
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
from stretto.kernels.pointwise import POINTWISE, apply, convert

Way: TypeAlias = Literal["forward", "backward"]

REAL_DTYPES: Final = (torch.float32, torch.float64)
INTEGER_DTYPES: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
REDUCTIONS: Final = {"sum": "sum", "amax": "max", "amin": "min", "any": "max", "all": "min"}
MAX_SORTED: Final = 512
"""Elements that are put in order, at most: each is compared with each."""


def is_integer(node: Node) -> bool:
    """Whether a value is stored as 64-bit integers; booleans are stored as real numbers."""
    return node.dtype is not None and node.dtype not in {torch.bool, *REAL_DTYPES}


def real_dtype(body: Body) -> torch.dtype:
    """What a loop computes real numbers in: the widest that any of them has.

    Raises:
        Unsupported: If a value is neither float32 nor float64 nor an integer nor a boolean.
    """
    nodes = [*body.forward, *body.backward, *body.next_states, *body.outputs, *(port.node for port in body.ports)]
    dtypes = set()
    for node in nodes:
        if node.dtype is not None and node.op is not constant_fill:
            _check(node)
            # A single number does not widen what it is combined with.
            dtypes.add(torch.float32 if node.op is None and node.shape == () else node.dtype)
    return torch.float64 if torch.float64 in dtypes else torch.float32


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
        lowering.buffer("final", index, Where.ROW, node)
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
    for index, node in _with_gradients(body.state_gradients):
        carry = lowering.read("carry_in", index, Where.CARRY_IN, node)
        arriving = lowering.read("d_after", index, Where.STRIDED, node)
        values[node] = apply("add", node.row_shape, carry, arriving)
    for index, node in _with_gradients(body.output_gradients):
        values[node] = lowering.read("d_output", index, Where.STRIDED, node)
    lowering.lower()
    states = body.ports_of(Kind.STATE)
    for index, _ in _with_gradients(body.nodes_of(Kind.STATE)):
        port = states[index]
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
            buffer = lowering.buffer("d_constant", index, Where.ROW, port.node)
            more = _of_shape(values[port.gradient], port.node)
            lowering.roots.append(Root(apply("add", shape, Read(shape, buffer), more), buffer))
    return lowering.finish()


def _with_gradients(nodes: list[Node]) -> list[tuple[int, Node]]:
    """Those that are neither integers nor booleans, with their places in the list."""
    return [(index, node) for index, node in enumerate(nodes) if node.dtype in REAL_DTYPES]


def _of_shape(value: AbstractValue, node: Node) -> AbstractValue:
    if value.dims != node.row_shape:
        raise Unsupported(f"a gradient of another shape than {node.name}")
    return value


def _check(node: Node) -> None:
    if node.dtype not in {torch.bool, *REAL_DTYPES, *INTEGER_DTYPES}:
        dtype = str(node.dtype).removeprefix("torch.")
        advice = ""
        if node.dtype in {torch.float16, torch.bfloat16}:
            advice = "half precision is mixed with wider values; convert all that the step reads to one dtype: "
        where = f"{node.name}{node.whereabouts}"
        raise Unsupported(f"{advice}the value {where} in the loop is of {dtype}, which no code is generated for")


def _has_several_rows(node: Node) -> bool:
    """Whether each row of the batch is several rows of the node's first dimension."""
    first = node.shape[0]
    return isinstance(first, BatchDim) and first.factor > 1


def _of_dims(value: AbstractValue, node: Node) -> AbstractValue:
    return value if value.dims == node.row_shape else Reshape(node.row_shape, value)


def _of_kind(value: AbstractValue, *, integer: bool) -> AbstractValue:
    """A value as real numbers or as integers."""
    if value.integer == integer:
        return value
    return apply("to_integer" if integer else "to_real", value.dims, value)


@final
class _Lowering:
    """Turns the nodes of one direction into values of a row, and collects its buffers, weights and roots.

    A method `_name` lowers the operator of that name.
    """

    def __init__(self, body: Body, nodes: list[Node]) -> None:
        # Values of single precision within a loop in double are rounded to what they would be.
        self.rounds = real_dtype(body) is torch.float64
        self.roots: list[Root] = []
        self.buffers: list[Buffer] = []
        self.weights: dict[Node, Weight] = {}
        self.uniform: dict[Node, Buffer] = {}
        self.values: dict[Node, AbstractValue] = {}
        # Ordered: the text of generated code is its key in a cache, and must be the same for the same body.
        self.invariant = dict.fromkeys(body.nodes_of(Kind.WEIGHT))
        self.prepared: list[Node] = []
        self.varying: list[Node] = []
        for node in nodes:
            if node.op is constant_fill:
                # Rounded to its own dtype: what it is combined with may be of a wider one.
                number = torch.tensor(node.args[1], dtype=node.dtype).item()
                integer = is_integer(node)
                self.values[node] = Constant(node.row_shape, number if integer else float(number), integer=integer)
            elif not node.has_rows and node.inputs and all(item in self.invariant for item in node.inputs):
                self.invariant[node] = None
                self.prepared.append(node)
            else:
                self.varying.append(node)
        for index, port in enumerate(body.ports_of(Kind.STATE)):
            self.values[port.node] = self.read("before", index, Where.BEFORE, port.node)
            size, integer = port.node.row_size, is_integer(port.node)
            self.buffers.append(Buffer("initial", index, Where.ROW, (), size, integer=integer))
        for index, port in enumerate(body.ports_of(Kind.PER_STEP)):
            self.values[port.node] = self.read("per_step", index, Where.PACKED, port.node)
        for index, port in enumerate(body.ports_of(Kind.CONSTANT)):
            self.values[port.node] = self.read("constant", index, Where.ROW, port.node)

    def buffer(self, role: str, index: int, where: Where, node: Node) -> Buffer:
        dims = node.row_shape
        found = Buffer(role, index, where, contiguous(dims), math.prod(dims), is_integer(node))
        self.buffers.append(found)
        return found

    def read(self, role: str, index: int, where: Where, node: Node) -> Read:
        _check(node)
        return Read(node.row_shape, self.buffer(role, index, where, node))

    def root(self, role: str, index: int, where: Where, node: Node, value: AbstractValue) -> None:
        self.roots.append(Root(value, self.buffer(role, index, where, node)))

    def weight(self, node: Node) -> Weight:
        if node not in self.invariant:
            raise Unsupported("a product of two values that both change from step to step, other than row by row")
        if node not in self.weights:
            *heads, rows, columns = node.row_shape
            self.weights[node] = Weight(rows, columns, *heads)
        return self.weights[node]

    def lower(self) -> None:
        for index, node in enumerate(node for node in self.invariant if node.dtype is not None):
            shape = node.row_shape
            if len(shape) <= 6:
                place, size, integer = contiguous(shape), math.prod(shape), is_integer(node)
                self.uniform[node] = Buffer("uniform", index, Where.UNIFORM, place, size, integer)
                self.values.setdefault(node, Read(shape, self.uniform[node]))
        for node in self.varying:
            if node.dtype is not None:
                _check(node)
                try:
                    value = self._lowered(node)
                except Unsupported as reason:
                    raise Unsupported(f"{reason}{node.whereabouts}") from None
                if self.rounds and node.dtype is torch.float32 and not is_view(node):
                    value = apply("round_single", value.dims, value)
                self.values[node] = value

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
            return self._pointwise(node)
        if name in REDUCTIONS:
            source = node.args[0]
            value = (
                self._reduction_operand(node) if not is_integer(node) else _of_kind(self.value(source), integer=True)
            )
            return _of_dims(self._reduced(REDUCTIONS[name], value, self._axes(node)), node)
        method: Callable[[Node], AbstractValue] | None = getattr(self, f"_{name.strip('_')}", None)
        if method is None:
            raise Unsupported(f"no code is generated for the operator {name}")
        return method(node)

    def value(self, node: Any) -> AbstractValue:
        """The lowered value of a node that was given or lowered before."""
        if node not in self.values:
            raise Unsupported(f"the value {node!r} is not one of a row")
        return self.values[node]

    def _reduction_operand(self, node: Node) -> AbstractValue:
        """The operand of a reduction over real numbers or booleans."""
        source = node.args[0]
        to_boolean = node.dtype is torch.bool and source.dtype is not torch.bool
        value = self.value(source)
        return convert(value, value.dims, torch.bool) if to_boolean else value

    def _pointwise(self, node: Node) -> AbstractValue:
        """A pointwise operator on operands that are all real or all integers, as PyTorch promotes them."""
        condition = {"where": 0, "masked_fill": 1}.get(node.label)
        operands = [item for at, item in enumerate(node.args) if at != condition]
        kinds = {item.dtype for item in operands if isinstance(item, Node) and item.dtype is not None}
        if node.dtype is torch.bool:
            # Of a comparison: what its operands are promoted to. Python's numbers do not widen integers, nor do
            # tensors without dimensions.
            real = any(kind.is_floating_point for kind in kinds) or any(isinstance(item, float) for item in operands)
            integer = not real and (kinds != {torch.bool} or any(type(item) is int for item in operands))
        else:
            assert node.dtype is not None
            integer, kinds = is_integer(node), {node.dtype}

        def take(item: Any) -> AbstractValue:
            if isinstance(item, Node):
                value = self._of_rank(item, len(node.row_shape))
                if condition is not None and item is node.args[condition]:
                    return value if item.dtype is torch.bool else convert(value, value.dims, torch.bool)
                return _of_kind(value, integer=integer)
            if isinstance(item, (bool, int, float)):
                is_single = self.rounds and torch.float32 in kinds and torch.float64 not in kinds
                number = float(torch.tensor(item, dtype=torch.float32)) if is_single else float(item)
                return Constant((), int(item) if integer else number, integer=integer)
            raise Unsupported(f"{node.label} with an argument of type {type(item).__name__}")

        made = POINTWISE[node.label](node, take)
        is_narrow = made.integer and node.dtype is not torch.int64
        return convert(made, made.dims, node.dtype) if is_narrow and node.dtype is not None else made

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
        source, dtype = node.args[0], node.dtype
        assert dtype is not None
        value = self.value(source)
        return value if source.dtype is dtype else convert(value, value.dims, dtype)

    def _view(self, node: Node) -> AbstractValue:
        return _of_dims(self.value(node.args[0]), node)

    _unsafe_view = _reshape = _unsqueeze = _squeeze = _view

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
        if several.label in {"max", "min"}:
            return self._extreme_part(node)
        if several.label in {"topk", "sort"}:
            return self._ordered_part(node)
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

    # Look-ups

    def _embedding(self, node: Node) -> AbstractValue:
        table, rows = self.value(node.args[0]), self.value(node.args[1])
        rank = len(node.row_shape)
        place = (unit(None, rank), unit(rank - 1, rank))
        return Gather(node.row_shape, table, Reshape((*rows.dims, 1), rows), place, 0)

    def _gather(self, node: Node) -> AbstractValue:
        source, dimension, index = node.args[:3]
        axis = self._axis(source, dimension)
        return _gather_along(self.value(source), self.value(index), node.row_shape, axis)

    def _index_select(self, node: Node) -> AbstractValue:
        source, dimension, index = node.args
        axis = self._axis(source, dimension)
        dims = tuple(size if d == axis else 1 for d, size in enumerate(node.row_shape))
        return _gather_along(self.value(source), Reshape(dims, self.value(index)), node.row_shape, axis)

    def _extreme_position(self, node: Node, kind: str) -> AbstractValue:
        """Where the first maximum or minimum is; NaN counts as either."""
        source = node.args[0]
        dimension = node.args[1] if len(node.args) > 1 else None
        if dimension is None:
            raise Unsupported(f"{node.label} over everything")
        axis = self._axis(source, dimension)
        value = self.value(source)
        is_extreme = apply("eq", value.dims, value, self._reduced(kind, value, (axis,)))
        if not value.integer:
            is_extreme = apply("maximum", value.dims, is_extreme, apply("ne", value.dims, value, value))
        last = Constant((), value.dims[axis] - 1, integer=True)
        place = apply("where", value.dims, is_extreme, _positions(value.dims, axis), last)
        return self._reduced("min", place, (axis,))

    def _argmax(self, node: Node) -> AbstractValue:
        return _of_dims(self._extreme_position(node, "max"), node)

    def _argmin(self, node: Node) -> AbstractValue:
        return _of_dims(self._extreme_position(node, "min"), node)

    def _extreme_part(self, node: Node) -> AbstractValue:
        several, number = node.args
        if number == 1:
            return _of_dims(self._extreme_position(several, several.label), node)
        axis = self._axis(several.args[0], several.args[1])
        return _of_dims(self._reduced(several.label, self.value(several.args[0]), (axis,)), node)

    def _ordered_part(self, node: Node) -> AbstractValue:
        """Values in order, or where they were; of as many as the result has."""
        several, number = node.args
        source, *given = several.args
        first = 1 if several.label == "topk" else 0
        dimension = given[first] if len(given) > first else several.kwargs.get("dim", -1)
        falls = several.label == "topk"
        falls = given[first + 1] if len(given) > first + 1 else several.kwargs.get("descending", falls)
        axis, value = self._axis(source, dimension), self.value(source)
        order = self._order(value, axis, count=node.row_shape[axis], falls=falls)
        return order if number == 1 else _gather_along(value, order, node.row_shape, axis)

    def _order(self, value: AbstractValue, axis: int, *, count: int, falls: bool) -> AbstractValue:
        """Where along an axis the first, second, ... of its values in order lie.

        The rank of a value is the number of those that come before it: larger ones, and equal ones to its left.
        """
        size = value.dims[axis]
        if size > MAX_SORTED:
            raise Unsupported(f"{size} values to put in order; up to {MAX_SORTED} are")
        if not value.integer:
            most = Constant((), math.inf)
            value = apply("where", value.dims, apply("ne", value.dims, value, value), most, value)
        dims = (*value.dims[: axis + 1], size, *value.dims[axis + 1 :])
        one, other = _expand_for_pairs(value, dims, axis, axis), _expand_for_pairs(value, dims, axis, axis + 1)
        is_left = apply("lt", dims, _positions(dims, axis + 1), _positions(dims, axis))
        ties = apply("mul", dims, apply("eq", dims, other, one), is_left)
        is_before = apply("maximum", dims, apply("gt" if falls else "lt", dims, other, one), ties)
        rank = Reshape(value.dims, self._reduced("sum", is_before, (axis + 1,)))
        dims = (*value.dims[:axis], count, *dims[axis + 1 :])
        here = apply(
            "eq", dims, _expand_for_pairs(rank, dims, axis, axis + 1), apply("to_real", dims, _positions(dims, axis))
        )
        place = apply("where", dims, here, _positions(dims, axis + 1), Constant((), 0, integer=True))
        return Reshape((*value.dims[:axis], count, *value.dims[axis + 1 :]), self._reduced("max", place, (axis + 1,)))

    def _scatter(self, node: Node) -> AbstractValue:
        """Where several go to one place, the last of them stays, or they are added up."""
        source, dimension, where, given = node.args[:4]
        if node.kwargs or len(node.args) > 4:
            raise Unsupported(f"{node.label} with a reduction")
        axis, into, index = self._axis(node, dimension), self.value(source), self.value(where)
        integer, dims = into.integer, into.dims
        if any(one != other for d, (one, other) in enumerate(zip(dims, index.dims, strict=True)) if d != axis):
            raise Unsupported(f"{node.label} with fewer indices than there are places for")
        if isinstance(given, Node) and self.value(given).dims != ():
            # There may be more values than indices: the first along each dimension count.
            new = self.value(given)
            new = _of_kind(
                new if new.dims == index.dims else View(index.dims, new, identity(index.dims)), integer=integer
            )
        else:
            number = float(given) if not isinstance(given, Node) else 0.0
            new = Constant(index.dims, int(number) if integer else number, integer=integer)
            if isinstance(given, Node):
                new = View(index.dims, _of_kind(self.value(given), integer=integer), ())
        return self._scattered(into, index, new, axis=axis, adds=node.label == "scatter_add")

    def _scattered(
        self, into: AbstractValue, index: AbstractValue, new: AbstractValue, *, axis: int, adds: bool
    ) -> AbstractValue:
        dims, integer = into.dims, into.integer
        nothing = Constant((), 0 if integer else 0.0, integer=integer)
        if index.dims[axis] == 1:
            here = apply("eq", dims, index, _positions(dims, axis))
            if adds:
                return apply("add", dims, into, apply("where", dims, here, new, nothing), alpha=1)
            return apply("where", dims, here, new, into)
        wide = (*dims[: axis + 1], index.dims[axis], *dims[axis + 1 :])
        index = View(new.dims, index, tuple(unit(d if n != 1 else None, len(dims)) for d, n in enumerate(index.dims)))
        here = apply("eq", wide, _expand_for_pairs(index, wide, axis, axis + 1), _positions(wide, axis))
        if adds:
            sent = apply("where", wide, here, _expand_for_pairs(new, wide, axis, axis + 1), nothing)
            return apply("add", dims, into, Reshape(dims, self._reduced("sum", sent, (axis + 1,))), alpha=1)
        none = Constant((), -1, integer=True)
        last = self._reduced("max", apply("where", wide, here, _positions(wide, axis + 1), none), (axis + 1,))
        last = Reshape(dims, last)
        is_hit = apply("gt", dims, last, none)
        found = _gather_along(new, apply("maximum", dims, last, Constant((), 0, integer=True)), dims, axis)
        return apply("where", dims, is_hit, found, into)

    _scatter_add = _scatter

    def _index_add(self, node: Node) -> AbstractValue:
        source, dimension, where, given = node.args
        if node.kwargs:
            raise Unsupported("index_add with a factor")
        axis, into, new = self._axis(node, dimension), self.value(source), self.value(given)
        thin = tuple(size if d == axis else 1 for d, size in enumerate(new.dims))
        return self._scattered(into, Reshape(thin, self.value(where)), new, axis=axis, adds=True)

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
        integer = is_integer(node)
        return Join(node.row_shape, tuple(_of_kind(self.value(item), integer=integer) for item in node.args[0]), axis)

    def _stack(self, node: Node) -> AbstractValue:
        axis = self._axis(node, node.args[1] if len(node.args) > 1 else 0)
        parts = []
        for item in node.args[0]:
            base = _of_kind(self.value(item), integer=is_integer(node))
            parts.append(Reshape((*base.dims[:axis], 1, *base.dims[axis:]), base))
        return Join(node.row_shape, tuple(parts), axis)

    def _unfold(self, node: Node) -> AbstractValue:
        source, dimension, _, step = node.args
        axis = self._axis(source, dimension)
        index = list(identity(node.row_shape)[:-1])
        index[axis] = Affine(0, (*(step * factor for factor in index[axis].factors[:-1]), 1))
        return View(node.row_shape, self.value(source), tuple(index))

    def _unfold_backward(self, node: Node) -> AbstractValue:
        """Each element is the sum over the windows that it is in: first with zeros around, then along a diagonal.

        element i = sum over k of window i - k at k, which lies `size - 1` further on behind the zeros
        """
        gradient, _, dimension, size, step = node.args
        axis = self._axis(node, dimension)
        dims = node.row_shape
        value = self.value(gradient)
        if step > 1:
            value = _dilated(value, axis, step, (value.dims[axis] - 1) * step + 1)
        wide = (*dims[:axis], dims[axis] + size - 1, *dims[axis + 1 :], size)
        value = self._padded(wide, axis, size - 1, value)
        rank = len(dims) + 1
        index = [unit(d + 1, rank) for d in range(len(dims))] + [unit(0, rank)]
        index[axis] = Affine(size - 1, (-1, *index[axis].factors[1:]))
        total = self._reduced("sum", View((size, *dims), value, tuple(index)), (0,))
        return Reshape(dims, total)

    def _constant_pad_nd(self, node: Node) -> AbstractValue:
        source, widths = node.args[:2]
        number = float(node.args[2]) if len(node.args) > 2 else 0.0
        value = self.value(source)
        for place, d in enumerate(reversed(range(len(node.shape) - len(widths) // 2, len(node.shape)))):
            axis = self._axis(node, d)
            left, right = widths[2 * place : 2 * place + 2]
            if min(left, right) < 0:
                kept = value.dims[axis] + min(left, 0) + min(right, 0)
                dims = (*value.dims[:axis], kept, *value.dims[axis + 1 :])
                index = list(identity(dims))
                index[axis] = Affine(max(-left, 0), index[axis].factors)
                value = View(dims, value, tuple(index))
            if max(left, right) > 0:
                wide = value.dims[axis] + max(left, 0) + max(right, 0)
                dims = (*value.dims[:axis], wide, *value.dims[axis + 1 :])
                value = self._padded(dims, axis, max(left, 0), value, number)
        return value

    def _padded(
        self, dims: tuple[int, ...], axis: int, start: int, value: AbstractValue, number: float = 0.0
    ) -> AbstractValue:
        parts: list[AbstractValue] = []
        width = value.dims[axis]
        for size in (start, dims[axis] - start - width):
            filler = Constant((*dims[:axis], size, *dims[axis + 1 :]), number)
            parts += [filler, value] if not parts else [filler]
        return Join(dims, tuple(part for part in parts if part.dims[axis]), axis)

    def _slice_backward(self, node: Node) -> AbstractValue:
        gradient, _, dimension, start, _, step = node.args
        axis = self._axis(node, dimension)
        size = node.row_shape[axis]
        start = max(start + size, 0) if start < 0 else min(start, size)
        value = self.value(gradient)
        return self._padded(
            node.row_shape, axis, start, value if step == 1 else _dilated(value, axis, step, size - start)
        )

    def _select_backward(self, node: Node) -> AbstractValue:
        gradient, _, dimension, position = node.args
        axis = self._axis(node, dimension)
        base = self.value(gradient)
        thick = Reshape((*base.dims[:axis], 1, *base.dims[axis:]), base)
        return self._padded(node.row_shape, axis, position % node.row_shape[axis], thick)

    def _fill(self, node: Node) -> AbstractValue:
        # A number would have become a constant when the step was traced: this is a tensor.
        value = _of_kind(self.value(node.args[1]), integer=is_integer(node))
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

    _product_of_heads = _mm

    def _addmm(self, node: Node) -> AbstractValue:
        if node.kwargs:
            raise Unsupported("addmm with factors")
        bias, left, right = node.args
        return apply("add", node.row_shape, self._product(left, right), self._of_rank(bias, len(node.row_shape)))

    def _bmm(self, node: Node) -> AbstractValue:
        if not all(item.has_rows for item in node.args):
            raise Unsupported("a batched product of a row's matrices with something that has no rows")
        left, right = (self.value(item) for item in node.args)
        *heads, rows, inner = left.dims
        columns = right.dims[-1]
        # Sum along the dimension whose elements are neighbours in memory.
        along_columns = columns > 1 and _follows_memory(right)
        dims = (*heads, rows, inner, columns) if along_columns else (*heads, rows, columns, inner)
        rank, at = len(dims), len(heads) + 1
        before = tuple(unit(d, rank) for d in range(len(heads)))
        summed, kept = (unit(d, rank) for d in ((at, at + 1) if along_columns else (at + 1, at)))
        first = View(dims, left, (*before, unit(at - 1, rank), summed))
        second = View(dims, right, (*before, summed, kept))
        total = self._reduced("sum", apply("mul", dims, first, second), (at if along_columns else at + 1,))
        return Reshape(node.row_shape, total)

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

    def _safe_softmax(self, node: Node) -> AbstractValue:
        """Zeros where all scores are minus infinity, as where attention masks everything."""
        source = self.value(node.args[0])
        axes = (self._axis(node.args[0], node.args[1]),)
        top = self._reduced("max", source, axes)
        nothing = apply("eq", top.dims, top, Constant((), -math.inf))
        top = apply("where", top.dims, nothing, Constant((), 0.0), top)
        power = apply("exp", source.dims, apply("sub", source.dims, source, top))
        total = apply("add", top.dims, self._reduced("sum", power, axes), nothing)
        return apply("div", source.dims, power, total)

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


def _positions(dims: tuple[int, ...], axis: int) -> AbstractValue:
    """The position along an axis, as an integer."""
    return Position(dims, unit(axis, len(dims)))


def _gather_along(value: AbstractValue, index: AbstractValue, dims: tuple[int, ...], axis: int) -> AbstractValue:
    """Elements along an axis at computed places."""
    if isinstance(value, Constant):
        return Constant(dims, value.number, integer=value.integer)
    place = tuple(unit(None if d == axis else d, len(dims)) for d in range(len(dims)))
    return Gather(dims, value, index, place, axis)


def _expand_for_pairs(value: AbstractValue, dims: tuple[int, ...], axis: int, at: int) -> AbstractValue:
    """A value for all pairs along an axis: of the dimensions `axis` and `axis + 1` of the result, it varies along `at`.

    Both stand for the dimension `axis` of the value.
    """
    places = [*range(axis), at, *range(axis + 2, len(dims))]
    return View(dims, value, tuple(unit(d, len(dims)) for d in places))


def _dilated(value: AbstractValue, axis: int, step: int, size: int) -> AbstractValue:
    """Elements `step` apart along an axis of `size`, with zeros between them."""
    before, count, behind = value.dims[:axis], value.dims[axis], value.dims[axis + 1 :]
    thick = Reshape((*before, count, 1, *behind), value)
    gaps = Constant((*before, count, step - 1, *behind), 0.0)
    flat = Reshape((*before, count * step, *behind), Join((*before, count, step, *behind), (thick, gaps), axis + 1))
    if count * step <= size:
        return flat
    return View((*before, size, *behind), flat, identity((*before, size, *behind)))


def _follows_memory(value: AbstractValue) -> bool:
    """Whether the last dimension is the one whose elements are neighbours in memory, as far as views tell."""
    factors = tuple(int(d == len(value.dims) - 1) for d in range(len(value.dims)))
    while isinstance(value, View):
        moving = [sum(f * g for f, g in zip(index.factors, factors, strict=True)) for index in value.index]
        factors = tuple(moving)
        value = value.base
    return not factors or factors[-1] != 0
