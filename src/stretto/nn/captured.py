"""What a function of one step reads besides its arguments: tensors, modules, numbers, other functions.

    def step(h, x):                            step -- closure --> cell (a module) --> weight, bias (tensors)
        return decay * cell(x, h), h                -- globals --> decay (a number)

`capture` follows everything that the code can reach: free variables, globals that the code names, defaults, the `self`
of a method, arguments of a `functools.partial`, attributes, items. Of objects of the user's classes it follows the
attributes that some reached function names, so that a step that is a method of a large object does not depend on all of
it; code that finds attributes by other means (`getattr`, `vars`, ...) is assumed to read all of them.

What it finds is one flat list of marks, in which objects count by their class and contents and not by identity: two
closures that were made by the same code and hold things of the same kinds have equal marks, and their tensors come in
the same order. So the second one runs by what the first was compiled to, with its own tensors.
"""

import dis
import functools
import io
import sys
import weakref
from abc import ABC
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from torch import nn

from stretto.graph import GENERATORS, Attributes

MAX_MARKS: Final = 20_000
_VALUES: Final = frozenset({bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, complex, range})
_MODULE_ATTRIBUTES: Final = frozenset(nn.Module().__dict__) - {"training"}
ASSUMES_CHECKS: Final = "assume_checks_pass"
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")
_ALWAYS_READ: Final = frozenset({"forward", "backward", "setup_context", "parametrizations", ASSUMES_CHECKS})
_READS_BY_OTHER_MEANS: Final = frozenset(
    "getattr vars eval exec globals locals attrgetter __dict__ __getattribute__ asdict astuple fields deepcopy "
    "modules named_modules children named_children _modules parameters named_parameters _parameters buffers "
    "named_buffers _buffers get_parameter get_submodule get_buffer state_dict".split()
)
_NOT_CALLED_IN_STEPS: Final = frozenset(
    "__init__ __new__ __repr__ __str__ __del__ __init_subclass__ __class_getitem__ __reduce__ __reduce_ex__ "
    "__getstate__ __setstate__ __deepcopy__ __copy__ __dir__ __post_init__".split()
)
_SLOTS: Final = (MemberDescriptorType, GetSetDescriptorType)
_CONTENTS: Final = (bool, int, float, complex, str, bytes, tuple, type(None), torch.Tensor)
"""What a class has as its attributes where it does not mean them to be called."""
_NAMESPACES: Final = (SimpleNamespace, Namespace)

Where: TypeAlias = tuple[Any, str]
"""Where something was found: the way there, and its last name."""


@final
@dataclass(slots=True)
class Captured:
    """What a step reads besides its arguments.

    Attributes:
        marks: Equal for two steps that do the same with their tensors.
        tensors: Every tensor once, in the order in which they were found.
        places: Where each was found.
        changeable: Numbers, and objects that count by identity, by their index in `marks`, with where they were found.
        holders: What holds them, and may be changed by a step that does more than to compute.
        problem: Why marks cannot be relied on; empty if they can.
        assumes_checks: Whether the step, or something that it reaches, says that checks of values pass.
    """

    marks: tuple[Any, ...]
    tensors: list[torch.Tensor]
    places: list[Where]
    changeable: list[tuple[int, Where]]
    holders: list[Any]
    problem: str
    assumes_checks: bool

    def names(self) -> list[str]:
        """A name for each tensor that is a path of identifiers, as names of parameters are."""
        found: dict[str, None] = {}
        for place in self.places:
            name = base = ".".join("".join(c if c.isalnum() else "_" for c in part) for part in path(place))
            while name in found:
                name = f"{base}_{len(found)}"
            found[name] = None
        return list(found)


def path(where: Where | None) -> list[str]:
    """The names on the way to a place, the first one first."""
    names = []
    while where is not None:
        where, name = where
        names.append(name)
    return names[::-1]


def capture(step: Any) -> Captured:
    """Find all that a step can reach."""
    scope = _SCOPES.get(root := _root_of(step))
    if scope is None:
        scope = _Scope()
        if root is not None:
            _SCOPES[root] = scope
    while True:
        known = len(scope.code)
        walk = _Traversal(scope)
        problem = ""
        try:
            walk.visit(step, (None, _name_of(step)))
        except _TooMuch:
            problem = f"the step reaches more than {MAX_MARKS:,} values"
        if len(scope.code) == known or problem:  # or other functions were found, which name further attributes
            return Captured(
                tuple(walk.marks),
                walk.tensors,
                walk.places,
                walk.changeable,
                walk.holders,
                problem,
                walk.assumes_checks,
            )


