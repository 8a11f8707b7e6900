"""How an error is shown."""

from typing import Final

from rich.console import Console
from rich.text import Text

from stretto.errors import StrettoError

FAULT: Final = 2


def show_error(error: StrettoError) -> int:
    """Print what is wrong and how to put it right; returns the exit code."""
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
    return FAULT
