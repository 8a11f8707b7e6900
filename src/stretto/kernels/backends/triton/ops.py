"""The loop IR's pointwise operators as Triton expressions over tiles.

In a generated module `tl` is Triton's language, `math` its device library, REAL the dtype that the loop computes in.
Operands are names of tiles, so that they may be written more than once. Functions that need intermediate values of
their own are in `FUNCTIONS`, and a module has those that it calls.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from stretto.kernels.ir import Unsupported


def number(value: float) -> str:
    """A number as it is read back to the last digit."""
    return repr(float(value)) if math.isfinite(value) else f"float('{value}')"


def template(op: str, attrs: Mapping[str, Any], *, integer: bool) -> str:
    """An expression in which `{0}`, `{1}`, ... stand for the operands.

    Raises:
        Unsupported: If the operator is not there for integers.
    """
    if integer and op in _OF_INTEGERS:
        found = _OF_INTEGERS[op]
    elif integer and op not in _OF_BOTH:
        raise Unsupported(f"no Triton code is generated for {op} of integers")
    else:
        found = OPS[op]
    return found if isinstance(found, str) else found(**attrs)


def _scaled(sign: str) -> Callable[..., str]:
    def make(alpha: float = 1) -> str:
        return f"{{0}} {sign} {{1}}" if alpha == 1 else f"{{0}} {sign} {number(alpha)} * {{1}}"

    return make


_GELU_INNER: Final = f"{number(math.sqrt(2 / math.pi))} * ({{0}} + {number(0.044715)} * {{0}} * {{0}} * {{0}})"


def _gelu(approximate: str) -> str:
    if approximate == "tanh":
        return f"0.5 * {{0}} * (1.0 + math.tanh({_GELU_INNER}))"
    return f"0.5 * {{0}} * (1.0 + math.erf({{0}} * {number(math.sqrt(0.5))}))"


def _gelu_backward(approximate: str) -> str:
    """The slope at `x`, which is written as operand 0 first to share the text of `_gelu`."""
    if approximate == "tanh":
        slope = f"{number(math.sqrt(2 / math.pi))} * (1.0 + {number(3 * 0.044715)} * {{0}} * {{0}})"
        bend = f"math.tanh({_GELU_INNER})"
        inner = f"0.5 * (1.0 + {bend}) + 0.5 * {{0}} * (1.0 - {bend} * {bend}) * {slope}"
    else:
        bell = f"{number(1 / math.sqrt(2 * math.pi))} * tl.exp(-0.5 * {{0}} * {{0}})"
        inner = f"0.5 * (1.0 + math.erf({{0}} * {number(math.sqrt(0.5))})) + {{0}} * {bell}"
    return f"{{1}} * ({inner})".format("{1}", "{0}")


def _softplus(beta: float, threshold: float) -> str:
    inner = f"({{0}} * {number(beta)})"
    return f"tl.where({inner} > {number(threshold)}, {{0}}, math.log1p(tl.exp({inner})) / {number(beta)})"


def _softplus_backward(beta: float, threshold: float) -> str:
    inner = f"({{1}} * {number(beta)})"
    return f"tl.where({inner} > {number(threshold)}, {{0}}, {{0}} / (1.0 + tl.exp(-{inner})))"


def _elu(alpha: float, scale: float, input_scale: float) -> str:
    low = f"{number(alpha * scale)} * math.expm1({{0}} * {number(input_scale)})"
    return f"tl.where({{0}} > 0, {{0}} * {number(scale)}, {low})"


def _elu_backward(alpha: float, scale: float, input_scale: float, is_result: bool) -> str:
    if is_result:
        low = f"{{0}} * {number(input_scale)} * ({{1}} + {number(alpha * scale)})"
    else:
        low = f"{{0}} * {number(input_scale * alpha * scale)} * tl.exp({{1}} * {number(input_scale)})"
    return f"tl.where({{1}} > 0, {number(scale)} * {{0}}, {low})"


def _wrapped(bits: int, signed: bool) -> str:
    return f"{{0}}.to(tl.int{bits}).to(tl.int64)" if signed else f"{{0}} & {(1 << bits) - 1}"


_SIGMOID: Final = "(1.0 / (1.0 + tl.exp(-{0})))"
_LIBRARY: Final = (
    *("expm1", "log1p", "erf", "erfc", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
    *("tanh", "trunc", "log10"),
)
_LANGUAGE: Final = ("sqrt", "exp", "log", "sin", "cos", "exp2", "log2", "floor", "ceil")
_COMPARISONS: Final = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}

INTEGER_DIVISIONS: Final = ("integer_remainder", "integer_fmod", "integer_floor_divide", "integer_trunc_divide")

OPS: Final[dict[str, str | Callable[..., str]]] = {
    **{op: f"math.{op}({{0}})" for op in _LIBRARY},
    **{op: f"tl.{op}({{0}})" for op in _LANGUAGE},
    **{op: f"math.{op}({{0}}, {{1}})" for op in ("pow", "atan2", "hypot", "fmod")},
    **{op: f"{op}({{0}}, {{1}})" for op in ("remainder", "floor_divide", *INTEGER_DIVISIONS)},
    **{
        op: f"tl.{op}({{0}}, {{1}}, propagate_nan=tl.PropagateNan.ALL)"
        for op in ("maximum", "minimum")  # NaN passes through, as with torch's
    },
    **{f"bitwise_{op}": f"{{0}} {sign} {{1}}" for op, sign in (("and", "&"), ("or", "|"), ("xor", "^"))},
    "bitwise_not": "~{0}",
    "lshift": "{0} << {1}",
    "rshift": "{0} >> {1}",
    "to_real": "{0}.to(REAL)",
    "to_integer": "{0}.to(tl.int64)",
    "wrap": _wrapped,
    "round_single": "{0}.to(tl.float32).to(REAL)",
    **{op: f"({{0}} {sign} {{1}}).to(REAL)" for op, sign in _COMPARISONS.items()},
    "abs": "tl.abs({0})",
    "sign": "({0} > 0).to(REAL) - ({0} < 0).to(REAL)",
    "round": "math.rint({0})",
    "sigmoid": _SIGMOID,
    "relu": "tl.where({0} < 0, 0.0, {0})",
    "copy": "{0}",
    "add": _scaled("+"),
    "sub": _scaled("-"),
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "reciprocal": "1.0 / {0}",
    "square": "{0} * {0}",
    "cube": "{0} * {0} * {0}",
    "rsqrt": "1.0 / tl.sqrt({0})",
    "hardsigmoid": "tl.where({0} + 3.0 < 0, 0.0, tl.where({0} + 3.0 > 6.0, 6.0, {0} + 3.0)) / 6.0",
    "leaky_relu": lambda slope: f"tl.where({{0}} > 0, {{0}}, {{0}} * {number(slope)})",
    "silu": f"{{0}} * {_SIGMOID}",
    "gelu": _gelu,
    "softplus": _softplus,
    "elu": _elu,
    "lerp": "{0} + {2} * ({1} - {0})",
    "addcmul": lambda value: f"{{0}} + {number(value)} * {{1}} * {{2}}",
    "addcdiv": lambda value: f"{{0}} + {number(value)} * {{1}} / {{2}}",
    "where": "tl.where({0} != 0, {1}, {2})",
    "sigmoid_backward": "{0} * (1.0 - {1}) * {1}",
    "tanh_backward": "{0} * (1.0 - {1} * {1})",
    "threshold_backward": "tl.where({1} <= {2}, 0.0, {0})",
    "silu_backward": "{0} * SIGMOID * (1.0 + {1} * (1.0 - SIGMOID))".replace("SIGMOID", _SIGMOID.replace("0}", "1}")),
    "gelu_backward": _gelu_backward,
    "softplus_backward": _softplus_backward,
    "elu_backward": _elu_backward,
    "leaky_relu_backward": lambda slope, is_result: f"tl.where({{1}} > 0, {{0}}, {{0}} * {number(slope)})",  # noqa: ARG005
    # A sixth in single precision, whatever the numbers are: torch has it so.
    "hardsigmoid_backward": "tl.where(({1} > -3.0) & ({1} < 3.0), {0} * 0.16666667163372040, 0.0)",
    "hardtanh_backward": lambda low, high: (
        f"tl.where(({{1}} <= {number(low)}) | ({{1}} >= {number(high)}), 0.0, {{0}})"
    ),
}

_OF_BOTH: Final = frozenset(
    {
        *("copy", "mul", "neg", "square", "cube", "where", "abs", "to_real", "to_integer", "wrap"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "lshift", "rshift"),
        *(*_COMPARISONS, *INTEGER_DIVISIONS),
    }
)
"""Written alike for integers."""
_OF_INTEGERS: Final[dict[str, str | Callable[..., str]]] = {
    "add": lambda alpha=1: f"{{0}} + {{1}} * {int(alpha)}",
    "sub": lambda alpha=1: f"{{0}} - {{1}} * {int(alpha)}",
    "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})",
    "sign": "({0} > 0).to(tl.int64) - ({0} < 0).to(tl.int64)",
    "relu": "tl.where({0} < 0, 0, {0})",
}

FUNCTIONS: Final = {
    "remainder": """
