"""An arm by libfranka: a ``Robot``, and also its ``Clock``, because its time is its own."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.functional.pictures import Image
from embodyrl.real_robot.cameras.camera import Camera
from embodyrl.real_robot.cameras.open_camera import open_camera
from embodyrl.real_robot.control.actions import ActionSpace, DeltaDecoder, proprio
from embodyrl.real_robot.control.input_checks import AT_REST, age_problem
from embodyrl.real_robot.control.messages import Command, RobotState
from embodyrl.real_robot.control.robot import NotReadyError
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.grippers.interface import Gripper
from embodyrl.real_robot.grippers.robotiq import Robotiq, RobotiqGripper
from embodyrl.real_robot.libfranka.config import Franka
from embodyrl.real_robot.libfranka.hand import FrankaHand
from embodyrl.real_robot.libfranka.process_link import Link, pair
from embodyrl.real_robot.parsing import number, numbers, text


class LibfrankaRobot:
    """See ``Robot`` and ``Clock``. Its processes are ``control_process`` and ``gripper_process``.

    Time is counted in the robot's cycles, and by this computer's clock when no cycle has come for
    ``arm.patience`` s.

    Args:
        arm: settings of the arm.
        safety: settings of the safety filter.
        space: of the policy's actions.
        cameras: of the policy, name -> (height, width).
        prompt: instruction for the policy.
        seconds: s to wait for the robot.

    Attributes:
        success_rate: share of the recent commands that the robot received in time.

    Raises:
        MissingDependencyError: there is no ``pylibfranka``.
        UserError: the robot, its gripper or a camera cannot be reached.
    """

    def __init__(
        self,
        arm: Franka,
        safety: SafetyConfig,
        space: ActionSpace,
        cameras: Mapping[str, tuple[int, int]],
        prompt: str = "",
        seconds: float = 30.0,
    ) -> None:
        if importlib.util.find_spec("pylibfranka") is None:
            raise MissingDependencyError(
                "libfranka's Python bindings are not installed. Install the version that fits the "
                "robot's system version: pip install pylibfranka"
            )
        if missing := [name for name in cameras if name not in arm.cameras]:
            raise UserError(
                f"The policy has a camera {missing[0]!r}, but none is given for it "
                "(libfranka.cameras)."
            )
        self._arm = arm
        self._tick = safety.tick
        self._space = space
        self._prompt = prompt
        self._recovers = safety.recover_reflex
        # What the processes last reported.
        self._state: RobotState | None = None
        self._state_sent = -np.inf  # when, by this computer's clock
        self._homing = False
        self._trouble = ""
        self.success_rate = 1.0
        self._now = 0.0
        self._commanded_width = -1.0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._gripper: Gripper | None = None
        self._cameras: dict[str, Camera] = {}
        try:
            flags = (safety.robot, arm.realtime, safety.recover_reflex)
            self._link = self._start("control_process", arm.address, *flags)
            grip = (arm.gripper_speed, arm.gripper_force)
            if isinstance(arm.gripper, RobotiqGripper):
                self._gripper = Robotiq(arm.gripper, *grip)
            elif arm.gripper:
                self._gripper = FrankaHand(self._start("gripper_process", arm.address, *grip))
            for name, size in cameras.items():
                self._cameras[name] = open_camera(name, arm.cameras[name], size)
            self._wait(lambda: self._state is not None, seconds, f"nothing came from {arm.address}")
        except BaseException:
            self.close()
            raise

    def _start(self, module: str, *arguments: Any) -> Link:
        """Starts a module of this package as a process, and returns the link to it."""
        link, other_end = pair()
        fd = other_end.fileno()
        words = map(str, (fd, *arguments))
        command = [sys.executable, "-m", f"{__package__}.{module}", *words]
        # Ctrl-C goes to the control loop alone, which brings the arm to rest first.
        process = subprocess.Popen(command, pass_fds=[fd], start_new_session=True)
        self._processes.append(process)
        other_end.close()
        return link

    def _wait(self, holds: Callable[[], Any], seconds: float, what: str) -> None:
        """Waits until ``holds`` is true.

        Raises:
            UserError: something went wrong meanwhile, or it took longer; ``what`` then says what.
        """
        end = time.monotonic() + seconds
        while not holds():
            self._link.wait(0.02)
            self._hear()
            if trouble := self._all_trouble():
                raise UserError(f"The robot cannot be used: {trouble}.")
            if time.monotonic() > end:
                raise UserError(f"The robot cannot be used: {what} within {seconds:.0f} s.")

    def _hear(self) -> None:
        """Takes in what the control process has reported since the last call.

        A message that is not understood is trouble, and so is a link that is closed.
        """
        for word, *rest in self._link.heard():
            try:
                self._take_in(word, rest)
            except Exception as error:
                self._link.fail(f"a message {word!a:.20} is not understood ({error})")
        self._trouble = self._trouble or self._link.trouble
        if self._link.closed:
            self._trouble = self._trouble or "the control process ended"

    def _take_in(self, word: str, rest: list[Any]) -> None:
        """Takes in one message of the control process.

        Raises:
            ValueError, TypeError: its values are not what they should be.
        """
        if word == "trouble":
            self._trouble = (
                self._trouble or text(rest[0], "the trouble", 4096) or "a process failed"
            )
        elif word == "state":
            t, sent, q, dq, force, hand, reflex, rate, homing = rest
            t = number(t, 0.0, 1e12, "the time")
            sent = number(sent, 0.0, 1e12, "the time")
            # Whether these are finite is the safety filter's to check.
            q, dq = (numbers(x, 7, "the joints", finite=False) for x in (q, dq))
            force = numbers(force, 3, "the force", finite=False)
            hand = numbers(hand, 3, "the hand")
            reflex = text(reflex, "the reflex", 4096)
            self.success_rate = number(rate, 0.0, 1.0, "the success rate")
            self._homing = homing is True
            self._state_sent = sent
            self._now = max(self._now, t)
            # Without Franka's hand the robot's end effector is another point than ours.
            hand = hand if self._arm.gripper is True else None
            self._state = RobotState(t, q, dq, 0.0, force, reflex, hand=hand)

    def begin(self, init: int, seconds: float = 30.0) -> None:
        """Moves the arm to its home posture, if it has one; a person arranges the scene.

        Raises:
            UserError: a reflex stopped the robot and may not be recovered from, or the arm does not
                come home.
        """
        self._recover(seconds)
        if self._arm.home:
            self._go(self._arm.home, seconds)
        self._commanded_width = -1.0

    def _recover(self, seconds: float) -> None:
        """Recovers from a reflex, where the safety filter's settings allow it."""
        reflex = self.state().reflex
        if reflex and not self._recovers:
            raise UserError(
                f"The robot is stopped by a reflex ({reflex}). Look at the robot, then restart."
            )
        if reflex:
            self._link.say("recover")
            self._wait(
                lambda: not self.state().reflex, seconds, "it did not recover from its reflex"
            )

    def _go(self, q: Any, seconds: float) -> None:
        """Moves slowly to the angles q (7,), and waits until the arm rests there as measured."""
        self._link.say("home", [float(x) for x in q])
        self._homing = True
        self._wait(lambda: not self._homing or self.state().reflex, seconds, "it did not come home")
        # The command comes to rest before the arm does.
        self._wait(
            lambda: self.state().reflex or float(np.abs(self.state().dq).max()) <= AT_REST,
            seconds,
            "it did not come to rest",
        )

    def now(self) -> float:
        """See ``Clock``."""
        self._hear()
        self._now = max(self._now, self._now_without_cycles())
        return self._now

    def _now_without_cycles(self) -> float:
        """The time by this computer's clock, for when no more cycles come."""
        assert self._state is not None
        return self._state.stamp + time.monotonic() - self._state_sent - self._arm.patience

    def sleep_until(self, stamp: float) -> None:
        """See ``Clock``."""
        while self.now() < stamp:
            # A closed link is always ready to be read, so waiting for it would not wait.
            time.sleep(0.001) if self._link.closed else self._link.wait(0.005)

    def state(self) -> RobotState:
        """See ``Robot``."""
        self._hear()
        state = self._state
        assert state is not None
        width = 0.0 if self._gripper is None else self._gripper.measured()[1]
        return replace(state, width=width, trouble=self._all_trouble())

    def _all_trouble(self) -> str:
        """What is wrong with the arm, or with its gripper; empty while all is well."""
        # A gripper that answers again is trusted again, once a person has cleared the fault.
        return self._trouble or ("" if self._gripper is None else self._gripper.trouble())

    def send(self, command: Command) -> None:
        """See ``Robot``."""
        motion = command.q.tolist(), command.dq.tolist(), command.ddq.tolist()
        self._link.say("command", command.stamp + self._tick, self._tick, *motion)
        # The gripper is told only when its width changes.
        if self._gripper is not None and command.width != self._commanded_width:
            self._gripper.move(command.width)
            self._commanded_width = command.width

    def observe(self, decoder: DeltaDecoder) -> dict[str, Any]:
        """See ``Robot``."""
        now = time.monotonic()
        images = {}
        depth = {}
        for name, camera in self._cameras.items():
            picture = camera.newest
            stamp = -np.inf if picture is None else picture.stamp
            what = f"picture of camera {name}"
            if wrong := age_problem(what, stamp, now, self._arm.max_image_age):
                raise NotReadyError(wrong)
            assert picture is not None
            images[name] = picture.image
            if picture.depth is not None:
                depth[name] = picture.depth
        return {
            "images": images,
            **({"depth": depth} if depth else {}),
            "proprio": proprio(self._space, self.state(), decoder),
            "prompt": self._prompt,
        }

    def pictures(self) -> dict[str, Image]:
        """See ``Robot``."""
        newest = {name: camera.newest for name, camera in self._cameras.items()}
        return {name: picture.image for name, picture in newest.items() if picture is not None}

    def cameras(self) -> Mapping[str, Camera]:
        """See ``HasDevices``."""
        return self._cameras

    def max_image_age(self) -> float:
        """See ``HasDevices``."""
        return self._arm.max_image_age

    def gripper(self) -> Gripper | None:
        """See ``HasDevices``."""
        return self._gripper

    def prompt(self) -> str:
        """See ``Robot``."""
        return self._prompt

    def solved(self) -> bool:
        """See ``Robot``; only a person can tell."""
        return False

    def close(self) -> None:
        """Ends the processes; the control process brings the arm to rest first."""
        for device in (getattr(self, "_link", None), self._gripper):
            if device is not None:
                device.close()
        for process in self._processes:
            try:
                process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
        for camera in self._cameras.values():
            camera.close()
