"""Pointwise operators of PyTorch as C++ expressions over vectors.

Truth values are numbers: 1 for true, 0 for false.
"""

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from stretto.graph import Node
from stretto.kernels.rows import AbstractValue

Take: TypeAlias = "Callable[[Any], AbstractValue]"
Rule: TypeAlias = "Callable[[Node, Take], tuple[str, tuple[AbstractValue, ...], bool]]"


def number(value: float) -> str:
    """A number as C++ reads it back to the last digit."""
    if math.isinf(value):
        return "all(-INFINITE)" if value < 0 else "all(INFINITE)"
    if math.isnan(value):
        return "all(NOT_A_NUMBER)"
    return f"all(real({value!r}))"


def _simple(template: str, *, costly: bool = False) -> Rule:
    """All arguments are operands."""

    def rule(node: Node, take: Take) -> tuple[str, tuple[AbstractValue, ...], bool]:
        return template, tuple(take(item) for item in node.args), costly

    return rule


def _with_settings(make: Callable[..., str], operands: int, *, costly: bool = False) -> Rule:
    """The first `operands` arguments are operands; the others, and keywords, are settings of the expression."""

    def rule(node: Node, take: Take) -> tuple[str, tuple[AbstractValue, ...], bool]:
        template = make(*node.args[operands:], **node.kwargs)
        return template, tuple(take(item) for item in node.args[:operands]), costly

    return rule


def _scaled(sign: str) -> Callable[..., str]:
    def make(alpha: float = 1) -> str:
        return f"{{0}} {sign} {{1}}" if alpha == 1 else f"{{0}} {sign} {number(alpha)} * {{1}}"

    return make


def _reversed_difference(node: Node, take: Take) -> tuple[str, tuple[AbstractValue, ...], bool]:
    alpha = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    template = "{1} - {0}" if alpha == 1 else f"{{1}} - {number(alpha)} * {{0}}"
    return template, (take(node.args[0]), take(node.args[1])), False


def _power(node: Node, take: Take) -> tuple[str, tuple[AbstractValue, ...], bool]:
    base, exponent = node.args
    whole = {2: "{0} * {0}", 3: "{0} * {0} * {0}", 1: "{0}", -1: "all(1) / {0}", 0.5: "square_root({0})"}
    if isinstance(exponent, (int, float)) and exponent in whole:
        return whole[exponent], (take(base),), exponent in {-1, 0.5}
    return "power({0}, {1})", (take(base), take(exponent)), True


def _clamp(node: Node, take: Take) -> tuple[str, tuple[AbstractValue, ...], bool]:
    low = node.args[1] if len(node.args) > 1 else node.kwargs.get("min")
    high = node.args[2] if len(node.args) > 2 else node.kwargs.get("max")
    template, operands = "{0}", [take(node.args[0])]
    for bound, name in ((low, "maximum"), (high, "minimum")):
        if bound is not None:
            operands.append(take(bound))
            template = f"{name}({template}, {{{len(operands) - 1}}})"
    return template, tuple(operands), False


def _gelu(approximate: str = "none") -> str:
    if approximate == "tanh":
        return "all(0.5) * {0} * (all(1) + hyperbolic_tangent(" + _GELU_INNER + "))"
    return f"all(0.5) * {{0}} * (all(1) + error_function({{0}} * {number(math.sqrt(0.5))}))"


_GELU_INNER: Final = f"{number(math.sqrt(2 / math.pi))} * ({{0}} + {number(0.044715)} * {{0}} * {{0}} * {{0}})"


def _gelu_backward(node: Node, take: Take) -> tuple[str, tuple[AbstractValue, ...], bool]:
    operands = (take(node.args[1]), take(node.args[0]))
    if node.kwargs.get("approximate", "none") == "tanh":
        slope = f"{number(math.sqrt(2 / math.pi))} * (all(1) + {number(3 * 0.044715)} * {{0}} * {{0}})"
        bend = f"hyperbolic_tangent({_GELU_INNER})"
        inner = f"all(0.5) * (all(1) + {bend}) + all(0.5) * {{0}} * (all(1) - {bend} * {bend}) * {slope}"
    else:
        bell = f"{number(1 / math.sqrt(2 * math.pi))} * exponential(all(-0.5) * {{0}} * {{0}})"
        inner = f"all(0.5) * (all(1) + error_function({{0}} * {number(math.sqrt(0.5))})) + {{0}} * {bell}"
    return f"{{1}} * ({inner})", operands, True


def _softplus(beta: float = 1, threshold: float = 20) -> str:
    inner = f"{{0}} * {number(beta)}"
    soft = f"logarithm_1p(exponential({inner})) / {number(beta)}"
    return f"choose({inner} > {number(threshold)}, {{0}}, {soft})"


def _softplus_backward(beta: float = 1, threshold: float = 20) -> str:
    inner = f"{{1}} * {number(beta)}"
    return f"choose({inner} > {number(threshold)}, {{0}}, {{0}} * sigmoid({inner}))"


def _elu(alpha: float = 1, scale: float = 1, input_scale: float = 1) -> str:
    low = f"{number(alpha * scale)} * exponential_m1({{0}} * {number(input_scale)})"
    return f"choose({{0}} > all(0), {{0}} * {number(scale)}, {low})"


