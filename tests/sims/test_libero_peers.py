"""``env.profile=libero_lerobot`` shows LIBERO as LeRobot's own env does."""

import numpy as np
import pytest
import torch

from embodyrl.build import make_env
from embodyrl.config import env_config
from embodyrl.sims.libero import suites

pytest.importorskip("robosuite")
ACTIONS = 4
SIZE = 64


@pytest.fixture(scope="module")
def ours():
    settings = ["env.suite=libero_object", "env.task_ids=[0]", f"env.image_size={SIZE}"]
    settings += ["env.num_envs=1", "env.profile=libero_lerobot", "env.split=eval"]
    env = make_env(env_config("libero", [*settings, "env.backend=robosuite"]))
    yield env
    env.close()


@pytest.fixture(scope="module")
def theirs(ours):  # which brings robosuite
    from lerobot.envs.libero import LiberoEnv
    from libero.libero import benchmark

    suite = benchmark.get_benchmark_dict()["libero_object"]()
    env = LiberoEnv(
        suite,
        0,
        "libero_object",
        obs_type="pixels_agent_pos",
        observation_width=SIZE,
        observation_height=SIZE,
        init_states=False,
    )
    # LeRobot would unpickle the official states.
    env._init_states = suites.official_states(suites.load_suite("libero_object")[0])
    env.init_states = True
    yield env
    env.close()


def seen(obs):
    """Pictures as LeRobot's processor hands them on (it turns them by 180 degrees), and the hand."""
    pictures = [obs["pixels"][name][::-1, ::-1] for name in ("image", "image2")]
    return pictures, obs["robot_state"]["eef"]["pos"]


@pytest.mark.slow
def test_each_picture_and_state_is_that_of_lerobot(ours, theirs):
    mine, (other, _) = ours.reset(init=[0]), theirs.reset(seed=0)
    actions = np.random.default_rng(0).uniform(-1, 1, (ACTIONS, 7)).astype(np.float32)
    for action in [None, *actions]:
        if action is not None:
            mine = ours.step(torch.from_numpy(action)[None, None]).obs
            other = theirs.step(action)[0]
        (front, wrist), hand = seen(other)
        assert front.std() > 20 and np.abs(front[:, ::-1].astype(int) - front).mean() > 10
        assert np.array_equal(mine.images["agentview"][0].numpy(), front)
        assert np.array_equal(mine.images["wrist"][0].numpy(), wrist)
        np.testing.assert_allclose(mine.proprio[0, :3].numpy(), hand, atol=1e-6)
