"""Two tasks in turn, and a policy that brings the scene back, on the simulated arm."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from untrained import untrained

from embodyrl.cli.main import main
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.errors import UserError
from embodyrl.real_robot.connect_robot import simulated_robot
from embodyrl.real_robot.control.clocks import RealClock
from embodyrl.real_robot.env.robot_env import RobotConfig, RobotEnv
from embodyrl.real_robot.logs.export import export_logs
from embodyrl.real_robot.resets.judges import RobotSays
from embodyrl.real_robot.resets.scene_reset import SceneReset
from embodyrl.real_robot.resets.ways import PolicyReturn
from embodyrl.real_robot.twin.mujoco_twin import counterpart_of
from embodyrl.sims.mujoco.config import MujocoConfig
from embodyrl.sims.mujoco.experts import ScriptedExpert

STATES: dict[str, Any] = {"task": "pick", "cameras": (), "renderer": "none", "speed": 0.5}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of an untrained policy of the task ``put_back``."""
    folder = tmp_path_factory.mktemp("policy")
    return untrained(
        folder,
        "env: {name: mujoco, task: put_back, renderer: none, cameras: [], num_envs: 1}\n"
        "policy: {name: flow_mlp, width: 32, horizon: 5}\nalgorithm: {name: ppo}\n",
    )


def play(
    env: RobotEnv, init: int, still: bool = False, begins: list[np.ndarray] | None = None
) -> bool:
    """An episode of the present task's expert, or of nobody; whether it was solved.

    ``begins`` takes where the blocks were when it began.
    """
    env.reset(init=[init])
    if begins is not None:
        begins.append(env.twin.view().blocks[0].copy())
    expert = ScriptedExpert(env.twin)
    while True:
        env.look()
        action = torch.zeros(1, 4) if still else expert.act()
        step = env.step(action[:, None])
        if bool(step.done):
            assert float(step.reward.sum()) == float(step.success)
            return bool(step.success)


def test_each_task_begins_where_the_other_ended() -> None:
    env = RobotEnv(RobotConfig(**STATES, practice=True))
    tasks, begins, ends = [], [], []
    for init in range(6):
        assert play(env, init, begins=begins)
        tasks.append(env.between.state.back)
        ends.append(env.twin.view().blocks[0].copy())
    counts = env.between.state.counts
    told = env.twin.instructions[0]
    env.close()
    assert tasks == [False, True] * 3 and "back on the" in told
    assert (counts.resets, counts.ready, counts.asked) == (5, 5, 0)
    for end, begin in zip(ends, begins[1:], strict=False):
        # Nobody moved the other blocks; the hand holds or has left the first, and came to rest.
        np.testing.assert_allclose(end[1:], begin[1:], atol=0.002)
        assert np.hypot(*(end[0] - begin[0])[:2]) < 0.05
    # The block is in another place than it began in.
    assert np.hypot(*(begins[0][0] - begins[4][0])[:2]) > 0.02


def test_a_failed_task_is_played_again_until_a_person_is_asked() -> None:
    env = RobotEnv(
        RobotConfig(**STATES | {"max_episode_steps": 30}, practice=True, ask_after=2, reset_tries=1)
    )
    backs, asked = [], []
    # Solved, then failed once on the way back: a person. Then failed twice: a person again.
    for init, still in enumerate([False, True, True, True, False]):
        assert play(env, init, still) is not still
        backs.append(env.between.state.back)
        asked.append(env.between.state.asked)
    env.close()
    assert backs == [False, True, False, False, False]
    assert asked == [False, False, True, False, True]


