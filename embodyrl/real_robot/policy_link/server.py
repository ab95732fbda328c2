"""Serves a policy by openpi's websocket protocol, so that openpi's clients work too.

On connection the server sends its metadata. Then each request is an observation, and each answer an
action chunk with ``server_timing``. ``GET /healthz`` answers OK. A client sees one sentence of an
error, never a traceback. ``ports`` says who may come in: the server listens on this machine alone
unless it has a token, which clients send as ``Authorization: Api-Key TOKEN``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import numpy as np
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection

from embodyrl.errors import UserError
from embodyrl.real_robot.parsing import MAX_TEXT as MAX_PROMPT
from embodyrl.real_robot.policy_link import codec
from embodyrl.real_robot.policy_link.openpi_keys import from_openpi
from embodyrl.real_robot.ports import listen

log = logging.getLogger(__name__)
Infer = Callable[[dict[str, Any]], dict[str, Any]]
PORT = 8000


class PolicyServer:
    """Serves ``infer`` until ``close``.

    Args:
        infer: maps an observation to ``{"actions": (H, A)}``; called by one thread at a time.
        metadata: what a client is told first. Requests are checked against its ``cameras``
            (name -> (h, w)), ``proprio_dim``, ``horizon`` and ``action_dim``.
        host: address to listen at.
        port: 0 takes a free one.
        token: that clients must send; needed where other machines can reach the address.

    Raises:
        UserError: an address that others can reach without a token, or a port in use.
    """

    def __init__(
        self,
        infer: Infer,
        metadata: Mapping[str, Any],
        host: str = "127.0.0.1",
        port: int = PORT,
        token: str = "",
    ) -> None:
        self._infer = infer
        self._metadata = dict(metadata)
        self._lock = threading.Lock()
        self._server = listen(
            self._talk, host, port, what="The policy server", token=token, pages=_health
        )
        self.host = host
        self.port = int(self._server.socket.getsockname()[1])

    def serve_forever(self) -> None:
        """Returns after ``close``."""
        self._server.serve_forever()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()

    def _talk(self, connection: ServerConnection) -> None:
        """Answers one client until it is gone."""
        previous = 0.0  # s that the last request took
        try:
            connection.send(codec.pack(self._metadata))
            while True:
                data = connection.recv()
                began = time.monotonic()
                # Whatever is wrong with a request, the connection lives and the client is told.
                try:
                    answer = self._answer(data, previous)
                except UserError as error:
                    answer = codec.pack({"error": str(error)})
                except Exception:
                    log.exception("The policy failed.")
                    answer = codec.pack({"error": "The policy failed; the server's log says why."})
                connection.send(answer)
                previous = time.monotonic() - began
        except ConnectionClosed:
            pass

    def _answer(self, data: str | bytes, previous: float) -> bytes:
        """The answer to one request.

        Raises:
            MessageError: the request is not a valid observation.
        """
        if isinstance(data, str):
            raise codec.MessageError("Requests are binary messages.")
        message = from_openpi(codec.unpack(data), self._metadata)
        observation = check_observation(message, self._metadata)
        began = time.monotonic()
        # One inference at a time, whatever the number of clients.
        with self._lock:
            result = self._infer(observation)
        timing = {"infer_ms": (time.monotonic() - began) * 1e3}
        if previous:
            timing["prev_total_ms"] = previous * 1e3
        return codec.pack({**result, "server_timing": timing})


def _health(_: ServerConnection, request: Request) -> Response | None:
    """Says OK at ``/healthz``."""
    if request.path != "/healthz":
        return None
    return Response(HTTPStatus.OK, "OK", Headers({"Content-Type": "text/plain"}), b"OK\n")


def check_observation(message: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Checks an observation against a policy's metadata, and returns it.

    Its keys are ``images`` {camera: (h, w, 3) uint8}, ``proprio`` (P,) float32, ``prompt`` str and
    ``step`` int (number of actions taken in the episode). For real-time chunking it also has
    ``previous`` (H, A) float32, ``delay`` int and ``execute`` int.

    Raises:
        MessageError: the observation does not fit.
    """

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise codec.MessageError(f"The observation does not fit this policy: {what}.")

    # Keys.
    need(isinstance(message, dict), "it is not a map")
    known = {"images", "proprio", "prompt", "step", "previous", "delay", "execute"}
    extra = set(message) - known
    need(not extra, f"unknown key {str(next(iter(extra), ''))[:40]!r}")
    # What the policy sees: images of the right size, proprio and prompt.
    images = message.get("images", {})
    proprio = message.get("proprio")
    prompt = message.get("prompt", "")
    cameras = metadata["cameras"]
    need(
        isinstance(images, dict) and set(images) == set(cameras),
        f"its cameras must be {', '.join(cameras) or 'none'}",
    )
    for name, size in cameras.items():
        need(_is_array(images[name], (*size, 3), "u1"), f"camera {name} must be {(*size, 3)} uint8")
    need(
        _is_array(proprio, (metadata["proprio_dim"],), "f4"),
        f"proprio must be ({metadata['proprio_dim']},) float32",
    )
    need(bool(np.isfinite(proprio).all()), "proprio is not finite")
    need(
        isinstance(prompt, str) and len(prompt) <= MAX_PROMPT,
        f"prompt must be text of at most {MAX_PROMPT} letters",
    )
    step = message.get("step", 0)
    need(type(step) is int and 0 <= step < 2**31, "step must be a whole number")
    # Real-time chunking.
    if "previous" in message:
        shape = (metadata["horizon"], metadata["action_dim"])
        need(_is_array(message["previous"], shape, "f4"), f"previous must be {shape} float32")
        need(bool(np.isfinite(message["previous"]).all()), "previous is not finite")
        for key in ("delay", "execute"):
            value = message.get(key)
            need(
                type(value) is int and 0 <= value <= shape[0],
                f"{key} must be a whole number up to {shape[0]}",
            )
    return message


def _is_array(value: Any, shape: tuple[int, ...], dtype: str) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.shape == tuple(shape)
        and value.dtype == np.dtype(dtype)
    )
