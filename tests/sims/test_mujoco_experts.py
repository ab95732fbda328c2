"""The scripted experts solve their tasks, also with noise and with rotation control."""

import pytest
import torch

from embodyrl.sims.mujoco import experts, tasks
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv
from embodyrl.sims.mujoco.experts import ScriptedExpert, Waypoint


def success_rate(num_envs: int = 64, noise: float = 0.0, **settings) -> float:
    env = MujocoEnv(MujocoConfig(num_envs=num_envs, renderer="none", **settings))
    expert = ScriptedExpert(env, noise=noise)
    env.reset(init=range(num_envs))
    expert.reset()
    success = torch.zeros(num_envs, dtype=torch.bool)
    for _ in range(env.spec.max_episode_steps):
        step = env.step(expert.act()[:, None])
        assert not step.fault.any()
        success |= step.success
    env.close()
    return success.float().mean().item()


@pytest.mark.parametrize("task", tasks.TASKS)
def test_expert_solves(task):
    assert success_rate(task=task, split="eval") >= 0.95


@pytest.mark.parametrize("split", [split for split in tasks.SPLITS if split.startswith("ood_")])
def test_expert_solves_every_split(split):
    assert success_rate(task=",".join(tasks.TASKS), split=split) >= 0.95


def test_expert_solves_with_rotation_control():
    assert success_rate(task=",".join(tasks.TASKS), control_mode="ee_delta_pose") >= 0.95


def test_noise_costs_success_but_little_noise_costs_little():
    little, much = success_rate(task="pick", noise=0.2), success_rate(task="pick", noise=1.0)
    assert little >= 0.95
    assert much <= 0.8


def test_noise_of_an_env_does_not_depend_on_the_others():
    few, many = (MujocoEnv(MujocoConfig(num_envs=n, renderer="none")) for n in (2, 5))
    actions = []
    for env in (few, many):
        env.reset(init=range(env.spec.num_envs))
        actions.append(ScriptedExpert(env, noise=0.5, seed=3).act()[:2])
    assert torch.equal(*actions)


def test_lifting_another_block_does_not_count(monkeypatch):
    wrong = (
        Waypoint(experts._block(0.07, 1), tolerance=0.025),
        Waypoint(experts._block(0.0, 1), tolerance=0.010),
        Waypoint(experts._block(0.0, 1), closed=True, tolerance=0.05, dwell=4),
        Waypoint(lambda v: v.ee + experts._UP, closed=True, tolerance=0.0),
    )
    monkeypatch.setitem(experts.PROGRAMS, "pick", wrong)
    env = MujocoEnv(MujocoConfig(num_envs=32, renderer="none"))
    env.reset(init=range(32))
    expert = ScriptedExpert(env)
    for _ in range(env.spec.max_episode_steps):
        assert not env.step(expert.act()[:, None]).success.any()
    assert (env.view().blocks[:, 1, 2] > 0.08).mean() > 0.9


def test_reset_restarts_only_the_envs_named():
    env = MujocoEnv(MujocoConfig(num_envs=3, renderer="none"))
    env.reset(init=range(3))
    expert = ScriptedExpert(env)
    for _ in range(12):
        env.step(expert.act()[:, None])
    before = expert._phase.copy()
    assert (before > 0).all()
    expert.reset(torch.tensor([False, True, False]))
    assert expert._phase.tolist() == [before[0], 0, before[2]]
