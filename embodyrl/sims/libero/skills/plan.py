"""A ``Skill`` is a step of the expert's plan; an ``Attempt`` at it goes through phases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from embodyrl.sims.libero.skills.workspace import Workspace

POSITION_SCALE = 0.05  # metres that an action of 1 asks for
ROTATION_SCALE = 0.5  # radians that an action of 1 asks for
OPEN = -1.0
CLOSE = 1.0
UP = np.array([0.0, 0.0, 0.1])


@dataclass(frozen=True)
class Skill:
    """A step of a plan.

    Attributes:
        kind: ``place``, ``push``, or what a joint shall be: ``open``, ``close``, ``turnon``,
            ``turnoff``.
        item: the object, or the part whose joint moves.
        place: the object or region that the item belongs on or in; "" for joints.
    """

    kind: str
    item: str
    place: str = ""


@dataclass(kw_only=True)
class Attempt:
    """An attempt at a skill.

    Attributes:
        skill: which.
        mat: (3, 3) rotation that the hand shall have.
        safe_height: of the gripper, in metres, at which it hits nothing on its way.
        phase: what the arm is doing, a key of ``phases``.
        steps: control steps spent in the phase.
        over: whether it has ended, well or not.
    """

    skill: Skill
    mat: np.ndarray
    safe_height: float
    phase: str
    steps: int = 0
    over: bool = False

    phases: ClassVar[Mapping[str, Callable[[Any, Workspace], np.ndarray]]] = {}
    """Phase -> the action (7,) that it takes; it begins the next phase when it is over."""

    def next_action(self, space: Workspace) -> np.ndarray:
        """The action (7,) of this control step."""
        self.steps += 1
        return self.phases[self.phase](self, space)

    def begin(self, phase: str) -> None:
        """Goes on to another phase."""
        self.phase = phase
        self.steps = 0

    def move(self, space: Workspace, target: np.ndarray, gripper: float) -> np.ndarray:
        """The action (7,) of a proportional controller; full speed beyond about 3 cm."""
        rotation = space.rotation_error(self.mat) / ROTATION_SCALE
        delta = (target - space.hand()) / POSITION_SCALE * 1.6
        largest = np.abs(delta).max()
        return np.concatenate([delta / max(1.0, largest), rotation.clip(-0.5, 0.5), [gripper]])

    def fly(self, space: Workspace, target: np.ndarray, gripper: float) -> np.ndarray:
        """Moves over a point at the safe height; a low hand that is far away rises first."""
        hand = space.hand()
        waypoint = np.array([*target[:2], self.safe_height])
        far = np.linalg.norm(hand[:2] - target[:2]) > 0.05
        if far and hand[2] < self.safe_height - 0.05:
            waypoint[:2] = hand[:2]
        return self.move(space, waypoint, gripper)

    def turned(self, space: Workspace) -> bool:
        """Whether the hand has the rotation that it shall have."""
        return bool(np.linalg.norm(space.rotation_error(self.mat)) < 0.05)
