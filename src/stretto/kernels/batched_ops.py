"""Operators outside of the loops, evaluated for all steps at once: the steps are laid out as rows of one batch.

On the CPU, products, sums over rows and layer norms run on code of our own (`backends/cpp`), whatever runs the loops;
everything else, and every other device, is PyTorch's.

Shape legend: P rows of all steps together, K features in, N features out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from stretto.graph import Node, evaluate
from stretto.kernels.backends.cpp.batched import can_norm, can_run, column_sums, norm, product, weight_gradient
from stretto.kernels.backward import is_transformed, laid_out_like


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
        if torch.is_grad_enabled() or is_transformed(d_PN):
            # Differentiated once more, or several at once: by operators that know how.
            return (
                d_PN.sum_to_size(ctx.bias_shape) if needs_bias else None,
                d_PN @ weight_KN.t() if needs_x else None,
                laid_out_like(x_PK.t() @ d_PN, weight_KN) if needs_weight else None,
            )
        return (
            column_sums(d_PN).sum_to_size(ctx.bias_shape) if needs_bias else None,
            product(d_PN, weight_KN.t()) if needs_x else None,
            laid_out_like(weight_gradient(x_PK, d_PN), weight_KN) if needs_weight else None,
        )


def evaluate_batched(node: Node, values: dict[Node, Any], rows: int) -> Any:
    """The value of a node outside of the loops."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return evaluate(node, values, rows)  # torch.func differentiates no operators of our own
    if node.label in {"mm", "addmm"} and not node.kwargs and node.operands is None and node.args[-2].has_rows:
        *bias, x, weight = (values[item] for item in node.args)
        if can_run(x, weight) and all(item.dim() <= 1 and item.dtype == x.dtype for item in bias):
            return _Product.apply(bias[0] if bias else None, x, weight)  # type: ignore[no-untyped-call]
    if node.label == "native_layer_norm" and not node.kwargs:
        x, shape, gain, bias, eps = (values[item] if isinstance(item, Node) else item for item in node.args)
        if can_norm(x, shape, gain, bias):
            # Mean and deviation are given out by no module of torch's.
            return norm(x, gain, bias, eps), None, None
    return evaluate(node, values, rows)


def as_node_dtype(tensor: torch.Tensor, node: Node) -> torch.Tensor:
    """A value as the node has it: generated code stores booleans as real numbers, and all integers in 64 bits."""
    if node.dtype is None or tensor.dtype == node.dtype:
        return tensor
    return tensor != 0 if node.dtype is torch.bool else tensor.to(node.dtype)


@final
@dataclass(frozen=True, slots=True)
class Earlier:
    """A state before each step of sequences of one length: the initial one, then those after all steps but the last."""

    initial: torch.Tensor
    after: torch.Tensor

    def whole(self) -> torch.Tensor:
        """As one tensor."""
        return torch.cat([self.initial, self.after[: len(self.after) - len(self.initial)]])


@final
class Deferral:
    """The operators that come after a backward loop, and which of them are better done together with their reader.

    Args:
        nodes: The operators, in order.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        readers = Counter(item for node in nodes for item in node.inputs)
        summed = {node.args[0] for node in nodes if is_column_sum(node) and readers[node.args[0]] == 1}
        self.read = frozenset(readers)
        self.nodes = [
            node
            for node in nodes
            if not (node in summed and _is_product_of_rows(node)) and not (node.label == "t" and node.args[0].has_rows)
        ]

    def run(self, values: dict[Node, Any], rows: int) -> None:
        """Add the values of the operators to `values`."""
        for node in self.nodes:
            if node not in values:
                made = _evaluate_deferred(node, values, rows)
                values[node] = evaluate(node, _with_inputs(node, values, rows), rows) if made is None else made


def _with_inputs(node: Node, values: dict[Node, Any], rows: int) -> dict[Node, Any]:
    """The values, with those the node reads made if that was put off."""
    for item in node.inputs:
        if item not in values:
            values[item] = evaluate(item, _with_inputs(item, values, rows), rows)
        elif isinstance(values[item], Earlier):
            values[item] = values[item].whole()
    return values


def is_column_sum(node: Node) -> bool:
    """Whether it is a sum over all rows."""
    return node.label == "sum" and len(node.args) > 1 and list(node.args[1]) == [0] and node.args[0].has_rows


def _is_product_of_rows(node: Node) -> bool:
    return node.label == "mul" and all(isinstance(item, Node) and item.shape == node.shape for item in node.args)


def _evaluate_deferred(node: Node, values: dict[Node, Any], rows: int) -> "torch.Tensor | Earlier | None":
    if node.label == "detach" and node.args[0] in values:
        return values[node.args[0]]  # type: ignore[no-any-return]
    if node.label == "mm" and not node.has_rows and not node.kwargs and node.operands is None:
        left, right = node.args
        if left.label == "t" and left.args[0].has_rows and right.has_rows:
            x, d_PN = values[left.args[0]], values[right]
            # The gradient of a single unit's weight comes transposed, with the state on the right.
            d_PN = d_PN.whole() if isinstance(d_PN, Earlier) else d_PN
            given = (x.after, d_PN, x.initial) if isinstance(x, Earlier) else (x, d_PN)
            return weight_gradient(*given) if can_run(*given) else None
    if is_column_sum(node):
        source = node.args[0]
        factors, reader = ([source], node) if source in values else (source.args, source)
        tensors = [_with_inputs(reader, values, rows)[item] for item in factors]
        if can_run(*tensors) and node.dtype == tensors[0].dtype:
            sums = column_sums(*tensors)
            return sums[None] if len(node.shape) == 2 else sums
    return None
