"""FlowRL: the policy that balances is the reference, tilted by rewards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embodyrl.algorithms.flow_balance import FlowBalanceActor
from embodyrl.algorithms.grpo import GRPO, GRPOConfig
from embodyrl.build import make_policy
from embodyrl.errors import UserError
from embodyrl.functional.losses import flow_balance_loss
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/arm", 6, 2, 3, "ee_delta_pos", 25.0, 20, {})
BETA = 1.7


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bandit() -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities (K,) of a reference, and rewards (K,)."""
    reference = torch.tensor([0.5, 0.1, 0.3, 0.1], dtype=torch.float64).log()
    return reference, torch.tensor([0.2, 1.0, -0.5, 0.9], dtype=torch.float64)


def test_the_optimum_of_a_bandit_is_the_reference_times_exp_of_beta_r() -> None:
    reference, reward = bandit()
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    log_partition = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits, log_partition], lr=0.05)
    for _ in range(1500):
        logprob = logits.log_softmax(0)
        # Every action as often: whoever samples, the balance is the same.
        loss, figures = flow_balance_loss(
            logprob, logprob.detach(), reference, log_partition.expand(4), reward, BETA, 0.2, 0.2
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if float(figures["balance_error"]) < 1e-5:
            break
    else:
        pytest.fail("it does not balance")
    tilted = (reference + BETA * reward).exp()
    torch.testing.assert_close(logits.softmax(0), tilted / tilted.sum(), atol=1e-4, rtol=0)
    torch.testing.assert_close(log_partition.exp(), tilted.sum(), atol=1e-3, rtol=0)


def test_the_first_gradient_is_two_beta_times_the_policy_gradient() -> None:
    reference, reward = bandit()
    logits = reference.clone().requires_grad_()
    actions = torch.multinomial(reference.exp(), 500, replacement=True, generator=gen())
    advantage = reward[actions] - reward[actions].mean()
    logprob = logits.log_softmax(0)[actions]
    zero = torch.zeros(500, dtype=torch.float64)
    loss, _ = flow_balance_loss(
        logprob, logprob.detach(), reference[actions], zero, advantage, BETA, 0.2, 0.2
    )
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (ascent,) = torch.autograd.grad((advantage * logprob).mean(), logits)
    torch.testing.assert_close(found, -2 * BETA * ascent)


def test_decisions_of_an_older_policy_are_weighted_by_a_clipped_ratio_without_gradient() -> None:
    logprob = torch.tensor([0.0, 0.0, 0.0], requires_grad=True)
    old = torch.tensor([1.0, -1.0, -0.1])
    weight = torch.tensor([1.0, 2.0, 0.5])
    loss, figures = flow_balance_loss(
        logprob, old, torch.ones(3), torch.zeros(3), torch.zeros(3), 1.0, 0.2, 0.3, weight
    )
    importance = torch.tensor([0.8, 1.3, float(torch.tensor(0.1).exp())])
    torch.testing.assert_close(loss, (importance * weight).mean())
    loss.backward()
    assert logprob.grad is not None
    torch.testing.assert_close(logprob.grad, -2 * importance * weight / 3)
    assert float(figures["clip_fraction"]) == pytest.approx(2 / 3)


def make(**settings: Any) -> Any:
    config = FlowVLAConfig(
        width=16, layers=1, heads=2, text_layers=0, critic_width=16, horizon=2, action_patch=1,
        **settings,
    )  # fmt: skip
    return make_policy(config, SPEC, seed=0)


def learn(beta: float, iterations: int = 12) -> tuple[FlowBalanceActor, float]:
    """Of one observation; the first action's first number is the reward. Returns its mean's gain."""
    policy = make()
    settings = GRPOConfig(
        objective="flow_balance",
        balance_beta=beta,
        minibatch_size=64,
        epochs=2,
        lr=1e-2,
        lr_warmup=0,
    )
    actor = FlowBalanceActor(settings, policy)
    obs = Obs({}, torch.zeros(128, 3), ["push"] * 128)
    begin = policy.sample(obs, generator=gen(99), mode="train").trace.x[:, -1, 0, 0]
    for i in range(iterations):
        sample = policy.sample(obs, generator=gen(i), mode="train")
        reward = sample.trace.x[:, -1, 0, 0]
        figures = actor.update(
            obs, sample.trace, sample.logprob, reward, torch.arange(128),
            progress=0.0, generator=gen(i),
        )  # fmt: skip
        assert i or figures["ratio"] == pytest.approx(1.0, abs=0.2)
    end = policy.sample(obs, generator=gen(99), mode="train").trace.x[:, -1, 0, 0]
    return actor, float((end - begin).mean())


def test_a_flow_is_tilted_by_its_reward_and_more_so_with_a_larger_beta() -> None:
    _, little = learn(0.2)
    actor, much = learn(3.0)
    assert much > little + 0.15 and much > 0.2
    # The value head is trained, and the reference is not.
    assert actor.policy.value(Obs({}, torch.zeros(1, 3), ["push"])).abs() > 1e-3
    fresh = make()
    for ours, first in zip(actor.reference.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(ours, first)


def test_checkpoints_bring_the_reference_back() -> None:
    actor, _ = learn(1.0, iterations=1)
    other = FlowBalanceActor(actor.config, make())
    with torch.no_grad():
        for parameter in other.reference.parameters():
            parameter.zero_()
    other.load_state_dict(actor.state_dict())
    for a, b in zip(other.reference.parameters(), actor.reference.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_cannot_be_balanced_is_refused() -> None:
    with pytest.raises(UserError, match=r"algorithm\.balance_beta"):
        GRPOConfig(balance_beta=2.0)
    with pytest.raises(UserError, match=r"algorithm\.dual_clip"):
        GRPOConfig(objective="flow_balance", dual_clip=3.0)
    config = GRPOConfig(objective="flow_balance", num_episodes=16)
    assert isinstance(GRPO(config, make()).actor, FlowBalanceActor)
    # A worker plays, and needs no reference.
    assert GRPO.worker_config(config, 2).objective == "clipped"
    policy = make()
    policy.found = torch.nn.Identity()
    with pytest.raises(UserError, match=r"policy\.critic=found"):
        GRPO(config, policy)
