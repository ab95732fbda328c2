"""The robot as an env: promises, evaluation, learning, faults and people, on the simulated arm."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from websockets.sync.client import connect

from embodyrl.build import make_env
from embodyrl.checks import check_env
from embodyrl.config import resolve
from embodyrl.data.collect import collect_dataset
from embodyrl.errors import UserError
from embodyrl.real_robot.control.clocks import RealClock
from embodyrl.real_robot.env.robot_env import RobotConfig, RobotEnv
from embodyrl.real_robot.logs.mcap_log import read
from embodyrl.real_robot.operator import OperatorPage
from embodyrl.rollouts.collect import collect_transitions
from embodyrl.rollouts.episodes import start_episodes
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.sims.mujoco.config import MujocoConfig as TaskConfig
from embodyrl.storage import checkpoint
from embodyrl.storage.loggers import read_metrics
from embodyrl.training.runner import train
from embodyrl.types import ActionSample, Obs, Step

STATES: dict[str, Any] = {
    "task": "reach",
    "cameras": (),
    "renderer": "none",
    "max_episode_steps": 25,
}


@pytest.fixture(scope="module")
def env() -> Iterator[RobotEnv]:
    env = RobotEnv(RobotConfig(**STATES))
    yield env
    env.close()


class Reach:
    """Goes straight to the ball, whose place is in the privileged part of the twin's proprio."""

    def sample(self, obs: Obs, *, generator: Sequence[torch.Generator], mode: str) -> ActionSample:
        seen, chunk = obs.proprio[0], torch.zeros(1, 5, 4)
        where, ball = seen[3:6], seen[:3] + seen[25:28]
        for k in range(5):
            chunk[0, k, :3] = ((ball - where) / 0.035).clamp(-0.6, 0.6)
            where = where + 0.035 * chunk[0, k, :3]
        return ActionSample(chunk)


@pytest.mark.parametrize(
    "settings", [STATES, {"task": "pick", "image_size": 32, "renderer": "opengl"}]
)
def test_it_keeps_the_promises_of_an_env(settings: dict[str, Any]) -> None:
    env = RobotEnv(RobotConfig(**settings | {"max_episode_steps": 12}))
    check_env(env)
    env.close()


def test_a_policy_is_evaluated_on_it(env: RobotEnv) -> None:
    result = evaluate(env, Reach(), range(4))  # type: ignore[arg-type]
    assert result.successes == 4 and result.faults == 0
    assert all(episode.reward == 1.0 and episode.length < 25 for episode in result.episodes)