@final
class _TooMuch(Exception):  # noqa: N818 - never seen by users
    pass


@final
class _Code:
    """Compiled code of a function, which is the same for all closures that are made by it; equal to itself alone."""

    __slots__ = ("attributes", "code", "globals", "reads_all")

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.globals: tuple[str, ...] = tuple(dict.fromkeys(_global_names(code)))
        self.attributes = frozenset(_all_names(code))
        self.reads_all = not _READS_BY_OTHER_MEANS.isdisjoint(self.attributes)


def _global_names(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME"}:
            yield instruction.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _global_names(inner)


def _all_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _all_names(inner)


@final
class _Scope:
    """The functions that a step was found to reach, and the attributes that any of them names."""

    __slots__ = ("attributes", "code", "reads_all")

    def __init__(self) -> None:
        self.code: set[_Code] = set()
        self.attributes: frozenset[str] = _ALWAYS_READ
        self.reads_all = False

    def add(self, code: _Code) -> None:
        self.code.add(code)
        self.attributes |= code.attributes
        self.reads_all = self.reads_all or code.reads_all


_CODE: Final[dict[int, _Code]] = {}
_SCOPES: Final["weakref.WeakKeyDictionary[Any, _Scope]"] = weakref.WeakKeyDictionary()


_CLASSES: Final["weakref.WeakKeyDictionary[type, object]"] = weakref.WeakKeyDictionary()


def _stand_in(kind: type) -> object:
    """What marks a class without keeping it alive: classes that PyTorch makes for parametrised modules hold these."""
    found = _CLASSES.get(kind)
    if found is None:
        found = _CLASSES[kind] = object()
    return found


def _code_of(code: CodeType) -> _Code:
    found = _CODE.get(id(code))
    if found is None or found.code is not code:
        if len(_CODE) > MAX_MARKS:  # functions that are compiled from text, a new one each time
            _CODE.clear()
        found = _CODE[id(code)] = _Code(code)
    return found


def _root_of(step: Any) -> Any:
    """What stays the same of a function that is made again and again."""
    while isinstance(step, (functools.partial, MethodType)):
        step = step.func if isinstance(step, functools.partial) else step.__func__
    return step.__code__ if isinstance(step, FunctionType) else type(step)


def _name_of(step: Any) -> str:
    if isinstance(step, functools.partial):
        return _name_of(step.func)
    return "self" if isinstance(step, MethodType) else getattr(step, "__name__", type(step).__name__)


@functools.cache
def _library_of(module: str) -> str:
    """ "python", "torch" or "other" for modules that were installed and not written by the user; empty for theirs."""
    root = module.partition(".")[0]
    if root in {"builtins", "numpy"}:
        return "python"
    if root in {"torch", "stretto"}:
        return "torch"
    file = getattr(sys.modules.get(module) or sys.modules.get(root), "__file__", None)
    if root == "__main__" or file is None:
        return "python" if root in sys.builtin_module_names else ""
    folders = Path(file).parts
    if "site-packages" in folders or "dist-packages" in folders:
        return "other"
    return "python" if Path(file).is_relative_to(Path(dis.__file__).parent) else ""


@final
class _Identity:
    """Something that counts by identity, because nothing is known of what is in it; it is not kept alive."""

    __slots__ = ("_number", "_thing")

    def __init__(self, thing: Any) -> None:
        self._number = id(thing)
        try:
            self._thing: Callable[[], Any] = weakref.ref(thing)
        except TypeError:
            self._thing = lambda: thing

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Identity):
            return False
        mine = self._thing()
        return mine is not None and mine is other._thing()

    def __hash__(self) -> int:
        return self._number


