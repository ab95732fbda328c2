"""SAC-Flow's targets and losses by hand: critics whose values are known, and CrossQ's statistics."""

import pytest
import torch

from embodyrl.algorithms.optim import Means
from embodyrl.algorithms.sac_flow import SACFlow, SACFlowConfig
from embodyrl.build import make_policy
from embodyrl.errors import UserError
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.rollouts.batches import Transitions
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/legs", 5, 2, 7, "torque", 50.0, 20, {})
B, H, GAMMA, ALPHA = 4, 3, 0.9, 0.5


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def make(**settings):
    """With critics of one hidden layer."""
    policy = make_policy(FlowMLPConfig(width=16, layers=1, critic_width=8, horizon=H), SPEC, 0)
    defaults = {"critic_width": 6, "critic_layers": 1, "gamma": GAMMA, "alpha": ALPHA}
    torch.manual_seed(0)
    return SACFlow(SACFlowConfig(capacity=50, **{**defaults, **settings}), policy)


def fix_values(critics, values):
    """Makes each critic say its value of everything."""
    with torch.no_grad():
        for p in critics.parameters():
            p.zero_()
        critics.biases[-1].copy_(torch.tensor(values).view(-1, 1, 1))


def observed(seed=1, n=B):
    return Obs({}, torch.randn(n, SPEC.proprio_dim, generator=gen(seed)), ["walk"] * n)


def chunks():
    reward = torch.arange(B * H).view(B, H).float()
    valid = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    terminated = torch.tensor([False, False, True, True])
    choice = torch.randn(B, H, 2, generator=gen(2)).clamp(-1, 1)
    return Transitions(observed(), choice, reward, valid, terminated, ~terminated, observed(seed=3))


def following(algorithm):
    """A next choice whose log-density is 1, 2, 3, 4."""
    choice, _, features = algorithm._sample_choice(observed(seed=3), gen(4))
    return choice.detach(), torch.arange(1.0, B + 1), features


def target_by_hand(next_value):
    """sum_i gamma^i r_i + gamma^h V, with chunks of 3, 2, 1 and 3 actions, the last two terminal."""
    g = GAMMA
    return torch.tensor(
        [
            0 + g * 1 + g**2 * 2 + g**3 * float(next_value[0]),
            3 + g * 4 + g**2 * float(next_value[1]),
            6,
            9 + g * 10 + g**2 * 11,
        ]
    )


