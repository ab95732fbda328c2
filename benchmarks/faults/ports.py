"""Strangers at every port: requests with wrong, missing, doubled and broken headers.

No request may be answered with an internal error, and none may come in that is of another origin,
by another name, or without the token. In the end an honest client must be served as before.

    python -m benchmarks.faults.ports [TRIES] [SEED]
"""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import numpy as np
from websockets import Origin
from websockets.sync.client import connect

from embodyrl.config import resolve
from embodyrl.real_robot.control.clocks import RealClock
from embodyrl.real_robot.operator import OperatorPage
from embodyrl.real_robot.operator.arms_page import ArmsPage
from embodyrl.real_robot.policy_link.client import PolicyClient
from embodyrl.real_robot.policy_link.server import PolicyServer
from embodyrl.real_robot.remote.learner import RemoteActors
from embodyrl.real_robot.ros.rosbridge_server import RosbridgeServer

TOKEN = "0123456789abcdef"
METADATA = {"cameras": {}, "proprio_dim": 3, "horizon": 5, "action_dim": 2}
KINDS = ("policy server", "learner", "operator's page", "rosbridge server", "page of arms")


@contextlib.contextmanager
def ports() -> Iterator[dict[str, int]]:
    """Every kind of port of the package, opened on this machine: kind -> number."""
    infer = lambda o: {"actions": np.zeros((5, 2), np.float32)}  # noqa: E731
    policy = PolicyServer(infer, METADATA, port=0, token=TOKEN)
    threading.Thread(target=policy.serve_forever, daemon=True).start()
    run = {
        "env": {"name": "robot", "task": "reach", "cameras": [], "renderer": "none"},
        "policy": {"name": "flow_mlp", "horizon": 5, "transition": "flow_noise"},
        "algorithm": {"name": "sac_flow", "num_chunks": 4, "shared_critic": True},
        "run": {"out": "/nonexistent"},
    }
    learner = RemoteActors(resolve(run), port=0, token=TOKEN)
    page = OperatorPage(RealClock())
    bridge = RosbridgeServer(0)
    arms = ArmsPage(port=0, token=TOKEN)
    try:
        found = (policy.port, learner.port, page.port, bridge.port, arms.port)
        yield dict(zip(KINDS, found, strict=True))
    finally:
        for server in (policy, learner, page, bridge, arms):
            server.close()


def request(rng: random.Random, kind: str, port: int) -> tuple[bytes, bool | None]:
    """A request for a websocket, and whether it must be let in; None for broken HTTP."""
    here = rng.choice(("127.0.0.1", "localhost", "[::1]"))
    hosts = rng.choice(
        (
            *[[f"{here}:{port}"]] * 4,
            ["evil.example"],
            [f"evil.example:{port}"],
            [f"127.0.0.1.evil.example:{port}"],
            [f"192.168.0.7:{port}"],
            ["[::1"],
            [""],
            [],
            [f"{here}:{port}"] * 2,
            [f"{here}:{port}", "evil.example"],
        )
    )
    origins = rng.choice(
        (
            *[[]] * 3,
            *[[f"http://{here}:{port}"]] * 3,
            ["http://evil.example"],
            [f"http://{here}:{port + 1}"],
            [f"https://{here}:{port}"],
            ["null"],
            [""],
            [f"http://{here}:{port}", "http://evil.example"],
        )
    )
    tokens = rng.choice(
        (
            *[[f"Api-Key {TOKEN}"]] * 4,
            [],
            ["Api-Key wrong"],
            [f"Api-Key {TOKEN[:-1]}"],
            ["Api-Key \udcff\udcfe"],
            [f"Api-Key {TOKEN}"] * 2,
        )
    )
    # The page of several arms has two ways in: for a page, and for an arm.
    paths = {KINDS[2]: "/socket", KINDS[4]: rng.choice(("/socket", "/left"))}
    path = paths.get(kind, "/")
    words = [f"GET {path} HTTP/1.1"]
    words += [f"Host: {x}" for x in hosts] + [f"Origin: {x}" for x in origins]
    words += [f"Authorization: {x}" for x in tokens]
    words += ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    words += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
    own = hosts == [f"{here}:{port}"]
    same = origins == [f"http://{here}:{port}"]
    if path == "/socket":
        may = own and same and len(tokens) < 2  # its token is the first message
    else:
        may = own and (not origins or same) and len(tokens) < 2
        may &= kind == KINDS[3] or tokens == [f"Api-Key {TOKEN}"]
        may &= kind != KINDS[4] or not origins  # no browser is an arm
    data = ("\r\n".join(words) + "\r\n\r\n").encode(errors="surrogateescape")
    if rng.random() < 0.1:  # broken HTTP
        k = rng.randrange(len(data))
        return data[:k] + rng.randbytes(4) + data[k:], None
    return data, may


def status(port: int, data: bytes) -> int:
    """The status with which a port answers a request; 0 if it just closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20.0) as link:
        link.sendall(data)
        if b"\r\n\r\n" not in data:
            link.shutdown(socket.SHUT_WR)
        try:
            line = link.recv(64)
        except ConnectionError:
            return 0
    return int(line.split()[1]) if line.startswith(b"HTTP/1.1 ") else 0


def survive(tries: int, seed: int) -> dict[str, int]:
    """Sends requests to every port, and checks who is let in.

    Returns:
        Numbers of ``tries``, and of requests by status (0: the connection was closed).

    Raises:
        AssertionError: a wrong one was let in, an honest one refused, or a server failed.
    """
    rng = random.Random(seed)
    counts: collections.Counter[str] = collections.Counter(tries=tries, survived=tries)
    with ports() as open_ports:
        for _ in range(tries):
            kind = rng.choice(KINDS)
            data, may = request(rng, kind, open_ports[kind])
            got = status(open_ports[kind], data)
            assert got != 500, (kind, data)
            assert may is None or (got == 101) == may, (kind, got, data)
            counts[f"status {got}"] += 1
        _honest(open_ports)
    return dict(counts)


def _honest(open_ports: dict[str, int]) -> None:
    """An honest client of each port."""
    client = PolicyClient(f"127.0.0.1:{open_ports[KINDS[0]]}", TOKEN)
    assert client.connect() == METADATA
    client.close()
    secret = {"Authorization": f"Api-Key {TOKEN}"}
    with connect(
        f"ws://localhost:{open_ports[KINDS[1]]}/left", additional_headers=secret
    ) as learner:
        assert learner.recv()
    at = f"127.0.0.1:{open_ports[KINDS[2]]}"
    with connect(f"ws://{at}/socket", origin=Origin(f"http://{at}")):
        pass
    with connect(f"ws://127.0.0.1:{open_ports[KINDS[4]]}/left", additional_headers=secret) as arm:
        assert arm.recv()
    with connect(f"ws://127.0.0.1:{open_ports[KINDS[3]]}") as bridge:
        bridge.send("[")
        assert "no JSON" in str(bridge.recv())
