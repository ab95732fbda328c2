"""The chunk executor, on a simulated clock and with real threads."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from embodyrl.errors import UserError
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import ThreadInference, VirtualInference

HZ, H, A = 10.0, 8, 2


class Run:
    """An executor whose policy numbers its actions by the step that they were meant for.

    Action k of the n-th chunk is (number of actions taken at the request + k, n).
    """

    def __init__(
        self, mode: str, latency: float | Callable[[int], float] = 0.0, **config: Any
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.break_it: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer
        delay = (lambda _: latency(len(self.requests))) if callable(latency) else lambda _: latency
        self.executor = Executor(
            ExecutorConfig(H, A, HZ, mode, **config),
            VirtualInference(self.infer, delay),
            lambda _, p: self.problems.append(p),
        )
        self.now, self.actions = 0.0, []

    def infer(self, request: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(request)
        first = self.executor.counts.taken
        chunk = np.stack(
            [np.arange(first, first + H), np.full(H, len(self.requests))], axis=1
        ).astype(np.float32)
        return self.break_it({"actions": chunk})

    def go(self, seconds: float) -> Run:
        for _ in range(round(seconds * 100)):
            self.actions.append(self.executor.tick(self.now, dict))
            self.now += 0.01
        return self

    @property
    def taken(self) -> list[int]:
        return [int(a[0]) for a in self.actions if a is not None]


@pytest.mark.parametrize("mode", ["sync", "naive", "rtc", "ensemble"])
@pytest.mark.parametrize("latency", [0.0, 0.1, 0.25, 0.35])
def test_every_action_is_the_one_meant_for_its_step(mode: str, latency: float) -> None:
    run = Run(mode, latency).go(6.0)
    assert run.taken == list(range(len(run.taken))) and len(run.taken) > 35
    times = np.flatnonzero([a is not None for a in run.actions])
    assert (times % 10 == 0).all()  # absolute times: no drift
    if mode != "sync":
        assert run.executor.counts.starved <= 1 + round(
            latency * HZ + 0.5
        )  # only before the first chunk
        expected = max(0, math.ceil(latency * HZ) - 1)
        assert set(run.executor.counts.delays) == {expected}


def test_sync_waits_with_a_fresh_target_but_not_for_ever() -> None:
    run = Run("sync", 0.3).go(1.5)
    assert run.executor.fresh and run.executor.counts.starved <= 1
    slow = Run("sync", lambda asked: 0.0 if asked <= 1 else 5.0, patience=0.5).go(1.2)
    assert slow.executor.fresh
    assert not slow.go(1.0).executor.fresh


def test_ensemble_weighs_the_oldest_most() -> None:
    run = Run("ensemble", 0.0, execute=1, ensemble_decay=0.5).go(0.35)
    number = run.actions[30]
    assert number is not None
    weights = np.exp(-0.5 * np.arange(3))
    assert number[1] == pytest.approx((weights * [1, 2, 3]).sum() / weights.sum())


def test_rtc_tells_the_policy_what_is_left_and_how_late_it_will_be() -> None:
    run = Run("rtc", 0.35, delay=2).go(4.0)
    first, second = run.requests[1], run.requests[-1]
    assert "previous" not in run.requests[0] and first["delay"] == 2 and second["delay"] == 3
    assert (
        first["execute"] == H // 2
        and first["previous"].shape == (H, A)
        and first["previous"].dtype == np.float32
    )
    np.testing.assert_array_equal(first["previous"][:4, 0], [4, 5, 6, 7])
    np.testing.assert_array_equal(first["previous"][4:, 0], 7)  # hold-last padding


def test_the_warm_up_is_no_measure_of_the_delay() -> None:
    run = Run("rtc", lambda asked: 2.0 if asked <= 1 else 0.15).go(5.0)
    assert set(run.executor.counts.delays) == {1} and run.requests[-1]["delay"] == 1


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (lambda a: {"actions": a["actions"] * np.nan}, "not finite"),
        (lambda a: {"actions": a["actions"][:, :1]}, "shape"),
        (lambda a: {"actions": a["actions"][:5]}, "shape"),
        (lambda a: {}, "shape None"),
        (lambda a: 1 / 0, "inference failed"),
    ],
)
def test_a_broken_chunk_is_refused_and_starves(broken: Callable[[Any], Any], word: str) -> None:
    run = Run("naive", 0.1).go(1.0)
    run.break_it = broken
    run.go(1.5)
    assert word in run.problems[0] and run.executor.counts.refused > 0
    assert not run.executor.fresh and run.taken == list(range(len(run.taken)))
    run.break_it = lambda answer: answer
    run.go(0.5)
    assert run.executor.fresh and run.taken == list(
        range(len(run.taken))
    )  # it goes on where it stopped


def test_a_spike_starves_and_loses_no_action() -> None:
    run = Run("naive", lambda asked: 1.0 if asked == 4 else 0.1).go(5.0)
    assert run.executor.counts.starved >= 5 and run.taken == list(range(len(run.taken)))


def test_a_stall_of_the_ticker_skips_steps_and_counts_them() -> None:
    run = Run("naive").go(0.5)
    run.now += 0.3
    run.go(0.5)
    assert run.executor.counts.missed in (2, 3)


def test_with_threads_the_ticker_never_waits() -> None:
    gate = threading.Event()

    def infer(request: dict[str, Any]) -> dict[str, Any]:
        gate.wait(5.0)
        return {"actions": np.zeros((H, A), np.float32)}

    inference = ThreadInference(infer)
    executor = Executor(ExecutorConfig(H, A, HZ, "naive"), inference)
    began = time.thread_time()
    assert executor.tick(0.0, dict) is None
    for k in range(50):
        assert executor.tick(0.01 * k, dict) is None
    assert time.thread_time() - began < 0.5
    gate.set()
    deadline = time.monotonic() + 20
    while executor.counts.chunks == 0 and time.monotonic() < deadline:
        executor.tick(time.monotonic(), dict)
        time.sleep(0.005)
    assert executor.counts.chunks == 1
    inference.close()
    failing = ThreadInference(lambda request: 1 / 0)  # type: ignore[arg-type, return-value]
    failing.submit({}, 0.0)
    while (answer := failing.poll(0.0)) is None:
        time.sleep(0.001)
    assert isinstance(answer, ZeroDivisionError)
    failing.close()


def test_refusals() -> None:
    with pytest.raises(UserError, match="Did you mean 'rtc'"):
        ExecutorConfig(H, A, HZ, "rct")
    with pytest.raises(UserError, match="8 actions"):
        ExecutorConfig(H, A, HZ, execute=9)
