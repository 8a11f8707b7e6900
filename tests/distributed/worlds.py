"""Real processes that form a world, for tests: each runs one function and leaves what it returns in a file."""

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stretto.distributed.joining import STORE_VARIABLE, joined
from stretto.distributed.world import World
from stretto.errors import StrettoError

LONGEST = 120


def run_world(size: int, work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `work(world, *arguments)` returns on each of `size` ranks, as JSON has it; errors by their text."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_worker, args=(rank, size, work, str(folder), arguments), daemon=True)
        for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(LONGEST)
    assert not any(worker.is_alive() for worker in workers), "a worker hangs"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def _worker(rank: int, size: int, work: Callable[..., Any], folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), STORE_VARIABLE: f"{folder}/store"})
    answer: Any
    try:
        with joined(minutes=1.0) as world:
            answer = work(world, *arguments)
    except StrettoError as error:
        answer = f"StrettoError: {error}"
    except Exception:  # noqa: BLE001 - the test shows it
        answer = traceback.format_exc()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(answer))


def alone(world: World) -> bool:
    """Whether there is one worker only."""
    return world.size == 1
