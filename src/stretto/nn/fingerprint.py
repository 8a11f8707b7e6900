"""What a traced step depends on besides its inputs: when something of it changes, the step is traced anew."""

from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, final

import torch
from torch import nn

_VALUES: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType, MethodType)
_KNOWN: Final = frozenset(nn.Module().__dict__) - {"training"}


@final
class Same:
    """An object that equals itself alone; it is kept alive, so that no other can take its identity."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def fingerprint(cell: nn.Module) -> tuple[Any, ...]:
    """Types, settings, parameter shapes and hooks of a cell and all modules inside."""
    found: list[Any] = [Same(cell)]
    for name, module in cell.named_modules():
        found.append((name, type(module)))
        own = module.__dict__
        for key, value in own.items():
            if key not in _KNOWN:
                found.append((key, _mark(value)))
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            found.append((key, None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.device)))
        found.append(len(module._forward_hooks) + len(module._forward_pre_hooks))
    return tuple(found)


def _mark(value: Any) -> Any:
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, _FUNCTIONS):
        return Same(getattr(value, "__func__", value))
    if isinstance(value, (tuple, list)):
        return (type(value), *(_mark(item) for item in value))
    if isinstance(value, dict):
        return (dict, *((_mark(key), _mark(item)) for key, item in value.items()))
    if isinstance(value, (set, frozenset)):
        return (set, frozenset(_mark(item) for item in value))
    return Same(value)
