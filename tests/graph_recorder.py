"""Stands for CUDA's graphs on the CPU: operators are recorded with their tensors, and run again on the same memory."""

from collections.abc import Callable
from typing import Any, TypeVar, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stretto.kernels.backends.cudagraph import AbstractRecorder

T = TypeVar("T")
FORBIDDEN = ("_local_scalar_dense", "nonzero", "_to_copy.default_cpu", "record_stream")
"""What waits for the GPU, which a capture does not allow."""


@final
class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(name in str(func) for name in FORBIDDEN):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        made = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, made))
        return made


@final
class TapeRecorder(AbstractRecorder):
    """As CUDA does it: what is captured is not run before it is replayed, so that its results are spoilt here."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replays = 0

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record once."""
        self.recorded += 1
        tape = _Tape()
        with tape:
            made = work()

        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, first in tape.operations:
                again = func(*args, **kwargs)
                for old, new in zip(tensors_of(first), tensors_of(again), strict=True):
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)

        for _, args, kwargs, first in tape.operations:
            given = {item.untyped_storage().data_ptr() for item in tensors_of((args, kwargs))}
            for item in tensors_of(first):
                if item.is_floating_point() and item.untyped_storage().data_ptr() not in given:
                    item.fill_(float("nan"))
        return made, replay


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors of a structure."""
    return [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor)]
