"""A policy that goes for the ball of MuJoCo's reach task, its envs, and a rollout of it."""

import torch

from embodyrl.functional.flow import randn
from embodyrl.rollouts.collect import collect_rollout
from embodyrl.rollouts.episodes import start_episodes
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv
from embodyrl.types import ActionSample, DenoisingTrace, PolicyEval

GAP = slice(18, 21)
"""Columns of MuJoCo's privileged state with the way from the hand to the ball."""


class Chaser:
    """A noisy policy that goes for the ball, so that some episodes succeed and some run out of time."""

    def sample(self, obs, *, generator, mode):
        n = len(obs)
        gap = obs.privileged[:, GAP] / (5 * 0.035)
        start = randn((n, 5, 4), generator)
        noise = randn((n, 5, 4), generator) if mode == "train" else start
        mean = torch.nn.functional.pad(gap, (0, 1))[:, None].expand(n, 5, 4)
        actions = mean + 0.5 * noise
        trace = DenoisingTrace(
            torch.stack([start, actions], dim=1), torch.ones(n, 1, dtype=torch.bool)
        )
        return ActionSample(
            actions.clamp(-1, 1), trace, self.evaluate(obs, trace).logprob, self.value(obs)
        )

    def evaluate(self, obs, trace):
        return PolicyEval(
            -trace.x[:, 1].square().sum((1, 2))[:, None], torch.zeros(len(obs)), self.value(obs)
        )

    def value(self, obs):
        return -obs.privileged[:, GAP].abs().sum(1)


def make_env(num_envs: int, cls=MujocoEnv, **settings) -> MujocoEnv:
    settings = {"task": "reach", "max_episode_steps": 12, "num_threads": 1, **settings}
    return cls(MujocoConfig(num_envs=num_envs, renderer="none", **settings))


def collect(env, policy, num_chunks, states, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    stream = start_episodes(env, states)
    return collect_rollout(stream, policy, num_chunks, generator=generator, **options)
