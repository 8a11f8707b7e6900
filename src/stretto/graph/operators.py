"""What is known about PyTorch's operators: which are views, which keep rows apart, which have a better gradient."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn import functional

from stretto.graph.custom_gradient import CustomGradient
from stretto.graph.node import BatchDim, Node, leaves_in
from stretto.graph.trace import Untraceable, constant_fill, random_fill

VIEWS: Final = frozenset(
    "view _unsafe_view reshape t transpose permute slice select unsqueeze squeeze expand split split_with_sizes "
    "getitem alias detach unbind clone".split()
)
"""Operators that move no data, or none that a loop would have to."""

EXPENSIVE: Final = frozenset(
    "sigmoid tanh exp expm1 log log1p erf sin cos atan exp2 log2 log10 erfc tan asin acos sinh cosh asinh acosh atanh "
    "erfinv lgamma digamma "
    "atan2 hypot sqrt rsqrt pow softplus gelu silu elu _softmax _safe_softmax "
    "_log_softmax mm addmm bmm product_of_heads convolution sum mean amax amin native_layer_norm reciprocal div "
    "argmax argmin max min topk sort".split()
)
"""Operators whose results are worth saving, rather than computing them again in the backward pass."""

LARGEST_CONVOLUTION: Final = 1 << 20
"""Multiplications of a row's convolution in a loop, up to which generated code is faster than calling PyTorch's."""

DIMENSION_ARGUMENT: Final = dict.fromkeys(
    "slice select cat stack unbind unsqueeze squeeze gather index_select sum mean amax amin any all scatter "
    "scatter_add index_add max min argmax argmin sort _softmax _safe_softmax _log_softmax".split(),
    1,
) | dict.fromkeys(
    "split split_with_sizes topk slice_backward select_backward _softmax_backward_data "
    "_log_softmax_backward_data".split(),
    2,
)
"""The position of the argument that names the dimensions an operator works along."""
_POINTWISE_TOO: Final = frozenset(
    f"{name}_backward"
    for name in "elu leaky_relu hardtanh softplus gelu silu sigmoid tanh threshold hardsigmoid".split()
) | {"where", "floor_divide"}
_DEFAULT_DIMENSION: Final = dict.fromkeys("sort topk".split(), (-1,)) | dict.fromkeys("sum mean amax amin".split(), ())
_IDENTITIES: Final = {"alias", "detach", "clone", "_to_copy"}
_ANY_RANK: Final = {"view", "_unsafe_view", "reshape", "expand", "alias", "detach", "clone", "_to_copy"}


def is_view(node: Node) -> bool:
    """Whether the node only looks at another one's data."""
    if node.label == "getitem":
        return node.args[0].label in VIEWS
    return node.label in VIEWS


def is_pointwise(node: Node) -> bool:
    """Whether every element depends only on the elements at its own position."""
    if isinstance(node.op, CustomGradient):
        return all(is_pointwise(item) or item.label in _IDENTITIES for item in node.op.inner)
    return torch.Tag.pointwise in getattr(node.op, "tags", ()) or node.label in _POINTWISE_TOO


def is_random(node: Node) -> bool:
    """Whether the node draws random numbers."""
    return node.op is random_fill or torch.Tag.nondeterministic_seeded in getattr(node.op, "tags", ())


def uses_number_of_rows(node: Node) -> bool:
    """Whether a value, and not just a shape, depends on how many rows there are."""
    given = node.args
    if isinstance(node.op, CustomGradient) and any(uses_number_of_rows(item) for item in node.op.inner):
        return True
    if node.op in {constant_fill, random_fill}:
        given = node.args[1:]
    elif not is_pointwise(node) and node.label != "arange" and (node.has_rows or _has_rows_elsewhere(node)):
        return False
    return any(isinstance(value, BatchDim) for value in leaves_in((given, node.kwargs)))


def why_not_rowwise(node: Node) -> str | None:
    """None if each row of the result depends only on that row of the inputs; otherwise the reason, in words.

    Such an operator does not care how many rows there are, so the steps of all sequences can be its rows:
    that is how it leaves the time loop.
    """
    if isinstance(node.op, CustomGradient):
        return next((reason for item in node.op.inner if (reason := why_not_rowwise(item))), None)
    with_rows = [item for item in node.inputs if item.has_rows or _has_rows_elsewhere(item)]
    if node.op in (random_fill, constant_fill):
        return None
    if not with_rows:
        return None
    if any(not item.has_rows and item.dtype is not None for item in with_rows):
        return f"{node.label} reads rows in another place than the first dimension"
    if node.dtype is not None and not node.has_rows:
        return f"{node.label} mixes the rows of the batch"
    return _why_rows_mix(node)


