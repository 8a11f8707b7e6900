"""The ranks of a run: joining them, and what they say to each other.

Only numbers and bytes are sent, as tensors, and nothing received is ever unpickled.
"""

import contextlib
import dataclasses
import datetime as dt
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, final

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from stretto.errors import StrettoError

STORE_VARIABLE: Final = "STRETTO_STORE"
"""Where the ranks of one machine meet: the start of file names in a private folder, so that no port is opened."""
INTERFACE_VARIABLES: Final = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
NO_LAUNCH_ID: Final = "none"
"""What torchrun calls a launch without --rdzv-id."""
LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
FIRST_PORT: Final = 15_000
NUM_PORTS: Final = 15_000
LOST_RANK_WORDS: Final = ("gloo", "NCCL", "onnection", "Timed out", "timed out")
"""What torch's errors say when another rank is gone."""
SHARED_GPU_WORDS: Final = "Duplicate GPU detected"
"""What NCCL says."""


class LostRank(StrettoError):  # noqa: N818
    """Another rank is gone; this one cannot continue alone, but all can be restarted."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All ranks, and which of them this process is. The default is a single process.

    Attributes:
        rank: This process.
        size: Number of ranks.
        local_size: Number of ranks on this machine.
        restarts: How often torchrun has restarted all ranks after losing one.
        launch: torchrun's id of this launch, the same across restarts and changes of size; may be empty.
        device: Where tensors must be to be sent.
        group: The process group; None is torch's default group.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    restarts: int = 0
    launch: str = ""
    device: str = "cpu"
    group: "distributed.ProcessGroup | None" = None

    @property
    def is_rank0(self) -> bool:
        """Whether this rank does what only one may do, such as writing files."""
        return self.rank == 0

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sums over all ranks."""
        return self.all_reduce_sum_async(values)()

    def all_reduce_sum_async(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start an all-reduce; the function returned waits for it and gives the sums."""
        if self.size == 1:
            return lambda: list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        work = distributed.all_reduce(sums, async_op=True, group=self.group)

        def wait() -> list[float]:
            if work is not None:
                work.wait()
            return [float(value) for value in sums.tolist()]

        return wait

    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, by rank; all ranks must give equally many."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(found, own, group=self.group)
        return [item.tolist() for item in found]

    def broadcast_str(self, text: str) -> str:
        """Broadcast a string from rank 0."""
        if self.size == 1:
            return text
        encoded = text.encode() if self.is_rank0 else b""
        length = torch.tensor([len(encoded)], device=self.device)
        distributed.broadcast(length, src=0, group=self.group)
        content = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if self.is_rank0 and encoded:
            content.copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
        distributed.broadcast(content, src=0, group=self.group)
        return bytes(content.tolist()).decode()

    def on_rank0(self, work: Callable[[], str]) -> str:
        """Run `work` on rank 0 and broadcast its result; a `StrettoError` is raised on every rank."""
        if self.size == 1:
            return work()
        answer: dict[str, str] = {}
        if self.is_rank0:
            try:
                answer = {"result": work()}
            except StrettoError as error:
                answer = {"problem": error.problem, "fix": error.fix}
        answer = json.loads(self.broadcast_str(json.dumps(answer)))
        if "problem" in answer:
            raise StrettoError(answer["problem"], fix=answer["fix"])
        return answer["result"]

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.all_reduce_sum([0.0])

    def require_equal(self, what: str, value: str, *, fix: str) -> None:
        """Check that all ranks have the same value, as text, of which only a digest is sent.

        On every rank, a difference is an error that names `what`, such as "the training data", and how to fix it.
        """
        digest = hashlib.sha256(value.encode()).digest()
        # Four bytes at a time are exact in a float64.
        numbers = [float(int.from_bytes(digest[at : at + 4], "big")) for at in range(0, 16, 4)]
        found = self.all_gather(numbers)
        others = [rank for rank, item in enumerate(found) if item != found[0]]
        if others:
            raise StrettoError(f"{what} of rank {', '.join(map(str, others))} differs from that of rank 0", fix=fix)


@final
class DeferredErrors:
    """Errors that occur on rank 0 alone, such as a full disk, kept until all ranks can raise them together.

    If rank 0 raised alone, the others would wait for it in their next exchange, until the time-out. A process that is
    alone raises at once.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._error: StrettoError | None = None

    @property
    def is_pending(self) -> bool:
        """Whether this rank has an error to raise."""
        return self._error is not None

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Keep a `StrettoError` of the block; the first one counts."""
        try:
            yield
        except StrettoError as error:
            if self._world.size == 1:
                raise
            self._error = self._error or error

    def raise_on_all(self) -> None:
        """Raise rank 0's error on every rank, if it has one; all ranks must call."""

        def check() -> str:
            if self._error is not None:
                raise self._error
            return ""

        self._world.on_rank0(check)


def is_distributed() -> bool:
    """Whether torchrun, srun or `--nproc` started this process as one of several ranks."""
    _read_slurm()
    return _env_int("WORLD_SIZE", 1) > 1


def is_rank0() -> bool:
    """Whether this process is rank 0, or alone; for use before the ranks are joined."""
    return not is_distributed() or os.environ.get("RANK", "0") == "0"


def _read_slurm() -> None:
    """Set torchrun's variables from those of a task of `srun`, unless they are there.

    The script of `sbatch` has variables of a task as well, but is no step that others belong to.
    """
    environment = os.environ
    is_step = "SLURM_STEP_NUM_TASKS" in environment or environment.get("ENVIRONMENT") != "BATCH"
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    given = {"RANK", "WORLD_SIZE"} & environment.keys()
    if given or not is_step or "SLURM_PROCID" not in environment or _env_int(size, 1) < 2:
        return
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    # "gpu[03-05,07],cpu1" begins with gpu03.
    first = re.match(r"([^\[,]*)(?:\[(\d+)[^]]*\]([^,]*))?", nodes)
    host = "".join(part or "" for part in first.groups()) if first else ""
    is_one_node = not {"[", ","} & set(nodes)
    # "2(x3),1" is 2, 2, 2 and 1 tasks.
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_NTASKS_PER_NODE", "")
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) or [(environment[size] if is_one_node else "1", "")]
    tasks = [int(count) for count, times in pairs for _ in range(int(times or 1))]
    places = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment[size],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks[min(_env_int("SLURM_NODEID", 0), len(tasks) - 1)]),
        "MASTER_ADDR": "127.0.0.1" if is_one_node else host,
        "MASTER_PORT": str(FIRST_PORT + (_env_int("SLURM_JOB_ID", 0) + _env_int("SLURM_STEP_ID", 0)) % NUM_PORTS),
    }
    for name, value in places.items():
        environment.setdefault(name, value)


