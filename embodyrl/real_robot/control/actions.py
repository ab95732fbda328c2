"""Turns a policy's actions into target poses, and the robot's state into the policy's proprio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import UserError, did_you_mean
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.config_checks import require_number
from embodyrl.real_robot.control.limits import MAX_WIDTH
from embodyrl.real_robot.control.messages import Array, Command, RobotState, Target


@dataclass(frozen=True)
class ActionSpace:
    """What an action means, as in the environment that the policy was trained in.

    Attributes:
        dims: A. The action is x, y, z, then a rotation vector if there are seven dimensions, then
            the gripper (above 0 opens). All are in [-1, 1].
        metres: m that the commanded hand moves for a value of 1.
        radians: rad that it turns for a value of 1.
        max_lead: m that the commanded hand may be ahead of the measured one.
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
    """The action space of the policy that a server's metadata describes.

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
    _check_conventions(SPACES[key], metadata.get("conventions", {}))
    return SPACES[key]


def _check_conventions(space: ActionSpace, said: Mapping[str, Any]) -> None:
    """Refuses a policy whose pictures or actions mean something else than the robot's.

    Args:
        space: that the robot carries out.
        said: what is known of the policy's conventions, see ``types.Conventions``.

    Raises:
        UserError: naming the first difference.
    """
    scale = [space.metres] * 3 + [space.radians] * (space.dims - 4)
    ours = {
        "orientation": "upright", "channels": "rgb", "fit": "crop", "actions": "delta",
        "scale": scale, "gripper": [-1.0, 1.0],
    }  # fmt: skip
    for name, value in ours.items():
        theirs = said.get(name, value)
        if theirs != value:
            raise UserError(
                f"The policy was trained with {name} {theirs!r}, and a robot has {value!r}: "
                "what it sees or does would mean something else. Train it on data that are "
                f"translated (data.convention={{{name}: ...}}; see docs/conventions.md)."
            )


class DeltaDecoder:
    """Adds up end-effector deltas into a commanded pose.

    Over each control step the target moves to that pose in a straight line. The commanded pose is
    integrated, not the measured one, so that tracking errors do not add up.

    Args:
        space: of the actions.
        control_hz: actions per second.
        box_low: (3,) m, lower corner of the workspace.
        box_high: (3,) m, upper corner of the workspace.

    Attributes:
        position: (3,) m, the commanded position.
        rotation: (3, 3) the commanded rotation.
        width: m, the commanded opening of the gripper.
    """

    def __init__(self, space: ActionSpace, control_hz: float, box_low: Any, box_high: Any) -> None:
        require_number("control_hz", control_hz, 1e-3, 1000.0, "actions per second")
        self.space = space
        self.period = 1.0 / control_hz
        self._low = np.array(box_low)
        self._high = np.array(box_high)

    def start(self, now: float, state: RobotState) -> None:
        """Starts at the measured pose."""
        self.position, self.rotation, _ = kinematics.forward(state.q)
        # The present step: where it began, and when.
        self._before = self.position
        self._since = now
        self._stamp = now
        # Fingers that are more than half open count as open.
        self.width = MAX_WIDTH if state.width > MAX_WIDTH / 2 else 0.0

    def act(self, now: float, action: NDArray[np.float32], state: RobotState) -> None:
        """Adds an action (A,) that is due now; one that is not finite makes the targets so."""
        move: Array = np.clip(action.astype(np.float64), -1.0, 1.0)
        here = np.array(kinematics.tip(state.q.tolist()))
        # Integrate the command, but keep it near the measured hand and inside the workspace.
        goal = self.position + self.space.metres * move[:3]
        goal = np.clip(goal, here - self.space.max_lead, here + self.space.max_lead)
        self._before = self.position
        self._since = now
        self.position = np.clip(goal, self._low, self._high)
        # The rotation is about axes of the base, so it is multiplied from the left.
        if self.space.dims == 7:
            self.rotation = kinematics.exp_rotation(self.space.radians * move[3:6]) @ self.rotation
        # What is not a number must not close the gripper: the safety filter refuses it.
        open_ = float(move[-1])
        self.width = math.nan if math.isnan(open_) else MAX_WIDTH if open_ > 0 else 0.0

    def towards(self, position: Array, rotation: Array, is_open: bool) -> NDArray[np.float32]:
        """The action (A,) that comes nearest to a pose, in one step from the commanded one.

        Args:
            position: (3,) m.
            rotation: (3, 3); of no effect where actions do not turn the hand.
            is_open: whether the fingers shall be open.
        """
        action = np.zeros(self.space.dims, np.float32)
        action[:3] = (position - self.position) / self.space.metres
        if self.space.dims == 7:
            turn = kinematics.rotation_vector(rotation @ self.rotation.T)
            action[3:6] = turn / self.space.radians
        action[-1] = 1.0 if is_open else -1.0
        return action.clip(-1.0, 1.0)

    def back_to(self, q: Array, command: Command) -> NDArray[np.float32]:
        """The action (A,) that goes back to the joint angles q (7,), with the fingers as they are."""
        position, rotation, _ = kinematics.forward(q)
        return self.towards(position, rotation, is_open=command.width > 0.0)

    def told(self) -> dict[str, str]:
        """Where the hand is told to be, for a person."""
        x, y, z = self.position
        return {"hand told to be at (m)": f"{x:.3f} {y:.3f} {z:.3f}"}

    def target(self, now: float, fresh: bool) -> Target:
        """Where to be now; its stamp only advances while the actions are ``fresh``."""
        if fresh:
            self._stamp = now
        # Linear interpolation from the last commanded position to this one.
        share = min(max((now - self._since) / self.period, 0.0), 1.0)
        return Target(
            self._stamp,
            self._before + share * (self.position - self._before),
            self.rotation,
            self.width,
        )


def proprio_dim(space: ActionSpace) -> int:
    """P, the length of ``proprio``."""
    return 13 if space.dims == 7 else 7


def proprio(space: ActionSpace, state: RobotState, decoder: DeltaDecoder) -> NDArray[np.float32]:
    """The policy's proprio (P,) float32, as in the MuJoCo tasks.

    It holds the position of the hand, the commanded position, for seven action dimensions the two
    rotations as vectors against pointing down, and the opening of the gripper.
    """
    position, rotation, _ = kinematics.forward(state.q)
    parts = [position, decoder.position]
    if space.dims == 7:
        parts += [
            kinematics.rotation_vector(kinematics.DOWN @ each.T)
            for each in (rotation, decoder.rotation)
        ]
    return np.concatenate([*parts, [state.width]]).astype(np.float32)
