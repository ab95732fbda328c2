"""The control loop of an episode: policy -> executor -> safety filter -> robot, once per tick."""

from __future__ import annotations

from dataclasses import asdict, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import UserError
from embodyrl.real_robot.control.any_safety import Decoder
from embodyrl.real_robot.control.clocks import Clock
from embodyrl.real_robot.control.episode import EndedBy, Help, RobotEpisode, event_lines
from embodyrl.real_robot.control.executor import Executor
from embodyrl.real_robot.control.frozen_camera import FrozenCameraCheck
from embodyrl.real_robot.control.limit_monitor import LimitMonitor
from embodyrl.real_robot.control.messages import Command, JointTarget, Mode, RobotState, Target
from embodyrl.real_robot.control.operator import HOLDS, LABELS, WISHES, Operator
from embodyrl.real_robot.control.priority import real_time_priority
from embodyrl.real_robot.control.rewind import Trail
from embodyrl.real_robot.control.robot import NotReadyError, Robot, policy_sees
from embodyrl.real_robot.control.safety import CONTACT_REASONS, Event, SafetyFilter
from embodyrl.real_robot.logs.mcap_log import RunLog

INTERRUPTED = "Ctrl-C or SIGTERM"
"""Reason of a stop that always ends the episode, even with a person there who could clear it."""
ASKS = "the policy's side asks for a person"
"""What the reason of a hold begins with when help was asked for."""
SHOW_EVERY = 0.1
"""s between two updates of the operator's display."""
AT_REST = 1e-6
"""rad/s, joint velocity below which the arm counts as stopped."""


class _Phase(StrEnum):
    """Who moves the arm, or why nobody does."""

    WAITING = "waiting for the policy"
    POLICY = "policy"
    PERSON = "person"
    BACK = "going back"
    PAUSED = "paused"
    ENDING = "ending"


def drive(
    robot: Robot,
    clock: Clock,
    guard: SafetyFilter,
    executor: Executor,
    decoder: Decoder,
    log: RunLog | None = None,
    *,
    seconds: float,
    first_wait: float = 30.0,
    dry_run: bool = False,
    operator: Operator | None = None,
    record: bool = False,
    help_seconds: float = 0.0,
) -> RobotEpisode:
    """Runs one episode and leaves the arm at rest.

    Without an operator a hold or a fault ends the episode. With one, the arm waits for what they
    decide.

    Args:
        robot: at rest.
        clock: of the stamps of the robot's states.
        guard: the safety filter; its events go to the episode and the log.
        executor: fresh.
        decoder: of the policy's actions.
        log: where the episode is recorded, if anywhere.
        seconds: time limit of the episode.
        first_wait: s that the policy may take for its first chunk, while the arm is held.
        dry_run: send nothing to the robot; the log shows what would have been sent.
        operator: a person who may take over, stop and label.
        record: also log what the policy sees before each action, so that the log can become
            training data.
        help_seconds: that a person has at least, from when they take over, however late it is.
    """
    ticker = _Ticker(robot, guard, executor, decoder, log, seconds, first_wait, operator, record)
    ticker.help_seconds = help_seconds
    with real_time_priority(clock):
        return _loop(ticker, clock, log, dry_run)


def _loop(ticker: _Ticker, clock: Clock, log: RunLog | None, dry_run: bool) -> RobotEpisode:
    """The ticks of ``drive``."""
    robot = ticker.robot
    guard = ticker.guard
    tick = guard.config.tick
    due = clock.now()
    late = 0
    ticker.start(due, robot.state())
    while True:
        # 1. Measure. In a dry run, pretend that the arm followed the last command.
        now = clock.now()
        state = robot.state()
        if dry_run and guard.command is not None:
            state = replace(state, q=guard.command.q, dq=guard.command.dq)
        # 2. Decide and filter.
        command = ticker.tick(now, state)
        # 3. Act.
        if not dry_run:
            robot.send(command)
        if log is not None:
            log.tick(command, state)
        # 4. Is the episode over, and the arm at rest?
        ticker.check_end(now)
        if ticker.phase == _Phase.ENDING and np.abs(command.dq).max() < AT_REST:
            return ticker.episode(late)
        # 5. Wait for the next tick. A late tick delays the next one: there is no burst of ticks.
        due = max(due + tick, now)
        clock.sleep_until(due)
        late += clock.now() - now > 1.5 * tick


