"""Products outside of the loops: all steps at once, into memory that is cheap to touch.

Shape legend: P rows of all steps together, K features in, N features out.
"""

from typing import Any

import torch

from stretto.graph.interpret import evaluate
from stretto.graph.node import Node
from stretto.kernels.memory import WORTH_IT, fresh


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor | None, x_PK: torch.Tensor, weight_KN: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_PK, weight_KN)
        ctx.bias_shape = None if bias is None else bias.shape
        y_PN = fresh(x_PK.shape[0], weight_KN.shape[1], dtype=x_PK.dtype)
        if bias is None:
            return torch.mm(x_PK, weight_KN, out=y_PN)
        return torch.addmm(bias, x_PK, weight_KN, out=y_PN)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (d_PN,) = gradients
        x_PK, weight_KN = ctx.saved_tensors
        needs_bias, needs_x, needs_weight = ctx.needs_input_grad
        d_bias = d_PN.sum_to_size(ctx.bias_shape) if needs_bias else None
        d_x = d_PN @ weight_KN.t() if needs_x else None
        d_weight = (d_PN.t() @ x_PK).t() if needs_weight else None
        return d_bias, d_x, d_weight


def evaluate_folded(node: Node, values: dict[Node, Any], rows: int) -> Any:
    """The value of a node with the steps laid out as rows."""
    if node.label in {"mm", "addmm"} and not node.kwargs:
        *bias, x, weight = (values[item] for item in node.args)
        large = rows * node.row_size * 4 >= WORTH_IT
        if large and x.device.type == "cpu" and not weight.is_sparse:
            return _Product.apply(bias[0] if bias else None, x, weight)  # type: ignore[no-untyped-call]
    return evaluate(node, values, rows)
