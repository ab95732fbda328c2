"""Action chunks in time: one inference under way at most, while a ticker takes one action per control step.

A chunk that was asked for when n actions had been taken, and arrives when n + d have, starts with
its action d: the delay is counted in actions really taken, so an arm that waits loses none. Modes:

    sync      asks when all actions are taken, and waits
    naive     asks early, and switches when the answer comes
    ensemble  asks early, and averages all predictions for a step: weights exp(-decay i), the oldest
              i = 0 (ACT, arXiv:2304.13705)
    rtc       as naive, but the policy is told what will have been taken meanwhile and continues it
              (real-time chunking, arXiv:2506.07339)
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import UserError, did_you_mean

MODES = ("sync", "naive", "ensemble", "rtc")
Actions = NDArray[np.float32]
Request = dict[str, Any]


@dataclass(frozen=True)
class ExecutorConfig:
    """How chunks are carried out.

    Attributes:
        horizon: H, actions in a chunk.
        action_dim: A.
        control_hz: actions per second.
        mode: see the module.
        execute: actions after which the next chunk is asked for; 0 means H in sync, else H // 2.
        ensemble_decay: see the module.
        delay: actions that the first guess of the delay is (rtc).
        patience: s that sync waits for an answer before it counts as starved.
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
        if not 0 <= self.execute <= self.horizon:
            raise UserError(f"execute is {self.execute}, but a chunk has {self.horizon} actions.")

    @property
    def asks_after(self) -> int:
        """Actions of a chunk that are taken before the next is asked for."""
        return self.execute or (self.horizon if self.mode == "sync" else max(1, self.horizon // 2))


class Inference(Protocol):
    """Something that answers one request at a time, meanwhile."""

    def submit(self, request: Request, now: float) -> None:
        """Starts on a request."""
        ...

    def poll(self, now: float) -> dict[str, Any] | Exception | None:
        """The answer, what went wrong, or None while it is under way."""
        ...

    def close(self) -> None:
        """Ends it after the request under way."""
        ...


class ThreadInference:
    """Inference in one thread of its own."""

    def __init__(self, infer: Callable[[Request], dict[str, Any]]) -> None:
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[dict[str, Any] | Exception] = queue.SimpleQueue()
        self._infer = infer
        self._thread = threading.Thread(target=self._work, name="inference", daemon=True)
        self._thread.start()

    def submit(self, request: Request, now: float) -> None:
        """See ``Inference``."""
        self._requests.put(request)

    def poll(self, now: float) -> dict[str, Any] | Exception | None:
        """See ``Inference``."""
        try:
            return self._answers.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """See ``Inference``."""
        self._requests.put(None)
        self._thread.join(timeout=5.0)

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._answers.put(self._infer(request))
            except (
                Exception
            ) as error:  # handed to the ticker, which logs it and starves into a hold
                self._answers.put(error)


class VirtualInference:
    """Inference in the time of a simulated clock.

    Args:
        infer: observation to chunk.
        latency: the s that it really took to the s after which the answer is ready.
    """

    def __init__(
        self, infer: Callable[[Request], dict[str, Any]], latency: Callable[[float], float]
    ) -> None:
        self._infer = infer
        self._latency = latency
        self._due = 0.0
        self._answer = None

    def submit(self, request: Request, now: float) -> None:
        """See ``Inference``."""
        began = time.perf_counter()
        try:
            self._answer = self._infer(request)
        except Exception as error:  # as in ``ThreadInference``
            self._answer = error
        self._due = now + self._latency(time.perf_counter() - began)

    def poll(self, now: float) -> dict[str, Any] | Exception | None:
        """See ``Inference``."""
        if self._answer is None or now < self._due - 1e-9:
            return None
        answer = self._answer
        self._answer = None
        return answer

    def close(self) -> None:
        """See ``Inference``; there is nothing to end."""


@dataclass
class Counts:
    """What happened.

    Attributes:
        taken: actions.
        starved: control steps without one.
        chunks: used.
        refused: chunks that were not.
        missed: control steps that the ticker was too late for.
        delays: of chunks, in actions.
        jumps: where a chunk took over from another: how far its action is from the planned one,
            without the gripper.
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
    """See the module. Used by the ticker's thread alone.

    ``asks`` is why the policy's side wants a person: the text ``ask`` that came with the newest
    chunk, or nothing.
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
        self._on_problem = on_problem or (lambda now, text: None)
        self._execute = config.asks_after
        self._chunks: deque[tuple[int, Actions]] = deque(
            maxlen=config.horizon
        )  # (number of its first action, (H, A))
        self._asked_at: int | None = None
        self._asked_when = 0.0
        self._start = 0.0
        self._step = -1
        self._recent: deque[int] = deque(maxlen=10)
        self.fresh = False
        self.asks = ""
        self._abandoned = self._switched = False

    def start(self, now: float) -> None:
        """Control steps are counted from here."""
        self._start = now
        self._step = -1
        self.fresh = False

    def restart(self) -> None:
        """Forgets all chunks, the one that is under way too: they are about a place where the arm no longer is."""
        self._chunks.clear()
        self._abandoned = self._asked_at is not None
        self.fresh = False

    def ready(self, now: float, observe: Callable[[], Request | None]) -> bool:
        """Asks for the first chunk without taking from it; True once it is there."""
        self._collect(now)
        if self._left == 0 and self._asked_at is None:
            self._ask(now, observe)
        return self._left > 0

    def tick(self, now: float, observe: Callable[[], Request | None]) -> Actions | None:
        """The action (A,) that becomes due, or None between control steps and when there is none.

        ``fresh`` then says whether all is well: the last step had its action, or sync is waiting
        for one in patience.
        """
        self._collect(now)
        step = int((now - self._start) * self.config.control_hz + 1e-6)
        action = None
        if step > self._step:
            self.counts.missed += step - self._step - 1
            self._step = step
            action = self._take()
            waiting = self._asked_at is not None and now - self._asked_when <= self.config.patience
            self.fresh = action is not None or (self.config.mode == "sync" and waiting)
            self.counts.starved += not self.fresh
        if self._asked_at is None and (
            not self._chunks or self._taken_of_newest >= self._execute or self._left == 0
        ):
            self._ask(now, observe)
        return action

    @property
    def _taken_of_newest(self) -> int:
        return self.counts.taken - self._chunks[-1][0]

    @property
    def _left(self) -> int:
        """Actions that are still to be taken."""
        return max(0, self.config.horizon - self._taken_of_newest) if self._chunks else 0

    def _take(self) -> Actions | None:
        if self._left == 0:
            return None
        chunks = list(self._chunks)
        action = self._action(chunks)
        if (
            self._switched
            and action is not None
            and (planned := self._action(chunks[:-1])) is not None
        ):
            self.counts.jumps.append(float(np.linalg.norm((action - planned)[:-1])))
            self.counts.switches.append(self.counts.taken)
        self._switched = False
        self.counts.taken += 1
        return action

    def _action(self, chunks: list[tuple[int, Actions]]) -> Actions | None:
        """What these chunks say is next, if they reach that far."""
        number = self.counts.taken
        found = [
            chunk[number - first] for first, chunk in chunks if number - first < self.config.horizon
        ]
        if not found or self.config.mode != "ensemble":
            return found[-1] if found else None
        weights = np.exp(-self.config.ensemble_decay * np.arange(len(found)))
        return ((weights[:, None] * np.array(found)).sum(0) / weights.sum()).astype(np.float32)

    def _ask(self, now: float, observe: Callable[[], Request | None]) -> None:
        request = observe()
        if request is None:  # nothing to be seen now: it is asked again at the next tick
            return
        request["step"] = self.counts.taken
        if self.config.mode == "rtc" and self._left:
            first, chunk = self._chunks[-1]
            rest = chunk[self.counts.taken - first :]
            # Hold-last padding: the policy is told a whole chunk, and weighs only what is real.
            padding = np.repeat(rest[-1:], self.config.horizon - len(rest), axis=0)
            expected = max(self._recent, default=self.config.delay)
            request |= {
                "previous": np.concatenate([rest, padding]).astype(np.float32),
                "delay": min(expected, len(rest)),
                "execute": self.config.horizon - len(rest),
            }
        self._asked_at = self.counts.taken
        self._asked_when = now
        self.inference.submit(request, now)

    def _collect(self, now: float) -> None:
        if self._asked_at is None or (answer := self.inference.poll(now)) is None:
            return
        asked_at = self._asked_at
        self._asked_at = None
        delay = self.counts.taken - asked_at
        if self._abandoned:
            self._abandoned = False
        elif wrong := self._refusal(answer):
            self.counts.refused += 1
            self._on_problem(now, wrong)
        elif delay < self.config.horizon:
            assert isinstance(answer, dict)
            # The first one paid for compilation and caches: it says nothing of those to come.
            if self.counts.chunks:
                self.counts.delays.append(delay)
                self._recent.append(delay)
            self.counts.chunks += 1
            self.asks = str(answer.get("ask", ""))[:300]
            self._chunks.append((asked_at, np.asarray(answer["actions"], np.float32)))
            self._switched = True

    def _refusal(self, answer: dict[str, Any] | Exception) -> str:
        if isinstance(answer, Exception):
            return f"inference failed: {answer}"
        actions = answer.get("actions")
        shape = (self.config.horizon, self.config.action_dim)
        if not isinstance(actions, np.ndarray) or actions.shape != shape:
            return (
                f"the policy sent actions of shape {getattr(actions, 'shape', None)}, not {shape}"
            )
        if not np.isfinite(actions).all():
            return "the policy sent actions that are not finite"
        return ""
