"""Products and sums over the rows of all steps, by code of our own.

They take part in every training step, so they are as fast as can be had, and unlike those of a BLAS their results do
not depend on the number of threads.

Shape legend: P rows of all steps together, K features in, N features out.
"""

import ctypes
from functools import lru_cache
from typing import Any

import torch

from stretto.kernels.compiler import NoCompiler, compiled
from stretto.kernels.generate import REALS, header_text
from stretto.kernels.memory import fresh

ROW_BLOCK = 96
DEPTH_BLOCK = 256
WIDEST = 32
WORTH_A_THREAD = 1 << 17
"""Multiplications that a thread must have to do to be worth waking."""


@lru_cache(maxsize=4)
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    try:
        source = f"#define REAL {REALS[dtype]}\n" + header_text("vector.h", "product.h", "team.h", "folded.h")
        return compiled(source, torch_version=torch.__version__)
    except NoCompiler:
        return None


def warm_up(dtype: torch.dtype) -> None:
    """Compile, or find in the cache, what will be needed."""
    _library(dtype)


def can_run(*tensors: torch.Tensor) -> bool:
    """Whether the code here takes these: matrices on the CPU of one real dtype, and a compiler is there."""
    first = tensors[0]
    if first.dtype not in REALS or any(t.dtype != first.dtype or t.device.type != "cpu" for t in tensors):
        return False
    if any(t.dim() != 2 or t.layout is not torch.strided for t in tensors):
        return False
    return _library(first.dtype) is not None


def _threads(work: int) -> int:
    return max(1, min(torch.get_num_threads(), work // WORTH_A_THREAD))


def _call(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    library = _library(dtype)
    assert library is not None
    given = [
        None if item is None else ctypes.c_int64(item) if isinstance(item, int) else ctypes.c_void_p(item.data_ptr())
        for item in arguments
    ]
    getattr(library, name)(*given)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows each lie in one piece."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] <= 1 else tensor.contiguous()


def _width(columns: int) -> int:
    return -(-columns // WIDEST) * WIDEST


def product(x_PK: torch.Tensor, weight_KN: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """x w + bias, into memory that is cheap to touch."""
    x_PK = _rows(x_PK)
    (rows, inner), columns = x_PK.shape, weight_KN.shape[1]
    y_PN = fresh(rows, columns, dtype=x_PK.dtype)
    if y_PN.numel() == 0:
        return y_PN
    threads = _threads(rows * inner * columns)
    width = _width(columns)
    memory = fresh(inner * width + threads * ROW_BLOCK * (inner + width), dtype=x_PK.dtype)
    bias = None if bias_N is None else bias_N.expand(columns).contiguous()
    strides = weight_KN.stride()
    _call(
        "stretto_product",
        x_PK.dtype,
        *(x_PK, x_PK.stride(0), weight_KN, *strides, bias, y_PN, rows, inner, columns, memory, threads),
    )
    return y_PN


def weight_gradient(x_PK: torch.Tensor, d_PN: torch.Tensor) -> torch.Tensor:
    """The transpose of x, times d: a sum over all rows."""
    x_PK, d_PN = _rows(x_PK), _rows(d_PN)
    (rows, inner), columns = x_PK.shape, d_PN.shape[1]
    made_KN = fresh(inner, columns, dtype=x_PK.dtype)
    if made_KN.numel() == 0:
        return made_KN
    threads = _threads(rows * inner * columns)
    sides = -(-inner // 6) * 6
    memory = fresh(_width(columns) * sides + threads * DEPTH_BLOCK * (sides + WIDEST), dtype=x_PK.dtype)
    _call(
        "stretto_weight_gradient",
        x_PK.dtype,
        *(x_PK, x_PK.stride(0), d_PN, d_PN.stride(0), made_KN, rows, inner, columns, memory, threads),
    )
    return made_KN


def column_sums(d_PN: torch.Tensor) -> torch.Tensor:
    """The sum of all rows."""
    d_PN = _rows(d_PN)
    rows, columns = d_PN.shape
    made_N = fresh(columns, dtype=d_PN.dtype)
    _call("stretto_column_sums", d_PN.dtype, d_PN, d_PN.stride(0), made_N, rows, columns, _threads(rows * columns))
    return made_N
