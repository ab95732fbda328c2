"""Faults of state, sensors and clock on the simulated arm: mode, limits, time to stop, and log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ros_arm import AWAY, FAR, ends_at_rest, goes_on, is_there

from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder
from embodyrl.real_robot.control.episode import RobotEpisode
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import VirtualInference
from embodyrl.real_robot.control.messages import Mode, RobotState
from embodyrl.real_robot.control.robot import NotReadyError
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.control.ticker import drive
from embodyrl.real_robot.control.tracking import BOX_SLACK
from embodyrl.real_robot.logs.mcap_log import RunLog, read
from embodyrl.real_robot.twin.mujoco_twin import BOX, MujocoTwin
from embodyrl.sims.mujoco.env import MujocoConfig

H, HZ = 8, 25.0
SPACE = SPACES["mujoco", "ee_delta_pos"]


FORCES = ("force", "same force")
"""Faults of the force at the hand, which is watched only then."""


class Faulty(MujocoTwin):
    """An arm to which something happens half a second into its episode, when it moves."""

    fault, when = "", 0.5
    number, kept = 0, ()

    def _struck(self, fault: str) -> bool:
        return self.fault == fault and self._now >= self.when

    def now(self) -> float:
        jump = {"clock ahead": 3.0, "clock back": -0.4}.get(self.fault, 0.0)
        return self._now + (jump if self._now >= self.when else 0.0)

    def sleep_until(self, stamp: float) -> None:
        stall = self._struck("stall") and self._now < self.when + 0.05
        super().sleep_until(stamp - (self.now() - self._now) + (0.06 if stall else 0.0))

    def state(self) -> RobotState:
        state = super().state()
        if self._now < self.when:
            self.before = state
        if self.fault in ("late", "frozen") and self._now >= self.when:
            return self.before if self.fault == "late" else replace(self.before, stamp=state.stamp)
        if self._struck("shuffled"):  # lost, repeated, in the wrong order
            self.number += 1
            self.kept = [*self.kept, state][-4:]
            return self.kept[self.number % len(self.kept)]
        if self._struck("not finite"):
            return replace(state, q=state.q * np.nan)
        if self.fault not in FORCES:
            return state
        # Its noise changes from state to state, until the sensor repeats itself.
        until = self.when if self.fault == "same force" else np.inf
        force = 1.0 + 0.1 * np.sin(1e3 * min(self._now, until))
        return replace(state, force=np.array([0.0, 0.0, 50.0 if self._struck("force") else force]))

    def observe(self, decoder: DeltaDecoder) -> dict[str, Any]:
        if self._struck("camera"):
            raise NotReadyError("no fresh picture of camera front for 0.40 s")
        seen = super().observe(decoder)
        frame = self.when if self._struck("repeats") else self._now
        return seen | {"images": {"front": np.full((2, 2, 3), int(frame * 1e3) % 251, np.uint8)}}

    def grasp(self, width: float) -> None:
        if not self._struck("gripper"):
            super().grasp(width)

    def solved(self) -> bool:
        return False  # an episode is not to end for it


@pytest.fixture(scope="module")
def twin() -> Iterator[Faulty]:
    twin = Faulty(MujocoConfig(task="reach", renderer="none", cameras=()))
    yield twin
    twin.close()


def driven(
    twin: Faulty, path: Path, action: list[float], seconds: float = 4.0, box: dict[str, Any] = BOX
) -> RobotEpisode:
    chunk = {"actions": np.tile(np.array(action, np.float32), (H, 1))}
    twin.begin(0)
    executor = Executor(
        ExecutorConfig(H, 4, HZ, "naive"), VirtualInference(lambda seen: chunk, lambda took: 0.05)
    )
    log = RunLog(path, {}, twin.now())
    watched = 30.0 if twin.fault in FORCES else None
    guard = SafetyFilter(SafetyConfig(**box, robot="panda", max_force=watched))  # type: ignore[arg-type]
    try:
        return drive(
            twin, twin, guard, executor, DeltaDecoder(SPACE, HZ, **box), log, seconds=seconds
        )
    finally:
        log.close()


@pytest.mark.parametrize(
    ("fault", "mode", "told"),
    [
        ("late", Mode.FAULT, "no fresh state of the robot for 0.0"),
        ("frozen", Mode.FAULT, "the measured angles stand still"),
        ("not finite", Mode.FAULT, "not 7 finite angles"),
        ("force", Mode.FAULT, "force: 50 N at the hand"),
        ("same force", Mode.FAULT, "the measured force at the hand is exactly the same"),
        ("camera", Mode.HOLD, "no fresh picture of camera front"),
        ("repeats", Mode.HOLD, "camera front repeats its picture"),
        ("clock ahead", Mode.FAULT, "no fresh state of the robot for 3."),
        ("clock back", Mode.FAULT, "state of the robot is 0.400 s in the future"),
        ("stall", Mode.HOLD, "no tick for 0.0"),
    ],
)
def test_what_happens_in_mid_motion_ends_at_rest_within_limits_and_in_the_log(
    twin: Faulty, tmp_path: Path, fault: str, mode: Mode, told: str
) -> None:
    twin.fault = fault
    episode = driven(twin, tmp_path / "run.mcap", [0.1, 0.35, 0.2, 1.0])
    twin.fault = ""
    ends_at_rest(episode, tmp_path / "run.mcap", mode, told)


@pytest.mark.parametrize("fault", ["shuffled", "gripper"])
def test_what_needs_no_stop_does_not_stop_it(twin: Faulty, tmp_path: Path, fault: str) -> None:
    """States that are lost, repeated and in the wrong order, and a gripper that hangs."""
    twin.fault = fault
    twin.kept = []  # not the states of an earlier episode
    episode = driven(twin, tmp_path / "run.mcap", [0.1, 0.35, 0.2, -1.0])
    twin.fault = ""
    goes_on(episode, tmp_path / "run.mcap")


@pytest.mark.parametrize("where", AWAY)
def test_where_it_cannot_go_the_arm_stays_within_limits(
    twin: Faulty, tmp_path: Path, where: str
) -> None:
    way = goes_on(
        driven(twin, tmp_path / "run.mcap", [*AWAY[where], 1.0], 6.0, FAR), tmp_path / "run.mcap"
    )
    assert is_there(way[-1], where, "panda")


@pytest.mark.parametrize(
    "action",
    [[0.0, 0.0, -1.0, 1.0], [1.0, 1.0, 0.0, 1.0], [-1.0, -1.0, 1.0, 1.0], [0.6, -0.6, -1.0, 1.0]],
)
def test_who_pushes_against_the_workspace_stays_in_it(
    twin: Faulty, tmp_path: Path, action: list[float]
) -> None:
    episode = driven(twin, tmp_path / "run.mcap", action)
    assert (episode.mode, episode.reason) == (Mode.HOLD, "the time is up") and max(
        episode.peak.values()
    ) <= 1.0
    hand = np.array([kinematics.tip(m["q"]) for m in read(tmp_path / "run.mcap")["/state"]])
    assert (hand > np.array(BOX["box_low"]) - BOX_SLACK - 0.005).all()
    assert (hand < np.array(BOX["box_high"]) + BOX_SLACK + 0.005).all()
    # It did go there, and where it pushes along a wall it goes along it.
    assert (np.ptp(hand, axis=0) > 0.1)[np.array(action[:3]) != 0.0].all()
