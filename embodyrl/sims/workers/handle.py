"""``Worker``: the parent's side of one worker process, which it starts, replaces and stops."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from typing import IO, Any

from embodyrl import errors
from embodyrl.env import EnvConfig
from embodyrl.errors import UserError
from embodyrl.sims.workers.fork_server import ForkedProcess, start_worker
from embodyrl.sims.workers.messages import receive_message, send_message
from embodyrl.sims.workers.process import config_to_json
from embodyrl.storage.env_spec import spec_from_json
from embodyrl.types import EnvSpec


class WorkerFault(Exception):
    """A worker died, hung, or its env raised."""


class Worker:
    """One process, with its socket, its log and the range of the pool's envs that it hosts.

    Args:
        name: registry name of the env.
        config: of the whole pool.
        low: number of the first env that it hosts.
        high: one more than that of the last.
        threads: that torch and OpenMP may use in it.
        start_timeout: seconds for starting the process and building its env.
    """

    def __init__(
        self, name: str, config: EnvConfig, low: int, high: int, threads: int, start_timeout: float
    ) -> None:
        self.name = name
        self.low = low
        self.high = high
        self.start_timeout = start_timeout
        # Its share of the envs, with the seeds that they would have in one process. Only what can
        # use a GPU opens one in a worker; the others' tensors come back on the CPU.
        device = str(config.place()) if config.uses_gpu else "cpu"
        share = {"num_envs": high - low, "seed": config.seed + low, "device": device}
        if hasattr(config, "num_workers"):
            share["num_workers"] = 1
        self.first_message = {
            "name": name,
            "config": config_to_json(config) | share,
            "first": low,
            "threads": threads,
        }
        self.expert: dict[str, Any] | None = None  # arguments of make_expert, once asked for
        self.process: ForkedProcess | None = None
        self.closed = False
        self.start()

    def start(self) -> None:
        """Starts the process and does not wait for it."""
        # Open for as long as the process lives.
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.sock, child_sock = socket.socketpair()
        environment = {"OMP_NUM_THREADS": str(self.first_message["threads"]), **os.environ}
        with child_sock:
            self.process = start_worker(child_sock.fileno(), self.log.fileno(), environment)
        self.seq = 0  # number of the last message; its answer has the same number
        self.ready = False  # whether its env is built
        self.has_memory = False  # whether it has the pool's shared memory
        self.needs_reset = True  # whether none of its envs has begun an episode
        self.started = time.monotonic()
        self.send(self.first_message)

    def wait_ready(self) -> EnvSpec | None:
        """Waits until the env is built; returns its spec the first time."""
        if self.ready:
            return None
        reply = self.receive(self.started + self.start_timeout)
        self.ready = True
        # A process that replaces another one gets the same expert.
        if self.expert is not None:
            self.send({"command": "make_expert", **self.expert})
        return spec_from_json(reply["spec"])

    def attach(self, spec: EnvSpec, horizon: int, memory: int) -> None:
        """Hands over the shared memory, by its file descriptor."""
        self.send({"command": "attach", "spec": config_to_json(spec), "horizon": horizon}, memory)
        self.has_memory = True

    def send(self, message: dict[str, Any], fd: int | None = None) -> None:
        """Sends one message; raises ``WorkerFault`` if the process is gone."""
        self.seq += 1
        try:
            self.sock.settimeout(10.0)
            send_message(self.sock, {"seq": self.seq, **message}, () if fd is None else (fd,))
        except OSError as error:
            raise self._fault(error) from None

    def receive(self, deadline: float) -> dict[str, Any]:
        """Waits for the answer to the last message.

        Raises:
            WorkerFault: the worker died, the deadline passed (it is then killed), or its env
                raised.
            UserError: the env raised one.
        """
        while True:
            try:
                self.sock.settimeout(max(0.01, deadline - time.monotonic()))
                reply, _ = receive_message(self.sock)
            except (OSError, EOFError) as error:
                raise self._fault(error) from None
            if reply["seq"] < self.seq:
                # The answer to an earlier message: its sender was interrupted, or wanted none.
                continue
            if "error" not in reply:
                return reply
            # A mistake of the user's is raised as the same kind of error here. After any other
            # error the worker has built its env anew.
            text = reply["error"]["text"]
            user_error = reply["error"]["user"]
            if user_error:
                raise getattr(errors, user_error, UserError)(text)
            self.needs_reset = True
            if not self.ready:
                raise self._fault(RuntimeError(text))
            raise WorkerFault(f"The simulator raised:\n{text}")

    def _fault(self, error: BaseException) -> WorkerFault:
        """Replaces the process by a new one; returns what happened to the old one."""
        self.kill()
        assert self.process is not None
        if isinstance(error, TimeoutError):
            what = "Its worker did not answer in time and was killed."
        elif isinstance(error, RuntimeError):
            what = str(error)
        else:
            code = self.process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            what = f"Its worker process ended ({how})."
        tail = _last_words(self.log)
        self.log.close()
        if not self.closed:
            self.start()
        return WorkerFault(f"{what} It last wrote:\n{tail}" if tail else what)

    def kill(self) -> None:
        """Kills the process, wherever it hangs, and waits until it is gone."""
        assert self.process is not None
        self.sock.close()
        self.process.kill()
        self.process.wait()


def _last_words(log: IO[bytes], length: int = 2000) -> str:
    """The end of what a process wrote, which often says why it ended.

    ``faulthandler`` writes the error first, then the stacks, then a long line with the names of all
    extension modules. That line is left out, and the text then begins with the error.
    """
    log.seek(max(0, log.seek(0, os.SEEK_END) - 32 * length))
    lines = log.read().decode(errors="replace").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("Extension modules:")).strip()
    # From the error on, or else the end.
    fatal = text.rfind("Fatal Python error")
    return text[fatal:][:length] if fatal >= 0 else text[-length:]


def stop_all(workers: list[Worker]) -> None:
    """Asks all workers to end, and kills those that have not after two seconds."""
    for worker in workers:
        worker.closed = True
        if worker.sock.fileno() >= 0:
            with contextlib.suppress(WorkerFault, OSError):
                worker.sock.settimeout(0.1)
                send_message(worker.sock, {"seq": worker.seq + 1, "command": "close"})
    deadline = time.monotonic() + 2.0
    for worker in workers:
        if worker.process is None:
            continue
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.01, deadline - time.monotonic()))
        worker.kill()
        worker.log.close()