@pytest.mark.parametrize("backup", [True, False])
def test_the_target_is_the_smaller_value_and_the_entropy_bonus(backup):
    algorithm = make(entropy_backup=backup)
    fix_values(algorithm.critics, [1.0, -2.0])
    fix_values(algorithm.target, [5.0, 3.0])
    stats = Means()
    algorithm._update_critics(chunks(), gen(), stats, following(algorithm))
    bonus = ALPHA * torch.arange(1.0, B + 1) if backup else torch.zeros(B)
    target = target_by_hand(3.0 - bonus)
    figures = stats.means()
    assert figures["td_target"] == pytest.approx(float(target.mean()), rel=1e-5)
    loss = ((1.0 - target) ** 2).mean() + ((-2.0 - target) ** 2).mean()
    assert figures["critic_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert figures["q"] == pytest.approx(-0.5)


@pytest.mark.parametrize("seed", range(6))
def test_of_many_critics_the_target_takes_the_smaller_of_two_drawn_ones(seed):
    """REDQ."""
    algorithm = make(num_critics=4, entropy_backup=False)
    values = torch.tensor([4.0, 1.0, 3.0, 2.0])
    fix_values(algorithm.target, values.tolist())
    stats = Means()
    algorithm._update_critics(chunks(), gen(seed), stats, following(algorithm))
    pair = torch.randperm(4, generator=gen(seed))[:2]
    target = target_by_hand(values[pair].min().expand(B))
    assert stats.means()["td_target"] == pytest.approx(float(target.mean()), rel=1e-5)


def test_a_target_may_take_the_least_of_all_critics():
    """RAVL and SAC-N."""
    algorithm = make(num_critics=4, target_critics="least", entropy_backup=False)
    fix_values(algorithm.target, [4.0, 2.5, 1.0, 3.0])
    for seed in range(3):
        stats = Means()
        algorithm._update_critics(chunks(), gen(seed), stats, following(algorithm))
        target = target_by_hand(torch.full((B,), 1.0))
        fix_values(algorithm.target, [4.0, 2.5, 1.0, 3.0])
        assert stats.means()["td_target"] == pytest.approx(float(target.mean()), rel=1e-5)


def test_of_two_critics_the_least_is_what_it_was_anyway():
    with pytest.raises(UserError, match="num_critics=2 the least of all is the smaller of two"):
        make(target_critics="least")


def test_critics_learn_and_target_nets_follow_by_tau():
    algorithm = make(tau=0.25, critic_lr=1e-2)
    before = [p.clone() for p in algorithm.target.parameters()]
    algorithm._update_critics(chunks(), gen(), Means(), following(algorithm))
    learned = list(algorithm.critics.parameters())
    for old, new, p in zip(before, learned, algorithm.target.parameters(), strict=True):
        torch.testing.assert_close(p, 0.75 * old + 0.25 * new.detach())
    assert any(not torch.equal(a, b) for a, b in zip(before, learned, strict=True))


@pytest.mark.parametrize(
    ("values", "how", "least"),
    [
        ([5.0, 3.0], "two", 3.0),
        ([1.0, 4.0], "two", 1.0),
        ([1.0, 4.0, 7.0], "two", 4.0),
        ([4.0, 1.0, 7.0], "least", 1.0),
    ],
)
def test_the_actor_maximises_the_smaller_of_two_values_and_the_mean_of_more(values, how, least):
    algorithm = make(num_critics=len(values), target_critics=how)
    fix_values(algorithm.critics, values)
    loss, gradient, figures = algorithm._improvement(observed(), gen(5))
    _, logprob, _ = algorithm._sample_choice(observed(), gen(5))
    torch.testing.assert_close(figures["q"], torch.full((B,), least))
    torch.testing.assert_close(loss, (ALPHA * logprob - least).mean().detach())
    # Constant values have no slope: what is left is the entropy's.
    expected = algorithm._actor_gradient(ALPHA * logprob.mean())
    for ours, theirs in zip(gradient, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


def test_the_actors_gradient_comes_through_the_smaller_critic():
    """Q_1 = 10 + sum a and Q_2 = -sum a - 10: the second is the smaller one, and decides."""
    algorithm = make(alpha=1e-6)
    fix_values(algorithm.critics, [10.0, -10.0])
    with torch.no_grad():
        # The hidden layer passes the sum of the chunk on; it is kept positive by its bias.
        first, last = algorithm.critics.weights[0], algorithm.critics.weights[1]
        first[:, -2 * H :, 0] = 1.0
        algorithm.critics.biases[0][:, 0, 0] = 100.0
        last[0, 0, 0], last[1, 0, 0] = 1.0, -1.0
        algorithm.critics.biases[1] -= torch.tensor([100.0, -100.0]).view(2, 1, 1)
    _, gradient, figures = algorithm._improvement(observed(), gen(5))
    choice, _, _ = algorithm._sample_choice(observed(), gen(5))
    torch.testing.assert_close(
        figures["q"], -choice.sum((1, 2)).detach() - 10, atol=1e-3, rtol=1e-3
    )
    expected = algorithm._actor_gradient(choice.sum((1, 2)).mean())
    for ours, theirs in zip(gradient, expected, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


# CrossQ.


def normed(x, dims):
    """Batch normalisation with the statistics of x itself."""
    return (x - x.mean(dims)) / (x.var(dims, correction=0) + 1e-5).sqrt()


def values_by_hand(critics, rows):
    """Q (E, rows): each layer's input is normalised over all rows together."""
    x = normed(rows, 0)
    values = []
    for e in range(critics.count):
        hidden = torch.relu(x @ critics.weights[0][e] + critics.biases[0][e])
        values.append((normed(hidden, 0) @ critics.weights[1][e] + critics.biases[1][e])[:, 0])
    return torch.stack(values)


def test_crossq_normalises_present_and_next_pairs_by_the_statistics_of_both():
    algorithm = make(critic_norm="batch")
    assert algorithm.target is None
    features, next_features = torch.randn(B, 7, generator=gen(1)), 3 + torch.randn(B, 7)
    choice, next_choice = torch.randn(B, H, 2, generator=gen(2)), torch.randn(B, H, 2) - 2
    rows = torch.cat(
        [
            torch.cat([features, choice.flatten(1)], 1),
            torch.cat([next_features, next_choice.flatten(1)], 1),
        ]
    )
    expected = values_by_hand(algorithm.critics, rows)
    q, next_q = algorithm._q_values(features, choice, next_features, next_choice)
    torch.testing.assert_close(q, expected[:, :B], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(next_q, expected[:, B:].detach(), atol=1e-4, rtol=1e-4)
    assert q.requires_grad and not next_q.requires_grad
    # One pass: the running statistics moved by one batch, of both.
    norm = algorithm.critics.norms[0]
    assert int(norm.num_batches_tracked) == 1
    torch.testing.assert_close(norm.running_mean, 0.01 * rows.mean(0))


def test_crossqs_actor_reads_the_running_statistics_and_leaves_them():
    algorithm = make(critic_norm="batch")
    critics = algorithm.critics
    stats = Means()
    for _ in range(3):
        algorithm._update_critics(chunks(), gen(), stats, following(algorithm))
    before = {k: v.clone() for k, v in critics.state_dict().items()}
    _, _, figures = algorithm._improvement(observed(), gen(5))
    choice, _, features = algorithm._sample_choice(observed(), gen(5))
    critics.eval()
    torch.testing.assert_close(figures["q"], critics(features, choice).amin(0).detach())
    critics.train()
    # With the batch's own statistics it would be another value.
    q = critics(features, choice).amin(0).detach()
    assert (q - figures["q"]).abs().max() > 1e-3
    algorithm = make(critic_norm="batch")
    algorithm.critics.load_state_dict(before)
    algorithm._improvement(observed(), gen(5))
    after = algorithm.critics.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert algorithm.critics.training
    assert all(p.requires_grad for p in algorithm.critics.parameters())
