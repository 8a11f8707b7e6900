"""Products and sums over the rows of all steps, by code of our own.

They are part of every training step, so they are tuned for tall matrices, and unlike those of a BLAS their results do
not depend on the number of threads.

Shape legend: P rows of all steps together, K features in, N features out.
"""

import ctypes
from functools import lru_cache
from typing import Final

import torch

from stretto.kernels.backends.cpp.compiler import NoCompiler, load
from stretto.kernels.backends.cpp.generate import CPP_TYPES, header_text
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
}
"""Arguments of each function: pointers, integers and reals."""
_KINDS: Final = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}


@lru_cache(maxsize=4)
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    try:
        source = f"#define REAL {CPP_TYPES[dtype]}\n" + header_text(
            "vector.h", "product.h", "team.h", "batched.h", "norm.h"
        )
        library = load(source, torch_version=torch.__version__)
    except NoCompiler:
        return None
    for name, kinds in _SIGNATURES.items():
        getattr(library, name).argtypes = [_KINDS[kind] for kind in kinds]
    return library


def warm_up(dtype: torch.dtype) -> None:
    """Compile, or find in the cache, what will be needed."""
    _library(dtype)


def can_run(*tensors: torch.Tensor) -> bool:
    """Whether the code here takes these: matrices on the CPU of one real dtype, and a compiler is there."""
    first = tensors[0]
    if first.dtype not in CPP_TYPES or any(t.dtype != first.dtype or t.device.type != "cpu" for t in tensors):
        return False
    if any(t.dim() != 2 or t.layout is not torch.strided for t in tensors):
        return False
    return _library(first.dtype) is not None


def threads_for(work: int) -> int:
    """Threads worth waking for a number of multiplications."""
    return max(1, min(torch.get_num_threads(), work // MIN_WORK_PER_THREAD))


def library_of(dtype: torch.dtype) -> ctypes.CDLL:
    """The compiled functions; see `can_run`."""
    library = _library(dtype)
    assert library is not None
    return library


def in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows each lie in one piece."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] <= 1 else tensor.contiguous()


def _width(columns: int) -> int:
    return -(-columns // MAX_PANEL) * MAX_PANEL


def product(x_PK: torch.Tensor, weight_KN: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """x w + bias, into memory that is cheap to touch."""
    x_PK = in_rows(x_PK)
    (rows, inner), columns = x_PK.shape, weight_KN.shape[1]
    y_PN = empty(rows, columns, dtype=x_PK.dtype)
    if y_PN.numel() == 0:
        return y_PN
    threads = threads_for(rows * inner * columns)
    width = _width(columns)
    memory = empty(inner * width + threads * ROW_BLOCK * (inner + width), dtype=x_PK.dtype)
    bias = None if bias_N is None else bias_N.expand(columns).contiguous()
    strides = weight_KN.stride()
    library_of(x_PK.dtype).stretto_product(
        *(x_PK.data_ptr(), x_PK.stride(0), weight_KN.data_ptr(), *strides, None if bias is None else bias.data_ptr()),
        *(y_PN.data_ptr(), rows, inner, columns, memory.data_ptr(), threads),
    )
    return y_PN


def weight_gradient(x_PK: torch.Tensor, d_PN: torch.Tensor, *, head_BK: torch.Tensor | None = None) -> torch.Tensor:
    """The transpose of x, times d: a sum over all rows.

    Args:
        x_PK: Rows.
        d_PN: Rows.
        head_BK: Rows that come before those of x, of which as many are left out at the end.
    """
    x_PK, d_PN = in_rows(x_PK), in_rows(d_PN)
    head_BK = x_PK[:0] if head_BK is None else in_rows(head_BK)
    rows, (inner, columns) = len(d_PN), (x_PK.shape[1], d_PN.shape[1])
    made_KN = empty(inner, columns, dtype=x_PK.dtype)
    if made_KN.numel() == 0:
        return made_KN
    threads = threads_for(rows * inner * columns)
    sides = -(-inner // 6) * 6
    memory = empty(_width(columns) * sides + threads * DEPTH_BLOCK * (sides + MAX_PANEL), dtype=x_PK.dtype)
    library_of(x_PK.dtype).stretto_weight_gradient(
        *(head_BK.data_ptr(), head_BK.stride(0), len(head_BK), x_PK.data_ptr(), x_PK.stride(0)),
        *(d_PN.data_ptr(), d_PN.stride(0), made_KN.data_ptr(), rows, inner, columns, memory.data_ptr(), threads),
    )
    return made_KN


def column_sums(d_PN: torch.Tensor, times_PN: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of all rows, of those of a product of two if there are two."""
    d_PN = in_rows(d_PN)
    rows, columns = d_PN.shape
    made_N = empty(columns, dtype=d_PN.dtype)
    other = None if times_PN is None else in_rows(times_PN)
    library_of(d_PN.dtype).stretto_column_sums(
        *(d_PN.data_ptr(), d_PN.stride(0)),
        *((None, 0) if other is None else (other.data_ptr(), other.stride(0))),
        *(made_N.data_ptr(), rows, columns, threads_for(rows * columns)),
    )
    return made_N