class _Ticker:
    """The state of an episode: what happens at each tick, and whom the arm follows."""

    def __init__(
        self,
        robot: Robot,
        guard: SafetyFilter,
        executor: Executor,
        decoder: Decoder,
        log: RunLog | None,
        seconds: float,
        first_wait: float,
        operator: Operator | None,
        record: bool,
    ) -> None:
        self.robot = robot
        self.guard = guard
        self.executor = executor
        self.decoder = decoder
        self.log = log
        self.operator = operator
        self.phase = _Phase.WAITING
        self.help_seconds = 0.0
        self._seconds = seconds
        self._first_wait = first_wait
        self._record = record
        self._monitor = LimitMonitor(guard.robot_limits, guard.config.tick)
        self._trail = Trail()
        self._cameras = FrozenCameraCheck(robot)
        self._events: list[Event] = []
        self._end_reason = ""
        self._ended_by = EndedBy.POLICY
        self._person_moved = False
        self._no_observation = ""  # why the last observation could not be made
        self._solved = False
        self._asked_for_person = False
        self._elapsed = 0.0
        self._human = 0
        self._help = Help()
        self._helped = False  # a person has the arm, since the policy last had it
        guard.on_event = self._on_event

    def start(self, now: float, state: RobotState) -> None:
        """Starts in HOLD, waiting for the policy."""
        self._last = now
        self._began = now
        self._waits_since = now
        self._next_action = now
        self._next_show = now
        self.guard.start(now, state)
        self.decoder.start(now, state)

    def tick(self, now: float, state: RobotState) -> Command:
        """What the arm is told now."""
        # Time that the arm waits does not count.
        if self.phase not in (_Phase.WAITING, _Phase.PAUSED, _Phase.BACK):
            self._elapsed += now - self._last
        if self.phase in (_Phase.PERSON, _Phase.BACK, _Phase.PAUSED):
            self._help.seconds += now - self._last
        self._last = now
        # Obey the person.
        for wish in self.operator.wishes() if self.operator is not None else ():
            self._obey(wish, now, state)
        # Start moving once the policy's first chunk has arrived.
        if self.phase == _Phase.WAITING and self.guard.mode == Mode.HOLD:
            self._wait_for_first_chunk(now)
        # The target of whoever moves the arm.
        target = None
        if self.phase == _Phase.POLICY:
            target = self._policy_target(now, state)
        elif self.phase == _Phase.PERSON:
            target = self._person_target(now, state)
        elif self.phase == _Phase.BACK:
            target = self._rewind_target(now, state)
        # The safety filter makes the command.
        command = self.guard.tick(now, state, target)
        self._monitor.see(command)
        self._trail.see(command)
        self._show(now, command)
        return command

    def check_end(self, now: float) -> None:
        """Ends the episode, or the turn of whoever moves the arm, if it is over."""
        mode = self.guard.mode
        if mode == Mode.ESTOP and self.guard.reason == INTERRUPTED:
            self._end(INTERRUPTED, EndedBy.PERSON)
        by_person = self.phase in (_Phase.PERSON, _Phase.BACK)
        moved = by_person or self.phase == _Phase.POLICY
        latched = mode in (Mode.FAULT, Mode.ESTOP)
        if not moved and not (latched and self.phase == _Phase.WAITING):
            return
        self._solved = moved and self.robot.solved()
        # A hold ends the turn unless a fresh target of the policy may end the hold by itself.
        held = mode == Mode.HOLD and (
            self.guard.config.resume == "person" or by_person or self._asked_for_person
        )
        if self._solved or not self._elapsed < self._seconds:
            self._end("solved" if self._solved else "the time is up", self._judged_by())
            self.guard.hold(now, self._end_reason)
        elif (held or latched) and self.operator is None:
            asked = held and self._asked_for_person
            by = EndedBy.FAULT if held and not asked else self._judged_by()
            self._end(self.guard.reason, by)
        elif held or latched:
            self._trail.stop(now)
            self.phase = _Phase.PAUSED
            self._asked_for_person = False

    def episode(self, late: int) -> RobotEpisode:
        """The result of the episode."""
        if self.log is not None:
            outcome = {
                "solved": self._solved,
                "reason": self._end_reason,
                "ended_by": str(self._ended_by),
                "mode": str(self.guard.mode),
                "seconds": self._elapsed,
                "duration": self._last - self._began,
                "help": asdict(self._help),
            }
            self.log.put("/episode", self._last, outcome)
        return RobotEpisode(
            solved=self._solved,
            seconds=self._elapsed,
            mode=self.guard.mode,
            reason=self._end_reason,
            ended_by=self._ended_by,
            peak=self._monitor.peak,
            late=late,
            human=self._human,
            help=self._help,
            events=self._events,
        )

    # ---- The targets of the policy, of the person, and of the way back.

    def _wait_for_first_chunk(self, now: float) -> None:
        if self.executor.ready(now, self._request):
            self.phase = _Phase.POLICY
            self._helped = False
            self.guard.run(now)
            self.executor.start(now)
        elif now - self._waits_since > self._first_wait:
            why = self._no_observation or "the policy sent no first chunk in time"
            self._end(why, EndedBy.FAULT)

    def _policy_target(self, now: float, state: RobotState) -> Target | JointTarget:
        action = self.executor.tick(now, self._request)
        if self._no_observation:
            self.guard.hold(now, f"stale: {self._no_observation}")
        if asks := self.executor.asks:
            self.guard.hold(now, f"{ASKS}: {asks}")
            self.executor.asks = ""
            self._asked_for_person = True
        if action is not None:
            self._act(now, action, state, human=False)
        return self.decoder.target(now, self.executor.fresh)

    def _person_target(self, now: float, state: RobotState) -> Target | JointTarget:
        assert self.operator is not None
        # A person acts at the rate of the policy.
        if now >= self._next_action:
            self._next_action = max(self._next_action + self.decoder.period, now)
            self._act(now, self.operator.action(self.decoder.space.dims), state, human=True)
            self._human += 1
        return replace(self.decoder.target(now, self.operator.alive(now)), human=True)

    def _rewind_target(self, now: float, state: RobotState) -> Target | JointTarget | None:
        """On the way back; None at the beginning, or if the person is gone.

        Going back is done by actions like the policy's, so that it can be learned, too.
        """
        assert self.operator is not None and self.guard.command is not None
        if not self.operator.alive(now):
            self.guard.hold(now, "the person does not answer")
            return None
        if now >= self._next_action:
            self._next_action = max(self._next_action + self.decoder.period, now)
            place = self._trail.back(now + self.decoder.period)
            if place is None:
                self.guard.hold(now, "gone back to the beginning")
                return None
            action = self.decoder.back_to(place, self.guard.command)
            self._act(now, action, state, human=True)
        return replace(self.decoder.target(now, True), human=True)

    def _act(self, now: float, action: NDArray[np.float32], state: RobotState, human: bool) -> None:
        """Logs an action and gives it to the decoder."""
        if self.log is not None:
            seen = self._observe() if self._record else None
            back = self.phase == _Phase.BACK
            self.log.action(now, np.clip(action, -1.0, 1.0), human, seen, recovery=back)
        self.decoder.act(now, action, state)

    def _request(self) -> dict[str, Any] | None:
        """What the policy is asked with now; None if an image is missing."""
        seen = self._observe()
        return None if seen is None else policy_sees(seen)

    def _observe(self) -> dict[str, Any] | None:
        """What the policy sees now; None, with the reason noted, if an image is missing."""
        try:
            self._no_observation = ""
            return self._cameras.observe(self.decoder)
        except NotReadyError as error:
            self._no_observation = str(error) or "there is no fresh observation"
            return None

    # ---- The person's wishes.

    def _obey(self, wish: str, now: float, state: RobotState) -> None:
        """Does what a person asked for, where the mode allows it."""
        guard = self.guard
        if wish == "estop":
            guard.estop("a person pressed stop")
        elif self.phase == _Phase.ENDING:
            return
        elif wish in LABELS:
            self._solved = wish == "success"
            self._end(f"a person said {wish}", self._judged_by())
            guard.hold(now, self._end_reason)
        elif wish == "clear":
            try:
                guard.clear(now, state)
            except UserError as error:
                self._log_event(now, "problem", str(error))
        elif wish in ("takeover", "rewind") and guard.mode in (Mode.RUN, Mode.HOLD, Mode.HUMAN):
            self._take_over(now, state, rewind=wish == "rewind")
        elif wish in HOLDS:
            self._trail.stop(now)
            guard.hold(now, HOLDS[wish])
            self.phase = _Phase.PAUSED
        elif wish == "run" and self.phase == _Phase.PAUSED and guard.mode == Mode.HOLD:
            # The arm is elsewhere now, so the policy starts with a new chunk.
            self.executor.restart()
            self.decoder.start(now, state)
            self.phase = _Phase.WAITING
            self._waits_since = now

    def _take_over(self, now: float, state: RobotState, rewind: bool) -> None:
        """The person moves the arm from here on, or has it go back the way it came."""
        self._trail.stop(now)
        self._person_moved = True
        self._help.times += not self._helped
        self._help.rewinds += rewind
        self._helped = True
        self._seconds = max(self._seconds, self._elapsed + self.help_seconds)
        self.decoder.start(now, state)
        self.guard.takeover(now)
        self._next_action = now
        if rewind:
            self._trail.start(now)
        self.phase = _Phase.BACK if rewind else _Phase.PERSON

    def _end(self, why: str, by: EndedBy) -> None:
        if self.phase == _Phase.ENDING:
            return  # what ended it first counts
        self.phase = _Phase.ENDING
        self._end_reason = why
        self._ended_by = by

    def _judged_by(self) -> EndedBy:
        """Whom an outcome at this moment speaks of."""
        if self._person_moved or self.guard.mode == Mode.ESTOP:
            return EndedBy.PERSON
        if self.guard.mode == Mode.FAULT and not self.guard.reason.startswith(CONTACT_REASONS):
            return EndedBy.FAULT
        return EndedBy.POLICY

    # ---- The log and the display.

    def _on_event(self, event: Event) -> None:
        self._events.append(event)
        self._log_event(event.stamp, "mode", f"{event.before} -> {event.after}: {event.reason}")

    def _log_event(self, stamp: float, kind: str, text: str) -> None:
        if self.log is not None:
            self.log.event(stamp, kind, text)

    def _show(self, now: float, command: Command) -> None:
        """Updates the operator's display, if one is due."""
        if self.operator is None or now < self._next_show:
            return
        self._next_show = now + SHOW_EVERY
        numbers = {
            "who moves the arm": str(self.phase),
            "time": f"{self._elapsed:.1f} of {self._seconds:.0f} s",
            **self.decoder.told(),
            "fastest joint": f"{np.abs(command.dq).max():.2f} rad/s",
            "largest share of a limit": f"{max(self._monitor.peak.values()):.0%}",
            "actions, the person's": f"{self.executor.counts.taken}, {self._human}",
        }
        status = {
            "mode": str(command.mode),
            "reason": command.reason,
            "asks": command.reason if self.phase == _Phase.PAUSED else "",
            "open": command.width > 0.0,
            "can": WISHES,
            "numbers": numbers,
            "events": event_lines(self._events),
            "task": self.robot.prompt(),
        }
        self.operator.show(status, self.robot.pictures())
