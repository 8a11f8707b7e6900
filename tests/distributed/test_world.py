"""Collectives and checks among real processes."""

from pathlib import Path
from typing import Any

import pytest
from worlds import run_world

from stretto.distributed import World
from stretto.errors import StrettoError


def _talk(world: World) -> dict[str, Any]:
    return {
        "sum": world.all_reduce_sum([world.rank + 1.0, 0.5]),
        "gather": world.all_gather([float(world.rank)]),
        "broadcast": world.broadcast_str("grüße" if world.is_rank0 else "ignored"),
        "empty": world.broadcast_str(""),
        "on rank 0": world.on_rank0(lambda: "claimed"),
        "local": world.local_size,
    }


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_gets_the_same(size: int, tmp_path: Path) -> None:
    expected = {
        "sum": [size * (size + 1) / 2, size / 2],
        "gather": [[float(rank)] for rank in range(size)],
        "broadcast": "grüße",
        "empty": "",
        "on rank 0": "claimed",
        "local": size,
    }
    assert run_world(size, _talk, tmp_path) == [expected] * size


def test_a_single_process_needs_no_others() -> None:
    world = World()
    assert world.all_reduce_sum([2.0]) == [2.0]
    assert world.all_gather([2.0]) == [[2.0]]
    assert world.broadcast_str("a") == "a"
    assert world.on_rank0(lambda: "b") == "b"
    world.require_equal("anything", "a", fix="nothing")


def _differ(world: World) -> None:
    world.require_equal("the data", "other" if world.rank == 1 else "same", fix="Give all the same.")


def _refuse(world: World) -> str:
    def work() -> str:
        raise StrettoError("the folder is taken", fix="Choose another.")

    return world.on_rank0(work)


def test_a_difference_is_an_error_on_every_rank(tmp_path: Path) -> None:
    said = run_world(3, _differ, tmp_path)
    assert said == ["StrettoError: the data of rank 1 differs from that of rank 0. Give all the same."] * 3


def test_an_error_on_rank_0_is_raised_on_every_rank(tmp_path: Path) -> None:
    assert run_world(2, _refuse, tmp_path) == ["StrettoError: the folder is taken. Choose another."] * 2
