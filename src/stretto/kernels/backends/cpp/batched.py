"""Products, sums and layer norms over the rows of all steps, by code of our own.

They are part of every training step, so they are tuned for tall matrices, and unlike those of a BLAS their results do
not depend on the number of threads.

Shape legend: P rows of all steps together, K features in, N features out or of a norm.
"""

import ctypes
from functools import lru_cache
from typing import Any, Final

import torch
from torch.nn import functional

from stretto.kernels.backends.cpp.compiler import NoCompiler, load
from stretto.kernels.backends.cpp.generate import CPP_TYPES, header_text
from stretto.kernels.backward import differentiate_by_torch, is_transformed
from stretto.kernels.buffer_pool import empty

ROW_BLOCK: Final = 96
DEPTH_BLOCK: Final = 256
"""As in `batched.h`."""
MAX_PANEL: Final = 32
MIN_WORK_PER_THREAD: Final = 1 << 17
"""Multiplications below which waking another thread costs more than it saves."""
_SIGNATURES: Final = {
    "stretto_product": "pipiippiiipi",
    "stretto_weight_gradient": "piipipipiiipi",
    "stretto_column_sums": "pipipiii",
    "stretto_norm": "pipppppiidi",
    "stretto_norm_gradient": "pipippppiii",
    "stretto_norm_sums": "pipippppiii",
    "stretto_layers": "ppii",
}
"""Arguments of each function: pointers, integers and reals."""
_KINDS: Final = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}