def why_mixed(node: Node) -> str | None:
    """The same for the user: with the line, and what to do."""
    reason = why_not_rowwise(node)
    if reason is None:
        return None
    if any(item.dtype is not None and item.dtype.is_complex for item in (node, *node.inputs)):
        return f"the step computes with complex numbers{node.whereabouts}; give real and imaginary parts as two tensors"
    return f"{reason}{node.whereabouts}; a step has to compute each sequence by itself"


def _why_rows_mix(node: Node) -> str | None:  # noqa: PLR0911, PLR0912 - one line per kind of operator
    name, mixes = node.label, f"{node.label} mixes the rows of the batch"
    if node.op is operator.getitem:
        return None
    if is_pointwise(node):
        return None if _rows_align(node) else mixes
    if name in {"mm", "addmm", "product_of_heads"}:
        left, right = node.args[-2:]
        return None if left.has_rows and not right.has_rows else mixes
    if name in {"bmm", "baddbmm"}:
        return None if node.shape[0] == node.args[-2].shape[0] == node.args[-1].shape[0] else mixes
    if name == "convolution":
        source, *others = node.args[:3]
        return None if source.has_rows and not any(item is not None and item.has_rows for item in others) else mixes
    if name in {"unfold", "unfold_backward"}:
        rank, dimension = (len(node.shape) - 1, 1) if name == "unfold" else (len(node.shape), 2)
        return None if node.args[dimension] % rank else mixes
    if name == "native_layer_norm":
        return None if len(node.args[1]) < len(node.args[0].shape) else mixes
    if name == "embedding":
        return None if node.args[1].has_rows and not node.args[0].has_rows else mixes
    if name == "constant_pad_nd":
        return None if len(node.args[1]) <= 2 * len(node.shape) - 2 else mixes
    if name in {"t", "transpose", "permute"}:
        return None if node.has_rows and _keeps_first_dimension(node) else mixes
    if name in _ANY_RANK:
        return None
    if name in DIMENSION_ARGUMENT:
        rank = max(len(node.inputs[0].shape), len(node.shape))
        position = DIMENSION_ARGUMENT[name]
        given = (
            node.args[position]
            if len(node.args) > position
            else node.kwargs.get("dim", _DEFAULT_DIMENSION.get(name, 0))
        )
        dimensions = list(given) if isinstance(given, (list, tuple)) else [given]
        if not dimensions:
            return mixes
        return None if all(isinstance(d, int) and d % rank != 0 for d in dimensions) else mixes
    return f"{name} is not known to keep the rows of the batch apart"


def _rows_align(node: Node) -> bool:
    for item in node.inputs:
        if item.has_rows:
            if len(item.shape) != len(node.shape) or item.shape[0] != node.shape[0]:
                return False
        elif len(item.shape) == len(node.shape) and item.shape[0] != 1:
            return False
    return True


def _keeps_first_dimension(node: Node) -> bool:
    if node.label == "permute":
        return bool(node.args[1][0] % len(node.shape) == 0)
    if node.label == "transpose":
        rank = len(node.shape)
        return all(dimension % rank != 0 for dimension in node.args[1:3])
    return False


def _has_rows_elsewhere(node: Node) -> bool:
    if node.dtype is None:
        return any(item.has_rows or _has_rows_elsewhere(item) for item in node.inputs)
    return any(isinstance(size, BatchDim) for size in node.shape)


