"""Rollouts in low precision: what is rounded, what is put back, and that the update's correction is exact."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reach_square import ReachSquare

from embodyrl.algorithms.grpo import GRPO, GRPOConfig
from embodyrl.algorithms.ppo import PPO, PPOConfig
from embodyrl.build import make_policy
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.low_precision import acting_in, in_float32, to_int8
from embodyrl.types import ActionSample, EnvSpec, Obs

SPEC = EnvSpec("test/arm", 4, 2, 5, "ee_delta_pos", 25.0, 20, {})


def policy_of(spec: EnvSpec = SPEC, scale: float = 0.3) -> Any:
    config = FlowMLPConfig(width=32, horizon=2, num_denoise_steps=3, noise_min=0.3, critic_width=8)
    policy: Any = make_policy(config, spec, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator) / math.sqrt(p.shape[-1]))
    return policy


def observations(n: int) -> Obs:
    return Obs({}, torch.randn(n, 5, generator=torch.Generator().manual_seed(2)), [""] * n)


def test_rounded_weights_are_at_most_half_a_level_off_and_rounding_again_changes_nothing() -> None:
    weight = torch.randn(7, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    weight[2] = 0.0
    rounded = to_int8(weight)
    scale = weight.flatten(1).abs().amax(1) / 127
    off = (rounded - weight).flatten(1).abs().amax(1)
    assert (off <= scale * 0.5001).all() and off.max() > 0
    levels = rounded.flatten(1)[scale > 0] / scale[scale > 0, None]
    torch.testing.assert_close(levels, levels.round(), atol=1e-3, rtol=0)
    torch.testing.assert_close(to_int8(rounded), rounded)


def test_behind_the_block_the_policy_is_as_it_was_and_its_critic_never_changed() -> None:
    policy = policy_of()
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    with pytest.raises(RuntimeError, match="stop"), acting_in(policy, "int8"):
        changed = {k for k, v in policy.state_dict().items() if not torch.equal(v, before[k])}
        raise RuntimeError("stop")
    assert changed and all(k.startswith("net.") and k.endswith("weight") for k in changed)
    assert all(torch.equal(v, before[k]) for k, v in policy.state_dict().items())


@pytest.mark.parametrize("precision", ["exact", "bf16", "int8"])
def test_weights_turn_means_of_the_rollout_into_those_of_the_exact_policy(precision: str) -> None:
    """E_behaviour[p / b] = 1 holds only if b is the density of what was really drawn."""
    policy = policy_of()
    obs = observations(4000)
    with torch.no_grad(), acting_in(policy, precision):
        sample = policy.sample(obs, generator=torch.Generator().manual_seed(3), mode="train")
        again = policy.evaluate(obs, sample.trace).logprob
    sample = in_float32(sample)
    assert isinstance(sample, ActionSample) and sample.trace is not None
    assert sample.actions.dtype == sample.value.dtype == sample.logprob.dtype == torch.float32
    with torch.no_grad():
        log_ratio = (policy.evaluate(obs, sample.trace).logprob - sample.logprob).sum(1)
    if precision == "exact":
        assert log_ratio.abs().max() < 1e-4
        return
    # It acts otherwise than the exact policy, and by how much is corrected.
    assert log_ratio.std() > 1e-3
    error = 4 * float(log_ratio.exp().std()) / math.sqrt(len(obs))
    assert abs(float(log_ratio.exp().mean()) - 1) < error + 1e-4
    assert (again.float() - sample.logprob).abs().mean() < 0.2 * log_ratio.abs().mean() + 1e-3


def ppo_run(precision: str) -> dict[str, float]:
    env = ReachSquare(num_envs=4, cameras=False)
    config = PPOConfig(
        num_chunks=4, minibatch_size=16, epochs=1, critic_epochs=1, warmup_iterations=0,
        lr_warmup=0, behaviour_cap=2.0, behaviour_ess=True, rollout_precision=precision,
    )  # fmt: skip
    policy = policy_of(env.spec)
    ppo = PPO(config, policy)
    generator = torch.Generator().manual_seed(0)
    batch = ppo.collect(Player(env), generator=generator)
    assert batch.value.dtype == batch.next_value.dtype == batch.logprob.dtype == torch.float32
    return ppo.update(batch, progress=0.0, generator=generator)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_ppo_begins_at_the_exact_policy_whatever_acted(precision: str) -> None:
    exact = ppo_run("exact")
    coarse = ppo_run(precision)
    # The first minibatch's ratio is taken against the exact policy, so it is 1 in both.
    for stats in (exact, coarse):
        assert stats["ratio"] == pytest.approx(1.0, abs=1e-5) and stats["clip_fraction"] == 0
    assert exact["behaviour_weight"] == pytest.approx(1.0, abs=1e-4)
    assert exact["ess"] == pytest.approx(1.0, abs=1e-4)
    assert abs(coarse["behaviour_weight"] - 1) < 0.3 and 0.5 < coarse["ess"] < 1 - 1e-7


def test_grpo_plays_in_low_precision_too() -> None:
    env = ReachSquare(num_envs=4, cameras=False)
    config = GRPOConfig(
        num_episodes=4, group_size=2, max_rounds=1, keep_min=0.0, keep_max=1.0, minibatch_size=8,
        epochs=1, lr_warmup=0, behaviour_cap=2.0, rollout_precision="bf16",
    )  # fmt: skip
    policy = policy_of(env.spec)
    kept = (
        GRPO(config, policy).collect(Player(env), generator=torch.Generator().manual_seed(0)).kept
    )
    with torch.no_grad():
        log_ratio = (policy.evaluate(kept.obs, kept.trace).logprob - kept.logprob).sum(1)
    assert 1e-4 < log_ratio.abs().max() < 1 and kept.logprob.dtype == torch.float32
