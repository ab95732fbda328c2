"""An arm behind topics, driven from this process, which imports no torch.

python ros_arm.py ros2|ros1|rosbridge ADDRESS LOG        sweeps to and fro until it is killed
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.real_robot.control import kinematics, limits
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder
from embodyrl.real_robot.control.clocks import Clock, RealClock
from embodyrl.real_robot.control.episode import RobotEpisode
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import ThreadInference
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.control.ticker import drive
from embodyrl.real_robot.logs.mcap_log import RunLog, read
from embodyrl.real_robot.ros import rosbridge
from embodyrl.real_robot.ros.config import PRESETS, load_robot
from embodyrl.real_robot.ros.connect_bus import connect
from embodyrl.real_robot.ros.robot import RosRobot

H, HZ = 8, 25.0
SPACE = SPACES["mujoco", "ee_delta_pos"]
# Other programs may keep this machine from a tick for longer than a robot's computer may be kept.
PATIENT = replace(load_robot("")[1], max_gap=1.0, max_state_age=1.0, max_target_age=1.5)
WATCHED = replace(PATIENT, max_force=30.0)
"""With the force stop, which needs the topic ``/wrench`` of ``ros_twin``."""
CALM = replace(PATIENT, max_gap=10.0, max_state_age=10.0, max_target_age=10.0)
"""Where nothing is to stop the arm, however busy this machine is."""
TOPICS = replace(PRESETS["twin"], max_image_age=2.0, max_clock_jump=2.0, wrench="/wrench")
BOX = {"box_low": PATIENT.box_low, "box_high": PATIENT.box_high}
rosbridge.STALL = 5.0


class Arm:
    """An arm behind topics, and a drive that logs; ``with`` lets go of it."""

    def __init__(self, kind: str, address: str, path: Path, *, blind: bool = False) -> None:
        self.bus, self.path = connect(kind, address), path
        cameras = {} if blind else {"front": (32, 32)}
        self.robot = RosRobot(
            self.bus, TOPICS, "panda", RealClock(), SPACE, cameras, tick=PATIENT.tick
        )

    def __enter__(self) -> Arm:
        return self

    def __exit__(self, *_: object) -> None:
        self.robot.close()

    def drive(
        self, infer: Callable[[dict[str, Any]], dict[str, Any]], seconds: float = 4.0,
        safety: SafetyConfig = WATCHED, clock: Clock | None = None, **options: Any,
    ) -> RobotEpisode:  # fmt: skip
        clock, guard, inference = clock or RealClock(), SafetyFilter(safety), ThreadInference(infer)
        log = RunLog(self.path, {}, clock.now(), "panda")
        problem = lambda now, text: log.event(now, "problem", text)  # noqa: E731
        executor = Executor(ExecutorConfig(H, 4, HZ, "naive"), inference, problem)
        decoder = DeltaDecoder(SPACE, HZ, safety.box_low, safety.box_high)
        try:
            return drive(
                self.robot, clock, guard, executor, decoder, log, seconds=seconds, **options
            )
        finally:
            inference.close()
            log.close()


def sweep(observation: dict[str, Any]) -> dict[str, Any]:
    """To and fro for ever, so that the arm moves when something happens."""
    there = observation["proprio"][4] < 0.0
    return {
        "actions": np.tile(np.array([0.0, 0.6 if there else -0.6, 0.0, 1.0], np.float32), (H, 1))
    }


TOLD = {
    "dead": "inference failed: gone",
    "not finite": "actions that are not finite",
    "wrong shape": "actions of shape (8, 3), not (8, 4)",
    "wrong horizon": "actions of shape (9, 4), not (8, 4)",
    "hangs": "stale: no fresh target",
}
"""What can happen to a policy, and what the log says of it."""


class Faults:
    """A policy that sweeps until its fifth request, where something happens to it.

    A cold start happens at its first request.
    """

    def __init__(self, fault: str, hang: float) -> None:
        self.fault, self.hang, self.asked = fault, hang, 0

    def __call__(self, observation: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        if self.fault == "cold start" and self.asked == 1:
            time.sleep(self.hang)
        if self.asked < 5 or self.fault == "cold start":
            return sweep(observation)
        if self.fault == "dead":
            raise ConnectionError("gone")
        if self.fault == "hangs":
            time.sleep(self.hang if self.asked == 5 else 0.0)
            return sweep(observation)
        shape = {"wrong shape": (H, 3), "wrong horizon": (H + 1, 4)}.get(self.fault, (H, 4))
        return {"actions": np.full(shape, np.nan, np.float32)}


FAR = {"box_low": (0.1, -0.7, 0.02), "box_high": (1.1, 0.7, 1.1)}
"""A workspace that ends where the arm cannot go."""
AWAY = {"stretched": (1.0, 0.0, 0.4), "end": (-1.0, 0.0, 0.0)}
"""Directions to where the arm is stretched (singular), and to where a joint is at its end."""


def towards(*way: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A policy that goes on and on, whatever is there."""
    chunk = np.tile(np.array([*way, 1.0], np.float32), (H, 1))
    return lambda observation: {"actions": chunk}


