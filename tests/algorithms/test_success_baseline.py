"""Single episodes compared with the record of their instruction: closed forms, learning, checkpoints."""

import pytest
import torch
from coin_env import CoinEnv

from embodyrl.algorithms.grpo import GRPO, GRPOConfig
from embodyrl.algorithms.success_baseline import SuccessBaseline
from embodyrl.build import make_policy
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.rollouts.batches import Episode, EpisodeBatch, GroupBatch
from embodyrl.rollouts.collect import Player
from embodyrl.storage import checkpoint
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("coin", 8, 1, 1, "box", 10.0, 20, {})
SINGLE = {"group_size": 1, "baseline": "tracked"}


def make_grpo(**settings):
    policy = make_policy(FlowMLPConfig(width=16, layers=1, critic_width=8, horizon=4), SPEC, 0)
    usual = {"minibatch_size": 16, "epochs": 3, "lr": 1e-3, "lr_warmup": 0}
    return GRPO(GRPOConfig(**usual | SINGLE | settings), policy)


def make_batch(policy, episodes):
    """Episodes of 1 + i % 3 chunks each."""
    number = torch.tensor([i for i in range(len(episodes)) for _ in range(1 + i % 3)])
    proprio = torch.randn(len(number), 1, generator=torch.Generator().manual_seed(0))
    obs = Obs({}, proprio, ["push"] * len(number))
    sample = policy.sample(obs, generator=torch.Generator().manual_seed(1), mode="train")
    kept = EpisodeBatch(obs, sample.trace, sample.logprob, number, list(episodes), 100)
    return GroupBatch(kept, episodes, 100, 1)


def update(grpo, batch):
    return grpo.update(batch, progress=0.0, generator=torch.Generator().manual_seed(0))


def episode(instruction, success, **settings):
    return Episode(0, "push", bool(success), 0.0, 10, instruction=instruction, **settings)


def test_the_baseline_is_the_posterior_mean_of_faded_episodes():
    expected = SuccessBaseline()
    toss, push = episode("toss", True), episode("push", False)
    assert expected.of([toss, push]).tolist() == [0.5, 0.5]  # nothing is known yet
    expected.note([toss, push, episode("toss", False), toss, episode("toss", False, person=True)])
    keep = 63 / 64
    solved, played = keep**2 + 1, keep**2 + keep + 1
    assert expected.of([toss]).item() == pytest.approx((0.5 + solved) / (1 + played))
    assert expected.of([push]).item() == pytest.approx(0.5 / 2)
    # A record of many episodes ends at their rate, less what the prior is worth.
    expected.note([episode("push", i % 4 == 0) for i in range(4000)])
    assert expected.of([push]).item() == pytest.approx(0.25, abs=0.02)
    again = SuccessBaseline()
    again.load_state_dict(expected.state_dict())
    assert again.record == expected.record


def test_advantages_by_hand():
    grpo = make_grpo(normalize=False)
    grpo.expected.note([episode("hard", False)] * 1000 + [episode("easy", True)] * 1000)
    low, high = 0.5 / 65, 64.5 / 65  # 64 faded episodes
    episodes = [episode(said, won) for said in ("hard", "easy") for won in (True, False)]
    expected = [1 - low, -low, 1 - high, -high]
    assert grpo._advantages(episodes).tolist() == pytest.approx(expected, abs=1e-4)
    # A rare success weighs most, and an expected one hardly anything.
    whitened = make_grpo()
    whitened.expected.record = grpo.expected.record
    found = whitened._advantages(episodes)
    assert found.mean().abs() < 1e-6 and found.std(correction=0).item() == pytest.approx(1)
    assert found.argmax() == 0 and found.argmin() == 3
    assert whitened._advantages([episode("hard", False)] * 4).tolist() == [0.0] * 4


def test_the_baseline_leaves_the_policy_gradient_as_it_is():
    """E[(R - b) d log p] over the outcomes of one decision is E[R d log p], for every b."""
    theta = torch.tensor(0.3, requires_grad=True)
    p = theta.sigmoid()
    true = torch.autograd.grad(p, theta, retain_graph=True)[0]
    grpo = make_grpo(normalize=False)
    grpo.expected.note([episode("toss", True)] * 7)
    win, lose = grpo._advantages([episode("toss", True), episode("toss", False)])
    q = p.detach()
    estimate = q * win * p.log() + (1 - q) * lose * (1 - p).log()
    torch.testing.assert_close(torch.autograd.grad(estimate, theta)[0], true)


def test_single_episodes_that_succeed_become_likelier_and_the_others_less():
    grpo = make_grpo()
    episodes = [episode("push", i % 2) for i in range(16)]
    batch = make_batch(grpo.policy, episodes)
    stats = update(grpo, batch)
    with torch.no_grad():
        new = grpo.policy.evaluate(batch.kept.obs, batch.kept.trace).logprob
    moved = (new - batch.kept.logprob).sum(1)
    won = torch.tensor([e.success for e in episodes])[batch.kept.episode]
    assert moved[won].mean() > 0.01 and moved[~won].mean() < -0.01
    # The record was empty when they were compared, and holds them now.
    assert stats["baseline"] == 0.5 and stats["groups"] == 16
    assert grpo.expected.of(episodes[:1]).item() == pytest.approx(0.5, abs=0.03)
    solved, played = grpo.expected.record["push"]
    again = update(grpo, batch)["baseline"]
    assert again == pytest.approx((0.5 + solved) / (1 + played)) != 0.5


def test_each_initial_state_is_played_once_and_none_is_dropped():
    grpo = make_grpo(num_episodes=16)
    player = Player(CoinEnv(8))
    player.states = iter(range(100))
    batch = grpo.collect(player, generator=torch.Generator())
    assert [e.init for e in batch.kept.episodes] == list(range(16)) and batch.rounds == 1
    assert {e.success for e in batch.kept.episodes} == {True, False}
    assert {e.instruction for e in batch.episodes} == {"toss"}


def test_the_record_survives_a_checkpoint(tmp_path):
    a = make_grpo()
    batch = make_batch(a.policy, [episode("push", i % 2) for i in range(8)])
    update(a, batch)
    states = {"policy": a.result.state_dict(), "algorithm": a.state_dict()}
    checkpoint.save(tmp_path / "step_000001", states, {})
    saved, _ = checkpoint.load(tmp_path / "step_000001")
    b = make_grpo()
    b.result.load_state_dict(saved["policy"])
    b.load_state_dict(saved["algorithm"])
    assert b.expected.record == a.expected.record
    assert update(b, batch) == update(a, batch)
