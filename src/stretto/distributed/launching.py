"""Starting several workers on this machine: torchrun, with a meeting place in a private folder instead of a port."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from stretto.distributed.joining import STORE_VARIABLE
from stretto.errors import StrettoError

MOST_PER_CORE: Final = 4


def start_workers(
    words: Sequence[str], *, workers: int, threads: int | None, restarts: int, module: str = "stretto"
) -> int:
    """Run `stretto` with `words` as several workers, and start them again when one is lost.

    Args:
        words: The command line without the program's name.
        workers: How many.
        threads: Of each worker; by default the cores are shared out.
        restarts: How often to start all again, at most.
        module: What to run instead.

    Returns:
        The exit code that the workers agreed on.

    Raises:
        StrettoError: If this machine has too few cores for that.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers > MOST_PER_CORE * cores:
        raise StrettoError(
            f"{workers} workers were asked for and there are {cores} cores",
            fix=f"Ask for {cores} workers, or start some on other machines with torchrun --nnodes.",
        )
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={workers}"),
            *(f"--max-restarts={restarts}", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file"),
            *(
                f"--rdzv-endpoint={folder}/agents",
                f"--rdzv-id={secrets.token_hex(8)}",
                "--local-addr=127.0.0.1",
                "-m",
                module,
                *words,
            ),
        ]
        environment = {
            **os.environ,
            STORE_VARIABLE: f"{folder}/workers",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": str(threads or max(1, cores // workers)),
        }
        code = _run(command, environment)
        return agreed_exit(folder=Path(folder), otherwise=code)


def leave_exit(code: int) -> int:
    """Leave word of how this worker ended; torchrun would start all again for anything but zero.

    Returns:
        The exit code for the process itself.
    """
    place = os.environ.get(STORE_VARIABLE)
    if place is None or code == 0:
        return code
    attempt, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("RANK", "0")
    Path(f"{place}-exit-{attempt}-{rank}").write_text(str(code), encoding="utf-8")
    return 0


def agreed_exit(*, folder: Path, otherwise: int) -> int:
    """The exit code that workers left word of when they were last started; without any, the launcher's own."""
    attempts = [
        int(tail) for path in folder.glob("workers-*") if (tail := path.name.removeprefix("workers-")).isdecimal()
    ]
    left = sorted(folder.glob(f"workers-exit-{max(attempts, default=0)}-*"))
    return int(left[0].read_text(encoding="utf-8")) if left else otherwise


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    # A session of its own: Ctrl-C reaches the workers once, through the launcher, and not twice.
    process = subprocess.Popen(command, env=environment, start_new_session=True)  # noqa: S603

    def pass_on(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        process.send_signal(signal.SIGTERM)

    earlier = {kind: signal.signal(kind, pass_on) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait()
    finally:
        for kind, handler in earlier.items():
            signal.signal(kind, handler)
