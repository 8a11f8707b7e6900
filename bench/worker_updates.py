"""One worker of `stretto bench workers`: takes some updates and writes down how long each took."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader

from bench.samplers import Draw, contestants
from stretto.batching import Batch, BucketSampler, collate
from stretto.data import SequenceSet, open_sequences
from stretto.distributed import World, join_ranks
from stretto.tasks import CONFIGS, TASKS
from stretto.training import TrainState, Updater, checked

EXCHANGED: Final = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)
"""Bytes whose sum over workers is timed."""


def main(path: Path) -> None:
    """Do what the file says, and leave the answer beside it."""
    asked = json.loads(path.read_text(encoding="utf-8"))
    torch.set_num_threads(asked["threads"])
    with join_ranks(timeout_minutes=5.0) as world:
        answer = {"updates": _updates(asked, world), "exchanges": _exchanges(world)}
        rank = asked["rank"] if world.size == 1 else world.rank
        path.with_name(f"{path.stem}-{rank}.json").write_text(json.dumps(answer), encoding="utf-8")


def _updates(asked: dict[str, Any], world: World) -> list[dict[str, float]]:
    """Real steps, slots, seconds and seconds spent waiting, of each update but those that warm up."""
    name = asked["task"]
    data = TASKS[name].embedded_data() if asked["data"] is None else open_sequences(Path(asked["data"]))
    task = TASKS[name](checked(CONFIGS[name], {"batch_size": asked["batch_size"]}, source="the benchmark"), data)
    train = task.data.part("train")
    torch.manual_seed(0)
    state = TrainState(task.build_model(), config=task.config, steps_per_epoch=asked["warm_up"] + asked["updates"])
    updater = Updater(task, state, world=world, stop=threading.Event())
    batches = _batches(asked, train, world)
    found: list[dict[str, float]] = []
    ended = time.perf_counter()
    while len(found) < asked["warm_up"] + asked["updates"]:
        batch = next(batches)
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
    return found[asked["warm_up"] :]


def _batches(asked: dict[str, Any], train: SequenceSet, world: World) -> Iterator[Batch]:
    """Batches of this worker without end: of our sampler, or of a contestant's, epoch after epoch."""
    # A process that trains beside others without exchanging anything takes its share all the same.
    rank, size = (asked["rank"], asked["size"]) if world.size == 1 else (world.rank, world.size)
    epoch = 0
    while True:
        if asked["sampler"] is None:
            ours = BucketSampler(train.lengths_N, batch_size=asked["batch_size"], rank=rank, world_size=size, seed=0)
            ours.set_epoch(epoch)
            dealt = list(ours)
        else:
            (sampler,) = (one for one in contestants() if one.name == asked["sampler"])
            lengths_N = train.lengths_N.astype(np.int64)
            draw = Draw(
                max_padded_steps=max(round(asked["batch_size"] * float(lengths_N.mean())), int(lengths_N.max())),
                num_buckets=asked["num_buckets"],
                seed=0,
                epoch=epoch,
                rank=rank,
                world_size=size,
            )
            dealt = list(sampler.batches(lengths_N, draw))
            # Not all deal equally many batches to all workers.
            dealt = dealt[: int(min(row[0] for row in world.all_gather([float(len(dealt))])))]
        yield from DataLoader(train, batch_sampler=dealt, collate_fn=collate)
        epoch += 1


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
