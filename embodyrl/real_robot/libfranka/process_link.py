"""Messages between the control loop and its processes: msgpack over a pair of local sockets."""

from __future__ import annotations

import select
import socket
from typing import Any

import msgpack

from embodyrl.real_robot.policy_link import codec

MAX_MESSAGE = 4096


class Link:
    """One end of a connection between two processes.

    Sending never waits. If the other end does not read, the message is lost, and the age of the
    last one shows it.

    Attributes:
        closed: whether one of the two ends was closed.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self.closed = False

    def say(self, *words: Any) -> None:
        """Sends plain data."""
        try:
            self._end.send(codec.pack(list(words)))
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def heard(self) -> list[list[Any]]:
        """All messages that came since the last call."""
        found: list[list[Any]] = []
        while not self.closed:
            try:
                data = self._end.recv(MAX_MESSAGE)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            # An empty message means that the other end is closed.
            if data:
                found.append(msgpack.unpackb(data))
            else:
                self.closed = True
        return found

    def wait(self, seconds: float) -> None:
        """Waits until something comes, ``seconds`` at most."""
        select.select([self._end], [], [], seconds)

    def close(self) -> None:
        """Closes this end; the other end notices."""
        self._end.close()
        self.closed = True


def pair() -> tuple[Link, socket.socket]:
    """An end for this process, and a socket for another. Messages arrive whole and in order."""
    # SOCK_SEQPACKET keeps the borders of messages, unlike a stream.
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Link(here), there
