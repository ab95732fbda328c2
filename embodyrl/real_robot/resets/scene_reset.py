"""Runs a reset, through the safety filter and with a log of its own, within a bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.connect_robot import ConnectedRobot
from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.episode import BROKEN_OFF, EndedBy
from embodyrl.real_robot.control.frozen_camera import FrozenCameraCheck
from embodyrl.real_robot.control.operator import HOLDS, LOST, Operator
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.step_driver import StepDriver, patient_look
from embodyrl.real_robot.logs.earlier_logs import next_number
from embodyrl.real_robot.logs.mcap_log import RunLog
from embodyrl.real_robot.resets.judges import Judge
from embodyrl.real_robot.resets.ways import Way

MAY = ("estop", "hold", LOST, "success", "failure")
"""What a person may ask for during a reset; a takeover belongs to an episode."""


@dataclass(frozen=True)
class ResetResult:
    """How a reset ended.

    Attributes:
        ready: whether the scene is back.
        tries: that it took.
        seconds: by the arm's clock.
        reason: why it is not back; empty if it is.
    """

    ready: bool
    tries: int
    seconds: float
    reason: str


@dataclass
class SceneReset:
    """Brings the scene back: one way, tried so often, for so long each time.

    Attributes:
        connected: the robot, at rest.
        way: what moves the arm.
        decoder: makes a fresh decoder of actions.
        judge: tells whether the scene is back; None believes a way that came to its end.
        home: (3,) m, where the hand goes then.
        seconds: that one try may take, by the arm's clock.
        tries: the most.
        prompt: instruction of the way's policy, in place of the robot's; empty for the robot's own.
        log: folder of the logs; empty for none.
        described: what each log begins with.
        record: also log what the policy sees.
        operator: a person who may stop it.
    """

    connected: ConnectedRobot
    way: Way
    decoder: Callable[[], DeltaDecoder]
    judge: Judge | None
    home: tuple[float, float, float]
    seconds: float
    tries: int
    prompt: str = ""
    log: str = ""
    described: Mapping[str, Any] = field(default_factory=dict)
    record: bool = False
    operator: Operator | None = None

    def __post_init__(self) -> None:
        # Behind the logs of an earlier run.
        self._first_log = next_number(self.log, "reset") if self.log else 0

    def __call__(self, number: int) -> ResetResult:
        """Tries until the scene is back, or the tries are used up.

        Args:
            number: of the reset; it names the log, and draws what the way draws.
        """
        # Another try may help where time ran out, and not where the arm stopped.
        began = self.connected.clock.now()
        reason = ""
        tried = 0
        for tried in range(1, self.tries + 1):
            reason, again = self._try(number, tried)
            if not reason or not again:
                break
        seconds = self.connected.clock.now() - began
        return ResetResult(not reason, tried, seconds, reason)

    def _try(self, number: int, tried: int) -> tuple[str, bool]:
        """One try: why the scene is not back, empty if it is; and whether to try again."""
        clock = self.connected.clock
        log = self._open_log(number, tried)
        guard = SafetyFilter(replace(self.connected.safety, resume="fresh_target"))
        driver = StepDriver(
            self.connected.robot, clock, guard, self.decoder(), not self.connected.simulated, log
        )
        reason, again = BROKEN_OFF, False
        by = EndedBy.POLICY
        try:
            driver.start()
            try:
                reason, again = self._move(driver, number)
                # The scene is back: out of the way, with what the hand holds.
                if not reason:
                    is_open = self.way.lets_go or driver.decoder.width > 0.0
                    driver.go_home(self.home, is_open, self.operator)
            finally:
                driver.stop()
            if driver.broken:
                # Whatever stopped the arm has to be looked at.
                reason, again = f"the arm stopped: {driver.broken}", False
                by = EndedBy.POLICY if driver.hit_something else EndedBy.FAULT
        # The arm may not start from where it is, or a camera gives no pictures.
        except UserError as error:
            reason, again = str(error), False
            by = EndedBy.FAULT
        finally:
            if log is not None:
                ending = {"solved": not reason, "reason": reason or "the scene is back"}
                log.put("/episode", clock.now(), ending | {"ended_by": str(by)})
                log.close()
        return reason, again

    def _move(self, driver: StepDriver, number: int) -> tuple[str, bool]:
        """Moves the arm until the scene is back; as ``_try``."""
        clock = self.connected.clock
        cameras = FrozenCameraCheck(self.connected.robot)
        end = clock.now() + self.seconds
        if self.judge is not None:
            self.judge.begin()

        def look() -> dict[str, Any]:
            seen = patient_look(cameras, driver, self.connected.simulated)
            return seen | ({"prompt": self.prompt} if self.prompt else {})

        for action in self.way(driver, look, number):
            seen = look() if self.record and self.log else None
            driver.wait_until(driver.act(np.clip(action, -1.0, 1.0), seen))
            if driver.broken:
                return driver.broken, False
            # A person beside the arm counts above the judge.
            if said := self._attend(driver):
                return ("", False) if said == "success" else (said, False)
            # Without a judge the end of the way is the end.
            if self.judge is not None and self.judge(look):
                return "", False
            if clock.now() >= end:
                return f"it is not back after {self.seconds:g} s", True
        if self.judge is not None:
            return "the way came to its end, and it is not back", True
        return "", False

    def _attend(self, driver: StepDriver) -> str:
        """What a person said: ``success``, or why it ends; empty for nothing."""
        if self.operator is None:
            return ""
        # 1. What they ask for; a takeover belongs to an episode.
        said = ""
        for wish in [wish for wish in self.operator.wishes() if wish in MAY]:
            if wish == "estop":
                driver.guard.estop("a person pressed stop")
                driver.wait_until(driver.clock.now() + 2 * driver.guard.config.tick)
                said = driver.broken
            elif wish in HOLDS:
                driver.hold(HOLDS[wish])
                said = HOLDS[wish]
            else:
                said = "success" if wish == "success" else "a person said failure"
        # 2. What they are shown.
        status = driver.status() | {"can": [*MAY], "task": self.prompt or driver.robot.prompt()}
        status["reason"] = status["reason"] or f"resetting the scene ({self.way.name})"
        self.operator.show(status, self.connected.robot.pictures())
        return said

    def _open_log(self, number: int, tried: int) -> RunLog | None:
        """The log of a try, marked as that of a reset."""
        if not self.log:
            return None
        path = Path(self.log) / f"reset_{self._first_log + number:06d}_{tried}.mcap"
        marked = {"reset": {"by": self.way.name, "try": tried}}
        safety = self.connected.safety
        described = {**self.described, **marked, "init": number, "safety": asdict(safety)}
        return RunLog(path, described, self.connected.clock.now(), safety.robot)
