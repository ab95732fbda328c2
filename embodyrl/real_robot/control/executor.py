"""Carries out action chunks in time: one action per control step, while the next chunk is inferred.

At most one inference is under way. Suppose a chunk was requested after n actions had been taken,
and arrives after n + d. Its actions 0 to d - 1 are in the past, so it takes over with action d.
The delay d counts actions that were really taken, so an arm that waits skips none. The modes:

    sync      requests a chunk when all actions are taken, and waits for it
    naive     requests early, and switches to the new chunk when it arrives
    ensemble  requests early, and averages all predictions for a step, with weights exp(-decay i),
              where i = 0 is the oldest (ACT, arXiv:2304.13705)
    rtc       like naive, but the policy is told which actions will be taken meanwhile, and
              continues from them (real-time chunking, arXiv:2506.07339)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import UserError, did_you_mean
from embodyrl.real_robot.control.config_checks import require_number
from embodyrl.real_robot.control.inference import Answer, Inference, Request

MODES = ("sync", "naive", "ensemble", "rtc")
Actions = NDArray[np.float32]


@dataclass(frozen=True)
class ExecutorConfig:
    """How chunks are carried out.

    Attributes:
        horizon: H, the number of actions in a chunk.
        action_dim: A.
        control_hz: actions per second.
        mode: ``"sync"``, ``"naive"``, ``"ensemble"`` or ``"rtc"``; see the module.
        execute: number of actions after which the next chunk is requested; 0 means H in sync mode,
            else H // 2.
        ensemble_decay: decay of the weights in ensemble mode.
        delay: first guess of the delay in actions (rtc).
        patience: s that sync mode waits for a chunk before the step counts as starved.
    """

    horizon: int
    action_dim: int
    control_hz: float
    mode: str = "rtc"
    execute: int = 0
    ensemble_decay: float = 0.01
    delay: int = 1
    patience: float = 1.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(
                f"There is no execution mode {self.mode!r}. {did_you_mean(self.mode, MODES)}"
            )
        for key, low, high, why in (
            ("control_hz", 1e-3, 1000.0, "actions per second"),
            ("ensemble_decay", 0.0, 100.0, "1 per action"),
            ("patience", 0.0, 3600.0, "seconds"),
        ):
            require_number(key, getattr(self, key), low, high, why)
        if not 0 <= self.execute <= self.horizon:
            raise UserError(f"execute is {self.execute}, but a chunk has {self.horizon} actions.")

    @property
    def asks_after(self) -> int:
        """Number of actions of a chunk that are taken before the next chunk is requested."""
        return self.execute or (self.horizon if self.mode == "sync" else max(1, self.horizon // 2))


@dataclass
class Counts:
    """Statistics of an episode.

    Attributes:
        taken: actions that were taken.
        starved: control steps without an action.
        chunks: chunks that were used.
        refused: chunks that were refused as invalid.
        missed: control steps that the ticker was too late for.
        delays: the delay of each chunk in actions.
        jumps: at each switch between chunks, the distance between the action taken and the action
            that the previous chunk had planned, without the gripper.
        switches: the numbers of those actions.
    """

    taken: int = 0
    starved: int = 0
    chunks: int = 0
    refused: int = 0
    missed: int = 0
    delays: list[int] = field(default_factory=list)
    jumps: list[float] = field(default_factory=list)
    switches: list[int] = field(default_factory=list)


class Executor:
    """Turns action chunks into one action per control step; see the module.

    Only the ticker's thread uses it.

    Attributes:
        fresh: whether all is well: the last control step had its action, or sync mode is still
            waiting for one within its patience.
        asks: why the policy's side wants a person: the text ``ask`` that came with the newest
            chunk, or nothing.
        counts: statistics of the episode.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        inference: Inference,
        on_problem: Callable[[float, str], None] | None = None,
    ) -> None:
        self.config = config
        self.inference = inference
        self.counts = Counts()
        self.fresh = False
        self.asks = ""
        self._on_problem = on_problem or (lambda now, text: None)
        self._execute = config.asks_after
        # Each chunk (H, A) with the number, counted over the episode, of its first action.
        self._chunks: deque[tuple[int, Actions]] = deque(maxlen=config.horizon)
        # The request under way: how many actions had been taken, and when (s) it was made.
        self._requested_at_action: int | None = None
        self._requested_at_time = 0.0
        self._abandoned = False  # the answer to that request is no longer wanted
        self._recent_delays: deque[int] = deque(maxlen=10)
        self._start = 0.0
        self._step = -1
        self._switched = False  # a chunk arrived since the last action

    def start(self, now: float) -> None:
        """Counts control steps from ``now`` on."""
        self._start = now
        self._step = -1
        self.fresh = False

    def restart(self) -> None:
        """Forgets all chunks, also one under way: they were made for where the arm was before."""
        self._chunks.clear()
        self._abandoned = self._requested_at_action is not None
        self.fresh = False

    def ready(self, now: float, observe: Callable[[], Request | None]) -> bool:
        """Requests the first chunk without taking an action of it; True once it has arrived."""
        self._receive(now)
        if self._left == 0 and self._requested_at_action is None:
            self._request(now, observe)
        return self._left > 0

    def tick(self, now: float, observe: Callable[[], Request | None]) -> Actions | None:
        """The action (A,) that becomes due now.

        Args:
            now: time in s.
            observe: makes the observation for the next request, or returns None if it cannot.

        Returns:
            The action; None between two control steps, or where there is no action.
        """
        self._receive(now)
        # Take an action when a new control step has begun. The small term absorbs rounding.
        step = int((now - self._start) * self.config.control_hz + 1e-6)
        action = None
        if step > self._step:
            self.counts.missed += step - self._step - 1
            self._step = step
            action = self._take()
            self.fresh = action is not None or self._waits_in_patience(now)
            self.counts.starved += not self.fresh
        # Request the next chunk once enough of the newest one has been taken.
        idle = self._requested_at_action is None
        if idle and (not self._chunks or self._taken_of_newest >= self._execute or self._left == 0):
            self._request(now, observe)
        return action

    def _waits_in_patience(self, now: float) -> bool:
        """Whether sync mode is waiting for a chunk that is not overdue yet."""
        waiting = (
            self._requested_at_action is not None
            and now - self._requested_at_time <= self.config.patience
        )
        return self.config.mode == "sync" and waiting

    @property
    def _taken_of_newest(self) -> int:
        """How many actions were taken since the newest chunk was requested."""
        return self.counts.taken - self._chunks[-1][0]

    @property
    def _left(self) -> int:
        """How many actions of the newest chunk are still to be taken."""
        return max(0, self.config.horizon - self._taken_of_newest) if self._chunks else 0

    def _take(self) -> Actions | None:
        """Takes the next action, and measures the jump if a new chunk has just taken over."""
        if self._left == 0:
            return None
        chunks = list(self._chunks)
        action = self._action(chunks)
        # The jump: against what the older chunks had planned for the same step.
        planned = self._action(chunks[:-1]) if self._switched else None
        if action is not None and planned is not None:
            self.counts.jumps.append(float(np.linalg.norm((action - planned)[:-1])))
            self.counts.switches.append(self.counts.taken)
        self._switched = False
        self.counts.taken += 1
        return action

    def _action(self, chunks: list[tuple[int, Actions]]) -> Actions | None:
        """The next action according to these chunks; None if none of them reaches that far."""
        number = self.counts.taken
        predictions = [
            chunk[number - first] for first, chunk in chunks if number - first < self.config.horizon
        ]
        if not predictions or self.config.mode != "ensemble":
            return predictions[-1] if predictions else None
        # Temporal ensembling: the oldest prediction weighs most.
        weights = np.exp(-self.config.ensemble_decay * np.arange(len(predictions)))
        mean = (weights[:, None] * np.array(predictions)).sum(0) / weights.sum()
        return mean.astype(np.float32)

    def _request(self, now: float, observe: Callable[[], Request | None]) -> None:
        """Submits a request for the next chunk."""
        request = observe()
        if request is None:  # nothing to be seen now: the next tick tries again
            return
        request["step"] = self.counts.taken
        if self.config.mode == "rtc" and self._left:
            request |= self._rtc_fields()
        self._requested_at_action = self.counts.taken
        self._requested_at_time = now
        self.inference.submit(request, now)

    def _rtc_fields(self) -> Request:
        """What real-time chunking adds to a request.

        Returns:
            ``previous`` (H, A), the rest of the newest chunk; ``delay``, the expected delay in
            actions; ``execute``, the number of actions at the end that ``previous`` lacks.
        """
        first, chunk = self._chunks[-1]
        rest = chunk[self.counts.taken - first :]
        # The policy gets a whole chunk, padded with the last action. The padding has no weight.
        padding = np.repeat(rest[-1:], self.config.horizon - len(rest), axis=0)
        # The worst recent delay is expected: an action promised too early could not be kept.
        expected = max(self._recent_delays, default=self.config.delay)
        return {
            "previous": np.concatenate([rest, padding]).astype(np.float32),
            "delay": min(expected, len(rest)),
            "execute": self.config.horizon - len(rest),
        }

    def _receive(self, now: float) -> None:
        """Accepts or refuses the chunk that has arrived, if any."""
        if self._requested_at_action is None or (answer := self.inference.poll(now)) is None:
            return
        first = self._requested_at_action
        self._requested_at_action = None
        delay = self.counts.taken - first
        if self._abandoned:
            self._abandoned = False
        elif wrong := self._refusal(answer):
            self.counts.refused += 1
            self._on_problem(now, wrong)
        elif delay < self.config.horizon:  # else every action of it is in the past
            assert isinstance(answer, dict)
            # The first delay includes compilation and cold caches: it predicts no later one.
            if self.counts.chunks:
                self.counts.delays.append(delay)
                self._recent_delays.append(delay)
            self.counts.chunks += 1
            self.asks = str(answer.get("ask", ""))[:300]
            self._chunks.append((first, np.asarray(answer["actions"], np.float32)))
            self._switched = True

    def _refusal(self, answer: Answer) -> str:
        """Why an answer is refused; empty if it is a finite chunk (H, A)."""
        if isinstance(answer, Exception):
            return f"inference failed: {answer}"
        actions = answer.get("actions")
        shape = (self.config.horizon, self.config.action_dim)
        if isinstance(actions, np.ndarray) and actions.dtype.kind not in "fiu":
            return f"the policy sent actions of type {actions.dtype}, not numbers"
        if not isinstance(actions, np.ndarray) or actions.shape != shape:
            return (
                f"the policy sent actions of shape {getattr(actions, 'shape', None)}, not {shape}"
            )
        # As they will be used: a large number of 64 bits is infinite in 32.
        with np.errstate(over="ignore"):
            finite = np.isfinite(actions.astype(np.float32)).all()
        if not finite:
            return "the policy sent actions that are not finite"
        return ""
