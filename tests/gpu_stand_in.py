"""The CPU stands in for a GPU: what is asked of "cuda" is done on the CPU, and copies that would go up are noted."""

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode


@final
class GpuStandIn(TorchFunctionMode):
    """While it is on, devices named "cuda" are the CPU.

    Attributes:
        pinned: Tensors that were pinned.
        asynchronous: Copies to the GPU that nobody would wait for.
        waiting: Shapes of tensors, larger than a number, whose copies to the GPU would be waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pinned = 0
        self.asynchronous = 0
        self.waiting: list[tuple[int, ...]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "pin_memory":
            self.pinned += 1
            return args[0].clone()
        if name == "to" and any(_is_gpu(item) for item in (*args, *kwargs.values())):
            if kwargs.get("non_blocking"):
                self.asynchronous += 1
            elif args[0].dim():
                self.waiting.append(tuple(args[0].shape))
        if func is not torch.device:
            args, kwargs = tuple(map(_cpu, args)), {key: _cpu(item) for key, item in kwargs.items()}
        return func(*args, **kwargs)


def _is_gpu(item: Any) -> bool:
    return isinstance(item, (str, torch.device)) and str(item).startswith("cuda")


def _cpu(item: Any) -> Any:
    return torch.device("cpu") if _is_gpu(item) else item
