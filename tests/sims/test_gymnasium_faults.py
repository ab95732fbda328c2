"""A Gymnasium env that raises, breaks or hands over something else costs its episode alone."""

import gymnasium
import mujoco
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from embodyrl.build import make_env
from embodyrl.errors import UserError
from embodyrl.sims.gymnasium.env import GymnasiumConfig

LIMIT = 20


class Counter(gymnasium.Env):
    """Counts its steps from a number that the seed gives; goes wrong at step 9 of bad episodes."""

    observation_space = Box(-1e9, 1e9, (2,), np.float32)
    action_space = Box(-1, 1, (1,), np.float32)
    made = 0

    def __init__(self, how="raise"):
        self.how = how
        Counter.made += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.seed = 0, seed
        self.bad = seed >= 100
        if self.bad and self.how == "raise in reset":
            raise RuntimeError("no scene")
        return self._obs(), {}

    def _obs(self):
        return np.array([self.seed, self.t], np.float32)

    def step(self, action):
        self.t += 1
        obs, reward = self._obs(), float(action[0])
        if self.bad and self.t == 9:
            if self.how == "raise":
                raise RuntimeError("simulation is unstable")
            if self.how == "nan":
                obs = np.array([np.nan, 0.0])
            if self.how == "nan reward":
                reward = float("nan")
            if self.how == "shape":
                obs = np.zeros(1)
            if self.how == "array reward":
                reward = np.zeros(3)
        return obs, reward, False, False, {}


@pytest.fixture(scope="module", autouse=True)
def registered():
    gymnasium.register("embodyrl_tests/Counter-v0", Counter, max_episode_steps=LIMIT)
    for how in HOW:
        gymnasium.register(
            f"embodyrl_tests/Counter{NAMES[how]}-v0",
            Counter,
            max_episode_steps=LIMIT,
            kwargs={"how": how},
        )
    yield
    for name in [n for n in gymnasium.registry if n.startswith("embodyrl_tests/Counter")]:
        del gymnasium.registry[name]


HOW = {
    "raise": "RuntimeError: simulation is unstable",
    "raise in reset": "RuntimeError: no scene",
    "nan": r"proprio[0] is nan",
    "nan reward": "is nan",
    "shape": "ValueError: the observation has the shape (1,), not (2,)",
    "array reward": "TypeError",
}
NAMES = {how: how.title().replace(" ", "") for how in HOW}


def counter(how="", **settings):
    name = f"embodyrl_tests/Counter{NAMES.get(how, '')}-v0"
    return make_env(GymnasiumConfig(id=name, num_envs=3, reports_success=False, **settings))


@pytest.mark.parametrize("how", HOW)
def test_only_that_env_loses_its_episode_and_is_reset(how, capsys):
    env, quiet = counter(how), counter()
    env.reset(init=[1, 100, 3])
    quiet.reset(init=[1, 2, 3])
    made = Counter.made
    generator = torch.Generator().manual_seed(0)
    faults = 0
    for _ in range(2):
        actions = torch.rand(3, 5, 1, generator=generator) * 2 - 1
        step, normal = env.step(actions), quiet.step(actions)
        for name in ("reward", "valid", "terminated", "truncated"):
            assert torch.equal(getattr(step, name)[[0, 2]], getattr(normal, name)[[0, 2]])
        assert torch.equal(step.obs.proprio[[0, 2]], normal.obs.proprio[[0, 2]])
        faults += int(step.fault.sum())
        if step.fault[1]:
            assert step.truncated[1] and not step.valid[1].any() and not step.reward[1].any()
    assert faults == 1
    said = capsys.readouterr().err
    assert "env 1 (initial state 100) of gymnasium" in said and HOW[how] in said
    assert "Traceback" not in said and said.count("\n") == 1
    for e in (env, quiet):
        e.reset([1], init=[7])
    assert Counter.made == made
    actions = torch.rand(3, 5, 1, generator=generator)
    assert torch.equal(env.step(actions).obs.proprio, quiet.step(actions).obs.proprio)
    with pytest.raises(UserError, match=r"(?s)broke 5 times.*initial state 1\d\d"):
        for _ in range(4):
            env.reset([1], init=[100])
            for _ in range(2):
                env.step(torch.zeros(3, 5, 1))
    # What raises again before an episode has ended is made anew. NaN is no error of the env's code.
    assert (Counter.made > made) == ("nan" not in how)


def test_mujocos_silent_reset_is_a_fault():
    env = make_env(GymnasiumConfig(id="Hopper-v5", num_envs=2))
    env.reset(init=[0, 1])
    assert not env.step(torch.zeros(2, 2, 3)).fault.any()
    data = env._envs[1].unwrapped.data
    data.qpos[2] = np.nan
    step = env.step(torch.zeros(2, 2, 3))
    assert (
        data.warning[mujoco.mjtWarning.mjWARN_BADQPOS].number > 0
    )  # MuJoCo went on without a word
    assert step.fault.tolist() == [False, True] and torch.isfinite(step.obs.proprio).all()
    env.reset([1], init=[1])
    assert not env.step(torch.zeros(2, 2, 3)).fault.any()
