"""The result of an episode on the robot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.safety import Event


@dataclass
class RobotEpisode:
    """How an episode went.

    Attributes:
        solved: whether the task was solved, according to the robot or to the person.
        seconds: duration by the control loop's clock, without the time that the arm waited.
        mode: mode of the safety filter at the end.
        reason: why the episode ended.
        peak: for each limit, the largest share of it that a command used.
        late: number of ticks that came more than half a tick late.
        human: number of actions that a person took.
        events: changes of mode.
    """

    solved: bool
    seconds: float
    mode: Mode
    reason: str
    peak: dict[str, float]
    late: int = 0
    human: int = 0
    events: list[Event] = field(default_factory=list)


def event_lines(events: Sequence[Event]) -> list[str]:
    """The last eight changes of mode, one line each, for the operator's display."""
    return [f"{e.stamp:9.2f} s  {e.before} -> {e.after}: {e.reason}" for e in events[-8:]]
