"""Workers start in milliseconds: a process that has imported PyTorch forks them from itself.

Importing PyTorch takes seconds, and a fork of a process that has done so takes none of them. Its
memory is shared too, until somebody writes to it. The fork server does nothing else: it starts no
thread, opens no window and touches no GPU, so what it forks is as good as a new process. The
command line forks it from itself, right after it has imported PyTorch (``start_here``). A program
that calls the package gets one of its own at its first worker.

A worker is a grandchild of the process that asked for it. ``ForkedProcess`` stands for it there.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from typing import Any

from embodyrl.sims.workers.messages import receive_message, send_message

_STATUS = struct.Struct("!i")


class ForkedProcess:
    """A process that the fork server started; of ``subprocess.Popen`` it has what a worker needs.

    Attributes:
        pid: of the process.
        returncode: exit code, minus the signal's number if one ended it, None while it lives.
    """

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status  # a pipe, on which the server writes how the process ended

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; returns the exit code.

        Raises:
            subprocess.TimeoutExpired: it lives longer than ``timeout`` seconds.
        """
        code = self.returncode
        if code is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            data = os.read(self._status, _STATUS.size)
            # Without an answer the server itself was killed, and its workers with it.
            code = self.returncode = _STATUS.unpack(data)[0] if data else -signal.SIGKILL
            os.close(self._status)
        return int(code)

    def kill(self) -> None:
        """Kills it, unless it has ended."""
        if self.returncode is None and not select.select([self._status], [], [], 0)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class _Server:
    """The asking side: one for a process.

    Args:
        sock: that the server listens to; it ends when this closes.
        process: of the server, which is kept from being collected.
    """

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self.sock = sock
        self.process = process
        self.owner = os.getpid()

    def start_worker(self, sock: int, log: int, environment: dict[str, str]) -> ForkedProcess:
        status, writer = os.pipe()
        try:
            message = {"path": sys.path, "folder": os.getcwd(), "environment": environment}
            send_message(self.sock, message, (sock, log, writer))
            reply, _ = receive_message(self.sock)
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(writer)
        return ForkedProcess(reply["pid"], status)


_server: _Server | None = None
_lock = threading.Lock()


def start_worker(sock: int, log: int, environment: dict[str, str]) -> ForkedProcess:
    """Starts a worker: a process that runs ``process.main`` with the socket ``sock``.

    Args:
        sock: file descriptor of the worker's end of a socket pair.
        log: file descriptor of what it writes to stdout and stderr.
        environment: its environment variables.

    Returns:
        The process, in the folder and with the ``sys.path`` of this one.
    """
    global _server
    with _lock:
        if _server is not None and _server.owner == os.getpid():
            with contextlib.suppress(OSError, EOFError):
                return _server.start_worker(sock, log, environment)
            _server.sock.close()  # it was killed
        _server = _start_apart()
        return _server.start_worker(sock, log, environment)


def start_here() -> None:
    """Makes a copy of this process the fork server.

    Call it only where nothing but imports has happened yet: a copy has no threads, whatever they
    held, and cannot use a GPU that its original has begun to use.
    """
    global _server
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        # Whatever happens in here, the copy must never go on as the command.
        try:
            signal.set_wakeup_fd(-1)
            ours.close()
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.dup2(theirs.fileno(), 3)
            theirs.detach()
            os.closerange(4, 1 << 16)
            serve(socket.socket(fileno=3))
        finally:
            os._exit(0)
    theirs.close()
    _server = _Server(ours)


def _start_apart() -> _Server:
    """A fork server in a new process, which is safe wherever this one stands."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "embodyrl.sims.workers.fork_server", str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    return _Server(ours, process)


def serve(sock: socket.socket) -> None:
    """Forks a worker for each message, and says how workers ended, until the socket closes."""
    # What a worker imports first; it must start no threads.
    importlib.import_module("embodyrl.sims.workers.process")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the business of who asked
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Both messages and the ends of workers wake the loop.
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())  # the end of a worker wakes the selector
    statuses: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(1 << 12)
                    _tell_ends(statuses)
                    continue
                try:
                    message, fds = receive_message(sock)
                except (EOFError, OSError):
                    return
                # The new process becomes a worker; this one keeps the pipe that tells its end.
                worker, log, status = fds
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    _become_worker(message, worker, log)
                statuses[pid] = status
                os.close(worker)
                os.close(log)
                send_message(sock, {"pid": pid})


def _tell_ends(statuses: dict[int, int]) -> None:
    """Writes the exit code of every worker that has ended, to its pipe of ``statuses``."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        pipe = statuses.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, _STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(pipe)


def _become_worker(message: dict[str, Any], sock: int, log: int) -> None:
    """The rest of a forked process's life."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        # Nothing may ever wait for an answer from the keyboard.
        for fd, place in ((null, 0), (log, 1), (log, 2), (os.dup(sock), 3)):
            os.dup2(fd, place)
        os.closerange(4, 1 << 16)
        # Folder, variables and imports are those of the process that asked.
        os.environ.clear()
        os.environ.update(message["environment"])
        os.chdir(message["folder"])
        sys.path[:] = message["path"]
        importlib.invalidate_caches()
        # Simulators draw from these; two new processes would not draw the same either.
        random.seed()
        importlib.import_module("numpy").random.seed()
        importlib.import_module("embodyrl.sims.workers.process").main(3)
    except BaseException:
        traceback.print_exc()  # into the log, from which the parent quotes
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
