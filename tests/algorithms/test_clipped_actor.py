"""The clipped actor in closed forms: old policies, importance, rates and what a ratio is divided by."""

import math

import pytest
import torch
from torch import nn

from embodyrl.algorithms.clipped_actor import ADAPTIVE_RANGE, ClippedActor
from embodyrl.algorithms.clipped_actor_config import ActorConfig
from embodyrl.algorithms.optim import Means
from embodyrl.errors import UserError
from embodyrl.functional.flow import DenoisingTransition
from embodyrl.types import DenoisingTrace, EnvSpec, Obs, PolicyEval

SPEC = EnvSpec("test/arm", 6, 2, 1, "torque", 25.0, 20, {})
B, K = 6, 3


class Gaussian(nn.Module):
    """A policy whose K log-probabilities of a chunk are -(x - mean)^2 / 2, with one parameter."""

    spec = SPEC
    transition = DenoisingTransition("flow_noise", K)

    class config:
        horizon = 4

    def __init__(self, mean=0.0):
        super().__init__()
        self.mean = nn.Parameter(torch.tensor(mean))

    def actor_parameters(self):
        return [self.mean]

    def evaluate(self, obs, trace):
        logprob = -0.5 * (trace.x[:, 1:, 0, 0] - self.mean) ** 2
        return PolicyEval(logprob, self.mean.expand(len(logprob)), None)


def rollout(seed=0, stochastic=None):
    x = torch.randn(B, K + 1, 1, 1, generator=torch.Generator().manual_seed(seed))
    if stochastic is None:
        stochastic = torch.ones(B, K, dtype=torch.bool)
    obs = Obs({}, torch.zeros(B, 1), ["go"] * B)
    return obs, DenoisingTrace(x, stochastic)


def make(mean=0.0, **settings):
    defaults = {"name": "test", "epochs": 1, "minibatch_size": B, "lr_warmup": 0, "dual_clip": 0.0}
    return ClippedActor(ActorConfig(**{**defaults, **settings}), Gaussian(mean))


def update(actor, logprob, advantage, weight=None, rows=None, seed=0, progress=0.0):
    obs, trace = rollout(seed)
    return actor.update(
        obs,
        trace,
        logprob,
        advantage,
        torch.arange(B) if rows is None else rows,
        weight=weight,
        progress=progress,
        generator=torch.Generator().manual_seed(1),
    )


def behaviour_of(shift, seed=0):
    """Log-probabilities of an older policy, ``shift`` (B,) below those of mean 0, over K steps."""
    obs, trace = rollout(seed)
    return Gaussian().evaluate(obs, trace).logprob.detach() - shift[:, None] / K


# Decoupled PPO.


def test_importance_is_proximal_over_behaviour_and_at_most_the_cap():
    """exp(log p_proximal - log p_behaviour): the behaviour found these chunks rarer by ``shift``."""
    shift = torch.tensor([0.0, math.log(1.5), -math.log(2.0), math.log(4.0), 9.0, -9.0])
    actor = make(behaviour_cap=2.0)
    obs, trace = rollout()
    stats = Means()
    given = torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0, 1.0])
    proximal, weight, _ = actor._old_policy(
        obs, trace, behaviour_of(shift), torch.arange(B), given, stats
    )
    expected = torch.tensor([1.0, 1.5, 0.5, 2.0, 2.0, math.exp(-9)])
    torch.testing.assert_close(weight, given * expected, rtol=1e-4, atol=1e-6)
    now = actor.policy.evaluate(obs, trace).logprob.sum(1).detach()
    torch.testing.assert_close(proximal, now)
    figures = stats.means()
    assert figures["behaviour_weight"] == pytest.approx(float(expected.mean()), rel=1e-4)
    assert figures["behaviour_truncated"] == pytest.approx(2 / 6)


def test_without_a_cap_the_rollout_is_the_old_policy_and_all_weigh_the_same():
    actor = make()
    obs, trace = rollout()
    old = behaviour_of(torch.ones(B))
    behaviour, weight, useful = actor._old_policy(obs, trace, old, torch.arange(B), None, Means())
    torch.testing.assert_close(behaviour, old.sum(1))
    assert torch.equal(weight, torch.ones(B)) and useful == 1.0


