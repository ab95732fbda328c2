"""NFT: its gradient and minimiser in closed form, what counts as good, and that it moves towards what worked."""

import copy
import dataclasses

import pytest
import torch

from embodyrl.algorithms.nft import NFT, NFTConfig
from embodyrl.build import make_policy
from embodyrl.errors import UserError
from embodyrl.functional.losses import nft_branches, nft_loss
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
