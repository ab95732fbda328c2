"""Does reinforcement learning lift a mediocre imitation policy? A floor that a broken gradient does not reach.

A Franka reaches for a ball in MuJoCo, from states. Twenty demonstrations give a policy that misses
most balls; PPO must then lift its success on states never trained on above ``FLOOR``. With
advantages of zero no weight of the actor may move, and with those of the other sign the policy must
get worse: that is the proof that this test can fail.

Measured with seeds 0, 1 and 2, on 128 states each: imitation 30%, 22%, 41%; PPO 92%, 98%, 100%;
flipped 1%, 5%, 5%; zero 30%, 22%, 41% (the actor does not move at all). A run of PPO takes 22 s of
one core. GRPO, which has no critic and sees only the sum of an episode's rewards, reaches 81%, 90%
and 96% in about 30 s; its floor is ``GRPO_FLOOR``.
"""

from itertools import count

import numpy as np
import pytest
import torch

from embodyrl.algorithms.grpo import GRPO, GRPOConfig
from embodyrl.algorithms.ppo import PPO, PPOConfig
from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.build import make_policy
from embodyrl.data.collect import make_expert
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.data.record import record_episodes
from embodyrl.policies.flow_vla import FlowVLA, FlowVLAConfig
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.rollouts.seeding import seeded
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv

SEED, DEMOS, ITERATIONS, FLOOR = 0, 20, 56, 0.7
ZERO_ITERATIONS, FLIPPED_ITERATIONS = 6, 28
"""Of the runs that must not learn."""
GRPO_ITERATIONS, GRPO_FLOOR = 80, 0.6
POLICY = FlowVLAConfig(
    width=64,
    layers=1,
    text_layers=0,
    critic_width=64,
    horizon=4,
    action_patch=4,
    num_denoise_steps=2,
)


class ScaledPPO(PPO):
    """PPO whose advantages are multiplied by a factor before they are used."""

    factor = 1.0

    def _advantages(self, batch):
        advantage, ret = super()._advantages(batch)
        return self.factor * advantage, ret


def make_env(split: str, num_envs: int) -> MujocoEnv:
    return MujocoEnv(
        MujocoConfig(
            task="reach",
            reward="dense",
            renderer="none",
            split=split,
            num_envs=num_envs,
            num_threads=1,
        )
    )


def demonstrations(env: MujocoEnv, seed: int) -> Demonstrations:
    inits = count(1000 * seed)
    recordings = list(record_episodes(env, make_expert(env, seed=seed), DEMOS, inits=inits))
    lengths = torch.tensor([len(r.actions) for r in recordings])
    proprio, actions = (
        torch.from_numpy(np.concatenate([getattr(r, name) for r in recordings]))
        for name in ("proprio", "actions")
    )
    episode = torch.arange(DEMOS).repeat_interleave(lengths)
    return Demonstrations(
        POLICY.horizon,
        {},
        proprio,
        actions,
        episode,
        torch.zeros_like(episode),
        [recordings[0].instruction],
    )


def imitate(env: MujocoEnv, seed: int) -> FlowVLA:
    sft = SFT(SFTConfig(batch_size=64, ema=0.9), make_policy(POLICY, env.spec, seed))
    demos = demonstrations(env, seed)
    for i in range(3):
        sft.update(demos, progress=i / 3, generator=seeded(seed, i))
    return sft.result.requires_grad_(True)


def improve(env: MujocoEnv, policy: FlowVLA, seed: int, factor: float, iterations: int) -> None:
    config = PPOConfig(
        num_chunks=10, minibatch_size=320, epochs=4, critic_epochs=4, warmup_iterations=2, lr=3e-4
    )
    ppo = ScaledPPO(config, policy)
    ppo.factor = factor
    player = Player(env, seed)
    for i in range(iterations):
        generator = seeded(seed, 1000 + i)
        batch = player.collect(ppo, i, generator=generator)
        ppo.update(batch, progress=i / ITERATIONS, generator=generator)


def improve_in_groups(env: MujocoEnv, policy: FlowVLA, seed: int) -> None:
    """Without a critic: eight groups of eight, compared by the sum of their rewards."""
    settings = {"rewards": ("return",), "keep_min": 0.0, "keep_max": 1.0, "max_rounds": 1}
    grpo = GRPO(GRPOConfig(minibatch_size=320, epochs=4, lr=3e-4, **settings), policy)
    player = Player(env, seed)
    for i in range(GRPO_ITERATIONS):
        generator = seeded(seed, 1000 + i)
        batch = player.collect(grpo, i, generator=generator)
        grpo.update(batch, progress=i / GRPO_ITERATIONS, generator=generator)


def success(policy: FlowVLA) -> float:
    return evaluate(make_env("eval", 64), policy, range(128)).successes / 128


@pytest.fixture(scope="module")
def start() -> tuple[dict[str, torch.Tensor], float]:
    """The weights that every run below starts from, and their success."""
    policy = imitate(make_env("train", 64), SEED)
    return policy.state_dict(), success(policy)


def improved(weights: dict[str, torch.Tensor], factor: float, iterations: int) -> FlowVLA:
    env = make_env("train", 64)
    policy = make_policy(POLICY, env.spec, SEED)
    policy.load_state_dict(weights)
    improve(env, policy, SEED, factor, iterations)
    return policy


@pytest.mark.timeout(900)  # a machine may be busy with other things
def test_true_advantages_lift_a_mediocre_policy_over_the_floor(start):
    weights, before = start
    after = success(improved(weights, 1.0, ITERATIONS))
    assert 0.05 < before < FLOOR - 0.2 and after > FLOOR, f"{before:.2f} -> {after:.2f}"


@pytest.mark.timeout(900)
def test_zero_advantages_move_no_weight_of_the_actor(start):
    weights, before = start
    policy = improved(weights, 0.0, ZERO_ITERATIONS)
    actor = {id(p) for p in policy.actor_parameters()}
    names = [name for name, p in policy.named_parameters() if id(p) in actor]
    assert names and all(torch.equal(policy.state_dict()[n], weights[n]) for n in names)
    assert success(policy) == before


@pytest.mark.timeout(900)
def test_flipped_advantages_ruin_it(start):
    weights, before = start
    after = success(improved(weights, -1.0, FLIPPED_ITERATIONS))
    assert after < before / 2, f"{before:.2f} -> {after:.2f}"


@pytest.mark.timeout(900)
def test_groups_lift_it_without_a_critic(start):
    weights, before = start
    env = make_env("train", 64)
    policy = make_policy(POLICY, env.spec, SEED)
    policy.load_state_dict(weights)
    improve_in_groups(env, policy, SEED)
    after = success(policy)
    assert before < GRPO_FLOOR - 0.2 and after > GRPO_FLOOR, f"{before:.2f} -> {after:.2f}"
