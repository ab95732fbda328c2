"""Bad actors at a learner: each is refused and named, and the run goes on with what was good.

python -m benchmarks.faults.learner [TRIES] [SEED]
"""

from __future__ import annotations

import collections
import logging
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from benchmarks.faults import nonsense
from embodyrl.config import resolve
from embodyrl.distributed.wire import from_bytes, to_bytes
from embodyrl.real_robot.env.config import RobotConfig, robot_spec
from embodyrl.real_robot.remote.learner import REFUSED, RemoteActors
from embodyrl.rollouts.batches import Episode, TransitionBatch, Transitions
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.training.setup import Envs, build_algorithm
from embodyrl.types import EnvSpec, Obs

TOKEN = "0123456789abcdef"
H = 5
MEANING = robot_spec(RobotConfig(control_mode="ee_delta_pos"), 7).conventions
SPEC = EnvSpec("robot/ros2", 1, 4, 7, "ee_delta_pos", 25.0, 10, {}, conventions=MEANING)


def good_chunk(spec: EnvSpec = SPEC) -> dict[str, Any]:
    """What an honest actor sends after a chunk that ended an episode."""
    images = {n: torch.zeros(1, *size, 3, dtype=torch.uint8) for n, size in spec.cameras.items()}
    obs = Obs(images, torch.zeros(1, spec.proprio_dim), ["reach"])
    reward = torch.zeros(1, H)
    reward[0, -1] = 1.0
    chunks = Transitions(
        obs,
        torch.rand(1, H, spec.action_dim) * 2 - 1,
        reward,
        torch.ones(1, H, dtype=torch.bool),
        torch.tensor([True]),
        torch.tensor([False]),
        obs,
    )
    return {"played": TransitionBatch(chunks, [Episode(3, "task", True, 1.0, H)])}


def _tensor(rng: random.Random, good: torch.Tensor) -> Any:
    """A tensor with a bad number, type or shape, or no tensor at all."""
    kind = rng.randrange(5)
    if kind == 0 or not good.is_floating_point():
        return nonsense.value(rng, 1) if rng.random() < 0.5 else good[..., None]
    if kind == 1:
        return good.to(rng.choice((torch.float64, torch.int64, torch.bfloat16, torch.bool)))
    if kind == 2:
        return good.new_zeros(
            rng.choice(((0,), (1,), (2, *good.shape[1:]), (1, 1, 1, 1), (10**6,)))
        )
    bad = good.clone()
    worst = ("nan", "inf", "-inf", "1e30", "-1e5")
    bad.view(-1)[rng.randrange(bad.numel())] = float(rng.choice(worst))
    return bad


def bad_chunk(rng: random.Random) -> dict[str, Any]:
    """A chunk with one wrong field."""
    batch = good_chunk()["played"]
    chunks = batch.chunks
    kind = rng.randrange(8)
    if kind == 0:
        return {"chunks": "abc"}
    if kind == 1:
        return {"played": nonsense.ODD[rng.randrange(len(nonsense.ODD))], "extra": 1}
    if kind == 2:
        return {"evaluation": batch.episodes, "faults": 0}  # that nobody asked for
    if kind == 3:
        name = rng.choice(("init", "task", "success", "reward", "length"))
        odd = {"init": -1, "task": "other", "success": 1, "reward": 1e30, "length": 10**9}
        episode = replace(batch.episodes[0], **{name: rng.choice((odd[name], None, [], "x" * 99))})
        return {"played": replace(batch, episodes=[episode])}
    if kind == 4:
        odd_episodes = ("abc", None, [1], batch.episodes * 9)
        return {"played": replace(batch, episodes=rng.choice(odd_episodes))}
    if kind == 5:
        name = rng.choice(("obs", "next_obs"))
        odd_obs = (
            None,
            replace(chunks.obs, images={"front": torch.zeros(1, 8, 8, 3, dtype=torch.uint8)}),
            replace(chunks.obs, instruction=rng.choice(([], "a", [3], ["x" * 10_000], None))),
            replace(chunks.obs, privileged=torch.zeros(1, 3)),
            replace(chunks.obs, proprio=_tensor(rng, chunks.obs.proprio)),
        )
        return {"played": replace(batch, chunks=replace(chunks, **{name: rng.choice(odd_obs)}))}
    names = ("choice", "reward", "valid", "terminated", "truncated")
    name = rng.choice(names)
    bad = _tensor(rng, getattr(chunks, name))
    return {"played": replace(batch, chunks=replace(chunks, **{name: bad}))}


def bad_message(rng: random.Random) -> bytes | str:
    """A bad chunk in good bytes, or bad bytes."""
    kind = rng.randrange(10)
    if kind == 0:
        return rng.choice((b"", b"\x80\x04K\x01.", b"\xff" * 64, rng.randbytes(200), "text"))
    if kind == 1:
        deep = b'{"__metadata__":{"tree":"' + b"[" * 50_000 + b'"}}'
        return len(deep).to_bytes(8, "little") + deep
    return to_bytes(bad_chunk(rng))


