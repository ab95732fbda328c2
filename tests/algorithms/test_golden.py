"""Golden traces: short deterministic training runs whose metrics must stay what they were.

A refactor that changes what is computed fails here, although every learning test still passes.
Where a change is meant, `python tests/algorithms/test_golden.py` writes
tests/algorithms/golden/*.json anew, and the diff shows what it did. The tolerance leaves room for
another CPU's rounding, which the few updates amplify little.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from embodyrl.algorithms.fpo import FPO, FPOConfig
from embodyrl.algorithms.grpo import GRPO, GRPOConfig
from embodyrl.algorithms.ppo import PPO, PPOConfig
from embodyrl.algorithms.sac_flow import SACFlow, SACFlowConfig
from embodyrl.build import make_policy
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.seeding import seeded
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv

FOLDER = Path(__file__).parent / "golden"
ITERATIONS, CHUNKS = 3, 5
PPO_SETTINGS = {
    "num_chunks": CHUNKS,
    "minibatch_size": 20,
    "epochs": 2,
    "critic_epochs": 2,
    "warmup_iterations": 1,
}
PPO_SETTINGS |= {"lr": 1e-3, "lr_warmup": 0}
ADAPTIVE = {k: v for k, v in PPO_SETTINGS.items() if k != "lr_warmup"} | {
    "lr_schedule": "adaptive",
    "target_kl": 0.02,
}
GRPO_SETTINGS = {
    "num_episodes": 16,
    "group_size": 4,
    "minibatch_size": 20,
    "epochs": 2,
    "keep_min": 0.0,
    "keep_max": 1.0,
}
# Of an untrained policy no episode succeeds, so the return of the dense reward is compared.
GRPO_SETTINGS |= {"rewards": ("return",), "max_rounds": 1, "lr": 1e-3, "lr_warmup": 0}
SAC_SETTINGS = {
    "num_chunks": CHUNKS,
    "capacity": 200,
    "warmup_chunks": 40,
    "batch_size": 16,
    "utd": 0.2,
}
SAC_SETTINGS |= {
    "random_warmup": False,
    "critic_warmup": 4,
    "critic_width": 16,
    "critic_norm": "layer",
}
TRACES = {
    "ppo_flow_sde": ({}, PPOConfig(**PPO_SETTINGS)),
    "ppo_flow_sde_one": (
        {"trained_steps": "one"},
        PPOConfig(**PPO_SETTINGS, value_clip=0.2, clip_range_high=0.28),
    ),
    "ppo_flow_cps": ({"transition": "flow_cps"}, PPOConfig(**ADAPTIVE)),
    "ppo_flow_noise": (
        {"transition": "flow_noise"},
        PPOConfig(**PPO_SETTINGS, entropy_coef=0.005, behaviour_cap=2.0),
    ),
    "fpo": ({"eta": 0.0}, FPOConfig(**PPO_SETTINGS, num_pairs=4)),
    "grpo": ({}, GRPOConfig(**GRPO_SETTINGS)),
    "sac_flow": ({"transition": "flow_noise"}, SACFlowConfig(**SAC_SETTINGS)),
    "sac_flow_path": ({"transition": "flow_noise"}, SACFlowConfig(**SAC_SETTINGS, entropy="path")),
}
ALGORITHMS = {FPOConfig: FPO, GRPOConfig: GRPO, PPOConfig: PPO, SACFlowConfig: SACFlow}


def train(policy_settings, config) -> list[dict[str, float]]:
    """The metrics of each iteration."""
    env = MujocoEnv(
        MujocoConfig(
            task="reach",
            reward="dense",
            renderer="none",
            num_envs=8,
            num_threads=1,
            max_episode_steps=12,
        )
    )
    small = FlowVLAConfig(
        width=32,
        layers=1,
        heads=2,
        text_layers=0,
        critic="privileged",
        critic_width=16,
        horizon=4,
        action_patch=4,
        **policy_settings,
    )
    policy, rows = make_policy(small, env.spec, seed=0), []
    with torch.random.fork_rng():
        torch.manual_seed(0)  # as the runner does, for nets that an algorithm brings
        algorithm, player = ALGORITHMS[type(config)](config, policy), Player(env)
    for i in range(ITERATIONS):
        generator = seeded(0, i)
        batch = player.collect(algorithm, i, generator=generator)
        row = algorithm.update(batch, progress=i / ITERATIONS, generator=generator)
        total = sum(float(p.detach().double().abs().sum()) for p in policy.parameters())
        rows.append({**row, "env_steps": batch.env_steps, "parameters": total})
    return rows


@pytest.mark.parametrize("name", TRACES)
def test_the_metrics_are_what_they_were(name):
    golden = json.loads((FOLDER / f"{name}.json").read_text())
    for iteration, (now, then) in enumerate(zip(train(*TRACES[name]), golden, strict=True)):
        assert now.keys() == then.keys()
        wrong = {
            k: (now[k], then[k])
            for k in now
            if not math.isclose(now[k], then[k], rel_tol=2e-3, abs_tol=2e-4)
        }
        assert not wrong, f"iteration {iteration}: (now, then) are {wrong}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, trace in TRACES.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(train(*trace), indent=1) + "\n")
