"""What Triton's interpreter lacks: the device library and reductions, by torch on the tiles' own memory.

The interpreter runs kernels on the CPU, program after program, for tests: TRITON_INTERPRET=1. Its floats are NumPy's.
Programs that wait for each other run at once here, each in a thread.
It multiplies bfloat16 as whole numbers, which is why products are widened to the accumulator's type beforehand.
"""

import inspect
import itertools
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import numpy as np
import torch

from stretto.errors import StrettoError
from stretto.kernels.backends.triton.package import optional

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


@contextmanager
def at_once(shares: int) -> Iterator[None]:
    """Quietly; and if so many programs share rows, kernels launched meanwhile run all programs of a grid at once.

    A thread for each program, which says which one it is; whoever waits for the others lets them run. A program that
    fails ends all.
    """
    if shares == 1:
        with quiet():
            yield
        return
    runtime = optional("triton.runtime.interpreter")
    executor, builder = runtime.GridExecutor, runtime.InterpreterBuilder
    call, add = executor.__call__, builder.create_atomic_rmw
    own, failed = threading.local(), threading.Event()

    def call_at_once(self: Any, *given: Any, **options: Any) -> None:
        scope = runtime._patch_lang(self.fn)
        try:
            known = {name: value for name, value in options.items() if name in self.arg_names}
            values = inspect.getcallargs(self.fn, *given, **known)
            values = {
                name: value if name in self.constexprs else runtime._implicit_cvt(value)
                for name, value in values.items()
            }
            grid = (*self.grid, *(1,) * (3 - len(self.grid)))
            runtime.interpreter_builder.set_grid_dim(*grid)
            errors: list[BaseException] = []

            def run(index: tuple[int, ...]) -> None:
                try:
                    # NumPy keeps how it treats errors for each thread.
                    with np.errstate(all="ignore"):
                        runtime.interpreter_builder.set_grid_idx(*index)
                        self.fn(**values)
                except BaseException as error:  # noqa: BLE001 - it is raised again where the kernel was launched
                    errors.append(error)
                    failed.set()

            programs = [
                threading.Thread(target=run, args=(index,), daemon=True)
                for index in itertools.product(*map(range, grid))
            ]
            for program in programs:
                program.start()
            for program in programs:
                program.join()
            if errors:
                raise runtime.InterpreterError(repr(errors[0])) from errors[0]
        finally:
            scope.restore()

    def add_and_let_others_run(self: Any, *given: Any) -> Any:
        if failed.is_set():
            raise RuntimeError("another program of the kernel failed")
        time.sleep(0)
        return add(self, *given)

    index = property(lambda _: own.index, lambda _, value: setattr(own, "index", value))
    executor.__call__, builder.create_atomic_rmw, builder.grid_idx = call_at_once, add_and_let_others_run, index
    try:
        with quiet():
            yield
    finally:
        executor.__call__, builder.create_atomic_rmw = call, add
        del builder.grid_idx