def bad_spec(rng: random.Random) -> dict[str, Any]:
    """A spec with a wrong field: its actor is refused as it arrives."""
    spec = spec_to_json(SPEC)
    name = rng.choice([n for n in spec if n not in ("name", "num_init_states")])
    # An empty text or list would be no other layout than none.
    odd = [x for x in nonsense.ODD if not isinstance(x, int) and x not in ("", [], {})]
    return {"spec": spec | {name: rng.choice((None, "abc", odd[rng.randrange(len(odd))]))}}


class Records(logging.Handler):
    """Keeps what the learner's log says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a record's text."""
        self.texts.append(record.getMessage())


@contextmanager
def _join(port: int, spec: dict[str, Any]) -> Iterator[ClientConnection]:
    """Joins as an actor; the one before may still be leaving."""
    end = time.monotonic() + 20.0
    secret = {"Authorization": f"Api-Key {TOKEN}"}
    while True:
        with connect(
            f"ws://127.0.0.1:{port}/left", additional_headers=secret, max_size=None
        ) as link:
            try:
                link.recv(timeout=20.0)
            except ConnectionClosed:
                assert time.monotonic() < end, "the learner let nobody in"
                time.sleep(0.005)
                continue
            link.send(to_bytes(spec))
            yield link
            return


def _wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def _end_of(link: ClientConnection) -> str:
    """The reason why the learner closed a connection."""
    try:
        while True:
            link.recv(timeout=20.0)
    except ConnectionClosed as error:
        assert error.rcvd is not None and error.rcvd.code == REFUSED, error
        return error.rcvd.reason


def survive(tries: int, seed: int) -> dict[str, int]:
    """Sends bad messages to a learner that learns, each between two good ones.

    Returns:
        Numbers of ``tries``, of those ``survived`` (the actor was refused and named), and of good
        ``chunks`` that were learned from.

    Raises:
        AssertionError: a bad message was believed, a good one lost, or the learner ended.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    counts: collections.Counter[str] = collections.Counter(tries=tries)
    records = Records()
    logger = logging.getLogger("embodyrl.real_robot")
    logger.addHandler(records)
    propagate, logger.propagate = logger.propagate, False
    with tempfile.TemporaryDirectory() as out:
        learner = RemoteActors(resolve(_run(out)), port=0, token=TOKEN)
        try:
            with _join(learner.port, {"spec": spec_to_json(SPEC)}):
                algorithm: Any = build_algorithm(
                    learner.config, Envs(learner.config, learner), torch.device("cpu")
                )
            learner._publish(algorithm)
            _wait_for(lambda: len(records.texts) == 1)
            assert "is gone" in records.texts.pop()
            for k in range(tries):
                _bad_actor(rng, learner.port, good=k % 4 == 0)
                counts["survived"] += 1
                text = records.texts.pop()
                assert text.startswith("The arm left at 127.0.0.1:"), text
                assert " was refused in its episode " in text and "Traceback" not in text, text
                assert not records.texts, records.texts
                if k % 4 == 0:
                    counts["chunks"] += _learn(learner, algorithm)
        finally:
            learner.close()
            logger.removeHandler(records)
            logger.propagate = propagate
        for p in algorithm.result.parameters():
            assert torch.isfinite(p).all()
    return dict(counts)


def _bad_actor(rng: random.Random, port: int, good: bool) -> None:
    """An actor that is refused, perhaps after it has sent a good chunk."""
    if not good and rng.random() < 0.2:
        with _join(port, bad_spec(rng)) as link:
            assert _end_of(link)
        return
    with _join(port, {"spec": spec_to_json(SPEC)}) as link:
        asked: Callable[[], Any] = lambda: from_bytes(link.recv(timeout=20.0))  # type: ignore[arg-type] # noqa: E731
        assert asked()["do"] == "play"
        if good:
            link.send(to_bytes(good_chunk()))
            assert asked()["do"] == "play"
        link.send(bad_message(rng))
        assert _end_of(link)


def _learn(learner: RemoteActors, algorithm: Any) -> int:
    """One iteration of the run; the number of chunks that it learned from."""
    options: dict[str, Any] = {"generator": torch.Generator(), "device": torch.device("cpu")}
    batch = learner.collect(algorithm, 0, between=lambda: None, **options)
    assert len(batch.chunks) == 1 and batch.episodes == [Episode(3, "task", True, 1.0, H)]
    algorithm.update(batch, progress=0.0, generator=options["generator"])
    return len(batch.chunks)


def _run(out: str) -> dict[str, Any]:
    algorithm = {"name": "sac_flow", "num_chunks": 1, "capacity": 200, "warmup_chunks": 4}
    algorithm |= {"batch_size": 8, "critic_width": 16, "shared_critic": True, "utd": 0.2}
    policy = {"name": "flow_mlp", "horizon": H, "width": 16, "layers": 1}
    env = {"name": "robot", "task": "reach", "cameras": [], "renderer": "none"}
    env |= {"max_episode_steps": 10}
    return {
        "env": env,
        "policy": policy | {"transition": "flow_noise"},
        "algorithm": algorithm | {"random_warmup": False},
        "run": {"out": out, "device": "cpu"},
    }
