"""Summed cross-entropy over a large vocabulary.

Shape legend: P steps, C words.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from stretto.batching import NO_STEP


def summed_cross_entropy(scores_PC: torch.Tensor, targets_P: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` with `reduction="sum"`; steps whose target is -1 do not count.

    With thousands of words, the softmax of a window takes as long as its layers. The gradient is made in the memory of
    the logarithms, where torch makes it, and a matrix of zeros besides, anew. When it is taken a second time, the
    logarithms are too.

    Args:
        scores_PC: Of each word.
        targets_P: The words that came.
    """
    if not (torch.is_grad_enabled() and scores_PC.requires_grad):
        return functional.cross_entropy(scores_PC, targets_P, ignore_index=NO_STEP, reduction="sum")
    total: torch.Tensor = _SummedCrossEntropy.apply(scores_PC, targets_P)  # type: ignore[no-untyped-call]
    return total


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_PC: torch.Tensor, targets_P: torch.Tensor) -> torch.Tensor:
        logs_PC = torch.log_softmax(scores_PC, dim=1)
        ctx.logs_PC = logs_PC
        ctx.save_for_backward(scores_PC, targets_P)
        return functional.nll_loss(logs_PC, targets_P, ignore_index=NO_STEP, reduction="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        scores_PC, targets_P = ctx.saved_tensors
        logs_PC, ctx.logs_PC = ctx.logs_PC, None
        gradient_PC = (torch.log_softmax(scores_PC, dim=1) if logs_PC is None else logs_PC).exp_()
        counted_P = targets_P != NO_STEP
        rows_P = torch.arange(len(targets_P), device=targets_P.device)
        gradient_PC[rows_P, targets_P.clamp(min=0)] -= 1.0
        if not bool(counted_P.all()):
            gradient_PC[~counted_P] = 0.0
        if gradient.device.type != "cpu" or gradient.item() != 1.0:
            gradient_PC.mul_(gradient)
        return gradient_PC, None
