"""Pushes something flat along the table, with a finger on either side of the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from embodyrl.sims.libero.skills.plan import OPEN, UP, Attempt, Skill
from embodyrl.sims.libero.skills.workspace import DOWN, Workspace

FLAT = 0.04  # metres; what is lower, and wider than 0.1, is pushed to a region of the table
WIDE = 0.1
ROOM = 0.012  # metres between the item and where the hand comes down behind it
HALF_OPENING = 0.05  # metres from the middle of the open fingers to the middle of each
LEAN = 0.6
TIPS = 0.008  # metres above the table


@dataclass(kw_only=True)
class Push(Attempt):
    """Above, come, push, rise: open fingers lean on the item's rim from behind, so it stays ahead.

    Attributes:
        behind: metres from the item's middle to the hand when it touches.
        height: of the finger tips.
        start_way: (2,) in which the item was pushed first; one that has gone past is left alone.
    """

    behind: float
    height: float
    start_way: np.ndarray

    def _way(self, space: Workspace) -> np.ndarray:
        """(2,) from the item's middle to the place."""
        return (space.position(self.skill.place) - space.position(self.skill.item))[:2]

    def _rear(self, space: Workspace, distance: float) -> np.ndarray:
        """(3,) that far behind the item on its way to the place."""
        way = self._way(space)
        way *= distance / max(1e-6, np.linalg.norm(way))
        return np.array([*(space.position(self.skill.item)[:2] - way), self.height])

    def above(self, space: Workspace) -> np.ndarray:
        """Goes over a point behind the item, at a safe height."""
        target = self._rear(space, self.behind + ROOM)
        near = np.linalg.norm(space.hand()[:2] - target[:2]) < 0.015
        if (near and self.turned(space)) or self.steps > 50:
            self.begin("come")
        return self.fly(space, target, OPEN)

    def come(self, space: Workspace) -> np.ndarray:
        """Goes down to the table."""
        if abs(space.hand()[2] - self.height) < 0.006 or self.steps > 30:
            self.begin("push")
        return self.move(space, self._rear(space, self.behind + ROOM), OPEN)

    def push(self, space: Workspace) -> np.ndarray:
        """Moves on slowly; a hand that has left the line goes back to it before it pushes on."""
        way = self._way(space)
        distance = float(np.linalg.norm(way))
        if distance < 0.015 or way @ self.start_way < 0 or self.steps > 150:
            self.begin("rise")
        ahead = space.position(self.skill.item)[:2] - space.hand()[:2]
        aligned = ahead @ way > 0.93 * np.linalg.norm(ahead) * distance
        return self.move(space, self._rear(space, self.behind + (-0.025 if aligned else 0.0)), OPEN)

    def rise(self, space: Workspace) -> np.ndarray:
        """Goes up."""
        self.over = self.steps > 15
        return self.move(space, space.hand() + UP, OPEN)

    phases: ClassVar = {"above": above, "come": come, "push": push, "rise": rise}


def is_pushed(space: Workspace, item: str, place: str) -> bool:
    """Whether an item is too flat to be taken, and its place is a region of the table."""
    size = np.ptp(space.points(item), axis=0)
    return bool(space.scene.body(place) < 0 and size[2] < FLAT and size[:2].min() > WIDE)


def plan_push(space: Workspace, skill: Skill, tries: int) -> Push:
    """An attempt; each after a failed one has the finger tips a little lower."""
    points = space.points(skill.item)
    middle = space.position(skill.item)
    radius = float(np.linalg.norm((points - middle)[:, :2], axis=1).max())
    way = (space.position(skill.place) - middle) * [1.0, 1.0, 0.0]
    way /= np.linalg.norm(way)
    return Push(
        skill=skill,
        # The hand leans over the item, away from what may stand behind it.
        mat=space.pointing(DOWN - LEAN * way, np.cross(way, DOWN)),
        safe_height=float(points[:, 2].max()) + 0.15,
        phase="above",
        # Two fingers touch a round rim at a chord, which is nearer than the rim.
        behind=float(np.sqrt(max(0.0, radius**2 - HALF_OPENING**2))) + 0.01,
        height=float(points[:, 2].min()) + max(0.002, TIPS - 0.002 * tries),
        start_way=way[:2],
    )
