"""Starting several ranks on this machine: torchrun, with a rendezvous in a private folder instead of a port."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Final

from stretto.distributed.world import STORE_VARIABLE
from stretto.errors import StrettoError

MAX_RANKS_PER_CORE: Final = 4
STORE_NAME: Final = "ranks"


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def handle_signals(handler: Callable[[int], None]) -> Iterator[None]:
    """Call `handler` for Ctrl-C and SIGTERM; only the main thread of a program may, so that others change nothing."""

    def handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        handler(number)

    is_main = threading.current_thread() is threading.main_thread()
    earlier = {kind: signal.signal(kind, handle) for kind in (signal.SIGINT, signal.SIGTERM) if is_main}
    try:
        yield
    finally:
        for kind, before in earlier.items():
            signal.signal(kind, before)


def launch_ranks(
    words: Sequence[str],
    *,
    nproc: int,
    threads: int | None,
    max_restarts: int,
    module: str = "stretto",
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> int:
    """Run `python -m module *words` as `nproc` ranks, and restart all of them when one is lost, if that is allowed.

    Each rank has so many threads; by default the cores are divided evenly. Returns the exit code that the ranks agreed
    on. What the ranks print goes where the launcher's own goes, or as `subprocess.Popen` takes it.
    """
    cores = count_cores()
    if nproc > MAX_RANKS_PER_CORE * cores:
        raise StrettoError(
            f"{nproc} ranks were asked for and there are {cores} cores",
            fix=f"Ask for {cores} ranks, or start some on other machines with torchrun --nnodes.",
        )
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={nproc}"),
            *(f"--max-restarts={max_restarts}", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file"),
            *(f"--rdzv-endpoint={folder}/agents", f"--rdzv-id={secrets.token_hex(8)}", "--local-addr=127.0.0.1"),
            # What follows "--" is not torchrun's: it would take --nproc for one of its own flags.
            *("-m", "--", module, *words),
        ]
        environment = {
            **os.environ,
            STORE_VARIABLE: f"{folder}/{STORE_NAME}",
            # Ranks import from where the launcher does, wherever its working directory is.
            "PYTHONPATH": os.pathsep.join(place for place in sys.path if place),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": str(threads or max(1, cores // nproc)),
        }
        code = _run(command, environment, stdout=stdout, stderr=stderr)
        return _read_exit_code(Path(folder), otherwise=code)


def leave_exit_code(code: int) -> int:
    """Leave this rank's exit code in a file and exit with 0: torchrun would restart all for anything else.

    Returns:
        The exit code for the process itself.
    """
    place = os.environ.get(STORE_VARIABLE)
    if place is None or code == 0:
        return code
    attempt, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("RANK", "0")
    Path(f"{place}-exit-{attempt}-{rank}").write_text(str(code), encoding="utf-8")
    return 0


def _read_exit_code(folder: Path, *, otherwise: int) -> int:
    """The exit code that a rank of the last start left behind, or else the launcher's own."""
    starts = [path.name.removeprefix(f"{STORE_NAME}-") for path in folder.glob(f"{STORE_NAME}-*")]
    last = max((int(start) for start in starts if start.isdecimal()), default=0)
    left = sorted(folder.glob(f"{STORE_NAME}-exit-{last}-*"))
    return int(left[0].read_text(encoding="utf-8")) if left else otherwise


def _run(
    command: Sequence[str],
    environment: dict[str, str],
    *,
    stdout: int | IO[bytes] | None,
    stderr: int | IO[bytes] | None,
) -> int:
    # In a session of its own, so that Ctrl-C reaches the ranks once, through the launcher, and not twice.
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=stdout, stderr=stderr)  # noqa: S603
    with handle_signals(lambda number: process.send_signal(signal.SIGTERM)):  # noqa: ARG005
        return process.wait()