def _elu_backward(node: Node, take: Take) -> tuple[str, tuple[AbstractValue, ...], bool]:
    gradient, alpha, scale, input_scale, is_result, source = node.args
    steep = f"{number(scale)} * {{0}}"
    if is_result:
        low = f"{{0}} * {number(input_scale)} * ({{1}} + {number(alpha * scale)})"
    else:
        low = f"{{0}} * {number(input_scale * alpha * scale)} * exponential({{1}} * {number(input_scale)})"
    return f"choose({{1}} > all(0), {steep}, {low})", (take(gradient), take(source)), True


def _comparison(sign: str) -> Rule:
    return _simple(f"flag({{0}} {sign} {{1}})")


POINTWISE: Final[dict[str, Rule]] = {
    "add": _with_settings(_scaled("+"), 2),
    "sub": _with_settings(_scaled("-"), 2),
    "rsub": _reversed_difference,
    "mul": _simple("{0} * {1}"),
    "div": _with_settings(lambda: "{0} / {1}", 2, costly=True),
    "neg": _simple("-{0}"),
    "abs": _simple("absolute({0})"),
    "sign": _simple("sign({0})"),
    "sgn": _simple("sign({0})"),
    "reciprocal": _simple("all(1) / {0}", costly=True),
    "sqrt": _simple("square_root({0})", costly=True),
    "rsqrt": _simple("all(1) / square_root({0})", costly=True),
    "pow": _power,
    "exp": _simple("exponential({0})", costly=True),
    "expm1": _simple("exponential_m1({0})", costly=True),
    "log": _simple("logarithm({0})", costly=True),
    "log1p": _simple("logarithm_1p({0})", costly=True),
    "erf": _simple("error_function({0})", costly=True),
    "sin": _simple("sine({0})", costly=True),
    "cos": _simple("cosine({0})", costly=True),
    "atan": _simple("arctangent({0})", costly=True),
    "floor": _simple("floor_of({0})"),
    "ceil": _simple("ceiling_of({0})"),
    "trunc": _simple("truncated({0})"),
    "round": _with_settings(lambda: "rounded({0})", 1),
    "remainder": _simple("remainder_of({0}, {1})", costly=True),
    "sigmoid": _simple("sigmoid({0})", costly=True),
    "tanh": _simple("hyperbolic_tangent({0})", costly=True),
    "relu": _simple("relu({0})"),
    "maximum": _simple("maximum({0}, {1})"),
    "minimum": _simple("minimum({0}, {1})"),
    "clamp": _clamp,
    "clamp_min": _simple("maximum({0}, {1})"),
    "clamp_max": _simple("minimum({0}, {1})"),
    "hardtanh": _with_settings(lambda low=-1, high=1: f"minimum(maximum({{0}}, {number(low)}), {number(high)})", 1),
    "hardsigmoid": _simple("minimum(maximum({0} + all(3), all(0)), all(6)) / all(6)"),
    "leaky_relu": _with_settings(lambda slope=0.01: f"choose({{0}} > all(0), {{0}}, {{0}} * {number(slope)})", 1),
    "silu": _simple("{0} * sigmoid({0})", costly=True),
    "gelu": _with_settings(_gelu, 1, costly=True),
    "softplus": _with_settings(_softplus, 1, costly=True),
    "elu": _with_settings(_elu, 1, costly=True),
    "lerp": _simple("{0} + {2} * ({1} - {0})"),
    "addcmul": _with_settings(lambda value=1: f"{{0}} + {number(value)} * {{1}} * {{2}}", 3),
    "addcdiv": _with_settings(lambda value=1: f"{{0}} + {number(value)} * {{1}} / {{2}}", 3, costly=True),
    "where": _simple("where({0}, {1}, {2})"),
    "masked_fill": _simple("where({1}, {2}, {0})"),
    "gt": _comparison(">"),
    "ge": _comparison(">="),
    "lt": _comparison("<"),
    "le": _comparison("<="),
    "eq": _comparison("=="),
    "ne": _comparison("!="),
    "logical_not": _simple("flag({0} == all(0))"),
    "logical_and": _simple("flag(({0} != all(0)) & ({1} != all(0)))"),
    "logical_or": _simple("flag(({0} != all(0)) | ({1} != all(0)))"),
    "sigmoid_backward": _simple("{0} * (all(1) - {1}) * {1}"),
    "tanh_backward": _simple("{0} * (all(1) - {1} * {1})"),
    "threshold_backward": _simple("choose({1} <= {2}, all(0), {0})"),
    "silu_backward": _simple("{0} * sigmoid({1}) * (all(1) + {1} * (all(1) - sigmoid({1})))", costly=True),
    "gelu_backward": _gelu_backward,
    "softplus_backward": _with_settings(_softplus_backward, 2, costly=True),
    "elu_backward": _elu_backward,
    "leaky_relu_backward": _with_settings(
        lambda slope, _is_result: f"choose({{1}} > all(0), {{0}}, {{0}} * {number(slope)})", 2
    ),
    # A sixth in single precision, whatever the numbers are: torch has it so.
    "hardsigmoid_backward": _simple("choose(({1} > all(-3)) & ({1} < all(3)), {0} * all(1.0f / 6.0f), all(0))"),
    "hardtanh_backward": _with_settings(
        lambda low, high: f"choose(({{1}} <= {number(low)}) | ({{1}} >= {number(high)}), all(0), {{0}})", 2
    ),
}
"""For each operator, how a node and a way to take its operands become an expression, its operands and its cost."""
