"""Stands for CUDA's graphs on the CPU: operators are recorded with their tensors, and run again on the same memory.

So are launches of interpreted Triton kernels, whose own operators are not the recorder's affair.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, final

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stretto.kernels.backends.cudagraph import AbstractRecorder
from stretto.kernels.backends.triton import interpreter

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
        with tape, _launches_on(tape):
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


@contextlib.contextmanager
def _launches_on(tape: _Tape) -> Iterator[None]:
    """Interpreted kernels are noted when they are launched."""
    try:
        function = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    except ModuleNotFoundError:
        yield
        return
    run = function.run

    def noted(self: Any, *args: Any, **options: Any) -> None:
        def launch() -> None:
            with torch._C._DisableTorchDispatch(), interpreter.at_once(1):
                run(self, *args, **options)

        launch()
        # On its memory, so that what it makes is told from memory that the operators made.
        tape.operations.append((lambda *_: launch(), args, {}, None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "run", noted)
        yield


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors of a structure."""
    return [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor)]
