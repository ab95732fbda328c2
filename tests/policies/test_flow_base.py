"""Flow policies that plan more than they execute: densities and ratios of the executed path alone.

The policy is linear: its velocity is W x, with x = (e, r) of the executed dim e and the rest r, and
its noise is constant (``helpers/linear_policy.py``).
"""

import pytest
import torch
from linear_policy import NEW, OLD, SIGMA, Linear, observed, sampled

from embodyrl.algorithms.clipped_actor import ClippedActor
from embodyrl.algorithms.clipped_actor_config import ActorConfig
from embodyrl.algorithms.fpo import draw_pairs, pair_losses
from embodyrl.functional.losses import ppo_policy_loss


def by_hand(weight, path, steps=3):
    """Log p(e_1 .. e_K | x_0) (N,) of the executed dim: a loop over Gaussians."""
    e, r = path[:, 0, 0, 0], path[:, 0, 0, 1]
    total = torch.zeros(len(path))
    for k in range(steps):
        v = torch.stack([e, r], 1) @ weight.T
        mean = e - v[:, 0] / steps
        e, r = path[:, k + 1, 0, 0], r - v[:, 1] / steps
        total = total + torch.distributions.Normal(mean, SIGMA).log_prob(e)
    return total


def scored(policy, trace):
    return policy.evaluate(observed(len(trace.x)), trace).logprob.sum(1)


@pytest.mark.parametrize("weight", [OLD, NEW])
def test_the_density_is_that_of_the_executed_path_given_the_initial_noise(weight):
    """Also for other parameters than those that acted, and so is its gradient."""
    trace = sampled(Linear(OLD), 64).trace
    policy, leaf = Linear(weight), weight.clone().requires_grad_()
    expected = by_hand(leaf, trace.x)
    found = scored(policy, trace)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    (ours,) = torch.autograd.grad(found.sum(), policy.weight)
    torch.testing.assert_close(ours, gradient, atol=1e-3, rtol=1e-3)
    # The rest of the plan is a way from the parameters to the executed actions.
    assert float(gradient[1].abs().max()) > 1.0


@pytest.mark.parametrize("transition", ["flow_noise", "flow_sde", "flow_cps"])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_first_ratio_is_one(transition, rows):
    policy = Linear(OLD, transition=transition, rows=rows)
    sample = sampled(policy, 64)
    again = policy.evaluate(observed(64), sample.trace)
    torch.testing.assert_close(again.logprob, sample.logprob, atol=1e-5, rtol=1e-5)


def test_the_ratio_turns_means_under_the_old_policy_into_means_under_the_new():
    """E_old[ratio e_K^2] = E_new[e_K^2], from the recursion of the covariance of (e, r).

    The new policy differs in the velocity of the rest alone: the ratio is not 1 for all that.
    """
    n = 400_000
    trace = sampled(Linear(OLD), n).trace
    new = OLD.clone()
    new[1] = torch.tensor([-1.0, 0.6])
    with torch.no_grad():
        ratio = (scored(Linear(new), trace) - scored(Linear(OLD), trace)).exp()
    step = torch.eye(2) - new / 3
    covariance = torch.eye(2)
    for _ in range(3):
        covariance = step @ covariance @ step.T + torch.diag(torch.tensor([SIGMA**2, 0.0]))
    assert float(ratio.mean()) == pytest.approx(1.0, abs=0.02)
    executed = trace.x[:, -1, 0, 0]
    found = float((ratio * executed**2).mean())
    assert found == pytest.approx(float(covariance[0, 0]), rel=0.03)
    # Without the ratio it is far from that.
    assert abs(float((executed**2).mean()) - float(covariance[0, 0])) > 0.1


def test_padding_that_the_network_does_not_read_changes_nothing():
    """Whatever the network says of padded dims: ratio, loss and gradient are the unpadded ones."""
    found = []
    for rest in (None, 0.0, 1.0, -7.0):
        old, new = (
            torch.tensor([[w]]) if rest is None else torch.tensor([[w, 0.0], [rest, rest]])
            for w in (0.3, 0.5)
        )
        noisy = sampled(Linear(torch.tensor([[0.3, 0.0], [0.0, 0.0]])), 32).trace
        if rest is None:
            noisy.x = noisy.x[..., :1]
        policy = Linear(new)
        before = scored(Linear(old), noisy).detach()
        advantage = torch.linspace(-1, 1, 32)
        mask = torch.ones(32, dtype=torch.bool)
        loss, figures = ppo_policy_loss(scored(policy, noisy), before, advantage, mask, 0.2, 0.2)
        (gradient,) = torch.autograd.grad(loss, policy.weight)
        entropy = policy.evaluate(observed(32), noisy).entropy
        found.append([loss, gradient[0, 0], figures["approx_kl"], entropy.sum()])
    for other in found[1:]:
        torch.testing.assert_close(torch.stack(other), torch.stack(found[0]))
    assert float(found[0][2]) > 1e-4


def test_where_one_step_is_trained_the_others_are_the_worlds():
    """The state before the trained step is the rollout's, as with the ODE's steps of the executed part."""
    trace = sampled(Linear(OLD, "one"), 64).trace
    found = Linear(NEW, "one").evaluate(observed(64), trace).logprob
    mean = trace.x[:, :-1, 0] - trace.x[:, :-1, 0] @ NEW.T / 3
    expected = torch.distributions.Normal(mean[..., 0], SIGMA).log_prob(trace.x[:, 1:, 0, 0])
    torch.testing.assert_close(found, torch.where(trace.stochastic, expected, 0.0))


def test_the_mean_ratios_count_what_is_executed():
    policy = Linear(OLD)
    trace = sampled(policy, 8).trace
    for ratio, divisor in (("joint", 1), ("per_step", 3), ("per_dim", 3)):  # H = A = 1
        actor = ClippedActor(ActorConfig(ratio=ratio), policy)
        assert actor._divisor(trace) == divisor


def test_flow_matching_losses_as_likelihoods_leave_the_rest_out():
    """FPO: the velocity of what is never executed is in no loss."""
    obs = observed(16)
    pairs = draw_pairs(sampled(Linear(OLD), 16).trace.x[:, -1], 4, torch.Generator())
    changed = OLD.clone()
    changed[1] += 3.0
    torch.testing.assert_close(
        pair_losses(Linear(changed), obs, pairs), pair_losses(Linear(OLD), obs, pairs)
    )
    t = pairs.t[..., None]
    x = (1 - t) * pairs.action[:, None, 0] + t * pairs.noise[:, :, 0]
    error = x @ OLD[0] - (pairs.noise[..., 0, 0] - pairs.action[:, None, 0, 0])
    torch.testing.assert_close(pair_losses(Linear(OLD), obs, pairs), error**2)
