"""Where in the user's own code a step is while it is traced, and whether it is a check that could be passed over."""

import ast
import functools
import linecache
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, final

import torch

_TORCH: Final = str(Path(torch.__file__).parent)
_TRACER: Final = tuple(
    str(Path(__file__).parent.parent / name) for name in ("graph", "kernels", "nn", "signature", "state")
)

_NOT_USER_CODE: Final = (_TORCH, *_TRACER, "<frozen")


@final
@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file."""

    file: str
    number: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.number).strip()
        return f"{Path(self.file).name}:{self.number}" + (f" `{text}`" if text else "")

    @property
    def is_check(self) -> bool:
        """Whether it belongs to an `assert`, or to the condition of an `if` that does nothing but raise an error."""
        return any(first <= self.number <= last for first, last in _checks(self.file))


def line_of_user() -> Line | None:
    """The innermost line that is neither PyTorch's nor one of the tracer's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_USER_CODE):
            return Line(file, frame.f_lineno)
        frame = frame.f_back
    return None


def whereabouts() -> str:
    """ " at cells.py:12 `y = x.sum()`", for messages; empty if no line of the user's is running."""
    line = line_of_user()
    return "" if line is None else f" at {line}"


def is_in_check() -> bool:
    """Whether that line is a check, or one of PyTorch's own that it leads to."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_TRACER, "<frozen")) and Line(file, frame.f_lineno).is_check:
            return True
        if not file.startswith(_NOT_USER_CODE):
            return False
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=64)
def _checks(file: str) -> tuple[tuple[int, int], ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append((node.lineno, node.end_lineno or node.lineno))
        elif isinstance(node, ast.If) and not node.orelse and all(isinstance(item, ast.Raise) for item in node.body):
            found.append((node.test.lineno, node.test.end_lineno or node.test.lineno))
    return tuple(found)
