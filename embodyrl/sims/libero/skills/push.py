"""Pushes something flat along the table, by the inside of its rim."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodyrl.sims.libero.skills.plan import CLOSE, UP, Attempt, Skill
from embodyrl.sims.libero.skills.workspace import DOWN, Workspace

FLAT = 0.04  # metres; what is lower, and wider than 0.1, is pushed to a region of the table
WIDE = 0.1


@dataclass(kw_only=True)
class Push(Attempt):
    """Above, come, drag, rise: closed fingers lean on the inside of the rim that goes ahead.

    Attributes:
        ahead: how far in metres from the item's middle the fingers are.
        height: of the finger tips.
    """

    ahead: float
    height: float

    def _way(self, space: Workspace) -> np.ndarray:
        """(2,) from the item's middle to the place."""
        return (space.position(self.skill.place) - space.position(self.skill.item))[:2]

    def _point(self, space: Workspace, height: float) -> np.ndarray:
        """(3,) inside the rim that goes ahead."""
        way = self._way(space)
        way *= self.ahead / max(1e-6, np.linalg.norm(way))
        return np.array([*space.position(self.skill.item)[:2] + way, height])

    def above(self, space: Workspace) -> np.ndarray:
        """Goes over the item, at a safe height."""
        target = self._point(space, self.safe_height)
        if np.linalg.norm(space.hand()[:2] - target[:2]) < 0.01 and self.turned(space):
            self.begin("come")
        return self.fly(space, target, CLOSE)

    def come(self, space: Workspace) -> np.ndarray:
        """Goes down into the item."""
        target = self._point(space, self.height)
        if abs(space.hand()[2] - self.height) < 0.006 or self.steps > 30:
            self.begin("drag")
        return self.move(space, target, CLOSE)

    def drag(self, space: Workspace) -> np.ndarray:
        """Moves on towards the place, at most as far ahead of the item as its rim is."""
        way = self._way(space)
        distance = np.linalg.norm(way)
        if distance < 0.01 or self.steps > 120:
            self.begin("rise")
        target = space.hand()
        target[:2] += way * min(1.0, 0.05 / max(1e-6, distance))
        target[2] = self.height
        return self.move(space, target, CLOSE)

    def rise(self, space: Workspace) -> np.ndarray:
        """Goes up."""
        self.over = self.steps > 15
        return self.move(space, space.hand() + UP, CLOSE)

    phases = {"above": above, "come": come, "drag": drag, "rise": rise}


def is_pushed(space: Workspace, item: str, place: str) -> bool:
    """Whether an item is too flat to be taken, and its place is a region of the table."""
    size = np.ptp(space.points(item), axis=0)
    return bool(space.scene.body(place) < 0 and size[2] < FLAT and size[:2].min() > WIDE)


def plan_push(space: Workspace, skill: Skill, tries: int) -> Push:
    """An attempt; each after a failed one presses a little further down."""
    points = space.points(skill.item)
    low = points[:, 2].min()
    top = points[:, 2].max()
    radius = np.linalg.norm(points[:, :2] - space.position(skill.item)[:2], axis=1).max()
    return Push(
        skill=skill,
        mat=space.pointing(DOWN, np.array([0.0, 1.0, 0.0])),
        safe_height=top + 0.15,
        phase="above",
        ahead=0.6 * radius,
        height=low + 0.012 - 0.002 * tries,
    )
