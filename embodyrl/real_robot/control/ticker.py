"""The ticker: policy server to executor to safety filter to robot, once per tick, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import UserError
from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.executor import Executor
from embodyrl.real_robot.control.messages import Command, Mode, RobotState, Target
from embodyrl.real_robot.control.observe import Sight
from embodyrl.real_robot.control.rewind import Trail
from embodyrl.real_robot.control.safety import Event, SafetyFilter
from embodyrl.real_robot.control.transports import Clock, NotReadyError, Robot
from embodyrl.real_robot.control.watch import Watch
from embodyrl.real_robot.logs.mcap_log import RunLog

WISHES = ("estop", "hold", "run", "takeover", "release", "rewind", "clear", "success", "failure")
"""What an operator can ask for."""
INTERRUPTED = "Ctrl-C"
"""The reason of a stop that ends the episode, whoever may be there to clear it."""
SHOW_EVERY = 0.1
"""s between two pictures for the operator."""


class Operator(Protocol):
    """A person beside the robot; see ``operator.OperatorPage``."""

    def wishes(self) -> list[str]:
        """What was asked for since the last call."""
        ...

    def alive(self, now: float) -> bool:
        """Whether the person's keys are known."""
        ...

    def action(self, dims: int) -> NDArray[np.float32]:
        """What the keys say, as an action of the policy's kind."""
        ...

    def show(self, status: dict[str, Any], images: dict[str, NDArray[np.uint8]]) -> None:
        """Returns at once."""
        ...


@dataclass
class Episode:
    """How a run went.

    Attributes:
        solved: whether the robot says so, or the person.
        seconds: by the ticker's clock, those that the arm waited for a person left out.
        mode: of the filter at the end.
        reason: why.
        peak: largest share of each limit that a command used.
        late: ticks that came more than half a tick late.
        human: actions that a person took.
        events: changes of mode.
    """

    solved: bool
    seconds: float
    mode: Mode
    reason: str
    peak: dict[str, float]
    late: int = 0
    human: int = 0
    events: list[Event] = field(default_factory=list)


class _Phase(StrEnum):
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
    decoder: DeltaDecoder,
    log: RunLog | None = None,
    *,
    seconds: float,
    first_wait: float = 30.0,
    dry_run: bool = False,
    operator: Operator | None = None,
    record: bool = False,
) -> Episode:
    """Runs one episode and leaves the arm at rest.

    Without an operator a hold or a fault ends the episode; with one it waits for what they decide.

    Args:
        robot: at rest.
        clock: of the stamps of its states.
        guard: its events go to the episode and the log.
        executor: fresh.
        decoder: of the policy's actions.
        log: what it is written to, if any.
        seconds: after which the episode ends.
        first_wait: s that the policy may take for its first chunk, with the arm held.
        dry_run: nothing is sent to the robot; the log shows what would have been.
        operator: a person who may take over, stop and label.
        record: the log gets what the policy would see before each action, so that it can be learned
            from.
    """
    ticker = _Ticker(robot, guard, executor, decoder, log, seconds, first_wait, operator, record)
    tick = guard.config.tick
    due = clock.now()
    late = 0
    ticker.start(due, robot.state())
    while True:
        now = clock.now()
        state = robot.state()
        if dry_run and guard.command is not None:  # as if the arm had followed
            state = replace(state, q=guard.command.q, dq=guard.command.dq)
        command = ticker.tick(now, state)
        if not dry_run:
            robot.send(command)
        if log is not None:
            log.tick(command, state)
        ticker.judge(now)
        if ticker.phase == _Phase.ENDING and np.abs(command.dq).max() < 1e-6:
            return ticker.episode(late)
        due = max(due + tick, now)  # on time after a late tick, but never a burst of ticks
        clock.sleep_until(due)
        late += clock.now() - now > 1.5 * tick


