"""The bridge to Gymnasium in both directions, compared with gymnasium itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from embodyrl.checks import check_env
from embodyrl.env import EnvConfig, InvalidActionError
from embodyrl.errors import UserError
from embodyrl.sims.gymnasium.bridge import AsGymnasium, FromGymnasium, as_gymnasium
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv


@pytest.fixture
def reach() -> Iterator[AsGymnasium]:
    env = as_gymnasium(
        MujocoEnv(
            MujocoConfig(task="reach", renderer="none", cameras=(), num_envs=3, max_episode_steps=6)
        )
    )
    yield env
    env.close()


def spaces_hold(env: gymnasium.vector.VectorEnv, obs: dict[str, np.ndarray]) -> None:
    assert env.observation_space.contains(obs)
    single = {name: value[0] for name, value in obs.items()}
    assert env.single_observation_space.contains(single)
    assert env.observation_space == gymnasium.vector.utils.batch_space(
        env.single_observation_space, env.num_envs
    )


def test_vector_env_keeps_to_its_spaces_and_resets_in_the_same_step(reach: AsGymnasium) -> None:
    assert reach.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    reach.action_space.seed(0)
    obs, info = reach.reset(seed=4)
    spaces_hold(reach, obs)
    assert len(info["instruction"]) == 3
    for k in range(1, 13):
        actions = reach.action_space.sample()
        assert reach.action_space.contains(actions)
        before = obs
        obs, reward, terminated, truncated, info = reach.step(actions)
        spaces_hold(reach, obs)
        assert reward.shape == terminated.shape == truncated.shape == (3,)
        assert terminated.dtype == truncated.dtype == np.bool_ and reward.dtype == np.float32
        ended = terminated | truncated
        assert ("final_obs" in info) == bool(ended.any())
        if k % 6 == 0 and not terminated.any():
            assert truncated.all() and info["_final_obs"].all()
            # The final observation is where the last action led, and what is returned is a new
            # episode's first.
            assert not np.array_equal(info["final_obs"]["proprio"], before["proprio"])
            assert not np.array_equal(info["final_obs"]["proprio"], obs["proprio"])
            assert reach.observation_space.contains(info["final_obs"])


def test_vector_env_seeds(reach: AsGymnasium) -> None:
    first = reach.reset(seed=4)[0]["proprio"]
    assert np.array_equal(reach.reset(seed=[4, 5, 6])[0]["proprio"], first)
    other = reach.reset()[0]["proprio"]
    assert not np.array_equal(other, first)
    partly = reach.reset(seed=[None, 5, None])[0]["proprio"]
    assert [np.array_equal(a, b) for a, b in zip(partly, first, strict=True)] == [
        False,
        True,
        False,
    ]
    named = reach.reset(options={"init": [7, 7, 8]})[0]["proprio"]
    assert np.array_equal(named[0], named[1]) and not np.array_equal(named[0], named[2])
    with pytest.raises(UserError, match="2 entries"):
        reach.reset(seed=[1, 2])


def test_images_are_in_the_observation() -> None:
    env = as_gymnasium(MujocoEnv(MujocoConfig(num_envs=2, renderer="opengl", image_size=32)))
    obs, _ = env.reset(seed=0)
    spaces_hold(env, obs)
    assert obs["image_front"].shape == (2, 32, 32, 3) and obs["privileged"].shape[0] == 2
    env.close()


def test_gymnasiums_own_wrapper_counts_as_we_do(reach: AsGymnasium) -> None:
    env = RecordEpisodeStatistics(reach)
    env.reset(seed=0)
    total = np.zeros(3)
    for _ in range(6):
        _, reward, terminated, truncated, info = env.step(
            np.zeros((3, reach.env.spec.action_dim), np.float32)
        )
        total += reward
        if (terminated | truncated).all():
            break
    assert info["episode"]["l"].tolist() == [6, 6, 6]
    np.testing.assert_allclose(info["episode"]["r"], total)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Hopper-v5"])
def test_from_gymnasium_steps_as_gymnasium_does(env_id: str) -> None:
    env = FromGymnasium(env_id, EnvConfig(num_envs=2))
    plain = [gymnasium.make(env_id) for _ in range(2)]
    obs = env.reset(init=[3, 9])
    for k, (one, seed) in enumerate(zip(plain, (3, 9), strict=True)):
        assert np.array_equal(one.reset(seed=seed)[0].astype(np.float32), obs.proprio[k].numpy())
    box = plain[0].action_space
    assert isinstance(box, gymnasium.spaces.Box)
    generator, running = torch.Generator().manual_seed(0), [True, True]
    for _ in range(8):
        actions = torch.rand(2, 5, env.spec.action_dim, generator=generator) * 2 - 1
        step = env.step(actions)
        scaled = box.low + (actions.numpy() + 1) / 2 * (box.high - box.low)
        for k, one in enumerate(plain):
            for h in range(5):
                assert bool(step.valid[k, h]) == running[k]
                if running[k]:
                    seen, reward, terminated, _, _ = one.step(scaled[k, h])
                    assert float(step.reward[k, h]) == np.float32(reward)
                    if terminated:
                        assert bool(step.terminated[k])
                        running[k] = False
                    last = seen
            if step.valid[k].any():
                assert np.array_equal(last.astype(np.float32), step.obs.proprio[k].numpy())
    env.close()
    env.close()


def test_there_and_back_is_gymnasiums_own_vector_env() -> None:
    """There and back again equals SyncVectorEnv over the same env, up to the first reset."""
    ours = as_gymnasium(FromGymnasium("Pendulum-v1", EnvConfig(num_envs=2)))
    mode = AutoresetMode.SAME_STEP
    theirs = SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * 2, autoreset_mode=mode)
    a, _ = ours.reset(options={"init": [5, 6]})
    b, _ = theirs.reset(seed=[5, 6])
    assert np.array_equal(a["proprio"], b)
    rng = np.random.default_rng(0)
    for k in range(200):
        action = rng.uniform(-1, 1, (2, 1)).astype(np.float32)
        a, *mine, my_info = ours.step(action)
        b, *other, their_info = theirs.step(
            (action + 1) / 2 * 4 - 2
        )  # Pendulum's torque lies in [-2, 2]
        np.testing.assert_allclose(mine[0], other[0], rtol=1e-5, atol=1e-5)
        assert all(np.array_equal(x, y) for x, y in zip(mine[1:], other[1:], strict=True))
        if k < 199:
            np.testing.assert_allclose(a["proprio"], b, atol=1e-4)
    assert other[2].all() and my_info["_final_obs"].all()
    for k in range(2):
        np.testing.assert_allclose(
            my_info["final_obs"]["proprio"][k], their_info["final_obs"][k], atol=1e-4
        )
    ours.close()
    theirs.close()


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Hopper-v5"])
def test_from_gymnasium_keeps_the_promises_of_a_vec_env(env_id: str) -> None:
    env = FromGymnasium(env_id, EnvConfig(num_envs=2), max_episode_steps=60)
    check_env(env, horizon=5)
    with pytest.raises(InvalidActionError):
        env.step(torch.zeros(1, 5, env.spec.action_dim))
    env.close()


def test_splits_share_no_state() -> None:
    train, held_out = (
        FromGymnasium("Pendulum-v1", EnvConfig(num_envs=1, split=s)) for s in ("train", "eval")
    )
    assert not torch.equal(train.reset(init=[1]).proprio, held_out.reset(init=[1]).proprio)


@pytest.mark.parametrize(
    ("env_id", "split", "said"),
    [
        ("CartPole-v1", "train", "names one of several moves"),
        ("Hopper-v2", "train", "cannot make .Hopper-v2."),
        ("Hopper-v1", "train", "cannot make .Hopper-v1.: .* deprecated"),
        ("Pendulun-v1", "train", "Did you mean 'Pendulum-v1'"),
        ("Pendulum-v1", "ood_camera", "no split 'ood_camera'"),
    ],
)
def test_envs_that_do_not_fit(env_id: str, split: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        FromGymnasium(env_id, EnvConfig(num_envs=1, split=split))


class CutsShort(gymnasium.Env[np.ndarray, np.ndarray]):
    """Ends its episodes by itself after three steps."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, bound: float = 1.0) -> None:
        self.action_space = gymnasium.spaces.Box(-bound, bound, (1,), np.float32)
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 0.0, False, self.steps == 3, {}