def take_gpu(device: str) -> None:
    """Make one GPU of the machine this rank's own: "cuda" means that one from now on, in this process's main thread.

    Ranks of a machine take GPUs in their order. Where a launcher has given each rank a single GPU to see, it is that.

    Args:
        device: As torch names it; nothing is done for others than GPUs.

    Raises:
        StrettoError: There is no GPU for this rank alone.
    """
    if not device.startswith("cuda") or not is_distributed() or not torch.cuda.is_available():
        return
    rank, count = _env_int("LOCAL_RANK", _env_int("RANK")), torch.cuda.device_count()
    local_size = _env_int("LOCAL_WORLD_SIZE", _env_int("WORLD_SIZE"))
    if local_size == 1:
        torch.cuda.set_device(torch.device(device).index or 0)
        return
    if torch.device(device).index is not None:
        raise StrettoError(
            f"all {local_size} ranks of this machine were given the device {device!r}, and two cannot share a GPU",
            fix="Choose --device cuda, which gives each rank one of its own.",
        )
    # What starts ranks by --nproc shows all GPUs to each; SLURM, for one, may show each only its own.
    sees_only_its_own = count == 1 and STORE_VARIABLE not in os.environ
    if rank >= count and not sees_only_its_own:
        raise StrettoError(
            f"rank {rank} of this machine has no GPU: there {'is' if count == 1 else 'are'} {count}",
            fix=f"Start {count} {'rank' if count == 1 else 'ranks'} on this machine, or choose --device cpu.",
        )
    torch.cuda.set_device(0 if sees_only_its_own else rank)


