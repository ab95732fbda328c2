"""Asks a policy server for action chunks; no torch. It also talks to openpi's own server."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from websockets.exceptions import InvalidHandshake, InvalidURI, WebSocketException
from websockets.sync.client import ClientConnection, connect

from embodyrl.errors import UserError
from embodyrl.real_robot.policy_link import codec


class ServerError(UserError):
    """The policy server cannot be reached, was too slow, or refused; the connection is made anew at the next call."""


class PolicyClient:
    """One connection to a policy server.

    Args:
        url: ``ws://host:port``, or ``host:port``.
        token: the server's, if it has one.
        timeout: s that connecting and an answer may take.
    """

    def __init__(self, url: str, token: str = "", timeout: float = 10.0) -> None:
        self.url = url if "://" in url else f"ws://{url}"
        self.timeout = timeout
        self._headers = {"Authorization": f"Api-Key {token}"} if token else None
        self._connection: ClientConnection | None = None
        self._open = ExitStack()
        self.metadata: dict[str, Any] = {}

    def connect(self) -> dict[str, Any]:
        """Connects if it is not, and returns the server's metadata.

        Raises:
            ServerError: there is no such server, or it wants a token.
        """
        if self._connection is None:
            try:
                self._connection = self._open.enter_context(connect(
                    self.url, compression=None, max_size=codec.MAX_BYTES, open_timeout=self.timeout,
                    additional_headers=self._headers,
                ))  # fmt: skip
                self.metadata = self._receive()
            except (
                OSError,
                InvalidHandshake,
                InvalidURI,
                WebSocketException,
                TimeoutError,
            ) as error:
                self.close()
                raise ServerError(
                    f"No policy server answers at {self.url} ({error}). Start one: embodyrl serve."
                ) from error
        return self.metadata

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        """The server's answer: ``actions`` (H, A) and ``server_timing``.

        Raises:
            ServerError: no answer in time, or a refusal.
        """
        self.connect()
        connection = self._connection
        assert connection is not None
        try:
            connection.send(codec.pack(observation))
            answer = self._receive()
        except (OSError, WebSocketException, codec.MessageError, TimeoutError) as error:
            self.close()
            what = (
                "took too long"
                if isinstance(error, TimeoutError)
                else f"failed ({type(error).__name__})"
            )
            raise ServerError(f"The policy server at {self.url} {what}.") from error
        if "error" in answer:
            raise ServerError(f"The policy server refused: {str(answer['error'])[:300]}")
        return answer

    def _receive(self) -> dict[str, Any]:
        assert self._connection is not None
        data = self._connection.recv(timeout=self.timeout)
        if isinstance(data, str):  # openpi's server sends its traceback as text
            raise codec.MessageError("The server sent text.")
        message = codec.unpack(data)
        if not isinstance(message, dict):
            raise codec.MessageError("The server's message is not a map.")
        return message

    def close(self) -> None:
        """Ends the connection."""
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.close_socket()  # at once: a hung server would not answer a goodbye
            self._open.close()
