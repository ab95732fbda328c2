"""Several arms at one learner, each in a process of its own: killed, started again, refused."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodyrl.build import load_policy, make_env
from embodyrl.config import Config, resolve
from embodyrl.errors import UserError
from embodyrl.real_robot.arm_names import with_name
from embodyrl.real_robot.remote.arms import Arms, SharedEvaluation
from embodyrl.real_robot.remote.learner import RemoteActors
from embodyrl.rollouts.batches import Episode, TransitionBatch, Transitions
from embodyrl.rollouts.evaluation import Evaluation, evaluate
from embodyrl.storage.loggers import read_metrics
from embodyrl.training.runner import train
from embodyrl.types import Obs

TOKEN = "0123456789abcdef"
ENV: dict[str, Any] = {
    "name": "robot",
    "task": "reach",
    "cameras": [],
    "renderer": "none",
    "max_episode_steps": 10,
}
ARM = """
import sys
from embodyrl.errors import UserError
from embodyrl.real_robot.remote.remote_actor import act
try:
    print(act(sys.argv[1], sys.argv[2], sys.argv[3:]))
except UserError as error:
    sys.exit(str(error))
"""


def config_of(out: Path) -> Config:
    algorithm = {
        "name": "sac_flow",
        "num_chunks": 12,
        "capacity": 400,
        "warmup_chunks": 4,
        "random_warmup": False,
        "batch_size": 8,
        "policy_delay": 1,
        "critic_width": 16,
        "shared_critic": True,
        "utd": 0.2,
    }
    policy = {"name": "flow_mlp", "horizon": 5, "width": 16, "layers": 1}
    run = {"iterations": 6, "eval_every": 6, "eval_episodes": 6, "videos": 0, "threads": 1}
    return resolve(
        {
            "env": ENV,
            "policy": policy | {"transition": "flow_noise"},
            "algorithm": algorithm,
            "run": run | {"device": "cpu", "out": str(out)},
        }
    )


class Processes:
    """The robots' computers: one process for each arm, killed by its id alone."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.all: list[subprocess.Popen[str]] = []

    def start(self, name: str, *overrides: str) -> subprocess.Popen[str]:
        address = f"ws://127.0.0.1:{self.port}/{name}"
        process = subprocess.Popen(
            [sys.executable, "-c", ARM, address, TOKEN, *overrides],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ),
        )  # fmt: skip
        self.all.append(process)
        return process

    def end(self) -> None:
        for process in self.all:
            process.kill()
            process.communicate()


