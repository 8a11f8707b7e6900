"""The output layer of a large vocabulary and its cross-entropy in one, a block of rows at a time.

    block of rows -> scores -> softmax, in the same memory -> losses and gradients -> next block

In the plain order the scores of all rows, one for each class, are written, read, copied and kept for the backward pass;
with thousands of words they are most of the memory of a language model. Here they are in memory a block at a time, and
gradients are computed beside the losses, so nothing of that size is kept. With the softmax p of the scores, the true
classes t and the weight g of each row's loss, the gradients are

    hidden   g (p W - W[t])        weight   p' (g h), less g h in rows t        bias   p' g, less g at t

so that p is only read: neither are true classes subtracted from it, nor is it scaled by g.

Shape legend: P rows, R rows of a block, H units, C classes; `...` is any shape, of P elements.
"""

import functools
import platform
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.nn import functional

from stretto.checks import check_float
from stretto.errors import StrettoError
from stretto.kernels import empty

BLOCK_ELEMENTS: Final = 1 << 22
"""Scores in memory at once: fewer would make the products of matrices inefficient."""
Gradients = list[torch.Tensor | None]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight_CH: torch.Tensor,
    bias_C: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`cross_entropy(linear(hidden, weight, bias), targets, reduction="none")` without keeping the scores.

    Gradients are computed with the losses, for the case that each loss has the same weight in what is differentiated,
    as in a sum or a mean. If not, and in a second backward pass, scores are computed again. What is compiled
    (`torch.compile`), and gradients that are to have gradients, take torch's own functions.

    Args:
        hidden: Inputs (..., H) of the output layer.
        weight_CH: Its weight.
        bias_C: Its bias, or None.
        targets: The true classes (...).
        ignore_index: The target of rows whose loss is zero.
        label_smoothing: The share of the probability spread over all classes.

    Returns:
        Losses (...), of half-precision inputs in single precision.

    Raises:
        StrettoError: The shapes do not belong together.
    """
    check_float(label_smoothing, name="label_smoothing", at_least=0.0, at_most=1.0)
    has_bias_shape = bias_C is None or bias_C.shape == weight_CH.shape[:1]
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1:] != weight_CH.shape[1:] or not has_bias_shape:
        raise StrettoError(
            f"hidden has the shape {tuple(hidden.shape)}, weight {tuple(weight_CH.shape)}, bias "
            f"{None if bias_C is None else tuple(bias_C.shape)} and targets {tuple(targets.shape)}",
            fix="Give hidden (..., H), weight (C, H), bias (C,) or None, and targets (...).",
        )
    device = hidden.device.type
    tensors = [hidden.reshape(targets.numel(), hidden.shape[-1]), weight_CH, bias_C]
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors = [None if tensor is None else tensor.to(dtype) for tensor in tensors]
    hidden_PH, weight, bias = tensors
    assert hidden_PH is not None
    assert weight is not None
    targets_P = targets.flatten()
    with torch.autocast(device, enabled=False):
        if torch.compiler.is_compiling():
            scores_PC = functional.linear(hidden_PH, weight, bias).to(_sum_dtype(hidden_PH))
            losses_P = functional.cross_entropy(
                scores_PC, targets_P, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
            )
            return losses_P.view(targets.shape)
        counted_P = targets_P != ignore_index
        has_all = bool(counted_P.all())
        rows = (hidden_PH, targets_P) if has_all else (hidden_PH[counted_P], targets_P[counted_P])
        losses_P = _Loss.apply(rows[0], weight, bias, rows[1], label_smoothing)  # type: ignore[no-untyped-call]
        if not has_all:
            losses_P = losses_P.new_zeros(len(targets_P)).masked_scatter(counted_P, losses_P)
    found: torch.Tensor = losses_P.view(targets.shape)
    return found


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        *tensors, smoothing = inputs
        ctx.save_for_backward(*tensors)
        ctx.smoothing = smoothing
        losses_P, ctx.gradients = _compute_in_blocks(*tensors, smoothing=smoothing, needed=ctx.needs_input_grad[:3])
        return losses_P

    @staticmethod
    def backward(ctx: Any, g_P: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            return (*_differentiable_gradients(ctx, g_P), None, None)
        gradients, ctx.gradients = ctx.gradients, None
        is_uniform = not len(g_P) or g_P.stride() == (0,) or bool((g_P == g_P[0]).all())
        if gradients is None or not is_uniform:
            _, gradients = _compute_in_blocks(
                *ctx.saved_tensors, smoothing=ctx.smoothing, needed=ctx.needs_input_grad[:3], g_P=g_P
            )
        elif len(g_P) and (g_P.device.type != "cpu" or g_P[0].item() != 1.0):
            gradients = [None if gradient is None else gradient.mul_(g_P[0]) for gradient in gradients]
        return (*gradients, None, None)


def _differentiable_gradients(ctx: Any, g_P: torch.Tensor) -> Gradients:
    """Gradients that are to have gradients, in torch's own functions."""
    hidden_PH, weight_CH, bias_C, targets_P = ctx.saved_tensors
    scores_PC = functional.linear(hidden_PH, weight_CH, bias_C).to(_sum_dtype(hidden_PH))
    losses_P = functional.cross_entropy(scores_PC, targets_P, reduction="none", label_smoothing=ctx.smoothing)
    inputs = zip((hidden_PH, weight_CH, bias_C), ctx.needs_input_grad[:3], strict=True)
    needed = [tensor for tensor, is_needed in inputs if is_needed]
    found = iter(torch.autograd.grad(losses_P, needed, g_P, create_graph=True))
    return [next(found) if is_needed else None for is_needed in ctx.needs_input_grad[:3]]


