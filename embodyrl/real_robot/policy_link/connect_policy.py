"""Connects to a policy: served in this process, in a process of its own, or on another machine."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError
from embodyrl.real_robot.parsing import MessageError
from embodyrl.real_robot.policy_link.client import PolicyClient
from embodyrl.real_robot.policy_link.metadata import check_metadata
from embodyrl.real_robot.policy_link.server import PolicyServer


@contextmanager
def serve_here(policy: Any) -> Iterator[PolicyClient]:
    """Serves a policy in a thread of this process, and connects to it.

    Args:
        policy: has ``infer`` and ``metadata``.
    """
    token = secrets.token_hex(16)
    server = PolicyServer(policy.infer, policy.metadata, port=0, token=token)
    thread = threading.Thread(target=server.serve_forever, name="server", daemon=True)
    thread.start()
    try:
        with _connected(f"127.0.0.1:{server.port}", token) as client:
            yield client
    finally:
        server.close()
        thread.join(timeout=5.0)


@contextmanager
def serve_apart(
    path: str,
    device: str = "auto",
    seed: int = 0,
    patience: float = 180.0,
    options: Sequence[str] = (),
) -> Iterator[PolicyClient]:
    """Serves a checkpoint's policy in a process of its own, and connects to it.

    Python code of the policy then never delays the control loop.

    Args:
        path: a checkpoint, or a run's folder.
        device: of the policy.
        seed: of the policy's noise.
        patience: s that the process may take to start.
        options: further ones of ``embodyrl serve``.

    Raises:
        UserError: it cannot be served.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The token goes through a file that only this user can read, not through the command line.
        token = Path(folder) / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(16))
        output = Path(folder) / "output"
        process = _start_server(path, device, seed, token, output, options)
        try:
            address = _address_of(process, output, path, patience)
            with _connected(address, token.read_text()) as client:
                yield client
        finally:
            process.terminate()
            try:
                process.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start_server(
    path: str, device: str, seed: int, token: Path, output: Path, more: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Starts ``embodyrl serve`` at a free port."""
    options = {"--port": 0, "--token-file": token, "--device": device, "--seed": seed}
    words = [str(word) for option in options.items() for word in option]
    with output.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "embodyrl.cli", "serve", str(path), *words, *more],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            # Ctrl-C goes to the control loop alone; it needs the policy until the arm is at rest.
            start_new_session=True,
        )


def _address_of(process: subprocess.Popen[bytes], output: Path, path: str, patience: float) -> str:
    """HOST:PORT, once the server has printed it.

    Raises:
        UserError: the server ended, or did not start in time.
    """
    end = time.monotonic() + patience
    while not (found := re.search(r"ws://(\S+)", output.read_text())):
        if process.poll() is not None or time.monotonic() > end:
            from embodyrl.starting import is_step  # a robot's computer has not this module

            # What it said of its own steps is not the reason.
            lines = output.read_text().strip().splitlines()
            said = "\n".join(line for line in lines if not is_step(line))[-2000:]
            raise UserError(f"The policy of {path} cannot be served. {said}")
        time.sleep(0.05)
    return found[1]


@contextmanager
def serve_elsewhere(address: str, token: str) -> Iterator[PolicyClient]:
    """Connects to a policy that another machine serves.

    Raises:
        ServerError: there is no such server, or it wants another token.
        UserError: the server does not say all that a robot needs to know.
    """
    with _connected(address, token) as client:
        try:
            check_metadata(client.metadata)
        except MessageError as error:
            raise UserError(
                f"What the policy server at {address} says about its policy cannot be used, so its "
                f"actions cannot be carried out: {error}. Serve the policy by embodyrl serve."
            ) from error
        yield client


@contextmanager
def _connected(address: str, token: str) -> Iterator[PolicyClient]:
    client = PolicyClient(address, token, timeout=60.0)
    try:
        client.connect()
        yield client
    finally:
        client.close()
