"""The operators that random cells are made of: how each runs, in plain PyTorch.

Operators with a bounded domain are written so that every real number is in it. All but those in `EXOTIC` are operators
that generated code is expected for.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

import stretto

LEAVES: Final = ("parameter", "frozen", "buffer", "constant")
"""Tensors the cell owns: settings are their sizes, values are drawn when the cell is made."""

UNARY: Final[dict[str, Callable[..., Any]]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "neg": torch.neg,
    "abs": torch.abs,
    "sin": torch.sin,
    "cos": torch.cos,
    "atan": torch.atan,
    "erf": torch.erf,
    "square": lambda a: 0.3 * a**2,
    "cube": lambda a: 0.1 * a**3,
    "gaussian": lambda a: torch.exp(-(a * a)),
    "expm1": lambda a: torch.expm1(a.clamp(max=1.0)),
    "log": lambda a: torch.log(a.abs() + 0.5),
    "log1p": lambda a: torch.log1p(a * a),
    "sqrt": lambda a: torch.sqrt(a * a + 0.5),
    "rsqrt": lambda a: torch.rsqrt(a * a + 0.5),
    "reciprocal": lambda a: torch.reciprocal(a * a + 1.0),
    "power": lambda a: torch.pow(a.abs() + 0.5, 1.5),
    "softplus": functional.softplus,
    "softplus_steep": lambda a: functional.softplus(a, beta=3.0, threshold=2.0),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda a: functional.gelu(a, approximate="tanh"),
    "elu": lambda a: functional.elu(a, alpha=0.7),
    "leaky_relu": lambda a: functional.leaky_relu(a, 0.2),
    "hardtanh": lambda a: functional.hardtanh(a, -0.4, 0.6),
    "sign": lambda a: a * torch.sign(a + 0.3),
    "detach": lambda a: a.detach(),
    "data": lambda a: a.data,
    "clone": lambda a: a.clone(),
    "contiguous": lambda a: a.contiguous(),
    "ones_like": lambda a: a * 0.5 + 0.1 * torch.ones_like(a),
}


class Spike(torch.autograd.Function):
    """A step with a gradient of its own, as spiking networks use."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        """One where positive."""
        ctx.save_for_backward(a)
        return (a > 0).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """As if it had been soft."""
        a: torch.Tensor = ctx.saved_tensors[0]
        return gradients[0] / (1 + a * a)


class Pair(torch.autograd.Function):
    """Two results, saved by `setup_context`, with a gradient that is not theirs."""

    @staticmethod
    def forward(a: torch.Tensor, scale: float) -> Any:
        """A square and a multiple."""
        return a * a * scale, a * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        """Keep the input and the number."""
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Something smooth."""
        (a,) = ctx.saved_tensors
        return (gradients[0] * torch.tanh(a) + 0.5 * gradients[1]) * ctx.scale, None


def part_in_place(a: torch.Tensor) -> torch.Tensor:
    """Parts and views of a copy, written in place."""
    made = 0.5 * a
    if a.dim() > 1:
        last = made[..., -1]
        made[..., 0] += 0.3
        made[..., ::2].mul_(0.9)
        made.flatten(1)[:, :1].add_(last.reshape(len(a), -1)[:, :1])
        made[..., -1] = a[..., 0]
    return made.add_(0.1)


def _flat(a: torch.Tensor) -> torch.Tensor:
    """All of a row, with no two elements alike."""
    v = a.reshape(a.shape[0], -1)
    return v + 0.013 * torch.arange(v.shape[1], dtype=a.dtype)


