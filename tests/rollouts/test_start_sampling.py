"""Starts are drawn by the variance of their success, rates stay those of an even draw, and episodes grow."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from coin_env import LIMIT, CoinEnv, Still
from point_reach import PointReach

from embodyrl.rollouts.batches import (
    Episode,
    drawn_success_rate,
    effective_episodes,
    success_rate,
)
from embodyrl.rollouts.collect import Player, collect_transitions
from embodyrl.rollouts.seeding import init_states
from embodyrl.rollouts.start_sampling import (
    MEMORY,
    NEW,
    POOL,
    Draws,
    grown_length,
    remembered,
    start_draws,
)
from embodyrl.rollouts.task_sampling import FLOOR, expected_variance, updated
from embodyrl.types import EnvSpec

TASKS = ("one", "two", "three")


def spec(num_init_states: int | None = None, tasks=TASKS) -> EnvSpec:
    return EnvSpec(
        "test/arm", 4, 4, 9, "box", 20.0, 20, {}, tasks=tasks, num_init_states=num_init_states
    )


def played(init: int, solved: int, failed: int) -> list[Episode]:
    outcomes = [True] * solved + [False] * failed
    return [Episode(init, "one", success, 0.0, 1) for success in outcomes]


@pytest.mark.parametrize(
    ("solved", "n", "mean", "prior"), [(0, 0, 0.5, 2), (3, 4, 0.9, 2), (7, 20, 0.2, 5)]
)
def test_the_expected_variance_is_the_integral_over_the_posterior(solved, n, mean, prior):
    p = (np.arange(400_000) + 0.5) / 400_000
    a = prior * mean + solved
    b = prior * (1 - mean) + n - solved
    density = np.exp((a - 1) * np.log(p) + (b - 1) * np.log1p(-p))
    expected = (density * p * (1 - p)).sum() / density.sum()
    assert expected_variance(solved, n, mean, prior) == pytest.approx(expected, rel=1e-3)


def test_starts_are_drawn_by_the_variance_under_a_prior_with_the_mean_of_all():
    record = {"4": (9.0, 10.0), "7": (1.0, 1.0), "9": (0.0, 1.0)}
    mean = (10 + 1) / (12 + 2)
    a = np.array([9, 1, 0]) + 2 * mean
    b = np.array([1, 0, 1]) + 2 * (1 - mean)
    variance = a * b / ((a + b) * (a + b + 1))
    starts, odds = start_draws(record)
    assert starts == (4, 7, 9)
    np.testing.assert_allclose(odds, variance / variance.sum())
    # Where most are solved, one failure says more than one success.
    assert odds[2] > 1.5 * odds[1]


def test_old_episodes_fade_and_what_says_least_is_forgotten_first():
    record = remembered({}, played(5, 0, 100))
    assert record["5"] == (0.0, pytest.approx(MEMORY, rel=0.05))
    record = remembered(record, played(5, 60, 0))
    assert record["5"][0] / record["5"][1] > 0.95
    # A person's episode says nothing of the policy.
    assert remembered(record, [Episode(5, "one", False, 0.0, 1, person=True)]) == record
    # The state that is always solved goes, those of which nothing is known yet stay.
    many = [e for init in range(100, 100 + POOL) for e in played(init, init % 2, 1 - init % 2)]
    record = remembered(record, many)
    assert len(record) == POOL and "5" not in record


@pytest.mark.parametrize("tasks", [(), (0.1, 0.6, 0.3)])
def test_half_of_the_draws_are_even_and_weights_make_all_of_them_so(tasks):
    finite = spec(11)
    draws = Draws(tasks=tasks, starts=(2, 4, 6), odds=(0.5, 0.3, 0.2))
    drawn = list(islice(init_states(finite, 3, 1, draws=draws), 20_000))
    assert drawn == list(islice(init_states(finite, 3, 1, draws=draws), 20_000))
    share = Counter(drawn)
    task_odds = tasks or tuple(len(range(task, 11, 3)) / 11 for task in range(3))
    expected = {}
    for init in range(11):
        even = task_odds[init % 3] / len(range(init % 3, 11, 3))
        again = dict(zip(draws.starts, draws.odds, strict=True)).get(init, 0.0)
        expected[init] = NEW * even + (1 - NEW) * again
        assert share[init] / 20_000 == pytest.approx(expected[init], abs=0.012)
        # The weight is even / drawn, exactly, and bounded.
        assert draws.weight(finite, init) == pytest.approx(1 / 11 / expected[init])
        assert draws.weight(finite, init) <= 1 / (NEW * (FLOOR / 3 if tasks else 1))
    assert sum(expected[i] * draws.weight(finite, i) for i in range(11)) == pytest.approx(1.0)


def test_the_rate_of_what_was_drawn_is_biased_and_the_weighted_one_is_not():
    limit = 200
    solved = np.random.default_rng(0).random(limit) < 0.8
    hard = tuple(np.flatnonzero(~solved).tolist())
    draws = Draws(starts=hard, odds=tuple([1 / len(hard)] * len(hard)))
    one = spec(limit, ("one",))
    episodes = [
        Episode(i, "one", bool(solved[i]), 0.0, 1, weight=draws.weight(one, i))
        for i in islice(init_states(one, 0, 0, draws=draws), 20_000)
    ]
    assert success_rate(episodes) == pytest.approx(solved.mean(), abs=0.01)
    assert drawn_success_rate(episodes) == pytest.approx(NEW * solved.mean(), abs=0.01)
    assert 0.5 * 20_000 < effective_episodes(episodes) < 20_000
    # A task's record follows the even draw, too.
    rate = updated({}, episodes[-400:])["one"]
    assert rate[0] / rate[1] == pytest.approx(solved.mean(), abs=0.15)
    even = played(0, 3, 1)
    assert success_rate(even) == drawn_success_rate(even) == 0.75
    assert effective_episodes(even) == 4


def test_of_endless_states_the_even_draws_alone_count():
    draws = Draws(starts=(5,), odds=(1.0,))
    endless = spec(None, ("one",))
    assert draws.weight(endless, 5) == 0.0
    assert draws.weight(endless, 6) == pytest.approx(1 / NEW)
    assert Draws().weight(endless, 5) == 1.0
    assert np.isnan(success_rate([Episode(5, "one", True, 0.0, 1, weight=0.0)]))


def test_what_workers_are_sent_says_the_same():
    draws = Draws((0.25, 0.75), (3, 2**31 - 1), (0.1, 0.9), 0.3)
    assert Draws.of_tensors(draws.tensors()) == draws
    assert Draws.of_tensors(Draws().tensors()) == Draws()


def test_episodes_carry_the_weight_of_the_draw_that_began_them():
    player = Player(CoinEnv(num_envs=8), seed=1)
    draws = Draws(starts=(7, 8), odds=(0.5, 0.5))
    generator = torch.Generator().manual_seed(0)
    player.begin(0, draws)
    stream = player.new_episodes()
    batch = collect_transitions(stream, Still().act, LIMIT // 4 + 1, generator=generator)
    # The next iteration draws evenly; what began before keeps its weight.
    player.begin(1)
    batch2 = collect_transitions(
        player.ongoing_episodes(), Still().act, 2 * LIMIT // 4, generator=generator
    )
    for episode in [*batch.episodes, *batch2.episodes]:
        weights = {0.0} if episode.init in (7, 8) else {1.0, 1 / NEW}
        assert episode.weight in weights
    assert {e.weight for e in batch2.episodes} == {0.0, 1.0, 1 / NEW}


def test_short_episodes_are_truncated_and_scored_after_their_own_time():
    player = Player(PointReach(num_envs=4))
    player.begin(0, Draws(length=0.5))
    stream = player.new_episodes()

    def still(obs, generator):
        actions = torch.zeros(len(obs), 3, 2)
        return actions, actions

    batch = collect_transitions(stream, still, 6, generator=torch.Generator().manual_seed(0))
    # Half of 16 actions are 8: the first chunk of three that reaches them is the third.
    truncated = batch.chunks.truncated.view(6, 4)
    assert truncated[[2, 5]].all() and truncated.sum() == 8
    assert not batch.chunks.terminated.any()
    assert [e.length for e in batch.episodes] == [9] * 8
    # Without a length of its own an episode ends with the env's.
    player.begin(1)
    player.new_episodes()
    batch = collect_transitions(
        player.ongoing_episodes(), still, 6, generator=torch.Generator().manual_seed(0)
    )
    assert [e.length for e in batch.episodes] == [16] * 4


def test_the_length_grows_to_the_whole_in_half_of_the_run():
    assert grown_length(0.4, 0.0) == 0.4
    assert grown_length(0.4, 0.25) == pytest.approx(0.7)
    assert grown_length(0.4, 0.5) == grown_length(0.4, 0.9) == 1.0
    assert grown_length(1.0, 0.0) == 1.0
    tasks = EnvSpec("t", 1, 1, 1, "box", 20.0, 50, {}, tasks=("a", "b"), task_steps=(50, 25))
    assert [Draws(length=0.5).steps(tasks, init) for init in (0, 1)] == [25, 13]
    assert Draws().steps(tasks, 0) == 0
