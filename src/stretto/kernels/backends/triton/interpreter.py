"""What Triton's interpreter lacks: the device library and reductions, by torch on the tiles' own memory.

The interpreter runs kernels on the CPU, program after program, for tests: TRITON_INTERPRET=1. Its floats are NumPy's.
It multiplies bfloat16 as whole numbers, which is why products are widened to the accumulator's type beforehand.
"""

import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import numpy as np
import torch

from stretto.errors import StrettoError
from stretto.extras import optional

_TORCH_NAMES: Final = {"rint": "round"}
"""Functions of the device library that torch calls otherwise."""


@final
class _Library:
    """Stands for the device library: each function is torch's of that name."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(torch, _TORCH_NAMES.get(name, name))

        def call(*arguments: Any) -> Any:
            like = next(item for item in arguments if hasattr(item, "handle"))
            given = [_tensor_of(item, like) for item in arguments]
            return _tile(function(*given).numpy(), like)

        return call


def _tensor_of(item: Any, like: Any) -> torch.Tensor:
    data = item.handle.data if hasattr(item, "handle") else np.asarray(item, like.handle.data.dtype)
    return torch.from_numpy(np.ascontiguousarray(data))


def _tile(data: Any, like: Any) -> Any:
    handle = optional("triton.runtime.interpreter").TensorHandle
    language = optional("triton.language")
    array = np.asarray(data, dtype=like.handle.data.dtype)
    dtype = like.handle.dtype
    kind = language.block_type(dtype, list(array.shape)) if array.shape else dtype
    return language.tensor(handle(array, dtype), kind)


def complete(module: types.ModuleType) -> None:
    """Give a module that will be interpreted what it calls."""
    for name, reduce in {"reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min}.items():
        if hasattr(module, name):
            setattr(module, name, lambda x, reduce=reduce: _tile(reduce(x.handle.data, axis=2), x))
    module.__dict__["math"] = _Library()


def is_on() -> bool:
    """Whether Triton's own switch says that kernels are interpreted."""
    try:
        return bool(optional("triton").knobs.runtime.interpret)
    except (StrettoError, AttributeError):
        return False


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels that are made meanwhile are interpreted, on the CPU."""
    runtime = optional("triton").knobs.runtime
    with runtime.scope():
        runtime.interpret = True
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Without NumPy's warnings: overflow and NaN are what they are on a GPU."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
