"""The pre-flight check: what must hold before an arm may move, as a table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from embodyrl import __version__
from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.actions import action_space
from embodyrl.real_robot.control.any_safety import Safety, decoder_for, tracker_for
from embodyrl.real_robot.control.chunk_check import chunk_report
from embodyrl.real_robot.control.device_checks import camera_report, gripper_report, watch_devices
from embodyrl.real_robot.control.executor import ExecutorConfig
from embodyrl.real_robot.control.input_checks import AT_REST, state_problem
from embodyrl.real_robot.control.joint_safety import JointSafetyConfig
from embodyrl.real_robot.control.joint_space import joint_space
from embodyrl.real_robot.control.messages import Array, JointTarget, RobotState, Target
from embodyrl.real_robot.control.robot import HasDevices, Robot, policy_sees
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.policy_link.server import check_observation

MAX_HAND_ERROR = 0.005
"""m by which the robot and this program may differ in where the hand is."""
PACKAGES = ("numpy", "ruckig", "msgpack", "websockets", "mcap", "mcap-ros2-support")


@dataclass(frozen=True)
class Check:
    """A line of the table: what was checked, whether it passed, and what was found."""

    name: str
    ok: bool
    found: str


def preflight(
    robot: Robot,
    infer: Callable[[dict[str, Any]], dict[str, Any]],
    metadata: Mapping[str, Any],
    safety: Safety,
    execution: ExecutorConfig,
    trials: int = 4,
    charged: Callable[[float], float] = float,
) -> list[Check]:
    """Checks everything without moving anything; stops early where later checks need earlier ones.

    Args:
        robot: at rest.
        infer: the policy: maps an observation to a chunk.
        metadata: what the policy's server says about it.
        safety: settings of the safety filter.
        execution: settings of the executor.
        trials: number of timed inferences, after ``chunk_check.WARM_UP``.
        charged: maps the s that an inference took to the s that it counts for, where the robot's
            time is simulated.
    """
    # The action space, and the robot.
    rate = execution.control_hz
    checks = [_check("action space", lambda: _actions(metadata, rate, safety))]
    if checks[0].ok:
        # The policy looks once for each chunk.
        looks = rate / execution.asks_after
        checks += robot_checks(robot, metadata, safety, rate, looks)
    if not all(c.ok for c in checks):
        return checks
    # How long the policy takes. Every trial is the first request of an episode, so what watches the
    # policy begins anew.
    decoder = decoder_for(metadata, rate, safety)
    decoder.start(robot.state().stamp, robot.state())
    checks.append(
        _check(
            "policy",
            lambda: chunk_report(
                infer,
                policy_sees(robot.observe(decoder)) | {"step": 0},
                execution,
                metadata,
                trials,
                charged,
            ),
        )
    )
    return checks


def robot_checks(
    robot: Robot, metadata: Mapping[str, Any], safety: Safety, rate: float, looks: float
) -> list[Check]:
    """The part of ``preflight`` that needs no policy: the robot, its cameras, and the stop.

    Args:
        robot: at rest.
        metadata: of the policy, or of the data that are to be recorded: its action space, cameras
            and proprio.
        safety: settings of the safety filter.
        rate: actions per second.
        looks: observations per second, each of which should have a new picture.
    """
    state = robot.state()
    checks = [
        _check("packages", _packages),
        _check("robot state", lambda: _state(robot, safety)),
        *_place_checks(robot, safety, state),
    ]
    if not all(c.ok for c in checks):
        return checks
    # The safety filter, in a simulation.
    checks.append(_check("emergency stop", lambda: _stop(safety, state.q)))
    # The devices beside the arm.
    checks += _devices(robot, looks)
    if not all(c.ok for c in checks):
        return checks
    # What the policy sees.
    decoder = decoder_for(metadata, rate, safety)
    decoder.start(state.stamp, state)
    checks.append(
        _check(
            "cameras and proprio",
            lambda: _observation(policy_sees(robot.observe(decoder)), metadata),
        )
    )
    return checks


def _devices(robot: Robot, looks: float) -> list[Check]:
    """A line for each camera, and one for the gripper, where they run in real time."""
    if not isinstance(robot, HasDevices):
        return []
    cameras = robot.cameras()
    gripper = robot.gripper()
    if not cameras and gripper is None:
        return []
    seen, measured = watch_devices(cameras, gripper)
    age = robot.max_image_age()
    checks = [
        _check(
            f"camera {name}",
            lambda camera=camera, name=name: camera_report(camera, seen[name], age, looks),
        )
        for name, camera in cameras.items()
    ]
    if gripper is not None:
        checks.append(_check("gripper", lambda: gripper_report(gripper, measured)))
    return checks


def _place_checks(robot: Robot, safety: Safety, state: RobotState) -> list[Check]:
    """Where the arm is, as far as its shape is known."""
    if isinstance(safety, JointSafetyConfig):
        return [_check("motors", lambda: _motors(safety, state.q))]
    return [
        _check(f"joint limits ({safety.robot})", lambda: _limits(safety, state.q)),
        _check("workspace", lambda: _workspace(safety, state.q)),
        _check("calibration", lambda: _calibration(robot)),
    ]


def print_checks(checks: list[Check]) -> None:
    """Prints the table."""
    width = max(len(c.name) for c in checks)
    for c in checks:
        print(f"  {'ok   ' if c.ok else 'FAILS'}  {c.name:<{width}}  {c.found}")


def _check(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, True, look())
    except UserError as error:
        return Check(name, False, str(error))


def _packages() -> str:
    try:
        return ", ".join(
            [f"embodyrl {__version__}", *(f"{name} {version(name)}" for name in PACKAGES)]
        )
    except PackageNotFoundError as error:
        raise UserError(f"{error.name} is not installed. Install embodyrl[robot].") from error


def _actions(metadata: Mapping[str, Any], rate: float, safety: Safety) -> str:
    motors = isinstance(safety, JointSafetyConfig)
    space = joint_space(metadata) if motors else action_space(metadata)
    if space.dims != metadata["action_dim"]:
        raise UserError(
            f"The policy has {metadata['action_dim']} action dims, but its control mode has "
            f"{space.dims}."
        )
    chunks = f"chunks of {metadata['horizon']} at {rate:g} Hz"
    return f"{metadata['control_mode']}, {chunks}, trained at {metadata['control_hz']:g}"


def _state(robot: Robot, safety: Safety) -> str:
    state = robot.state()
    if state.reflex:
        raise UserError(f"The robot is stopped by a reflex ({state.reflex}).")
    if state.trouble:
        raise UserError(f"The robot cannot be trusted: {state.trouble}.")
    if not (speed := float(np.abs(state.dq).max())) <= AT_REST:
        raise UserError(f"The arm moves at {speed:.2f} rad/s. It must be at rest.")
    if wrong := state_problem(safety, state.stamp, state):
        raise UserError(f"The robot cannot be used: {wrong}.")
    if isinstance(safety, JointSafetyConfig):
        return "at rest; nothing stops the arm when it pushes"
    force = "not watched" if safety.max_force is None else f"below {safety.max_force:g} N"
    return f"at rest, gripper {state.width * 100:.1f} cm open, external force {force}"


def _limits(safety: SafetyConfig, q: np.ndarray) -> str:
    safe = safety.robot_limits.inside()
    room = np.minimum(q - safe.q_min, safe.q_max - q)
    if not (least := float(room.min())) > 0.0:
        raise UserError(
            f"Joint {int(room.argmin()) + 1} is beyond its end by {-least:.3f} rad. Guide it back "
            "by hand."
        )
    return f"nearest end: joint {int(room.argmin()) + 1}, {least:.2f} rad away"


def _motors(safety: JointSafetyConfig, q: np.ndarray) -> str:
    if wrong := tracker_for(safety).start_problem(q.tolist()):
        raise UserError(f"{wrong}. Guide it there by hand, or give the arm a wider range.")
    room = np.minimum(q - safety.space.low, safety.space.high - q) / safety.space.unit
    motor = safety.space.motors[int(room.argmin())]
    return f"nearest end: {motor.name}, {room.min():.1f} {motor.unit} away"


def _workspace(safety: SafetyConfig, q: np.ndarray) -> str:
    place = np.array(kinematics.tip(q.tolist()))
    box = f"box {list(safety.box_low)} to {list(safety.box_high)} m"
    found = f"hand at {np.round(place, 3).tolist()}, {box}"
    if not ((place >= safety.box_low).all() and (place <= safety.box_high).all()):
        raise UserError(f"Outside: {found}.")
    if wrong := tracker_for(safety).start_problem(q.tolist()):
        raise UserError(f"{wrong[0].upper()}{wrong[1:]}.")
    return found


def _calibration(robot: Robot) -> str:
    """Whether the robot and this program compute the same hand position from the same angles."""
    away = math.inf
    end = time.monotonic() + 1.0
    # Angles and hand position may come in different messages, so a difference is looked at again.
    while not away <= MAX_HAND_ERROR and time.monotonic() < end:
        state = robot.state()
        if state.hand is None:
            return "the robot does not report the position of its hand"
        away = float(np.linalg.norm(state.hand - kinematics.tip(state.q.tolist())))
        time.sleep(0.02)
    found = f"the robot reports its hand {away * 1e3:.1f} mm from where its joint angles put it"
    if not away <= MAX_HAND_ERROR:
        raise UserError(
            f"{found}, more than {MAX_HAND_ERROR * 1e3:.0f}. Is safety.robot its model, and is "
            "Franka's hand the tool that is set in Desk?"
        )
    return found


def _stop(safety: Safety, q: Array) -> str:
    """Presses stop in the safety filter, while a simulated arm moves to the middle of its range."""
    guard = SafetyFilter(
        safety
        if isinstance(safety, JointSafetyConfig)
        # The force of this simulated arm has no noise.
        else replace(safety, max_force_repeat=None)
    )
    pressed = 0.3  # s, when stop is pressed
    dq = 0.0 * q
    free = np.zeros(3)
    guard.start(0.0, RobotState(0.0, q, dq, force=free))
    guard.run(0.0)
    middle = _middle(safety, q)
    for now in np.arange(1, round(1.5 / safety.tick)) * safety.tick:
        if now > pressed:
            guard.estop()
        state = RobotState(now, q, dq, force=free)
        command = guard.tick(now, state, replace(middle, stamp=now))
        q = command.q
        dq = command.dq
        if now > pressed and np.abs(dq).max() < 1e-6:
            took = (now - pressed) * 1e3
            return f"by software at rest in {took:.0f} ms; try the robot's own button by hand"
    raise UserError(
        "The arm would not come to rest within 1 s. Is safety.tick right, and is there room enough "
        "to move?"
    )


def _middle(safety: Safety, q: Array) -> Target | JointTarget:
    """The middle of the workspace, or of the motors' ranges."""
    if isinstance(safety, JointSafetyConfig):
        return JointTarget(0.0, (safety.space.low + safety.space.high) / 2)
    middle = (np.array(safety.box_low) + safety.box_high) / 2
    return Target(0.0, middle, kinematics.forward(q)[1], 0.0)


def _observation(observation: dict[str, Any], metadata: Mapping[str, Any]) -> str:
    has = len(observation["proprio"])
    if has != metadata["proprio_dim"]:
        raise UserError(
            f"The robot measures {has} numbers of proprio, and the policy was trained on "
            f"{metadata['proprio_dim']}. A policy of states (env.cameras=[]) sees what a simulator "
            "alone knows, such as where the objects are: train one that sees cameras. Else its "
            "control mode is another one."
        )
    check_observation(observation, metadata)
    dark = [name for name, image in observation["images"].items() if np.ptp(image) < 5]
    if dark:
        raise UserError(f"Camera {dark[0]} shows one colour only. Is it covered?")
    cameras = (
        ", ".join(f"{name} {h}x{w}" for name, (h, w) in metadata["cameras"].items()) or "no camera"
    )
    return f"{cameras}; {metadata['proprio_dim']} numbers of proprio; {observation['prompt']!r}"
