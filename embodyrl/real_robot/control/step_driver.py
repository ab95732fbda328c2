"""Moves the arm one action at a time, for an environment; ``ticker`` runs whole episodes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.real_robot.control import input_checks, kinematics
from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.clocks import Clock
from embodyrl.real_robot.control.episode import event_lines
from embodyrl.real_robot.control.frozen_camera import FrozenCameraCheck
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.operator import Operator
from embodyrl.real_robot.control.priority import real_time_priority
from embodyrl.real_robot.control.robot import NotReadyError, Robot
from embodyrl.real_robot.control.safety import CONTACT_REASONS, Event, SafetyFilter
from embodyrl.real_robot.control.ticker import AT_REST
from embodyrl.real_robot.logs.mcap_log import RunLog

WISHES = ("estop", "hold", "run", "takeover", "release", "success", "failure")
"""What an operator can ask for here; there is no way back and no clearing of faults."""
PATIENCE = 0.5
"""s that an image may be late before the chunk is given up."""


class StepDriver:
    """Ticks the safety filter between the actions of its owner.

    An arm in real time must be told something at every tick, whatever its owner does meanwhile:
    infer, learn, or wait for a person. So ``start`` starts a thread that ticks, and that holds the
    arm when no action comes. Simulated time stands still meanwhile, so there ``wait_until`` ticks
    in the owner's thread.

    Args:
        robot: connected.
        clock: of its stamps.
        guard: fresh; with ``resume="fresh_target"`` the next action ends a hold.
        decoder: of the actions.
        threaded: whether the clock runs in real time.
        log: where ticks, actions and changes of mode are recorded, if anywhere.

    Attributes:
        events: changes of mode.
        person: whether the actions are a person's.
    """

    def __init__(
        self,
        robot: Robot,
        clock: Clock,
        guard: SafetyFilter,
        decoder: DeltaDecoder,
        threaded: bool,
        log: RunLog | None = None,
    ) -> None:
        self.robot = robot
        self.clock = clock
        self.guard = guard
        self.decoder = decoder
        self.events: list[Event] = []
        self.person = False
        self._log = log
        self._lock = threading.Lock()
        self._action_ends = 0.0  # when the last action is over
        self._tick_due = 0.0
        self._thread = (
            threading.Thread(target=self._work, name="ticker", daemon=True) if threaded else None
        )
        self._closing = False
        self._error = None
        guard.on_event = self._on_event

    def start(self) -> None:
        """Starts at rest where the arm is, ready for actions.

        Raises:
            UserError: the arm may not start from there.
        """
        now = self.clock.now()
        state = self.robot.state()
        self.guard.start(now, state)
        self.decoder.start(now, state)
        self.guard.run(now)
        self._action_ends = now
        self._tick_due = now
        if self._thread is not None:
            self._thread.start()

    def act(
        self,
        action: NDArray[np.float32],
        seen: dict[str, Any] | None = None,
        *,
        logged: bool = True,
    ) -> float:
        """Takes an action now.

        Args:
            action: (A,).
            seen: what the policy saw before it, for the log.
            logged: whether the log has it as an action, and not only the ticks that follow.

        Returns:
            When the next action is due.
        """
        with self._lock:
            now = self.clock.now()
            # The last action of a person may be old only because the policy's owner was inferring.
            stale = self.guard.mode == Mode.HOLD and self.guard.reason.startswith("stale")
            if self.person and stale:
                self.guard.takeover(now)
            self.decoder.act(now, action, self.robot.state())
            # A small delay of the caller does not lower the control rate.
            late = now - self._action_ends
            began = self._action_ends if late < 0.5 * self.decoder.period else now
            self._action_ends = began + self.decoder.period
            if self._log is not None and logged:
                self._log.action(now, np.clip(action, -1.0, 1.0), self.person, seen)
            return self._action_ends

    def wait_until(self, stamp: float) -> None:
        """Lets time pass until ``stamp``, while the arm moves.

        Raises:
            Exception: what ended the ticker's thread.
        """
        if self._thread is not None:
            self.clock.sleep_until(stamp)
            if self._error is not None:
                raise self._error
            return
        while self._tick_due < stamp - 1e-9:
            self._tick()

    def go_home(
        self, home: Sequence[float], is_open: bool = True, person: Operator | None = None
    ) -> None:
        """Moves the hand to ``home`` (3,) m, by actions like the policy's.

        Args:
            home: in the base's frame.
            is_open: whether the fingers are open on the way.
            person: who may stop it; None where nobody is at a page.
        """
        space = self.decoder.space
        self.decoder.rotation = kinematics.DOWN
        action = np.zeros(space.dims, np.float32)
        action[-1] = 1.0 if is_open else -1.0
        for _ in range(200):
            way = (np.array(home) - self.decoder.position) / space.metres
            if np.abs(way).max() < 0.1 or self.broken:
                return
            action[:3] = np.clip(way, -0.5, 0.5)
            self.wait_until(self.act(action, logged=False))
            if person is not None:
                watch_home(person, self.guard, self.robot, self.status())

    def stop(self, seconds: float = 2.0) -> None:
        """Brings the arm to rest within ``seconds`` and ends the thread."""
        self.hold("the episode is over")
        # In simulated time waiting is what ticks; in real time the thread does.
        end = self.clock.now() + seconds
        while self.clock.now() < end and self._moving():
            self.wait_until(self.clock.now() + self.guard.config.tick)
        self._closing = True
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=seconds)

    def _moving(self) -> bool:
        command = self.guard.command
        if command is None:
            return False
        if not float(np.abs(command.dq).max()) <= AT_REST:
            return True
        # The next episode may only start once the arm itself is at rest, too.
        return not float(np.abs(self.robot.state().dq).max()) <= input_checks.AT_REST

    def hold(self, reason: str) -> None:
        """Brakes to a stop. The next action ends it only if the reason begins with "stale"."""
        with self._lock:
            self.guard.hold(self.clock.now(), reason)

    def status(self) -> dict[str, Any]:
        """The state for ``Operator.show``."""
        return {
            "mode": str(self.guard.mode),
            "reason": self.guard.reason,
            "task": self.robot.prompt(),
            "open": self.decoder.width > 0.0,
            "can": list(WISHES),
            "numbers": {},
            "events": event_lines(self.events),
        }

    def hand_over(self, person: bool) -> None:
        """Gives the arm to a person, or back to the policy; either starts where the arm is."""
        if self.broken:
            return
        with self._lock:
            now = self.clock.now()
            # Deltas add up from where the arm is, not from where the other one wanted it to be.
            self.decoder.start(now, self.robot.state())
            if person:
                self.guard.takeover(now)
            else:
                self.guard.release(now)
                if self.guard.mode == Mode.HOLD:
                    self.guard.run(now)
            self.person = person

    @property
    def broken(self) -> str:
        """Why the arm takes no more actions; empty while it does."""
        return self.guard.reason if self.guard.mode in (Mode.FAULT, Mode.ESTOP) else ""

    @property
    def hit_something(self) -> bool:
        """Whether the arm stopped because the actions drove it against something."""
        return self.broken.startswith(CONTACT_REASONS)

    def _tick(self) -> None:
        """One tick: measure, filter, send, wait."""
        with self._lock:
            now = self.clock.now()
            state = self.robot.state()
            # The target counts as fresh until the last action is over.
            fresh = now < self._action_ends + self.guard.config.tick
            target = replace(self.decoder.target(now, fresh), human=self.person)
            command = self.guard.tick(now, state, target)
            self.robot.send(command)
            if self._log is not None:
                self._log.tick(command, state)
        # A late tick delays the next one: there is no burst of ticks.
        self._tick_due = max(self._tick_due + self.guard.config.tick, now)
        self.clock.sleep_until(self._tick_due)

    def _work(self) -> None:
        try:
            with real_time_priority(self.clock):
                while not self._closing:
                    self._tick()
        except Exception as error:  # of the robot or the filter: raised in the owner's thread
            self._error = error

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        if self._log is not None:
            self._log.event(event.stamp, "mode", f"{event.before} -> {event.after}: {event.reason}")


def patient_look(cameras: FrozenCameraCheck, driver: StepDriver, simulated: bool) -> dict[str, Any]:
    """What the policy sees now (``Robot.observe``); waits up to ``PATIENCE`` s for a late image.

    Args:
        cameras: of the driver's robot.
        driver: of the arm.
        simulated: whether time stands still meanwhile, so that no image can come.

    Raises:
        NotReadyError: no image came in time.
    """
    end = driver.clock.now() + PATIENCE
    while True:
        try:
            return cameras.observe(driver.decoder)
        except NotReadyError:
            if simulated or driver.clock.now() > end:
                raise
            driver.clock.sleep_until(driver.clock.now() + 0.02)


def watch_home(
    person: Operator, guard: SafetyFilter, robot: Robot, status: Mapping[str, Any]
) -> None:
    """Hears a person's stop while the arm goes home, and shows them the arm.

    Args:
        person: at a page.
        guard: of the arm.
        robot: whose pictures are shown.
        status: what else ``Operator.show`` says.
    """
    if "estop" in person.wishes():
        guard.estop("a person pressed stop")
    stopped = guard.mode in (Mode.FAULT, Mode.ESTOP)
    shown = {
        "mode": str(guard.mode),
        "reason": guard.reason if stopped else "the arm goes home",
        "can": ["estop"],
        "asks": "",
    }
    person.show({**status, **shown}, robot.pictures())