@final
class _Traversal:
    """One pass over all that a step reaches."""

    def __init__(self, scope: _Scope) -> None:
        self.scope = scope
        self.marks: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.places: list[Where] = []
        self.changeable: list[tuple[int, Where]] = []
        self.holders: list[Any] = []
        self.assumes_checks = False
        self.seen: dict[int, int] = {}

    def visit(self, value: Any, where: Where) -> None:
        kind = type(value)
        if kind in _VALUES:
            self.marks.append(kind)
            if kind is int:
                self._mark_changeable(value, where)
            else:
                self.marks.append(value)
        elif kind is float:
            self.marks.append(kind)
            # Equal numbers may differ in sign, and NaN equals nothing.
            self._mark_changeable(value if value and value == value else repr(value), where)  # noqa: PLR0124
        elif self._is_new(value):
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
                self.places.append(where)
                self.marks += (kind, value.shape, value.dtype, value.device, value.layout)
            else:
                self._visit_kind(value, kind, where)

    def _mark_changeable(self, mark: Any, where: Where) -> None:
        """Mark something that may be another one at every call."""
        self.changeable.append((len(self.marks), where))
        self.marks.append(mark)

    def _is_new(self, value: Any) -> bool:
        """Whether it was not visited before; otherwise its mark is the number of that visit."""
        if id(value) in self.seen:
            self.marks += ("seen", self.seen[id(value)])
            return False
        self.seen[id(value)] = len(self.seen)
        if len(self.marks) > MAX_MARKS:
            raise _TooMuch
        return True

    def _visit_kind(self, value: Any, kind: type, where: Where) -> None:  # noqa: PLR0912 - a table of cases
        if kind is FunctionType:
            # What torch.compile was given, which traces and loops alike would rather call.
            compiled = value.__dict__.get("_torchdynamo_orig_callable")
            if compiled is None:
                self._visit_function(value, where)
            else:
                self.visit(compiled, where)
        elif isinstance(value, nn.Module):
            self._visit_module(value, where)
        elif isinstance(value, (tuple, list, deque, set, frozenset)):
            self.marks += (kind, len(value))
            if isinstance(value, (list, deque, set)):
                self.holders.append(value)
            for index, item in enumerate(value):
                self.visit(item, (where, str(index)))
        elif isinstance(value, dict):
            self._visit_dictionary(value, where)
        elif kind is CellType:
            self._visit_cell(value, where)
        elif isinstance(value, type):
            self.marks.append(_stand_in(value))
            self._visit_class(value, where)
        elif isinstance(value, ModuleType):
            self.marks.append(value)
            if not _library_of(value.__name__):
                self._visit_attributes(vars(value), where, reads_all=False)
        elif isinstance(value, (Enum, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self.marks.append(value)
        elif isinstance(value, np.ndarray):
            self.marks += (kind, value.dtype.str, value.shape)
            self._mark_changeable(value.tobytes(), where)
            self.holders.append(value)
        elif isinstance(value, np.generic):
            self.marks.append(kind)
            self._mark_changeable(value.tobytes(), where)
        elif isinstance(value, (int, float, complex, str, bytes)):  # of a class of its own
            self.marks.append(kind)
            self._mark_changeable(repr(value), where)
        elif kind is slice:
            self.marks.append(kind)
            for name in ("start", "stop", "step"):
                self.visit(getattr(value, name), (where, name))
        elif not self._visit_wrapper(value, kind, where):
            self._visit_object(value, kind, where)

    def _visit_wrapper(self, value: Any, kind: type, where: Where) -> bool:
        """Follow what calls something else, and say whether this does."""
        if isinstance(value, functools.partial):
            self.marks += (kind, len(value.args))
            self.visit(value.func, where)
            for index, item in enumerate(value.args):
                self.visit(item, (where, f"args{index}"))
            self._visit_dictionary(value.keywords, where)
        elif kind is MethodType:
            self.marks.append(kind)
            self.visit(value.__self__, where)
            self.visit(value.__func__, where)
        elif kind in {BuiltinFunctionType, MethodWrapperType}:
            owner = value.__self__
            if owner is None or isinstance(owner, (ModuleType, type)):
                self.marks.append(value)
            else:
                self.marks += (kind, value.__name__)
                self.visit(owner, where)
        elif isinstance(value, property):
            self.visit(value.fget, where)
        elif isinstance(value, (staticmethod, classmethod)) or hasattr(value, "__wrapped__"):  # functools.lru_cache
            self.marks.append(kind)
            self.visit(value.__wrapped__, where)
        else:
            return False
        return True

    def _visit_function(self, function: FunctionType, where: Where) -> None:
        code = _code_of(function.__code__)
        self.marks.append(code)
        library = _library_of(function.__globals__.get("__name__", ""))
        if not library:
            if code not in self.scope.code:
                self.scope.add(code)
            names, known = code.globals, function.__globals__
            self.holders.append((known, names))
            for name in names:
                if name in known:
                    self.marks.append(name)
                    self.visit(known[name], (None, name))
            self._visit_attributes(function.__dict__, where, reads_all=False)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._visit_cell(cell, (None, name))
        if function.__defaults__ or function.__kwdefaults__:
            for index, item in enumerate(function.__defaults__ or ()):
                self.visit(item, (where, f"default{index}"))
            self._visit_dictionary(function.__kwdefaults__ or {}, where)

    def _visit_cell(self, cell: Any, where: Where) -> None:
        self.holders.append(cell)
        try:
            value = cell.cell_contents
        except ValueError:  # not given a value yet
            self.marks.append("empty")
        else:
            self.visit(value, where)

    def _visit_module(self, module: nn.Module, where: Where) -> None:
        kind = type(module)
        self.marks.append(_stand_in(kind))
        if isinstance(module, torch.jit.ScriptModule):
            self._mark_changeable(_Identity(module), where)
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                self.visit(tensor, (where, name))
            return
        reads_all = self._visit_class(kind, where)
        own = module.__dict__
        self._visit_attributes(own, where, reads_all=reads_all, without=_MODULE_ATTRIBUTES)
        for registered in (own["_parameters"], own["_buffers"], own["_modules"]):
            if registered:
                self._visit_attributes(registered, where, reads_all=reads_all)
        for name in _HOOKS:
            for hook in own[name].values():
                self.visit(hook, (where, name))

    def _visit_object(self, value: Any, kind: type, where: Where) -> None:
        library = _library_of(kind.__module__)
        if isinstance(value, GENERATORS) or (
            library == "python" and isinstance(value, Iterator) and not isinstance(value, io.IOBase)
        ):
            self.holders.append(value)
        if library == "python" and not isinstance(value, _NAMESPACES):
            self._mark_changeable(_Identity(value), where)
            return
        self.marks.append(_stand_in(kind))
        reads_all = self._visit_class(kind, where) and not isinstance(value, _NAMESPACES)
        own = getattr(value, "__dict__", None)
        slots = [name for base in kind.__mro__ for name in _slots(base)]
        if own is None and not slots:
            self._mark_changeable(_Identity(value), where)
            return
        if own is not None:
            self._visit_attributes(own, where, reads_all=reads_all)
        read = [name for name in slots if (reads_all or name in self.scope.attributes) and hasattr(value, name)]
        if read:
            self.holders.append(Attributes(value, tuple(read)))
        for name in read:
            self.marks.append(name)
            self.visit(getattr(value, name), (where, name))

    def _visit_class(self, kind: type, where: Where) -> bool:
        """Follow a class's methods and attributes; say whether all attributes of an object may be read."""
        reads_all = False
        attributes = self.scope.attributes
        for base in kind.__mro__:
            # A class that was made by calling a metaclass has the name of the metaclass's module.
            if _library_of(base.__module__) and (base is ABC or base.__module__ != ABC.__module__):
                reads_all = reads_all or base not in {object, nn.Module, torch.autograd.Function}
                continue
            plain = [n for n, v in vars(base).items() if n in attributes and isinstance(v, _CONTENTS)]
            if plain:
                self.holders.append(Attributes(base, tuple(plain)))
            for name, value in vars(base).items():
                if isinstance(value, FunctionType) and name.startswith("__"):
                    is_read = name not in _NOT_CALLED_IN_STEPS
                else:
                    is_read = name in attributes and not isinstance(value, _SLOTS)
                if is_read:
                    self.marks.append(name)
                    self.assumes_checks |= name == ASSUMES_CHECKS and bool(value)
                    self.visit(value, (where, name))
        return reads_all

    def _visit_attributes(
        self, own: dict[str, Any], where: Where, *, reads_all: bool, without: frozenset[str] = frozenset()
    ) -> None:
        self.holders.append(own)
        reads_all = reads_all or self.scope.reads_all
        attributes = self.scope.attributes
        for name, value in own.items():
            if (reads_all or name in attributes) and name not in without:
                self.marks.append(name)
                self.assumes_checks |= name == ASSUMES_CHECKS and bool(value)
                self.visit(value, (where, name))

    def _visit_dictionary(self, value: dict[Any, Any], where: Where) -> None:
        self.marks += (type(value), len(value))
        self.holders.append(value)
        for key, item in value.items():
            self.visit(key, where)
            self.visit(item, (where, str(key)))


def _slots(base: type) -> tuple[str, ...]:
    slots = base.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