class _LayerNorm(torch.autograd.Function):
    """Layer norm without gain and shift, with its gradient in the form that reads the fewest saved values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dims: list[int], eps: float) -> torch.Tensor:
        centred = x - x.mean(dims, keepdim=True)
        scale = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
        normal = centred * scale
        ctx.save_for_backward(normal, scale)
        ctx.dims = dims
        return normal

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        normal, scale = ctx.saved_tensors
        (d,) = gradients
        mean = d.mean(ctx.dims, keepdim=True)
        along = (d * normal).mean(ctx.dims, keepdim=True)
        return (d - mean - normal * along) * scale, None, None


def _native_layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, None, None]:
    """Layer norm over the last `len(shape)` dimensions; mean and deviation are not returned."""
    y: torch.Tensor = _LayerNorm.apply(x, list(range(-len(shape), 0)), eps)  # type: ignore[no-untyped-call]
    if weight is not None:
        y = y * weight
    # The operator itself returns a contiguous tensor too.
    return (y if bias is None else y + bias).contiguous(), None, None


class _Convolution(torch.autograd.Function):
    """A convolution as products of windows with kernels, for small rows in a loop; the kernels' gradient is torch's.

    Shape legend: B rows, G groups, C channels and O results of each, L places, K elements of a kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, settings: tuple[Any, ...]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        windows, _ = _windows(x, weight, settings)
        places, groups = windows.shape[2 : weight.dim()], settings[-1]
        by_group = windows.reshape(len(x), groups, weight.shape[1], math.prod(places), -1)
        weight_GOCK = weight.reshape(groups, -1, weight.shape[1], math.prod(weight.shape[2:]))
        if weight.shape[1] == 1:
            y_BGOL = (by_group * weight_GOCK.unsqueeze(0)).sum(-1)
        else:
            vectors = by_group.permute(1, 0, 3, 2, 4).reshape(groups, -1, weight_GOCK[0, 0].numel())
            y = torch.bmm(vectors, weight_GOCK.flatten(2).mT)
            y_BGOL = y.reshape(groups, len(x), -1, y.shape[-1]).permute(1, 0, 3, 2)
        return y_BGOL.reshape(len(x), -1, *places)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (d,) = gradients
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.settings
        windows, before = _windows(x, weight, ctx.settings)
        d_BGOL = d.reshape(len(x), groups, -1, math.prod(d.shape[2:]))
        weight_GOCK = weight.reshape(groups, -1, weight.shape[1], math.prod(weight.shape[2:]))
        if weight.shape[1] == 1:
            found = (d_BGOL.unsqueeze(-1) * weight_GOCK.unsqueeze(0)).sum(2, keepdim=True)
        else:
            vectors = d_BGOL.permute(1, 0, 3, 2).reshape(groups, -1, weight_GOCK.shape[1])
            product = torch.bmm(vectors, weight_GOCK.flatten(2))
            found = product.reshape(groups, len(x), -1, *weight_GOCK.shape[2:]).permute(1, 0, 3, 2, 4)
        d_x = found.reshape(windows.shape)
        for axis, (size, step, apart) in reversed(
            list(enumerate(zip(weight.shape[2:], stride, dilation, strict=True)))
        ):
            sizes, wide = before[axis], (size - 1) * apart + 1
            if apart > 1:
                d_x = torch.ops.aten.slice_backward(d_x, [*d_x.shape[:-1], wide], d_x.dim() - 1, 0, wide, apart)
            d_x = torch.ops.aten.unfold_backward(d_x, sizes, 2 + axis, wide, step)
        d_x = functional.pad(d_x, [-size for size in reversed(padding) for _ in range(2)])
        given = (d, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)
        return d_x, torch.ops.aten.convolution_backward(*given, [False, True, False])[1], None


def _windows(x: torch.Tensor, weight: torch.Tensor, settings: tuple[Any, ...]) -> tuple[torch.Tensor, list[list[int]]]:
    """What a kernel sees at each place (B, G * C, places, kernel), and the sizes before each dimension was unfolded."""
    stride, padding, dilation, _ = settings
    sizes = []
    windows = functional.pad(x, [size for size in reversed(padding) for _ in range(2)])
    for axis, (size, step, apart) in enumerate(zip(weight.shape[2:], stride, dilation, strict=True)):
        sizes.append(list(windows.shape))
        windows = windows.unfold(2 + axis, (size - 1) * apart + 1, step)
        windows = windows[..., ::apart] if apart > 1 else windows
    return windows, sizes


def _as_plain(  # noqa: PLR0917 - as torch has them
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Input, weight and padding of the plain convolution that a transposed one is, with zeros between its places."""
    spatial = range(2, weight.dim())
    for axis, step in zip(spatial, stride, strict=True):
        if step > 1:
            behind = [0, 0] * (x.dim() - 1 - axis)
            places = x.shape[axis]
            x = functional.pad(x.unsqueeze(axis + 1), [*behind, 0, step - 1]).flatten(axis, axis + 1)
            x = x.narrow(axis, 0, (places - 1) * step + 1)
    borders: list[int] = []
    for axis, before, apart, more in reversed(list(zip(spatial, padding, dilation, output_padding, strict=True))):
        around = apart * (weight.shape[axis] - 1) - before
        borders += [around, around + more]
    x = functional.pad(x, borders)
    for axis in spatial:  # turned round
        weight = torch.cat([weight.narrow(axis, k, 1) for k in reversed(range(weight.shape[axis]))], axis)
    by_group = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
    return x, by_group.reshape(-1, by_group.shape[2], *weight.shape[2:]), [0] * len(padding)


def _convolution(  # noqa: PLR0917 - torch's own signature
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    if transposed:
        x, weight, padding = _as_plain(x, weight, stride, padding, dilation, output_padding, groups)
        stride = [1] * len(stride)
    settings = (list(stride), list(padding), list(dilation), groups)
    y: torch.Tensor = _Convolution.apply(x, weight, settings)  # type: ignore[no-untyped-call]
    work = math.prod(y.shape[2:]) * weight.numel()
    if work > LARGEST_CONVOLUTION:
        raise Untraceable(f"the step has a convolution of {work:,} multiplications, which PyTorch's own does as fast")
    return y if bias is None else y + bias.view(-1, *[1] * len(stride))


DECOMPOSED: Final[dict[str, Callable[..., Any]]] = {
    "native_layer_norm": _native_layer_norm,
    "convolution": _convolution,
}
"""Operators whose gradient mixes what stays in the backward loop with what is deferred, written in simpler ones."""