def _compute_in_blocks(
    hidden_PH: torch.Tensor,
    weight_CH: torch.Tensor,
    bias_C: torch.Tensor | None,
    targets_P: torch.Tensor,
    *,
    smoothing: float,
    needed: Sequence[bool],
    g_P: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Gradients]:
    """The losses of all rows, and the gradients that are needed, with each row's loss weighted by `g_P`, or by one."""
    (count, size), num_classes, dtype = hidden_PH.shape, len(weight_CH), _sum_dtype(hidden_PH)
    right = 1.0 - smoothing
    losses_P = torch.empty(count, dtype=dtype, device=hidden_PH.device)
    needs_hidden, needs_weight, needs_bias = needed
    d_hidden_PH = torch.empty_like(hidden_PH) if needs_hidden else None
    d_weight_HC: torch.Tensor | None = None
    d_bias_C = weight_CH.new_zeros(num_classes, dtype=dtype) if needs_bias else None
    mean_weight_H = weight_CH.mean(dim=0, dtype=dtype) if smoothing else None
    mean_bias = bias_C.mean(dtype=dtype) if smoothing and bias_C is not None else 0.0
    # As many in each block.
    num_blocks = max(1, -(-count * num_classes // BLOCK_ELEMENTS))
    each = max(1, -(-count // num_blocks))
    for start in range(0, count, each):
        rows = slice(start, min(start + each, count))
        hidden_RH, targets_R = hidden_PH[rows], targets_P[rows]
        p_RC = _softmax(_linear(hidden_RH, weight_CH, bias_C))
        true_RH, h_RH = weight_CH[targets_R].to(dtype), hidden_RH.to(dtype)
        losses_R = _negative_logs(p_RC, targets_R, hidden_RH=h_RH, weight_CH=weight_CH, bias_C=bias_C)
        if mean_weight_H is not None:
            # The mean score is less than the true one by so much, and so is its logarithm.
            more_R = (h_RH * (true_RH - mean_weight_H)).sum(dim=1)
            losses_R += smoothing * (more_R if bias_C is None else more_R + bias_C[targets_R] - mean_bias)
        losses_P[rows] = losses_R
        g_R1 = torch.ones_like(losses_R)[:, None] if g_P is None else g_P[rows, None].to(dtype)
        gh_RH = h_RH * g_R1
        p_RC = p_RC.to(hidden_PH.dtype)
        if d_hidden_PH is not None:
            d_RH = _linear(p_RC, weight_CH.t()).to(dtype).sub_(true_RH, alpha=right)
            if mean_weight_H is not None:
                d_RH.sub_(mean_weight_H, alpha=smoothing)
            d_hidden_PH[rows] = d_RH.mul_(g_R1)
        if needs_weight:
            product_HC = _linear(gh_RH.to(hidden_PH.dtype).t().contiguous(), p_RC.t()).to(dtype)
            d_weight_HC = product_HC if d_weight_HC is None else d_weight_HC.add_(product_HC)
        if d_bias_C is not None:
            d_bias_C.add_(p_RC.t() @ g_R1[:, 0].to(p_RC.dtype))
    g_P1 = torch.ones_like(losses_P)[:, None] if g_P is None else g_P[:, None].to(dtype)
    d_weight_CH = None
    if needs_weight:
        gh_PH = hidden_PH.to(dtype) * g_P1
        d_weight_CH = _empty(num_classes, size, like=weight_CH, dtype=dtype)
        d_weight_CH.copy_(d_weight_HC.t()) if d_weight_HC is not None else d_weight_CH.zero_()
        d_weight_CH.index_add_(0, targets_P, gh_PH, alpha=-right)
        if smoothing:
            d_weight_CH.sub_(gh_PH.sum(dim=0), alpha=smoothing / num_classes)
    if d_bias_C is not None:
        d_bias_C.index_add_(0, targets_P, g_P1[:, 0], alpha=-right)
        if smoothing:
            d_bias_C.sub_(g_P1.sum(), alpha=smoothing / num_classes)
    found: Gradients = [d_hidden_PH, d_weight_CH, d_bias_C]
    return losses_P, [None if gradient is None else gradient.to(hidden_PH.dtype) for gradient in found]


def _negative_logs(
    p_RC: torch.Tensor,
    targets_R: torch.Tensor,
    *,
    hidden_RH: torch.Tensor,
    weight_CH: torch.Tensor,
    bias_C: torch.Tensor | None,
) -> torch.Tensor:
    """-log p of the true classes, also of those whose p is too small for a number.

    These follow from the likeliest class m: -log p_t = -log p_m + score_m - score_t.
    """
    p_R = p_RC.gather(1, targets_R[:, None])[:, 0]
    losses_R = p_R.log().neg_()
    # Numbers below the smallest normal one over the precision have lost digits. Not so NaN.
    info = torch.finfo(p_R.dtype)
    lost_L = (p_R < info.tiny / info.eps).nonzero()[:, 0]
    if len(lost_L):
        best_L, at_L = p_RC[lost_L].max(dim=1)
        true_L = targets_R[lost_L]
        more_L = (hidden_RH[lost_L] * (weight_CH[at_L].to(p_R.dtype) - weight_CH[true_L].to(p_R.dtype))).sum(dim=1)
        if bias_C is not None:
            more_L = more_L + bias_C[at_L] - bias_C[true_L]
        losses_R[lost_L] = more_L - best_L.log()
    return losses_R


def _softmax(scores_RC: torch.Tensor) -> torch.Tensor:
    """The softmax of each row, in the same memory; of half precision a new tensor in single precision."""
    dtype = _sum_dtype(scores_RC)
    if dtype != scores_RC.dtype or scores_RC.device.type != "cpu":
        return torch.softmax(scores_RC, dim=1, dtype=dtype)
    return torch.softmax(scores_RC, dim=1, out=scores_RC)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`, in single precision on a CPU by oneDNN.

    MKL, which torch takes otherwise, has no AVX-512 for processors of AMD: there oneDNN is twice as fast. Where MKL has
    it they are equally fast.
    """
    is_plain = x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0
    if is_plain and torch.backends.mkldnn.enabled and _has_onednn():
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return found
    return functional.linear(x, weight, bias)


@functools.cache
def _has_onednn() -> bool:
    """Whether torch has oneDNN's product of dense matrices."""
    return (
        platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _empty(*sizes: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """On a CPU from the pool of buffers: a new one costs as much as a pass over it."""
    return empty(*sizes, dtype=dtype) if like.device.type == "cpu" else like.new_empty(sizes, dtype=dtype)


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Single precision for half precision."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
