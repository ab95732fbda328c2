"""Franka's hand, whose commands block: ``gripper_process`` carries them out."""

from __future__ import annotations

import time

from embodyrl.real_robot.libfranka.process_link import Link
from embodyrl.real_robot.parsing import number, text


class FrankaHand:
    """See ``Gripper``. While a command is carried out nothing is measured.

    Args:
        link: to its process.
    """

    name = "Franka's hand"
    hz = 10.0

    def __init__(self, link: Link) -> None:
        self._link = link
        self._measured = -1.0, 0.0
        self._trouble = ""

    def measured(self) -> tuple[float, float]:
        """See ``Gripper``."""
        self._hear()
        return self._measured

    def trouble(self) -> str:
        """See ``Gripper``."""
        self._hear()
        return self._trouble

    def move(self, width: float) -> None:
        """See ``Gripper``."""
        self._link.say("width", width)

    def close(self) -> None:
        """See ``Gripper``; its process ends."""
        self._link.close()

    def _hear(self) -> None:
        """Takes in what the process has reported. What is not understood is trouble."""
        for word, *rest in self._link.heard():
            try:
                if word == "width":
                    (width,) = rest
                    self._measured = time.monotonic(), number(width, -1.0, 1.0, "the width")
                elif word == "trouble":
                    said = text(rest[0], "the trouble", 4096)
                    self._trouble = self._trouble or said or "the gripper's process failed"
            except Exception as error:
                self._link.fail(f"a message {word!a:.20} is not understood ({error})")
        if self._link.closed:
            self._trouble = self._trouble or self._link.trouble or "the gripper's process ended"
