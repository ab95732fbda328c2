"""Opens every port of this package, by one rule for who may come in.

- An address that other machines can reach needs a token. Without one it is refused at the start.
  A token that could be guessed is refused everywhere.
- The ``Host`` header must name this machine. Otherwise a web page could reach a port of its
  visitor's machine under its own name (DNS rebinding).
- The ``Origin`` header, which browsers send, must be the port itself: pages of other sites, or of
  other ports, are refused. Programs send none.
- The token is compared in constant time. A refusal is a sentence, never a traceback.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import urlsplit

from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from embodyrl.errors import UserError
from embodyrl.real_robot.parsing import MAX_BYTES

MAX_CLIENTS = 32
"""Largest number of clients at a time: each has a thread."""
MIN_TOKEN = 16
"""Fewest characters of a token."""
NEW_TOKEN = "Write a new one: openssl rand -hex 16"
log = logging.getLogger(__name__)
# What strangers send is no fault of ours: their broken handshakes need no tracebacks in our log.
_handshakes = logging.getLogger(f"{__name__}.handshakes")
_handshakes.setLevel(logging.CRITICAL)
Answer = Callable[[ServerConnection, Request], Response | None]
"""Answers a request for a page; None where the request is for a websocket."""


def listen(
    talk: Callable[[ServerConnection], None],
    host: str,
    port: int,
    *,
    what: str,
    token: str = "",
    pages: Answer | None = None,
    without_token: tuple[str, ...] = (),
    max_bytes: int = MAX_BYTES,
    max_queue: int = 16,
) -> Server:
    """Opens a port for websockets; ``serve_forever`` of the result then serves it.

    Args:
        talk: talks to one client, in a thread of its own. What it raises is logged, and ends that
            connection alone.
        host: address to listen at.
        port: 0 takes a free one.
        what: listens, for messages.
        token: that clients must send as ``Authorization: Api-Key TOKEN``; empty for none.
        pages: answers requests for pages, which need no token.
        without_token: paths of websockets whose ``talk`` asks for a token itself.
        max_bytes: of a message.
        max_queue: messages that may wait to be read.

    Raises:
        UserError: other machines can reach the address and there is no token, the token is too
            short, or the port is in use.
    """
    refuse_strangers(host, token)
    places = threading.BoundedSemaphore(MAX_CLIENTS)

    def admit(connection: ServerConnection, request: Request) -> Response | None:
        headers = request.headers
        if wrong := foreign(headers, host) or malformed(headers, "Authorization"):
            return connection.respond(*wrong)
        if pages is not None and (answer := pages(connection, request)) is not None:
            return answer
        if request.path in without_token:
            return None
        if token and not same_secret(headers.get("Authorization", ""), f"Api-Key {token}"):
            return connection.respond(HTTPStatus.UNAUTHORIZED, "A token is needed.\n")
        return None

    def talk_alone(connection: ServerConnection) -> None:
        if not places.acquire(blocking=False):
            connection.close(1013, f"there are {MAX_CLIENTS} clients already")
            return
        try:
            talk(connection)
        except Exception:
            log.exception("%s failed on what %s sent.", what, peer(connection))
            connection.close(1011, "the server failed; its log says why")
        finally:
            places.release()

    try:
        return serve(
            talk_alone,
            host,
            port,
            process_request=admit,
            compression=None,
            max_size=max_bytes,
            max_queue=max_queue,
            logger=_handshakes,
        )
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"{what} cannot listen at {host}:{port} ({why}). Choose another port."
        ) from error


def refuse_strangers(host: str, token: str) -> None:
    """Checks that nobody else can use a port without a token.

    Raises:
        UserError: other machines can reach the address, and there is no token; or it is too short.
    """
    if token:
        require_strong(token)
    if not token and not is_loopback(host):
        raise UserError(
            f"Whoever reaches {host or 'this machine'} could use it. Give a token (--token-file), "
            "or listen on 127.0.0.1."
        )


def require_strong(token: str, name: str = "The token") -> None:
    """Refuses a token that could be guessed, or that no header can carry.

    Args:
        token: as it is sent.
        name: what it is called, for the message.

    Raises:
        UserError: it is short, or not of printable ASCII without spaces.
    """
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise UserError(
            f"{name} holds a space or another character than those of ASCII. {NEW_TOKEN}"
        )
    if len(token) < MIN_TOKEN:
        raise UserError(
            f"{name} has {len(token)} characters. Fewer than {MIN_TOKEN} could be guessed. "
            f"{NEW_TOKEN}"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def foreign(headers: Headers, host: str) -> tuple[HTTPStatus, str] | None:
    """The refusal of a request whose ``Host`` or ``Origin`` is not this port; None for a good one.

    Args:
        headers: of the request.
        host: address at which the port listens.
    """
    if wrong := malformed(headers, "Host", needed=True) or malformed(headers, "Origin"):
        return wrong
    called = headers["Host"]
    try:
        name = urlsplit(f"//{called}").hostname or ""
    except ValueError:
        name = ""
    if not _is_own(name, host):
        return (
            HTTPStatus.FORBIDDEN,
            "This server does not have the name that the Host header gives. Use its IP address, "
            "or the name that it was given as --host.\n",
        )
    if headers.get("Origin", f"http://{called}") != f"http://{called}":
        return HTTPStatus.FORBIDDEN, "Pages of other sites may not connect to this server.\n"
    return None


def _is_own(name: str, host: str) -> bool:
    """Whether clients may call a port at ``host`` by this name.

    Loopback ports have loopback names alone. Others may be called by any address, because no page
    can take an address as its own name.
    """
    if is_loopback(name):
        return True
    machine = socket.gethostname().lower()
    return not is_loopback(host) and (
        _is_address(name) or name in (host.lower(), machine, f"{machine}.local")
    )


def malformed(
    headers: Headers, name: str, *, needed: bool = False
) -> tuple[HTTPStatus, str] | None:
    """The refusal of a request that has a header more than once, or not where it is needed."""
    count = len(headers.get_all(name))
    if count > 1 or (needed and not count):
        return HTTPStatus.BAD_REQUEST, f"There are {count} {name} headers; one is read.\n"
    return None


def same_secret(given: str, wanted: str) -> bool:
    """Compares in constant time, so that the time of a refusal says nothing about the secret."""
    return hmac.compare_digest(
        given.encode(errors="surrogateescape"), wanted.encode(errors="surrogateescape")
    )


def peer(connection: ServerConnection) -> str:
    """The address of a client, for messages."""
    try:
        host, port = connection.remote_address[:2]
    except (ArithmeticError, OSError, TypeError, ValueError):
        return "a client that is gone"
    return f"{host}:{port}"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
