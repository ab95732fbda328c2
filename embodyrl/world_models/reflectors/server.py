"""``ServerReflector``: a vision-language model behind an OpenAI-compatible server, such as vLLM.

It reads the token probabilities of yes and no. Whatever the server does, it cannot block or
mislead training: every call ends at its deadline, answers are checked before they are used, and a
missing answer is NaN and counted. Frames leave this machine, for the configured address only.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import os
import random
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.world_models.reflectors.base import check_window
from embodyrl.world_models.reflectors.calibration import Calibration
from embodyrl.world_models.reflectors.circuit_breaker import CircuitBreaker
from embodyrl.world_models.reflectors.question import (
    QUESTION,
    check_question,
    enlarged,
    probability,
)

KEY_PREFIX = "REFLECTOR_"
"""Beginning of the names of environment variables that a reflector's key may be read from."""
LARGEST_ANSWER = 1 << 20
"""The most bytes of an answer; one token takes a few thousand."""
RETRIED = (0, 429, *range(500, 600))
"""Statuses after which another try may succeed; 0 means no answer at all."""


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a ``ServerReflector``."""

    url: str
    """The address above ``/chat/completions``, e.g. ``http://127.0.0.1:8000/v1``."""
    model: str
    """Its name on the server."""
    cameras: tuple[str, ...] = ("front",)
    window: int = 9
    """T, frames per call: the first of the episode and up to T-1 that are judged."""
    question: str = QUESTION
    image_size: int = 224
    """Smaller frames are enlarged until their shorter side has this many pixels."""
    timeout: float = 10.0
    """Seconds for one try of one question."""
    deadline: float = 30.0
    """Seconds for a whole call of ``judge``."""
    retries: int = 2
    """Further tries after a broken connection, a timeout, or a status 429 or 5xx."""
    concurrency: int = 32
    """Questions under way at the same time."""
    breaker_failures: int = 8
    """Questions in a row without an answer after which the server is not asked for a while."""
    breaker_seconds: float = 30.0
    """How long it is then not asked."""
    min_mass: float = 0.5
    """Least probability of yes and no together; below it the answer counts as not understood."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key; it must begin with ``REFLECTOR_``. The
    key itself is never stored."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More request fields, e.g. ``{"chat_template_kwargs": {"enable_thinking": false}}``."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            UserError: no http(s) address, a number out of range, or a key that would be sent
                unencrypted.
        """
        object.__setattr__(self, "cameras", tuple(self.cameras))
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"The server's url is {self.url!r}; it must look like http://127.0.0.1:8000/v1."
            )
        for name in (
            "timeout",
            "deadline",
            "concurrency",
            "breaker_failures",
            "breaker_seconds",
            "image_size",
        ):
            if not getattr(self, name) > 0:
                raise UserError(
                    f"The server reflector's {name} is {getattr(self, name)}; it must be above 0."
                )
        if self.window < 2 or not self.cameras or self.retries < 0:
            raise UserError(
                "A server reflector needs a window of at least 2, a camera, and retries of at "
                "least 0."
            )
        check_question(self.question)
        if (
            self.api_key_env
            and parts.scheme == "http"
            and parts.hostname not in ("127.0.0.1", "localhost", "::1")
        ):
            raise UserError(
                f"The API key would travel unencrypted to {parts.hostname}. Use an https address."
            )