def test_a_policy_brings_the_scene_back_or_a_person_is_asked(saved: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    given = {"reset": str(saved), "reset_seconds": 1.0, "reset_tries": 2, "log": str(logs)}
    env = RobotEnv(RobotConfig(**STATES, **given, record=True))
    assert play(env, 0) and play(env, 1)
    counts = env.between.state.counts
    env.close()
    # It was never trained.
    assert (counts.tries, counts.asked) == (2, 1)
    # What it did is no data of the task, unless that is asked for.
    with pytest.raises(UserError, match="all of resets: give --resets"):
        export_logs(logs / "resets", tmp_path / "none", keep_failures=True)
    written = export_logs(logs / "resets", tmp_path / "back", keep_failures=True, resets=True)
    assert written["episodes"] == 2 and not written["solved"]
    told = open_dataset(tmp_path / "back", ["task_index"])
    assert all("back on the" in text for text in told.tasks.values())
    assert export_logs(logs, tmp_path / "forward")["episodes"] == 2


def by_the_expert(twin: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A policy that sees what the expert sees, and plans one action."""
    expert = ScriptedExpert(twin)

    def infer(seen: dict[str, Any]) -> dict[str, Any]:
        assert "back on the" in seen["prompt"]
        return {"actions": expert.act().numpy()}

    return infer


def as_a_reset(env: RobotEnv, tries: int = 2) -> SceneReset:
    """The env's reset, with the expert in place of a checkpoint."""
    connected = env._connected
    way = PolicyReturn(by_the_expert(env.twin), 1)
    home = env.config.home
    judge = RobotSays(env.twin.solved)
    return SceneReset(connected, way, env._decoder, judge, home, 30.0, tries)


class AtThePage:
    """A person who presses stop when they have been shown an arm for a while."""

    def __init__(self, after: int) -> None:
        self.after, self.shown = after, []

    def wishes(self) -> list[str]:
        return ["estop"] if len(self.shown) == self.after else []

    def show(self, status: dict[str, Any], images: Any) -> None:
        self.shown.append(status)


def test_the_page_stops_an_arm_that_goes_home(capsys: pytest.CaptureFixture[str]) -> None:
    from embodyrl.real_robot.control import kinematics
    from embodyrl.real_robot.record.clear_scene import go_home

    env = RobotEnv(RobotConfig(**STATES))
    env.reset(init=[0])
    env._end_episode()
    far, person = (0.6, 0.2, 0.35), AtThePage(after=3)
    go_home(env._connected, env._decoder(), far, person)  # type: ignore[arg-type]
    said = [(status["reason"], status["can"]) for status in person.shown]
    assert said[0] == ("the arm goes home", ["estop"])
    assert said[-1] == ("a person pressed stop", ["estop"]) and len(said) <= 6
    assert "did not come home: a person pressed stop" in capsys.readouterr().out
    state = env._connected.robot.state()
    assert np.abs(np.subtract(kinematics.tip(state.q.tolist()), far)).max() > 0.05
    env.close()


def test_it_is_over_as_soon_as_the_scene_is_back(saved: Path) -> None:
    env = RobotEnv(RobotConfig(**STATES, reset=str(saved), home=(0.44, 0.0, 0.17)))
    env.between._reset = as_a_reset(env)
    for init in range(4):
        assert play(env, init)
    counts = env.between.state.counts
    env.close()
    assert (counts.resets, counts.ready, counts.tries, counts.asked) == (3, 3, 3, 0)
    assert counts.seconds < 3 * 10.0


def test_a_reset_in_the_walls_time(saved: Path) -> None:
    """The ticker's thread moves the arm, as with a real one."""
    env = RobotEnv(RobotConfig(**STATES | {"speed": 1.0}, reset=str(saved)))
    twin: Any = env.twin
    clock = RealClock()

    class Walled:
        def now(self) -> float:
            return twin.now()

        def sleep_until(self, stamp: float) -> None:
            threads = [thread.name for thread in threading.enumerate()]
            if threading.current_thread().name == "ticker" or "ticker" not in threads:
                clock.sleep_until(clock.now() + stamp - twin.now())
                twin.sleep_until(stamp)
                return
            end = clock.now() + 5.0
            while twin.now() < stamp and clock.now() < end:
                clock.sleep_until(clock.now() + 0.002)

    assert play(env, 0)
    env._end_episode()
    env._connected.clock, env._connected.simulated = Walled(), False
    twin.go_on(1, True)
    result = as_a_reset(env, tries=1)(1)
    assert result.ready and result.tries == 1, result.reason
    assert twin.solved() and not [t for t in threading.enumerate() if t.name == "ticker"]
    env.close()


def test_a_stop_ends_a_reset_and_a_person_is_asked(saved: Path) -> None:
    env = RobotEnv(RobotConfig(**STATES, reset=str(saved)))

    class Presses:
        """A person who presses stop as soon as the arm moves."""

        def wishes(self) -> list[str]:
            return ["estop"]

        def show(self, status: dict[str, Any], images: dict[str, Any]) -> None:
            assert "takeover" not in status["can"]

    assert play(env, 0)
    reset = as_a_reset(env)
    reset.operator = Presses()  # type: ignore[assignment]
    env._end_episode()
    env.twin.go_on(1, True)
    result = reset(1)
    assert not result.ready and result.tries == 1 and "a person pressed stop" in result.reason
    env.close()


def test_practice_helps_and_learns_both_tasks(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["improve", str(saved), "env.task=pick", "--practice", "--helper", "scripted"]
    words += ["--latency", "0.01", "--speed", "1", "--rounds", "1", "--episodes", "4"]
    words += ["--look", "1", "--out", str(out), "helper.patience=0", "helper.rewind=0"]
    learner = ["run.iterations=1", "run.threads=1", "algorithm.steps_per_iteration=4"]
    assert main([*words, *learner, "helper.reaction=0"]) == 0
    found = json.loads((out / "improve.json").read_text())["rounds"]["round_0"]
    assert found["helped"]["solved"] == 4 and found["helped"]["asked"] == 0
    told = open_dataset(found["data"], ["task_index"]).tasks.values()
    assert any(text.startswith("pick up") for text in told)
    assert any("back on the" in text for text in told)


def test_deploy_says_how_often_a_person_was_asked(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["deploy", str(saved), "env.task=pick", "--episodes", "2", "--latency", "0.01"]
    words += ["--speed", "1", "--reset", str(saved), "--reset-seconds", "0.4"]
    assert main([*words, "--reset-tries", "1", "--out", str(out)]) == 0
    result = json.loads((out / "result.json").read_text())
    assert result["resets"]["resets"] == result["resets"]["asked"] == 1
    assert len(list((out / "resets").glob("*.mcap"))) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"task": "reach", "practice": True}, "No embedded task undoes reach"),
        ({"practice": True, "reset": "there.yaml"}, "Leave one of them out"),
        ({"reset": "not/there.yaml"}, r"There is no not/there.yaml \(env.reset\)"),
        ({"reset_tries": 5}, "env.reset_tries is about a reset without a person"),
        ({"practice": True, "reset_prompt": "put it back"}, "says its own instructions"),
        ({"practice": True, "home": (0.45, 0.0, 0.9)}, "home .* outside the workspace"),
        ({"practice": True, "reset_seconds": 0.0}, "reset_seconds|reset.seconds"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        RobotEnv(RobotConfig(**STATES | settings))


def test_a_policy_with_other_actions_is_refused(saved: Path) -> None:
    config = RobotConfig(**STATES, control_mode="ee_delta_pose", reset=str(saved))
    with pytest.raises(UserError, match="was trained with action_dim 4"):
        RobotEnv(config)


def test_evaluations_of_the_simulated_arm_are_arranged() -> None:
    config = RobotConfig(**STATES, practice=True, reset_tries=3)
    scored: Any = config.for_evaluation("eval")
    assert not scored.practice and scored.reset_tries == RobotConfig.reset_tries
    real: Any = RobotConfig(robot="ros2", practice=True).for_evaluation("eval")
    assert real.practice


def test_a_pair_of_tasks_goes_on_too() -> None:
    both = MujocoConfig(task="pick,put_back", cameras=(), renderer="none", num_threads=1)
    assert counterpart_of(both) == "put_back"
    with simulated_robot(both) as connected:
        twin: Any = connected.robot
        connected.begin(1)
        assert twin.at_back and "back on the" in twin.prompt()
        before = twin.view().blocks.copy()
        twin.go_on(2, False)
        assert not twin.at_back and twin.prompt().startswith("pick up") and twin.solved()
        np.testing.assert_array_equal(before, twin.view().blocks)


def test_training_and_evaluation_share_the_scene_of_a_real_arm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The twin stands for a real arm: the env that scores goes on where the other left the scene."""
    config = RobotConfig(**STATES, practice=True)
    with simulated_robot(MujocoConfig(cameras=(), renderer="none", num_threads=1)) as connected:

        @contextmanager
        def same_arm(self: RobotEnv, cameras: Any) -> Iterator[Any]:
            # Real time is only what makes an arm real here; it is over before anything moves.
            connected.simulated = False
            yield connected

        monkeypatch.setattr(RobotEnv, "_connect", same_arm)
        trained, scored = RobotEnv(config), RobotEnv(config)
        connected.simulated = True
        # Each ends its episode before the other one begins, as it is made to on a real arm.
        assert play(trained, 0)
        trained._end_episode()
        assert play(scored, 1) and scored.between.state.back
        scored._end_episode()
        assert play(trained, 2) and not trained.between.state.back
        counts = scored.between.state.counts
        assert (counts.resets, counts.ready, counts.asked) == (2, 2, 0)
        scored.close()
        trained.close()
        later = RobotEnv(config)
        assert not later.between.state.begun
        later.close()
