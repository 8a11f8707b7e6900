"""One worker of `stretto bench workers`: takes some updates and writes down how long each took."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from stretto.batching.collate import collate
from stretto.batching.sampler import BucketSampler
from stretto.data.opening import open_sequences
from stretto.distributed.joining import joined
from stretto.distributed.world import World
from stretto.tasks.registry import CONFIGS, TASKS
from stretto.training.config import checked
from stretto.training.state import TrainState
from stretto.training.update import Updater

EXCHANGED: Final = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)
"""Bytes whose sum over workers is timed."""


def main(path: Path) -> None:
    """Do what the file says, and leave the answer beside it."""
    asked = json.loads(path.read_text(encoding="utf-8"))
    torch.set_num_threads(asked["threads"])
    with joined(minutes=5.0) as world:
        answer = {"updates": _updates(asked, world), "exchanges": _exchanges(world)}
        path.with_name(f"{path.stem}-{world.rank}.json").write_text(json.dumps(answer), encoding="utf-8")


def _updates(asked: dict[str, Any], world: World) -> list[dict[str, float]]:
    """Real steps, slots, seconds and seconds spent waiting, of each update but those that warm up."""
    name = asked["task"]
    data = TASKS[name].embedded_data() if asked["data"] is None else open_sequences(Path(asked["data"]))
    task = TASKS[name](checked(CONFIGS[name], {"batch_size": asked["batch_size"]}, source="the benchmark"), data)
    train = task.data.part("train")
    sampler = BucketSampler(
        train.lengths_N, batch_size=asked["batch_size"], rank=world.rank, world_size=world.size, seed=0
    )
    torch.manual_seed(0)
    state = TrainState(task.build_model(), config=task.config, steps_per_epoch=len(sampler))
    updater = Updater(task, state, world=world, stop=threading.Event())
    loader = DataLoader(train, batch_sampler=sampler, collate_fn=collate)
    found: list[dict[str, float]] = []
    while len(found) < asked["warm_up"] + asked["updates"]:
        ended = time.perf_counter()
        for batch in loader:
            waited = updater.waited
            updater.begin()
            updater.add(batch, is_last=True)
            begun, ended = ended, time.perf_counter()
            found.append(
                {
                    "steps_real": batch.num_steps,
                    "slots": batch.num_slots,
                    "seconds": ended - begun,
                    "waited": updater.waited - waited,
                }
            )
            if len(found) == asked["warm_up"] + asked["updates"]:
                break
    return found[asked["warm_up"] :]


def _exchanges(world: World) -> list[tuple[int, float]]:
    """Least seconds of a sum over workers, by bytes."""
    if world.size == 1:
        return []
    found = []
    for size in EXCHANGED:
        values = torch.zeros(size // 4)
        least = float("inf")
        for _ in range(12):
            begun = time.perf_counter()
            torch.distributed.all_reduce(values)
            least = min(least, time.perf_counter() - begun)
        found.append((size, least))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
