"""`stretto explain CELL`."""

import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final, Literal

import torch
import tyro
from rich.console import Console
from rich.text import Text
from torch import nn

import stretto.cells
from stretto.cells import Cell
from stretto.cli.flags import check_flags, parse
from stretto.errors import StrettoError
from stretto.files import write_text_atomically
from stretto.graph import Graph, GraphCell, call_cell
from stretto.kernels import Backend
from stretto.nn import RNN
from stretto.training import Count

INPUT_SIZE: Final = 64
HIDDEN_SIZE: Final = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainSettings:
    """What becomes of a cell: what leaves the time loop, what stays in it, and what a step costs.

    For example:

    * stretto explain LSTM --hidden-size 256 --svg lstm.svg
    * stretto explain my_package.cells:MyCell --set "periods=(1, 2, 4)"
    * stretto explain path/to/file.py:make_cell --json

    Attributes:
        cell: A cell of Stretto's by its name, such as LSTM, or MODULE:NAME or FILE.py:NAME for your own: a class, a
            cell, a graph, or a function that makes one. The current folder is searched for modules.
        input_size: Features of a step; left out, what the cell has or 64.
        hidden_size: Hidden units the cell is made with; left out, the class's own default or 128.
        arguments: Another argument the cell is made with, as name=value with a Python literal; may be repeated.
        backend: Auto uses generated code where possible; cpp requires it; eager runs operator by operator; torch calls
            the cell at each step.
        dtype: Of the cell's parameters.
        svg: Also write a picture to this file.
        json: Print JSON in place of the table.
    """

    cell: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CELL")]
    input_size: Count | None = None
    hidden_size: Count | None = None
    arguments: Annotated[
        tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE"), tyro.conf.UseAppendAction
    ] = ()
    backend: Backend = "auto"
    dtype: Literal["float32", "float64"] | None = None
    svg: Path | None = None
    json: bool = False


def run(words: list[str]) -> int:
    """Explain."""
    settings = check_flags(parse(ExplainSettings, words, prog="stretto explain"))
    cell = find_cell(settings)
    if settings.dtype is not None:
        cell = cell.to(getattr(torch, settings.dtype))
    rnn = RNN(cell, backend=settings.backend)
    size = settings.input_size or _input_size(rnn.cells[0]) or INPUT_SIZE
    fix = "Put the cell right, or give the --input-size that it takes."
    with _told(f"{settings.cell!r} could not do a step on {size} features", fix=fix):
        _try_step(rnn.cells[0], size)
    explanation = rnn.explain(size)
    if settings.svg is not None:
        write_text_atomically(settings.svg, explanation.svg())
    if settings.json:
        print(json.dumps(explanation.as_dict(), indent=2))
        return 0
    console = Console()
    console.print(Text(str(explanation)), soft_wrap=True)
    if settings.svg is not None:
        console.print(Text(f"\npicture    {settings.svg}"), soft_wrap=True)
    return 0


def find_cell(settings: ExplainSettings) -> nn.Module:
    """The cell that the settings name, made if need be.

    Raises:
        StrettoError: If it cannot be found, or cannot be made.
    """
    found, arguments = _named(settings.cell), _literals(settings.arguments)
    if isinstance(found, (nn.Module, Graph)):
        given = [*(["--hidden-size"] if settings.hidden_size else []), *(f"--set {name}" for name in arguments)]
        if given:
            raise StrettoError(
                f"{settings.cell!r} is made already, so that {', '.join(given)} cannot change it",
                fix="Leave that out, or name a class or a function that makes the cell.",
            )
    elif callable(found):
        found = _made(found, settings, arguments)
    cell = found.cell() if isinstance(found, Graph) else found
    if not isinstance(cell, nn.Module):
        raise StrettoError(
            f"{settings.cell!r} is no cell but of type {type(cell).__name__}",
            fix="Name a subclass of stretto.Cell, a cell, a stretto.Graph, or a function that makes one.",
        )
    return cell


def builtin_cells() -> list[str]:
    """The names of Stretto's cells."""
    values = {name: getattr(stretto.cells, name) for name in stretto.cells.__all__}
    return [name for name, value in values.items() if isinstance(value, type) and not inspect.isabstract(value)]


def _named(target: str) -> Any:
    place, colon, name = target.rpartition(":")
    if not colon:
        if target in builtin_cells():
            return getattr(stretto.cells, target)
        raise StrettoError(
            f"there is no cell called {target!r}",
            fix=f"Choose one of {', '.join(builtin_cells())}, or give your own as MODULE:NAME or FILE.py:NAME.",
        )
    if not place or not name:
        raise StrettoError(f"{target!r} names no cell", fix="Write MODULE:NAME, such as my_package.cells:MyCell.")
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    with contextlib.redirect_stdout(sys.stderr):
        found: Any = _file(Path(place)) if is_file else _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            cells = [key for key, value in vars(found).items() if isinstance(value, type) and issubclass(value, Cell)]
            there = f" There are the cells {', '.join(cells)}." if cells else ""
            raise StrettoError(f"{place!r} has no {name!r}", fix=f"Name something that it defines.{there}")
        found = getattr(found, part)
    return found


