"""Running nodes with PyTorch, for any number of rows."""

from collections.abc import Iterable
from typing import Any

from stretto.graph.node import BatchDim, Node, replaced


def evaluate(node: Node, values: dict[Node, Any], rows: int) -> Any:
    """The value of one node, given those it reads."""

    def known(value: Any) -> Any:
        if isinstance(value, Node):
            return values[value]
        return value.factor * rows if isinstance(value, BatchDim) else value

    assert node.op is not None
    if not node.kwargs and all(isinstance(item, Node) for item in node.args):
        return node.op(*(values[item] for item in node.args))
    return node.op(*replaced(node.args, known), **replaced(node.kwargs, known))


def run(nodes: Iterable[Node], values: dict[Node, Any], rows: int) -> None:
    """Add the values of `nodes`, which come in order, to `values`."""
    for node in nodes:
        if node not in values:
            values[node] = evaluate(node, values, rows)
