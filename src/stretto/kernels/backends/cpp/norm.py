"""Layer norm of the rows of all steps, by code of our own: results do not depend on the number of threads.

Shape legend: P rows of all steps together, N features.
"""

from typing import Any

import torch
from torch.nn import functional

from stretto.kernels.backends.cpp.gemm import can_run, in_rows, library_of, threads_for
from stretto.kernels.buffer_pool import empty


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_PN: torch.Tensor, gain_N: torch.Tensor | None, bias_N: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x_PN, gain_N, bias_N)
        x_PN = in_rows(x_PN)
        rows, columns = x_PN.shape
        made_PN = empty(rows, columns, dtype=x_PN.dtype)
        means_P, scales_P = empty(rows, dtype=x_PN.dtype), empty(rows, dtype=x_PN.dtype)
        gain, bias = (None if item is None else item.contiguous() for item in (gain_N, bias_N))
        library_of(x_PN.dtype).stretto_norm(
            *(x_PN.data_ptr(), x_PN.stride(0), _pointer(gain), _pointer(bias), made_PN.data_ptr()),
            *(means_P.data_ptr(), scales_P.data_ptr(), rows, columns, eps, threads_for(rows * columns)),
        )
        ctx.of_rows, ctx.eps = (means_P, scales_P), eps
        return made_PN

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x_PN, gain_N, bias_N = ctx.saved_tensors
        means_P, scales_P = ctx.of_rows
        needs_x, needs_gain, needs_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return *_differentiable(gradients[0], (x_PN, gain_N, bias_N), ctx.needs_input_grad[:3], ctx.eps), None
        x_PN, d_PN = in_rows(x_PN), in_rows(gradients[0])
        rows, columns = x_PN.shape
        threads = threads_for(rows * columns)
        gain = None if gain_N is None else gain_N.contiguous()
        library = library_of(x_PN.dtype)
        given = (x_PN.data_ptr(), x_PN.stride(0), d_PN.data_ptr(), d_PN.stride(0))
        stored = (means_P.data_ptr(), scales_P.data_ptr())
        d_x = empty(rows, columns, dtype=x_PN.dtype) if needs_x else None
        if d_x is not None:
            library.stretto_norm_gradient(*given, _pointer(gain), *stored, d_x.data_ptr(), rows, columns, threads)
        d_gain = d_bias = None
        if needs_gain or needs_bias:
            d_gain, d_bias = empty(columns, dtype=x_PN.dtype), empty(columns, dtype=x_PN.dtype)
            library.stretto_norm_sums(*given, *stored, d_gain.data_ptr(), d_bias.data_ptr(), rows, columns, threads)
        return d_x, d_gain if needs_gain else None, d_bias if needs_bias else None, None


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _differentiable(d_PN: torch.Tensor, given: tuple[Any, ...], needed: tuple[bool, ...], eps: float) -> list[Any]:
    """The gradient as something that can itself be differentiated."""
    # Aliases: what leads from one of these tensors to another elsewhere is not followed here.
    own = [None if item is None else item.view_as(item) for item in given]
    x_PN: Any = own[0]
    made_PN = functional.layer_norm(x_PN, x_PN.shape[-1:], own[1], own[2], eps)
    wanted = [item for item, needs in zip(own, needed, strict=True) if needs and item is not None]
    found = iter(torch.autograd.grad(made_PN, wanted, d_PN, create_graph=True))
    return [next(found) if needs else None for needs in needed]


def can_norm(x: torch.Tensor, shape: list[int], *scales: torch.Tensor | None) -> bool:
    """Whether the code here does this layer norm: rows of one dimension."""
    if x.dim() != 2 or list(shape) != [x.shape[1]] or x.numel() == 0 or not can_run(x):
        return False
    return all(item is None or (item.dtype == x.dtype and item.device == x.device) for item in scales)


def norm(x_PN: torch.Tensor, gain_N: torch.Tensor | None, bias_N: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Layer norm of each row."""
    made: torch.Tensor = _Norm.apply(x_PN, gain_N, bias_N, eps)  # type: ignore[no-untyped-call]
    return made
