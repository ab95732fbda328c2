"""MetaWorld's tasks: the env API's promises, MetaWorld's own numbers, its policies, and words for mistakes."""

import importlib.util
import sys

import mujoco
import numpy as np
import pytest
import torch

if importlib.util.find_spec("metaworld") is None:
    pytest.skip("the extra metaworld is not installed", allow_module_level=True)

from embodyrl import registry
from embodyrl.build import make_env
from embodyrl.checks import check_env
from embodyrl.data.collect import collect_dataset
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.errors import UserError
from embodyrl.sims.metaworld.config import CAMERAS, MetaWorldConfig
from embodyrl.sims.metaworld.env import MetaWorldEnv
from embodyrl.sims.metaworld.simulation import _task_class, make_scripted_policy, make_simulation
from embodyrl.sims.metaworld.tasks import SENTENCES, SUITES, list_tasks


def test_promises_of_a_vec_env():
    env = make_env(MetaWorldConfig(suite="mt10", num_envs=4, max_episode_steps=12))
    assert env.spec.name == "metaworld/mt10" and env.spec.tasks == SUITES["mt10"]
    check_env(env)


def test_promises_with_pictures_and_workers():
    config = MetaWorldConfig(
        task="push-v3,door-open-v3",
        num_envs=2,
        num_workers=2,
        max_episode_steps=8,
        cameras=("corner2",),
        image_size=16,
    )
    env = make_env(config)
    assert env.spec.proprio_dim == 4 and env.spec.privileged_dim == 39
    check_env(env, chunks=1)
    env.close()


def test_suites_are_metaworlds():
    from metaworld import env_dict

    assert tuple(env_dict.MT10_V3) == SUITES["mt10"]
    assert tuple(env_dict.MT25_V3) == SUITES["mt25"]
    assert set(env_dict.ALL_V3_ENVIRONMENTS) == set(SENTENCES)
    assert len(set(SENTENCES.values())) == 50
    for name in SENTENCES:
        make_scripted_policy(name)


