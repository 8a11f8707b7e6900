"""The one error that users see."""

import functools
from collections.abc import Sequence
from typing import Any


class StrettoError(ValueError):
    """Something the user can put right.

    The message says what is wrong, quotes the input and names the way out.

    Args:
        problem: What was given and why it cannot be used.
        fix: The step that resolves it, as a sentence.
    """

    def __init__(self, problem: str, *, fix: str) -> None:
        super().__init__(f"{problem.rstrip('.')}. {fix}")
        self.problem = problem
        self.fix = fix

    def __reduce__(self) -> tuple[Any, ...]:
        """Let the error cross from a worker process to its parent as itself."""
        return functools.partial(type(self), self.problem, fix=self.fix), ()


def list_some(names: Sequence[object], *, most: int = 5) -> str:
    """The first few names, for a message, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
