"""One step of a recurrent net as a C99 file without dependencies, for microcontrollers and audio plug-ins.

    steps (cells, and a head)  --trace, derive-->  bodies  --lower-->  loop IR  --here-->  NAME.h, NAME.c

The file computes what generated kernels do, one row at a time and in single precision. Values that are read more than
once, products and reductions have a place in the struct that the caller provides; all else is part of an expression:

    NAME net;  NAME_init(&net);          no allocation: everything is in the struct, weights are constants of the file
    NAME_step(&net, x, y);               x[NAME_INPUTS] -> y[NAME_OUTPUTS]
    NAME_reset(&net);                    a new sequence

Index legend: i0, i1, ... run over the dimensions of a value, k over what is summed.
"""

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn

from stretto.errors import StrettoError
from stretto.graph import Kind, Loop, Node, Untraceable, attribute_tensors, derive, run, trace
from stretto.kernels.ir import (
    AbstractValue,
    Affine,
    Constant,
    Join,
    LoopIR,
    Map,
    Product,
    Read,
    Reduce,
    Reshape,
    Root,
    Unsupported,
    View,
    contiguous,
    in_order,
    operands_of,
)
from stretto.kernels.lower import lower
from stretto.state import flatten

NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
RESERVED: Final = frozenset(
    "auto break case char const continue default do double else enum extern float for goto if inline int long main "
    "register restrict return short signed sizeof static struct switch typedef union unsigned void volatile "
    "while".split()
)
PER_LINE: Final = 8


def literal(value: float) -> str:
    """A number as C reads it back to the last digit of single precision."""
    if math.isnan(value) or math.isinf(value):
        return "NAN" if math.isnan(value) else "INFINITY" if value > 0 else "(-INFINITY)"
    text = f"{value:.9g}"
    text = text if any(mark in text for mark in ".e") else f"{text}.0"
    return f"({text}f)" if text.startswith("-") else f"{text}f"


def _scaled(sign: str) -> Callable[..., str]:
    return lambda alpha=1: f"({{0}} {sign} {{1}})" if alpha == 1 else f"({{0}} {sign} {literal(alpha)} * {{1}})"


def _gelu(approximate: str) -> str:
    if approximate == "tanh":
        inner = f"{literal(math.sqrt(2 / math.pi))} * ({{0}} + 0.044715f * {{0}} * {{0}} * {{0}})"
        return f"(0.5f * {{0}} * (1.0f + tanhf({inner})))"
    return f"(0.5f * {{0}} * (1.0f + erff({{0}} * {literal(math.sqrt(0.5))})))"


def _softplus(beta: float, threshold: float) -> str:
    inner = f"{{0}} * {literal(beta)}"
    return f"({inner} > {literal(threshold)} ? {{0}} : log1pf(expf({inner})) / {literal(beta)})"


def _elu(alpha: float, scale: float, input_scale: float) -> str:
    low = f"{literal(alpha * scale)} * expm1f({{0}} * {literal(input_scale)})"
    return f"({{0}} > 0.0f ? {{0}} * {literal(scale)} : {low})"


_COMPARISONS: Final = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}

OPS: Final[dict[str, str | Callable[..., str]]] = {
    **{f"{op}": f"{op}f({{0}})" for op in "sqrt exp expm1 log log1p erf sin cos atan floor ceil trunc tanh".split()},
    **{op: f"({{0}} {sign} {{1}} ? 1.0f : 0.0f)" for op, sign in _COMPARISONS.items()},
    **{op: f"net_{op}({{0}})" for op in ("sign", "sigmoid", "relu")},
    **{op: f"net_{op}({{0}}, {{1}})" for op in ("maximum", "minimum", "remainder")},
    "abs": "fabsf({0})",
    "round": "rintf({0})",
    "pow": "powf({0}, {1})",
    "copy": "{0}",
    "round_single": "{0}",
    "add": _scaled("+"),
    "sub": _scaled("-"),
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "neg": "(-{0})",
    "reciprocal": "(1.0f / {0})",
    "square": "net_square({0})",
    "cube": "({0} * net_square({0}))",
    "rsqrt": "(1.0f / sqrtf({0}))",
    "hardsigmoid": "(net_minimum(net_maximum({0} + 3.0f, 0.0f), 6.0f) / 6.0f)",
    "leaky_relu": lambda slope: f"({{0}} > 0.0f ? {{0}} : {{0}} * {literal(slope)})",
    "silu": "({0} * net_sigmoid({0}))",
    "gelu": _gelu,
    "softplus": _softplus,
    "elu": _elu,
    "lerp": "({0} + {2} * ({1} - {0}))",
    "addcmul": lambda value: f"({{0}} + {literal(value)} * {{1}} * {{2}})",
    "addcdiv": lambda value: f"({{0}} + {literal(value)} * {{1}} / {{2}})",
    "where": "({0} != 0.0f ? {1} : {2})",
}
"""The loop IR's pointwise operators as C expressions in which `{0}`, `{1}`, ... stand for the operands."""