@triton.jit
def remainder(x, y):
    rest = math.fmod(x, y)
    return tl.where((rest != 0) & ((y < 0) != (rest < 0)), rest + y, rest)
""",
    "floor_divide": """
@triton.jit
def floor_divide(x, y):
    rest = math.fmod(x, y)
    quotient = (x - rest) / y
    quotient = tl.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - 1.0, quotient)
    whole = tl.floor(quotient)
    whole = tl.where(quotient - whole > 0.5, whole + 1.0, whole)
    return tl.where(y == 0, x / y, tl.where(quotient == 0, x / y * 0.0, whole))
""",
    "integer_remainder": """
@triton.jit
def integer_remainder(x, y):
    rest = x % tl.where((y == 0) | (y == -1), 1, y)
    rest = tl.where((y == 0) | (y == -1), 0, rest)
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)
""",
    "integer_fmod": """
@triton.jit
def integer_fmod(x, y):
    rest = x % tl.where((y == 0) | (y == -1), 1, y)
    return tl.where((y == 0) | (y == -1), 0, rest)
""",
    "integer_floor_divide": """
@triton.jit
def integer_floor_divide(x, y):
    by = tl.where((y == 0) | (y == -1), 1, y)
    quotient = x // by
    rest = x % by
    quotient = tl.where((rest != 0) & ((rest < 0) != (y < 0)), quotient - 1, quotient)
    return tl.where(y == -1, -x, tl.where(y == 0, 0, quotient))
""",
    "integer_trunc_divide": """
@triton.jit
def integer_trunc_divide(x, y):
    quotient = x // tl.where((y == 0) | (y == -1), 1, y)
    return tl.where(y == -1, -x, tl.where(y == 0, 0, quotient))
""",
}
