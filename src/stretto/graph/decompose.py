"""Operators that are recorded as several simpler ones: what is kept is what the generator of code knows.

Most decompositions are PyTorch's own (`torch._decomp`). Those here are where it has none, where its own reads values or
ends in operators that are no simpler, or where the derivative of the parts would differ from that of the whole:
a norm of zeros has the gradient zero, and a product with a zero factor has one too.

Every operator that autograd emits for the backward step comes by here as well.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

aten = torch.ops.aten

KEPT: Final = frozenset(
    # Pointwise, and the derivatives that autograd has operators for.
    "neg abs sign sgn reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p erf erfc erfinv lgamma "
    "digamma sin cos tan asin acos atan "
    "sinh cosh asinh acosh atanh floor ceil trunc round sigmoid tanh relu hardsigmoid silu mul div remainder fmod "
    "floor_divide maximum minimum gt ge lt le eq ne logical_and logical_or logical_xor logical_not bitwise_and "
    "bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift "
    "__lshift__ __rshift__ add sub rsub pow atan2 hypot clamp "
    "clamp_min clamp_max hardtanh leaky_relu gelu softplus elu lerp addcmul addcdiv where masked_fill "
    "sigmoid_backward tanh_backward silu_backward hardsigmoid_backward threshold_backward gelu_backward "
    "softplus_backward elu_backward leaky_relu_backward hardtanh_backward "
    # Views and copies.
    "view _unsafe_view reshape t transpose permute slice select unsqueeze squeeze expand split split_with_sizes alias "
    "detach unbind clone cat stack _to_copy lift_fresh copy slice_backward select_backward "
    # Reductions, products and whatever else code is generated for.
    "sum mean amax amin any all max min argmax argmin topk sort gather scatter scatter_add index_select index_add "
    "mm addmm bmm baddbmm _softmax _safe_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
    "convolution convolution_backward constant_pad_nd unfold unfold_backward native_layer_norm embedding "
    "embedding_dense_backward native_batch_norm_backward _native_batch_norm_legit _batch_norm_with_update "
    # Made from nothing.
    "arange full full_like fill zeros zeros_like new_zeros ones ones_like new_ones new_full empty empty_like "
    "new_empty scalar_tensor rand rand_like randn randn_like eye".split()
)
"""Operators that are recorded as they are."""


def decomposition_of(func: Any) -> Callable[..., Any] | None:
    """What to run in the place of an operator; None if it is recorded as it is."""
    name = func.overloadpacket.__name__
    if name in OWN:
        return OWN[name]
    if name in KEPT or func.namespace != "aten":
        return None
    return _by_torch(func)


@functools.lru_cache(maxsize=256)
def _by_torch(func: Any) -> Callable[..., Any] | None:
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose  # type: ignore[no-any-return]
    if func.is_view:
        return None
    # Imported when something needs it: loading it takes longer than tracing a cell.
    from torch._decomp import decomposition_table

    return decomposition_table.get(func)


def _dims(x: torch.Tensor, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.dim()))
    return [d % max(x.dim(), 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim])]


def _zero_safe(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A function that is 0 at 0, with the derivative 0 there."""
    is_zero = x == 0
    return torch.where(is_zero, 0.0, function(torch.where(is_zero, 1.0, x)))


