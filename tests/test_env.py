"""A chunk of single control steps: what belongs to which env, in an env whose outcome is a table."""

import dataclasses

import numpy as np
import pytest
import torch

from embodyrl.env import EnvConfig, SteppedVecEnv, Tick
from embodyrl.errors import UserError
from embodyrl.rollouts.episodes import start_episodes
from embodyrl.storage.env_spec import spec_from_json, spec_to_json
from embodyrl.types import EnvSpec, Obs

NEVER = 99


class Table(SteppedVecEnv):
    """Env k solves its task at action ``solved[k]`` (from 1) and unlearns it at ``undone[k]``."""

    def __init__(self, solved, undone=None, limit=6, **settings):
        n = len(solved)
        config = EnvConfig(num_envs=n, device="cpu", **settings)
        super().__init__(EnvSpec("table", n, 1, 1, "box", 10.0, limit, {}), config)
        self.solved = torch.tensor(solved)
        self.undone = torch.tensor(undone or [NEVER] * n)

    def _reset(self, env_ids, inits):
        pass

    def _step(self, actions, active):
        now = self._elapsed + 1
        success = (now >= self.solved) & (now < self.undone)
        reward = 10.0 * now + torch.arange(len(now))
        return Tick(reward.float(), success, success, torch.zeros_like(success))

    def _observe(self, env_ids):
        return Obs({}, self._elapsed[:, None].float(), ["go"] * self.spec.num_envs)


def chunk(env, horizon):
    return env.step(torch.zeros(env.spec.num_envs, horizon, 1))


def test_success_end_reward_and_time_are_each_envs_own():
    env = Table([2, NEVER, 3, 1], limit=4)
    env.reset(init=[0, 1, 2, 3])
    step = chunk(env, 3)
    assert step.success.tolist() == [True, False, True, True]
    assert step.success_once.tolist() == [True, False, True, True]
    assert step.terminated.tolist() == [True, False, True, True]
    assert not step.truncated.any()
    assert step.valid.tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 0, 0]]
    assert step.reward.tolist() == [[10, 20, 0], [11, 21, 31], [12, 22, 32], [13, 0, 0]]
    assert step.obs.proprio.flatten().tolist() == [2, 3, 3, 1]
    # The others wait for their reset. Env 1 runs out of time, and is not solved for it.
    step = chunk(env, 3)
    assert step.valid.tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert step.truncated.tolist() == [False, True, False, False]
    assert not step.terminated.any() and not step.success.any() and not step.success_once.any()


def test_every_episode_has_the_time_limit_of_its_task():
    env = Table([NEVER, NEVER, NEVER], limit=5)
    env.spec = dataclasses.replace(env.spec, tasks=("short", "long"), task_steps=(2, 5))
    env.reset(init=[4, 3, 0])  # state 2 of the first task, 1 of the second, 0 of the first
    step = chunk(env, 4)
    assert step.valid.sum(1).tolist() == [2, 4, 2]
    assert step.truncated.tolist() == [True, False, True]
    # An env that goes over to another task takes over its limit.
    env.reset([0], init=[5])
    step = chunk(env, 4)
    assert step.valid.sum(1).tolist() == [4, 1, 0]
    assert chunk(env, 4).truncated.tolist() == [True, False, False]
    # The limits are a part of the spec that is saved, one for each task.
    saved = spec_to_json(env.spec)
    assert spec_from_json(saved) == env.spec
    with pytest.raises(UserError, match="one number for each of tasks"):
        spec_from_json({**saved, "task_steps": [2]})


def test_success_at_the_end_and_success_once_differ_where_an_episode_goes_on():
    env = Table([1, 1, NEVER], undone=[3, NEVER, NEVER], limit=5, terminate_on_success=False)
    env.reset(init=[0, 1, 2])
    step = chunk(env, 4)
    assert step.success.tolist() == [False, True, False]
    assert step.success_once.tolist() == [True, True, False]
    assert step.valid.all() and not step.done.any()


def test_one_solved_env_solves_no_other_episode():
    env = Table([NEVER, 2, NEVER], limit=4)
    stream = start_episodes(env, iter([7, 8, 9]))
    ended = []
    while stream.running:
        ended += stream.advance(chunk(env, 2))
    results = {one.init: one.result for one in ended}
    assert {init: r.success for init, r in results.items()} == {7: False, 8: True, 9: False}
    assert {init: r.length for init, r in results.items()} == {7: 4, 8: 2, 9: 4}
    assert {init: r.reward for init, r in results.items()} == {7: 100.0, 8: 32.0, 9: 108.0}


@pytest.mark.parametrize("broken", [0, 2])
def test_a_fault_is_of_its_env_alone(broken, monkeypatch):
    env = Table([NEVER, 1, NEVER], limit=4)
    plain = env._step

    def breaks(actions, active):
        tick = plain(actions, active)
        tick.fault[broken] = True
        return tick

    monkeypatch.setattr(env, "_step", breaks)
    env.reset(init=[0, 1, 2])
    step = chunk(env, 2)
    others = np.delete(np.arange(3), broken)
    assert step.fault.tolist() == [k == broken for k in range(3)]
    assert not step.valid[broken].any() and (step.reward[broken] == 0).all()
    assert step.valid[others].any(-1).all() and step.success.tolist() == [False, True, False]
    assert step.truncated.tolist() == [k == broken for k in range(3)]
