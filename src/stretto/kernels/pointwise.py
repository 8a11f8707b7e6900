"""Pointwise operators of PyTorch as named operators of the loop IR.

The IR's names are PyTorch's wherever there is one; each backend has a table from these names to its own code.
Booleans are numbers: 1 for true, 0 for false. Operands are all real or all integers, but for the condition of
`where`; operators that differ for integers have names of their own.
"""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from stretto.graph import Node
from stretto.kernels.ir import AbstractValue, Constant, Map, Unsupported

Lower: TypeAlias = "Callable[[Any], AbstractValue]"
Rule: TypeAlias = "Callable[[Node, Lower], AbstractValue]"

COSTLY: Final = frozenset(
    "div reciprocal sqrt rsqrt pow exp expm1 log log1p erf sin cos atan exp2 log2 log10 erfc tan asin acos sinh cosh "
    "asinh acosh atanh atan2 hypot lgamma digamma erfinv remainder fmod floor_divide integer_remainder integer_fmod "
    "integer_floor_divide integer_trunc_divide sigmoid tanh silu gelu softplus elu addcdiv "
    "silu_backward gelu_backward softplus_backward elu_backward".split()
)
"""Operators that take many times as long as an addition."""


_COMPARISONS: Final = ("gt", "ge", "lt", "le", "eq", "ne")
_REAL_RESULT: Final = frozenset({*_COMPARISONS, "to_real"})


def apply(op: str, dims: tuple[int, ...], *operands: AbstractValue, costly: bool | None = None, **attrs: Any) -> Map:
    """An operator of the IR on some operands."""
    is_costly = op in COSTLY if costly is None else costly
    integer = op == "to_integer" or (op not in _REAL_RESULT and any(item.integer for item in operands))
    return Map(dims, op, operands, attrs, is_costly, integer=integer)


def convert(value: AbstractValue, dims: tuple[int, ...], dtype: torch.dtype) -> AbstractValue:
    """A value as one of another dtype; from a wider integer to a narrower one it wraps around."""
    if dtype is torch.bool:
        return apply("ne", dims, value, Constant((), 0, integer=value.integer))
    if dtype.is_floating_point:
        return apply("to_real", dims, value) if value.integer else value
    whole = value if value.integer else apply("to_integer", dims, value)
    info = torch.iinfo(dtype)
    return whole if info.bits == 64 else apply("wrap", dims, whole, bits=info.bits, signed=info.min < 0)


def _rule(op: str, operands: int, **defaults: Any) -> Rule:
    """The first `operands` arguments are operands; the others, by position or name, are attributes of the operator."""

    def rule(node: Node, lower: Lower) -> AbstractValue:
        given = dict(zip(defaults, node.args[operands:], strict=False)) | dict(node.kwargs)
        if len(node.args) > operands + len(defaults) or not given.keys() <= defaults.keys():
            raise Unsupported(f"no code is generated for {node.label} with these settings")
        return apply(op, node.row_shape, *(lower(item) for item in node.args[:operands]), **(defaults | given))

    return rule


def _sum(sign: str, *, swapped: bool = False) -> Rule:
    """The sum or difference of a value and `alpha` times another one."""

    def rule(node: Node, lower: Lower) -> AbstractValue:
        one, other = (lower(item) for item in (node.args[1::-1] if swapped else node.args[:2]))
        alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
        if node.dtype is torch.bool:
            return apply("maximum", node.row_shape, one, other)
        if other.integer and alpha != 1:
            other, alpha = apply("mul", other.dims, other, lower(alpha)), 1
        return apply(sign, node.row_shape, one, other, alpha=alpha)

    return rule


def _division(node: Node, lower: Lower) -> AbstractValue:
    """A quotient, exact or rounded, or its remainder."""
    one, other = (lower(item) for item in node.args[:2])
    rounding = node.kwargs.get("rounding_mode", node.args[2] if len(node.args) > 2 else None)
    op = node.label if node.label != "div" or rounding is None else f"{rounding}_divide"
    if one.integer:
        return apply(f"integer_{op}", node.row_shape, one, other)
    if op == "trunc_divide":
        return apply("trunc", node.row_shape, apply("div", node.row_shape, one, other))
    return apply(op, node.row_shape, one, other)


