"""Two Ray nodes on one machine, token on, by the lines of docs/scale.md: a worker on each, and the same bits."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from scale_runs import assert_same, make

from embodyrl.config import to_yaml
from embodyrl.training.runner import train

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'embodyrl[scale]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_ray]
BIN = Path(sys.executable).parent
PORTS = (
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
    "runtime-env-agent-port",
)
"""Of a node, chosen here because two of them share a machine; Ray waits 15 s for those that it chooses itself."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def cluster(tmp_path):
    """The environment of a shell that may talk to a cluster of two nodes with a core each."""
    port = free_port()
    env = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "HOME": str(tmp_path),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    sockets = tempfile.TemporaryDirectory(
        prefix="ray"
    )  # pytest's folder makes their names too long
    env |= {"RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_TMPDIR": sockets.name}
    subprocess.run(
        [BIN / "ray", "get-auth-token", "--generate"], env=env, check=True, capture_output=True
    )
    nodes = []
    try:
        for where in (
            ("--head", f"--port={port}", "--include-dashboard=false"),
            (f"--address=127.0.0.1:{port}",),
        ):
            for attempt in range(5):  # Ray gives a node 30 s to start, which a busy machine may not
                ports = [f"--{name}={free_port()}" for name in PORTS]
                command = [BIN / "ray", "start", *where, "--num-cpus=1", "--block", *ports]
                with open(tmp_path / f"node{len(nodes)}_{attempt}.log", "w") as log:
                    node = subprocess.Popen(
                        command, env=env, stdout=log, stderr=log, start_new_session=True
                    )
                if alive(node, len(nodes) + 1, env):
                    nodes.append(node)
                    break
                stop(node)
            else:
                raise AssertionError("".join(p.read_text() for p in tmp_path.glob("node*.log")))
        yield env
    finally:
        for node in reversed(nodes):
            stop(node)
        sockets.cleanup()


def stop(node: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):  # it is gone
        os.killpg(node.pid, signal.SIGTERM)
        try:
            node.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(node.pid, signal.SIGKILL)


def alive(node: subprocess.Popen, count: int, env: dict) -> bool:
    """Waits until so many nodes are alive, or the last one has given up."""
    ask = "import ray; ray.init('auto', logging_level=40); print(sum(n['Alive'] for n in ray.nodes()))"
    while node.poll() is None:
        done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True)
        if done.stdout.strip().endswith(str(count)):
            return True
        time.sleep(2)
    return False


def test_two_nodes_with_a_token_give_the_bits_of_one_process(cluster, tmp_path):
    preset = tmp_path / "preset.yaml"
    preset.write_text(to_yaml(make(tmp_path / "ray", "run.workers=2")))
    command = [
        sys.executable,
        "-m",
        "embodyrl.cli",
        "train",
        str(preset),
        "--launcher",
        "ray",
        "--ray-address",
        "auto",
    ]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(tmp_path / "ray" / "run", train(make(tmp_path / "one", "run.workers=2")))
    stranger = {**cluster, "HOME": "/nonexistent", "RAY_AUTH_TOKEN": "0" * 64}
    preset.write_text(to_yaml(make(tmp_path / "other", "run.workers=2")))
    done = subprocess.run(command, env=stranger, capture_output=True, text=True)
    assert done.returncode == 1 and "cannot be reached" in done.stderr, done.stdout + done.stderr
