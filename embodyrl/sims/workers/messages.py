"""Messages between a process and its workers: JSON with its length in front, and open files.

Nothing is pickled. An open file goes over the socket as its descriptor.
"""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

MOST_FILES = 8
"""Files that may come with one message."""


def send_message(sock: socket.socket, message: dict[str, Any], files: Sequence[int] = ()) -> None:
    """Sends one message, and file descriptors with it."""
    data = json.dumps(message).encode()
    data = struct.pack("!I", len(data)) + data
    if files:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        data = data[sock.sendmsg([data], rights) :]
    sock.sendall(data)


def receive_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Waits for one message and the file descriptors that came with it.

    Raises:
        EOFError: the other side has gone.
        TimeoutError: the socket's timeout passed.
    """
    head, files = _receive(sock, 4)
    body, more = _receive(sock, struct.unpack("!I", head)[0])
    return json.loads(body), files + more


def _receive(sock: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Waits for exactly ``count`` bytes, and the file descriptors that may come with them."""
    data = b""
    files: list[int] = []
    while len(data) < count:
        part, new, _, _ = socket.recv_fds(sock, min(count - len(data), 1 << 20), MOST_FILES)
        files += new
        if not part:
            raise EOFError("the other side of the socket is closed")
        data = data + part
    return data, files
