"""What a step does besides computing: attributes that it sets, lists that it appends to.

A trace calls the step, so all of that is undone after it. Compiled code does none of it. That is right where a step
only leaves something for others to look at, `self.attention = weights`; where it reads what it left at the step before,
it has a state that nobody carries, and cannot be compiled.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, final

import torch
from torch import nn

_NUMBERS: Final = (bool, int, float, complex, str)
_REGISTRIES: Final = frozenset(nn.Module().__dict__)


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


@final
class SideEffects:
    """What some holders have in them, and what has become of it.

    Attributes:
        names: Of what was set, in the order in which it was seen.
        problem: What was done that no later step can do without; empty if nothing was.
    """

    def __init__(self, holders: Sequence[Any]) -> None:
        self._before = [(holder, _contents(holder)) for holder in holders]
        self.names: dict[str, None] = {}
        self.problem = ""

    def undo(self) -> None:
        """Put back what was there."""
        for holder, before in self._before:
            now = _contents(holder)
            changed = [name for name in {**before, **now} if before.get(name, _NOTHING) is not now.get(name, _NOTHING)]
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


_NOTHING: Final = object()


def _contents(holder: Any) -> dict[Any, Any]:
    """Names and values of what holds values: a list, a dict, a variable of a closure, or some names of a dict."""
    if isinstance(holder, list):
        return dict(enumerate(holder))
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, tuple):
        return {name: holder[0][name] for name in holder[1] if name in holder[0]}
    try:
        return {"a variable of a closure": holder.cell_contents}
    except ValueError:  # not given a value yet
        return {}


def _restore(holder: Any, contents: dict[Any, Any]) -> None:
    if isinstance(holder, list):
        holder[:] = contents.values()
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
    if isinstance(holder, list):
        return f"the step changes a list, {advice}"
    for name in changed:
        if any(isinstance(values.get(name), _NUMBERS) for values in (before, now)) or not isinstance(name, str):
            return f"the step changes {name}, {advice}"
    return ""
