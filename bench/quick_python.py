"""Python processes that start in milliseconds, for benchmarks that start hundreds of them.

A server imports torch and Stretto once and then waits, with a single thread and nothing computed. A small program,
`QuickPython.program`, takes the arguments of `python -m MODULE ...`. The server runs them in a fork of itself, with the
environment, the folder and the open files of whoever called:

    whoever calls --> program  . . . socket . . .  server
                      (waits)                        |  fork
                                                  process     runs `python -m MODULE ...`

The program waits, passes signals on, and ends as the process does; if it is killed, the process is killed too. Within
the process `sys.executable` is the program, so what it starts (torchrun, and torchrun's ranks) starts in the same way.
Only the imports are saved: the code that runs is that of an ordinary start.
"""

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from stretto.errors import StrettoError

PRELOADED: Final = (
    "plotly.graph_objects",
    "plotly.io",
    "plotly.offline",
    "rapidfuzz.distance",
    "stretto.cli.main",
    "stretto.cli.report",
    "stretto.cli.train",
    "stretto.report",
    "stretto.training.trainer",
    "torch._dynamo",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.run",
    "tyro",
)
READY: Final = b"ready\n"
SOCKET: Final = "server"
STARTED: Final = "started"
MAX_REQUEST: Final = 1 << 20

PROGRAM: Final = """#!{python} -IS
import array, json, os, signal, socket, sys
PASSED_ON = {{signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}}
signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
server.connect({address!r})
request = dict(words=sys.argv[1:], environment=dict(os.environ), folder=os.getcwd(), program=os.getpid())
data = json.dumps(request).encode()
files = array.array("i", [0, 1, 2])
server.sendmsg([len(data).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
server.sendall(data)
answers = server.makefile("r")
process = int(answers.readline())
def pass_on(number, frame):
    try:
        os.kill(process, number)
    except ProcessLookupError:
        pass
for number in PASSED_ON:
    signal.signal(number, pass_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
code = int(answers.readline() or -signal.SIGKILL)
if code < 0:
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class QuickPython:
    """A server of Python processes, while its context lasts.

    Attributes:
        program: Takes the arguments that `python` takes after `-u`: `-m`, a module, and the module's arguments.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "QuickPython":
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="stretto-")))
        (self._folder / STARTED).mkdir()
        self.program = self._folder / "python"
        text = PROGRAM.format(python=sys.executable, address=str(self._folder / SOCKET))
        self.program.write_text(text, encoding="utf-8")
        self.program.chmod(stat.S_IRWXU)
        command = [sys.executable, "-m", "bench.quick_python", str(self._folder)]
        # The server ends when its input does, that is, with this process at the latest.
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
        self._stack.callback(self._stop)
        assert self._server.stdout is not None
        if self._server.stdout.readline() != READY:
            self._stack.close()
            raise StrettoError("the server of Python processes did not start", fix="Its message is above.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _stop(self) -> None:
        # Closes its input first.
        self._server.communicate()

    def processes(self) -> dict[int, int]:
        """The process behind each program that runs, by the number of the program's own process."""
        names = [path.name.partition("-") for path in (self._folder / STARTED).iterdir()]
        return {int(program): int(process) for program, _, process in names}


class _Server:
    """Accepts requests, forks, and reports how each process ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder / SOCKET))
        self._listener.listen(64)
        self._running: dict[int, tuple[socket.socket, Path]] = {}
        # A child that ends wakes the loop by a byte in this pipe.
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)

    def serve(self) -> dict[str, Any] | None:
        """Until the input is closed; in a forked process, return the request it is to run."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            for readable in (self._listener, self._woken, sys.stdin):
                selector.register(readable, selectors.EVENT_READ)
            os.write(1, READY)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is sys.stdin:
                        for process in self._running:
                            os.kill(process, signal.SIGKILL)
                        return None
                    request = self._answer(key.fileobj, selector)
                    if request is not None:
                        return request

    def _answer(self, readable: Any, selector: selectors.BaseSelector) -> dict[str, Any] | None:
        """Do what a readable file asks for; the request in a process that was forked for it, otherwise None."""
        request = None
        if readable is self._woken:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
            for connection in self._reap():
                # Of a program that is gone it was unregistered before.
                if connection in selector.get_map():
                    selector.unregister(connection)
                connection.close()
        elif readable is self._listener:
            connection, _ = self._listener.accept()
            request = self._fork(connection)
            if request is None:
                selector.register(connection, selectors.EVENT_READ)
        else:
            # The program says nothing after its request: it is gone.
            selector.unregister(readable)
            behind = [process for process, (own, _) in self._running.items() if own is readable]
            for process in behind:
                os.kill(process, signal.SIGKILL)
            if not behind:
                readable.close()
        return request

    def _reap(self) -> Iterator[socket.socket]:
        """Connections whose process has ended, after the program was told how."""
        for process, (connection, started) in list(self._running.items()):
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                del self._running[process]
                started.unlink()
                with contextlib.suppress(OSError):
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                yield connection

    def _fork(self, connection: socket.socket) -> dict[str, Any] | None:
        """Start what a program asks for; the request itself in the new process, None in the server."""
        files = array.array("i")
        with contextlib.suppress(OSError, ValueError):
            head, control, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(3 * files.itemsize))
            for _, _, data in control:
                files.frombytes(data)
            size, data = int.from_bytes(head, "big"), b""
            while len(data) < size <= MAX_REQUEST and (more := connection.recv(size - len(data))):
                data += more
            request: dict[str, Any] = json.loads(data)
            process = os.fork()
            if not process:
                connection.close()
                self._become(request, files)
                return request
            started = self._folder / STARTED / f"{request['program']}-{process}"
            started.touch()
            self._running[process] = connection, started
            connection.sendall(b"%d\n" % process)
        for number in files:
            os.close(number)
        return None

    def _become(self, request: dict[str, Any], files: "array.array[int]") -> None:
        """Take over the files, the environment and the folder of the program."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (self._listener, self._wake, self._woken, *(own for own, _ in self._running.values())):
            other.close()
        for target, number in enumerate(files):
            os.dup2(number, target)
            os.close(number)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        # As `python -m` does: the folder first, then what the variable names.
        given = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
        sys.path[:] = [request["folder"], *given, *(place for place in sys.path[1:] if place not in given)]
        sys.executable = str(self._folder / "python")


def _main(folder: Path) -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    # The collector leaves alone what the imports made, so that forks go on sharing its memory.
    gc.freeze()
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise StrettoError(f"the imports started {threads - 1} threads", fix="Leave out of PRELOADED what starts them.")
    request = _Server(folder).serve()
    if request is None:
        # Nothing is left to do, and taking all imports apart takes long.
        os._exit(0)
    words = request["words"][1:] if request["words"][:1] == ["-u"] else request["words"]
    if words[:1] != ["-m"]:
        raise StrettoError(f"cannot run {shlex.join(words)!r}", fix="Start it as `-m MODULE ...`.")
    sys.argv = words[1:]
    os._exit(_exit_code(words[1]))


def _exit_code(module: str) -> int:
    """Run a module, and what it left for the end; taking all imports apart would take longer than most runs."""
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = 0 if end.code is None else end.code
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    if not isinstance(code, int):
        print(code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code if isinstance(code, int) else 1


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
