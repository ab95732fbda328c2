"""The result of an episode on the robot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.safety import Event

BROKEN_OFF = "broken off"
"""Reason of an end that came from neither side: the program went on to something else."""


class EndedBy(StrEnum):
    """Who ended an episode. Only those that the policy ended say something about it.

    The policy ends an episode by solving the task, by using up the time, by driving the arm against
    something, or by asking for a person. A person's label says how it went, and ends none.
    """

    POLICY = "policy"
    PERSON = "person"
    FAULT = "fault"


@dataclass
class Help:
    """What a person did in an episode.

    Attributes:
        times: interventions: turns of theirs between those of the policy.
        rewinds: how often they had the arm go back.
        seconds: that the arm waited for them, or moved as they wanted; by the control loop's clock.
    """

    times: int = 0
    rewinds: int = 0
    seconds: float = 0.0


@dataclass
class RobotEpisode:
    """How an episode went.

    Attributes:
        solved: whether the task was solved, according to the robot or to the person.
        seconds: duration by the control loop's clock, without the time that the arm waited.
        mode: mode of the safety filter at the end.
        reason: why the episode ended.
        ended_by: who ended it, or moved the arm in it.
        peak: for each limit, the largest share of it that a command used.
        late: number of ticks that came more than half a tick late.
        human: number of actions that a person took.
        help: their interventions.
        events: changes of mode.
    """

    solved: bool
    seconds: float
    mode: Mode
    reason: str
    peak: dict[str, float]
    ended_by: EndedBy = EndedBy.POLICY
    late: int = 0
    human: int = 0
    help: Help = field(default_factory=Help)
    events: list[Event] = field(default_factory=list)


def cut_short(ending: Mapping[str, Any] | None) -> bool:
    """Whether an episode ended before it was known how it would have gone.

    Args:
        ending: how it ended, as its log says (``/episode``); None where the log has no end.
    """
    if ending is None:
        return True
    # Logs of an earlier version do not say who ended an episode.
    by_fault = ending.get("ended_by") == EndedBy.FAULT
    stopped = ending.get("mode") == Mode.ESTOP or ending["reason"] == BROKEN_OFF
    return not ending["solved"] and (by_fault or stopped)


def event_lines(events: Sequence[Event]) -> list[str]:
    """The last eight changes of mode, one line each, for the operator's display."""
    return [f"{e.stamp:9.2f} s  {e.before} -> {e.after}: {e.reason}" for e in events[-8:]]
