"""A kept success stands in for a failure where a whole group fails; the median of a group is left out."""

import copy
import math

import pytest
import torch

from embodyrl.algorithms.grpo import GRPOConfig
from embodyrl.algorithms.success_replay import SuccessReplay
from embodyrl.errors import UserError
from embodyrl.functional.returns import group_advantages, median_pivots
from embodyrl.rollouts.batches import Episode, GroupBatch
from embodyrl.rollouts.collect import Player
from embodyrl.storage import checkpoint
from tests.algorithms.test_grpo import Chaser, make_batch, make_env, make_grpo, update


def episodes(init: int, solved: list[bool]) -> list[Episode]:
    return [Episode(init, "push", won, float(won), 10) for won in solved]


def batch_of(grpo, outcomes, seed=0) -> GroupBatch:
    return make_batch(grpo.policy, outcomes, seed)


def test_the_newest_success_of_each_start_is_kept_and_the_oldest_start_goes():
    grpo = make_grpo()
    replay = SuccessReplay(2)
    first = batch_of(grpo, episodes(1, [False, True]) + episodes(2, [True, False])).kept
    replay.store(first)
    assert list(replay.episodes) == [1, 2]
    own = replay.episodes[1]
    rows = (first.episode == 1).nonzero().flatten()
    assert torch.equal(own.logprob, first.logprob[rows]) and len(own.obs) == len(rows)
    newer = batch_of(grpo, episodes(1, [True]) + episodes(3, [True]), seed=5).kept
    replay.store(newer)
    assert list(replay.episodes) == [1, 3]
    assert torch.equal(replay.episodes[1].trace.x, newer.trace.x[newer.episode == 0])


def test_a_group_that_fails_gets_the_success_from_its_own_start_alone():
    grpo = make_grpo()
    replay = SuccessReplay(4)
    replay.store(batch_of(grpo, episodes(1, [True])).kept)
    failed = batch_of(grpo, episodes(7, [False] * 4) + episodes(1, [False] * 4), seed=1).kept
    rescued = replay.rescued(failed, 4)
    assert [(e.init, e.success) for e in rescued.episodes] == [(1, False)] * 3 + [(1, True)]
    chunks = [int((failed.episode == i).sum()) for i in (4, 5, 6)]
    assert torch.bincount(rescued.episode).tolist() == [*chunks, len(replay.episodes[1].logprob)]
    assert torch.equal(rescued.logprob[rescued.episode == 3], replay.episodes[1].logprob)
    assert SuccessReplay(4).rescued(failed, 4) is None
    # Its advantage is that of one success in four.
    worth = torch.tensor([[float(e.success) for e in rescued.episodes]])
    expected = (1 - 1 / 4) / math.sqrt(1 * 3 / (4 * 3))
    assert group_advantages(worth)[0, 3].item() == pytest.approx(expected, rel=1e-4)


def test_an_update_learns_from_it():
    grpo = make_grpo(replay_successes=4)
    mixed = batch_of(grpo, episodes(1, [True, False, False, False]))
    assert update(make_grpo(replay_successes=4), mixed)["replayed_groups"] == 0.0
    grpo.successes.store(mixed.kept)
    failed = batch_of(grpo, episodes(1, [False] * 4), seed=2)
    failed.failed, failed.kept = failed.kept, failed.kept.select([])
    own = grpo.successes.episodes[1]

    def likelihood():
        with torch.no_grad():
            return grpo.policy.evaluate(own.obs, own.trace).logprob.sum().item()

    before = likelihood()
    stats = update(grpo, failed)
    assert stats["replayed_groups"] == stats["groups"] == 1.0
    assert likelihood() > before
    # A plain run learns nothing from such a group.
    plain = make_grpo()
    weights = copy.deepcopy(plain.policy.state_dict())
    failed.failed = None
    assert "replayed_groups" not in update(plain, failed)
    assert all(torch.equal(v, weights[k]) for k, v in plain.policy.state_dict().items())


def test_collecting_hands_over_the_groups_that_fail():
    grpo = make_grpo(replay_successes=4, num_episodes=8, max_rounds=2, keep_min=0.1, keep_max=0.9)
    grpo.policy = Chaser()
    batch = grpo.collect(
        Player(make_env(4, max_episode_steps=5)), generator=torch.Generator().manual_seed(0)
    )
    groups = [batch.episodes[i : i + 4] for i in range(0, len(batch.episodes), 4)]
    lost = [g for g in groups if not any(e.success for e in g)]
    assert lost and batch.failed.episodes == [e for g in lost for e in g]
    merged = GroupBatch.merge([batch, batch])
    assert len(merged.failed.episodes) == 2 * len(batch.failed.episodes)


def test_kept_successes_survive_a_checkpoint(tmp_path):
    grpo = make_grpo(replay_successes=4)
    update(grpo, batch_of(grpo, episodes(1, [True, False, False, False])))
    checkpoint.save(tmp_path / "step_000001", {"algorithm": grpo.state_dict()}, {})
    other = make_grpo(replay_successes=4)
    other.load_state_dict(checkpoint.load(tmp_path / "step_000001")[0]["algorithm"])
    mine, theirs = grpo.successes.episodes[1], other.successes.episodes[1]
    assert mine.episodes == theirs.episodes
    for a, b in ((mine.obs.proprio, theirs.obs.proprio), (mine.trace.x, theirs.trace.x)):
        assert torch.equal(a, b)
    assert mine.obs.instruction == theirs.obs.instruction
    assert torch.equal(mine.episode, theirs.episode)


def test_successes_need_success_among_the_rewards():
    with pytest.raises(UserError, match=r"replay_successes is 8, but algorithm.rewards leaves"):
        GRPOConfig(replay_successes=8, rewards=("return",))
    with pytest.raises(UserError, match="keep_min=0 learns from groups that fail"):
        GRPOConfig(replay_successes=8, keep_min=0.0)


# The median.


def test_one_episode_of_an_odd_group_is_its_median():
    returns = torch.tensor([[3.0, 1.0, 2.0, 9.0, 5.0], [0.0, 1.0, 0.0, 1.0, 1.0]])
    pivots = median_pivots(returns)
    assert pivots.sum(1).tolist() == [1, 1]
    assert torch.equal(returns[pivots], returns.median(dim=1).values)
    assert (group_advantages(returns, "median")[pivots] == 0).all()
    assert not median_pivots(returns[:, :4]).any()


def test_the_median_is_not_learned_from():
    grpo = make_grpo(group_size=3, num_episodes=6, baseline="median", keep_max=1.0)
    solved = [True, False, False]
    batch = batch_of(grpo, episodes(1, solved) + episodes(2, solved))
    pivots = median_pivots(torch.tensor([[1.0, 0.0, 0.0]] * 2)).flatten()
    rows = pivots[batch.kept.episode]
    assert 0 < rows.sum() < len(rows)
    # What it did may be anything: it is not read.
    batch.kept.logprob[rows] = float("nan")
    stats = update(grpo, batch)
    assert math.isfinite(stats["policy_loss"]) and stats["skipped_steps"] == 0.0
    # With the mean as the baseline every episode is.
    mean = make_grpo(group_size=3, num_episodes=6, keep_max=1.0)
    assert update(mean, batch)["skipped_steps"] > 0
