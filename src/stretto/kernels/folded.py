"""Operators outside of the loops, with all steps laid out as rows.

Shape legend: P rows of all steps together, K features in, N features out.
"""

from collections.abc import Iterable
from typing import Any

import torch

from stretto.graph.interpret import evaluate
from stretto.graph.node import Node
from stretto.kernels.row_products import can_run, column_sums, product, weight_gradient


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor | None, x_PK: torch.Tensor, weight_KN: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_PK, weight_KN)
        ctx.bias_shape = None if bias is None else bias.shape
        return product(x_PK, weight_KN, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (d_PN,) = gradients
        x_PK, weight_KN = ctx.saved_tensors
        needs_bias, needs_x, needs_weight = ctx.needs_input_grad
        if torch.is_grad_enabled():
            # Differentiated once more: by operators that know their own gradients.
            return (
                d_PN.sum_to_size(ctx.bias_shape) if needs_bias else None,
                d_PN @ weight_KN.t() if needs_x else None,
                x_PK.t() @ d_PN if needs_weight else None,
            )
        return (
            column_sums(d_PN).sum_to_size(ctx.bias_shape) if needs_bias else None,
            product(d_PN, weight_KN.t()) if needs_x else None,
            weight_gradient(x_PK, d_PN) if needs_weight else None,
        )


def evaluate_folded(node: Node, values: dict[Node, Any], rows: int) -> Any:
    """The value of a node outside of the loops."""
    if node.label in {"mm", "addmm"} and not node.kwargs and node.args[-2].has_rows:
        *bias, x, weight = (values[item] for item in node.args)
        if can_run(x, weight) and all(item.dim() <= 1 and item.dtype == x.dtype for item in bias):
            return _Product.apply(bias[0] if bias else None, x, weight)  # type: ignore[no-untyped-call]
    return evaluate(node, values, rows)


def run_deferred(nodes: Iterable[Node], values: dict[Node, Any], rows: int) -> None:
    """Add the values of operators that come after a backward loop, which come in order, to `values`."""
    for node in nodes:
        if node in values:
            continue
        made = _deferred(node, values)
        values[node] = evaluate(node, values, rows) if made is None else made


def _deferred(node: Node, values: dict[Node, Any]) -> torch.Tensor | None:
    if node.label == "mm" and not node.has_rows and not node.kwargs:
        left, right = node.args
        if left.label == "t" and left.args[0].has_rows and right.has_rows:
            x_PK, d_PN = values[left.args[0]], values[right]
            return weight_gradient(x_PK, d_PN) if can_run(x_PK, d_PN) else None
    if node.label == "sum" and len(node.args) > 1 and list(node.args[1]) == [0] and node.args[0].has_rows:
        d_PN = values[node.args[0]]
        if can_run(d_PN) and node.dtype == d_PN.dtype:
            sums = column_sums(d_PN)
            return sums[None] if len(node.shape) == 2 else sums
    return None
