"""What is known about PyTorch's operators: which are views, which keep rows apart, which have a better gradient."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from stretto.graph.node import BatchDim, Node, leaves_in
from stretto.graph.trace import constant_fill, random_fill

VIEWS: Final = frozenset(
    "view _unsafe_view t transpose permute slice select unsqueeze squeeze expand split split_with_sizes getitem alias "
    "detach unbind clone".split()
)
"""Operators that move no data, or none that a loop would have to."""

EXPENSIVE: Final = frozenset(
    "sigmoid tanh exp expm1 log log1p erf sin cos atan sqrt rsqrt pow softplus gelu silu elu _softmax _log_softmax "
    "mm addmm bmm baddbmm sum mean amax amin var native_layer_norm reciprocal div".split()
)
"""Operators whose results are worth saving, rather than computing them again in the backward pass."""

_DIMENSION_ARGUMENT: Final = dict.fromkeys(
    "slice select cat stack unbind unsqueeze squeeze gather index_select flip sum mean amax amin var std prod "
    "logsumexp max min argmax argmin cumsum cumprod logcumsumexp sort glu _softmax _log_softmax".split(),
    1,
) | dict.fromkeys(
    "split split_with_sizes roll topk linalg_vector_norm slice_backward select_backward _softmax_backward_data "
    "_log_softmax_backward_data glu_backward".split(),
    2,
)
_POINTWISE_TOO: Final = frozenset(
    f"{name}_backward"
    for name in "elu leaky_relu hardtanh softplus gelu silu sigmoid tanh threshold hardswish hardsigmoid mish "
    "hardshrink log_sigmoid".split()
)
_DEFAULT_DIMENSION: Final = dict.fromkeys("sort topk glu".split(), (-1,)) | dict.fromkeys(
    "sum mean amax amin prod".split(), ()
)
_ANY_RANK: Final = {"view", "_unsafe_view", "expand", "alias", "detach", "clone", "_to_copy"}


def is_view(node: Node) -> bool:
    """Whether the node only looks at another one's data."""
    if node.label == "getitem":
        return node.args[0].label in VIEWS
    return node.label in VIEWS


def is_pointwise(node: Node) -> bool:
    """Whether every element depends only on the elements at its own position."""
    return torch.Tag.pointwise in getattr(node.op, "tags", ()) or node.label in _POINTWISE_TOO


def is_random(node: Node) -> bool:
    """Whether the node draws random numbers."""
    return node.op is random_fill or torch.Tag.nondeterministic_seeded in getattr(node.op, "tags", ())


def why_not_rowwise(node: Node) -> str | None:
    """None if each row of the result depends only on that row of the inputs; otherwise the reason, in words.

    Such an operator does not care how many rows there are, so the steps of all sequences can be its rows:
    that is how it leaves the time loop.
    """
    with_rows = [item for item in node.inputs if item.has_rows or _has_rows_elsewhere(item)]
    if node.op in (random_fill, constant_fill):
        return None
    if not with_rows:
        if any(isinstance(value, BatchDim) for value in leaves_in(node.args)) and not node.has_rows:
            return f"{node.label} uses the number of rows"
        return None
    if any(not item.has_rows and item.dtype is not None for item in with_rows):
        return f"{node.label} reads rows in another place than the first dimension"
    if node.dtype is not None and not node.has_rows:
        return f"{node.label} mixes the rows of the batch"
    return _reason(node)


def _reason(node: Node) -> str | None:  # noqa: PLR0911 - one line per kind of operator
    name, mixes = node.label, f"{node.label} mixes the rows of the batch"
    if node.op is operator.getitem:
        return None
    if is_pointwise(node):
        return None if _rows_align(node) else mixes
    if name in {"mm", "addmm"}:
        left, right = node.args[-2:]
        return None if left.has_rows and not right.has_rows else mixes
    if name in {"bmm", "baddbmm"}:
        return None if node.shape[0] == node.args[-2].shape[0] == node.args[-1].shape[0] else mixes
    if name in {"native_layer_norm", "rms_norm"}:
        return None if len(node.args[1]) < len(node.args[0].shape) else mixes
    if name == "embedding":
        return None if node.args[1].has_rows and not node.args[0].has_rows else mixes
    if name == "constant_pad_nd":
        return None if len(node.args[1]) <= 2 * len(node.shape) - 2 else mixes
    if name in {"t", "transpose", "permute"}:
        return None if node.has_rows and _keeps_first_dimension(node) else mixes
    if name in _ANY_RANK:
        return None
    if name == "repeat":
        return None if len(node.args[1]) == len(node.args[0].shape) and node.args[1][0] == 1 else mixes
    if name in _DIMENSION_ARGUMENT:
        rank = max(len(node.inputs[0].shape), len(node.shape))
        position = _DIMENSION_ARGUMENT[name]
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
    if any(isinstance(value, BatchDim) for value in leaves_in(node.args)):
        return False
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


DECOMPOSED: Final[dict[str, Callable[..., Any]]] = {"native_layer_norm": _native_layer_norm}
"""Operators whose gradient mixes what stays in the backward loop with what is deferred, written in simpler ones."""