def _bitwise(node: Node, lower: Lower) -> AbstractValue:
    """An operator on the bits of integers, or on booleans."""
    values = [lower(item) for item in node.args]
    op = _BITS[node.label]
    if values[0].integer:
        return apply(op, node.row_shape, *values)
    if op == "bitwise_not":
        return apply("eq", node.row_shape, values[0], lower(0))
    return apply({"bitwise_and": "mul", "bitwise_or": "maximum", "bitwise_xor": "ne"}[op], node.row_shape, *values)


def _logical(op: str) -> Rule:
    """An operator on booleans, which may be given as numbers."""

    def rule(node: Node, lower: Lower) -> AbstractValue:
        values = [apply("ne", (value := lower(item)).dims, value, lower(0)) for item in node.args]
        return apply(op, node.row_shape, *values)

    return rule


def _power(node: Node, lower: Lower) -> AbstractValue:
    base, exponent = node.args
    simple = {2: "square", 3: "cube", 1: "copy", -1: "reciprocal", 0.5: "sqrt"}
    if isinstance(exponent, (int, float)) and exponent in simple:
        return apply(simple[exponent], node.row_shape, lower(base))
    return apply("pow", node.row_shape, lower(base), lower(exponent))


def _clamp(**defaults: Any) -> Rule:
    """Between two bounds, of which the defaults name the arguments; None means unbounded."""

    def rule(node: Node, lower: Lower) -> AbstractValue:
        bounds = defaults | dict(zip(defaults, node.args[1:], strict=False)) | dict(node.kwargs)
        value = lower(node.args[0])
        for op, bound in zip(("maximum", "minimum"), bounds.values(), strict=True):
            if bound is not None:
                value = apply(op, node.row_shape, value, lower(bound))
        return value

    return rule


def _masked_fill(node: Node, lower: Lower) -> AbstractValue:
    value, mask, number = (lower(item) for item in node.args)
    return apply("where", node.row_shape, mask, number, value)


def _elu_backward(node: Node, lower: Lower) -> AbstractValue:
    gradient, alpha, scale, input_scale, is_result, source = node.args
    attrs = {"alpha": alpha, "scale": scale, "input_scale": input_scale, "is_result": is_result}
    return apply("elu_backward", node.row_shape, lower(gradient), lower(source), **attrs)


def _logical_not(node: Node, lower: Lower) -> AbstractValue:
    return apply("eq", node.row_shape, lower(node.args[0]), lower(0))


_BITS: Final = {
    **{op: op for op in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not")},
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), "lshift"),
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), "rshift"),
}
_UNARY: Final = (
    "neg abs sign reciprocal sqrt rsqrt exp expm1 log log1p erf sin cos exp2 log2 log10 erfc tan asin acos sinh cosh "
    "asinh acosh atanh lgamma digamma erfinv atan floor ceil trunc round sigmoid tanh relu hardsigmoid silu"
).split()
_BINARY: Final = (
    *("mul", "maximum", "minimum", "atan2", "hypot", *_COMPARISONS),
    *("sigmoid_backward", "tanh_backward", "silu_backward", "hardsigmoid_backward"),
)

POINTWISE: Final[dict[str, Rule]] = {
    **{op: _rule(op, 1) for op in _UNARY},
    **{op: _rule(op, 2) for op in _BINARY},
    "sgn": _rule("sign", 1),
    "add": _sum("add"),
    "sub": _sum("sub"),
    "rsub": _sum("sub", swapped=True),
    **dict.fromkeys(("div", "remainder", "fmod", "floor_divide"), _division),
    **dict.fromkeys(_BITS, _bitwise),
    "logical_and": _logical("mul"),
    "logical_or": _logical("maximum"),
    "logical_xor": _logical("ne"),
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
"""For each operator of PyTorch, a rule: from a node, and a function that lowers an operand, to a value of the IR."""
