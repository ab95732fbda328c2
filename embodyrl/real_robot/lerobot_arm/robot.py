"""A ``lerobot.robots.Robot`` as our ``Robot``."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from embodyrl.errors import UserError, did_you_mean
from embodyrl.functional.pictures import Image, fit
from embodyrl.real_robot.control.clocks import Clock
from embodyrl.real_robot.control.input_checks import age_problem
from embodyrl.real_robot.control.joint_safety import JointSafetyConfig
from embodyrl.real_robot.control.joint_space import JointDecoder
from embodyrl.real_robot.control.messages import Array, Command, Mode, RobotState
from embodyrl.real_robot.control.robot import NotReadyError
from embodyrl.real_robot.lerobot_arm.known import device_config

SUFFIX = ".pos"
"""What LeRobot's names of positions end with."""
PERIOD = 0.005
"""s that the thread rests between two rounds, at least."""
AGAIN = 0.1
"""s until a device that failed is asked again."""
WINDOW = 0.15
"""s over which velocities are measured: LeRobot tells positions alone, in steps of an encoder."""
NEAR = 0.05
"""rad from where a resting arm is, within which commands are sent again after they were not."""
MAX_IMAGE_AGE = 0.5
"""s, oldest image that the policy may see."""


class LeRobotArm:
    """See ``Robot``. One thread speaks with the device: sends the newest command, then reads.

    Args:
        settings: of LeRobot's config, with its ``type``.
        safety: ranges of the motors.
        clock: of the stamps.
        cameras: of the policy, name -> (height, width).
        prompt: instruction for the policy.
        seconds: s to wait for the first reading.

    Raises:
        MissingDependencyError: LeRobot is not installed.
        UserError: no such robot, it cannot be connected, or its motors or cameras are others.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        safety: JointSafetyConfig,
        clock: Clock,
        cameras: Mapping[str, tuple[int, int]],
        prompt: str = "",
        seconds: float = 30.0,
    ) -> None:
        self._space = safety.space
        self._clock = clock
        self._sizes = dict(cameras)
        self._prompt = prompt
        self._names = [f"{name}{SUFFIX}" for name in safety.motors]
        self._max_error = safety.max_error
        self._max_lead = safety.max_lead
        self._command: Command | None = None
        self._let_go = False  # nothing is sent until the commands are near the arm
        self._measured: Array | None = None  # by the last reading; None after one that failed
        self._state: RobotState | None = None
        self._images: dict[str, Image] = {}
        self._trouble = ""
        self._recent: deque[tuple[float, Array]] = deque()
        self._closing = False
        self._device = _connect(settings)
        self._thread = threading.Thread(target=self._work, name="lerobot", daemon=True)
        try:
            _check_features(self._device, self._names, self._sizes)
            self._thread.start()
            self._wait(seconds)
        except BaseException:
            self.close()
            raise

    def _wait(self, seconds: float) -> None:
        """Waits for velocities, which need a few readings.

        Raises:
            UserError: the device fails, or does not answer.
        """
        # The first state needs two readings, for the velocities.
        end = time.monotonic() + seconds
        while self._state is None:
            time.sleep(0.01)
            if self._trouble:
                raise UserError(f"The robot cannot be used: {self._trouble}.")
            if time.monotonic() > end:
                raise UserError(
                    f"The robot cannot be used: it told nothing within {seconds:.0f} s."
                )

    def _work(self) -> None:
        """Commands and readings until ``close``."""
        while not self._closing:
            try:
                self._act()
                self._take_in(self._device.get_observation())
                self._trouble = ""
                time.sleep(PERIOD)
            except Exception as error:  # of the device's own kinds
                self._measured = None
                self._trouble = f"LeRobot's robot failed ({' '.join(str(error).split())[:200]})"
                time.sleep(AGAIN)

    def _act(self) -> None:
        """Sends the newest command.

        An arm that is elsewhere, such as one that fell while its power was off, would jump to it.
        The filter has a fault then, and once that is cleared its commands begin where the arm is.
        """
        command, measured = self._command, self._measured
        if command is None or measured is None:
            return
        away = float(np.abs(command.q - measured).max())
        # Back to where it is measured it goes without a jump; moved, with the lead that it may have.
        again = self._max_lead if command.mode in (Mode.RUN, Mode.HUMAN) else NEAR
        self._let_go = not away <= (again if self._let_go else self._max_error)
        if not self._let_go:
            values = (command.q / self._space.unit).tolist()
            self._device.send_action(dict(zip(self._names, values, strict=True)))

    def _take_in(self, seen: Mapping[str, Any]) -> None:
        """Takes in what the device tells; whether it is finite is for the filter to check."""
        now = self._clock.now()
        q = np.array([float(seen[name]) for name in self._names]) * self._space.unit
        self._measured = q
        # Velocities: from the oldest reading in the window to this one.
        self._recent.append((now, q))
        while len(self._recent) > 2 and self._recent[1][0] <= now - WINDOW:
            self._recent.popleft()
        since, before = self._recent[0]
        # A new list of pictures, because the old one may be in use.
        self._images = {
            name: fit(np.ascontiguousarray(seen[name], np.uint8), size)
            for name, size in self._sizes.items()
        }
        if now - since >= WINDOW:
            self._state = RobotState(now, q, (q - before) / (now - since))

    def state(self) -> RobotState:
        """See ``Robot``."""
        assert self._state is not None
        return replace(self._state, trouble=self._trouble)

    def send(self, command: Command) -> None:
        """See ``Robot``; the thread sends it."""
        self._command = command

    def observe(self, decoder: JointDecoder) -> dict[str, Any]:
        """See ``Robot``."""
        state = self.state()
        images = self._images
        if wrong := age_problem("picture", state.stamp, self._clock.now(), MAX_IMAGE_AGE):
            raise NotReadyError(wrong)
        return {"images": images, "proprio": self._space.share(state.q), "prompt": self._prompt}

    def pictures(self) -> dict[str, Image]:
        """See ``Robot``."""
        return self._images

    def prompt(self) -> str:
        """See ``Robot``."""
        return self._prompt

    def solved(self) -> bool:
        """See ``Robot``; only a person can tell."""
        return False

    def close(self) -> None:
        """Disconnects; LeRobot's robots let go of their motors then, unless told otherwise."""
        self._closing = True
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        try:
            self._device.disconnect()
        except Exception as error:  # of the device's own kinds
            print(f"  LeRobot's robot could not be disconnected: {error}", flush=True)


