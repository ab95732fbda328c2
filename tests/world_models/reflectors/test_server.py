"""Servers that answer, are slow, gone or broken, or talk nonsense: real processes over HTTP."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from embodyrl.errors import UserError
from embodyrl.world_models.reflectors.circuit_breaker import CircuitBreaker
from embodyrl.world_models.reflectors.server import ServerConfig, ServerReflector, parse_answer

SCRIPT = Path(__file__).with_name("vlm_server.py")


def start():
    process = subprocess.Popen([sys.executable, str(SCRIPT)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, f"http://127.0.0.1:{int(process.stdout.readline())}"


@pytest.fixture(scope="module")
def address():
    process, url = start()
    yield url
    process.kill()
    process.wait()


def make(url: str, kind: str, **changes) -> ServerReflector:
    settings = {"window": 3, "image_size": 8, "timeout": 1.0, "deadline": 3.0} | changes
    return ServerReflector(ServerConfig(f"{url}/{kind}/v1", "tiny", **settings))


def frames(n: int, t: int = 3) -> dict[str, torch.Tensor]:
    """Row k, column j is a grey of its own."""
    grey = torch.arange(n * t).reshape(n, t, 1, 1, 1) * 255 // (n * t)
    return {
        "front": grey.expand(n, t, 6, 8, 3).to(torch.uint8),
        "wrist": torch.zeros(n, t, 4, 4, 3, dtype=torch.uint8),
    }


def expected(pictures: dict[str, torch.Tensor]) -> torch.Tensor:
    yes = 0.02 + 0.9 * pictures["front"].float().mean((2, 3, 4)) / 255
    return yes / 0.94


def test_right_server_judges_every_frame(address):
    reflector, shown = make(address, "right"), frames(5)
    prob = reflector.judge(shown, ["lift it"] * 5)
    torch.testing.assert_close(prob, expected(shown), atol=1e-6, rtol=0)
    assert prob.dtype == torch.float32 and reflector.counts == {"answered": 15}
    reflector.check()


def test_only_new_frames_cost_a_question(address):
    reflector, shown = make(address, "right"), frames(4)
    prob = reflector.judge(shown, ["lift it"] * 4, new=1)
    torch.testing.assert_close(prob[:, 2], expected(shown)[:, 2], atol=1e-6, rtol=0)
    assert prob[:, :2].isnan().all() and reflector.counts == {"answered": 4}


def test_concurrency_is_bounded_and_used():
    process, url = start()
    try:
        make(url, "right", concurrency=4).judge(frames(12), ["x"] * 12)
        import httpx

        assert httpx.get(url, trust_env=False).json() == 4
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", ["slow", "hang", "drip"])
def test_slow_server_ends_at_the_deadline(address, kind):
    reflector = make(address, kind, deadline=1.5, timeout=0.6, retries=1, breaker_failures=1000)
    began = time.monotonic()
    prob = reflector.judge(frames(20), ["lift it"] * 20)
    assert time.monotonic() - began < 1.5 + 1.0
    assert prob.isnan().all() and sum(reflector.counts.values()) == 60
    assert set(reflector.counts) <= {"late", "failed"} and "no" in reflector.last_error
    # The deadline alone, with a timeout beyond it, does the same.
    reflector = make(address, kind, deadline=0.5, timeout=100.0)
    began = time.monotonic()
    assert reflector.judge(frames(2), ["lift it"] * 2).isnan().all()
    assert time.monotonic() - began < 1.5 and reflector.counts == {"late": 6}


@pytest.mark.parametrize(
    ("kind", "count", "says"),
    [
        ("broken", "failed", "500"),
        ("close", "failed", "RemoteProtocolError"),
        ("nonsense", "unparsed", "no log-probabilities"),
        ("plain", "unparsed", "no log-probabilities"),
        ("huge", "unparsed", "no log-probabilities"),
        ("nowhere", "failed", ""),
    ],
)
def test_bad_answers_are_nan_and_counted(address, kind, count, says):
    reflector = make(address, kind, retries=1, breaker_failures=1000)
    prob = reflector.judge(frames(2), ["lift it"] * 2)
    assert prob.isnan().all() and reflector.counts == {count: 6}
    assert says in reflector.last_error and reflector.last_error.isprintable()
    with pytest.raises(UserError, match="does not judge pictures"):
        reflector.check()


def test_errors_that_pass_are_tried_again(address):
    reflector, shown = make(address, "flaky"), frames(2)
    torch.testing.assert_close(
        reflector.judge(shown, ["lift it"] * 2), expected(shown), atol=1e-6, rtol=0
    )
    assert reflector.counts == {"answered": 6}


def test_server_that_dies_and_comes_back_opens_and_closes_the_breaker(address):
    process, url = start()
    reflector = make(
        url, "right", retries=0, breaker_failures=3, breaker_seconds=0.5, concurrency=1
    )
    assert not reflector.judge(frames(2), ["x"] * 2).isnan().any()
    process.kill()
    process.wait()
    assert reflector.judge(frames(4), ["x"] * 4).isnan().all()
    assert (
        reflector.counts == {"answered": 6, "failed": 3, "skipped": 9} and reflector.breaker.is_open
    )
    began = time.monotonic()
    assert reflector.judge(frames(4), ["x"] * 4).isnan().all()
    assert time.monotonic() - began < 0.3 and reflector.counts["skipped"] == 21
    time.sleep(0.5)
    reflector._url = make(address, "right")._url  # the server is back
    prob = reflector.judge(frames(4), ["x"] * 4)
    assert not prob.isnan().any() and not reflector.breaker.is_open


def test_server_that_dies_between_answers(address):
    process, url = start()
    reflector = make(url, "once", retries=0, concurrency=1)
    prob = reflector.judge(frames(2), ["x"] * 2)
    assert prob.isfinite().sum() <= 1 and reflector.counts["failed"] >= 5
    process.wait()


def test_key_comes_from_the_environment(address, monkeypatch):
    monkeypatch.setenv("REFLECTOR_KEY", "sesame")
    assert (
        make(address, "key", api_key_env="REFLECTOR_KEY").judge(frames(1), ["x"]).isfinite().all()
    )
    refused = make(address, "key")
    assert refused.judge(frames(1), ["x"]).isnan().all() and "401" in refused.last_error
    monkeypatch.setenv("HF_TOKEN", "a secret of this computer")
    with pytest.raises(UserError, match="must begin with REFLECTOR_"):
        make(address, "key", api_key_env="HF_TOKEN")
    monkeypatch.setenv("REFLECTOR_KEY", "")
    with pytest.raises(UserError, match="REFLECTOR_KEY"):
        make(address, "key", api_key_env="REFLECTOR_KEY")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"url": "127.0.0.1:8000"}, "must look like"),
        ({"url": "file:///etc/passwd"}, "must look like"),
        ({"url": "http://far.example/v1", "api_key_env": "REFLECTOR_KEY"}, "unencrypted"),
        ({"deadline": 0.0}, "deadline"),
        ({"window": 1}, "window"),
        ({"question": "Is it done?"}, "instruction"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, says):
    with pytest.raises(UserError, match=says):
        ServerConfig(**({"url": "http://127.0.0.1:1/v1", "model": "tiny"} | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"side": 0}, "front"),
        ({"front": torch.zeros(1, 2, 4, 4, 3, dtype=torch.uint8)}, "window of 3"),
    ],
)
def test_frames_that_do_not_fit_are_refused(changes, says):
    shown = {"side": frames(1)["front"]} if "side" in changes else changes
    with pytest.raises(UserError, match=says):
        make("http://127.0.0.1:1", "right").judge(shown, ["x"])


def reply(top) -> bytes:
    return json.dumps(
        {"choices": [{"logprobs": {"content": [{"token": "Yes", "top_logprobs": top}]}}]}
    ).encode()


def test_an_answer_is_the_odds_of_yes():
    def token(text, p):
        return {"token": text, "logprob": math.log(p)}

    assert parse_answer(
        reply([token("Yes", 0.6), token("No", 0.2), token("Well", 0.2)]), 0.5
    ) == pytest.approx(0.75)
    assert parse_answer(
        reply([token("▁yes", 0.3), token("YES.", 0.3), token("no", 0.2)]), 0.5
    ) == pytest.approx(0.75)
    assert parse_answer(reply([token("Yes", 0.9)]), 0.5) == 1.0
    nan = [
        [token("Yes", 0.2), token("Well", 0.8)],  # it did not answer the question
        [token("Yes", 0.9), token("No", 0.9)],  # no probabilities
        [{"token": "Yes", "logprob": math.nan}],
        [{"token": "Yes", "logprob": True}, token("No", 0.5)],
        [{"token": "Yes", "logprob": "-0.1"}],
        [{"token": "Yes", "logprob": -(10**400)}],
        [{"token": 3, "logprob": -0.1}],
        [],
        {"Yes": -0.1},
        None,
    ]
    assert all(math.isnan(parse_answer(reply(top), 0.5)) for top in nan)
    assert math.isnan(parse_answer(b"[" * 100_000, 0.5))


def test_ten_thousand_fuzzed_replies_never_raise_and_never_lie():
    rng = np.random.default_rng(0)
    good = reply(
        [{"token": t, "logprob": math.log(p)} for t, p in (("Yes", 0.5), ("No", 0.4), ("So", 0.1))]
    )
    parsed = 0
    for _ in range(10_000):
        data = bytearray(good)
        for _ in range(rng.integers(1, 8)):
            kind, at = rng.integers(4), rng.integers(len(data))
            if kind == 0:
                data[at] = rng.integers(256)
            elif kind == 1:
                del data[at : at + rng.integers(1, 20)]
            elif kind == 2:
                data[at:at] = rng.choice(
                    [b"null", b"NaN", b"1e999", b"{", b"[", b'"', b"-Infinity", b"9" * 30]
                )
            else:
                data = data[:at]
            data = data or bytearray(b"{")
        value = parse_answer(bytes(data), 0.5)
        assert math.isnan(value) or 0.0 <= value <= 1.0
        parsed += not math.isnan(value)
    assert 0 < parsed < 5000


def test_breaker_against_a_clock():
    now = [0.0]
    breaker = CircuitBreaker(failures=2, seconds=10, clock=lambda: now[0])
    breaker.record(False)
    assert breaker.allow() and not breaker.is_open
    breaker.record(True)
    for _ in range(2):
        assert breaker.allow()
        breaker.record(False)
    assert breaker.is_open and not breaker.allow()
    now[0] = 10.0
    assert breaker.allow() and not breaker.allow()  # one try alone
    breaker.record(False)
    assert not breaker.allow()
    now[0] = 20.0
    assert breaker.allow()
    breaker.record(True)
    assert breaker.allow() and not breaker.is_open