def _as_wide(part: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """One number for each row, beside what it was made of."""
    return part.reshape(-1, *[1] * (a.dim() - 1))


def _matrix(v: torch.Tensor) -> torch.Tensor:
    """A positive definite matrix of each row."""
    s = torch.tanh(v.mean(1))
    return torch.stack([s + 3.0, s, s, s * s + 2.0], 1).view(-1, 2, 2)


def places_of_rows(a: torch.Tensor) -> torch.Tensor:
    """Elements of each row by the number of the row and theirs, in reverse."""
    v = a.reshape(a.shape[0], -1)
    return v[torch.arange(len(v))[:, None], torch.arange(v.shape[1] - 1, -1, -1)].view_as(a)


def put_into_rows(a: torch.Tensor) -> torch.Tensor:
    """An element of each row, chosen by the row, is replaced."""
    v = _flat(a).clone()
    v[torch.arange(len(v)), v.detach().argmax(1)] = 0.5 * v[:, -1]
    return v.view(a.shape)


def beside_rows(a: torch.Tensor) -> torch.Tensor:
    """Features and rows in one dimension, as graph convolutions have them."""
    v = a.reshape(a.shape[0], -1)
    m = v.t().reshape(1, -1)
    return torch.cat([m, 0.5 * m], 0).sum(0).reshape(v.shape[1], -1).t().reshape(a.shape)


def looked_up(a: torch.Tensor) -> torch.Tensor:
    """A table, read at a place that the row chooses."""
    place = (a.reshape(a.shape[0], -1).sum(1) > 0.1).long()
    return a * _as_wide(functional.embedding(place, torch.tensor([[0.5], [1.5]], dtype=a.dtype)), a)


def convolved(a: torch.Tensor) -> torch.Tensor:
    """A small convolution along the row."""
    kernel = torch.tensor([[[0.2, 0.5, 0.3]]], dtype=a.dtype)
    return functional.conv1d(a.reshape(a.shape[0], 1, -1), kernel, padding=1).view(a.shape)


def without_gradient(a: torch.Tensor) -> torch.Tensor:
    """A gate that gradients do not pass."""
    with torch.no_grad():
        gate = torch.sigmoid(a)
    return a * gate


EXOTIC_UNARY: Final[dict[str, Callable[..., Any]]] = {
    "selu": functional.selu,
    # Torch's own derivative rounds the number to single precision.
    "celu": lambda a: functional.celu(a, 0.75),
    "mish": functional.mish,
    "relu6": lambda a: functional.relu6(a + 3.0),
    # Torch's own derivative has a sixth in single precision, whatever the numbers are in.
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "softsign": functional.softsign,
    "logsigmoid": functional.logsigmoid,
    "tanhshrink": functional.tanhshrink,
    "hardshrink": functional.hardshrink,
    "softshrink": lambda a: functional.softshrink(a, 0.2),
    "threshold": lambda a: functional.threshold(a, 0.1, 0.05),
    "sinh": lambda a: torch.sinh(a.clamp(-1, 1)),
    "asinh": torch.asinh,
    "exp2": lambda a: torch.exp2(-a.abs()),
    "log2": lambda a: torch.log2(a.abs() + 0.5),
    "floor": lambda a: a + 0.1 * torch.floor(3 * a),
    "round": lambda a: a + (torch.round(2 * a) - a).detach(),
    "round_to": lambda a: a + 0.1 * torch.round(a, decimals=1),
    "floor_division": lambda a: a + 0.1 * torch.div(3 * a, 2.0, rounding_mode="floor"),
    "whole_numbers": lambda a: a * torch.where(a > 0, 1, 2),
    "not_a_number": lambda a: torch.where(torch.isnan(a), 0.0, a),
    "frac": lambda a: torch.frac(a + 5.0),
    "nan_to_num": torch.nan_to_num,
    "no_grad": without_gradient,
    "spike": lambda a: a + Spike.apply(a),  # type: ignore[no-untyped-call]
    "pair": lambda a: sum(Pair.apply(a, 0.4)),  # type: ignore[no-untyped-call]
    "cosh": lambda a: torch.cosh(a.clamp(-1, 1)),
    "tan": lambda a: torch.tan(a.clamp(-1, 1)),
    "asin": lambda a: torch.asin(0.8 * torch.tanh(a)),
    "acos": lambda a: torch.acos(0.8 * torch.tanh(a)),
    "acosh": lambda a: torch.acosh(a * a + 1.5),
    "atanh": lambda a: torch.atanh(0.8 * torch.tanh(a)),
    "erfc": torch.erfc,
    "log10": lambda a: torch.log10(a.abs() + 0.5),
    "fmod": lambda a: a + 0.1 * torch.fmod(3 * a, 1.3),
    "finite": lambda a: torch.where(torch.isfinite(a) & ~torch.isinf(a), a, 0.0),
    "row_second": lambda a: (0.5 * a.unsqueeze(0)).squeeze(0) + a[None].transpose(0, 1)[:, 0],
    "part_in_place": part_in_place,
    "places_of_rows": places_of_rows,
    "put_into_rows": put_into_rows,
    "beside_rows": beside_rows,
    "looked_up": looked_up,
    "convolved": convolved,
    "pooled": lambda a: functional.avg_pool1d(a.reshape(a.shape[0], 1, -1), 3, 1, 1).view(a.shape),
    "distances": lambda a: torch.cdist(_flat(a)[..., None], _flat(a)[..., None] + 9.0).mean(-1).view(a.shape),
    "number_of_its_own": lambda a: a * torch.tensor(0.7, dtype=a.dtype) + torch.as_tensor(0.1).to(a.dtype),
    "solved": lambda a: (
        a + _as_wide(torch.linalg.solve(_matrix(_flat(a)), _flat(a).mean(1).view(-1, 1, 1).expand(-1, 2, 1))[:, 0], a)
    ),
    "log_determinant": lambda a: a * 0.3 + 0.1 * _as_wide(torch.logdet(_matrix(_flat(a))), a),
    "cholesky": lambda a: a * 0.3 + 0.1 * _as_wide(torch.linalg.cholesky(_matrix(_flat(a)))[:, 1, 0], a),
    "median": lambda a: 0.5 * a + 0.2 * _as_wide(_flat(a).median(1).values, a),
    "largest": lambda a: 0.5 * a + 0.2 * _as_wide(_flat(a).topk(1).values, a),
    "cummax": lambda a: 0.3 * _flat(a).cummax(1).values.view(a.shape),
    "straight_through": lambda a: 0.5 * a + stretto.straight_through(a > 0.1, torch.sigmoid(a)),
    "in_place": lambda a: (0.5 * a).add_(0.2).mul_(0.9),
    "in_place_relu": lambda a: functional.relu(a + 0.1, inplace=True),
    "sum_of_all_features": lambda a: 0.2 * a.reshape(a.shape[0], -1).sum(1).view(-1, *[1] * (a.dim() - 1)) + 0.5 * a,
}

BINARY: Final[dict[str, Callable[..., Any]]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a / (b * b + 1.0),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "add_scaled": lambda a, b: torch.add(a, b, alpha=0.5),
    "gate": lambda a, b: torch.sigmoid(a) * torch.tanh(b),
    "mix": lambda a, b: 0.8 * a + (1 - 0.8) * b,
}

EXOTIC_BINARY: Final[dict[str, Callable[..., Any]]] = {
    "atan2": lambda a, b: torch.atan2(a, b.abs() + 0.5),
    "hypot": lambda a, b: torch.hypot(a + 2.0, b),
    "logaddexp": torch.logaddexp,
    "power_of": lambda a, b: torch.pow(a.abs() + 0.5, torch.tanh(b)),
    "remainder": lambda a, b: torch.remainder(a + 7.1, b.abs() + 2.0),
    "fmax": torch.fmax,
}

WITH_NUMBER: Final[dict[str, Callable[..., Any]]] = {
    "plus": lambda a, c: a + c,
    "times": lambda a, c: a * c,
    "from": lambda a, c: c - a,
    "over": lambda a, c: a / (1.0 + abs(c)),
    "under": lambda a, c: c / (a * a + 1.0),
    "clamp_min": lambda a, c: a.clamp(min=c),
    "clamp_max": lambda a, c: a.clamp(max=c),
    "clamp": lambda a, c: a.clamp(c - 0.5, c + 0.4),
    "at_least": lambda a, c: torch.maximum(a, torch.tensor(c, dtype=a.dtype)),
}

COMPARISON: Final[dict[str, Callable[..., Any]]] = {
    "gt": torch.gt,
    "ge": torch.ge,
    "lt": torch.lt,
    "le": torch.le,
    "ne": torch.ne,
}

SHAPE: Final[dict[str, Callable[..., Any]]] = {
    "slice": lambda a, dim, start, size, step: a[(*[slice(None)] * dim, slice(start, start + size * step, step))],
    "narrow": lambda a, dim, start, size: a.narrow(dim, start, size),
    "select": lambda a, dim, index: a.select(dim, index),
    "transpose": lambda a, one, other: a.transpose(one, other),
    "permute": lambda a, *order: a.permute(*order),
    "unsqueeze": lambda a, dim: a.unsqueeze(dim),
    "squeeze": lambda a, dim: a.squeeze(dim),
    "view": lambda a, *sizes: a.reshape(a.shape[0], *sizes),
    "flatten": lambda a: a.flatten(1),
    "expand": lambda a, *sizes: a.expand(a.shape[0], *sizes),
    "chunk": lambda a, count, dim: a.chunk(count, dim),
    "split": lambda a, dim, *sizes: a.split(sizes, dim),
    "unbind": lambda a, dim: a.unbind(dim),
    "part": lambda parts, index: parts[index],
    "cat": lambda *parts_and_dim: torch.cat(parts_and_dim[:-1], parts_and_dim[-1]),
    "stack": lambda *parts_and_dim: torch.stack(parts_and_dim[:-1], parts_and_dim[-1]),
}

EXOTIC_SHAPE: Final[dict[str, Callable[..., Any]]] = {
    "repeat": lambda a, count: a.repeat(1, *[1] * (a.dim() - 2), count),
    "repeat_interleave": lambda a, count: a.repeat_interleave(count, -1),
    "flip": lambda a: a.flip(-1),
    "roll": lambda a, count: a.roll(count, -1),
    "pad": lambda a, left, right: functional.pad(a, (left, right), value=0.3),
    "index": lambda a, *order: a[..., list(order)],
    "cumsum": lambda a: 0.3 * a.cumsum(-1),
    "sort": lambda a: a.sort(-1).values,
    "positions": lambda a: a * torch.arange(a.shape[-1]) / a.shape[-1],
}

REDUCTION: Final[dict[str, Callable[..., Any]]] = {
    "sum": lambda a, dim, keep: a.sum(dim, keepdim=keep) / math.sqrt(a.shape[dim]),
    "mean": lambda a, dim, keep: a.mean(dim, keepdim=keep),
    "amax": lambda a, dim, keep: a.amax(dim, keepdim=keep),
    "amin": lambda a, dim, keep: a.amin(dim, keepdim=keep),
}

EXOTIC_REDUCTION: Final[dict[str, Callable[..., Any]]] = {
    "logsumexp": lambda a, dim, keep: a.logsumexp(dim, keepdim=keep),
    "norm": lambda a, dim, keep: (a + 0.1).norm(dim=dim, keepdim=keep),
    "var": lambda a, dim, keep: a.var(dim, correction=0, keepdim=keep),
    "std": lambda a, dim, keep: torch.cat([a, a + 1.0], dim).std(dim, keepdim=keep),
    "prod": lambda a, dim, keep: torch.tanh(a + 1.0).prod(dim, keepdim=keep),
    "max": lambda a, dim, keep: a.max(dim, keepdim=keep).values,
}

OVER: Final[dict[str, Callable[..., Any]]] = {
    "softmax": lambda a, dim: a.softmax(dim),
    "log_softmax": lambda a, dim: 0.3 * a.log_softmax(dim),
    "centred": lambda a, dim: a - a.mean(dim, keepdim=True),
    "unit": lambda a, dim: a / torch.sqrt((a * a).sum(dim, keepdim=True) + 0.5),
}

PRODUCT: Final[dict[str, Callable[..., Any]]] = {
    "linear": functional.linear,
    "matmul": lambda a, weight: a @ weight,
    "layer_norm": lambda a, *gains_and_eps: functional.layer_norm(a, a.shape[-1:], *gains_and_eps),
    "bmm": torch.bmm,
    "attend": lambda keys, query: torch.bmm(keys, query.unsqueeze(-1)).squeeze(-1),
    "read_out": lambda weights, values: torch.bmm(weights.unsqueeze(1), values).squeeze(1),
    "outer": lambda a, b: a.unsqueeze(-1) * b.unsqueeze(-2),
    "dot": lambda a, b: (a * b).sum(-1, keepdim=True),
    "einsum": lambda keys, query: torch.einsum("bmd,bd->bm", keys, query),
    "batched": lambda keys, query: (keys @ query.unsqueeze(-1)).squeeze(-1),
}

HEADS: Final[dict[str, Callable[..., Any]]] = {
    "heads_einsum": lambda a, weight: torch.einsum("bnd,nde->bne", a, weight),
    "heads_bmm": lambda a, weight: torch.bmm(a.transpose(0, 1), weight).transpose(0, 1),
    "heads_matmul": lambda a, weight: (a.unsqueeze(-2) @ weight).squeeze(-2),
    "heads_left": lambda a, weight: (weight.mT @ a.unsqueeze(-1)).squeeze(-1),
    "mixed_heads": lambda a, weight: torch.einsum("nde,bnd->bde", weight, a),
}
"""Each of some rows (n, d) by a matrix of its own (n, d, e)."""

ELSEWHERE: Final[dict[str, Callable[..., Any]]] = {
    "leading_one": lambda a: functional.softplus(a[None] - 0.1)[0],
    "stacked_first": lambda a: torch.stack([a, a * a]).softmax(0)[1],
    "turned_and_back": lambda a: 0.5 * torch.tanh(a.transpose(0, -1)).transpose(0, -1),
    "joined_first": lambda a: torch.cat([a[None], a[None] * 0.5]).sum(0),
}
"""The rows are in another dimension than the first for a while."""

EXOTIC_PRODUCT: Final[dict[str, Callable[..., Any]]] = {
    "rms_norm": lambda a: functional.rms_norm(a, a.shape[-1:], eps=0.1),
    "glu": lambda a: functional.glu(a, -1),
    "cosine": lambda a, b: functional.cosine_similarity(a, b + 0.1, dim=-1).unsqueeze(-1),
    "normalize": lambda a: functional.normalize(a + 0.1, dim=-1),
}

CHOICE: Final[dict[str, Callable[..., Any]]] = {
    "where": torch.where,
    "where_number": torch.where,
    "masked_fill": lambda flag, a, c: a.masked_fill(flag, c),
    "masked": lambda flag, a: flag * a,
    "to_real": lambda flag: flag.to(torch.float64),
    "not": torch.logical_not,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "lerp": torch.lerp,
    "addcmul": lambda a, b, c: torch.addcmul(a, b, c, value=0.5),
}

EXOTIC_CHOICE: Final[dict[str, Callable[..., Any]]] = {
    "both": lambda one, other: one & other,
    "either": lambda one, other: one | other,
    "neither": lambda one, other: ~(one | other),
}

ROWS: Final[dict[str, Callable[..., Any]]] = {
    "new_full": lambda a, value, *sizes: a.new_full((a.shape[0], *sizes), value),
    "each_row": lambda a, still, *sizes: still.expand(a.shape[0], *sizes),
}

EXOTIC: Final = {
    **EXOTIC_UNARY,
    **EXOTIC_BINARY,
    **EXOTIC_SHAPE,
    **EXOTIC_REDUCTION,
    **EXOTIC_PRODUCT,
    **EXOTIC_CHOICE,
}

RUN: Final[dict[str, Callable[..., Any]]] = {
    **UNARY,
    **BINARY,
    **WITH_NUMBER,
    **COMPARISON,
    **SHAPE,
    **REDUCTION,
    **OVER,
    **PRODUCT,
    **HEADS,
    **ELSEWHERE,
    **CHOICE,
    **ROWS,
    **EXOTIC,
}
"""Every operator by name: called with the tensors it reads, then with its settings."""


def leaf(name: str, sizes: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """The tensor of an operator in `LEAVES`: small, and not at a place where anything has a kink."""
    fan_in = sizes[-1] if len(sizes) > 1 else 1
    values = torch.randn(sizes, dtype=torch.float64, generator=generator) * (0.7 / math.sqrt(fan_in))
    return nn.Parameter(values, requires_grad=name == "parameter") if name in {"parameter", "frozen"} else values
