"""Does SAC-Flow learn? Pendulum-v1 from nothing, with a floor that an actor with the wrong sign does not reach.

Random actions return about -1,270 an episode, and a run with other seeds had -125 to -186 after
7,200 to 8,000 steps. A run takes 80 to 100 s of one core.
"""

import pytest
import torch

from embodyrl.algorithms.sac_flow import SACFlow, SACFlowConfig
from embodyrl.build import make_policy
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.seeding import seeded
from embodyrl.sims.gymnasium.env import GymnasiumConfig, GymnasiumEnv

STEPS, FLOOR = 8_000, -400.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Flipped(SACFlow):
    """Acts against its critics."""

    def _update_actor(self, obs, generator, stats, seen=None):
        with torch.no_grad():
            self.critics.weights[-1].neg_(), self.critics.biases[-1].neg_()
        super()._update_actor(obs, generator, stats, seen)
        with torch.no_grad():
            self.critics.weights[-1].neg_(), self.critics.biases[-1].neg_()


def learn(cls) -> float:
    """Mean return of the noisy policy's episodes in the last 1,600 steps."""
    env = GymnasiumEnv(GymnasiumConfig(id="Pendulum-v1", num_envs=4))
    policy = make_policy(FlowMLPConfig(width=64), env.spec, 0)
    torch.manual_seed(0)
    algorithm = cls(
        SACFlowConfig(
            num_chunks=25, warmup_chunks=1000, critic_width=128, batch_size=64, capacity=STEPS
        ),
        policy,
    )
    player, episodes = Player(env), []
    for i in range(STEPS // 100):
        generator = seeded(0, i)
        batch = player.collect(algorithm, i, generator=generator)
        algorithm.update(batch, progress=0.0, generator=generator)
        episodes += batch.episodes if 100 * i >= STEPS - 1600 else []
    return sum(e.reward for e in episodes) / len(episodes)


def test_sac_flow_swings_the_pendulum_up():
    assert learn(SACFlow) > FLOOR


def test_an_actor_against_its_critics_does_not():
    assert learn(Flipped) < -900