def ends_at_rest(
    episode: RobotEpisode, path: Path, mode: Mode, *told: str, reason: str = "", moving: bool = True
) -> None:
    """Checks an episode that a fault ended: mode, limits, time to stop, and the log.

    Args:
        episode: the result.
        path: of its log.
        mode: that it must end in.
        told: words of which the log must hold one.
        reason: part of the reason of the end.
        moving: whether the arm was surely moving when the fault came.
    """
    assert episode.mode == mode and reason in episode.reason and not episode.solved, episode
    assert max(episode.peak.values()) <= 1.0, episode.peak  # acceleration and jerk are among them
    messages = read(path)
    assert any(words in m["text"] for words in told for m in messages["/event"]), messages["/event"]
    assert (
        messages["/command"][-1]["mode"] == mode
        and messages["/episode"][0]["reason"] == episode.reason
    )
    speeds = np.array([np.abs(c["dq"]).max() for c in messages["/command"]])
    stopping = np.array([c["mode"] != "run" for c in messages["/command"]])
    assert speeds.max() > 0.05 and speeds[-1] < 1e-6
    took = (stopping & (speeds > 1e-6)).sum() * PATIENT.tick  # to stop
    assert took < 0.3, took
    # An arm that goes to and fro may be struck where it turns, and then stands within the tick: the
    # hardest stop takes .15 rad/s off.
    assert took > 0.0 or not moving or speeds[~stopping][-1] < 0.15, speeds[~stopping][-5:]


def goes_on(episode: RobotEpisode, path: Path, moved: float = 0.05) -> np.ndarray:
    """Checks that nothing stopped the arm before its time was up, within limits.

    Returns:
        The angles that it was told, (ticks, 7).
    """
    assert (episode.mode, episode.reason) == (Mode.HOLD, "the time is up"), episode
    assert max(episode.peak.values()) <= 1.0, episode.peak
    messages = read(path)
    assert [m["text"] for m in messages["/event"] if "fault" in m["text"]] == []
    way = np.array([m["q"] for m in messages["/command"]])
    assert (
        np.ptp(hands(way), axis=0).max() > moved
        and np.abs(messages["/command"][-1]["dq"]).max() < 1e-6
    )
    return way


def hands(way: np.ndarray) -> np.ndarray:
    """Where the hand is (ticks, 3)."""
    return np.array([kinematics.tip(q) for q in way.tolist()])


def is_there(q: np.ndarray, where: str, robot: str) -> bool:
    """Whether the arm came to what ``AWAY`` names."""
    if where == "stretched":
        return np.linalg.svd(kinematics.forward(q)[2], compute_uv=False).min() < 0.02
    limit = limits.limits_of(robot)
    return bool(np.minimum(q - limit.q_min, limit.q_max - q).min() < 0.1)


class TakesOver:
    """A person who takes over at the policy's fifth request, and lets go after a second.

    Where a busy machine stopped the arm, they look, clear what there is to clear, and go on; they
    give up in the end.
    """

    def __init__(self, policy: Faults, now: Callable[[], float]) -> None:
        self.policy, self.now, self.took, self.paused, self.patience = (
            policy,
            now,
            0.0,
            False,
            now() + 90.0,
        )

    def wishes(self) -> list[str]:
        now, paused, self.paused = self.now(), self.paused, False
        if now > self.patience or (self.took and now > self.took + 1.0):
            return ["failure"]
        if paused:
            return ["clear", "takeover" if self.took else "run"]
        if not self.took and self.policy.asked >= 5:
            self.took = now
            return ["takeover"]
        return []

    def alive(self, now: float) -> bool:
        return True

    def action(self, dims: int) -> Any:
        return np.eye(dims, dtype=np.float32)[0] * 0.3

    def show(self, status: dict[str, Any], images: dict[str, Any]) -> None:
        self.paused = status["numbers"]["who moves the arm"] == "paused"


if __name__ == "__main__":
    with Arm(sys.argv[1], sys.argv[2], Path(sys.argv[3])) as arm:
        arm.robot.begin(0)
        print("sweeps", flush=True)
        print(arm.drive(sweep, seconds=120.0))
