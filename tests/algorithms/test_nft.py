"""NFT: its gradient and minimiser in closed form, what counts as good, and that it moves towards what worked."""

import copy
import dataclasses

import pytest
import torch
from linear_policy import NEW, OLD, SIGMA, Linear, observed, sampled

from embodyrl.algorithms.nft import NFT, NFTConfig
from embodyrl.build import make_policy
from embodyrl.errors import UserError
from embodyrl.functional.flow import randn, sample_training_time
from embodyrl.functional.losses import nft_branches, nft_loss
from embodyrl.functional.returns import equal_episode_weights
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.rollouts.batches import Episode, EpisodeBatch, GroupBatch
from embodyrl.types import EnvSpec, Obs

H = 2
SPEC = EnvSpec("test/arm", 4, 2, 3, "torque", 25.0, 20, {})
TINY = {
    "width": 16,
    "layers": 1,
    "heads": 2,
    "text_layers": 0,
    "critic_width": 8,
    "horizon": H,
    "action_patch": H,
}


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("r", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_17_gradient_and_minimiser(r):
    beta, generator = 0.7, gen()
    v_old, u = (torch.randn(1, 3, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    good = torch.tensor([r], dtype=torch.float64)

    def loss(v):
        return nft_loss(*nft_branches(v, v_old, beta), u, good) * u.numel()

    v = v_old.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(v), v)
    torch.testing.assert_close(slope, 2 * beta * (2 * r - 1) * (v_old - u))
    best = (v_old + (2 * r - 1) / beta * (u - v_old)).requires_grad_()
    (slope,) = torch.autograd.grad(loss(best), best)
    torch.testing.assert_close(slope, torch.zeros_like(slope))


# The loss of chunks, by hand, of a policy whose velocity is W x + t / 2 and which plans beside the
# one dim that is executed.

BETA, DRIFT = 0.7, 0.5


def linear(old=OLD, new=NEW, transition="flow_noise", **settings):
    """NFT whose old policy has the weights ``old`` and whose new one has ``new``."""
    policy = Linear(old, drift=DRIFT, transition=transition)
    defaults = {"num_episodes": 4, "group_size": 2, "beta": BETA, "max_grad_norm": 0.0}
    algorithm = NFT(NFTConfig(**{**defaults, **settings}), policy)
    with torch.no_grad():
        algorithm.result.weight.copy_(new)
    return algorithm


def action_loss(weight, x, good, share, generator):
    """Mean of share (r |x0+ - a|^2 + (1 - r) |x0- - a|^2) over the executed dim."""
    a = x[:, -1, 0]
    t = sample_training_time(len(a), generator)[:, None]
    noisy = (1 - t) * a + t * randn((len(a), 1, 2), generator)[:, 0]
    old, new = (noisy @ w.T + DRIFT * t for w in (OLD, weight))
    error = {sign: noisy - t * (old + sign * BETA * (new - old)) - a for sign in (1, -1)}
    plus, minus = (error[sign][:, 0] ** 2 for sign in (1, -1))
    return (share * (good * plus + (1 - good) * minus)).mean()


def step_loss(weight, x, good, share, generator):
    """Mean of share (r |mean+ - x'|^2 + (1 - r) |mean- - x'|^2) / std^2 at a step drawn for each."""
    k = torch.multinomial(torch.ones(len(x), 3), 1, generator=generator)[:, 0]
    row = torch.arange(len(x))
    noisy, after = x[row, k, 0], x[row, k + 1, 0]
    t = (1 - k / 3)[:, None]
    old, new = (noisy @ w.T + DRIFT * t for w in (OLD, weight))
    error = {sign: noisy - (old + sign * BETA * (new - old)) / 3 - after for sign in (1, -1)}
    plus, minus = (error[sign][:, 0] ** 2 / SIGMA**2 for sign in (1, -1))
    return (share * (good * plus + (1 - good) * minus)).mean()


BY_HAND = {"action": action_loss, "step": step_loss}


@pytest.mark.parametrize("target", BY_HAND)
def test_the_loss_by_hand(target):
    algorithm = linear(target=target)
    x, n = sampled(algorithm.policy, 40).trace, 40
    good, share = torch.linspace(0, 1, n), torch.rand(n, generator=gen(3)) * 2
    loss = algorithm._loss(observed(n), x, good, share, gen(5))
    leaf = NEW.clone().requires_grad_()
    expected = BY_HAND[target](leaf, x.x, good, share, gen(5))
    torch.testing.assert_close(loss, expected)
    (ours,) = torch.autograd.grad(loss, algorithm.result.weight)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, leaf)[0])


