"""A pool of large CPU buffers, on huge pages.

The first touch of a page costs many times what filling it again does: the system, and on a virtual machine the host
behind it, must find the page and clear it. A training step needs the same buffers as the one before, so the pool keeps
them when no tensor uses them any more.
"""

import ctypes
import math
import os
import sys
import threading
from functools import lru_cache
from typing import Any, Final, final

import torch

from stretto.kernels.ir import contiguous

HUGE_PAGE_BYTES: Final = 1 << 21
MIN_POOLED_BYTES: Final = 1 << 22
"""Smaller buffers are left to the C library, which reuses them by itself."""
SIZES_PER_OCTAVE: Final = 8
"""Sizes between two powers of two: they are rounded up, so that batches of similar sizes share buffers."""
MAX_SLACK: Final = 1.5
"""How many times larger than needed a buffer may be."""
MAX_HELD_RATIO: Final = 1.5
"""How many times the bytes that were in use at once may be held."""
PEAK_DECAY: Final = 0.999
MAX_MEMORY_SHARE: Final = 0.25
_MADV_HUGEPAGE: Final = 14
_USE_COUNT: Final = getattr(torch._C, "_storage_Use_Count", None)
UNSHARED_REFCOUNT: Final = 3
"""Python references to a storage that no one else holds: the buffer's own, and two made by asking."""


@final
class _Buffer:
    """Memory, and whether a tensor uses it."""

    __slots__ = ("size", "storage", "unused")

    def __init__(self, size: int) -> None:
        self.storage: torch.UntypedStorage = torch.UntypedStorage(size)  # type: ignore[no-untyped-call]
        self.size = size
        assert _USE_COUNT is not None
        self.unused = _USE_COUNT(self.storage._cdata)
        _advise_huge_pages(self.storage.data_ptr(), size)

    @property
    def is_free(self) -> bool:
        """Whether no tensor has it: none that a user holds, and none that waits for a backward pass."""
        assert _USE_COUNT is not None
        storage = self.storage
        return bool(_USE_COUNT(storage._cdata) == self.unused) and sys.getrefcount(storage) <= UNSHARED_REFCOUNT

    @property
    def is_intact(self) -> bool:
        """Whether it is still what it was: one may resize a storage, or share it with another process."""
        return self.storage.nbytes() == self.size and not self.storage.is_shared()


@final
class BufferPool:
    """Buffers in the order of their last use."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []
        self._lock = threading.Lock()
        self._peak_used = 0.0
        self._process = os.getpid()

    def take(self, size: int) -> torch.UntypedStorage:
        """Unused memory of at least `size` bytes."""
        with self._lock:
            if self._process != os.getpid():
                # A child's first touch would copy what its parent keeps.
                self._process, self._buffers = os.getpid(), []
            for at, buffer in enumerate(self._buffers):
                if size <= buffer.size <= MAX_SLACK * size and buffer.is_free and buffer.is_intact:
                    self._buffers.append(self._buffers.pop(at))
                    return buffer.storage
            made = _Buffer(_round_up(size))
            self._buffers.append(made)
            self._trim()
            return made.storage

    @property
    def size(self) -> int:
        """Bytes that are held, in use or not."""
        with self._lock:
            return sum(buffer.size for buffer in self._buffers)

    def _trim(self) -> None:
        """Free the least recently used buffers beyond what is needed at once, and those that were tampered with."""
        self._buffers = [buffer for buffer in self._buffers if buffer.is_intact]
        # The new one, the last, has no tensor yet.
        free = [buffer for buffer in self._buffers[:-1] if buffer.is_free]
        held = sum(buffer.size for buffer in self._buffers)
        self._peak_used = max(PEAK_DECAY * self._peak_used, held - sum(buffer.size for buffer in free))
        allowed = min(MAX_HELD_RATIO * self._peak_used, MAX_MEMORY_SHARE * _memory())
        freed = set()
        for buffer in free:
            if held <= allowed:
                break
            held -= buffer.size
            freed.add(id(buffer))
        self._buffers = [buffer for buffer in self._buffers if id(buffer) not in freed]


POOL: Final = BufferPool()


def empty(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor on the CPU."""
    size = math.prod(sizes) * dtype.itemsize
    if size < MIN_POOLED_BYTES:
        return torch.empty(sizes, dtype=dtype)
    if _USE_COUNT is None:
        # This release of torch cannot count who uses a storage.
        made = torch.empty(sizes, dtype=dtype)
        _advise_huge_pages(made.data_ptr(), size)
        return made
    return torch.empty(0, dtype=dtype).set_(POOL.take(size), 0, sizes, contiguous(sizes))


def _round_up(size: int) -> int:
    step = 1 << max(0, size.bit_length() - 1 - (SIZES_PER_OCTAVE.bit_length() - 1))
    return -(-size // step) * step


@lru_cache(maxsize=1)
def _memory() -> float:
    """Bytes of memory that the machine has."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES")) * float(os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return float(1 << 32)


@lru_cache(maxsize=1)
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _advise_huge_pages(address: int, size: int) -> None:
    advise = _madvise()
    start, end = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, (address + size) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if advise is not None and end > start:
        advise(start, end - start, _MADV_HUGEPAGE)  # advice: if it is refused, only speed is lost
