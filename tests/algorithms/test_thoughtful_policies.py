"""Algorithms that play and learn with a policy that thinks before it acts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from embodyrl.algorithms.grpo import GRPO, GRPOConfig
from embodyrl.algorithms.ppo import PPO, PPOConfig
from embodyrl.algorithms.sac_flow import SACFlow, SACFlowConfig
from embodyrl.build import make_policy
from embodyrl.config import resolve
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.seeding import seeded
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv
from embodyrl.training.memory_estimate import estimate, total
from embodyrl.types import EnvSpec

PPO_SETTINGS = PPOConfig(
    num_chunks=3, minibatch_size=12, epochs=1, critic_epochs=1, warmup_iterations=0, lr_warmup=0
)
GRPO_SETTINGS = GRPOConfig(
    num_episodes=8, group_size=4, minibatch_size=12, epochs=1, keep_min=0.0, keep_max=1.0,
    rewards=("return",), max_rounds=1, lr_warmup=0, branches=(2, 2), branch_chunks=(1,),
)  # fmt: skip
SAC_SETTINGS = SACFlowConfig(
    num_chunks=3, capacity=100, warmup_chunks=8, batch_size=8, utd=0.2, random_warmup=False,
    critic_warmup=0, critic_width=8, critic_norm="layer",
)  # fmt: skip
RUNS: dict[str, tuple[type, Any, str]] = {
    "ppo": (PPO, PPO_SETTINGS, "flow_sde"),
    "grpo": (GRPO, GRPO_SETTINGS, "flow_sde"),
    "sac_flow": (SACFlow, SAC_SETTINGS, "flow_noise"),
}


@pytest.mark.parametrize("name", RUNS)
def test_it_plays_and_learns(name: str) -> None:
    algorithm_class, settings, transition = RUNS[name]
    env = MujocoEnv(
        MujocoConfig(
            task="reach", reward="dense", renderer="none", num_envs=8, num_threads=1,
            max_episode_steps=12,
        )
    )  # fmt: skip
    config = FlowVLAConfig(
        width=16, layers=1, heads=2, text_layers=0, critic_width=8, horizon=4, action_patch=4,
        transition=transition, thoughts=2, thought_width=4,
    )  # fmt: skip
    policy: Any = make_policy(config, env.spec, seed=0)
    algorithm = algorithm_class(settings, policy)
    before = {k: v.clone() for k, v in policy.thinker.state_dict().items()}
    player = Player(env)
    for i in range(2):
        generator = seeded(0, i)
        batch = player.collect(algorithm, i, generator=generator)
        row = algorithm.update(batch, progress=i / 2, generator=generator)
        assert all(math.isfinite(x) for x in row.values())
        if name != "sac_flow":
            assert 0 < row["thoughts"] < 2
            # Ratios begin at 1, so what an epoch of three steps moves is little.
            assert abs(row["approx_kl"]) < 0.1
    changed = {k for k, v in policy.thinker.state_dict().items() if not torch.equal(v, before[k])}
    # SAC acts on a thought without noise, whose stopping has no gradient.
    assert ("stop" in changed) == (name != "sac_flow")
    assert "told.weight" in changed


@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_the_memory_of_a_run_is_estimated(name: str) -> None:
    spec = EnvSpec("test/arm", 8, 4, 6, "ee_delta_pos", 25.0, 20, {})
    found = []
    for thoughts in (0, 3):
        policy = {"name": "flow_vla", "thoughts": thoughts}
        sections = {"env": {"name": "mujoco"}, "policy": policy, "algorithm": {"name": name}}
        found.append(total(estimate(resolve(sections), spec)))
    assert found[1] > found[0]
