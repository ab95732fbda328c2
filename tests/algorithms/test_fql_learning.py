"""Does FQL learn? From episodes of which a third is solved, with a head that the wrong sign fails."""

from typing import Any, cast

import pytest
import torch
from point_reach import PointReach

from embodyrl.algorithms.fql import FQL, FQLConfig
from embodyrl.build import make_policy
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.rollouts.seeding import seeded


class Against(FQL):
    """A head that is taught to be worth less."""

    def _update_head(self, obs, generator, stats):
        with torch.no_grad():
            self.critics.weights[-1].neg_(), self.critics.biases[-1].neg_()
        super()._update_head(obs, generator, stats)
        with torch.no_grad():
            self.critics.weights[-1].neg_(), self.critics.biases[-1].neg_()


def wanderers(episodes=400, length=16):
    """A quarter each goes to the goal, slowly there, nowhere, or away from it, all with noise."""
    generator = torch.Generator().manual_seed(3)
    env = PointReach(episodes)
    obs = env.reset(init=range(episodes))
    kind = torch.randint(4, (episodes,), generator=generator)
    proprio, actions, valid, solved = [], [], [], []
    for _ in range(length):
        here, goal = obs.proprio[:, :2], obs.proprio[:, 2:]
        way = (goal - here) * torch.tensor([1.0, 0.0, -0.5, 0.3])[kind][:, None]
        action = (way + 0.5 * torch.randn(episodes, 2, generator=generator)).clamp(-1, 1)
        running = env._running.clone()
        step = env.step(action[:, None])
        proprio.append(obs.proprio)
        actions.append(action)
        valid.append(running)
        solved.append(step.success & running)
        obs = step.obs
    keep = torch.stack(valid, 1)
    number = torch.arange(episodes)[:, None].expand(-1, length)[keep]
    success = torch.stack(solved, 1)
    return Demonstrations(
        2,
        {},
        torch.stack(proprio, 1)[keep],
        torch.stack(actions, 1)[keep],
        number,
        torch.zeros(len(number), dtype=torch.long),
        ["go"],
        success.any(1)[number],
    )


def learn(cls=FQL, online=0):
    """Success on 64 goals after 600 gradient steps offline, and after iterations of play."""
    env = PointReach(16)
    torch.manual_seed(0)
    policy = FlowMLPConfig(
        horizon=2, width=64, one_step_width=64, squash=False, velocity="plain", num_denoise_steps=3
    )
    algorithm = cls(
        FQLConfig(
            offline_steps=600, steps_per_iteration=600, batch_size=128, critic_width=64, alpha=0.3,
            lr=1e-3, critic_lr=1e-3, tau=0.02, gamma=0.95, capacity=4000, warmup_chunks=100,
        ),
        cast(Any, make_policy(policy, env.spec, 0)),
    )  # fmt: skip
    algorithm.add_demos(wanderers())
    player, found = Player(env), []
    for i in range(1 + online):
        generator = seeded(0, i)
        batch = player.collect(algorithm, i, generator=generator)
        algorithm.update(batch, progress=0.0, generator=generator)
        if i in (0, online):
            result = evaluate(PointReach(16), algorithm.result, range(10_000, 10_064))
            found.append(result.successes / 64)
    return found


@pytest.mark.timeout(600)
def test_it_beats_its_data_offline_and_gets_better_online():
    """A third of the recorded episodes is solved; without the value the head does no better."""
    offline, online = learn(online=20)
    assert offline > 0.5 and online > 0.9


def test_a_head_against_its_critics_does_not():
    assert learn(Against)[0] < 0.2
