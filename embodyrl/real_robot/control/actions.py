"""From a policy's actions to poses for the safety filter, and from poses to the policy's proprio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import UserError, did_you_mean
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.messages import Array, RobotState, Target
from embodyrl.real_robot.control.safety import MAX_WIDTH


@dataclass(frozen=True)
class ActionSpace:
    """What an action of a control mode means; as in the env that the policy was trained in.

    Attributes:
        dims: A; x, y, z, then three of rotation if there are seven, then the gripper (above 0
            opens).
        metres: that the commanded hand moves at 1.
        radians: that it turns at 1.
        max_lead: m that the command may be ahead of the measured hand.
    """

    dims: int
    metres: float
    radians: float
    max_lead: float


_MODES = {
    "ee_delta_pos": ActionSpace(4, 0.035, 0.0, 0.08),
    "ee_delta_pose": ActionSpace(7, 0.035, 0.15, 0.08),
}
SPACES = {(env, mode): space for env in ("mujoco", "robot") for mode, space in _MODES.items()}
"""(env, control mode) -> what its actions mean."""


def action_space(metadata: Mapping[str, Any]) -> ActionSpace:
    """Of the policy that a server's metadata describes.

    Raises:
        UserError: its control mode is not known here.
    """
    key = (str(metadata.get("env", "")).partition("/")[0], str(metadata.get("control_mode", "")))
    if key not in SPACES:
        known = [f"{env}/{mode}" for env, mode in SPACES]
        raise UserError(
            f"Actions of {'/'.join(key)} are not known to a robot. "
            f"{did_you_mean('/'.join(key), known)}"
        )
    return SPACES[key]


class DeltaDecoder:
    """Adds up end-effector deltas into the pose that is commanded, and moves to it in a straight line over each step.

    The commanded pose is integrated, not the measured one, so that tracking errors do not add up.
    """

    def __init__(self, space: ActionSpace, control_hz: float, box_low: Any, box_high: Any) -> None:
        self.space = space
        self.period = 1.0 / control_hz
        self._low = np.array(box_low)
        self._high = np.array(box_high)

    def start(self, now: float, state: RobotState) -> None:
        """Begins at the measured pose."""
        self.position, self.rotation, _ = kinematics.forward(state.q)
        self._before = self.position
        self._since = now
        self._stamp = now
        self.width = MAX_WIDTH if state.width > MAX_WIDTH / 2 else 0.0

    def act(self, now: float, action: NDArray[np.float32], state: RobotState) -> None:
        """Takes an action (A,) that is due now."""
        move: Array = np.clip(action.astype(np.float64), -1.0, 1.0)
        here = np.array(kinematics.tip(state.q.tolist()))
        goal = self.position + self.space.metres * move[:3]
        goal = np.clip(goal, here - self.space.max_lead, here + self.space.max_lead)
        self._before = self.position
        self._since = now
        self.position = np.clip(goal, self._low, self._high)
        if self.space.dims == 7:
            self.rotation = kinematics.exp_rotation(self.space.radians * move[3:6]) @ self.rotation
        self.width = MAX_WIDTH if move[-1] > 0 else 0.0

    def target(self, now: float, fresh: bool) -> Target:
        """Where to be now; its stamp only moves on while the actions are ``fresh``."""
        if fresh:
            self._stamp = now
        share = min(max((now - self._since) / self.period, 0.0), 1.0)
        return Target(
            self._stamp,
            self._before + share * (self.position - self._before),
            self.rotation,
            self.width,
        )


def proprio_dim(space: ActionSpace) -> int:
    """P of ``proprio``."""
    return 13 if space.dims == 7 else 7


def proprio(space: ActionSpace, state: RobotState, decoder: DeltaDecoder) -> NDArray[np.float32]:
    """(P,) float32 as the MuJoCo tasks give it: hand, commanded hand, their rotations if they turn, gripper."""
    position, rotation, _ = kinematics.forward(state.q)
    parts = [position, decoder.position]
    if space.dims == 7:
        parts += [
            kinematics.rotation_vector(kinematics.DOWN @ each.T)
            for each in (rotation, decoder.rotation)
        ]
    return np.concatenate([*parts, [state.width]]).astype(np.float32)
