"""Gymnasium's envs through the registry: promises, time limit, workers, and PPO on a flow of states."""

import pytest
import torch

from embodyrl.algorithms.ppo import PPO, PPOConfig
from embodyrl.build import make_env, make_policy
from embodyrl.checks import check_env
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.rollout import collect
from embodyrl.sims.gymnasium.env import GymnasiumConfig
from embodyrl.sims.gymnasium.tasks import TASKS


def test_promises_of_a_vec_env():
    env = make_env(GymnasiumConfig(id="Pendulum-v1", num_envs=3, max_episode_steps=20))
    assert env.spec.name == "gymnasium/Pendulum-v1" and env.spec.max_episode_steps == 20
    check_env(env, horizon=5)


def test_falling_is_an_end_and_the_time_limit_is_not():
    env = make_env(GymnasiumConfig(id="Hopper-v5", num_envs=2))
    assert env.spec.max_episode_steps == 1000
    env.reset(seed=0)
    ended = torch.zeros(2, dtype=torch.bool)
    for _ in range(40):
        step = env.step(torch.ones(2, 10, 3))
        assert not step.truncated.any()
        ended |= step.terminated
    assert ended.all()
    env = make_env(GymnasiumConfig(id="HalfCheetah-v5", num_envs=1, max_episode_steps=12))
    env.reset(seed=0)
    steps = [env.step(torch.zeros(1, 8, 6)) for _ in range(2)]
    assert steps[1].truncated.all() and not steps[1].terminated.any() and steps[1].valid.sum() == 4


def test_every_task_that_is_listed_exists():
    import gymnasium

    assert all(name in gymnasium.registry for name in TASKS)


@pytest.mark.slow
def test_workers_change_nothing():
    alone, shared = (make_env(GymnasiumConfig(id="Hopper-v5", num_envs=2, num_workers=w)) for w in (1, 2))
    try:
        actions = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
        for env in (alone, shared):
            env.reset(init=[3, 4])
        a, b = alone.step(actions), shared.step(actions)
        assert torch.equal(a.obs.proprio, b.obs.proprio) and torch.equal(a.reward, b.reward)
    finally:
        shared.close()


def test_ppo_runs_on_a_flow_of_states():
    env = make_env(GymnasiumConfig(id="Pendulum-v1", num_envs=4, max_episode_steps=20))
    policy = make_policy(
        FlowMLPConfig(width=16, layers=1, critic_width=16, num_denoise_steps=2, horizon=2), env.spec, 0
    )
    ppo = PPO(PPOConfig(num_chunks=5, minibatch_size=20, epochs=1, critic_epochs=1, warmup_iterations=0), policy)
    generator = torch.Generator().manual_seed(0)
    batch = collect(env, policy, 5, inits=torch.arange(30), generator=generator)
    row = ppo.update(batch, progress=0.0, generator=generator)
    assert row["ratio"] == pytest.approx(1.0, abs=1e-4) and row["grad_norm"] > 0
