"""Groups that begin while others are played: what is kept is what one env would find, playing in order."""

import numpy as np
import pytest
import torch
from coin_env import FAST, LIMIT, CoinEnv, Still

from embodyrl.rollouts.batches import Episode
from embodyrl.rollouts.collect import collect_episodes
from embodyrl.rollouts.episodes import EndedEpisode, EpisodeStream
from embodyrl.rollouts.group_draws import GroupDraws
from embodyrl.types import ActionSample, DenoisingTrace, Obs

G, MOST = 4, 40


def informative(group):
    return None not in group and 0 < sum(e.success for e in group) < len(group)


def hopeless(ended):
    return None in ended


def draws(wanted, ahead, most=MOST, judge=hopeless, states=None):
    options = {"ahead": ahead, "informative": informative, "hopeless": judge}
    return GroupDraws(range(10**6) if states is None else states, G, wanted, most, **options)


class Table(CoinEnv):
    """What an episode comes to is known beforehand: success at action 3, or failure at action 20.

    Episode i of group g has the outcome (g, i) of a table; which of a group an env plays is counted.
    """

    def __init__(self, num_envs, table, broken=()):
        super().__init__(num_envs)
        self.table, self.broken = table, broken
        self.begun = np.zeros(len(table), int)
        self.lucky = torch.zeros(num_envs, dtype=torch.bool)
        self.steps = 0

    def _reset(self, env_ids, inits):
        for k, g in zip(env_ids, inits, strict=True):
            # Of the last groups a few are asked for once more than they have episodes.
            self.lucky[k] = bool(self.table[g][self.begun[g] % G])
            self.begun[g] += 1

    def _step(self, actions, active):
        tick = super()._step(actions, active)
        solved = self.lucky & (self._elapsed + 1 >= FAST)
        self.steps += int(active.sum())
        tick.success, tick.terminated, tick.reward = solved, solved, solved.float()
        return tick


class Traced(Still):
    """With a trace, which a rollout of groups needs."""

    def sample(self, obs, *, generator, mode):
        n = len(obs)
        trace = DenoisingTrace(torch.zeros(n, 2, self.horizon, 1), torch.ones(n, 1).bool())
        return ActionSample(torch.zeros(n, self.horizon, 1), trace, torch.zeros(n, 1))


def in_order(table, wanted, most=MOST):
    """The first informative groups, as one env finds them."""
    good = [g for g in range(most) if 0 < sum(table[g]) < G]
    return good[:wanted]


def play(num_envs, table, wanted, ahead, **options):
    env = Table(num_envs, table)
    found = draws(wanted, ahead, **options)
    batch = collect_episodes(env, Traced(), found, generator=torch.Generator())
    return env, found, batch


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_envs", [1, 3, 4, 7, 12])
def test_the_first_informative_groups_are_kept_however_they_end(num_envs, ahead):
    rng = np.random.default_rng(num_envs)
    for p in (0.1, 0.5, 0.9):
        table = rng.random((MOST, G)) < p
        _, found, batch = play(num_envs, table, 3, ahead)
        assert found.kept == in_order(table, 3)
        # Their episodes are whole, and have the outcomes of the table.
        for g in found.kept:
            group = batch.episodes[g * G : (g + 1) * G]
            assert sorted(e.success for e in group) == sorted(table[g].tolist())
            assert all(e.init == g and e.length == (FAST if e.success else LIMIT) for e in group)
            chunks = [int((batch.episode == i).sum()) for i in range(g * G, (g + 1) * G)]
            assert chunks == [-(-e.length // 4) for e in group]


def test_what_ends_first_is_no_fair_sample():
    """The rule by order means something: groups that end first are those with more successes."""
    # Groups that begin later may end sooner, where their failure began sooner than another's.
    first, later = [True, True, True, False], [True, False, False, False]
    order = draws(1, ahead=True)
    result = {won: Episode(0, "toss", won, 0.0, 1) for won in (True, False)}
    order.note([EndedEpisode(0, G + i, 1, result[won]) for i, won in enumerate(first)])
    assert order.kept == [1] and order.last == 1  # group 0 may still come before it
    assert order.needed(0) and not order.needed(2 * G)
    order.note([EndedEpisode(0, i, 0, result[won]) for i, won in enumerate(later)])
    assert order.kept == [0] and order.last == 0
    assert not order.needed(0) and not order.needed(G)
    assert order.room(2 * G) == 0


def test_as_needed_plays_no_group_in_vain_and_ahead_no_env_idles():
    # Groups 0 and 2 are solved throughout; the others are informative.
    mixed, solved = [True, True, False, False], [True] * G
    table = np.array([solved, mixed, solved] + [mixed] * (MOST - 3))
    lazy, found, batch = play(8, table, 2, ahead=False)
    # Two groups begin, and one for each that is dropped, as soon as that is known.
    assert lazy.begun[:5].tolist() == [G, G, G, G, 0] and found.kept == [1, 3]
    assert None not in batch.episodes
    assert batch.env_steps == lazy.steps == 2 * G * FAST + 2 * (2 * FAST + 2 * LIMIT)
    # Ahead, free envs take groups that are cut in the end.
    eager, found, batch = play(8, table, 2, ahead=True)
    assert found.kept == [1, 3]
    assert eager.begun.sum() > lazy.begun.sum() and None in batch.episodes
    assert eager.steps > lazy.steps


def test_groups_that_cannot_count_any_more_are_cut():
    table = np.array([[True, True, True, False]] * 2 + [[True, False, False, False]] * (MOST - 2))

    def at_most_half(group):
        return informative(group) and sum(e.success for e in group) <= 2

    def no_more(ended):
        return sum(e.success for e in ended if e) > 2

    def run(judge, num_envs=8):
        env = Table(num_envs, table)
        found = draws(2, False, judge=judge)
        found.informative = at_most_half
        batch = collect_episodes(env, Traced(), found, generator=torch.Generator())
        return env, found, batch

    patient, kept, _ = run(lambda ended: False)
    quick, found, batch = run(no_more)
    assert found.kept == kept.kept == [2, 3]
    assert quick.steps < patient.steps
    # What was cut has no result; what had ended has.
    assert [e and e.success for e in batch.episodes[:4]] == [True, True, True, None]
    # The rest of a group that was dropped before it had begun is not played at all.
    alone, found, batch = run(no_more, 1)
    assert found.kept == [2, 3] and alone.steps == 6 * FAST + 2 * (FAST + 3 * LIMIT)
    assert [e and e.success for e in batch.episodes[:4]] == [True, True, True, None]


def test_no_more_groups_begin_than_allowed():
    table = np.ones((MOST, G), bool)
    for ahead in (False, True):
        env, found, batch = play(6, table, 2, ahead, most=5)
        assert env.begun.sum() == 5 * G == len(batch.episodes)
        assert found.kept == [] and set(found.verdicts.values()) == {False}
    # And where initial states run out there is an end, too.
    env, found, batch = play(6, table, 2, False, states=range(3))
    assert len(batch.episodes) == 3 * G and found.kept == []


def test_an_abandoned_episode_has_no_result():
    stream = EpisodeStream(CoinEnv(2), [0, 1, 2])
    stream.fill()
    stream.abandon([1])
    assert stream.playing.tolist() == [0, -1]
    assert stream.fill(0) == [] and stream.fill() == [1]
    ended = []
    while stream.running:
        ended += stream.advance(stream.env.step(torch.zeros(2, 4, 1)))
        stream.fill()
    assert sorted(one.number for one in ended) == [0, 2]
    assert isinstance(stream.obs, Obs)
