"""What a stream of episodes hands out to be scored: no sample of those that end first."""

import pytest
import torch
from coin_env import FAST, LIMIT, CoinEnv, Still

from embodyrl.functional.intervals import wilson
from embodyrl.rollouts.batches import Episode, by_policy, mean_return, success_rate
from embodyrl.rollouts.collect import Player, collect_episodes, collect_transitions
from embodyrl.rollouts.episodes import EpisodeStream
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.types import ActionSample, DenoisingTrace, Obs


def rates(player, iterations, chunks=2):
    """Episodes that each iteration of an off-policy algorithm scores."""
    generator = torch.Generator()
    for i in range(iterations):
        player.begin(i)
        batch = collect_transitions(
            player.ongoing_episodes(), Still().act, chunks, generator=generator
        )
        yield batch.episodes


@pytest.mark.parametrize("num_envs", [5, 64, 400])
def test_the_training_rate_is_unbiased_from_the_first_print_and_after_every_restart(num_envs):
    player = Player(CoinEnv(num_envs))
    everything = []
    for _ in range(3):
        for i, episodes in enumerate(rates(player, 12)):
            # An iteration has 8 actions: nothing is said before action 20, and then all 64 first.
            if 8 * (i + 1) < LIMIT:
                assert episodes == []
            if 8 * i < LIMIT <= 8 * (i + 1):
                assert len(episodes) >= num_envs
            if len(episodes) >= 20:
                low, high = wilson(sum(e.success for e in episodes), len(episodes), 0.999)
                assert low < 0.5 < high
            everything += episodes
        player.restart_episodes()  # as after a checkpoint or an evaluation
    low, high = wilson(sum(e.success for e in everything), len(everything), 0.999)
    assert low < 0.5 < high
    assert {e.length for e in everything} == {FAST, LIMIT}


def test_episodes_that_have_ended_first_are_biased():
    """The test above means something: those that had ended by then were nearly all solved."""
    stream = EpisodeStream(CoinEnv(400), iter(range(10**6)))
    stream.fill()
    ended = []
    for _ in range(4):
        ended += stream.advance(stream.env.step(torch.zeros(400, 4, 1)))
        stream.fill()
    assert len(ended) > 300 and all(one.result.success for one in ended)
    assert stream.scored() == []


def test_an_episode_says_with_which_sentence_it_was_played():
    class Numbered(CoinEnv):
        """Each initial state has a sentence of its own."""

        def _observe(self, env_ids):
            said = [f"toss {init}" for init in self.init]
            return Obs({}, torch.zeros(self.spec.num_envs, 1), said)

    stream = EpisodeStream(Numbered(3), [7, 8, 9, 10, 11])
    stream.fill()
    ended = []
    while stream.running:
        ended += stream.advance(stream.env.step(torch.zeros(3, 4, 1)))
        stream.fill()
    assert {one.result.instruction for one in ended} == {f"toss {i}" for i in range(7, 12)}
    assert all(one.result.instruction == f"toss {one.init}" for one in ended)


def test_a_rollout_shorter_than_an_episode_scores_nothing():
    player = Player(CoinEnv(64))
    for episodes in rates(player, 6):
        player.restart_episodes()
        assert episodes == []


@pytest.mark.parametrize("num_envs", [3, 16, 100])
def test_running_intervals_of_an_evaluation_include_its_result(num_envs):
    said = []

    def note(done, scored):
        assert len(scored) <= done
        if scored:
            said.append((sum(e.success for e in scored), len(scored)))

    result = evaluate(CoinEnv(num_envs), Still(), range(200), progress=note)
    final = result.successes / 200
    assert 0.4 < final < 0.6 and said[-1] == (result.successes, 200)
    assert len(said) > 3
    for k, n in said:
        low, high = wilson(k, n, 0.999)
        assert low <= final <= high


def test_success_once_and_at_the_end_are_both_kept():
    flickers = evaluate(
        CoinEnv(8, terminate_on_success=False, flicker=True), Still(), range(40)
    ).episodes
    assert not any(e.success for e in flickers)
    assert 10 < sum(e.success_once for e in flickers) < 30
    assert all(e.length == LIMIT for e in flickers)
    ends = evaluate(CoinEnv(8, flicker=True), Still(), range(40)).episodes
    assert [e.success for e in ends] == [e.success_once for e in flickers]
    assert all(e.length == (FAST if e.success else LIMIT) for e in ends)


def test_a_group_that_ends_at_its_first_success_has_it_though_the_chunk_goes_on():
    class Traced(Still):
        def sample(self, obs, *, generator, mode):
            n = len(obs)
            trace = DenoisingTrace(torch.zeros(n, 2, 4, 1), torch.ones(n, 1, dtype=torch.bool))
            return ActionSample(torch.zeros(n, 4, 1), trace, torch.zeros(n, 1))

    env = CoinEnv(4, terminate_on_success=False, flicker=True)
    batch = collect_episodes(env, Traced(), list(range(40)), generator=torch.Generator())
    assert 10 < sum(e.success for e in batch.episodes) < 30
    assert all(e.success == e.success_once for e in batch.episodes)


def test_an_episode_with_a_persons_actions_is_in_no_rate():
    class Helped(CoinEnv):
        def _step(self, actions, active):
            tick = super()._step(actions, active)
            tick.human = (torch.as_tensor(self.init) % 4 == 0) & (self._elapsed == 1)
            tick.taken = actions
            return tick

    episodes = evaluate(Helped(4), Still(), range(12)).episodes
    assert [e.person for e in episodes] == [i % 4 == 0 for i in range(12)]
    counted = by_policy(episodes)
    assert [e.init for e in counted] == [i for i in range(12) if i % 4]
    assert success_rate(episodes) == sum(e.success for e in counted) / 9
    assert mean_return(episodes) == sum(e.reward for e in counted) / 9
    nobody = success_rate([Episode(0, "t", False, 0.0, 1, person=True)])
    assert nobody != nobody  # NaN: there is no rate of no episodes
