"""The loop IR's pointwise operators as C++ expressions over vectors; `vector.h` has the functions."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final


def number(value: float) -> str:
    """A number as C++ reads it back to the last digit, in every lane."""
    if math.isinf(value):
        return "broadcast(-INFINITE)" if value < 0 else "broadcast(INFINITE)"
    if math.isnan(value):
        return "broadcast(NOT_A_NUMBER)"
    return f"broadcast(real({value!r}))"


def integer(value: int) -> str:
    """A 64-bit integer in every lane."""
    return f"broadcast_integer({value}ll)" if value > -(1 << 63) else "broadcast_integer(INT64_MIN)"


def template(op: str, attrs: Mapping[str, Any]) -> str:
    """A C++ expression in which `{0}`, `{1}`, ... stand for the operands."""
    found = OPS[op]
    return found if isinstance(found, str) else found(**attrs)


def _scaled(sign: str) -> Callable[..., str]:
    def make(alpha: float = 1) -> str:
        return f"{{0}} {sign} {{1}}" if alpha == 1 else f"{{0}} {sign} {number(alpha)} * {{1}}"

    return make


_GELU_INNER: Final = f"{number(math.sqrt(2 / math.pi))} * ({{0}} + {number(0.044715)} * {{0}} * {{0}} * {{0}})"


def _gelu(approximate: str) -> str:
    if approximate == "tanh":
        return f"broadcast(0.5) * {{0}} * (broadcast(1) + tanh({_GELU_INNER}))"
    return f"broadcast(0.5) * {{0}} * (broadcast(1) + erf({{0}} * {number(math.sqrt(0.5))}))"


def _gelu_backward(approximate: str) -> str:
    """The slope at `x`, which is written as operand 0 first to share the text of `_gelu`."""
    if approximate == "tanh":
        slope = f"{number(math.sqrt(2 / math.pi))} * (broadcast(1) + {number(3 * 0.044715)} * {{0}} * {{0}})"
        bend = f"tanh({_GELU_INNER})"
        rise = f"broadcast(0.5) * {{0}} * (broadcast(1) - {bend} * {bend}) * {slope}"
        inner = f"broadcast(0.5) * (broadcast(1) + {bend}) + {rise}"
    else:
        bell = f"{number(1 / math.sqrt(2 * math.pi))} * exp(broadcast(-0.5) * {{0}} * {{0}})"
        inner = f"broadcast(0.5) * (broadcast(1) + erf({{0}} * {number(math.sqrt(0.5))})) + {{0}} * {bell}"
    return f"{{1}} * ({inner})".format("{1}", "{0}")


def _softplus(beta: float, threshold: float) -> str:
    inner = f"{{0}} * {number(beta)}"
    soft = f"log1p(exp({inner})) / {number(beta)}"
    return f"select({inner} > {number(threshold)}, {{0}}, {soft})"


def _softplus_backward(beta: float, threshold: float) -> str:
    inner = f"{{1}} * {number(beta)}"
    return f"select({inner} > {number(threshold)}, {{0}}, {{0}} * sigmoid({inner}))"


def _elu(alpha: float, scale: float, input_scale: float) -> str:
    low = f"{number(alpha * scale)} * expm1({{0}} * {number(input_scale)})"
    return f"select({{0}} > broadcast(0), {{0}} * {number(scale)}, {low})"


def _elu_backward(alpha: float, scale: float, input_scale: float, is_result: bool) -> str:
    steep = f"{number(scale)} * {{0}}"
    if is_result:
        low = f"{{0}} * {number(input_scale)} * ({{1}} + {number(alpha * scale)})"
    else:
        low = f"{{0}} * {number(input_scale * alpha * scale)} * exp({{1}} * {number(input_scale)})"
    return f"select({{1}} > broadcast(0), {steep}, {low})"


_UNARY: Final = (
    *("abs", "sign", "sqrt", "exp", "expm1", "log", "log1p", "erf", "sin", "cos", "atan", "floor", "ceil", "trunc"),
    *("round", "sigmoid", "tanh", "relu", "exp2", "log2", "log10", "erfc", "tan", "asin", "acos", "sinh", "cosh"),
    *("asinh", "acosh", "atanh", "lgamma", "digamma", "erfinv"),
)
_COMPARISONS: Final = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}

INTEGER_DIVISIONS: Final = ("integer_remainder", "integer_fmod", "integer_floor_divide", "integer_trunc_divide")

OPS: Final[dict[str, str | Callable[..., str]]] = {
    **{op: f"{op}({{0}})" for op in _UNARY},
    **{
        op: f"{op}({{0}}, {{1}})"
        for op in ("pow", "atan2", "hypot", "remainder", "fmod", "floor_divide", "maximum", "minimum")
    },
    **{op: f"{op}<L>({{0}}, {{1}})" for op in INTEGER_DIVISIONS},
    **{f"bitwise_{op}": f"{{0}} {sign} {{1}}" for op, sign in (("and", "&"), ("or", "|"), ("xor", "^"))},
    "bitwise_not": "~{0}",
    "lshift": "{0} << {1}",
    "rshift": "{0} >> {1}",
    "to_real": "to_real({0})",
    "to_integer": "to_integer({0})",
    "wrap": lambda bits, signed: f"wrap<{bits}, {str(signed).lower()}>({{0}})",
    "round_single": "round_single({0})",
    **{op: f"flag({{0}} {sign} {{1}})" for op, sign in _COMPARISONS.items()},
    "copy": "{0}",
    "add": _scaled("+"),
    "sub": _scaled("-"),
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "reciprocal": "broadcast(1) / {0}",
    "square": "{0} * {0}",
    "cube": "{0} * {0} * {0}",
    "rsqrt": "broadcast(1) / sqrt({0})",
    "hardsigmoid": "minimum(maximum({0} + broadcast(3), broadcast(0)), broadcast(6)) / broadcast(6)",
    "leaky_relu": lambda slope: f"select({{0}} > broadcast(0), {{0}}, {{0}} * {number(slope)})",
    "silu": "{0} * sigmoid({0})",
    "gelu": _gelu,
    "softplus": _softplus,
    "elu": _elu,
    "lerp": "{0} + {2} * ({1} - {0})",
    "addcmul": lambda value: f"{{0}} + {number(value)} * {{1}} * {{2}}",
    "addcdiv": lambda value: f"{{0}} + {number(value)} * {{1}} / {{2}}",
    "where": "where({0}, {1}, {2})",
    "sigmoid_backward": "{0} * (broadcast(1) - {1}) * {1}",
    "tanh_backward": "{0} * (broadcast(1) - {1} * {1})",
    "threshold_backward": "select({1} <= {2}, broadcast(0), {0})",
    "silu_backward": "{0} * sigmoid({1}) * (broadcast(1) + {1} * (broadcast(1) - sigmoid({1})))",
    "gelu_backward": _gelu_backward,
    "softplus_backward": _softplus_backward,
    "elu_backward": _elu_backward,
    "leaky_relu_backward": lambda slope, is_result: f"select({{1}} > broadcast(0), {{0}}, {{0}} * {number(slope)})",  # noqa: ARG005
    # A sixth in single precision, whatever the numbers are: torch has it so.
    "hardsigmoid_backward": (
        "select(({1} > broadcast(-3)) & ({1} < broadcast(3)), {0} * broadcast(1.0f / 6.0f), broadcast(0))"
    ),
    "hardtanh_backward": lambda low, high: (
        f"select(({{1}} <= {number(low)}) | ({{1}} >= {number(high)}), broadcast(0), {{0}})"
    ),
}
