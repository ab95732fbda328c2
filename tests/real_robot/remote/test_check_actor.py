"""What a learner believes of an actor, and that bad actors cost nothing but themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.faults import learner as faults
from embodyrl.algorithms.dsrl import DSRL
from embodyrl.config import resolve
from embodyrl.errors import UserError
from embodyrl.real_robot.env.config import RobotConfig, robot_spec
from embodyrl.real_robot.parsing import MessageError
from embodyrl.real_robot.remote.check_actor import (
    Bounds,
    check_configured,
    check_evaluation,
    check_played,
    check_same_env,
    check_spec,
    in_words,
)
from embodyrl.real_robot.remote.learner import RemoteActors
from embodyrl.rollouts.batches import Episode
from embodyrl.sims.mujoco import privileged
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.types import EnvSpec

SPEC = replace(faults.SPEC, cameras={"front": (8, 6)})
BOUNDS = Bounds(SPEC, faults.H, 1.0, 1.0)


def test_bad_actors_are_named_and_the_run_goes_on() -> None:
    counts = faults.survive(40, seed=2)
    assert counts == {"tries": 40, "survived": 40, "chunks": 10}


def chunk_with(**changes: Any) -> dict[str, Any]:
    batch = faults.good_chunk(SPEC)["played"]
    return {"played": replace(batch, chunks=replace(batch.chunks, **changes))}


def reward(value: float) -> torch.Tensor:
    row = torch.zeros(1, faults.H)
    row[0, 2] = value
    return row


GOOD = faults.good_chunk(SPEC)["played"].chunks


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": reward(float("nan"))}, r"reward\[0, 2\] is nan; it must be a number from -1 to 1"),
        ({"reward": reward(1e30)}, r"reward\[0, 2\] is 1e\+30"),
        ({"reward": reward(-1.01)}, r"reward\[0, 2\] is -1.01"),
        ({"reward": torch.zeros(1, 4)}, r"reward|choice"),
        ({"reward": torch.zeros(2, faults.H)}, "there are 2 chunks; at most 1"),
        ({"choice": torch.full((1, faults.H, 4), 1.5)}, r"choice\[0, 0, 0\] is 1.5"),
        ({"choice": torch.zeros(1, faults.H, 4).double()}, "not .* float64"),
        ({"valid": torch.zeros(1, faults.H, dtype=torch.bool)}, "without an action"),
        ({"valid": torch.tensor([[True] * 4 + [False]])}, "reward is not zero where valid is false"),
        ({"terminated": torch.zeros(1)}, "terminated must be"),
        ({"human": torch.zeros(3, dtype=torch.bool)}, "human must be"),
        ({"obs": replace(GOOD.obs, images={})}, "obs.images must have the cameras front"),
        ({"next_obs": replace(GOOD.obs, images={"front": torch.zeros(1, 8, 6, 3)})}, "next_obs.images"),
        ({"obs": replace(GOOD.obs, proprio=torch.full((1, 7), 1e30))}, r"obs.proprio\[0, 0\] is 1e\+30"),
        ({"obs": replace(GOOD.obs, privileged=torch.zeros(1, 2))}, "obs.privileged is given"),
        ({"obs": replace(GOOD.obs, instruction=["x" * 600])}, "obs.instruction must be a text"),
    ],
)  # fmt: skip
def test_a_chunk_is_refused_by_field_and_value(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(MessageError, match=said):
        check_played(chunk_with(**changes), BOUNDS)


def test_good_chunks_are_believed() -> None:
    batch = check_played(faults.good_chunk(SPEC), BOUNDS)
    assert batch.chunks.human is not None and not batch.chunks.human.any()
    noise = torch.full((1, faults.H, 4), 3.0)
    check_played(chunk_with(choice=noise), replace(BOUNDS, max_choice=DSRL.max_choice))
    nothing = replace(faults.good_chunk(SPEC)["played"], chunks=GOOD[:0], episodes=[])
    assert len(check_played({"played": nothing}, BOUNDS).chunks) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": float("nan")}, "episode.reward is nan"),
        ({"reward": 6.0}, "episode.reward is 6.0"),
        ({"length": 11}, "episode.length is 11"),
        ({"init": -1}, "episode.init is -1"),
        ({"task": "other\n"}, r"episode.task is 'other\\n'"),
        ({"success": 1}, "episode.success is 1"),
        ({"instruction": 3}, "episode.instruction must be a text"),
    ],
)
def test_an_episode_is_refused_by_field_and_value(change: dict[str, Any], said: str) -> None:
    episode = replace(Episode(3, "task", True, 1.0, 5), **change)
    with pytest.raises(MessageError, match=said):
        check_evaluation({"evaluation": [episode], "faults": 0}, BOUNDS, [episode.init])
    batch = replace(faults.good_chunk(SPEC)["played"], episodes=[episode])
    with pytest.raises(MessageError, match=said):
        check_played({"played": batch}, BOUNDS)


def test_an_evaluation_is_of_the_states_that_were_asked_for() -> None:
    episodes = [Episode(k, "task", True, 1.0, 5) for k in range(2)]
    message = {"evaluation": episodes, "faults": 1}
    assert check_evaluation(message, BOUNDS, [0, 1]).faults == 1
    for wrong in (
        message | {"faults": -1},
        {"played": 3},
        message | {"evaluation": episodes[::-1]},
    ):
        with pytest.raises(MessageError):
            check_evaluation(wrong, BOUNDS, [0, 1])


VALUES = st.none() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=3)


@given(st.sampled_from(list(EnvSpec.__dataclass_fields__)), VALUES)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_a_spec_is_read_or_refused_in_words(name: str, value: Any) -> None:
    try:
        spec = check_spec({"spec": spec_to_json(SPEC) | {name: value}})
    except UserError as error:
        assert in_words(error).isascii() and "\n" not in in_words(error)
        return
    assert spec == check_spec({"spec": spec_to_json(spec)})


def test_an_actor_that_comes_later_has_the_same_env() -> None:
    check_same_env(SPEC, replace(SPEC, name="robot/rosbridge"))
    for change in ({"max_episode_steps": 11}, {"tasks": ("other",)}, {"privileged_dim": 3}):
        with pytest.raises(UserError, match=f"spec.{next(iter(change))} is "):
            check_same_env(SPEC, replace(SPEC, **change))


ENV = RobotConfig(task="reach", cameras=("front",), image_size=8, max_episode_steps=10)


@pytest.mark.parametrize(
    "change",
    [
        {"max_episode_steps": 10**6},
        {"control_hz": 1000.0},
        {"control_mode": "ee_delta_pose", "action_dim": 7, "proprio_dim": 13},
        {"action_dim": 7},
        {"proprio_dim": 999},
        {"privileged_dim": 3},
        {"cameras": {}},
        {"cameras": {"front": (2048, 2048)}},
        {"tasks": ("other",)},
        {"num_envs": 64},
        {"reports_success": False},
    ],
)
def test_the_first_actor_of_a_run_cannot_choose_its_env(change: dict[str, Any]) -> None:
    spec = robot_spec(ENV, 7)
    check_configured(ENV, replace(spec, name="robot/ros1"))
    check_configured(ENV, replace(spec, proprio_dim=7 + privileged.DIM))  # an arm without cameras
    with pytest.raises(MessageError, match=f"spec.({'|'.join(change)}) is "):
        check_configured(ENV, replace(spec, **change))


def test_a_checkpoint_that_a_run_starts_from_knows_the_env(tmp_path: Path) -> None:
    """An actor that does not fit it is refused when it comes; the learner waits for the next."""
    start = checkpoint.save(
        tmp_path / "start" / "checkpoints" / "step_000001",
        {"policy": {}},
        {"spec": spec_to_json(robot_spec(ENV, 13))},
    )
    run = faults._run(str(tmp_path))
    run["env"] |= {"cameras": ["front"], "image_size": 8}
    config = resolve(run)
    config = replace(config, run=replace(config.run, init_checkpoint=str(start)))
    learner = RemoteActors(config, port=0)
    with pytest.raises(UserError, match="proprio_dim"):
        learner._greet({"spec": spec_to_json(robot_spec(ENV, 7))})
    assert learner._spec is None
    learner.close()


def test_a_run_that_is_no_robots_has_no_actor(tmp_path: Path) -> None:
    run = faults._run(str(tmp_path))
    run["env"] = {"name": "mujoco", "task": "reach"}
    with pytest.raises(UserError, match=r"env.name=robot"):
        RemoteActors(resolve(run), port=0)
    run = faults._run(str(tmp_path))
    run["env"]["max_reward"] = 0.0
    from embodyrl.real_robot.env.config import check_settings

    with pytest.raises(UserError, match=r"env.max_reward is 0.0"):
        check_settings(resolve(run).env)  # type: ignore[arg-type]
