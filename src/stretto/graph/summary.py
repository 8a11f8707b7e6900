"""A plan and its loops in numbers: what is computed at which stage, and what a step costs."""

from dataclasses import dataclass
from typing import Final, final

from stretto.graph.adjoint import Body, Kind
from stretto.graph.analyse import Loop, Plan, Stage
from stretto.graph.node import BatchDim, Node
from stretto.graph.operators import is_view

PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "product_of_heads", "gradient_of_heads"})
"""Operators that multiply matrices."""

SAME_VALUE: Final = frozenset({"alias", "detach"})
"""Operators that return their argument; left out of summaries and pictures."""

PLAIN_NAMES: Final = {"t": "transpose", "random_fill": "random", "constant_fill": "constant"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, as a person reads it.

    Attributes:
        name: Its plain name, such as "sigmoid".
        shape: Sizes of its result within a row, or as a whole where it has no rows.
    """

    name: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, node: Node) -> "Operator":
        """The operator of a node; for one of several results, the operator that computed them."""
        label = node.args[0].label if node.label == "getitem" else node.label
        name = label.strip("_").removeprefix("native_")
        return cls(name=PLAIN_NAMES.get(name, name), shape=node.row_shape)

    def __str__(self) -> str:
        return f"{self.name} {format_shape(self.shape)}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of matrices: row vectors of size K times a matrix of K x N.

    Attributes:
        K: Rows of the matrix; of the result, for a gradient that sums over all steps.
        N: Columns of the matrix.
        vectors: How many vectors of one row of the batch it multiplies.
    """

    K: int
    N: int
    vectors: int

    @classmethod
    def of(cls, node: Node) -> "Product":
        """The sizes of a product."""
        left, right = node.args[-2:]
        inner = left.shape[-2] if isinstance(right.shape[-2], BatchDim) else right.shape[-2]
        columns = right.shape[-1]
        vectors = node.row_size // columns if node.has_rows and columns else 1
        return cls(K=inner, N=columns, vectors=vectors)

    def __str__(self) -> str:
        return format_shape((self.K, self.N)) + (f" ({self.vectors} vectors per row)" if self.vectors > 1 else "")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSummary:
    """What one loop does in a step.

    Attributes:
        level: How many loops there are up to it, itself included.
        states: Names and sizes of the parts of the state that it carries.
        forward: Its products, forward.
        backward: Its products, backward.
        deferred: Products that its weights' gradients need, once after the backward loop.
        forward_operators: Operators of a step that compute something, other than products.
        backward_operators: The same of a backward step.
        saved: Values that are stored for the backward pass, besides the states.
        saved_bytes: Their bytes, per row and step.
    """

    level: int
    states: dict[str, tuple[int, ...]]
    forward: tuple[Product, ...]
    backward: tuple[Product, ...]
    deferred: tuple[Product, ...]
    forward_operators: int
    backward_operators: int
    saved: tuple[Operator, ...]
    saved_bytes: int

    @classmethod
    def of(cls, loop: Loop, body: Body) -> "LoopSummary":
        """Count one loop."""
        states = [port.source for port in body.ports_of(Kind.STATE)]
        return cls(
            level=loop.level,
            states={state.name: state.row_shape for state in states},
            forward=products_of(body.forward),
            backward=products_of(body.backward),
            deferred=products_of(body.deferred),
            forward_operators=_count_operators(body.forward),
            backward_operators=_count_operators(body.backward),
            saved=tuple(Operator.of(node) for node in body.saved),
            saved_bytes=sum(node.row_size * node.dtype.itemsize for node in body.saved if node.dtype is not None),
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A plan in numbers: operators by stage, `deferred` among them, loops in their order, and products outside."""

    operators: dict[str, tuple[Operator, ...]]
    loops: tuple[LoopSummary, ...]
    hoisted: tuple[Product, ...]
    sunk: tuple[Product, ...]

    @classmethod
    def of(cls, plan: Plan, bodies: list[Body]) -> "Summary":
        """Count a plan whose loops have the given bodies, in order."""
        nodes = {stage: plan.nodes_at(stage) for stage in Stage}
        operators = {stage.value: _operators(found) for stage, found in nodes.items()}
        operators["deferred"] = _operators([node for body in bodies for node in body.deferred])
        return cls(
            operators=operators,
            loops=tuple(LoopSummary.of(loop, body) for loop, body in zip(plan.all_loops, bodies, strict=True)),
            hoisted=products_of(nodes[Stage.HOISTED]),
            sunk=products_of(nodes[Stage.SUNK]),
        )


def format_shape(shape: tuple[int, ...]) -> str:
    """A shape as people write it, with multiplication signs."""
    return " \u00d7 ".join(map(str, shape)) or "1"


def products_of(nodes: list[Node]) -> tuple[Product, ...]:
    """The products among some nodes."""
    return tuple(Product.of(node) for node in nodes if node.label in PRODUCTS)


def _operators(nodes: list[Node]) -> tuple[Operator, ...]:
    return tuple(Operator.of(node) for node in nodes if node.dtype is not None and node.label not in SAME_VALUE)


def _count_operators(nodes: list[Node]) -> int:
    return sum(node.dtype is not None and not is_view(node) and node.label not in PRODUCTS for node in nodes)
