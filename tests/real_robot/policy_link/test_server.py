"""Policy server and client over a real socket, and what a hostile client gets."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from websockets.sync.client import connect

from embodyrl.errors import UserError
from embodyrl.real_robot.policy_link import codec
from embodyrl.real_robot.policy_link.client import PolicyClient, ServerError
from embodyrl.real_robot.policy_link.server import PolicyServer

TOKEN = "0123456789abcdef"
METADATA = {"cameras": {"front": [4, 6]}, "proprio_dim": 3, "horizon": 5, "action_dim": 2}


def infer(observation: dict[str, Any]) -> dict[str, Any]:
    if observation["prompt"] == "break":
        raise RuntimeError("secret detail")
    return {"actions": np.full((5, 2), observation["proprio"].sum(), np.float32)}


def observation(**changes: Any) -> dict[str, Any]:
    plain = {
        "images": {"front": np.zeros((4, 6, 3), np.uint8)},
        "proprio": np.ones(3, np.float32),
        "prompt": "go",
    }
    return plain | changes


@pytest.fixture
def server() -> Iterator[PolicyServer]:
    server = PolicyServer(infer, METADATA, port=0, token=TOKEN)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.close()
    thread.join(timeout=10)


def test_a_client_gets_metadata_actions_and_timing(server: PolicyServer) -> None:
    client = PolicyClient(f"127.0.0.1:{server.port}", token=TOKEN)
    assert client.connect() == METADATA
    for _ in range(2):
        answer = client.infer(observation())
        np.testing.assert_array_equal(answer["actions"], np.full((5, 2), 3.0))
    assert answer["server_timing"]["infer_ms"] >= 0 and answer["server_timing"]["prev_total_ms"] > 0
    client.close()
    assert (
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/healthz", timeout=10).read()
        == b"OK\n"
    )


def test_what_is_wrong_with_a_request_is_said_and_the_connection_lives(
    server: PolicyServer,
) -> None:
    client = PolicyClient(f"ws://127.0.0.1:{server.port}", token=TOKEN)
    for changes, word in (
        ({"images": {}}, "cameras must be front"),
        ({"images": {"front": np.zeros((4, 6, 3), np.float32)}}, "uint8"),
        ({"proprio": np.ones(4, np.float32)}, "proprio must be"),
        ({"proprio": np.full(3, np.nan, np.float32)}, "not finite"),
        ({"prompt": "x" * 600}, "512 letters"),
        ({"reset": True}, "unknown key 'reset'"),
        ({"previous": np.zeros((5, 2), np.float32)}, "delay must be"),
        ({"previous": np.zeros((4, 2), np.float32), "delay": 1, "execute": 1}, "previous must be"),
    ):
        with pytest.raises(ServerError, match=word):
            client.infer(observation(**changes))
    with pytest.raises(ServerError, match="The policy failed") as told:
        client.infer(observation(prompt="break"))
    assert "secret" not in str(told.value) and "Traceback" not in str(told.value)
    assert client.infer(observation())["actions"].shape == (5, 2)
    client.close()


def test_a_token_is_needed(server: PolicyServer) -> None:
    for token in ("", "wrong"):
        with pytest.raises(ServerError, match="401"):
            PolicyClient(f"127.0.0.1:{server.port}", token=token).connect()
    with pytest.raises(UserError, match="Give a token"):
        PolicyServer(infer, METADATA, host="0.0.0.0", port=0)
    with pytest.raises(UserError, match="cannot listen"):
        PolicyServer(infer, METADATA, port=server.port)


def test_a_server_that_is_gone_or_slow_is_an_error_in_words() -> None:
    with pytest.raises(ServerError, match="Start one: embodyrl serve"):
        PolicyClient("127.0.0.1:9", timeout=2.0).connect()
    gate = threading.Event()
    server = PolicyServer(lambda o: (gate.wait(20), infer(o))[1], METADATA, port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    client = PolicyClient(f"127.0.0.1:{server.port}", timeout=5.0)
    client.connect()
    client.timeout = 0.2
    with pytest.raises(ServerError, match="took too long"):
        client.infer(observation())
    gate.set()
    client.timeout = 10.0
    assert client.infer(observation())["actions"].shape == (5, 2)  # connects anew
    server.close()
    thread.join(timeout=10)


def test_fuzzed_bytes_never_get_past_the_codec(server: PolicyServer) -> None:
    rng = np.random.default_rng(0)
    good = codec.pack(observation())
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.integers(1, 6)):
            data[rng.integers(len(data))] = rng.integers(256)
        if rng.random() < 0.3:
            data = data[: rng.integers(len(data))]
        try:
            codec.unpack(bytes(data))
        except codec.MessageError as error:
            assert "Traceback" not in str(error)
    with connect(
        f"ws://127.0.0.1:{server.port}",
        compression=None,
        additional_headers={"Authorization": f"Api-Key {TOKEN}"},
    ) as raw:
        raw.recv()
        for data in (b"", b"\xc1", b"\x93" * 5000, rng.bytes(1000), good[:50], "text"):
            raw.send(data)
            assert "error" in codec.unpack(raw.recv(timeout=20))  # type: ignore[arg-type]
        raw.send(good)
        assert "actions" in codec.unpack(raw.recv(timeout=20))  # type: ignore[arg-type]


def test_the_codec_reads_and_writes_openpis_format() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    theirs = msgpack.packb(
        {"a": {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": "<f4", b"shape": (2, 3)},
         "b": {b"__npgeneric__": True, b"data": 2.5, b"dtype": "<f4"}}
    )  # fmt: skip
    assert theirs == codec.pack({"a": array, "b": np.float32(2.5)})
    back = codec.unpack(theirs)
    np.testing.assert_array_equal(back["a"], array)
    assert back["b"] == 2.5 and not back["a"].flags.writeable


@pytest.mark.parametrize(
    "message",
    [
        {b"__ndarray__": True, b"data": b"12345678", b"dtype": "|O", b"shape": [1]},
        {b"__ndarray__": True, b"data": b"12345678", b"dtype": "<f8", b"shape": [2]},
        {b"__ndarray__": True, b"data": b"12345678", b"dtype": "<f8", b"shape": [-1]},
        {b"__ndarray__": True, b"data": b"12345678", b"dtype": "<f8", b"shape": [2**40, 2**40]},
        {b"__ndarray__": True, b"data": b"12345678", b"dtype": [["a", "<f8"]], b"shape": [1]},
        {b"__ndarray__": True, b"data": b"12345678", b"dtype": "<f8"},
        {"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}},
        list(range(300)),
        msgpack.ExtType(1, b"x"),
    ],
)
def test_arrays_and_shapes_that_are_not_allowed(message: Any) -> None:
    with pytest.raises(codec.MessageError):
        codec.unpack(msgpack.packb(message))


def test_objects_are_not_packed() -> None:
    for value in (object(), np.array([object()]), {1, 2}):
        with pytest.raises(TypeError, match="cannot hold"):
            codec.pack({"a": value})
