"""The ticker: policy server to executor to safety filter to robot, once per tick, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from embodyrl.real_robot.actions import DeltaDecoder
from embodyrl.real_robot.executor import Executor
from embodyrl.real_robot.log import RunLog
from embodyrl.real_robot.messages import Mode
from embodyrl.real_robot.safety import Event, SafetyFilter
from embodyrl.real_robot.transports import Clock, Robot
from embodyrl.real_robot.watch import Watch


@dataclass
class Episode:
    """How a run went.

    Attributes:
        solved: whether the robot says so.
        seconds: by the ticker's clock.
        mode: of the filter at the end.
        reason: why.
        peak: largest share of each limit that a command used.
        late: ticks that came more than half a tick late.
        events: changes of mode.
    """

    solved: bool
    seconds: float
    mode: Mode
    reason: str
    peak: dict[str, float]
    late: int = 0
    events: list[Event] = field(default_factory=list)


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
) -> Episode:
    """Runs one episode and leaves the arm at rest.

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
    """
    events: list[Event] = []

    def note(event: Event) -> None:
        events.append(event)
        if log is not None:
            log.event(event.stamp, "mode", f"{event.before} -> {event.after}: {event.reason}")

    guard.on_event = note
    tick, watch, late = guard.config.tick, Watch(guard.hard, guard.config.tick), 0
    began = clock.now()
    guard.start(began, robot.state())
    decoder.start(began, robot.state())
    running, solved, ending = False, False, ""
    while True:
        now, state = clock.now(), robot.state()
        if dry_run and guard.command is not None:  # as if the arm had followed
            state = replace(state, q=guard.command.q, dq=guard.command.dq)
        if not running and not ending:
            if executor.ready(now, lambda: robot.observe(decoder)):
                running, began = True, now
                guard.run(now)
                executor.start(now)
            elif now - began > first_wait:
                ending = "the policy sent no first chunk in time"
        target = None
        if running:
            action = executor.tick(now, lambda: robot.observe(decoder))
            if action is not None:
                decoder.act(now, action, state)
                if log is not None:
                    log.put("/action", now, {"action": action.tolist()})
            target = decoder.target(now, executor.fresh)
        command = guard.tick(now, state, target)
        watch.see(command)
        if not dry_run:
            robot.send(command)
        if log is not None:
            log.tick(command, state)
        if running and not ending:
            solved = robot.solved()
            held = guard.mode == Mode.HOLD and guard.config.resume == "person"
            if solved or now - began >= seconds:
                ending = "solved" if solved else "the time is up"
                guard.hold(now, ending)
            elif held or guard.mode in (Mode.FAULT, Mode.ESTOP):
                ending = guard.reason
        if ending and np.abs(command.dq).max() < 1e-6:
            return Episode(solved, now - began, guard.mode, ending, watch.peak, late, events)
        clock.sleep_until(now + tick)
        late += clock.now() - now > 1.5 * tick
