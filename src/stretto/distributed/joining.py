"""Joining the other workers of a run, and leaving them."""

import contextlib
import datetime as dt
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from stretto.distributed.world import World
from stretto.errors import StrettoError

STORE_VARIABLE: Final = "STRETTO_STORE"
"""Where workers on one machine meet: the beginning of file names in a private folder; nothing listens for it."""
INTERFACE_VARIABLES: Final = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
UNNAMED: Final = "none"
"""What torchrun calls a launch without --rdzv-id."""
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class LostWorker(StrettoError):  # noqa: N818
    """Another worker is gone; this one cannot go on alone, but all can be started again."""


def is_worker() -> bool:
    """Whether torchrun, or `--workers`, started this process as one of several."""
    return _number("WORLD_SIZE", 1) > 1


def is_first() -> bool:
    """Whether this process is the worker that shows and records, or alone."""
    return not is_worker() or os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def joined(*, device: str = "cpu", minutes: float = 10.0) -> Iterator[World]:
    """The workers that this process belongs to, for as long as the context lasts.

    Args:
        device: Where this worker trains; NCCL joins GPUs, gloo everything else.
        minutes: How long to wait for another worker, at the start and in every exchange, before it counts as lost.

    Raises:
        StrettoError: If the others cannot be reached, or run other versions.
    """
    restarts, launch = _number("TORCHELASTIC_RESTART_COUNT", 0), os.environ.get("TORCHELASTIC_RUN_ID", "")
    launch = "" if launch == UNNAMED else launch
    if not is_worker():
        yield World(restarts=restarts, launch=launch)
        return
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    backend = "nccl" if device.startswith("cuda") else "gloo"
    _stay_on_loopback(backend)
    waiting = dt.timedelta(minutes=minutes)
    try:
        distributed.init_process_group(
            backend, store=_store(rank, size, waiting), rank=rank, world_size=size, timeout=waiting
        )
    except (RuntimeError, ValueError, OSError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise StrettoError(
            f"rank {rank} could not meet the other {size - 1} workers at {place} ({_first_line(error)})",
            fix="Check that all were started with the same --rdzv-endpoint, that the port is free and reachable, and "
            "that as many came as --nnodes and --nproc-per-node say.",
        ) from error
    try:
        world = World(
            rank=rank,
            size=size,
            local_size=_number("LOCAL_WORLD_SIZE", size),
            restarts=restarts,
            launch=launch,
            device=device if backend == "nccl" else "cpu",
        )
        versions = f"stretto {importlib.metadata.version('stretto')}, torch {torch.__version__}"
        world.refuse_differences("the version of stretto or torch", versions, fix="Install the same on all machines.")
        yield world
    finally:
        distributed.destroy_process_group()


@contextlib.contextmanager
def lost_worker() -> Iterator[None]:
    """Turn the failure of an exchange, when another worker is gone, into a sentence."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not any(word in text for word in ("gloo", "NCCL", "onnection", "Timed out", "timed out")):
            raise
        raise LostWorker(
            f"another worker is gone or does not answer ({_first_line(error)})",
            fix="torchrun starts all again where it may (--max-restarts); otherwise go on with --resume.",
        ) from error


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise StrettoError(
            f"the variable {name} is {text!r} and must be a whole number", fix="Start workers with torchrun."
        ) from None


def _store(rank: int, size: int, waiting: dt.timedelta) -> Store:
    place = os.environ.get(STORE_VARIABLE)
    if place is not None:
        store: Store = FileStore(f"{place}-{_number('TORCHELASTIC_RESTART_COUNT', 0)}", size)
        store.set_timeout(waiting)
        return store
    # What torchrun has set up; its agent holds the store.
    made, _, _ = next(iter(rendezvous("env://", rank=rank, world_size=size, timeout=waiting)))
    return PrefixStore("stretto", made)


def _stay_on_loopback(backend: str) -> None:
    """Workers of one machine talk over loopback, unless an interface was named."""
    alone = os.environ.get("MASTER_ADDR", "localhost") in LOOPBACK or STORE_VARIABLE in os.environ
    if alone and Path("/sys/class/net/lo").exists():
        os.environ.setdefault(INTERFACE_VARIABLES[backend], "lo")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
