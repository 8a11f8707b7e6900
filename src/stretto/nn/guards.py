"""Who else sees a call of a layer: compilers, tracers, transforms and modes, to which generated code is opaque."""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import nn

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
PLAIN_TENSORS: Final = (torch.Tensor, nn.Parameter)
_WHY_DISABLED: Final = "Stretto runs generated code of its own here: compile with fullgraph=False"


_LISTENERS: Final[list[Callable[[str], None]]] = []


def warn_once(text: str) -> None:
    """Tell whoever listens, each time; or else warn, the first time that there is this to say."""
    if _LISTENERS:
        _LISTENERS[-1](text)
    else:
        _warn(text)


@functools.cache
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


@contextlib.contextmanager
def warnings_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Give `listener` what layers have to say, such as that something slower runs than expected; once each."""
    said: set[str] = set()

    def listen(text: str) -> None:
        if text not in said:
            said.add(text)
            listener(text)

    _LISTENERS.append(listen)
    try:
        yield
    finally:
        _LISTENERS.remove(listen)


def warn_of_unset(name: str, unset: Iterable[str]) -> None:
    """Say once what a step leaves for others to look at, and compiled code does not."""
    if unset:
        warn_once(
            f"{name} sets {' and '.join(unset)} at each step. Compiled, it does not, and what was there before stays: "
            "return it as an output if you read it."
        )


def is_looked_at(device: torch.device | None = None) -> str:
    """Who looks at the calls that are made now, and would see a kernel as something opaque; empty if nobody does.

    Args:
        device: Where the call's tensors are, by default on the CPU: that may be torch's default device.
    """
    if torch._C._get_tracing_state() is not None:
        return "the call is traced"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "the call is transformed by torch.func"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode derivatives are taken"
    if torch._C._len_torch_dispatch_stack() or not _default_device_is(device):
        return "a mode intercepts operators"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
    return ""


def autocast_operands(device: torch.device, own: torch.dtype | None) -> torch.dtype | None:
    """What products round their operands to under autocast of a GPU; None where it is off, or does nothing.

    Args:
        device: Where the call's tensors are.
        own: What weights and states are.
    """
    if device.type != "cuda" or own is not torch.float32 or not torch.is_autocast_enabled("cuda"):
        return None
    low = torch.get_autocast_dtype("cuda")
    return low if low in {torch.bfloat16, torch.float16} else None


def _default_device_is(device: torch.device | None) -> bool:
    """Whether tensors are made on the CPU, or on this device; a mode that is no default device says no."""
    count = torch._C._len_torch_function_stack()
    if count == 0:
        return True
    default = getattr(torch._C._get_function_stack_at(0), "device", None)
    own = "cpu" if device is None else device.type
    return count == 1 and isinstance(default, torch.device) and default.type in {"cpu", own}


def unusual_tensor(tensors: Iterable[Any]) -> str:
    """What is special about one of these, so that its memory cannot be read as it is; empty if nothing is."""
    for tensor in tensors:
        if type(tensor) not in PLAIN_TENSORS:
            return f"a tensor is a {type(tensor).__name__}"
        if tensor.is_neg():
            return "a tensor is a negated view"
    return ""


def opaque(run: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Let Dynamo break the graph at calls of `run`, once, and compile nothing of what it runs."""

    disabled: list[Callable[_Given, _Made]] = []

    @functools.wraps(run)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        # Importing torch._dynamo takes longer than all of a first call: it is left to those who use it.
        if not disabled and "torch._dynamo" in sys.modules:
            disabled.append(torch.compiler.disable(run))  # type: ignore[no-untyped-call]
        return (disabled[0] if disabled else run)(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = _WHY_DISABLED  # type: ignore[attr-defined]
    return call
