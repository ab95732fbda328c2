"""Picks an object up, and puts it on or into a place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from embodyrl.sims.libero.skills.grasp import Grasp, plan_grasp
from embodyrl.sims.libero.skills.plan import CLOSE, OPEN, UP, Attempt, Skill
from embodyrl.sims.libero.skills.workspace import Workspace

SPREAD = 0.6  # of a region's half size: how far out the ends of a row of items are


@dataclass(kw_only=True)
class PickPlace(Attempt):
    """Above, descend, grasp, lift, carry, lower, release, retreat.

    Attributes:
        grasp: how to hold the item.
        spot: (3,) from the middle of the place to where the item belongs.
        offset: (3,) gripper minus item in the hand's frame, when the fingers have closed.
    """

    grasp: Grasp
    spot: np.ndarray
    offset: np.ndarray | None = None

    def next_action(self, space: Workspace) -> np.ndarray:
        """See ``Attempt``; an item that slipped out of the hand ends it."""
        if self.phase in ("lift", "carry", "lower") and not self._held(space):
            self.over = True
            return self.move(space, space.hand() + UP, OPEN)
        return super().next_action(space)

    def _held(self, space: Workspace) -> bool:
        """Whether the item is still where the closed fingers took it."""
        off = self._offset(space) - self.offset
        return bool(np.linalg.norm(off) < 0.06)

    def _offset(self, space: Workspace) -> np.ndarray:
        return space.hand_mat().T @ (space.hand() - space.position(self.skill.item))

    def _hand_at_place(self, space: Workspace) -> np.ndarray:
        """Where the hand must be for the item in it to be at the place."""
        place = space.position(self.skill.place)
        return place + self.spot + (space.hand() - space.position(self.skill.item))

    def above(self, space: Workspace) -> np.ndarray:
        """Goes to a point above the grasp, at a safe height, and turns the hand."""
        target = self.grasp.position
        distance = np.linalg.norm(space.hand()[:2] - target[:2])
        if distance < 0.005 and space.speed() < 0.03 and self.turned(space):
            self.begin("descend")
        if distance <= 0.03:
            return self.move(space, target + np.array([0.0, 0.0, 0.06]), OPEN)
        return self.fly(space, target, OPEN)

    def descend(self, space: Workspace) -> np.ndarray:
        """Goes straight down; while it is off to the side, it rises slightly and corrects that."""
        off = space.hand() - self.grasp.position
        if np.linalg.norm(off) < 0.008 or self.steps > 30:
            self.begin("close")
        target = self.grasp.position.copy()
        if np.linalg.norm(off[:2]) >= 0.01:
            target[2] = space.hand()[2] + 0.01
        return self.move(space, target, OPEN)

    def close(self, space: Workspace) -> np.ndarray:
        """Closes the fingers, and then notes where in the hand the item is."""
        if self.steps > 9:
            self.offset = self._offset(space)
            self.begin("lift")
        return self.move(space, self.grasp.position, CLOSE)

    def lift(self, space: Workspace) -> np.ndarray:
        """Goes straight up."""
        hand = space.hand()
        if hand[2] > self.safe_height - 0.02 or self.steps > 40:
            self.begin("carry")
        return self.move(space, np.array([*hand[:2], self.safe_height + 0.02]), CLOSE)

    def carry(self, space: Workspace) -> np.ndarray:
        """Moves sideways until the item, and not the hand, is above the place."""
        self.mat = self.grasp.mat_at_place
        target = self._hand_at_place(space)
        target[2] = self.safe_height
        there = np.linalg.norm(space.hand()[:2] - target[:2]) < 0.012 and self.turned(space)
        if there or self.steps > 80:
            self.begin("lower")
        return self.move(space, target, CLOSE)

    def lower(self, space: Workspace) -> np.ndarray:
        """Goes down until the item's lowest point is just above the surface."""
        target = self._hand_at_place(space)
        lowest = space.points(self.skill.item)[:, 2].min()
        target[2] = self.grasp.release_height + space.hand()[2] - lowest + 0.01
        if abs(space.hand()[2] - target[2]) < 0.012 or self.steps > 40:
            self.begin("release")
        return self.move(space, target, CLOSE)

    def release(self, space: Workspace) -> np.ndarray:
        """Opens the fingers."""
        if self.steps > 8:
            self.begin("retreat")
        return self.move(space, space.hand(), OPEN)

    def retreat(self, space: Workspace) -> np.ndarray:
        """Rises."""
        self.over = self.steps > 20
        return self.move(space, space.hand() + UP, OPEN)

    phases: ClassVar = {
        "above": above,
        "descend": descend,
        "close": close,
        "lift": lift,
        "carry": carry,
        "lower": lower,
        "release": release,
        "retreat": retreat,
    }


def plan_pick_place(space: Workspace, skill: Skill, tries: int) -> PickPlace:
    """An attempt, whose grasp is another one after each that failed."""
    grasp = plan_grasp(space, skill.item, skill.place, tries)
    hanging = grasp.position[2] - space.points(skill.item)[:, 2].min()
    _, top = space.surface(skill.place)
    return PickPlace(
        skill=skill,
        mat=grasp.mat,
        safe_height=max(grasp.position[2] + 0.10, top + hanging + 0.04),
        phase="above",
        grasp=grasp,
        spot=_spot(space, skill),
    )


def _spot(space: Workspace, skill: Skill) -> np.ndarray:
    """(3,) from the middle of a region to an item's share of it, where several belong on it.

    They stand in a row, along the axis in which the item is narrow.
    """
    spot = np.zeros(3)
    half_size = space.half_size(skill.place)
    together = [goal[1] for goal in space.scene.goals() if goal[0::2] == ("on", skill.place)]
    if half_size is None or len(together) < 2:
        return spot
    axis = int(np.ptp(space.points(skill.item)[:, :2], axis=0).argmin())
    share = 2 * together.index(skill.item) / (len(together) - 1) - 1
    spot[axis] = SPREAD * share * half_size[axis]
    return spot