def test_masked_chunks_weigh_nothing_and_the_others_keep_their_weights():
    """IcePop: exp(shift) in [.5, 2] stays, what lies outside is 0; the gradient is that of the rest."""
    shift = torch.tensor([0.0, math.log(1.5), -math.log(1.9), math.log(4.0), 9.0, -9.0])
    settings = {"behaviour_cap": 2.0, "behaviour_filter": "mask", "behaviour_low": 0.5}
    actor = make(**settings, max_grad_norm=0.0)
    obs, trace = rollout()
    stats = Means()
    _, weight, useful = actor._old_policy(
        obs, trace, behaviour_of(shift), torch.arange(B), None, stats
    )
    expected = torch.tensor([1.0, 1.5, 1 / 1.9, 0.0, 0.0, 0.0])
    torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6)
    assert stats.means()["behaviour_masked"] == pytest.approx(0.5)
    assert useful == pytest.approx(float(expected.sum() ** 2 / (B * expected.square().sum())))
    advantage = torch.tensor([1.0, -2.0, 0.5, -0.3, 1.5, 0.7])
    update(actor, behaviour_of(shift), advantage)
    slope = trace.x[:, 1:, 0, 0].sum(1)
    torch.testing.assert_close(
        actor.policy.mean.grad, -(expected * advantage * slope).mean(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("schedule", ["linear", "adaptive"])
def test_the_rate_falls_with_the_root_of_the_effective_sample_size(schedule):
    """Two of six chunks outside the band: the others weigh the same, so 4/6 of the samples are left."""
    shift = torch.tensor([0.0, 0.0, 0.0, 0.0, 9.0, -9.0])
    settings = {"behaviour_cap": 2.0, "behaviour_filter": "mask", "behaviour_ess": True}
    by_kl = {"lr_schedule": "adaptive", "target_kl": 0.02, "lr_warmup": 10}
    actor = make(**settings, lr=1e-3, **(by_kl if schedule == "adaptive" else {}))
    found = update(actor, behaviour_of(shift), torch.zeros(B))
    assert found["ess"] == pytest.approx(4 / 6, rel=1e-5)
    assert found["actor_lr"] == pytest.approx(1e-3 * math.sqrt(4 / 6), rel=1e-5)
    # The next iteration begins at the schedule's own rate, not at the scaled one.
    grown = 1.5 if schedule == "adaptive" else 1.0
    assert actor.optimizer.lr == pytest.approx(1e-3 * grown)
    # Adam's first step is as long as its rate.
    actor = make(**settings, lr=1e-3, max_grad_norm=0.0)
    update(actor, behaviour_of(shift), torch.ones(B))
    assert abs(float(actor.policy.mean.detach())) == pytest.approx(
        1e-3 * math.sqrt(4 / 6), rel=1e-2
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"behaviour_filter": "mask"}, "behaviour_cap=0 weights no chunk"),
        ({"behaviour_ess": True}, "behaviour_cap=0 weights no chunk"),
        ({"behaviour_cap": 2.0, "behaviour_low": 0.3}, "has no lower end"),
        ({"rollout_precision": "int8"}, "set algorithm.behaviour_cap=2 as well"),
    ],
)
def test_settings_of_the_behaviour_that_nothing_reads_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        make(**settings)


def test_the_gradient_is_importance_times_reinforce():
    """At the proximal policy the ratio is 1, so d loss / d mean = -mean(w A d log p / d mean)."""
    shift = torch.tensor([0.3, -0.2, 0.1, 0.9, -0.8, 0.0])
    advantage = torch.tensor([1.0, -2.0, 0.5, -0.3, 1.5, 0.7])
    weight = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 0.0])
    actor = make(behaviour_cap=100.0, max_grad_norm=0.0)
    stats = update(actor, behaviour_of(shift), advantage, weight)
    _, trace = rollout()
    slope = trace.x[:, 1:, 0, 0].sum(1)  # of log p by the mean, at mean 0
    expected = -(shift.exp() * weight * advantage * slope).mean()
    torch.testing.assert_close(actor.policy.mean.grad, expected, rtol=1e-4, atol=1e-5)
    assert stats["grad_norm"] == pytest.approx(abs(float(expected)), rel=1e-4)


# The loss and its pieces.


def test_rows_that_do_not_count_have_no_influence():
    rows = torch.tensor([0, 2, 5])
    advantage = torch.tensor([1.0, float("nan"), -1.0, float("nan"), float("nan"), 2.0])
    actor = make(max_grad_norm=0.0)
    update(actor, behaviour_of(torch.zeros(B)), advantage, rows=rows)
    _, trace = rollout()
    slope = trace.x[rows, 1:, 0, 0].sum(1)
    expected = -(advantage[rows] * slope).mean()
    torch.testing.assert_close(actor.policy.mean.grad, expected)


@pytest.mark.parametrize("size", [0, 1, 4])
def test_the_loss_is_the_mean_over_the_minibatch_less_the_entropy(size):
    """Here the entropy per dim is the mean parameter, whose slope is 1."""
    coef = 0.25
    actor = make(entropy_coef=coef, microbatch_size=size, max_grad_norm=0.0, mean=0.5)
    obs, trace = rollout()
    old = actor.policy.evaluate(obs, trace).logprob.detach()
    advantage = torch.linspace(-1, 2, B)
    stats = update(actor, old, advantage)
    slope = (trace.x[:, 1:, 0, 0] - 0.5).sum(1)
    expected = -(advantage * slope).mean() - coef
    torch.testing.assert_close(actor.policy.mean.grad, expected, rtol=1e-4, atol=1e-5)
    assert stats["policy_loss"] == pytest.approx(-float(advantage.mean()), abs=1e-5)
    assert stats["entropy"] == pytest.approx(0.5)


