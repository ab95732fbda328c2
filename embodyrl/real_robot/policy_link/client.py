"""Asks a policy server for action chunks, without torch. It also talks to openpi's own server."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from websockets.exceptions import InvalidHandshake, InvalidURI, WebSocketException
from websockets.sync.client import ClientConnection, connect

from embodyrl.errors import UserError
from embodyrl.real_robot.policy_link import codec


class ServerError(UserError):
    """The policy server cannot be reached, was too slow, or refused.

    The next call connects again.
    """


class PolicyClient:
    """One connection to a policy server.

    Args:
        url: ``ws://host:port``, or ``host:port``.
        token: of the server, if it has one.
        timeout: s that connecting, or an answer, may take.

    Attributes:
        metadata: what the server said about its policy.
    """

    def __init__(self, url: str, token: str = "", timeout: float = 10.0) -> None:
        self.url = url if "://" in url else f"ws://{url}"
        self.timeout = timeout
        self._headers = {"Authorization": f"Api-Key {token}"} if token else None
        self._connection: ClientConnection | None = None
        self._open = ExitStack()
        self.metadata: dict[str, Any] = {}

    def connect(self) -> dict[str, Any]:
        """Connects, unless it is connected, and returns the server's metadata.

        Raises:
            ServerError: there is no such server, or it wants a token.
        """
        if self._connection is None:
            try:
                self._connection = self._open.enter_context(
                    connect(
                        self.url,
                        compression=None,
                        max_size=codec.MAX_BYTES,
                        open_timeout=self.timeout,
                        additional_headers=self._headers,
                    )
                )
                self.metadata = self._receive()
            except (
                OSError,
                InvalidHandshake,
                InvalidURI,
                WebSocketException,
                codec.MessageError,
                TimeoutError,
            ) as error:
                self.close()
                raise ServerError(
                    f"No policy server answers at {self.url} ({error}). Start one: embodyrl serve."
                ) from error
        return self.metadata

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Sends an observation and waits for the answer.

        Returns:
            ``actions`` (H, A), ``server_timing``, and what else the server sends.

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
            # A late answer to this request must not be taken for the answer to the next one.
            self.close()
            late = isinstance(error, TimeoutError)
            what = "took too long" if late else f"failed ({type(error).__name__})"
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
            # At once: a server that hangs would not answer a closing handshake.
            connection.close_socket()
            self._open.close()