@lru_cache(maxsize=4)
def find_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The functions below, compiled now or found in the cache; None without a compiler."""
    try:
        source = f"#define REAL {CPP_TYPES[dtype]}\n" + header_text(
            "vector.h", "product.h", "team.h", "batched.h", "norm.h", "layer.h"
        )
        library = load(source, torch_version=torch.__version__)
    except NoCompiler:
        return None
    for name, kinds in _SIGNATURES.items():
        getattr(library, name).argtypes = [_KINDS[kind] for kind in kinds]
    return library


def can_run(*tensors: torch.Tensor) -> bool:
    """Whether the code here takes these: matrices on the CPU of one real dtype, and a compiler is there."""
    first = tensors[0]
    if first.dtype not in CPP_TYPES or any(t.dtype != first.dtype or t.device.type != "cpu" for t in tensors):
        return False
    if any(t.dim() != 2 or t.layout is not torch.strided for t in tensors):
        return False
    return find_library(first.dtype) is not None


def threads_for(work: int) -> int:
    """Threads worth waking for a number of multiplications."""
    count = work // MIN_WORK_PER_THREAD
    return 1 if count <= 1 else min(torch.get_num_threads(), count)


def _functions(dtype: torch.dtype) -> ctypes.CDLL:
    library = find_library(dtype)
    assert library is not None, "see can_run"
    return library


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows each lie in one piece."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] <= 1 else tensor.contiguous()


def _width(columns: int) -> int:
    return -(-columns // MAX_PANEL) * MAX_PANEL


def product_memory(inner: int, columns: int, threads: int) -> int:
    """Elements of memory that a product works in."""
    width = _width(columns)
    return inner * width + threads * ROW_BLOCK * (inner + width)


def weight_gradient_memory(inner: int, columns: int, threads: int) -> int:
    """Elements of memory that a weight gradient works in."""
    sides = -(-inner // 6) * 6
    return _width(columns) * sides + threads * DEPTH_BLOCK * (sides + MAX_PANEL)


def product(x_PK: torch.Tensor, weight_KN: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """x w + bias, into memory that is cheap to touch."""
    x_PK = _in_rows(x_PK)
    (rows, inner), columns = x_PK.shape, weight_KN.shape[1]
    y_PN = empty(rows, columns, dtype=x_PK.dtype)
    if y_PN.numel() == 0:
        return y_PN
    threads = threads_for(rows * inner * columns)
    memory = empty(product_memory(inner, columns, threads), dtype=x_PK.dtype)
    bias = None if bias_N is None else bias_N.expand(columns).contiguous()
    _functions(x_PK.dtype).stretto_product(
        *(x_PK.data_ptr(), x_PK.stride(0), weight_KN.data_ptr(), *weight_KN.stride(), _pointer(bias)),
        *(y_PN.data_ptr(), rows, inner, columns, memory.data_ptr(), threads),
    )
    return y_PN


def weight_gradient(x_PK: torch.Tensor, d_PN: torch.Tensor, head_BK: torch.Tensor | None = None) -> torch.Tensor:
    """The transpose of x, times d: a sum over all rows.

    The rows of `head_BK` come before those of x, of which as many are left out at the end.
    """
    x_PK, d_PN = _in_rows(x_PK), _in_rows(d_PN)
    head_BK = x_PK[:0] if head_BK is None else _in_rows(head_BK)
    rows, (inner, columns) = len(d_PN), (x_PK.shape[1], d_PN.shape[1])
    made_KN = empty(inner, columns, dtype=x_PK.dtype)
    if made_KN.numel() == 0:
        return made_KN
    threads = threads_for(rows * inner * columns)
    memory = empty(weight_gradient_memory(inner, columns, threads), dtype=x_PK.dtype)
    _functions(x_PK.dtype).stretto_weight_gradient(
        *(head_BK.data_ptr(), head_BK.stride(0), len(head_BK), x_PK.data_ptr(), x_PK.stride(0)),
        *(d_PN.data_ptr(), d_PN.stride(0), made_KN.data_ptr(), rows, inner, columns, memory.data_ptr(), threads),
    )
    return made_KN


def column_sums(d_PN: torch.Tensor, times_PN: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of all rows, of those of a product of two if there are two."""
    d_PN = _in_rows(d_PN)
    rows, columns = d_PN.shape
    made_N = empty(columns, dtype=d_PN.dtype)
    other = None if times_PN is None else _in_rows(times_PN)
    _functions(d_PN.dtype).stretto_column_sums(
        *(d_PN.data_ptr(), d_PN.stride(0)),
        *((None, 0) if other is None else (other.data_ptr(), other.stride(0))),
        *(made_N.data_ptr(), rows, columns, threads_for(rows * columns)),
    )
    return made_N


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_PN: torch.Tensor, gain_N: torch.Tensor | None, bias_N: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x_PN, gain_N, bias_N)
        x_PN = _in_rows(x_PN)
        rows, columns = x_PN.shape
        made_PN = empty(rows, columns, dtype=x_PN.dtype)
        means_P, scales_P = empty(rows, dtype=x_PN.dtype), empty(rows, dtype=x_PN.dtype)
        gain, bias = (None if item is None else item.contiguous() for item in (gain_N, bias_N))
        _functions(x_PN.dtype).stretto_norm(
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
        if torch.is_grad_enabled() or is_transformed(gradients[0]):

            def run(own: list[Any]) -> list[torch.Tensor]:
                return [functional.layer_norm(own[0], own[0].shape[-1:], own[1], own[2], ctx.eps)]

            given = x_PN, gain_N, bias_N
            return *differentiate_by_torch(run, given, gradients, ctx.needs_input_grad[:3]), None
        x_PN, d_PN = _in_rows(x_PN), _in_rows(gradients[0])
        rows, columns = x_PN.shape
        threads = threads_for(rows * columns)
        gain = None if gain_N is None else gain_N.contiguous()
        library = _functions(x_PN.dtype)
        read = (x_PN.data_ptr(), x_PN.stride(0), d_PN.data_ptr(), d_PN.stride(0))
        stored = (means_P.data_ptr(), scales_P.data_ptr())
        d_x = empty(rows, columns, dtype=x_PN.dtype) if needs_x else None
        if d_x is not None:
            library.stretto_norm_gradient(*read, _pointer(gain), *stored, d_x.data_ptr(), rows, columns, threads)
        d_gain = d_bias = None
        if needs_gain or needs_bias:
            d_gain, d_bias = empty(columns, dtype=x_PN.dtype), empty(columns, dtype=x_PN.dtype)
            library.stretto_norm_sums(*read, *stored, d_gain.data_ptr(), d_bias.data_ptr(), rows, columns, threads)
        return d_x, d_gain if needs_gain else None, d_bias if needs_bias else None, None


def can_norm(x: torch.Tensor, shape: list[int], *scales: torch.Tensor | None) -> bool:
    """Whether the code here does this layer norm: rows of one dimension."""
    if x.dim() != 2 or list(shape) != [x.shape[1]] or x.numel() == 0 or not can_run(x):
        return False
    return all(item is None or (item.dtype == x.dtype and item.device == x.device) for item in scales)


def norm(x_PN: torch.Tensor, gain_N: torch.Tensor | None, bias_N: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Layer norm of each row."""
    made: torch.Tensor = _Norm.apply(x_PN, gain_N, bias_N, eps)  # type: ignore[no-untyped-call]
    return made