def test_actions_pass_the_filter_and_take_their_time(tmp_path: Path) -> None:
    env = RobotEnv(RobotConfig(**STATES, speed=0.5, log=str(tmp_path)))
    env.reset(init=[0])
    env.step(torch.rand(1, 10, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    env.close()
    messages = read(tmp_path / "episode_000000.mcap")
    commands = [c for c in messages["/command"] if c["mode"] == "run"]
    assert (
        len(commands) == 10 * 8 and len(messages["/action"]) == 10
    )  # 12.5 actions and 100 commands a second
    assert (
        np.abs(np.diff([c["dq"] for c in commands], axis=0)).max() / 0.01 <= 20.0
    )  # rad/s^2, Panda's largest
    assert (
        messages["/command"][-1]["mode"] == "hold"
        and max(map(abs, messages["/command"][-1]["dq"])) < 1e-6
    )


@pytest.mark.parametrize("reward", [float("nan"), 1e30, -1.5])
def test_a_judge_whose_reward_is_out_of_bounds_is_named(reward: float) -> None:
    env = RobotEnv(RobotConfig(**STATES), lambda seen: (reward, False))
    env.reset(init=[0])
    with pytest.raises(UserError, match="The judge gave a reward of"):
        env.step(torch.zeros(1, 2, env.spec.action_dim))
    env.close()


def test_a_judge_gives_reward_and_ends_the_episode() -> None:
    judged: list[dict[str, Any]] = []

    def judge(seen: dict[str, Any]) -> tuple[float, bool]:
        judged.append(seen)
        return 0.5, len(judged) == 3

    env = RobotEnv(RobotConfig(**STATES), judge)
    env.reset(init=[0])
    step = env.step(torch.zeros(1, 5, 4))
    assert step.reward.tolist() == [[0.5, 0.5, 0.5, 0.0, 0.0]] and step.valid.sum() == 3
    assert bool(step.terminated) and bool(step.success) and judged[0]["prompt"]
    env.close()


def test_a_reflex_masks_the_chunk_and_the_next_episode_is_whole(env: RobotEnv) -> None:
    env.reset(init=[0])
    twin: Any = env._connected.robot
    twin.reflex = "cartesian_reflex"
    step = env.step(torch.full((1, 5, 4), 0.5))
    assert (
        bool(step.truncated) and not step.valid.any() and bool(step.fault) and not step.reward.any()
    )
    twin.reflex = ""
    env.reset(init=[0])
    assert env.step(torch.full((1, 5, 4), 0.5)).valid.all()


def test_an_arm_that_is_driven_against_the_table_has_failed_and_is_not_broken() -> None:
    env = RobotEnv(RobotConfig(**{**STATES, "task": "pick", "max_episode_steps": 60, "speed": 0.5}))
    env.reset(init=[7])
    ways = [
        (-1, 1, -1),
        (1, 1, -1),
        (-1, 1, -1),
        (1, -1, -1),
        (-1, -1, 1),
        (-1, -1, -1),
        (1, -1, 1),
        (1, 1, -1),
    ]
    steps = [env.step(torch.tensor([*way[:2], -1.0, way[2]]).expand(1, 5, 4)) for way in ways]
    assert all(step.valid.all() for step in steps[:-1])
    last = steps[-1]
    assert (
        bool(last.terminated)
        and not bool(last.success)
        and not bool(last.fault)
        and not last.reward.any()
    )
    assert last.valid[0, 0] and not last.valid.all()
    env.reset(init=[0])
    assert env.step(torch.zeros(1, 5, 4)).valid.all()
    env.close()


def test_people_are_asked_where_no_topic_arranges_the_scene(
    env: RobotEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(env, "_ask", asked.append)
    monkeypatch.setattr(env._connected, "arranges", False)
    monkeypatch.setattr(
        env, "_episodes", 1
    )  # not the first: the arm goes home before the person reaches in
    homes: list[np.ndarray] = []
    twin: Any = env._connected.robot
    begin = env._connected.begin
    monkeypatch.setattr(
        env._connected, "begin", lambda init: (homes.append(twin.data.qpos[:7].copy()), begin(init))
    )
    env.reset(init=[2])
    from embodyrl.real_robot.control import kinematics

    np.testing.assert_allclose(kinematics.tip(homes[0].tolist()), (0.45, 0.0, 0.25), atol=0.02)
    assert asked == ["Arrange the scene for episode 2 (initial state 2), and go on."]


def in_the_walls_time(env: RobotEnv) -> None:
    """Lets the twin be an arm in real time: the ticker's thread moves its clock on."""
    twin: Any = env._connected.robot
    clock = RealClock()

    class Walled:
        def now(self) -> float:
            return twin.now()

        def sleep_until(self, stamp: float) -> None:
            began, ticks = clock.now(), stamp - twin.now()
            if threading.current_thread().name == "ticker":
                clock.sleep_until(began + ticks)
                twin.sleep_until(stamp)
            else:
                while twin.now() < stamp:
                    clock.sleep_until(clock.now() + 0.002)

    env._connected.clock, env._connected.simulated = Walled(), False


def test_in_the_walls_time_the_arm_is_held_while_its_owner_thinks() -> None:
    env = RobotEnv(RobotConfig(**STATES))
    in_the_walls_time(env)
    clock = RealClock()
    env.reset(init=[0])
    assert env.step(torch.full((1, 5, 4), 0.4)).valid.all()
    driver = env._driver
    assert driver is not None
    clock.sleep_until(clock.now() + 0.5)
    command = driver.guard.command
    assert driver.guard.mode == "hold" and command is not None and np.abs(command.dq).max() < 1e-6
    assert env.step(torch.full((1, 3, 4), -0.4)).valid.all() and driver.guard.mode == "run"
    env.close()
    assert [str(e.after) for e in driver.events] == ["hold", "run", "hold", "run", "hold"]


def test_who_trains_and_who_evaluates_do_not_write_one_log(tmp_path: Path) -> None:
    config = RobotConfig(**STATES, log=str(tmp_path))
    for one in (config, config.for_evaluation("eval")):
        env = RobotEnv(one)  # type: ignore[arg-type]
        env.reset(init=[0])
        env.step(torch.zeros(1, 2, 4))
        env.close()
    logs = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.mcap"))
    assert logs == ["episode_000000.mcap", "eval/episode_000000.mcap"]


@pytest.mark.parametrize("wish", ["estop", "hold"])
def test_a_stop_reaches_an_arm_whose_policy_is_evaluated(wish: str) -> None:
    """The env that scores has no person of its own; the arm is the same."""
    config = RobotConfig(**STATES, operator=0)
    trained, scored = RobotEnv(config), RobotEnv(config.for_evaluation("eval"))  # type: ignore[arg-type]
    in_the_walls_time(scored)
    page: Any = trained._operator
    scored.reset(init=[0])
    # Nobody takes over there, and no label counts.
    for said in ("takeover", "success", wish):
        page._wishes.put(said)
    if wish == "hold":
        threading.Timer(1.0, page._wishes.put, ("run",)).start()
    began = time.monotonic()
    step = scored.step(torch.full((1, 5, 4), 0.2))
    driver = scored._driver
    assert driver is not None and step.human is None and not step.success
    modes = [str(event.after) for event in driver.events]
    if wish == "estop":
        assert bool(step.fault) and modes[-1] == "estop"
    else:
        assert step.valid.all() and "a person said hold" in [e.reason for e in driver.events]
        assert time.monotonic() - began > 1.0
    scored.close()
    trained.close()


def test_a_person_labels_holds_and_stops() -> None:
    env = RobotEnv(RobotConfig(**STATES, operator=0))
    page, still = env._operator, torch.zeros(1, 2, 4)
    assert isinstance(page, OperatorPage)
    origin: Any = f"http://127.0.0.1:{page.port}"
    with connect(f"ws://127.0.0.1:{page.port}/socket", origin=origin) as socket:
        socket.send(page.address.split("#")[1])

        def says(*wishes: str) -> Step:
            """The first chunk after the wishes were heard, each a while after the one before."""
            env.reset(init=[0])
            for k, wish in enumerate(wishes):
                threading.Timer(0.3 + 0.4 * k, socket.send, (json.dumps({"do": wish}),)).start()
            chunks = 0
            while not (step := env.step(still)).done and chunks < 10:
                chunks += 1
            return step

        step = says("success")
        assert bool(step.success) and bool(step.terminated) and step.reward.sum() == 1.0
        step = says("failure")
        assert bool(step.terminated) and not step.success and step.reward.sum() == 0.0
        step = says("hold", "run", "success")
        driver = env._driver
        assert bool(step.success) and driver is not None
        assert (
            "hold -> run: told to run"
            in [f"{e.before} -> {e.after}: {e.reason}" for e in driver.events][1:]
        )
        step = says("estop")
        assert bool(step.fault) and not step.valid.any()
    env.close()


def test_a_person_takes_over_and_what_they_did_is_what_counts(tmp_path: Path) -> None:
    env = RobotEnv(RobotConfig(**STATES, log=str(tmp_path), corrector=7))
    stream, still = start_episodes(env, range(9)), torch.zeros(1, 5, 4)
    generator = torch.Generator()

    def act(obs: Obs, _: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return still, still

    chunks = collect_transitions(stream, act, 2, generator=generator).chunks
    assert chunks.human is not None and chunks.human.tolist() == [False, True]
    assert (
        not chunks.choice[0].any() and not chunks.choice[1, :2].any()
    )  # the seventh action was still the policy's
    assert chunks.choice[1, 2:][chunks.valid[1, 2:]].abs().amax(-1).min() > 0.2
    while not chunks.terminated.any():
        chunks = collect_transitions(stream, act, 1, generator=generator).chunks
    assert bool(chunks.terminated[-1]) and chunks.reward.sum() == 1.0  # they solved it
    # An algorithm whose choice is no action (DSRL chooses noise) cannot have chosen what a person
    # did.
    stream = start_episodes(env, range(9))
    noise = torch.ones(1, 5, 4)
    kept = collect_transitions(stream, lambda *_: (still, noise), 2, generator=generator).chunks
    assert len(kept) == 1 and kept.choice.eq(1.0).all()
    env.close()
    log = read(tmp_path / "episode_000000.mcap")
    people = [m["human"] for m in log["/action"]]
    assert people[:7] == [False] * 7 and all(people[7:]) and len(people) > 7
    assert "run -> human: taken over" in [m["text"] for m in log["/event"]]


class Told:
    """A person who says what they are told to say, one list of wishes after each action."""

    def __init__(self, *wishes: list[str]) -> None:
        self.said, self.answers, self.asked = [*wishes], True, 0

    def wishes(self) -> list[str]:
        return self.said.pop(0) if self.said else []

    def alive(self, now: float) -> bool:
        return self.answers

    def action(self, dims: int) -> np.ndarray:
        self.asked += 1
        return np.array([0.0, 0.4, 0.0, 1.0], np.float32)

    def show(self, status: dict[str, Any], images: dict[str, Any]) -> None:
        pass


def test_who_lets_go_does_so_at_the_end_of_the_chunk_and_silence_holds_the_arm() -> None:
    person = Told(["takeover"], [], ["release"], [], [])
    env = RobotEnv(RobotConfig(**STATES), operator=person)
    env.reset(init=[0])
    still = torch.zeros(1, 5, 4)
    step = env.step(still)
    assert step.human is not None and step.taken is not None
    assert step.human.tolist() == [[False, True, True, True, True]]  # to the end of the chunk
    assert step.taken[0, :, 1].tolist() == pytest.approx([0.0, 0.4, 0.4, 0.4, 0.4])
    step = env.step(still)
    assert step.human is not None and not step.human.any() and env._driver is not None
    assert [str(e.after) for e in env._driver.events[-3:]] == ["human", "hold", "run"]
    person.said, person.answers = [["takeover"], ["run"]], False
    step = env.step(still)
    assert "does not answer" in " ".join(e.reason for e in env._driver.events) and person.asked == 4
    assert step.valid.all() and env._driver.guard.mode == "run"
    env.close()


def test_rlpd_keeps_corrections_beside_its_demonstrations(tmp_path: Path) -> None:
    """A few updates with a scripted person, as the command does it."""
    data = tmp_path / "demos"
    task = TaskConfig(task="reach", cameras=(), renderer="none", num_envs=2)
    collect_dataset(task, data, num_episodes=4)
    sections = {
        "env": {"name": "robot", **STATES, "cameras": [], "max_episode_steps": 15, "corrector": 5},
        "policy": {
            "name": "flow_mlp",
            "width": 16,
            "layers": 1,
            "critic_width": 8,
            "num_denoise_steps": 2,
        }
        | {"horizon": 5},
        "algorithm": {
            "name": "rlpd",
            "num_chunks": 4,
            "capacity": 64,
            "warmup_chunks": 4,
            "batch_size": 8,
        }
        | {"critic_width": 16, "num_critics": 2, "intervention_capacity": 16},
        "data": {"path": str(data)},
        "run": {
            "iterations": 3,
            "eval_every": 0,
            "eval_before": False,
            "eval_episodes": 2,
            "checkpoint_every": 3,
        }
        | {"videos": 0, "device": "cpu", "threads": 1, "out": str(tmp_path)},
    }
    rows = read_metrics(train(resolve(sections)) / "metrics.jsonl")
    assert sum(row["human_chunks"] for row in rows) >= 2 and rows[-1]["gradient_steps"] > 0


def test_sac_flow_learns_on_it(tmp_path: Path) -> None:
    """Two updates of an unchanged algorithm, and a checkpoint that says what it was trained on."""
    sections = {
        "env": {"name": "robot", **STATES, "cameras": [], "max_episode_steps": 10},
        "policy": {
            "name": "flow_mlp",
            "width": 16,
            "layers": 1,
            "critic_width": 8,
            "num_denoise_steps": 2,
        }
        | {"horizon": 5},
        "algorithm": {
            "name": "sac_flow",
            "num_chunks": 4,
            "capacity": 64,
            "warmup_chunks": 4,
            "batch_size": 8,
        }
        | {"critic_width": 16},
        "run": {
            "iterations": 3,
            "eval_every": 0,
            "eval_before": False,
            "eval_episodes": 2,
            "checkpoint_every": 3,
        }
        | {"videos": 0, "device": "cpu", "threads": 1, "out": str(tmp_path)},
    }
    folder = train(resolve(sections))
    rows = read_metrics(folder / "metrics.jsonl")
    assert rows[-1]["gradient_steps"] > 0 and rows[-1]["env_steps"] == 60
    _, meta = checkpoint.load(checkpoint.find(folder))
    assert meta["spec"]["name"] == "robot/reach" and meta["spec"]["num_envs"] == 1


def test_settings_that_cannot_be_are_said_in_words() -> None:
    for settings, words in (
        ({"num_envs": 2}, "env.num_envs is 2, but it must be 1"),
        ({"robot": "ros3"}, "Did you mean 'ros"),
        ({"control_mode": "ee_delta_pos_"}, "Did you mean 'ee_delta_pos"),
        ({"speed": 0.0}, "env.speed is 0.0, but it must be"),
        ({"device": "cuda"}, "must be cpu|sees no GPU"),
    ):
        with pytest.raises(UserError, match=words):
            make_env(RobotConfig(**STATES | settings))
