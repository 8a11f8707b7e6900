"""The one error that users see."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final

MEMORY_WORDS: Final = ("memory", "Storage size calculation overflowed")
"""What torch says when a tensor is too large."""


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


@contextlib.contextmanager
def memory_errors(*, fix: str) -> Iterator[None]:
    """Turn Python's and torch's errors about memory into a `StrettoError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On a CPU torch has no error class of its own for this.
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in MEMORY_WORDS):
            raise
        reason = str(error).splitlines()[0] if str(error) else "allocation failed"
        raise StrettoError(f"there is not enough memory ({reason})", fix=fix) from error