class ServerReflector:
    """See the module; ``Reflector`` for the interface.

    Attributes:
        counts: questions by how they ended: ``answered``, ``unparsed`` (the answer was neither yes
            nor no), ``failed`` (no answer after all tries), ``late`` (the deadline came first),
            ``skipped`` (the breaker was open).
        last_error: the most recent error, in words.
    """

    def __init__(self, config: ServerConfig, calibration: Calibration | None = None) -> None:
        """Nothing is sent before the first question.

        Raises:
            UserError: the environment variable that should hold the key is empty.
        """
        self.config = config
        self.window = config.window
        self.cameras = config.cameras
        self.calibration = calibration or Calibration()
        self.breaker = CircuitBreaker(config.breaker_failures, config.breaker_seconds)
        self.counts: Counter[str] = Counter()
        self.last_error = ""
        self._url = config.url.rstrip("/") + "/chat/completions"
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if config.api_key_env and not config.api_key_env.startswith(KEY_PREFIX):
            raise UserError(
                f"api_key_env is {config.api_key_env!r}, and must begin with {KEY_PREFIX}: a "
                "reflector's folder may come from elsewhere, and must not choose which secret of "
                f"this computer is sent. Set the variable {KEY_PREFIX}KEY."
            )
        if config.api_key_env:
            if not (key := os.environ.get(config.api_key_env)):
                raise UserError(
                    f"The environment variable {config.api_key_env}, which should hold a key, is "
                    "empty."
                )
            self._headers["Authorization"] = f"Bearer {key}"
        self._tls = ssl.create_default_context()
        self._jitter = random.Random()
        self._loop: asyncio.AbstractEventLoop | None = None

    def judge(self, frames: Mapping[str, Tensor], instruction: list[str], new: int = 0) -> Tensor:
        """See ``Reflector``. It returns by the deadline, whatever the server does."""
        end = time.monotonic() + self.config.deadline
        n, t, wanted = check_window(self, frames, instruction, new)
        views = {name: frames[name].cpu().numpy() for name in self.cameras}

        @cache
        def url(camera: str, row: int, column: int) -> str:
            return picture_url(views[camera][row, column], self.config.image_size)

        def body(row: int, column: int) -> bytes:
            return self._request(
                [url(c, row, k) for k in (0, column) for c in self.cameras], instruction[row]
            )

        wanted_columns = range(t - wanted, t)
        questions = [partial(body, row, column) for row in range(n) for column in wanted_columns]
        out = torch.full((n, t), math.nan)
        out[:, t - wanted :] = torch.tensor(self._run(questions, end)).reshape(n, wanted)
        return out

    def check(self) -> None:
        """Asks one question about a grey picture, to find a wrong address or model before training.

        Raises:
            UserError: there was no answer, or it was neither yes nor no; the message says why.
        """
        grey = picture_url(np.full((64, 64, 3), 128, np.uint8), self.config.image_size)
        question = partial(self._request, [grey] * (2 * len(self.cameras)), "wait")
        if math.isnan(self._run([question], time.monotonic() + self.config.deadline)[0]):
            raise UserError(
                f"{self.config.url} does not judge pictures as model {self.config.model!r} "
                f"({self.last_error}). The server must be running, take images, and give logprobs "
                "of its first token."
            )

    def _request(self, pictures: list[str], instruction: str) -> bytes:
        text = self.config.question.replace("{instruction}", instruction)
        content = [{"type": "image_url", "image_url": {"url": picture}} for picture in pictures]
        return json.dumps(
            {
                "model": self.config.model,
                "messages": [
                    {"role": "user", "content": [*content, {"type": "text", "text": text}]}
                ],
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": 20,
                **self.config.extra,
            }
        ).encode()

    def _run(self, questions: list[Callable[[], bytes]], end: float) -> list[float]:
        """The answers, NaN where there is none.

        The network has a thread of its own, so that a deadline can cut off anything.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="reflector", daemon=True).start()
        answers = [math.nan] * len(questions)
        future = asyncio.run_coroutine_threadsafe(
            self._ask_all(questions, answers, end), self._loop
        )
        try:
            future.result()
        finally:
            future.cancel()  # on Ctrl-C; otherwise it is done
        return answers

    async def _ask_all(
        self, questions: list[Callable[[], bytes]], answers: list[float], end: float
    ) -> None:
        gate = asyncio.Semaphore(self.config.concurrency)
        limits = httpx.Limits(max_connections=self.config.concurrency)
        # No proxy from the environment: frames go to the address configured and nowhere else.
        async with httpx.AsyncClient(
            headers=self._headers, limits=limits, timeout=None, verify=self._tls, trust_env=False
        ) as client:

            async def one(k: int) -> None:
                async with gate:
                    answers[k] = await self._ask(client, questions[k])

            tasks = [asyncio.create_task(one(k)) for k in range(len(questions))]
            late = set()
            if tasks:
                left = max(0.0, end - time.monotonic())
                _, late = await asyncio.wait(tasks, timeout=left)
            for task in late:
                task.cancel()
            if late:
                self.counts["late"] += len(late)
                self.last_error = (
                    f"{len(late)} questions were not answered within {self.config.deadline:g} s"
                )
                await asyncio.wait(late, timeout=1.0)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()  # raises an error in this code, which is not the server's fault

    async def _ask(self, client: httpx.AsyncClient, question: Callable[[], bytes]) -> float:
        if not self.breaker.allow():
            self.counts["skipped"] += 1
            return math.nan
        body = question()
        answer = math.nan
        outcome = "failed"
        try:
            for attempt in range(self.config.retries + 1):
                # Wait a little longer before every further try, with jitter.
                if attempt:
                    await asyncio.sleep(0.25 * 2 ** (attempt - 1) * self._jitter.uniform(0.5, 1.5))
                status, reply = await self._post(client, body)
                if status == 200:
                    answer = parse_answer(reply, self.config.min_mass)
                    outcome = "unparsed" if math.isnan(answer) else "answered"
                    if outcome == "unparsed":
                        self.last_error = (
                            f"no log-probabilities of yes and no in its answer {reply[:200]!a}"
                        )
                if status not in RETRIED:
                    break
        except asyncio.CancelledError:
            self.breaker.record(False)
            raise
        self.breaker.record(outcome == "answered")
        self.counts[outcome] += 1
        return answer

    async def _post(self, client: httpx.AsyncClient, body: bytes) -> tuple[int, bytes]:
        """Status and body; status 0 if there was no connection or no answer in time."""
        try:
            async with (
                asyncio.timeout(self.config.timeout),
                client.stream("POST", self._url, content=body) as response,
            ):
                reply = bytearray()
                async for piece in response.aiter_raw():
                    reply += piece
                    if len(reply) > LARGEST_ANSWER:
                        break
        except TimeoutError:
            self.last_error = f"no answer within {self.config.timeout:g} s"
            return 0, b""
        except (httpx.HTTPError, OSError, UnicodeError) as error:
            self.last_error = f"{type(error).__name__}: {str(error)[:200]!a}"
            return 0, b""
        if response.status_code != 200:
            self.last_error = f"status {response.status_code}: {bytes(reply[:200])!a}"
        return response.status_code, bytes(reply)


def parse_answer(reply: bytes, min_mass: float) -> float:
    """P(yes) from the body of a chat completion; NaN if it is none, or neither yes nor no.

    It raises nothing, whatever the bytes are.
    """
    try:
        top = json.loads(reply)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        tokens = [(entry["token"], entry["logprob"]) for entry in top]
        valid = all(
            isinstance(token, str) and type(logprob) in (int, float) for token, logprob in tokens
        )
        return probability(tokens, min_mass) if valid else math.nan
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return math.nan


def picture_url(picture: np.ndarray, shorter_side: int) -> str:
    """A data URL of a picture (h, w, 3) uint8, enlarged if its shorter side is smaller."""
    stream = io.BytesIO()
    enlarged(picture, shorter_side).save(stream, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
