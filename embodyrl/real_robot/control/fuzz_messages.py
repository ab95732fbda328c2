"""Sends the safety filter messages with one bad number in them, while the arm moves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.bound_monitor import BoundMonitor
from embodyrl.real_robot.control.fuzz import BOX
from embodyrl.real_robot.control.limit_monitor import LimitMonitor
from embodyrl.real_robot.control.messages import Array, Mode, RobotState, Target
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.safety_config import SafetyConfig

VALUES = (math.nan, math.inf, -math.inf, 0.0, -1.0, -1e9, 1e9, 1e300)
"""What a field is set to."""
FIELDS = (
    "now", "state.stamp", "state.q", "state.dq", "state.width", "state.force", "state.force_stamp",
    "target.stamp", "target.position", "target.rotation", "target.width",
)  # fmt: skip
"""What is spoilt: the clock, or a field of a message."""
HARMLESS = {
    ("state.q", 0.0), ("state.q", -1.0), ("target.rotation", 0.0), ("target.rotation", -1.0),
    ("state.dq", 0.0), ("state.dq", -1.0), ("state.dq", -1e9), ("state.dq", 1e9),
    ("state.dq", 1e300), ("state.width", 0.0), ("state.force", 0.0), ("state.force", -1.0),
    ("target.position", 0.0), ("target.position", -1.0), ("target.position", -1e9),
    ("target.position", 1e9), ("target.position", 1e300), ("target.width", 0.0),
    ("target.width", -1.0), ("target.width", -1e9), ("target.width", 1e9), ("target.width", 1e300),
}  # fmt: skip
"""Finite values that may be right, or that no command depends on: they need no fault."""
LONGEST = 15
"""Ticks within which anything else must be noticed: the age of a target, and two ticks."""
_CONFIG = SafetyConfig(**BOX, recover_reflex=True)  # type: ignore[arg-type]


def spoil(x: Array, rng: np.random.Generator, value: float) -> Array:
    """A copy of an array with one element set to ``value``."""
    x = x.copy()
    x.flat[rng.integers(x.size)] = value
    return x


def try_message(field: str, value: float, seed: int, ticks: int = 20) -> str:
    """Spoils one field for ``ticks`` ticks while the arm moves, and then lets it go on.

    Args:
        field: one of ``FIELDS``.
        value: one of ``VALUES``.
        seed: chooses the element, and the place that the arm moves to.
        ticks: for how long.

    Returns:
        What went wrong; empty if all commands were finite and within all limits, if the fault was
        noticed in words, and if the arm moves again once a person has cleared it.
    """
    rng = np.random.default_rng(seed)
    guard = SafetyFilter(_CONFIG)
    joints = LimitMonitor(guard.robot_limits, _CONFIG.tick)
    bounds = BoundMonitor(_CONFIG)
    goal = rng.uniform([0.4, -0.25, 0.15], [0.65, 0.25, 0.5])
    time = 0.0
    good = RobotState(time, kinematics.HOME, np.zeros(7), 0.08, np.ones(3), force_stamp=time)
    guard.start(time, good)
    guard.run(time)

    def tick(bad: bool) -> None:
        nonlocal time, good
        time += _CONFIG.tick
        last = guard.command
        assert last is not None
        force = rng.normal(1.0, 0.1, 3)  # a sensor has noise
        good = replace(good, stamp=time, q=last.q, dq=last.dq, force=force, force_stamp=time)
        target = Target(time, goal, kinematics.DOWN, 0.08)
        now, state = time, good
        message, _, name = field.partition(".")
        if bad and message == "now":
            now = value
        elif bad:
            spoilt = good if message == "state" else target
            old = getattr(spoilt, name)
            new = spoil(old, rng, value) if isinstance(old, np.ndarray) else value
            spoilt = replace(spoilt, **{name: new})
            state, target = (spoilt, target) if isinstance(spoilt, RobotState) else (good, spoilt)
        command = guard.tick(now, state, target)
        joints.see(command)
        bounds.see(command, state.q)
        numbers = (*command.q, *command.dq, *command.ddq, command.width, command.stamp)
        if not all(map(math.isfinite, numbers)):
            raise FloatingPointError(f"{field} = {value}: a command is not finite: {command}")

    def broken() -> str:
        wrong = joints.violated | bounds.violated
        return f"{field} = {value}: limits are broken: {wrong}" if wrong else ""

    # 1. The arm moves, and then something is wrong.
    for _ in range(8):
        tick(bad=False)
    noticed = 0
    for k in range(ticks):
        tick(bad=True)
        if guard.mode != Mode.RUN and not noticed:
            noticed = k + 1
    harmless = (field, value) in HARMLESS
    if not harmless and not (noticed and noticed <= LONGEST and len(guard.reason) > 10):
        return f"{field} = {value}: not noticed in {ticks} ticks ({guard.mode}: {guard.reason!r})"
    # 2. All is well again: the arm comes to rest, a person clears the fault, and it goes on.
    for _ in range(60):
        tick(bad=False)
        if np.abs(good.dq).max() == 0.0:
            break
    try:
        guard.clear(time, replace(good, q=guard.command.q, dq=np.zeros(7)))  # type: ignore[union-attr]
        if guard.mode != Mode.RUN:
            guard.run(time)
    except UserError as error:
        return f"{field} = {value}: it is not forgotten: {error}"
    for _ in range(10):
        tick(bad=False)
    if guard.mode != Mode.RUN:
        return f"{field} = {value}: it is not forgotten: {guard.reason}"
    return broken()


def fuzz_messages(tries: int, seed: int) -> list[str]:
    """Tries random fields and values; returns what went wrong, one line per try that failed."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(tries):
        field = FIELDS[rng.integers(len(FIELDS))]
        value = VALUES[rng.integers(len(VALUES))]
        if wrong := try_message(field, value, seed + number, ticks=int(rng.integers(15, 25))):
            found.append(wrong)
    return found
