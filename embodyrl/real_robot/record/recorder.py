"""The person of a recording session: which of their wishes count, and what they are shown."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.real_robot.control.operator import Operator
from embodyrl.real_robot.control.robot import Robot
from embodyrl.real_robot.record.teleop import Teleop

SAYS = {
    "takeover": "Start, go on",
    "hold": "Pause",
    "discard": "Discard",
    "success": "Success",
    "failure": "Failure",
    "clear": "Clear the fault: I have looked",
    "estop": "STOP",
}
"""What a person may ask for in a session, and what its button says."""
_MEANS = {"run": "takeover", "release": "hold"}
"""A device has one button for start and pause: it says "run" and "release"."""
LOOK_EVERY = 0.1
"""s between two looks at the person while an episode has not begun."""


@dataclass(frozen=True)
class Progress:
    """What the session tells the person besides the state of the arm.

    Attributes:
        episode: which one this is, and of how many.
        disk: how much room is left, before the episode.
    """

    episode: str = ""
    disk: str = ""


class Recorder(Operator):
    """Between the person and the control loop.

    Args:
        teleop: the person's device.
        robot: that they move.
        progress: is shown beside the state of the arm.
        lost: whether the episode cannot be kept any more, so that going on with it is in vain.
    """

    def __init__(
        self, teleop: Teleop, robot: Robot, progress: Progress, lost: Callable[[], bool]
    ) -> None:
        self._teleop = teleop
        self._robot = robot
        self._progress = progress
        self._lost = lost
        self._starts = False  # the person has asked to start, before the control loop ran
        self._refused = ""  # why their last start was refused
        self.frames = 0

    def wait_for_start(self, sentence: str) -> None:
        """Shows a sentence and live pictures until the person starts; the arm rests meanwhile."""
        operator = self._teleop.operator
        operator.wishes()  # those from before do not count
        self.frames = 0
        while not self._starts:
            self._starts = "takeover" in self._heard()
            said = self._refused or self._teleop.problem() or sentence
            status = {"mode": "hold", "reason": said, "task": self._robot.prompt(), "open": True}
            self._show({**status, "events": []}, ("takeover",), "", self._robot.pictures())
            time.sleep(LOOK_EVERY)

    def wishes(self) -> list[str]:
        """See ``Operator``."""
        found = [*(["takeover"] if self._starts else []), *self._heard()]
        self._starts = False
        if self._lost():
            found.append("discard")
        return found

    def alive(self, now: float) -> bool:
        """See ``Operator``."""
        return self._teleop.operator.alive(now)

    def action(self, dims: int) -> NDArray[np.float32]:
        """See ``Operator``."""
        self.frames += 1
        return self._teleop.operator.action(dims)

    def show(self, status: dict[str, Any], images: dict[str, NDArray[np.uint8]]) -> None:
        """See ``Operator``."""
        said = self._refused or self._teleop.problem()
        # What is wrong with the person's device says more than that its targets are stale.
        shown = {**status, "reason": said} if said else status
        # Of what the control loop knows, the person needs the time. Between two episodes there is none.
        between = "time" not in status["numbers"]
        can = tuple(status["can"]) if between else tuple(SAYS)
        self._show(shown, can, status["numbers"].get("time", ""), images)

    def _heard(self) -> list[str]:
        """What the person asked for, as far as a session offers it."""
        found = []
        for wish in self._teleop.operator.wishes():
            wish = _MEANS.get(wish, wish)
            # A leader must stand where the robot does before it is followed.
            if wish == "takeover":
                self._refused = self._teleop.ready(self._robot.state())
                if self._refused:
                    print(f"  {self._refused}", flush=True)
                    continue
            if wish in SAYS:
                found.append(wish)
        return found

    def _show(
        self,
        status: dict[str, Any],
        can: tuple[str, ...],
        elapsed: str,
        images: dict[str, NDArray[np.uint8]],
    ) -> None:
        numbers = {
            "episode": self._progress.episode,
            "time": elapsed or "not begun",
            "frames": str(self.frames),
            "disk": self._progress.disk,
        }
        said = {"says": SAYS, "can": can, "numbers": numbers}
        self._teleop.operator.show({**status, **said}, images)
