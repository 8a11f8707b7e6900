"""Two nodes that train together, of which one is dropped and comes back.

Nodes are launchers of torchrun's on one machine, inside a network of their own that has nothing but loopback: what
torchrun listens on is reachable from nowhere else.
"""

import dataclasses
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.fault_data import Dealt, training_words, write_signs
from bench.fault_strikes import workers_below
from stretto.errors import StrettoError
from stretto.training import EVENTS_FILE, read_events

EPOCHS: Final = 150
ENDPOINT: Final = "127.0.0.1:29400"
PATIENCE: Final = 240.0
LOST_AFTER: Final = 1.0
"""Minutes."""
PROGRESS: Final = 40
"""Lines of the record that show a group of workers at work."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodesOutcome:
    """What came of it.

    Attributes:
        workers: How many trained, one number each time that all were started.
        dealt: How often the sequences of all epochs were used.
        exit_codes: Of the node that stayed and the one that came back.
    """

    workers: tuple[int, ...]
    dealt: Dealt
    exit_codes: tuple[int, ...]


def run_two_nodes(*, tell: Callable[[str], None]) -> NodesOutcome:
    """Train on two nodes, drop one, let it come back, and count.

    Raises:
        StrettoError: If this machine does not let us have a network of our own.
    """
    tell("two nodes, one of which is dropped and comes back")
    unshare = shutil.which("unshare")
    alone = [str(unshare), "--net", "--map-root-user"]
    if unshare is None or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:  # noqa: S603
        raise StrettoError(
            "two nodes need a network of their own, and `unshare --net --map-root-user` does not give one here",
            fix="Allow user namespaces, or run without nodes.",
        )
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        command = [*alone, sys.executable, "-m", "bench.fault_nodes", place]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        answer = Path(place) / "answer.json"
        if done.returncode or not answer.exists():
            last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise StrettoError(f"two nodes did not come to an end ({last})", fix="Run again on a machine at rest.")
        values = json.loads(answer.read_text(encoding="utf-8"))
    return NodesOutcome(
        workers=tuple(values["workers"]), dealt=Dealt(**values["dealt"]), exit_codes=tuple(values["exit_codes"])
    )


def main(folder: Path) -> None:
    """Be the network of two nodes: run both, and leave the outcome in the folder."""
    _raise_loopback()
    run, data = folder / "run", write_signs(folder / "signs.npz")
    # The node that holds the meeting point must stay, as torchrun has it.
    nodes = [_start(data, run, holds=True), _start(data, run, holds=False)]
    try:
        _wait(run, nodes, workers=2)
        _drop(nodes.pop())
        _wait(run, nodes, workers=1)
        nodes.append(_start(data, run, holds=False))
        _wait(run, nodes, workers=2)
        exit_codes = tuple(node.wait(timeout=PATIENCE) for node in nodes)
    finally:
        for node in nodes:
            _drop(node)
    outcome = NodesOutcome(
        workers=tuple(group["workers"] for group in _groups(run)),
        dealt=Dealt.counted(read_events(run)),
        exit_codes=exit_codes,
    )
    (folder / "answer.json").write_text(json.dumps(dataclasses.asdict(outcome)), encoding="utf-8")


def _raise_loopback() -> None:
    import fcntl

    set_flags, up = 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh22x", b"lo", up))


def _start(data: Path, run: Path, *, holds: bool) -> "subprocess.Popen[bytes]":
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
    launcher += ["--max-restarts=9", "--rdzv-backend=c10d", f"--rdzv-endpoint={ENDPOINT}", "--rdzv-id=two-nodes"]
    launcher += [f"--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,is_host={int(holds)}"]
    launcher += ["--local-addr=127.0.0.1", "-m", "stretto"]
    words = training_words(data, run, epochs=EPOCHS, rank_timeout_minutes=LOST_AFTER)
    # With a store that launchers share, a node that came later is not told where it is (torch 2.13).
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen([*launcher, *words], env=environment)  # noqa: S603


def _drop(node: "subprocess.Popen[bytes]") -> None:
    """SIGKILL of a launcher and all its workers."""
    if node.poll() is None:
        for process in [*(worker for worker, _ in workers_below(node.pid)), node.pid]:
            os.kill(process, signal.SIGKILL)
        node.wait()


def _wait(run: Path, nodes: list["subprocess.Popen[bytes]"], *, workers: int) -> None:
    """Until a group of so many workers is well under way."""
    ends = time.monotonic() + PATIENCE
    while True:
        groups = _groups(run)
        if groups and groups[-1]["workers"] == workers and groups[-1]["lines"] >= PROGRESS:
            return
        if time.monotonic() > ends or any(node.poll() is not None for node in nodes):
            raise TimeoutError(f"waited for {workers} workers, had {groups}")
        time.sleep(0.05)


def _groups(run: Path) -> list[dict[str, Any]]:
    """The number of workers and of lines since, for each time that all were started."""
    groups: list[dict[str, Any]] = []
    path = run / EVENTS_FILE
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["event"] in {"started", "resumed"}:
            groups.append({"workers": event["world_size"], "lines": 0})
        elif groups:
            groups[-1]["lines"] += 1
    return groups


if __name__ == "__main__":
    main(Path(sys.argv[1]))