@pytest.mark.parametrize(("high", "clipped"), [(0.0, 0), (0.8, 1)])
def test_the_upper_clip_is_the_lower_one_unless_it_is_given(high, clipped):
    """Ratios of 1.5 leave [.8, 1.2], and stay in [.8, 1.8]."""
    shift = torch.full((B,), math.log(1.5))
    actor = make(clip_range=0.2, clip_range_high=high, max_grad_norm=0.0)
    stats = update(actor, behaviour_of(shift), torch.ones(B))
    assert bool(actor.policy.mean.grad.abs() > 1e-3) is bool(clipped)
    assert stats["clip_fraction"] == 1.0 - clipped
    assert stats["ratio"] == pytest.approx(1.5, rel=1e-4)


def test_dual_clip_bounds_the_loss_and_0_means_none():
    shift = torch.full((B,), math.log(10.0))
    losses = {}
    for bound in (0.0, 3.0):
        actor = make(dual_clip=bound)
        losses[bound] = update(actor, behaviour_of(shift), -torch.ones(B))["policy_loss"]
    assert losses[0.0] == pytest.approx(10.0, rel=1e-4)
    assert losses[3.0] == pytest.approx(3.0)


@pytest.mark.parametrize(("ratio", "divisor"), [("joint", 1), ("per_step", 2), ("per_dim", 16)])
def test_the_mean_ratios_divide_by_the_trained_steps_and_the_dims_of_a_chunk(ratio, divisor):
    """Two of three steps are trained, and a chunk has 4 actions of 2 dims."""
    stochastic = torch.tensor([[True, True, False]]).repeat(B, 1)
    actor = make(ratio=ratio, clip_range=0.1)
    obs, trace = rollout(stochastic=stochastic)
    assert actor._divisor(trace) == divisor
    logprob = torch.randn(B, K)
    torch.testing.assert_close(actor._decision_logprob(logprob, trace), logprob.sum(1) / divisor)
    stats = actor.update(
        obs, trace, torch.zeros(B, K), torch.zeros(B), torch.arange(B), progress=0.0,
        generator=torch.Generator(),
    )  # fmt: skip
    assert stats["clip_range_joint"] == pytest.approx(0.1 * divisor)


def test_scores_are_of_the_rows_that_count():
    actor = make(mean=0.4)
    obs, trace = rollout()
    rows = torch.tensor([1, 4])
    found = actor.scores(obs, trace, rows, K)
    expected = actor.policy.evaluate(obs, trace).logprob.detach()
    torch.testing.assert_close(found[rows], expected[rows])
    assert found.shape == (B, K) and found[[0, 2, 3, 5]].isnan().all()
    assert not found.requires_grad


# When it stops, and how fast it goes.


def test_epochs_end_after_the_pass_whose_kl_is_above_its_target():
    shift = torch.full((B,), 0.5)
    kl = math.exp(0.5) - 1 - 0.5  # of every chunk in the first pass
    for target, passes in ((0.9 * kl, 1), (1.1 * kl, 4), (0.0, 4)):
        actor = make(epochs=4, lr=1e-9, target_kl=target)
        stats = update(actor, behaviour_of(shift), torch.ones(B))
        assert stats["actor_epochs"] == passes
        assert stats["approx_kl"] == pytest.approx(kl, rel=1e-3)


def test_the_linear_rate_in_closed_form():
    actor = make(lr=1e-3, lr_warmup=4, lr_end=0.25)
    for iteration in range(6):
        actor.iteration = iteration
        for progress in (0.0, 0.5, 1.0):
            rise = min(1.0, (iteration + 1) / 4)
            assert actor._scheduled_lr(progress) == pytest.approx(
                1e-3 * rise * (1 - 0.75 * progress)
            )


def test_the_adaptive_rate_in_closed_form():
    actor = make(lr=1e-3, lr_schedule="adaptive", target_kl=0.02, lr_warmup=ActorConfig.lr_warmup)
    assert actor._adapted_lr(1e-3, 0.041) == pytest.approx(1e-3 / 1.5)
    assert actor._adapted_lr(1e-3, 0.04) == actor._adapted_lr(1e-3, 0.01) == 1e-3
    assert actor._adapted_lr(1e-3, 0.009) == pytest.approx(1.5e-3)
    assert actor._adapted_lr(1e-3 * ADAPTIVE_RANGE, 0.0) == pytest.approx(1e-3 * ADAPTIVE_RANGE)
    assert actor._adapted_lr(1e-3 / ADAPTIVE_RANGE, 1.0) == pytest.approx(1e-3 / ADAPTIVE_RANGE)


def test_nothing_to_learn_from_changes_nothing():
    actor = make()
    stats = update(actor, torch.zeros(B, K), torch.ones(B), rows=torch.arange(0))
    assert stats["actor_epochs"] == 0 and float(actor.policy.mean.detach()) == 0.0