HELPERS: Final = """\
static inline float net_sigmoid(float a) { return 1.0f / (1.0f + expf(-a)); }
static inline float net_relu(float a) { return a > 0.0f || isnan(a) ? a : 0.0f; }
static inline float net_sign(float a) { return (float)((a > 0.0f) - (a < 0.0f)); }
static inline float net_square(float a) { return a * a; }
static inline float net_maximum(float a, float b) { return a > b || isnan(a) ? a : b; }
static inline float net_minimum(float a, float b) { return a < b || isnan(a) ? a : b; }
static inline float net_remainder(float a, float b) { return a - floorf(a / b) * b; }
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CSource:
    """The two files, and how much memory they take.

    Attributes:
        name: Of the type and the functions.
        header: NAME.h.
        source: NAME.c.
        weight_bytes: Of constants, which may lie in read-only memory.
        state_bytes: Of the struct.
    """

    name: str
    header: str
    source: str
    weight_bytes: int
    state_bytes: int


def export_c(steps: Sequence[nn.Module], *, num_inputs: int, name: str) -> CSource:
    """The step of several modules, each fed by the one before, as C.

    Args:
        steps: Cells, in evaluation mode: called as `cell(x, state)` they return `(y, state)`; or modules without a
            state, such as a linear layer at the end, which are called with `x` alone.
        num_inputs: Features of the input.
        name: Of the type and functions: a word of letters, digits and underscores.

    Raises:
        StrettoError: A step has something that no C is written for; the message says what.
    """
    if not NAME.fullmatch(name) or name in RESERVED:
        raise StrettoError(
            f"{name!r} is not a valid C identifier", fix="Choose a word of letters, digits and underscores."
        )
    writer = _Writer(name)
    shape: tuple[int, ...] = (num_inputs,)
    inputs = "x"
    for number, step in enumerate(steps):
        module = copy.deepcopy(step).float().eval()
        cell = module if hasattr(module, "initial_state") else _Stateless(module)
        try:
            with torch.inference_mode(mode=False):
                inputs, shape = writer.add(cell, shape, inputs=inputs, is_last=number == len(steps) - 1)
        except (Unsupported, Untraceable) as reason:
            raise StrettoError(
                f"no C can be written for {type(step).__name__}: {reason}",
                fix="Change the step, or export it with --to torch.",
            ) from reason
    return writer.finish(num_inputs=num_inputs, num_outputs=math.prod(shape))


@final
class _Stateless(nn.Module):
    """A module as a cell without a state."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        return self.module(x), state

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, ...]:  # noqa: ARG002
        return ()


