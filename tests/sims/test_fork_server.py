"""The process that forks workers: what it starts is as good as a new process, and ends as one."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

import psutil
import pytest

from embodyrl.sims.workers import fork_server
from embodyrl.sims.workers.messages import receive_message, send_message


@pytest.fixture(scope="module", autouse=True)
def own_server():
    """A server for this module alone, which the tests may kill."""
    before, fork_server._server = fork_server._server, None
    yield
    fork_server._server = before


def start(log=None, **environment: str) -> tuple[fork_server.ForkedProcess, socket.socket]:
    """A worker, and this side of its socket."""
    ours, theirs = socket.socketpair()
    with theirs, log or tempfile.TemporaryFile() as file:
        process = fork_server.start_worker(
            theirs.fileno(), file.fileno(), {**os.environ, **environment}
        )
    ours.settimeout(30)
    return process, ours


def test_a_worker_ends_with_its_socket_and_its_exit_code_is_told() -> None:
    process, sock = start()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    sock.close()
    assert process.wait(10) == 0
    assert process.returncode == 0
    process.kill()  # that it has ended already is no matter


def test_a_worker_that_a_signal_ended_says_which() -> None:
    process, sock = start()
    with sock:
        os.kill(process.pid, signal.SIGSEGV)
        assert process.wait(10) == -signal.SIGSEGV
    process, sock = start()
    with sock:
        process.kill()
        assert process.wait(10) == -signal.SIGKILL


def test_where_the_server_was_killed_the_next_worker_gets_another() -> None:
    process, sock = start()
    assert fork_server._server is not None and fork_server._server.process is not None
    fork_server._server.process.kill()
    fork_server._server.process.wait()
    with sock:
        assert process.wait(10) == -signal.SIGKILL  # its workers go with it
    process, sock = start()
    sock.close()
    assert process.wait(10) == 0


def test_a_worker_has_the_environment_and_folder_of_now(tmp_path, monkeypatch) -> None:
    start()[1].close()  # the server stands already
    (tmp_path / "later_plugin.py").write_text(PLUGIN)
    info = tmp_path / "later_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: later-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[embodyrl.envs]\nlater_plugin = later_plugin:Env\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    drawn = []
    for _ in range(2):
        process, sock = start(EMBODYRL_TEST="now")
        with sock:
            config = {"name": "later_plugin", "config": {}, "first": 0, "threads": 1}
            send_message(sock, {"seq": 1, **config})
            reply, _ = receive_message(sock)
        text = reply["error"]["text"]
        assert f"folder {tmp_path}, variable now" in text
        drawn.append(text[text.index("drawn") :])
        process.wait(10)
    assert drawn[0] != drawn[1]  # Python's and numpy's own generators are seeded anew


PLUGIN = """
import os, random, numpy
class Env:
    class Config:
        def __init__(self):
            raise RuntimeError(f"folder {os.getcwd()}, variable {os.environ['EMBODYRL_TEST']}, "
                f"drawn {random.random()} {numpy.random.rand()}")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_command_that_forks_from_itself_leaves_no_process_behind(tmp_path) -> None:
    script = """
        import sys, torch, time
        from embodyrl.sims.workers import fork_server
        print("before", end="")  # in the buffer of stdout: it must be written once
        fork_server.start_here()
        import socket, tempfile, os
        ours, theirs = socket.socketpair()
        process = fork_server.start_worker(theirs.fileno(), tempfile.TemporaryFile().fileno(), dict(os.environ))
        print("", process.pid, flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        before, worker = process.stdout.readline().split()
        assert before == "before"
        (server,) = psutil.Process(process.pid).children()
        assert [c.pid for c in server.children()] == [int(worker)]
        process.kill()
        rest = process.stdout.read()
    assert rest == ""
    deadline = time.monotonic() + 10
    while psutil.pid_exists(server.pid) or psutil.pid_exists(int(worker)):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)
