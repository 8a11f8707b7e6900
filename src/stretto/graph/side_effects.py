"""What a step does besides computing: attributes that it sets, lists that it appends to, random numbers that it draws.

A trace calls the step, so all of that is undone after it. Compiled code does none of it. That is right where a step
only exposes a value, as in `self.attention = weights`. A step that reads what it set one step earlier has hidden state,
and cannot be compiled.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
import torch
from torch import nn

GENERATORS: Final = (random.Random, np.random.Generator, np.random.RandomState)
"""Generators of random numbers that are not PyTorch's."""

_NUMBERS: Final = (bool, int, float, complex, str)
_REGISTRIES: Final = frozenset(nn.Module().__dict__)
_GLOBAL_GENERATORS: Final[tuple[Any, ...]] = tuple(
    # What `random.random()` and `np.random.rand()` draw from: such functions are methods of hidden generators.
    function.__self__  # type: ignore[attr-defined]
    for function in (random.random, np.random.random_sample)
)


@final
@dataclass(frozen=True, slots=True)
class Attributes:
    """Some attributes of an object without a dictionary that could be written to, such as a class."""

    owner: Any
    names: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class _Snapshot:
    """Contents that are compared by value, such as those of an array, with a function that restores them."""

    contents: Any
    restore: Callable[[], None] = field(compare=False)


def holders_of(cell: nn.Module) -> Iterator[Any]:
    """What a cell may change: attributes and buffers of its modules, and lists and dicts among them."""
    for module in cell.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its attributes are not those of Python
        yield module.__dict__
        yield module._buffers
        for name, value in list(module.__dict__.items()):
            if name not in _REGISTRIES and isinstance(value, (list, dict)):
                yield value


def attribute_tensors(cell: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are attributes of a cell's modules, and neither parameters nor buffers, by their names.

    Such are weights that something else computes, once for each batch, and those of `nn.DataParallel`'s copies.
    """
    for prefix, module in cell.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its attributes are not those of Python
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{name}" if prefix else name, value


@final
class SideEffects:
    """The contents of some holders before a step, and what the step changed.

    Attributes:
        names: Of what was set, in the order in which it was seen.
        problem: What was done that no later step can do without; empty if nothing was.
    """

    def __init__(self, holders: Sequence[Any]) -> None:
        self._before = [
            (holder, _contents(holder)) for holder in (*holders, *_GLOBAL_GENERATORS) if not _is_iterator(holder)
        ]
        self.names: dict[str, None] = {}
        self.problem = ""
        if any(map(_is_iterator, holders)):  # its values cannot be put back
            self.problem = (
                "the step takes values from an iterator, which advances at every step: give them with the inputs"
            )

    def undo(self) -> None:
        """Put back what was there."""
        for holder, before in self._before:
            now = _contents(holder)
            changed = [
                name
                for name in {**before, **now}
                if (was := before.get(name, _MISSING)) is not (new := now.get(name, _MISSING))
                and not (isinstance(was, _Snapshot) and was == new)
            ]
            if not changed:
                continue
            self.problem = self.problem or _why_needed(holder, before, now, changed)
            if not (isinstance(holder, dict) and "_parameters" in holder):
                self.names.update(dict.fromkeys(map(str, changed)))
            else:
                own = holder["_parameters"]
                # Torch's own hooks set a weight that they compute of its parts before each call.
                self.names.update(
                    dict.fromkeys(name for name in changed if f"{name}_v" not in own and f"{name}_orig" not in own)
                )
            _restore(holder, before)


_MISSING: Final = object()


def _is_iterator(holder: Any) -> bool:
    return isinstance(holder, Iterator)


def _contents(holder: Any) -> dict[Any, Any]:  # noqa: PLR0911 - one line per kind of holder
    """Names and values of what holds values: a list, a dict, a variable of a closure, or some names of a dict."""
    if isinstance(holder, (list, deque)):
        return dict(enumerate(holder))
    if isinstance(holder, set):
        return dict.fromkeys(holder, True)
    if isinstance(holder, Attributes):
        known = vars(holder.owner) if isinstance(holder.owner, type) else None
        return {
            name: getattr(holder.owner, name) if known is None else known[name]
            for name in holder.names
            if (hasattr(holder.owner, name) if known is None else name in known)
        }
    if isinstance(holder, np.ndarray):
        copy = holder.copy()
        return {"an array": _Snapshot(copy.tobytes(), lambda: np.copyto(holder, copy))}
    if isinstance(holder, GENERATORS):
        return {"random numbers": _state_of(holder)}
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, tuple):
        return {name: holder[0][name] for name in holder[1] if name in holder[0]}
    try:
        return {"a variable of a closure": holder.cell_contents}
    except ValueError:  # not given a value yet
        return {}


def _state_of(generator: Any) -> _Snapshot:
    """Where a generator of random numbers is."""
    if isinstance(generator, random.Random):
        state: Any = generator.getstate()
        return _Snapshot(state, lambda: generator.setstate(state))
    if isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
        return _Snapshot(_comparable(state), lambda: generator.set_state(state))
    state = generator.bit_generator.state
    return _Snapshot(_comparable(state), lambda: setattr(generator.bit_generator, "state", state))


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _restore(holder: Any, contents: dict[Any, Any]) -> None:
    if isinstance(holder, list):
        holder[:] = contents.values()
    elif isinstance(holder, deque):
        holder.clear()
        holder.extend(contents.values())
    elif isinstance(holder, set):
        holder.clear()
        holder.update(contents)
    elif isinstance(holder, Attributes):
        for name, value in contents.items():
            setattr(holder.owner, name, value)
    elif isinstance(holder, (np.ndarray, *GENERATORS)):
        for snapshot in contents.values():
            snapshot.restore()
    elif isinstance(holder, dict):
        for name in [name for name in holder if name not in contents]:
            del holder[name]
        holder.update(contents)
    elif isinstance(holder, tuple):
        holder[0].update(contents)
    elif contents:
        (holder.cell_contents,) = contents.values()
    else:
        del holder.cell_contents


def _why_needed(holder: Any, before: dict[Any, Any], now: dict[Any, Any], changed: list[Any]) -> str:
    advice = "which has to happen at every step: return it as a part of the state or of the output"
    if isinstance(holder, GENERATORS):
        whose = "NumPy's" if type(holder).__module__.startswith("numpy") else "Python's"
        return (
            f"the step draws from {whose} random numbers, which has to happen at every step: draw with torch, or "
            "before the loop, as an input"
        )
    if isinstance(holder, (list, deque, set, np.ndarray)):
        name = type(holder).__name__
        return f"the step changes {'an array' if isinstance(holder, np.ndarray) else f'a {name}'}, {advice}"
    for name in changed:
        if any(isinstance(values.get(name), _NUMBERS) for values in (before, now)) or not isinstance(name, str):
            return f"the step changes {name}, {advice}"
    return ""
