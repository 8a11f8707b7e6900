"""Watches interpreted kernels for what the interpreter itself cannot see: races, and addresses outside of all tensors.

The interpreter runs a program's threads in lockstep and its barriers do nothing. On a GPU a program reads what another
of its threads may have written, or overwrites what another may still read, unless a barrier stands between:

    store p       load p         load p         store p       and no barrier: a race, but for two accesses at the same
    load  p       store p        ...            store p       position of tiles of one shape, which one thread makes

Programs of one launch have no barrier between them: none may touch what another writes. Those of a cooperative kernel
meet, and may touch what another wrote before a meeting that both have been at.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
import pytest

from stretto.kernels.backends.triton import kernel as triton_kernel
from stretto.kernels.backends.triton.emit import BARRIER, MEETING
from stretto.kernels.backends.triton.generate import MEET, Generated

MAY_BE_SHARED: Final = "errors"
"""Programs and threads that find an error all write the same."""


class RaceError(Exception):
    """Work on a GPU would depend on which thread is first."""


Place = tuple[tuple[int, ...], int]
"""The shape of a tile and a position in it."""


@final
@dataclass(slots=True)
class _Program:
    """What one program did since its last barrier, and how often it met others."""

    written: dict[int, Place] = field(default_factory=dict)
    read: dict[int, set[Place]] = field(default_factory=dict)
    meetings: int = 0


@final
@dataclass(slots=True)
class Watch:
    """What was seen.

    Attributes:
        accesses: How many loads and stores were looked at.
    """

    accesses: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    shared: tuple[int, int] = (0, 0)
    programs: dict[Any, _Program] = field(default_factory=dict)
    writers: dict[int, tuple[Any, int]] = field(default_factory=dict)
    readers: dict[int, dict[Any, int]] = field(default_factory=dict)

    def load(self, program: Any, places: dict[int, Place]) -> None:
        """A tile is read."""
        self._inside(places)
        own = self.programs[program]
        for at, place in places.items():
            if at in own.written:
                raise RaceError(f"program {program} reads what it wrote since its last barrier")
            writer, meetings = self.writers.get(at, (program, 0))
            if writer != program and meetings >= own.meetings:
                raise RaceError(f"program {program} reads what program {writer} wrote")
            own.read.setdefault(at, set()).add(place)
            self.readers.setdefault(at, {})[program] = own.meetings

    def store(self, program: Any, places: dict[int, Place]) -> None:
        """A tile is written."""
        self._inside(places)
        own = self.programs[program]
        for at, place in places.items():
            if self.shared[0] <= at < self.shared[1]:
                continue
            if own.written.get(at, place) != place:
                raise RaceError(f"program {program} writes again what it wrote since its last barrier")
            if own.read.get(at, set()) - {place}:
                raise RaceError(f"program {program} overwrites what it read since its last barrier")
            touched = dict(self.readers.get(at, {}))
            writer, meetings = self.writers.get(at, (program, 0))
            touched[writer] = max(meetings, touched.get(writer, 0))
            touched.pop(program, None)
            if any(meetings >= own.meetings for meetings in touched.values()):
                raise RaceError(f"program {program} writes what another program touches")
            own.written[at] = place
            self.writers[at] = program, own.meetings

    def barrier(self, program: Any) -> None:
        """All threads of a program meet."""
        self.programs[program].written.clear()
        self.programs[program].read.clear()

    def meet(self, program: Any) -> None:
        """A program arrives where it meets others."""
        self.programs[program].meetings += 1

    def launch(self) -> None:
        """Kernels run one after another."""
        self.programs.clear()
        self.writers.clear()
        self.readers.clear()

    def _inside(self, places: dict[int, Place]) -> None:
        self.accesses += 1
        if not all(any(first <= at < end for first, end in self.spans) for at in places):
            raise RaceError("an address lies outside of every tensor of the call")


def _places(pointers: Any, mask: Any) -> dict[int, Place]:
    at, kept = np.broadcast_arrays(pointers.data, mask.data)
    flat = np.flatnonzero(kept.ravel())
    shape = tuple(at.shape)
    return {int(address): (shape, int(place)) for address, place in zip(at.ravel()[flat], flat, strict=True)}


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Kernels that are interpreted meanwhile are watched.

    Raises:
        RaceError: As the cause of Triton's own error.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder, watch = interpreter.InterpreterBuilder, Watch()
    load, store, set_index = builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx
    add = builder.create_atomic_rmw
    set_dim, arguments = builder.set_grid_dim, triton_kernel.AbstractTritonKernel.arguments

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        watch.load(self.grid_idx, _places(pointers, mask))
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.store(self.grid_idx, _places(pointers, mask))
        return store(self, pointers, value, mask, *rest)

    def watched_index(self: Any, *index: int) -> None:
        watch.programs[index] = _Program()
        set_index(self, *index)

    def watched_dim(self: Any, *sizes: int) -> None:
        watch.launch()
        set_dim(self, *sizes)

    def watched_add(self: Any, operation: Any, pointers: Any, value: Any, *rest: Any) -> Any:
        if value.data.any():
            watch.meet(self.grid_idx)
        return add(self, operation, pointers, value, *rest)

    def watched_arguments(self: Any, made: Generated, *rest: Any) -> list[Any]:
        given = arguments(self, made, *rest)
        watch.spans = [
            (item.data_ptr(), item.data_ptr() + item.numel() * item.element_size())
            for item in given
            if hasattr(item, "data_ptr")
        ]
        errors = given[made.arguments.index(MAY_BE_SHARED)]
        watch.shared = (errors.data_ptr(), errors.data_ptr() + errors.numel() * errors.element_size())
        return given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", watched_load)
        patch.setattr(builder, "create_masked_store", watched_store)
        patch.setattr(builder, "create_barrier", lambda self: watch.barrier(self.grid_idx))
        patch.setattr(builder, "create_atomic_rmw", watched_add)
        patch.setattr(builder, "set_grid_idx", watched_index)
        patch.setattr(builder, "set_grid_dim", watched_dim)
        patch.setattr(triton_kernel.AbstractTritonKernel, "arguments", watched_arguments)
        yield watch


def barriers_in(source: str) -> int:
    """How many barriers and meetings a module has, those of the function that meets left out."""
    return len(_places_of_barriers(source))


def without_barrier(source: str, number: int) -> str:
    """A module's text with one of them taken out."""
    first, last = _places_of_barriers(source)[number]
    return f"{source[:first]}pass{source[last:]}"


def _places_of_barriers(source: str) -> list[tuple[int, int]]:
    found = re.finditer(f"{re.escape(BARRIER)}|{re.escape(MEETING)}", source)
    own = source.find(MEET), source.find(MEET) + len(MEET)
    return [item.span() for item in found if not own[0] <= item.start() < own[1]]
