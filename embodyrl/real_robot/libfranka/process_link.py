"""Messages between the control loop and its processes: msgpack over a pair of local sockets."""

from __future__ import annotations

import select
import socket
from typing import Any

from embodyrl.real_robot.policy_link import codec

MAX_MESSAGE = 4096


class Link:
    """One end of a connection between two processes.

    Sending never waits. If the other end does not read, the message is lost, and the age of the
    last one shows it.

    Attributes:
        closed: whether one of the two ends was closed. An end that hears what is no message closes
            itself: a process that talks nonsense is as good as lost, and the arm must stop.
        trouble: why an end closed itself; else empty.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self.closed = False
        self.trouble = ""

    def say(self, *words: Any) -> None:
        """Sends plain data."""
        try:
            self._end.send(codec.pack(list(words)))
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def heard(self) -> list[list[Any]]:
        """All messages that came since the last call; each begins with a word."""
        found: list[list[Any]] = []
        while not self.closed:
            try:
                data = self._end.recv(MAX_MESSAGE)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            # An empty message means that the other end is closed.
            if not data:
                self.closed = True
                break
            try:
                message = codec.unpack(data)
                if not isinstance(message, list) or not message or type(message[0]) is not str:
                    raise codec.MessageError("it does not begin with a word")
                found.append(message)
            except codec.MessageError as error:
                self.fail(f"a message between the processes is not understood: {error}")
        return found

    def fail(self, why: str) -> None:
        """Closes this end, because of what the other end said."""
        self.trouble = self.trouble or why
        self.close()

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
