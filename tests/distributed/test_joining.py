"""Ranks that cannot meet, or must not work together: each gets an error, in time."""

import importlib.metadata
import multiprocessing
import os
import socket
from pathlib import Path

import pytest
from worlds import run_world

from quick_starts import quick_starts
from stretto.distributed import World, join_ranks
from stretto.errors import StrettoError

IN_TIME = 60.0


def _meet(rank: int, port: int, said: "multiprocessing.Queue[str]") -> None:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    try:
        with join_ranks(timeout_minutes=0.02):
            said.put("they met")
    except StrettoError as error:
        said.put(str(error))


def _alone_at(rank: int, port: int) -> str:
    context = quick_starts()
    said: multiprocessing.Queue[str] = context.Queue()
    worker = context.Process(target=_meet, args=(rank, port, said), daemon=True)
    worker.start()
    answer = said.get(timeout=IN_TIME)
    worker.join(IN_TIME)
    assert not worker.is_alive()
    return answer


def test_a_meeting_point_that_nobody_holds() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        answer = _alone_at(1, port)
    assert f"rank 1 could not meet the other 1 ranks at 127.0.0.1:{port}" in answer
    assert "--rdzv-endpoint" in answer


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = _alone_at(0, port)
    assert f"rank 0 could not meet the other 1 ranks at 127.0.0.1:{port}" in answer
    assert "port is free" in answer


@pytest.mark.parametrize(("variable", "value"), [("RANK", "first"), ("RANK", ""), ("WORLD_SIZE", "2.5")])
def test_variables_that_are_no_numbers(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(variable, value)
    with pytest.raises(StrettoError, match=f"the variable {variable} is '{value}'"), join_ranks():
        pass


def _as_an_older_release(rank: int) -> None:
    if rank == 1:
        importlib.metadata.version = lambda _: "0.0.1"


def _nothing(world: World) -> int:
    return world.size


def test_other_versions_are_refused_on_every_rank(tmp_path: Path) -> None:
    said = run_world(3, _nothing, tmp_path, prepare=_as_an_older_release)
    told = "the version of stretto or torch of rank 1 differs from that of rank 0. Install the same on all machines."
    assert said == [f"StrettoError: {told}"] * 3