class Scene(RemoteActors):
    """Keeps what it learned from, and runs a script between two collections."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.batches: list[Transitions] = []
        self.rows: list[dict[str, float]] = []
        self.shares: Counter[str] = Counter()
        self.script: dict[int, Any] = {}

    def collect(self, algorithm: Any, iteration: int, **options: Any) -> TransitionBatch:
        self.script.get(iteration, lambda: None)()
        batch = super().collect(algorithm, iteration, **options)
        self.batches.append(batch.chunks)
        self.rows.append(self.figures())
        return batch

    def evaluate(self, algorithm: Any, inits: list[int], seed: int, between: Any) -> Evaluation:
        def note() -> None:
            between()
            if self._evaluation is not None:
                self.shares |= self._evaluation.played_by

        return super().evaluate(algorithm, inits, seed, note)

    def until(self, holds: Any, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end
            time.sleep(0.02)

    def names(self) -> set[str]:
        with self._news:
            return {name for name, arm in self._arms.connected.items() if arm.plays}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[tuple[Scene, Processes]]:
    learner = Scene(config_of(tmp_path), port=0, token=TOKEN)
    processes = Processes(learner.port)
    yield learner, processes
    processes.end()
    learner.close()


def test_three_arms_teach_one_policy_while_one_is_killed_and_comes_back(
    scene: tuple[Scene, Processes], caplog: pytest.LogCaptureFixture
) -> None:
    learner, processes = scene
    first = processes.start("left")
    processes.start("middle", "env.corrector=3")
    processes.start("right")

    def kill() -> None:
        """In the middle of whatever it does."""
        learner.until(lambda: "left" in learner.names())
        first.kill()
        learner.until(lambda: "left" not in learner.names())
        assert learner.names() == {"middle", "right"}  # these go on

    def again() -> None:
        processes.start("left")
        learner.until(lambda: "left" in learner.names())

    learner.script = {
        0: lambda: learner.until(lambda: learner.names() == {"left", "middle", "right"}),
        2: kill,
        4: again,
    }
    with caplog.at_level(logging.WARNING, "embodyrl.real_robot"):
        folder = train(learner.config, rollouts=lambda: learner)

    # The arm that died is named; the others are not, and each ended with the run.
    gone = [r.getMessage() for r in caplog.records if "The arm" in r.getMessage()]
    assert len(gone) == 1 and gone[0].startswith("The arm left at 127.0.0.1:")
    assert "is gone in its episode" in gone[0] and "The other arms go on: 2." in gone[0]
    codes = [process.wait(timeout=60) for process in processes.all]
    assert codes == [-9, 0, 0, 0]
    assert learner.restarts == 1

    # Episodes never mix: each chunk of a number begins where the one before it ended.
    chunks = Transitions.cat(learner.batches)
    assert chunks.episode is not None and chunks.human is not None
    starts = []
    for number in chunks.episode.unique().tolist():
        own = chunks[chunks.episode == number]
        torch.testing.assert_close(own.obs.proprio[1:], own.next_obs.proprio[:-1], rtol=0, atol=0)
        over = own.terminated | own.truncated
        assert not over[:-1].any()
        starts.append(own.obs.proprio[0])
    # No two episodes began in the same state: the arms play different ones.
    assert len(torch.stack(starts).unique(dim=0)) == len(starts) > 10

    # Each arm has its own metrics, and only one had a person.
    rows = read_metrics(folder / "metrics.jsonl")
    names = ("left", "middle", "right")
    total = {name: sum(row.get(f"arm_chunks/{name}", 0) for row in rows) for name in names}
    assert min(total.values()) > 0 and sum(total.values()) == len(chunks)
    assert all(row.get("arm_human_chunks/right", 0) == 0 for row in rows)
    assert sum(row.get("arm_human_chunks/middle", 0) for row in rows) == int(chunks.human.sum()) > 0
    assert rows[-1]["worker_restarts"] == 1
    assert {row["arms"] for row in rows} == {2, 3}


def test_arms_share_an_evaluation_and_its_result_is_that_of_one(
    scene: tuple[Scene, Processes], tmp_path: Path
) -> None:
    learner, processes = scene
    for name in ("left", "right"):
        processes.start(name)
    learner.until(lambda: learner.names() == {"left", "right"})
    run = replace(learner.config.run, iterations=1)
    folder = train(replace(learner.config, run=run), rollouts=lambda: learner)
    assert set(learner.shares) == {"left", "right"}
    file = json.loads((folder / "evals" / "after.json").read_text())
    env = make_env(learner.config.env.for_evaluation(run.eval_split))
    policy = load_policy(str(folder), learner.config.policy, env.spec, run.seed)
    alone = evaluate(env, policy, list(range(6)), seed=run.seed)
    env.close()
    assert [(e["init"], e["success"], e["length"]) for e in file["episodes"]] == [
        (e.init, e.success, e.length) for e in alone.episodes
    ]


def test_an_arm_with_another_env_is_refused_and_the_first_goes_on(
    scene: tuple[Scene, Processes],
) -> None:
    learner, processes = scene
    processes.start("left")
    learner.until(lambda: learner.names() == {"left"})
    other = processes.start("right", "env.max_episode_steps=11")
    assert other.wait(timeout=120) == 1
    assert other.stderr is not None and "max_episode_steps" in other.stderr.read()
    assert learner.names() == {"left"}


# ---- The bookkeeping, without processes.


def chunk(theirs: int | None, over: bool = False, *episodes: Episode) -> TransitionBatch:
    obs = Obs({}, torch.zeros(1, 3), ["go"])
    done = torch.tensor([over])
    number = None if theirs is None else torch.tensor([theirs])
    chunks = Transitions(
        obs, torch.zeros(1, 5, 4), torch.zeros(1, 5), torch.ones(1, 5, dtype=torch.bool),
        done, ~done & done, obs, torch.tensor([False]), number,
    )  # fmt: skip
    return TransitionBatch(chunks, list(episodes))


def test_what_an_arm_leaves_unfinished_is_dropped_and_nothing_else() -> None:
    arms = Arms()
    left, right = arms.join("left", "a:1"), arms.join("right", "b:2")
    result = Episode(3, "task", True, 1.0, 5)
    # Both actors use the same numbers; one repeats the number of an episode that is over.
    arms.ready(left)
    arms.ready(right)
    arms.hear(left, chunk(0, True))
    arms.hear(right, chunk(0))
    arms.hear(left, chunk(0))
    arms.hear(left, chunk(0, False, result))
    arms.hear(right, chunk(0))
    assert arms.waiting_chunks == 5
    assert arms.leave(left) == 2
    batch, figures = arms.take()
    assert batch.episodes == [result]  # of an episode that ended before
    assert batch.chunks.episode is not None
    assert batch.chunks.episode.tolist() == [0, 1, 1]
    assert figures["arm_chunks/left"] == 1 and figures["arm_chunks/right"] == 2
    assert figures["arm_success/left"] == 1.0 and figures["arms"] == 1
    # One that comes back has new numbers, and the other one's episode goes on.
    back = arms.join("left", "a:3")
    arms.ready(back)
    arms.hear(back, chunk(0, True))
    arms.hear(right, chunk(0, True))
    assert arms.take()[0].chunks.episode.tolist() == [3, 1]  # type: ignore[union-attr]
    assert back.shard not in (left.shard, right.shard)


def test_numbers_of_a_resumed_run_are_new() -> None:
    arms = Arms()
    arms.iteration = 7
    arms.hear(arms.join("left", "a:1"), chunk(None, True))
    episode = arms.take()[0].chunks.episode
    assert episode is not None and episode.tolist() == [7 << 24]


def test_an_arm_has_a_name_that_no_other_has() -> None:
    arms = Arms()
    arms.join("left", "a:1")
    with pytest.raises(UserError, match="there is an arm left at a:1 already"):
        arms.join("left", "b:1")
    for wrong in ("", "a b", "../x", "x" * 33, "-x"):
        with pytest.raises(UserError, match="no name of an arm"):
            arms.join(wrong, "c:1")
    assert with_name("ws://h:1/left") == "ws://h:1/left"
    assert with_name("ws://h:1/").startswith("ws://h:1/") and len(with_name("ws://h:1")) > 9


def test_what_an_arm_did_not_evaluate_another_one_does() -> None:
    arms = Arms()
    left, right = arms.join("left", "a:1"), arms.join("right", "b:2")
    shared = SharedEvaluation([4, 2, 9], seed=0)
    assert (shared.take(), shared.take()) == (4, 2)
    shared.note(right, Evaluation([Episode(2, "task", False, 0.0, 10)], {}, 1))
    shared.give_back(4)
    unfinished = shared.result
    assert unfinished is None and shared.waits
    for init in (shared.take(), shared.take()):
        shared.note(right, Evaluation([Episode(init, "task", True, 1.0, 5)], {}))
    result = shared.result
    assert result is not None and [e.init for e in result.episodes] == [4, 2, 9]
    assert result.faults == 1 and shared.played_by == {right.name: 3} and left.begun == 0
