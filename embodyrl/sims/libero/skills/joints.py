"""Opens and closes drawers and doors, and turns knobs.

The hand takes a handle or a knob, or leans on a front from outside, and then follows the way of the
joint, which is read from the simulation.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from embodyrl.errors import UserError
from embodyrl.sims.libero.skills.grasp import YAWS
from embodyrl.sims.libero.skills.plan import CLOSE, OPEN, UP, Attempt, Skill
from embodyrl.sims.libero.skills.workspace import (
    DOWN,
    Joint,
    Workspace,
    body_geoms,
    body_points,
    geom_points,
)

MARGIN = 0.3  # of the way from the threshold to the joint's end that is driven beyond the threshold
LEAD = {True: 0.06, False: 0.4}  # how far ahead of the joint the hand aims: slides m, turns rad
CLEARANCE = 0.08  # metres above the part's highest point at which the hand flies
FINGER = 0.012  # metres from the middle of closed fingers to their side


@dataclass(kw_only=True)
class Drive(Attempt):
    """Above, approach, touch, close, follow, release, leave, rise.

    Attributes:
        joint: of the part that moves, which ``follow`` reads anew.
        target: position at which the joint has gone far enough.
        touching: (3,) where the hand is when it touches the part.
        approach: (3,) from there to where the hand comes from and goes to.
        grips: whether the fingers close on the part, or are closed before they touch it.
        turns: whether the hand turns with the part.
        start_mat: (3, 3) rotation of the hand when it touches the part.
    """

    joint: Joint
    target: float
    touching: np.ndarray
    approach: np.ndarray
    grips: bool
    turns: bool
    start_mat: np.ndarray

    @property
    def _before(self) -> float:
        """What the fingers do until they touch the part."""
        return OPEN if self.grips else CLOSE

    def above(self, space: Workspace) -> np.ndarray:
        """Goes over the start of the approach, at a safe height, and turns the hand."""
        start = self.touching + self.approach
        near = np.linalg.norm(space.hand()[:2] - start[:2]) < 0.02
        if (near and self.turned(space)) or self.steps > 100:
            self.begin("come")
        return self.fly(space, start, self._before)

    def come(self, space: Workspace) -> np.ndarray:
        """Goes down to where the approach starts."""
        start = self.touching + self.approach
        if np.linalg.norm(space.hand() - start) < 0.01 or self.steps > 40:
            self.begin("touch")
        return self.move(space, start, self._before)

    def touch(self, space: Workspace) -> np.ndarray:
        """Goes to the part."""
        if np.linalg.norm(space.hand() - self.touching) < 0.006 or self.steps > 30:
            self.begin("close" if self.grips else "follow")
        return self.move(space, self.touching, self._before)

    def close(self, space: Workspace) -> np.ndarray:
        """Closes the fingers on the part."""
        if self.steps > 8:
            self.begin("follow")
        return self.move(space, self.touching, CLOSE)

    def follow(self, space: Workspace) -> np.ndarray:
        """Aims at where the part will be when its joint is a little further on."""
        began = self.joint.position
        now = space.joint(self.joint.number).position
        way = np.sign(self.target - began)
        if way * (now - self.target) >= 0 or self.steps > 80:
            self.begin("release")
        rotation, shift = self.joint.motion(now - began + way * LEAD[self.joint.slides])
        if self.turns:
            self.mat = rotation @ self.start_mat
        return self.move(space, rotation @ self.touching + shift, CLOSE)

    def release(self, space: Workspace) -> np.ndarray:
        """Lets go, and notes where the hand is."""
        if self.steps > (6 if self.grips else 1):
            self.touching = space.hand()
            self.begin("leave")
        return self.move(space, space.hand(), self._before)

    def leave(self, space: Workspace) -> np.ndarray:
        """Goes back the way that it came."""
        end = self.touching + self.approach
        if np.linalg.norm(space.hand() - end) < 0.02 or self.steps > 20:
            self.begin("rise")
        return self.move(space, end, self._before)

    def rise(self, space: Workspace) -> np.ndarray:
        """Goes up."""
        self.over = space.hand()[2] > self.safe_height - 0.03 or self.steps > 30
        return self.move(space, space.hand() + UP, self._before)

    phases: ClassVar = {
        "above": above,
        "come": come,
        "touch": touch,
        "close": close,
        "follow": follow,
        "release": release,
        "leave": leave,
        "rise": rise,
    }


def plan_joint(space: Workspace, skill: Skill, tries: int) -> Drive:
    """How to open, close, turn on or turn off.

    Raises:
        UserError: it is a door to be opened.
    """
    _, limits = space.scene.articulation(skill.item)
    direction, threshold = limits[skill.kind]
    # The joint that is furthest from where it shall be; to open a cabinet, the nearest one.
    joints = sorted(space.joints(skill.item), key=lambda joint: direction * joint.position)
    joint = joints[-1 if skill.kind == "open" else 0]
    end = float(space.model.jnt_range[joint.number][1 if direction > 0 else 0])
    if joint.slides:
        way = _handle if skill.kind == "open" else _front
    elif skill.kind in ("turnon", "turnoff"):
        way = _knob
    elif skill.kind == "close":
        way = _door
    else:
        raise UserError(
            f"The scripted expert cannot do {space.scene.task.name}: it closes doors, and opens "
            "none. Demonstrate another task, or record your own episodes."
        )
    mat, touching, approach = way(space, joint, direction * joint.axis)
    top = float(space.points(skill.item)[:, 2].max())
    return Drive(
        skill=skill,
        mat=mat,
        safe_height=max(top, touching[2]) + CLEARANCE,
        phase="above",
        joint=joint,
        target=threshold + MARGIN * (end - threshold),
        touching=touching,
        approach=approach,
        grips=way in (_handle, _knob),
        turns=way is _knob,
        start_mat=mat,
    )


_Way = tuple[np.ndarray, np.ndarray, np.ndarray]  # rotation, touching and approach of a Drive


def _handle(space: Workspace, joint: Joint, pull: np.ndarray) -> _Way:
    """One finger above a drawer's handle and one below it; the hand points at the drawer."""
    centre, _ = _outermost(space, joint, pull)
    return space.pointing(-pull, DOWN), centre, 0.08 * pull