class _Ticker:
    """What happens at each tick, and who the arm obeys."""

    def __init__(
        self, robot: Robot, guard: SafetyFilter, executor: Executor, decoder: DeltaDecoder, log: RunLog | None,
        seconds: float, first_wait: float, operator: Operator | None, record: bool,
    ) -> None:  # fmt: skip
        self.robot = robot
        self.guard = guard
        self.executor = executor
        self.decoder = decoder
        self.log = log
        self.operator = operator
        self.phase = _Phase.WAITING
        self._seconds = seconds
        self._first_wait = first_wait
        self._record = record
        self._watch = Watch(guard.hard, guard.config.tick)
        self._trail = Trail()
        self._sight = Sight(robot)
        self._events: list[Event] = []
        self._ending = ""
        self._blind = ""
        self._solved = False
        self._asked = False
        self._elapsed = 0.0
        self._human = 0
        guard.on_event = self._note

    def start(self, now: float, state: RobotState) -> None:
        """In HOLD, waiting for the policy."""
        self._last = self._waits_since = now
        self._next_action = self._next_show = now
        self.guard.start(now, state)
        self.decoder.start(now, state)

    def tick(self, now: float, state: RobotState) -> Command:
        """What the arm is told now."""
        if self.phase not in (_Phase.WAITING, _Phase.PAUSED, _Phase.BACK):
            self._elapsed += now - self._last
        self._last = now
        for wish in self.operator.wishes() if self.operator is not None else ():
            self._obey(wish, now, state)
        if self.phase == _Phase.WAITING and self.guard.mode == Mode.HOLD:
            if self.executor.ready(now, self._observe):
                self.phase = _Phase.POLICY
                self.guard.run(now)
                self.executor.start(now)
            elif now - self._waits_since > self._first_wait:
                self._end(self._blind or "the policy sent no first chunk in time")
        target = None
        if self.phase == _Phase.POLICY:
            target = self._policys_target(now, state)
        elif self.phase == _Phase.PERSON:
            target = self._persons_target(now, state)
        elif self.phase == _Phase.BACK:
            target = self._target_behind(now)
        command = self.guard.tick(now, state, target)
        self._watch.see(command)
        self._trail.see(command)
        self._show(now, command)
        return command

    def judge(self, now: float) -> None:
        """Whether the episode, or the part of whoever moves the arm, is over."""
        if self.guard.mode == Mode.ESTOP and self.guard.reason == INTERRUPTED:
            self._end(INTERRUPTED)
        by_person = self.phase in (_Phase.PERSON, _Phase.BACK)
        locked = self.guard.mode in (Mode.FAULT, Mode.ESTOP)
        moved = by_person or self.phase == _Phase.POLICY
        if not moved and not (locked and self.phase == _Phase.WAITING):
            return
        self._solved = moved and self.robot.solved()
        held = self.guard.mode == Mode.HOLD and (
            self.guard.config.resume == "person" or by_person or self._asked
        )
        if self._solved or self._elapsed >= self._seconds:
            self._end("solved" if self._solved else "the time is up")
            self.guard.hold(now, self._ending)
        elif held or locked:
            if self.operator is None:
                self._end(self.guard.reason)
            else:
                self._trail.stop(now)
                self.phase = _Phase.PAUSED
                self._asked = False

    def episode(self, late: int) -> Episode:
        """What became of it."""
        mode = self.guard.mode
        peak = self._watch.peak
        if self.log is not None:
            self.log.put("/episode", self._last, {"solved": self._solved, "reason": self._ending})
        return Episode(
            self._solved, self._elapsed, mode, self._ending, peak, late, self._human, self._events
        )

    def _policys_target(self, now: float, state: RobotState) -> Target:
        action = self.executor.tick(now, self._observe)
        if self._blind:
            self.guard.hold(now, f"stale: {self._blind}")
        if asks := self.executor.asks:
            self.guard.hold(now, f"the policy's side asks for a person: {asks}")
            self.executor.asks = ""
            self._asked = True
        if action is not None:
            self._act(now, action, state, human=False)
        return self.decoder.target(now, self.executor.fresh)

    def _persons_target(self, now: float, state: RobotState) -> Target:
        assert self.operator is not None
        if now >= self._next_action:
            self._next_action = max(self._next_action + self.decoder.period, now)
            self._act(now, self.operator.action(self.decoder.space.dims), state, human=True)
            self._human += 1
        return replace(self.decoder.target(now, self.operator.alive(now)), human=True)

    def _target_behind(self, now: float) -> Target | None:
        """Where the hand has been, as long as there is such a place and the person is there."""
        assert self.operator is not None and self.guard.command is not None
        if (pose := self._trail.back(now)) is None or not self.operator.alive(now):
            self.guard.hold(
                now, "gone back to the beginning" if pose is None else "the person does not answer"
            )
            return None
        return Target(now, *pose, self.guard.command.width, human=True)

    def _act(self, now: float, action: NDArray[np.float32], state: RobotState, human: bool) -> None:
        if self.log is not None:
            self.log.action(
                now, np.clip(action, -1.0, 1.0), human, self._observe() if self._record else None
            )
        self.decoder.act(now, action, state)

    def _observe(self) -> dict[str, Any] | None:
        try:
            self._blind = ""
            return self._sight.observe(self.decoder)
        except NotReadyError as error:
            self._blind = str(error)
            return None

    def _obey(self, wish: str, now: float, state: RobotState) -> None:
        """What a person asked for, as far as it can be."""
        guard = self.guard
        if wish == "estop":
            guard.estop("a person pressed stop")
        elif self.phase == _Phase.ENDING:
            return
        elif wish in ("success", "failure"):
            self._solved = wish == "success"
            self._end(f"a person said {wish}")
            guard.hold(now, self._ending)
        elif wish == "clear":
            try:
                guard.clear(now, state)
            except UserError as error:
                self._say(now, "problem", str(error))
        elif wish in ("takeover", "rewind") and guard.mode in (Mode.RUN, Mode.HOLD, Mode.HUMAN):
            self._trail.stop(now)
            self.decoder.start(now, state)
            guard.takeover(now)
            self.phase = _Phase.PERSON
            self._next_action = now
            if wish == "rewind":
                self._trail.start(now)
                self.phase = _Phase.BACK
        elif wish in ("hold", "release"):
            self._trail.stop(now)
            guard.hold(now, "a person let go" if wish == "release" else "a person said hold")
            self.phase = _Phase.PAUSED
        elif wish == "run" and self.phase == _Phase.PAUSED and guard.mode == Mode.HOLD:
            self.executor.restart()
            self.decoder.start(now, state)
            self.phase = _Phase.WAITING
            self._waits_since = now

    def _end(self, why: str) -> None:
        self.phase = _Phase.ENDING
        self._ending = why

    def _note(self, event: Event) -> None:
        self._events.append(event)
        self._say(event.stamp, "mode", f"{event.before} -> {event.after}: {event.reason}")

    def _say(self, stamp: float, kind: str, text: str) -> None:
        if self.log is not None:
            self.log.event(stamp, kind, text)

    def _show(self, now: float, command: Command) -> None:
        if self.operator is None or now < self._next_show:
            return
        self._next_show = now + SHOW_EVERY
        x, y, z = self.decoder.position
        numbers = {
            "who moves the arm": str(self.phase),
            "time": f"{self._elapsed:.1f} of {self._seconds:.0f} s",
            "hand told to be at (m)": f"{x:.3f} {y:.3f} {z:.3f}",
            "fastest joint": f"{np.abs(command.dq).max():.2f} rad/s",
            "largest share of a limit": f"{max(self._watch.peak.values()):.0%}",
            "actions, the person's": f"{self.executor.counts.taken}, {self._human}",
        }
        status = {
            "mode": str(command.mode),
            "reason": command.reason,
            "open": command.width > 0.0,
            "can": WISHES,
        }
        status["numbers"] = numbers
        status["events"] = [
            f"{e.stamp:9.2f} s  {e.before} -> {e.after}: {e.reason}" for e in self._events[-8:]
        ]
        self.operator.show(status | {"task": self.robot.prompt()}, self.robot.pictures())
