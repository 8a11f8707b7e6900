"""Flags from dataclasses, and the console that commands print to.

tyro and the checks are imported when they are needed: `stretto --version` must not wait for torch.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from stretto.errors import StrettoError

S = TypeVar("S")


def parse(settings: type[S], words: list[str], *, prog: str, default: S | None = None) -> S:
    """Flags to settings, a dataclass whose docstring describes them; prints help or the error and exits if need be.

    `prog` is shown in front of the flags; `default` has values for those that are left out.
    """
    import tyro

    if default is None:
        return tyro.cli(settings, args=words, prog=prog)
    return tyro.cli(settings, args=words, prog=prog, default=default)


def check_flags(settings: S) -> S:
    """Check ranges as well as types; all errors are shown at once."""
    from stretto.training import validate

    values: dict[str, Any] = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}  # type: ignore[arg-type]
    return validate(type(settings), values, source="the command line")


def choose(words: list[str], choices: Mapping[str, str], *, usage: str) -> tuple[str, list[str]] | None:
    """The choice that the first word makes, and the other words; None when help was printed instead."""
    if not words or words[0].startswith("-"):
        print(f"usage: {usage}\n")
        for name, summary in choices.items():
            print(f"  {name:<16}{summary}")
        if words and words[0] in ("-h", "--help"):
            return None
        raise StrettoError("nothing to run was named", fix=f"Choose one of {', '.join(choices)}.")
    if words[0] not in choices:
        raise StrettoError(f"there is no {words[0]!r} here", fix=f"Choose one of {', '.join(choices)}.")
    return words[0], words[1:]


def take_option(words: list[str], name: str) -> tuple[Path | None, list[str]]:
    """Remove `name VALUE` or `name=VALUE` from the words."""
    for position, word in enumerate(words):
        if word.startswith(f"{name}="):
            return Path(word.partition("=")[2]), words[:position] + words[position + 1 :]
        if word == name:
            if position + 1 == len(words):
                raise StrettoError(f"{name} has no value", fix=f"Write {name} FILE.")
            return Path(words[position + 1]), words[:position] + words[position + 2 :]
    return None, words


def console_for(columns: int) -> Console:
    """The terminal; a file or pipe, which has no width of its own, is as wide as a table needs."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, columns))
