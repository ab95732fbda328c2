"""An env in the conventions of a public family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from embodyrl.build import make_env
from embodyrl.checks.env import check_env
from embodyrl.config import env_config
from embodyrl.errors import UserError
from embodyrl.rollouts.presented_env import PresentedEnv
from embodyrl.sims.mujoco.env import MujocoEnv
from embodyrl.storage import profiles
from embodyrl.storage.env_spec import check_compatible
from embodyrl.storage.profiles import Profile
from embodyrl.types import Conventions

CONFIG = env_config("mujoco", ["env.task=pick", "env.num_envs=2", "env.image_size=32"])
FAMILY = Profile(
    "a family of pictures that are mirrored and blue first, and of a gripper in 1 to 0",
    "here",
    conventions=Conventions("mirrored", "bgr", scale=(0.07, 0.07, -0.035), gripper=(1.0, 0.0)),
)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(profiles.PROFILES, "family", FAMILY)
    return "family"


def test_the_same_episode_is_seen_and_done_in_both_conventions(family: str) -> None:
    plain, shown = MujocoEnv(CONFIG), make_env(replace(CONFIG, profile=family))
    first, other = plain.reset(init=[3, 4]), shown.reset(init=[3, 4])
    wanted = first.images["front"].flip([2, 3])
    assert torch.equal(other.images["front"], wanted) and torch.equal(first.proprio, other.proprio)
    ours = torch.tensor([[0.4, -0.2, 0.3, -1.0], [0.1, 0.0, -0.5, 1.0]])[:, None]
    theirs = torch.tensor([[0.2, -0.1, -0.3, 1.0], [0.05, 0.0, 0.5, 0.0]])[:, None]
    one, two = plain.step(ours), shown.step(theirs)
    torch.testing.assert_close(one.obs.proprio, two.obs.proprio)
    assert torch.equal(two.obs.images["front"], one.obs.images["front"].flip([2, 3]))
    plain.close()
    shown.close()


def test_its_expert_solves_the_task_and_its_actions_are_in_the_familys_terms(family: str) -> None:
    env = make_env(replace(CONFIG, profile=family, num_envs=1))
    actions = []
    env.reset(init=[0])
    expert = env.make_expert()  # type: ignore[attr-defined]
    expert.reset([0])
    for _ in range(env.spec.max_episode_steps):
        step, taken = env.rollout(expert.act, 1)  # type: ignore[attr-defined]
        actions.append(taken[:, :1])
        if step.done[0]:
            break
    assert bool(step.success[0])
    gripper = torch.cat(actions)[:, 0, -1]
    assert set(gripper.unique().tolist()) == {0.0, 1.0} and gripper[0] == 0.0 and gripper[-1] == 1.0
    # Played again as they were recorded.
    env.reset(init=[0])
    for action in actions:
        again = env.step(action)
    assert bool(again.success[0])
    env.close()


def test_a_checkpoint_of_one_convention_does_not_fit_the_other(family: str) -> None:
    plain = MujocoEnv(replace(CONFIG, num_envs=1))
    shown = PresentedEnv(plain, family)
    assert shown.spec.conventions.gripper == (1.0, 0.0) and shown.spec.conventions.fit == "crop"
    with pytest.raises(UserError, match="orientation"):
        check_compatible(plain.spec, shown.spec)
    plain.close()


def test_it_is_an_env(family: str) -> None:
    env = make_env(replace(CONFIG, profile=family))
    check_env(env)
    env.close()


def test_a_profile_that_does_not_exist_or_fit_is_refused() -> None:
    for name, words in (
        ("libero_lerobt", "no profile 'libero_lerobt'"),
        ("libero_lerobot", "The parts of the state of the profile libero_lerobot"),
        ("droid", "The parts of the state|The kind of actions"),
    ):
        with pytest.raises(UserError, match=words):
            make_env(replace(CONFIG, profile=name))