@contextlib.contextmanager
def join_ranks(*, device: str = "cpu", timeout_minutes: float = 10.0) -> Iterator[World]:
    """Join the ranks that this process was started with, for as long as the context lasts.

    GPUs are joined by NCCL, one a rank, everything else by gloo. The time-out is for the start and for every exchange.
    Ranks that run other versions are refused.
    """
    restarts, launch = _env_int("TORCHELASTIC_RESTART_COUNT", 0), os.environ.get("TORCHELASTIC_RUN_ID", "")
    launch = "" if launch == NO_LAUNCH_ID else launch
    if not is_distributed():
        yield World(restarts=restarts, launch=launch)
        return
    rank, size = _env_int("RANK"), _env_int("WORLD_SIZE")
    backend = "nccl" if device.startswith("cuda") else "gloo"
    take_gpu(device)
    _stay_on_loopback(backend)
    timeout = dt.timedelta(minutes=timeout_minutes)
    try:
        store = _open_store(rank, size, timeout)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise StrettoError(
            f"rank {rank} could not meet the other {size - 1} ranks at {place} ({_first_line(error)})",
            fix="Check that all were started with the same --rdzv-endpoint, that the port is free and reachable, and "
            "that as many were started as --nnodes and --nproc-per-node say.",
        ) from error
    try:
        world = World(
            rank=rank,
            size=size,
            local_size=_env_int("LOCAL_WORLD_SIZE", size),
            restarts=restarts,
            launch=launch,
            device=device if backend == "nccl" else "cpu",
        )
        versions = f"stretto {importlib.metadata.version('stretto')}, torch {torch.__version__}"
        with _explain_shared_gpu():
            world.require_equal("the version of stretto or torch", versions, fix="Install the same on all machines.")
        yield world
    finally:
        distributed.destroy_process_group()


@contextlib.contextmanager
def _explain_shared_gpu() -> Iterator[None]:
    """Say it when NCCL finds, in the first exchange, that ranks share a GPU."""
    try:
        yield
    except RuntimeError as error:
        if SHARED_GPU_WORDS not in str(error):
            raise
        raise StrettoError(
            "two ranks of this machine share a GPU",
            fix="Start as many ranks as there are GPUs, let each see its own or all of them, or choose --device cpu.",
        ) from error


@contextlib.contextmanager
def detect_lost_rank() -> Iterator[None]:
    """Turn torch's error about a failed exchange into a `LostRank`."""
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error) for word in LOST_RANK_WORDS):
            raise
        raise LostRank(
            f"another rank is gone or does not answer ({_first_line(error)})",
            fix="torchrun restarts all ranks if it may (--max-restarts); otherwise continue with --resume.",
        ) from error


def _env_int(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise StrettoError(
            f"the variable {name} is {text!r} and must be an integer", fix="Start the ranks with torchrun or srun."
        ) from None


def _open_store(rank: int, size: int, timeout: dt.timedelta) -> Store:
    place = os.environ.get(STORE_VARIABLE)
    if place is not None:
        store: Store = FileStore(f"{place}-{_env_int('TORCHELASTIC_RESTART_COUNT', 0)}", size)
        store.set_timeout(timeout)
        return store
    # torchrun has set up a rendezvous; its agent holds the store.
    found, _, _ = next(iter(rendezvous("env://", rank=rank, world_size=size, timeout=timeout)))
    return PrefixStore("stretto", found)


def _stay_on_loopback(backend: str) -> None:
    """Let the ranks of one machine talk over loopback, unless the user has chosen an interface."""
    is_one_machine = os.environ.get("MASTER_ADDR", "localhost") in LOOPBACK_NAMES or STORE_VARIABLE in os.environ
    if is_one_machine and Path("/sys/class/net/lo").exists():
        os.environ.setdefault(INTERFACE_VARIABLES[backend], "lo")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
