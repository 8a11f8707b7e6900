"""Pointwise operators of PyTorch as named operators of the loop IR.

The IR's names are PyTorch's wherever there is one; each backend has a table from these names to its own code.
Truth values are numbers: 1 for true, 0 for false.
"""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from stretto.graph import Node
from stretto.kernels.ir import AbstractValue, Constant, Map, Unsupported

Take: TypeAlias = "Callable[[Any], AbstractValue]"
Rule: TypeAlias = "Callable[[Node, Take], AbstractValue]"

COSTLY: Final = frozenset(
    {
        *("div", "reciprocal", "sqrt", "rsqrt", "pow", "exp", "expm1", "log", "log1p", "erf", "sin", "cos", "atan"),
        *("remainder", "sigmoid", "tanh", "silu", "gelu", "softplus", "elu", "addcdiv"),
        *("silu_backward", "gelu_backward", "softplus_backward", "elu_backward"),
    }
)
"""Operators that take many times as long as an addition."""


def apply(op: str, dims: tuple[int, ...], *operands: AbstractValue, costly: bool | None = None, **attrs: Any) -> Map:
    """An operator of the IR on some operands."""
    return Map(dims, op, operands, attrs, op in COSTLY if costly is None else costly)


def _rule(op: str, operands: int, **defaults: Any) -> Rule:
    """The first `operands` arguments are operands; the others, by position or name, are attributes of the operator."""

    def rule(node: Node, take: Take) -> AbstractValue:
        given = dict(zip(defaults, node.args[operands:], strict=False)) | dict(node.kwargs)
        if len(node.args) > operands + len(defaults) or not given.keys() <= defaults.keys():
            raise Unsupported(f"no code is generated for {node.label} with these settings")
        return apply(op, node.row_shape, *(take(item) for item in node.args[:operands]), **(defaults | given))

    return rule


def _reversed_difference(node: Node, take: Take) -> AbstractValue:
    alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    return apply("sub", node.row_shape, take(node.args[1]), take(node.args[0]), alpha=alpha)


def _power(node: Node, take: Take) -> AbstractValue:
    base, exponent = node.args
    simple = {2: "square", 3: "cube", 1: "copy", -1: "reciprocal", 0.5: "sqrt"}
    if isinstance(exponent, (int, float)) and exponent in simple:
        return apply(simple[exponent], node.row_shape, take(base))
    return apply("pow", node.row_shape, take(base), take(exponent))


def _clamp(**defaults: Any) -> Rule:
    """Between two bounds, of which the defaults name the arguments; None is no bound."""

    def rule(node: Node, take: Take) -> AbstractValue:
        bounds = defaults | dict(zip(defaults, node.args[1:], strict=False)) | dict(node.kwargs)
        value = take(node.args[0])
        for op, bound in zip(("maximum", "minimum"), bounds.values(), strict=True):
            if bound is not None:
                value = apply(op, node.row_shape, value, take(bound))
        return value

    return rule


def _masked_fill(node: Node, take: Take) -> AbstractValue:
    value, mask, number = (take(item) for item in node.args)
    return apply("where", node.row_shape, mask, number, value)


def _elu_backward(node: Node, take: Take) -> AbstractValue:
    gradient, alpha, scale, input_scale, is_result, source = node.args
    attrs = {"alpha": alpha, "scale": scale, "input_scale": input_scale, "is_result": is_result}
    return apply("elu_backward", node.row_shape, take(gradient), take(source), **attrs)


def _logical_not(node: Node, take: Take) -> AbstractValue:
    return apply("eq", node.row_shape, take(node.args[0]), Constant((), 0.0))


_UNARY: Final = (
    *("neg", "abs", "sign", "reciprocal", "sqrt", "rsqrt", "exp", "expm1", "log", "log1p", "erf", "sin", "cos"),
    *("atan", "floor", "ceil", "trunc", "round", "sigmoid", "tanh", "relu", "hardsigmoid", "silu"),
)
_BINARY: Final = (
    *("mul", "div", "remainder", "maximum", "minimum", "gt", "ge", "lt", "le", "eq", "ne", "logical_and", "logical_or"),
    *("sigmoid_backward", "tanh_backward", "silu_backward", "hardsigmoid_backward"),
)

POINTWISE: Final[dict[str, Rule]] = {
    **{op: _rule(op, 1) for op in _UNARY},
    **{op: _rule(op, 2) for op in _BINARY},
    "sgn": _rule("sign", 1),
    "add": _rule("add", 2, alpha=1),
    "sub": _rule("sub", 2, alpha=1),
    "rsub": _reversed_difference,
    "pow": _power,
    "clamp": _clamp(min=None, max=None),
    "clamp_min": _rule("maximum", 2),
    "clamp_max": _rule("minimum", 2),
    "hardtanh": _clamp(min_val=-1, max_val=1),
    "leaky_relu": _rule("leaky_relu", 1, slope=0.01),
    "gelu": _rule("gelu", 1, approximate="none"),
    "softplus": _rule("softplus", 1, beta=1, threshold=20),
    "elu": _rule("elu", 1, alpha=1, scale=1, input_scale=1),
    "lerp": _rule("lerp", 3),
    "addcmul": _rule("addcmul", 3, value=1),
    "addcdiv": _rule("addcdiv", 3, value=1),
    "where": _rule("where", 3),
    "masked_fill": _masked_fill,
    "logical_not": _logical_not,
    "threshold_backward": _rule("threshold_backward", 3),
    "gelu_backward": _rule("gelu_backward", 2, approximate="none"),
    "softplus_backward": _rule("softplus_backward", 2, beta=1, threshold=20),
    "elu_backward": _elu_backward,
    "leaky_relu_backward": _rule("leaky_relu_backward", 2, slope=0.01, is_result=False),
    "hardtanh_backward": _rule("hardtanh_backward", 2, low=-1, high=1),
}
"""For each operator of PyTorch, how a node and a way to take its operands become a value."""