@pytest.mark.parametrize("transition", ["flow_sde", "flow_cps"])
def test_the_loss_of_a_step_measures_in_its_own_std(transition):
    """|mean+- - x'|^2 / std^2 with mean and std of the step that was drawn; only noisy ones are."""
    algorithm = linear(target="step", transition=transition)
    trace, n = sampled(algorithm.policy, 40).trace, 40
    good, share = torch.linspace(0, 1, n), torch.ones(n)
    loss = algorithm._loss(observed(n), trace, good, share, gen(5))
    k = torch.multinomial(trace.stochastic.float(), 1, generator=gen(5))[:, 0]
    total = torch.zeros(n)
    for row, step in enumerate(k.tolist()):
        x, after = trace.x[row, step], trace.x[row, step + 1, 0, 0]
        old, new = (x @ w.T + DRIFT * (1 - step / 3) for w in (OLD, NEW))
        for sign, r in ((1, good[row]), (-1, 1 - good[row])):
            v = old + sign * BETA * (new - old)
            mean, std = algorithm.policy.transition.mean_std(x, v, step)
            total[row] += r * ((mean[0, 0] - after) / std.flatten()[0]) ** 2
    torch.testing.assert_close(loss, total.mean())


@pytest.mark.parametrize("target", BY_HAND)
@pytest.mark.parametrize("decay", [0.0, 0.75])
def test_an_iteration_by_hand(target, decay):
    """Two chunks of an episode weigh as much as one of another; the old policy follows."""
    algorithm = linear(target=target, epochs=1, lr=1e-2, old_decay=decay)
    sample, episode = sampled(algorithm.policy, 6), torch.tensor([0, 0, 1, 2, 3, 3])
    played = [Episode(0, "task", s, float(s), 1) for s in (True, False, False, False)]
    kept = EpisodeBatch(observed(6), sample.trace, sample.logprob, episode, played, 6)
    row = algorithm.update(GroupBatch(kept, played, 6, 1), progress=0.0, generator=gen(7))
    # The first group has r = 1 and 0; in the second nobody is better than the others.
    good = torch.tensor([1.0, 1.0, 0.0, 0.5, 0.5, 0.5])
    share = torch.tensor([0.75, 0.75, 1.5, 1.5, 0.75, 0.75])
    torch.testing.assert_close(equal_episode_weights(episode), share)
    assert row["informative"] == 0.5
    assert row["optimality"] == pytest.approx(float((good * share).mean()))
    generator = gen(7)
    rows = torch.randperm(3, generator=generator)
    leaf = NEW.clone().requires_grad_()
    expected = BY_HAND[target](leaf, sample.trace.x[rows], good[rows], share[rows], generator)
    assert row["loss"] == pytest.approx(float(expected.detach()))
    (gradient,) = torch.autograd.grad(expected, leaf)
    torch.testing.assert_close(algorithm.result.weight.grad, gradient)
    assert row["grad_norm"] == pytest.approx(float(gradient.norm()))
    new = algorithm.result.weight.detach()
    assert not torch.equal(new, NEW)
    torch.testing.assert_close(algorithm.policy.weight, decay * OLD + (1 - decay) * new)


def make(**settings):
    policy = make_policy(FlowVLAConfig(**TINY, critic="shared"), SPEC, 0)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=gen(1)))
    return NFT(NFTConfig(**{"num_episodes": 8, "group_size": 4, "lr": 1e-3, **settings}), policy)


