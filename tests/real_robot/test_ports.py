"""Who may come in at every port: tokens, names of this machine, pages of other sites."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from websockets.datastructures import Headers

from benchmarks.faults import ports as faults
from embodyrl.errors import UserError
from embodyrl.real_robot.commands.tokens import read_token
from embodyrl.real_robot.ports import foreign, is_loopback, listen, refuse_strangers, require_strong

MACHINE = socket.gethostname().lower()


def test_strangers_at_every_port_are_refused_and_no_request_breaks_a_server() -> None:
    counts = faults.survive(200, seed=1)
    assert counts["status 101"] > 10 and counts["status 403"] > 50 and counts["status 400"] > 20


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.0.7", "robot.example"])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(UserError, match="Give a token"):
        refuse_strangers(host, "")
    with pytest.raises(UserError, match="Give a token"):
        listen(lambda c: None, host, 0, what="It")
    refuse_strangers(host, "0123456789abcdef")
    for own in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        refuse_strangers(own, "")


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("secret", "has 6 characters"),
        ("0123456789abcde", "has 15 characters"),
        ("0123456789 abcdef", "holds a space"),
        ("0123456789abcdéf", "holds a space or another character"),
        ("0123456789abcde\n", "holds a space or another"),
    ],
)
def test_a_token_that_could_be_guessed_or_not_be_sent_is_refused(
    token: str, words: str, tmp_path: Path
) -> None:
    for host in ("0.0.0.0", "127.0.0.1"):
        with pytest.raises(UserError, match=f"The token {words}.*openssl rand -hex 16"):
            listen(lambda c: None, host, 0, what="It", token=token)
    # A file as every command reads it: what is around the token does not count.
    (tmp_path / "token").write_text(f"{token}\n")
    if token.strip() == token:
        with pytest.raises(UserError, match=f"The token in .*token {words}"):
            read_token(str(tmp_path / "token"))
    require_strong("0123456789abcdef")
    (tmp_path / "token").write_text(" 0123456789abcdef\n")
    assert read_token(str(tmp_path / "token")) == "0123456789abcdef"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"  \n"])
def test_a_file_without_a_token_is_refused_in_words(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(UserError, match=r"openssl rand -hex 16 > .*token"):
        read_token(str(tmp_path / "token"))
    with pytest.raises(UserError, match="There is no token in"):
        read_token(str(tmp_path))


@pytest.mark.parametrize(
    ("listens", "called", "origin", "status"),
    [
        ("127.0.0.1", "127.0.0.1:8000", None, 0),
        ("127.0.0.1", "localhost:9000", None, 0),  # through an ssh tunnel
        ("127.0.0.1", "[::1]:8000", "http://[::1]:8000", 0),
        ("127.0.0.1", "localhost:8000", "http://localhost:8000", 0),
        (
            "127.0.0.1",
            "localhost:8000",
            "http://localhost:8888",
            403,
        ),  # another page of this machine
        ("127.0.0.1", "localhost:8000", "http://evil.example", 403),
        ("127.0.0.1", "localhost:8000", "null", 403),
        ("127.0.0.1", "evil.example:8000", "http://evil.example:8000", 403),  # DNS rebinding
        ("127.0.0.1", f"{MACHINE}:8000", None, 403),
        ("127.0.0.1", "10.0.0.2:8000", None, 403),
        ("127.0.0.1", "[::1", None, 403),
        ("0.0.0.0", "10.0.0.2:8000", None, 0),
        ("0.0.0.0", f"{MACHINE}:8000", None, 0),
        ("0.0.0.0", "evil.example:8000", "http://evil.example:8000", 403),
        ("gpu.example", "gpu.example:8000", None, 0),
        ("gpu.example", "GPU.example:8000", None, 0),
    ],
)
def test_host_and_origin_must_be_the_port_itself(
    listens: str, called: str, origin: str | None, status: int
) -> None:
    headers = Headers({"Host": called} | ({} if origin is None else {"Origin": origin}))
    refused = foreign(headers, listens)
    assert (refused[0] if refused else 0) == status
    if refused:
        assert refused[1].endswith(".\n") and "Traceback" not in refused[1]


def test_a_port_in_use_is_named() -> None:
    with pytest.raises(UserError, match=r"cannot listen at 127\.0\.0\.1:99999"):
        listen(lambda c: None, "127.0.0.1", 99999, what="It")


def test_a_client_whose_handler_fails_is_told_nothing_but_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    import threading

    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    def fail(_: Any) -> None:
        raise RuntimeError("secret detail")

    server = listen(fail, "127.0.0.1", 0, what="The test")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.socket.getsockname()[1]
    with (
        caplog.at_level(logging.ERROR),
        connect(f"ws://127.0.0.1:{port}") as link,
        pytest.raises(ConnectionClosed) as closed,
    ):
        link.recv(timeout=20)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
    assert "secret" not in closed.value.rcvd.reason and "The test failed" in caplog.text
    server.shutdown()


def test_every_port_is_opened_by_the_one_rule() -> None:
    """No other module opens a port for websockets or HTTP."""
    package = Path(__file__).parents[2] / "embodyrl"
    words = ("sync.server import ServerConnection, serve", "sync.server import Server, ServerConnection",
             "http.server", "socketserver", "asyncio.server", ".listen(", "create_server(")  # fmt: skip
    found = [
        f"{file.relative_to(package)}: {word}"
        for file in package.rglob("*.py")
        for word in words
        if word in file.read_text() and file.name != "ports.py"
    ]
    assert found == []
