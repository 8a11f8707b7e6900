"""Cells and models of the user's: found by MODULE:NAME or FILE.py:NAME, and made if need be."""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final

import torch
import tyro
from torch import nn

import stretto.cells
from stretto.cells import Cell
from stretto.errors import StrettoError
from stretto.graph import Graph
from stretto.signature import call_cell, initial_state
from stretto.tasks import find_task
from stretto.training import AbstractTask

INPUT_SIZE: Final = 64
DEFAULT_SIZES: Final = {"input_size": INPUT_SIZE, "hidden_size": 128}
SetFlags = Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE"), tyro.conf.UseAppendAction]


def load_module(
    target: str,
    *,
    input_size: int | None,
    hidden_size: int | None,
    arguments: Sequence[str],
    kind: str = "cell",
    input_flag: str = "--input-size",
) -> nn.Module:
    """The cell or model that the user names; a class or function is called to make it.

    Sizes are passed on if it takes them; `arguments` are NAME=VALUE with a Python literal. `kind` and `input_flag`, the
    flag that gives the input size, are for messages.

    Raises:
        StrettoError: If it cannot be found, or cannot be made.
    """
    found, values = _find(target, kind=kind), _parse_literals(arguments)
    if isinstance(found, (nn.Module, Graph)):
        given = [*(["--hidden-size"] if hidden_size else []), *(f"--set {name}" for name in values)]
        if given:
            raise StrettoError(
                f"{target!r} is made already, so that {', '.join(given)} cannot change it",
                fix=f"Leave that out, or name a class or a function that makes the {kind}.",
            )
    elif callable(found):
        sizes = {"input_size": (input_flag, input_size), "hidden_size": ("--hidden-size", hidden_size)}
        found = _construct(found, target, values, sizes=sizes, kind=kind)
    module = found.cell() if isinstance(found, Graph) else found
    if not isinstance(module, nn.Module):
        raise StrettoError(
            f"{target!r} is of type {type(module).__name__}, not a {kind}",
            fix="Name a subclass of stretto.Cell, a cell, a stretto.Graph, or a function that makes one."
            if kind == "cell"
            else "Name a cell, a torch.nn.Module, or a class or function that makes one.",
        )
    return module


def load_task(target: str | None) -> type[AbstractTask[Any]] | None:
    """A task's class by its name, or MODULE:NAME or FILE.py:NAME for one of the user's own; None if none is named."""
    if target is None:
        return None
    if ":" not in target:
        return find_task(target)
    found = _find(target, kind="task")
    if not (isinstance(found, type) and issubclass(found, AbstractTask)):
        raise StrettoError(f"{target!r} is not a task", fix="Name a subclass of stretto.training.AbstractTask.")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise StrettoError(f"the task {target!r} lacks {missing}", fix="Define what is missing.")
    if lacking := [name for name in ("name", "metric") if not isinstance(getattr(found, name, None), str)]:
        raise StrettoError(
            f"the task {target!r} has no {' and no '.join(lacking)}", fix='Give each as a text: name = "my-task".'
        )
    return found


def builtin_cells() -> list[str]:
    """The names of Stretto's cells."""
    values = {name: getattr(stretto.cells, name) for name in stretto.cells.__all__}
    return [name for name, value in values.items() if isinstance(value, type) and not inspect.isabstract(value)]


def input_size_of(cell: nn.Module) -> int | None:
    """The number of features that a cell says it takes, or was made for."""
    args, kwargs = getattr(cell, "_init_args", ((), {}))
    given: dict[str, Any] = {}
    with contextlib.suppress(TypeError, ValueError):
        given = inspect.signature(type(cell)).bind(*args, **kwargs).arguments
    size = getattr(cell, "input_size", given.get("input_size"))
    return size if isinstance(size, int) else None


def try_step(cell: nn.Module, input_size: int, *, target: str, input_flag: str) -> None:
    """One step of two sequences, to find errors of the user's cell before anything else does."""
    fix = f"Fix the cell, or give the number of features that it takes: {input_flag}."
    with user_errors(f"{target!r} could not do a step on {input_size} features", fix=fix), torch.no_grad():
        call_cell(cell, draw((2, input_size), like=cell), initial_state(cell, 2))


def draw(sizes: Sequence[int], *, like: nn.Module) -> torch.Tensor:
    """Normal numbers, always the same, in the dtype and on the device of a module's parameters."""
    parameter = next((one for one in like.parameters() if one.is_floating_point()), torch.zeros(()))
    drawn = torch.randn(*sizes, generator=torch.Generator().manual_seed(0))
    return drawn.to(parameter.device, parameter.dtype)