@final
class _Writer:
    """Collects the code, the constants and the places of all steps."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[str] = []
        self.constants: list[str] = []
        self.initial: list[float] = []
        self.copies: list[str] = []
        self.work = 0
        self.num_constants = 0
        self._depth = 1

    def add(
        self, cell: nn.Module, shape: tuple[int, ...], *, inputs: str, is_last: bool
    ) -> tuple[str, tuple[int, ...]]:
        """Write one step; the place and the shape of its output."""
        with torch.no_grad():
            state = cell.initial_state(1)  # type: ignore[operator]
        ir, weights, y = _lowered(cell, shape, state)
        parts = flatten(state)
        places = {"per_step0": inputs}
        for index, part in enumerate(parts):
            places[f"before{index}"] = f"(net->state + {len(self.initial)})"
            places[f"after{index}"] = self._reserve(part.numel())
            self.copies.append(f"memcpy(net->state + {len(self.initial)}, {places[f'after{index}']}, ")
            self.copies[-1] += f"{part.numel()} * sizeof(float));"
            self.initial += part.detach().double().flatten().tolist()
        places["output0"] = "y" if is_last else self._reserve(y.row_size)
        for node in ir.uniforms:
            buffer = next(b for b in ir.buffers if b.role == "uniform" and b.name not in places)
            places[buffer.name] = self._constant(weights[node])
        matrices = {id(weight): self._constant(weights[node]) for node, weight in ir.weights.items()}
        self.lines.append(f"    /* {type(getattr(cell, 'module', cell)).__name__} */")
        _Step(self, ir, places, matrices).write()
        return places["output0"], y.row_shape

    def finish(self, *, num_inputs: int, num_outputs: int) -> CSource:
        """The two files."""
        name = self.name
        upper, num_states = name.upper(), len(self.initial)
        header = f"""\
#ifndef {upper}_H
#define {upper}_H

/* One step of a recurrent net. Written by Stretto; plain C99, no allocation, no global state. */

#ifdef __cplusplus
extern "C" {{
#endif

#define {upper}_INPUTS {num_inputs}
#define {upper}_OUTPUTS {num_outputs}

typedef struct {{
    float state[{max(1, num_states)}];
    float work[{max(1, self.work)}];
}} {name};

/* Must be called once before anything else. */
void {name}_init({name} *net);

/* x has {upper}_INPUTS numbers, y gets {upper}_OUTPUTS; they must not overlap. */
void {name}_step({name} *net, const float *x, float *y);

/* Begins a new sequence. */
void {name}_reset({name} *net);

#ifdef __cplusplus
}}
#endif

#endif
"""
        start = _array(f"{name}_initial", self.initial) if num_states else ""
        load = (
            f"    memcpy(net->state, {name}_initial, sizeof {name}_initial);\n"
            if num_states
            else "    net->state[0] = 0.0f;\n"
        )
        body = "\n".join([*self.lines, *(f"    {line}" for line in self.copies)])
        source = f"""\
#include "{name}.h"

#include <math.h>
#include <string.h>

{HELPERS}
{"".join(self.constants)}{start}
void {name}_reset({name} *net) {{
{load}}}

void {name}_init({name} *net) {{
    memset(net->work, 0, sizeof net->work);
    {name}_reset(net);
}}

