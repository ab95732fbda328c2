"""An actor on the robot's computer and a learner elsewhere, over a real socket."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from embodyrl.config import Config, resolve
from embodyrl.distributed.wire import from_bytes, to_bytes
from embodyrl.errors import UserError
from embodyrl.real_robot.remote.learner import RemoteActors
from embodyrl.real_robot.remote.remote_actor import act
from embodyrl.rollouts.batches import Episode, TransitionBatch, Transitions
from embodyrl.storage.loggers import read_metrics
from embodyrl.training.runner import train
from embodyrl.types import Obs

ENV: dict[str, Any] = {
    "name": "robot",
    "task": "reach",
    "cameras": [],
    "renderer": "none",
    "max_episode_steps": 10,
}

TOKEN = "0123456789abcdef"


def config_of(out: Path) -> Config:
    algorithm = {
        "name": "sac_flow",
        "num_chunks": 4,
        "capacity": 200,
        "warmup_chunks": 4,
        "random_warmup": False,
    }
    algorithm |= {"batch_size": 8, "policy_delay": 1, "critic_width": 16, "shared_critic": True}
    policy = {
        "name": "flow_mlp",
        "horizon": 5,
        "width": 16,
        "layers": 1,
        "transition": "flow_noise",
    }
    run = {
        "iterations": 4,
        "eval_every": 2,
        "eval_episodes": 2,
        "videos": 0,
        "threads": 1,
        "device": "cpu",
    }
    run |= {"checkpoint_every": 2, "out": str(out)}
    return resolve({"env": ENV, "policy": policy, "algorithm": algorithm, "run": run})


class Noting(RemoteActors):
    """Notes what it sends and what it gets."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.human: list[bool] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.episodes: list[Episode] = []

    def collect(self, *args: Any, **options: Any) -> TransitionBatch:
        batch = super().collect(*args, **options)
        assert batch.chunks.human is not None
        self.human += batch.chunks.human.tolist()
        self.weights.append(self._weights)
        self.episodes += batch.episodes
        return batch


def test_a_learner_learns_from_what_an_actor_plays_and_the_actor_plays_what_was_learned(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path)
    learner = Noting(config, port=0, token=TOKEN)
    played: list[int] = []

    def robots_computer() -> None:
        with pytest.raises(UserError, match="No learner answers"):
            act(f"ws://127.0.0.1:{learner.port}", "wrong")
        with pytest.raises(UserError, match="is the learner's to say"):
            act(f"ws://127.0.0.1:{learner.port}", TOKEN, ["run.seed=3"])
        played.append(act(f"ws://127.0.0.1:{learner.port}", TOKEN, ["env.corrector=3"]))

    robot = threading.Thread(target=robots_computer)
    robot.start()
    folder = train(config, rollouts=lambda: learner)
    robot.join(timeout=60)
    assert not robot.is_alive() and played[0] >= 4 * 4
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4] and rows[-1]["gradient_steps"] >= 12
    assert any(learner.human)  # the actor's own override: a scripted person beside it
    # The person takes over after 3 actions; an episode that was solved before is the policy's.
    persons = [episode.person for episode in learner.episodes]
    assert persons == [episode.length > 3 for episode in learner.episodes] and any(persons)
    assert sum(row["train_episodes"] for row in rows) == persons.count(False)
    assert sum(row["person_episodes"] for row in rows) == persons.count(True)
    assert rows[-1]["worker_restarts"] == 0
    first, last = learner.weights[0], learner.weights[-1]
    assert any(not torch.equal(first[name], last[name]) for name in first)
    names = {file.stem: json.loads(file.read_text()) for file in (folder / "evals").glob("*.json")}
    assert set(names) == {"before", "iter_000002", "after"} and len(names["after"]["episodes"]) == 2


def test_who_cannot_use_it_is_told(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(UserError, match="Give a token"):
        RemoteActors(config, host="0.0.0.0", port=0)
    on_policy = resolve(
        {"env": ENV, "policy": {"name": "flow_mlp"}, "algorithm": {"name": "ppo"}, "run": {}}
    )
    with pytest.raises(UserError, match="ppo learns from its own latest rollouts alone"):
        RemoteActors(on_policy, port=0)
    for key, value in {"start_sampling": "difficulty", "first_length": 0.5}.items():
        run = dataclasses.replace(config.run, **{key: value})
        with pytest.raises(UserError, match=f"run.{key}.*the actor at the robot chooses"):
            RemoteActors(dataclasses.replace(config, run=run), port=0)
    learner = RemoteActors(config, port=0, token=TOKEN)
    with pytest.raises(InvalidStatus):
        connect(f"ws://127.0.0.1:{learner.port}").close()
    address = f"ws://127.0.0.1:{learner.port}/left"
    secret = {"Authorization": f"Api-Key {TOKEN}"}
    with connect(address, additional_headers=secret) as first:
        sent: Any = from_bytes(first.recv())  # type: ignore[arg-type]
        assert sent["config"]["run"]["iterations"] == 4 and sent["shard"] == 0
        with pytest.raises(UserError, match="no place for this arm: there is an arm left at 127"):
            act(address, TOKEN)
        with pytest.raises(UserError, match="is no name of an arm"):
            act(address + "/of two", TOKEN)
        with connect(address.replace("left", "right"), additional_headers=secret) as second:
            assert from_bytes(second.recv())["shard"] == 1  # type: ignore[arg-type]
        first.send(b"\x80\x04K\x01.")  # a pickle
        with pytest.raises(Exception, match="4002"):
            first.recv()
    learner.close()


def test_bytes_hold_all_and_nothing_else() -> None:
    obs = Obs(
        {"front": torch.arange(12, dtype=torch.uint8).view(1, 2, 2, 3)}, torch.rand(1, 3), ["go"]
    )
    flags = torch.tensor([True])
    chunk = Transitions(
        obs,
        torch.rand(1, 2, 4),
        torch.rand(1, 2),
        torch.ones(1, 2, dtype=torch.bool),
        flags,
        ~flags,
        obs,
    )
    back = from_bytes(to_bytes({"chunks": chunk, "episodes": [], "n": 3}))
    assert back["n"] == 3 and back["episodes"] == [] and back["chunks"].human is None
    torch.testing.assert_close(
        back["chunks"].obs.images["front"], obs.images["front"], rtol=0, atol=0
    )
    torch.testing.assert_close(back["chunks"].choice, chunk.choice, rtol=0, atol=0)
    for data in (b"", b"\x00" * 9, to_bytes({})[:-1], b"\xff" * 64):
        with pytest.raises(UserError, match="not understood"):
            from_bytes(data)
