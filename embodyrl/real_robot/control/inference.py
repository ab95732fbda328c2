"""Runs a policy beside the control loop, one request at a time, in real or in simulated time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

Request = dict[str, Any]
"""What the policy is asked with: an observation, and for real-time chunking the previous chunk."""
Answer = dict[str, Any] | Exception
"""What the policy answered, or why it failed."""


class Inference(Protocol):
    """Answers one request at a time without blocking the caller."""

    def submit(self, request: Request, now: float) -> None:
        """Starts on a request."""
        ...

    def poll(self, now: float) -> Answer | None:
        """The answer or the error, or None while it is under way."""
        ...

    def close(self) -> None:
        """Stops after the request under way."""
        ...


class ThreadInference:
    """Inference in a thread of its own, in real time."""

    def __init__(self, infer: Callable[[Request], dict[str, Any]]) -> None:
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._infer = infer
        self._thread = threading.Thread(target=self._work, name="inference", daemon=True)
        self._thread.start()

    def submit(self, request: Request, now: float) -> None:
        """See ``Inference``."""
        self._requests.put(request)

    def poll(self, now: float) -> Answer | None:
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
            except Exception as error:  # the ticker logs it, and the arm holds for lack of actions
                self._answers.put(error)


class VirtualInference:
    """Inference in simulated time: the answer is computed at once, and shown when it is due.

    Args:
        infer: maps a request to the policy's answer.
        latency: maps the seconds that inference really took to the simulated seconds until the
            answer is ready.
    """

    def __init__(
        self, infer: Callable[[Request], dict[str, Any]], latency: Callable[[float], float]
    ) -> None:
        self._infer = infer
        self._latency = latency
        self._due = 0.0
        self._answer: Answer | None = None

    def submit(self, request: Request, now: float) -> None:
        """See ``Inference``."""
        began = time.perf_counter()
        try:
            self._answer = self._infer(request)
        except Exception as error:  # as in ``ThreadInference``
            self._answer = error
        self._due = now + self._latency(time.perf_counter() - began)

    def poll(self, now: float) -> Answer | None:
        """See ``Inference``."""
        if self._answer is None or now < self._due - 1e-9:
            return None
        answer = self._answer
        self._answer = None
        return answer

    def close(self) -> None:
        """See ``Inference``; there is nothing to stop."""
