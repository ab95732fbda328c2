"""The kinematics that the safety filter writes out in floats, against numpy's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.least_squares import damped_step
from embodyrl.real_robot.control.limits import FR3

RNG = np.random.default_rng(0)


def turned(frame: kinematics.Frame) -> np.ndarray:
    """The rotation (3, 3) of joint 7 in a frame."""
    return np.reshape(frame[3:], (3, 3)).T


def test_a_damped_step_is_that_of_numpy() -> None:
    for scale in (1.0, 1e-3, 0.0):  # down to a Jacobian that is singular
        jacobian = RNG.normal(size=(6, 7))
        jacobian[5] *= scale
        rest, error = RNG.normal(size=7), RNG.normal(size=6)
        gram = jacobian @ jacobian.T + 0.02**2 * np.eye(6)
        step = rest + jacobian.T @ np.linalg.solve(gram, error - jacobian @ rest)
        columns = list(map(tuple, jacobian.T.tolist()))
        np.testing.assert_allclose(
            damped_step(columns, rest.tolist(), error.tolist(), 0.02), step, atol=1e-10
        )


def test_inverse_kinematics_reaches_a_pose() -> None:
    low, high = FR3.q_min.tolist(), FR3.q_max.tolist()
    for _ in range(10):
        there = kinematics.HOME + RNG.uniform(-0.3, 0.3, 7)
        position, rotation, _ = kinematics.forward(there)
        goal = kinematics.hand_frame(position, rotation)
        np.testing.assert_allclose(goal, kinematics.frame(there.tolist()), atol=1e-12)
        q = kinematics.HOME.tolist()
        for _ in range(60):
            q = kinematics.ik_step(q, goal, low, high, posture_gain=0.0)
        np.testing.assert_allclose(kinematics.frame(q), goal, atol=1e-4)


@pytest.mark.parametrize("angle", [1e-4, 0.3, 2.0, math.pi - 0.01, math.pi])
def test_a_turn_is_cut_on_its_way(angle: float) -> None:
    for _ in range(10):
        start = kinematics.frame((kinematics.HOME + RNG.normal(0.0, 0.5, 7)).tolist())
        axis = RNG.normal(size=3)
        turn = kinematics.exp_rotation(angle * axis / np.linalg.norm(axis)) @ turned(start)
        goal = (0.1, 0.2, 0.3, *turn.T.ravel().tolist())
        assert kinematics.turned_at_most(start, goal, angle + 1e-6) == goal
        part = kinematics.turned_at_most(start, goal, 0.25 * angle)
        assert part[:3] == goal[:3]
        # A quarter of the way, four times, in the same direction; half a turn has two directions.
        quarter = turned(part) @ turned(start).T
        np.testing.assert_allclose(
            np.linalg.matrix_power(quarter, 4) @ turned(start), turn, atol=1e-6
        )


def test_half_a_turn_of_a_rotation_that_is_not_exact_is_cut_too() -> None:
    """The filter lets a target pass whose rotation is one to within a thousandth."""
    start = kinematics.hand_frame(np.zeros(3), kinematics.DOWN)
    goal = kinematics.hand_frame(np.zeros(3), np.diag([0.9997, 0.9997, 0.9994]))
    part = kinematics.turned_at_most(start, goal, 0.5)
    assert kinematics.turn_trace(start, part) == pytest.approx(1.0 + 2.0 * math.cos(0.5))