void {name}_step({name} *net, const float *x, float *y) {{
{body}
}}
"""
        return CSource(
            name=name,
            header=header,
            source=source,
            weight_bytes=4 * (self.num_constants + num_states),
            state_bytes=4 * (max(1, num_states) + max(1, self.work)),
        )

    def _reserve(self, size: int) -> str:
        place, self.work = f"(net->work + {self.work})", self.work + size
        return place

    def _constant(self, tensor: torch.Tensor) -> str:
        text = f"{self.name}_w{len(self.constants)}"
        values = tensor.detach().double().flatten().tolist()
        self.num_constants += len(values)
        self.constants.append(_array(text, values))
        return text

    def line(self, text: str) -> None:
        """A line of the step, in the loops that are open."""
        self.lines.append("    " * self._depth + text)

    @contextmanager
    def loops(self, dims: Sequence[int]) -> Iterator[None]:
        """Loops over some dimensions, as i0, i1, ..."""
        opened = [(f"i{d}", size) for d, size in enumerate(dims) if size != 1]
        for index, size in opened:
            self.line(f"for (int {index} = 0; {index} < {size}; ++{index}) {{")
            self._depth += 1
        yield
        for _ in opened:
            self._depth -= 1
            self.line("}")


def _array(name: str, values: list[float]) -> str:
    rows = [", ".join(map(literal, values[at : at + PER_LINE])) for at in range(0, len(values), PER_LINE)]
    text = ",\n    ".join(rows)
    return f"static const float {name}[{len(values)}] = {{\n    {text}\n}};\n"


def _lowered(cell: nn.Module, shape: tuple[int, ...], state: Any) -> tuple[LoopIR, dict[Node, torch.Tensor], Node]:
    """The IR of a whole step, nothing hoisted out of it; the values of its weights; and its output."""
    graph = trace(cell, x_shape=shape, x_dtype=torch.float32, state=state)
    tensors = {**dict(attribute_tensors(cell)), **dict(cell.named_parameters()), **dict(cell.named_buffers())}
    weights = {node: tensors[name] for name, node in graph.parameters.items()} | graph.constants
    loop = Loop(
        states=list(range(len(graph.states))),
        nodes=[node for node in graph.nodes if node.op is not None],
        per_step=[graph.x],
        weights=list(weights),
        constants=[],
        outputs=[graph.y],
        level=1,
    )
    body = derive(graph, loop)
    ir = lower(body, "forward")
    values: dict[Node, Any] = {port.node: weights[port.source].detach() for port in body.ports_of(Kind.WEIGHT)}
    with torch.no_grad():
        run(ir.prepared, values, 1)
    ir.roots = [root for root in ir.roots if root.buffer.role in ("after", "output")]
    if any(value.integer for value in in_order(ir.roots)):
        raise Unsupported("it computes with integers")
    return ir, values, body.outputs[0]


@final
class _Step:
    """Writes the values of one step, each behind its operands."""

    def __init__(self, writer: _Writer, ir: LoopIR, places: dict[str, str], matrices: dict[int, str]) -> None:
        self._writer, self._roots, self._places, self._matrices = writer, ir.roots, places, matrices
        order = in_order(ir.roots)
        uses = Counter(id(item) for value in order for item in operands_of(value))
        uses.update(id(root.value) for root in ir.roots)
        self._order = order
        # A map that one other of the same sizes reads is written where it is read. Through a view or a broadcast it
        # might be computed again and again.
        same = {
            id(item) for value in order if isinstance(value, Map) for item in value.operands if item.dims == value.dims
        }
        same |= {id(root.value) for root in ir.roots}
        self._inline = {id(v) for v in order if isinstance(v, Map) and uses[id(v)] == 1 and id(v) in same}

    def write(self) -> None:
        """Everything."""
        for value in self._order:
            if isinstance(value, (Read, Constant, View, Reshape)) or id(value) in self._inline:
                continue
            self._places[f"value{id(value)}"] = place = self._writer._reserve(math.prod(value.dims))
            self._compute(value, place)
        # A next state may be read as the state before: these are overwritten when all is computed.
        for root in self._roots:
            self._store(root)

    def _store(self, root: Root) -> None:
        place = self._places[root.buffer.name]
        dims = root.value.dims
        with self._writer.loops(dims):
            at = _positions(dims)
            self._writer.line(f"{place}[{_flat(at, contiguous(dims))}] = {self._at(root.value, at)};")

    def _compute(self, value: AbstractValue, place: str) -> None:
        """Fill a place with a value."""
        writer, at = self._writer, _positions(value.dims)
        flat = _flat(at, contiguous(value.dims))
        if isinstance(value, Map):
            with writer.loops(value.dims):
                writer.line(f"{place}[{flat}] = {self._expression(value, at)};")
        elif isinstance(value, Product):
            self._product(value, place)
        elif isinstance(value, Reduce):
            with writer.loops(value.dims):
                self._reduce(value, f"{place}[{flat}]", at)
        elif isinstance(value, Join):
            start = 0
            for part in value.parts:
                with writer.loops(part.dims):
                    here = _positions(part.dims)
                    there = [f"({index} + {start})" if d == value.axis else index for d, index in enumerate(here)]
                    writer.line(f"{place}[{_flat(there, contiguous(value.dims))}] = {self._at(part, here)};")
                start += part.dims[value.axis]
        else:
            raise Unsupported(f"no C is written for {type(value).__name__.lower()}")

    def _product(self, value: Product, place: str) -> None:
        """Row vectors times a matrix in row-major order: the inner loop runs along a row and has no sum to wait for."""
        writer, weight = self._writer, value.weight
        lead = value.dims[:-1]
        matrix = self._matrices[id(weight)]
        with writer.loops(lead):
            at = _positions(lead)
            row = _flat([*at, "0"], contiguous(value.dims))
            if weight.heads > 1:
                matrix = f"({matrix} + {at[-1]} * {weight.K * weight.N})"
            writer.line(f"{{ float *row = {place} + {row};")
            writer.line(f"for (int n = 0; n < {weight.N}; ++n) row[n] = 0.0f;")
            writer.line(f"for (int k = 0; k < {weight.K}; ++k) {{")
            writer.line(f"    const float a = {self._at(value.operand, [*at, 'k'])};")
            writer.line(f"    const float *w = {matrix} + k * {weight.N};")
            writer.line(f"    for (int n = 0; n < {weight.N}; ++n) row[n] += a * w[n];")
            writer.line("} }")

    def _reduce(self, value: Reduce, target: str, at: list[str]) -> None:
        writer, dims = self._writer, value.operand.dims
        inner = [f"k{d}" if d in value.axes and dims[d] != 1 else index for d, index in enumerate(at)]
        start = {"sum": "0.0f", "max": "(-INFINITY)", "min": "INFINITY"}[value.kind]
        writer.line(f"{{ float total = {start};")
        loops = [f"for (int k{d} = 0; k{d} < {dims[d]}; ++k{d})" for d in value.axes if dims[d] != 1]
        item = self._at(value.operand, inner)
        text = f"total += {item};" if value.kind == "sum" else f"total = net_{value.kind}imum(total, {item});"
        writer.line(" ".join([*loops, text]))
        writer.line(f"{target} = total; }}")

    def _at(self, value: AbstractValue, at: list[str]) -> str:
        """The expression of one element."""
        if isinstance(value, Constant):
            return literal(float(value.number))
        if isinstance(value, Read):
            return f"{self._places[value.buffer.name]}[{_flat(at, value.buffer.strides)}]"
        if isinstance(value, View):
            return self._at(value.base, [_affine(index, at) for index in value.index])
        if isinstance(value, Reshape):
            return self._at(value.base, _unflat(_flat(at, contiguous(value.dims)), value.base.dims))
        if id(value) in self._inline:
            assert isinstance(value, Map)
            return self._expression(value, at)
        return f"{self._places[f'value{id(value)}']}[{_flat(at, contiguous(value.dims))}]"

    def _expression(self, value: Map, at: list[str]) -> str:
        found = OPS.get(value.op)
        if found is None:
            raise Unsupported(f"no C is written for the operator {value.op}")
        text = found if isinstance(found, str) else found(**value.attrs)
        operands = []
        for operand in value.operands:
            behind = at[len(at) - len(operand.dims) :]
            operands.append(
                self._at(operand, [i if size != 1 else "0" for i, size in zip(behind, operand.dims, strict=True)])
            )
        return text.format(*operands)


def _positions(dims: Sequence[int]) -> list[str]:
    return [f"i{d}" if size != 1 else "0" for d, size in enumerate(dims)]


def _flat(at: Sequence[str], strides: Sequence[int]) -> str:
    """Where an element lies, given the distance between neighbours along each dimension."""
    terms = [i if stride == 1 else f"{i} * {stride}" for i, stride in zip(at, strides, strict=True) if i != "0"]
    return " + ".join(terms) or "0"


def _unflat(flat: str, dims: Sequence[int]) -> list[str]:
    """The position along each dimension, given where an element lies."""
    if flat.isdecimal():
        return [str(int(flat) // stride % size) for size, stride in zip(dims, contiguous(tuple(dims)), strict=True)]
    found = []
    kept = [d for d, size in enumerate(dims) if size != 1]
    for d, (size, stride) in enumerate(zip(dims, contiguous(tuple(dims)), strict=True)):
        if size == 1:
            found.append("0")
            continue
        text = f"({flat})" if stride == 1 else f"({flat}) / {stride}"
        found.append(f"({text} % {size})" if d != kept[0] else f"({text})")
    return found


def _affine(index: Affine, at: Sequence[str]) -> str:
    terms = [i if f == 1 else f"{f} * {i}" for f, i in zip(index.factors, at, strict=True) if f and i != "0"]
    if index.constant or not terms:
        terms.append(str(index.constant))
    return terms[0] if len(terms) == 1 and " " not in terms[0] else f"({' + '.join(terms)})"
