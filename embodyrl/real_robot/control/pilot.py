"""An arm that is moved action by action, by whoever calls ``act``: the ticker behind ``RobotEnv``."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.safety import PRESSED, Event, SafetyFilter
from embodyrl.real_robot.control.transports import Clock, Robot
from embodyrl.real_robot.logs.mcap_log import RunLog


class Pilot:
    """Ticks the safety filter, in the caller's thread or in one of its own.

    An arm in the wall clock's time must be told something at every tick, whatever its owner does
    meanwhile: think, learn, wait for a person. So ``start`` starts a thread, which holds the arm
    when no action comes. In simulated time, which stands still meanwhile, ``wait_until`` ticks.

    Args:
        robot: connected.
        clock: of its stamps.
        guard: fresh; with ``resume="fresh_target"`` the next action ends a hold.
        decoder: of the actions.
        threaded: whether the clock goes on by itself.
        log: what ticks, actions and changes of mode are written to, if any.
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
        self._ends = 0.0
        self._thread = (
            threading.Thread(target=self._work, name="ticker", daemon=True) if threaded else None
        )
        self._closing = False
        self._error = None
        guard.on_event = self._note

    def start(self) -> None:
        """At rest where the arm is, ready for actions.

        Raises:
            UserError: the arm may not start from there.
        """
        now = self.clock.now()
        state = self.robot.state()
        self.guard.start(now, state)
        self.decoder.start(now, state)
        self.guard.run(now)
        self._ends = self._due = now
        if self._thread is not None:
            self._thread.start()

    def act(self, action: NDArray[np.float32], seen: dict[str, Any] | None = None) -> float:
        """An action (A,) that is due now; returns when the next one is. What was ``seen`` before goes into the log."""
        with self._lock:
            now = self.clock.now()
            if (
                self.person
                and self.guard.mode == Mode.HOLD
                and self.guard.reason.startswith("stale")
            ):
                self.guard.takeover(
                    now
                )  # their last action was a while ago, because the policy's owner was thinking
            self.decoder.act(now, action, self.robot.state())
            # On time after a small delay of the caller's, so that the control rate is kept.
            began = self._ends if now - self._ends < 0.5 * self.decoder.period else now
            self._ends = began + self.decoder.period
            if self._log is not None:
                self._log.action(now, np.clip(action, -1.0, 1.0), self.person, seen)
            return self._ends

    def wait_until(self, stamp: float) -> None:
        """Lets time pass.

        Raises:
            Exception: what ended the ticker's thread.
        """
        if self._thread is not None:
            self.clock.sleep_until(stamp)
            if self._error is not None:
                raise self._error
            return
        while self._due < stamp - 1e-9:
            self._tick()

    def stop(self, seconds: float = 2.0) -> None:
        """Brings the arm to rest and ends the thread."""
        self.hold("the episode is over")
        end = self.clock.now() + seconds
        while self.clock.now() < end and self._moving():
            self.wait_until(self.clock.now() + self.guard.config.tick)
        self._closing = True
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=seconds)

    def _moving(self) -> bool:
        command = self.guard.command
        return command is not None and bool(np.abs(command.dq).max() > 1e-6)

    def hold(self, reason: str) -> None:
        """Slows down to a stop; the next action goes on only if the reason begins with "stale"."""
        with self._lock:
            self.guard.hold(self.clock.now(), reason)

    def status(self) -> dict[str, Any]:
        """For ``OperatorPage.show``."""
        events = [
            f"{e.stamp:9.2f} s  {e.before} -> {e.after}: {e.reason}" for e in self.events[-8:]
        ]
        said = {
            "mode": str(self.guard.mode),
            "reason": self.guard.reason,
            "task": self.robot.prompt(),
        }
        can = ["estop", "hold", "run", "takeover", "release", "success", "failure"]
        return {
            **said,
            "open": self.decoder.width > 0.0,
            "can": can,
            "numbers": {},
            "events": events,
        }

    def hand_over(self, person: bool) -> None:
        """From here on a person's actions move the arm, or the policy's again; either begins where the arm is."""
        if self.broken:
            return
        with self._lock:
            now = self.clock.now()
            self.decoder.start(now, self.robot.state())
            self.guard.takeover(now) if person else self.guard.release(now)
            if not person and self.guard.mode == Mode.HOLD:
                self.guard.run(now)
            self.person = person

    @property
    def broken(self) -> str:
        """Why the arm takes no more actions; empty while it does."""
        return self.guard.reason if self.guard.mode in (Mode.FAULT, Mode.ESTOP) else ""

    @property
    def pressed(self) -> bool:
        """Whether that is because the arm was driven against something: the doing of who chose the actions."""
        return self.broken.startswith(PRESSED)

    def _tick(self) -> None:
        with self._lock:
            now = self.clock.now()
            state = self.robot.state()
            fresh = now < self._ends + self.guard.config.tick
            target = replace(self.decoder.target(now, fresh), human=self.person)
            command = self.guard.tick(now, state, target)
            self.robot.send(command)
            if self._log is not None:
                self._log.tick(command, state)
        self._due = max(self._due + self.guard.config.tick, now)
        self.clock.sleep_until(self._due)

    def _work(self) -> None:
        try:
            while not self._closing:
                self._tick()
        except Exception as error:  # the robot's or the filter's: raised in the owner's thread
            self._error = error

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if self._log is not None:
            self._log.event(event.stamp, "mode", f"{event.before} -> {event.after}: {event.reason}")
