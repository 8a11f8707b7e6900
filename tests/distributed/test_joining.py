"""Ranks that cannot meet, or must not work together: each gets an error, in time."""

import importlib.metadata
import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed
from worlds import run_world

from quick_starts import quick_starts
from stretto.distributed import World, is_distributed, join_ranks, take_gpu
from stretto.distributed.world import STORE_VARIABLE
from stretto.errors import StrettoError


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
    worker.join()
    assert worker.exitcode == 0
    return said.get()


@pytest.mark.parametrize(
    ("rank", "is_in_use", "remedy"),
    [(1, False, "--rdzv-endpoint"), (0, True, "port is free")],
    ids=["no store", "port"],
)
def test_a_rank_that_cannot_meet_the_others(rank: int, is_in_use: bool, remedy: str) -> None:
    """Rank 1 finds nobody at the port; rank 0 finds it in use."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        if is_in_use:
            bound.listen()
        port = bound.getsockname()[1]
        answer = _alone_at(rank, port)
    assert f"rank {rank} could not meet the other 1 ranks at 127.0.0.1:{port}" in answer
    assert remedy in answer


@pytest.mark.parametrize(("variable", "value"), [("RANK", "first"), ("RANK", ""), ("WORLD_SIZE", "2.5")])
def test_variables_that_are_no_numbers(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(variable, value)
    with pytest.raises(StrettoError, match=f"the variable {variable} is '{value}'"), join_ranks():
        pass


STEP = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "gpu[03-05,07]-a,cpu1", "SLURM_JOB_ID": "40001",
}  # fmt: skip
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("5", "7", "1", "2", "gpu03-a", "25001")),
        ({"SLURM_NODEID": "3", "SLURM_STEP_ID": "2"}, ("5", "7", "1", "1", "gpu03-a", "25003")),
        ({"MASTER_ADDR": "head", "MASTER_PORT": "9"}, ("5", "7", "1", "2", "head", "9")),
        ({"SLURM_STEP_NODELIST": "n1,n2"}, ("5", "7", "1", "2", "n1", "25001")),
        ({"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "7"}, ("5", "7", "1", "7", "127.0.0.1", "25001")),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ("0", "2", None, None, None, None)),
        ({"SLURM_STEP_NUM_TASKS": "1"}, (None,) * 6),
        ({"SLURM_PROCID": None}, (None,) * 6),
        # The variables of a task that are documented longest.
        (
            {"SLURM_STEP_NUM_TASKS": None, "SLURM_STEP_TASKS_PER_NODE": None, "SLURM_STEP_NODELIST": None}
            | {"SLURM_NODELIST": "n[1-7]"},
            ("5", "7", "1", "1", "n1", "25001"),
        ),
        # The script of sbatch, in which there is no step.
        ({"SLURM_STEP_NUM_TASKS": None, "ENVIRONMENT": "BATCH"}, (None,) * 6),
        ({"ENVIRONMENT": "BATCH"}, ("5", "7", "1", "2", "gpu03-a", "25001")),
    ],
)
def test_tasks_of_srun_are_ranks(
    changes: dict[str, str | None], expected: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Patched as a whole, so that what is set is gone afterwards.
    given = {name: value for name, value in {**STEP, **changes}.items() if value is not None}
    monkeypatch.setattr(os, "environ", given)
    assert is_distributed() == (expected[0] is not None)
    assert tuple(given.get(name) for name in PLACES) == expected


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_NODEID"])
def test_variables_of_srun_that_are_no_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", STEP | {name: "many"})
    with pytest.raises(StrettoError, match=f"the variable {name} is 'many'"):
        is_distributed()


def _as_an_older_release(rank: int) -> None:
    if rank == 1:
        importlib.metadata.version = lambda _: "0.0.1"


def _nothing(world: World) -> int:
    return world.size


def test_other_versions_are_refused_on_every_rank(tmp_path: Path) -> None:
    said = run_world(3, _nothing, tmp_path, prepare=_as_an_older_release)
    message = "the version of stretto or torch of rank 1 differs from that of rank 0. Install the same on all machines."
    assert said == [f"StrettoError: {message}"] * 3


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Says that there are GPUs, and how this rank was started; the list has the GPU that it made its own."""

    def put(count: int, **places: str) -> list[int]:
        taken: list[int] = []

        def take(device: torch.device | int) -> None:
            taken.append(device if isinstance(device, int) else device.index or 0)

        monkeypatch.setattr(os, "environ", {"RANK": "5", "WORLD_SIZE": "8", **places})
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", take)
        return taken

    return put


@pytest.mark.parametrize(
    ("count", "device", "places", "expected"),
    [
        (4, "cuda", {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, [1]),
        (8, "cuda", {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", STORE_VARIABLE: "/place"}, [3]),
        # SLURM shows each task its own.
        (1, "cuda", {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, [0]),
        # Alone on its machine, a rank may choose.
        (4, "cuda:2", {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, [2]),
        (4, "cpu", {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, []),
        (4, "cuda", {"WORLD_SIZE": "1"}, []),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(
    count: int, device: str, places: dict[str, str], expected: list[int], gpus: Callable[..., list[int]]
) -> None:
    """By stand-ins: no GPU is needed, and none was ever used."""
    taken = gpus(count, **places)
    take_gpu(device)
    assert taken == expected


@pytest.mark.parametrize(
    ("count", "device", "places", "problem"),
    [
        (2, "cuda", {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}, r"rank 2 .* has no GPU: there are 2. Start 2 ranks"),
        (
            1,
            "cuda",
            {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", STORE_VARIABLE: "/place"},
            r"there is 1. Start 1 rank ",
        ),
        (2, "cuda:1", {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, r"'cuda:1', and two cannot share.*--device cuda,"),
    ],
)
def test_a_rank_without_a_gpu_of_its_own(
    count: int, device: str, places: dict[str, str], problem: str, gpus: Callable[..., list[int]]
) -> None:
    taken = gpus(count, **places)
    with pytest.raises(StrettoError, match=problem):
        take_gpu(device)
    assert taken == []


@pytest.mark.parametrize(("device", "backend"), [("cuda", "nccl"), ("cpu", "gloo")])
def test_gpus_are_joined_by_nccl_and_processors_by_gloo(
    device: str, backend: str, gpus: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken = gpus(2, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    monkeypatch.setitem(os.environ, STORE_VARIABLE, str(tmp_path / "store"))
    joined: list[str] = []
    monkeypatch.setattr(distributed, "init_process_group", lambda name, **_: joined.append(name))
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: joined.append("left"))
    monkeypatch.setattr(World, "require_equal", lambda *_, **__: None)
    with join_ranks(device=device) as world:
        assert world.device == device
    assert joined == [backend, "left"]
    assert taken == ([1] if device == "cuda" else [])


def test_ranks_that_share_a_gpu_are_told(gpus: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL finds in the first exchange."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(
            "NCCL error: invalid usage\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 10"
        )

    gpus(1, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    monkeypatch.setattr(distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr("stretto.distributed.world._open_store", lambda *_: None)
    monkeypatch.setattr(World, "require_equal", fail)
    with (
        pytest.raises(StrettoError, match=r"two ranks of this machine share a GPU\. Start as many"),
        join_ranks(device="cuda"),
    ):
        pass