@contextlib.contextmanager
def user_errors(problem: str, *, fix: str) -> Iterator[None]:
    """Turn whatever the user's own code raises into a message that names the line."""
    try:
        yield
    except StrettoError:
        raise
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise StrettoError(f"{problem}: {type(error).__name__}: {error}{where}", fix=fix) from error


def _is_users(file: str) -> bool:
    libraries = [Path(module.__file__).parent for module in (torch, importlib) if module.__file__ is not None]
    libraries.append(Path(stretto.cells.__file__).parents[1])
    standard = Path(inspect.__file__).parent
    if Path(file).is_relative_to(standard) and "site-packages" not in Path(file).parts:
        return False
    return not file.startswith("<") and not any(Path(file).is_relative_to(library) for library in libraries)


def _find(target: str, *, kind: str) -> Any:
    place, colon, name = target.rpartition(":")
    if not colon:
        if target in builtin_cells():
            return getattr(stretto.cells, target)
        raise StrettoError(
            f"there is no cell called {target!r}",
            fix=f"Choose one of {', '.join(builtin_cells())}, or give your own as MODULE:NAME or FILE.py:NAME.",
        )
    if not place or not name:
        raise StrettoError(f"{target!r} names no {kind}", fix="Write MODULE:NAME, such as my_package.cells:MyCell.")
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    with contextlib.redirect_stdout(sys.stderr):
        found: Any = _import_file(Path(place)) if is_file else _import_module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            cells = [key for key, value in vars(found).items() if isinstance(value, type) and issubclass(value, Cell)]
            there = f" There are the cells {', '.join(cells)}." if cells else ""
            raise StrettoError(f"{place!r} has no {name!r}", fix=f"Name something that it defines.{there}")
        found = getattr(found, part)
    return found


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    with user_errors(f"the module {name!r} could not be imported", fix="Fix it; it must be importable by itself."):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise StrettoError(
                f"there is no module {name!r}",
                fix="Check the spelling, run this in the module's folder, or name its file: path/to/file.py:NAME.",
            ) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise StrettoError(f"there is no file {str(path)!r}", fix="Check the path; it is FILE.py:NAME.")
    # As when Python runs a file: modules beside it can be imported.
    sys.path.insert(0, str(path.resolve().parent))
    name = f"stretto_loaded_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise StrettoError(f"{str(path)!r} is not a Python file", fix="Name a file that ends in .py.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    with user_errors(f"the file {str(path)!r} could not be imported", fix="Fix it; python must be able to run it."):
        specification.loader.exec_module(module)
    return module


def _parse_literals(words: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise StrettoError(
                f"--set {word!r} is not NAME=VALUE", fix="Write --set NAME=VALUE, such as --set bias=False."
            )
        if name in values:
            raise StrettoError(f"--set gives {name!r} twice", fix="Give it once.")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise StrettoError(
                f"the value of --set {word!r} is not a Python literal",
                fix=f"Write a number, True, False, None, a tuple, or a quoted string: --set {name}=\"'text'\".",
            ) from error
    return values


def _construct(
    maker: Any,
    target: str,
    arguments: dict[str, Any],
    *,
    sizes: Mapping[str, tuple[str, int | None]],
    kind: str,
) -> Any:
    """Call a class or function with the sizes, as far as it takes them, and the other arguments.

    `sizes` has the flag and value of each size; `target` and `kind` are for messages.
    """
    accepted = inspect.Signature()
    with contextlib.suppress(TypeError, ValueError):
        accepted = inspect.signature(maker)
    parameters = accepted.parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    signature = f"{target!r} takes {', '.join(takes) or 'no arguments'}"
    for name, (flag, given) in sizes.items():
        if given is not None and name in arguments:
            raise StrettoError(f"{name} is given by {flag} and by --set", fix="Give it once.")
        if name in takes and name not in arguments:
            if given is not None or parameters[name].default is inspect.Parameter.empty:
                arguments[name] = given or DEFAULT_SIZES[name]
        elif given is not None and takes_any:
            arguments[name] = given
        elif given is not None and name == "hidden_size":
            raise StrettoError(f"{signature}, and {flag} is none of them", fix="Leave it out, or use --set NAME=VALUE.")
    try:
        accepted.bind(**arguments)
    except TypeError as error:
        raise StrettoError(
            f"{signature}: {error}",
            fix=f"Give each with --set NAME=VALUE, or name a function without arguments that makes the {kind}.",
        ) from error
    flags = [flag for flag, _ in sizes.values()]
    with user_errors(f"{target!r} could not be made", fix=f"Check {', '.join(flags)} and --set."):
        return maker(**arguments)
