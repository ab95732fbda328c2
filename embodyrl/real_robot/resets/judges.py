"""Tells whether the scene is back: the simulator, a topic of the robot, or a reflector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from embodyrl.real_robot.connect_robot import ConnectedRobot

Look = Callable[[], dict[str, Any]]


class Judge(Protocol):
    """Tells whether the scene is back."""

    def begin(self) -> None:
        """Begins a try."""
        ...

    def __call__(self, look: Look) -> bool:
        """Whether it is back now.

        Args:
            look: what the policy sees; asked only by a judge of pictures.
        """
        ...


class RobotSays:
    """The robot's own word: the simulator's success, or the topic ``topics.scene_ready``.

    Args:
        ready: of the robot.
    """

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    def begin(self) -> None:
        """See ``Judge``."""

    def __call__(self, look: Look) -> bool:
        """See ``Judge``."""
        return self._ready()


class ReflectorSays:
    """A reflector that was calibrated on the task that undoes the other.

    Args:
        path: of its folder.
    """

    def __init__(self, path: str) -> None:
        # Imported here: a robot's computer without torch has no reflectors.
        from embodyrl.real_robot.env.reflector_judge import ReflectorJudge
        from embodyrl.world_models.reflectors.folder import load_reflector

        self._judge = ReflectorJudge(load_reflector(path))

    def begin(self) -> None:
        """See ``Judge``."""
        self._judge.begin()

    def __call__(self, look: Look) -> bool:
        """See ``Judge``; a reflector that cannot tell says no."""
        seen = look()
        return self._judge.see(seen["images"], seen["prompt"])[1]


def open_judge(connected: ConnectedRobot, reflector: str, simulated: bool) -> Judge | None:
    """Who tells whether the scene is back; None where nobody does.

    Args:
        connected: the robot.
        reflector: folder of one; empty for none.
        simulated: whether the robot's own success is that of the task that undoes the other.
    """
    if reflector:
        return ReflectorSays(reflector)
    robot: Any = connected.robot
    if simulated and hasattr(robot, "go_on"):
        return RobotSays(robot.solved)
    if getattr(robot, "tells_ready", False):
        return RobotSays(robot.scene_ready)
    return None
