"""What a gripper beside the arm is asked for."""

from __future__ import annotations

from typing import Protocol


class Gripper(Protocol):
    """A gripper with one opening. No method waits for it.

    Openings are told as Franka's hand tells them, from 0 to ``limits.MAX_WIDTH`` m. A gripper with
    another stroke is scaled to that, so that limits, policies and data mean the same.

    Attributes:
        name: for messages.
        hz: measurements per second that it gives at least while it rests.
    """

    name: str
    hz: float

    def measured(self) -> tuple[float, float]:
        """When the newest opening was measured (s, ``time.monotonic``), and the opening."""
        ...

    def trouble(self) -> str:
        """Why the gripper cannot be trusted, which stops the arm; empty while all is well."""
        ...

    def move(self, width: float) -> None:
        """Goes to an opening; the newest one counts."""
        ...

    def close(self) -> None:
        """Lets go of the gripper, which stays as it is."""
        ...