def _scan(combine: Callable[..., torch.Tensor], neutral: float) -> Callable[..., torch.Tensor]:
    """A running sum or product, in as many rounds as its length doubles."""

    def run(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        x = x.to(dtype or (torch.int64 if not x.is_floating_point() else x.dtype)).clone()
        size, shift = x.shape[dim] if x.dim() else 1, 1
        while shift < size:
            filler = torch.full_like(x.narrow(dim, 0, shift), neutral)
            x = combine(x, torch.cat([filler, x.narrow(dim, 0, size - shift)], dim))
            shift *= 2
        return x

    return run


def _prod(x: torch.Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    x = x.to(dtype or (torch.int64 if not x.is_floating_point() else x.dtype))
    if dim is None:
        return _prod(x.reshape(-1), 0)
    while (size := x.shape[dim]) > 1:
        half = size // 2
        pairs = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
        x = pairs if size % 2 == 0 else torch.cat([pairs, x.narrow(dim, size - 1, 1)], dim)
    if not size:
        x = torch.ones_like(x.sum(dim, keepdim=True))
    return x if keepdim else x.squeeze(dim)


def _variance_and_mean(
    x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = _dims(x, dim)
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    count = math.prod(x.shape[d] for d in dims) - (1 if correction is None else correction)
    variance = (centred * centred).sum(dims, keepdim=keepdim) / max(count, 0)
    return variance, mean if keepdim else mean.sum(dims)


def _by_correction(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `var` and its kind in their newest form; older ones say `unbiased`."""
    if args and isinstance(args[0], bool):
        return (), {"correction": int(args[0])}
    if len(args) > 1:
        return args[:1], {"correction": int(args[1]), "keepdim": args[2] if len(args) > 2 else False, **kwargs}
    return args, {("correction" if k == "unbiased" else k): v for k, v in kwargs.items()}


def _var(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    args, kwargs = _by_correction(args, kwargs)
    return _variance_and_mean(x, *args, **kwargs)[0]


def _var_mean(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    args, kwargs = _by_correction(args, kwargs)
    return _variance_and_mean(x, *args, **kwargs)


def _std(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _zero_safe(torch.sqrt, _var(x, *args, **kwargs))


def _vector_norm(
    x: torch.Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    x = x if dtype is None else x.to(dtype)
    dims = _dims(x, dim)
    if order == math.inf:
        return x.abs().amax(dims, keepdim)
    if order == -math.inf:
        return x.abs().amin(dims, keepdim)
    if order == 0:
        return (x != 0).to(x.dtype).sum(dims, keepdim)
    if order == 1:
        return x.abs().sum(dims, keepdim)
    if order == 2:
        return _zero_safe(torch.sqrt, (x * x).sum(dims, keepdim))
    powers = _zero_safe(lambda a: a**order, x.abs()).sum(dims, keepdim)
    return _zero_safe(lambda a: a ** (1 / order), powers)


def _logsumexp(x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    dims = _dims(x, dim)
    top = x.amax(dims, True).detach()
    top = torch.where(top.abs() == math.inf, 0.0, top)
    found = (x - top).exp().sum(dims, True).log() + top
    return found if keepdim else found.sum(dims)


def _logaddexp(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # Equal infinities have no difference.
    apart = torch.where(x == y, 0.0, -(x - y).abs())
    return torch.maximum(x, y) + torch.log1p(torch.exp(apart))


def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.minimum(x, torch.zeros_like(x)) - torch.log1p(torch.exp(-x.abs())), x.new_zeros(0)


def _group_norm(  # noqa: PLR0917 - torch's own signature
    x: torch.Tensor, weight: Any, bias: Any, rows: int, channels: int, inner: int, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = channels * inner // groups
    y, mean, scale = torch.native_layer_norm(x.reshape(rows, groups, size), [size], None, None, eps)
    y = y.reshape(x.shape)
    along = [channels, *[1] * (x.dim() - 2)]
    y = y if weight is None else y * weight.view(along)
    return (y if bias is None else y + bias.view(along)), mean.squeeze(-1), scale.squeeze(-1)


def _batch_norm(  # noqa: PLR0917 - torch's own signature
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, _: float, eps: float
) -> Any:
    if training:
        return NotImplemented  # it mixes rows
    along = [-1, *[1] * (x.dim() - 2)]
    y = (x - mean.view(along)) * torch.rsqrt(variance + eps).view(along)
    y = y if weight is None else y * weight.view(along)
    return (y if bias is None else y + bias.view(along)), x.new_zeros(0), x.new_zeros(0)


def _nan_to_num(
    x: torch.Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> torch.Tensor:
    if not x.is_floating_point():
        return x.clone()
    most = torch.finfo(x.dtype).max
    x = torch.where(x == math.inf, most if posinf is None else posinf, x)
    x = torch.where(x == -math.inf, -most if neginf is None else neginf, x)
    return torch.where(x != x, 0.0 if nan is None else nan, x)  # noqa: PLR0124 - only NaN differs from itself


def _round(x: torch.Tensor, *, decimals: int = 0) -> Any:
    if decimals == 0:
        return NotImplemented
    scale = 10.0 ** abs(decimals)
    return torch.round(x * scale) / scale if decimals > 0 else torch.round(x / scale) * scale


def _glu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    value, gate = x.chunk(2, dim)
    return value * torch.sigmoid(gate)


def _flip(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    for dim in dims:
        x = x.index_select(dim, torch.arange(x.shape[dim] - 1, -1, -1, device=x.device))
    return x.clone()


def _roll(x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.Tensor:
    if not dims:
        return _roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        start = (-shift) % size if size else 0
        if start:
            x = torch.cat([x.narrow(dim, start, size - start), x.narrow(dim, 0, start)], dim)
    return x.clone()


def _repeat(x: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    x = x.reshape([1] * (len(repeats) - x.dim()) + list(x.shape))
    for dim, count in enumerate(repeats):
        if x.shape[dim] == 1:  # which may be the rows: how many those are is not known when the step runs
            x = x.expand([count if d == dim else size for d, size in enumerate(x.shape)])
        elif count != 1:
            x = torch.cat([x] * count, dim)
    return x.clone()


def _at(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> tuple[int, torch.Tensor] | None:
    """The dimension and the positions, one list for each row or for all, that an index names; None if it is another."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.dtype in {torch.bool, torch.uint8} or index.dim() != 1 for _, index in given):
        return None
    if len(given) == 1 and given[0][0] > 0:
        dim, index = given[0]
        return dim, torch.where(index < 0, index + x.shape[dim], index)
    return None


def _index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    found = _at(x, indices)
    if found is not None:
        return x.index_select(*found)
    lead = next((dim for dim, index in enumerate(indices) if index is not None), 0)
    grid = [index for index in indices[lead:] if index is not None]
    is_grid = all(_is_along(index, len(grid) - at) for at, index in enumerate(grid))
    if not lead or lead + len(grid) < len(indices) or not is_grid:
        return NotImplemented
    for dim, index in enumerate(grid, start=lead):  # a grid of places, as of images that are resized
        flat = index.reshape(-1)
        x = x.index_select(dim, torch.where(flat < 0, flat + x.shape[dim], flat))
    return x


def _is_along(index: torch.Tensor, place: int) -> bool:
    """Whether an index has all of its elements along one dimension, counted from the last one."""
    is_integer = index.dtype in {torch.int32, torch.int64}
    return is_integer and index.dim() >= place and index.numel() == index.shape[-place]


def _distances(x: torch.Tensor, y: torch.Tensor, p: float, mode: int | None = None) -> Any:  # noqa: ARG001
    return torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), ord=p, dim=-1)


def _index_put(
    x: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> Any:
    dim = next((dim for dim, index in enumerate(indices) if index is not None), 0)
    mask = indices[dim] if len(indices) == dim + 1 else None
    if mask is not None and mask.dtype is torch.bool:
        if values.numel() != 1 or accumulate:
            return NotImplemented
        mask = mask.reshape([*mask.shape, *[1] * (x.dim() - dim - mask.dim())])
        return torch.where(mask, values.reshape(()), x)
    found = _at(x, indices)
    if found is None:
        return NotImplemented
    dim, index = found
    shape = [*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]]
    index = index.reshape([-1, *[1] * (x.dim() - dim - 1)]).expand(shape)
    values = values.expand(shape)
    return x.scatter_add(dim, index, values) if accumulate else x.scatter(dim, index, values)


def _mv(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return torch.mm(matrix, vector.unsqueeze(1)).squeeze(1)


def _diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    rank = x.dim()
    rows, columns = x.shape[dim1], x.shape[dim2]
    x = x.permute(*(d for d in range(rank) if d not in {dim1 % rank, dim2 % rank}), dim1, dim2)
    if x.stride(-2) != x.stride(-1) * columns:
        return NotImplemented  # it would be a copy, and what is written to that is lost
    start, size = (
        max(offset, 0) - min(offset, 0) * columns,
        max(0, min(rows + min(offset, 0), columns - max(offset, 0))),
    )
    return x.flatten(-2)[..., start : start + size * (columns + 1) : columns + 1]


def _diagonal_backward(d: torch.Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> torch.Tensor:
    rank = len(sizes)
    rows, columns = sizes[dim1], sizes[dim2]
    others = [axis for axis in range(rank) if axis not in {dim1 % rank, dim2 % rank}]
    start, step = max(offset, 0) - min(offset, 0) * columns, columns + 1
    flat = [*(sizes[axis] for axis in others), rows * columns]
    made: torch.Tensor = aten.slice_backward.default(d, flat, len(others), start, start + d.shape[-1] * step, step)
    order = [*others, dim1 % rank, dim2 % rank]
    return made.reshape([*flat[:-1], rows, columns]).permute([order.index(axis) for axis in range(rank)]).clone()


def _at_rank(x: torch.Tensor, place: int, dim: int, keepdim: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What is at a place when it is sorted, and where it was."""
    values, indices = (part.narrow(dim, place, 1) for part in torch.sort(x, dim=dim, stable=True))
    return (values.clone(), indices.clone()) if keepdim else (values.squeeze(dim).clone(), indices.squeeze(dim).clone())


def _median(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None:
        return NotImplemented
    return _at_rank(x, (x.shape[dim] - 1) // 2, dim, keepdim)


def _extreme(is_better: Callable[..., torch.Tensor], neutral: float) -> Callable[..., Any]:
    """The largest or smallest so far, and where it was: the last one of several."""

    def run(x: torch.Tensor, dim: int) -> Any:
        if not x.is_floating_point():
            return NotImplemented
        size, shift = x.shape[dim], 1
        index = torch.arange(size, device=x.device).view([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
        x, index = x.clone(), index.expand(x.shape).clone()
        while shift < size:
            filler, zeros = (
                torch.full_like(x.narrow(dim, 0, shift), neutral),
                torch.zeros_like(index.narrow(dim, 0, shift)),
            )
            before = torch.cat([filler, x.narrow(dim, 0, size - shift)], dim)
            keeps = is_better(x, before)
            index = torch.where(keeps, index, torch.cat([zeros, index.narrow(dim, 0, size - shift)], dim))
            x = torch.where(keeps, x, before)
            shift *= 2
        return x, index

    return run


def _search_sorted(
    bounds: torch.Tensor,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    if sorter is not None or not isinstance(x, torch.Tensor):
        return NotImplemented
    is_right = right or side == "right"
    x, bounds = x.unsqueeze(-1), bounds if bounds.dim() == 1 else bounds.unsqueeze(-2)
    return (x >= bounds if is_right else x > bounds).sum(-1).to(torch.int32 if out_int32 else torch.int64)


def _signbit(x: torch.Tensor) -> Any:
    if not x.is_floating_point():
        return NotImplemented
    return (x < 0) | ((x == 0) & (torch.reciprocal(x) < 0))


def _copysign(x: torch.Tensor, sign: Any) -> Any:
    if not isinstance(sign, torch.Tensor) or not x.is_floating_point():
        return NotImplemented
    return torch.where(_signbit(sign), -x.abs(), x.abs())


def _scatter_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    return torch.scatter_add(x, dim, index, source) if reduce == "sum" and include_self else NotImplemented


OWN: Final[dict[str, Callable[..., Any]]] = {
    "cumsum": _scan(torch.add, 0),
    "cumprod": _scan(torch.mul, 1),
    "prod": _prod,
    "var": _var,
    "std": _std,
    "var_mean": _var_mean,
    "linalg_vector_norm": _vector_norm,
    "logsumexp": _logsumexp,
    "logaddexp": _logaddexp,
    "logcumsumexp": _scan(_logaddexp, -math.inf),
    "log_sigmoid_forward": _log_sigmoid,
    "native_group_norm": _group_norm,
    "native_batch_norm": _batch_norm,
    "celu": lambda x, alpha=1.0: aten.elu.default(x, alpha, 1.0, 1.0 / alpha),
    "mish": lambda x: x * torch.tanh(torch.nn.functional.softplus(x)),
    "hardswish": lambda x: x * (x + 3).clamp(0, 6) / 6,
    "glu": _glu,
    "nan_to_num": _nan_to_num,
    "round": _round,
    "threshold": lambda x, bound, value: torch.where(x <= bound, value, x),
    "hardshrink": lambda x, bound=0.5: torch.where(x.abs() <= bound, 0.0, x),
    "softshrink": lambda x, bound=0.5: torch.where(x.abs() <= bound, 0.0, x - x.sign() * bound),
    "_prelu_kernel": lambda x, slope: torch.where(x > 0, x, slope * x),
    "frac": lambda x: x - torch.trunc(x),
    "isnan": lambda x: x != x,  # noqa: PLR0124 - only NaN differs from itself
    "isinf": lambda x: x.abs() == math.inf,
    "fmax": lambda x, y: torch.where((x >= y) | torch.isnan(y), x, y),
    "fmin": lambda x, y: torch.where((x <= y) | torch.isnan(y), x, y),
    "flip": _flip,
    "roll": _roll,
    "repeat": _repeat,
    "index": _index,
    "_unsafe_index": _index,
    "_cdist_forward": _distances,
    "index_put": _index_put,
    "diagonal": _diagonal,
    "diagonal_backward": _diagonal_backward,
    "kthvalue": lambda x, k, dim=-1, keepdim=False: _at_rank(x, k - 1, dim, keepdim),
    "median": _median,
    "cummax": _extreme(lambda x, before: (x >= before) | (x != x), -math.inf),  # noqa: PLR0124 - NaN stays
    "cummin": _extreme(lambda x, before: (x <= before) | (x != x), math.inf),  # noqa: PLR0124 - NaN stays
    "searchsorted": _search_sorted,
    "signbit": _signbit,
    "copysign": _copysign,
    "scatter_reduce": _scatter_reduce,
    "aminmax": lambda x, *, dim=None, keepdim=False: (
        x.amin(_dims(x, dim), keepdim),
        x.amax(_dims(x, dim), keepdim),
    ),
    "mv": _mv,
    "addmv": lambda bias, matrix, vector, *, beta=1, alpha=1: beta * bias + alpha * _mv(matrix, vector),
}
"""Decompositions of our own, by the operator's name; one that returns `NotImplemented` leaves it as it is."""