class Says(CutsShort):
    """Ends after three steps.

    ``info[key]`` says whether it succeeded: in every step if ``always``, else only in the last.
    """

    def __init__(self, key: str = "success", always: bool = True) -> None:
        super().__init__()
        self.key, self.always = key, always

    def step(self, action):
        self.steps += 1
        over = self.steps == 3
        return (
            np.zeros(2, np.float32),
            1.0,
            over,
            False,
            {self.key: over} if over or self.always else {},
        )


@pytest.fixture
def says() -> Iterator[str]:
    gymnasium.register("embodyrl_tests/Says-v0", Says)
    yield "embodyrl_tests/Says-v0"
    del gymnasium.registry["embodyrl_tests/Says-v0"]


@pytest.mark.parametrize(
    ("kwargs", "reports", "success"),
    [
        ({"key": "success"}, True, True),
        ({"key": "is_success"}, True, True),
        ({"key": "speed"}, False, False),
        ({"key": "success", "reports_success": False}, False, False),
        ({"key": "success", "always": False, "reports_success": True}, True, True),
        ({"key": "success", "always": False, "reports_success": False}, False, False),
    ],
)
def test_success_is_what_info_says(
    says: str, kwargs: dict[str, Any], reports: bool, success: bool
) -> None:
    env = FromGymnasium(says, EnvConfig(num_envs=2), disable_env_checker=True, **kwargs)
    assert env.spec.reports_success is reports
    env.reset(init=[0, 1])
    step = env.step(torch.zeros(2, 4, 1))  # the step that looked is not one of the episode
    assert step.terminated.all() and step.valid.sum(1).tolist() == [3, 3]
    assert step.success.tolist() == [success] * 2


def test_success_that_comes_as_a_surprise_is_refused(says: str) -> None:
    env = FromGymnasium(says, EnvConfig(num_envs=1), disable_env_checker=True, always=False)
    env.reset()
    with pytest.raises(UserError, match=r"Says-v0 reports success.*env\.reports_success=true"):
        env.step(torch.zeros(1, 4, 1))


def test_an_episode_that_is_cut_short_is_a_shorter_one() -> None:
    gymnasium.register("embodyrl_tests/CutsShort-v0", CutsShort)
    try:
        env = FromGymnasium(
            "embodyrl_tests/CutsShort-v0", EnvConfig(num_envs=1), disable_env_checker=True
        )
        env.reset()
        step = env.step(torch.zeros(1, 5, 1))
        assert step.truncated.all() and not step.terminated.any() and not step.fault.any()
        assert step.valid.sum() == 3
        with pytest.raises(UserError, match="no bounds"):
            FromGymnasium(
                "embodyrl_tests/CutsShort-v0",
                EnvConfig(num_envs=1),
                bound=np.inf,
                disable_env_checker=True,
            )
    finally:
        del gymnasium.registry["embodyrl_tests/CutsShort-v0"]
