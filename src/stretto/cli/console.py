"""Where commands print."""

from rich.console import Console


def console_for(columns: int) -> Console:
    """The terminal; a file or pipe, which has no width of its own, is as wide as a table needs."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, columns))