def _connect(settings: Mapping[str, Any]) -> Any:
    """Connects the device. Calibrating asks at the terminal: LeRobot's own command does that.

    Raises:
        UserError: it cannot be connected, or is not calibrated.
    """
    # 1. Its settings, as LeRobot reads them.
    others = {key: value for key, value in settings.items() if key != "type"}
    kind = str(settings["type"])
    config = device_config("robot", kind, others, "section lerobot of --robot-file")
    from lerobot.robots import make_robot_from_config

    # 2. Connect; its drivers raise errors of many kinds.
    try:
        device = make_robot_from_config(config)
        device.connect(calibrate=False)
    except Exception as error:  # of the device's own kinds
        said = " ".join(str(error).split())[:300]
        raise UserError(
            f"LeRobot's robot {kind} cannot be connected: {said}. Its settings stand in the section "
            "lerobot of --robot-file."
        ) from error
    if not device.is_calibrated:
        device.disconnect()
        raise UserError(
            f"LeRobot's robot {kind} is not calibrated. Do that first: lerobot-calibrate "
            f"--robot.type={kind} ..."
        )
    return device


def _check_features(device: Any, names: list[str], cameras: Mapping[str, Any]) -> None:
    """Checks that the motors and cameras are those of the file and the policy.

    Raises:
        UserError: naming the first that is not.
    """
    # The motors, by name: their order is the file's.
    seen = device.observation_features
    motors = [name for name in device.action_features if name.endswith(SUFFIX)]
    plain = [name.removesuffix(SUFFIX) for name in motors]
    for name in (n.removesuffix(SUFFIX) for n in names):
        if name not in plain:
            raise UserError(
                f"safety.joints names the motor {name}, which the robot has not. "
                f"{did_you_mean(name, plain)}"
            )
    if missing := [name for name in motors if name not in names]:
        raise UserError(
            f"safety.joints gives no range for the motor {missing[0].removesuffix(SUFFIX)}. The robot "
            f"has {', '.join(plain)}."
        )
    # What is told besides, and what is told but not measured.
    others = [name for name in device.action_features if not name.endswith(SUFFIX)]
    if others or not set(motors) <= set(seen):
        raise UserError(
            f"This robot is told more than positions of motors that it measures "
            f"({', '.join([*others, *(set(motors) - set(seen))])}), which is not known here."
        )
    # The cameras; those of depth have one channel.
    shown = [name for name, kind in seen.items() if isinstance(kind, tuple) and kind[-1] == 3]
    for name in cameras:
        if name not in shown:
            raise UserError(
                f"The policy, or the data, have a camera {name!r}, and the robot has "
                f"{', '.join(shown) or 'none'}. Name it so in lerobot.cameras of the robot's file."
            )