def played(algorithm, success):
    """One chunk per episode, sampled by the old policy."""
    n = len(success)
    obs = Obs({}, torch.randn(n, 3, generator=gen(2)), ["go"] * n)
    sample = algorithm.policy.sample(obs, generator=gen(3), mode="train")
    episodes = [None if s is None else Episode(0, "task", bool(s), float(s), H) for s in success]
    batch = EpisodeBatch(obs, sample.trace, sample.logprob, torch.arange(n), episodes, n * H)
    return GroupBatch(batch, [e for e in episodes if e is not None], n * H, 1)


def test_an_episode_is_as_good_as_it_is_better_than_its_group():
    algorithm = make()
    batch = played(algorithm, [1, 0, 0, 0, 1, 1, 1, 1])
    good = algorithm._optimality(batch.kept)
    assert good[0] == 1 and (good[1:4] < 0.5).all() and (good[4:] == 0.5).all()
    broken = algorithm._optimality(played(algorithm, [1, None, 0, 0, 1, 0, 1, 1]).kept)
    assert (broken[:4] == 0.5).all() and (broken[4:] != 0.5).all()


@pytest.mark.parametrize("solved", [1, 2, 4, 6, 7])
def test_a_group_is_neither_approached_nor_left_on_the_whole(solved):
    """Advantages that are clipped, or chunks that all weigh the same, push a policy that mostly fails off itself."""
    algorithm = make(num_episodes=8, group_size=8)
    good = algorithm._optimality(played(algorithm, [1] * solved + [0] * (8 - solved)).kept)
    assert (
        float(good.mean()) == pytest.approx(0.5, abs=1e-6) and float(good.max() - good.min()) > 0.5
    )


@pytest.mark.parametrize("target", ["action", "step"])
def test_it_moves_towards_what_worked_and_away_from_what_did_not(target):
    """The velocity's distance to the one that leads to the chunk falls for good chunks and grows for bad ones."""
    algorithm = make(target=target, epochs=100, old_decay=0.0, lr=3e-3)
    batch = played(algorithm, [1, 0, 0, 1, 0, 1, 1, 0])
    kept = batch.kept
    x, k = kept.trace.x, 2
    u = (x[:, k] - x[:, -1]) / 0.5  # from x_k at t = 1/2 straight to where the path ended

    def distance():
        policy = algorithm.result
        v = policy.velocity(policy.encode(kept.obs), x[:, k : k + 1], torch.full((8, 1), 0.5))[:, 0]
        return (v - u).square().mean((1, 2)).detach()

    before = distance()
    old = [p.clone() for p in algorithm.policy.parameters()]
    row = algorithm.update(batch, progress=0, generator=gen(4))
    change, good = distance() - before, torch.tensor([1, 0, 0, 1, 0, 1, 1, 0]).bool()
    assert change[good].mean() < 0 < change[~good].mean()
    assert row["informative"] == 1 and not all(
        torch.equal(a, b) for a, b in zip(old, algorithm.policy.parameters(), strict=True)
    )


def test_nothing_is_learned_from_groups_that_are_alike():
    algorithm = make()
    before = [p.clone() for p in algorithm.result.parameters()]
    row = algorithm.update(played(algorithm, [1] * 4 + [0] * 4), progress=0, generator=gen())
    assert row["informative"] == 0
    assert all(
        torch.equal(a, b) for a, b in zip(before, algorithm.result.parameters(), strict=True)
    )


def test_state_goes_there_and_back():
    algorithm, again = make(), make()
    algorithm.update(played(algorithm, [1, 0] * 4), progress=0, generator=gen())
    again.result.load_state_dict(algorithm.result.state_dict())
    again.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    for a in (algorithm, again):
        a.update(played(a, [0, 1] * 4), progress=0, generator=gen(1))
    assert all(
        torch.equal(a, b)
        for a, b in zip(algorithm.result.parameters(), again.result.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_episodes": 9}, "divide"),
        ({"beta": 0.0}, "above 0"),
        ({"target": "steps"}, "Did you mean 'step'"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        make(**settings)
    policy = make_policy(
        dataclasses.replace(FlowVLAConfig(**TINY, critic="shared"), eta=0.0), SPEC, 0
    )
    with pytest.raises(UserError, match="noisy denoising steps"):
        NFT(NFTConfig(target="step"), policy)