def _module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    with _told(f"the module {name!r} could not be imported", fix="Put it right; it must be importable by itself."):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise StrettoError(
                f"there is no module {name!r}",
                fix="Check the spelling, run this where the module lies, or name its file: path/to/file.py:NAME.",
            ) from error


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise StrettoError(f"there is no file {str(path)!r}", fix="Check the path; it is FILE.py:NAME.")
    # As when Python runs a file: modules that lie beside it can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    name = f"stretto_explained_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise StrettoError(f"{str(path)!r} is no Python file", fix="Name a file that ends in .py.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    with _told(f"the file {str(path)!r} could not be imported", fix="Put it right; python must be able to run it."):
        specification.loader.exec_module(module)
    return module


def _literals(words: tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise StrettoError(f"--set {word!r} sets nothing", fix="Write --set NAME=VALUE, such as --set bias=False.")
        if name in values:
            raise StrettoError(f"--set gives {name!r} twice", fix="Give it once.")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise StrettoError(
                f"the value of --set {word!r} is no Python literal",
                fix=f"Write a number, True, False, None, a tuple, or a quoted string: --set {name}=\"'text'\".",
            ) from error
    return values


def _made(maker: Any, settings: ExplainSettings, arguments: dict[str, Any]) -> Any:
    """What a class or function makes of the sizes, as far as it wants them, and of the other arguments."""
    flags = {"input_size": (settings.input_size, INPUT_SIZE), "hidden_size": (settings.hidden_size, HIDDEN_SIZE)}
    parameters = _parameters(maker)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    told = f"{settings.cell!r} takes {', '.join(takes) or 'no arguments'}"
    for name, (given, usual) in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if given is not None and name in arguments:
            raise StrettoError(f"{name} is given by {flag} and by --set", fix="Give it once.")
        if name in takes and name not in arguments:
            if given is not None or parameters[name].default is inspect.Parameter.empty:
                arguments[name] = given or usual
        elif given is not None and takes_any:
            arguments[name] = given
        elif given is not None and name == "hidden_size":
            raise StrettoError(f"{told}, and {flag} is none of them", fix="Leave it out, or use --set NAME=VALUE.")
    if unknown := [name for name in arguments if name not in takes and not takes_any]:
        raise StrettoError(f"{told}, and {', '.join(unknown)} is none of them", fix="Check the names behind --set.")
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
        and name not in arguments
    ]
    if required:
        raise StrettoError(
            f"{told}, and {', '.join(required)} is missing",
            fix="Give it with --set NAME=VALUE, or name a function without arguments that makes the cell.",
        )
    with _told(f"{settings.cell!r} could not be made", fix="Check --input-size, --hidden-size and --set."):
        return maker(**arguments)


def _parameters(maker: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(maker).parameters
    except (TypeError, ValueError):
        return {}


def _input_size(cell: nn.Module) -> int | None:
    """The features that a cell says it takes, or was made for."""
    if isinstance(cell, GraphCell):
        return cell.wiring.input_size
    args, kwargs = getattr(cell, "_init_args", ((), {}))
    given: dict[str, Any] = {}
    with contextlib.suppress(TypeError, ValueError):
        given = inspect.signature(type(cell)).bind(*args, **kwargs).arguments
    size = getattr(cell, "input_size", given.get("input_size"))
    return size if isinstance(size, int) else None


def _try_step(cell: nn.Module, input_size: int) -> None:
    state = cell.initial_state(2)  # type: ignore[operator]
    like = next((tensor for tensor in cell.parameters() if tensor.is_floating_point()), torch.zeros(()))
    with torch.no_grad():
        call_cell(cell, torch.zeros(2, input_size, dtype=like.dtype, device=like.device), state)


@contextlib.contextmanager
def _told(problem: str, *, fix: str) -> Iterator[None]:
    """Whatever the user's own code raises becomes a message that names the line."""
    try:
        yield
    except StrettoError:
        raise
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_theirs(frame.filename)]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise StrettoError(f"{problem}: {type(error).__name__}: {error}{where}", fix=fix) from error


def _is_theirs(file: str) -> bool:
    libraries = [Path(module.__file__).parent for module in (torch, importlib) if module.__file__ is not None]
    libraries.append(Path(stretto.cells.__file__).parents[1])
    return not file.startswith("<") and not any(Path(file).is_relative_to(library) for library in libraries)