def test_an_episode_repeats_whatever_ran_before():
    """The simulation of a task is used again for other states, and for other envs."""
    env = MetaWorldEnv(MetaWorldConfig(suite="mt10", num_envs=2, max_models=1))
    actions = torch.rand(2, 10, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    inits = [12, 15]
    first_obs = env.reset(init=inits)
    first = env.step(actions)
    for others in ([2, 5], [5, 2], [9, 0], [22, 25]):
        env.reset(init=others)
        env.step(actions)
    env.reset(init=[15, 3])
    again_obs = env.reset(init=inits)
    again = env.step(actions)
    assert torch.equal(first_obs.proprio, again_obs.proprio)
    assert torch.equal(first.obs.proprio, again.obs.proprio)
    assert first_obs.instruction == [SENTENCES["pick-place-v3"], SENTENCES["drawer-close-v3"]]


@pytest.mark.parametrize("name", ["pick-place-v3", "drawer-open-v3", "peg-insert-side-v3"])
def test_states_rewards_and_successes_are_those_of_metaworld(name):
    """MetaWorld's own env and loop, with the policy's actions until the task is solved."""
    env = make_env(MetaWorldConfig(task=name, num_envs=1, reward="dense", split="eval"))
    obs = env.reset(init=[4])
    theirs = _task_class(name)()
    theirs._partially_observable = False
    del theirs.sawyer_observation_space
    theirs._freeze_rand_vec = False
    theirs.seeded_rand_vec = True
    theirs._set_task_called = True
    theirs.seed(2 * 4 + 1)
    state, _ = theirs.reset()
    np.testing.assert_array_equal(obs.proprio[0], state.astype(np.float32))
    assert np.abs(state[-3:]).max() > 0  # the goal is seen
    policy = make_scripted_policy(name)
    for _ in range(500):
        action = np.clip(policy.get_action(state), -1, 1).astype(np.float32)
        state, reward, _, _, info = theirs.step(action.astype(float))
        step = env.step(torch.from_numpy(action)[None, None])
        np.testing.assert_array_equal(step.obs.proprio[0], state.astype(np.float32))
        assert float(step.reward[0, 0]) == np.float32(reward)
        assert bool(step.success[0]) == bool(info["success"])
        if info["success"]:
            break
    assert bool(step.terminated[0])


def test_the_weld_holds_the_hand():
    """Without it, or with a wrong one, the hand does not follow the actions."""
    simulation = make_simulation("reach-v3", 100)
    weld = simulation.model.eq_data[
        np.flatnonzero(simulation.model.eq_type == int(mujoco.mjtEq.mjEQ_WELD))
    ]
    assert len(weld) == 1 and weld[0, :11].tolist() == [0, 0, 0, 0, 0, 0, -1, 0, 0, 0, 5]
    simulation.seed(0)
    before, _ = simulation.reset()
    for _ in range(20):
        after, *_ = simulation.step(np.array([1.0, 0, 0, 0]))
    assert 0.1 < after[0] - before[0] < 0.25 and np.abs(after[1:3] - before[1:3]).max() < 0.03


def test_cameras_stand_upright():
    env = make_env(MetaWorldConfig(task="door-open-v3", num_envs=1, cameras=CAMERAS, image_size=64))
    images = env.reset(init=[0]).images
    assert set(images) == set(CAMERAS)
    # The wooden table is brown and low in the picture of each corner; what lies behind it is not.
    for name in ("corner", "corner2"):
        picture = images[name][0].float()
        brown = (picture[..., 0] - picture[..., 2]) > 30
        rows = brown.nonzero()[:, 0].float()
        assert len(rows) > 50
        robot_red = (picture[..., 0] > 90) & (picture[..., 1] < 60) & (picture[..., 2] < 60)
        assert robot_red.nonzero()[:, 0].float().mean() < rows.mean(), name


@pytest.mark.parametrize("name", ["button-press-topdown-v3", "window-open-v3", "basketball-v3"])
def test_scripted_policies_solve(name):
    env = make_env(MetaWorldConfig(task=name, num_envs=2, split="eval"))
    expert = env.make_expert()
    env.reset(init=[0, 1])
    expert.reset()
    solved = torch.zeros(2, dtype=torch.bool)
    for _ in range(20):
        solved |= env.rollout(expert.act, 20)[0].success
    assert solved.all()


def test_demonstrations_become_a_data_set(tmp_path):
    config = MetaWorldConfig(task="reach-v3,window-close-v3", num_envs=2)
    collect_dataset(config, tmp_path / "demos", num_episodes=4, noise=0.1)
    data = load_demonstrations(tmp_path / "demos", 5, spec=make_env(config).spec)
    assert data.num_episodes == 4 and data.success.all()
    assert set(data.sentences) == {"reach the goal", "push the window closed"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "reach-v2"}, "Did you mean 'reach-v3'"),
        ({"task": "reach-v3,flip-v3"}, "no task 'flip-v3'. Valid names: assembly-v3"),
        ({"task": "reach-v2"}, "Valid names: assembly-v3, basketball-v3"),
        ({"suite": "mt10", "task": "soccer-v3"}, "not in mt10; set env.suite=mt50"),
        ({"suite": "mt11"}, "no suite 'mt11'. Did you mean 'mt10'"),
        ({"cameras": ("corner9",)}, "no camera 'corner9'. Did you mean"),
        ({"reward": "densse"}, "Did you mean 'dense'"),
    ],
)
def test_mistakes_are_sentences(settings, said):
    with pytest.raises(UserError) as caught:
        make_env(MetaWorldConfig(num_envs=1, **settings))
    assert said in str(caught.value)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "metaworld.env_dict", None)
    _task_class.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'embodyrl\[metaworld\]'"):
        MetaWorldEnv(MetaWorldConfig(num_envs=1))
    _task_class.cache_clear()


def test_the_registry_knows_it():
    assert registry.load("envs", "metaworld").Config is MetaWorldConfig
    assert {row.group for row in list_tasks()} == {"mt10", "mt25", "mt50"}