def _front(space: Workspace, joint: Joint, push: np.ndarray) -> _Way:
    """Closed fingers in front of a drawer's handle; the hand leans back from what is above."""
    _, edge = _outermost(space, joint, -push)
    return space.pointing(push + DOWN, np.cross(push, DOWN)), edge - FINGER * push, -0.06 * push


def _outermost(space: Workspace, joint: Joint, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The part of a drawer that sticks out furthest: its middle, and its outer side."""
    parts = [
        geom_points(space.model, space.data, geom) for geom in body_geoms(space.model, [joint.body])
    ]
    part = max(parts, key=lambda points: float(points.mean(0) @ out))
    centre = part.mean(0)
    return centre, centre + out * ((part - centre) @ out).max()


def _knob(space: Workspace, joint: Joint, _: np.ndarray) -> _Way:
    """Fingers from above, across the narrow side of the knob."""
    points = body_points(space.model, space.data, [joint.body])
    top = points[:, 2].max()
    upper = points[points[:, 2] > top - 0.02] - joint.anchor
    yaw = min(YAWS, key=lambda yaw: np.ptp(upper[:, :2] @ space.finger_axis(yaw)))
    fingers = np.array([*space.finger_axis(yaw), 0.0])
    return (
        space.pointing(DOWN, fingers),
        np.array([*joint.anchor[:2], top - 0.02]),
        np.array([0.0, 0.0, 0.08]),
    )


def _door(space: Workspace, joint: Joint, axis: np.ndarray) -> _Way:
    """Closed fingers from above on the door's outer side, most of the way from its hinge."""
    points = body_points(space.model, space.data, [joint.body])
    width = points.mean(0) - joint.anchor
    width[2] = 0.0
    width /= np.linalg.norm(width)
    push = np.cross(axis, width)  # the direction in which the door closes
    reach = ((points - joint.anchor) @ width).max()
    # The panel itself, and not a handle that stands off it.
    panel = points[((points - joint.anchor) @ width) > 0.9 * reach]
    outer = joint.anchor + 0.7 * reach * width
    outer += push * (((panel - joint.anchor) @ push).min() - FINGER)
    outer[2] = points[:, 2].max() - 0.05
    return space.pointing(DOWN, width), outer, -0.06 * push
