"""The evaluation protocol: outcomes belong to (seed, initial state) alone, whatever runs beside and whoever films."""

import time
from functools import partial

import pytest
import torch

from embodyrl.errors import UserError
from embodyrl.functional.flow import randn
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv
from embodyrl.training.evaluate import PACE, first_inits, tell_progress
from embodyrl.types import ActionSample

GAP = slice(18, 21)
"""Columns of MuJoCo's privileged state with the way from the hand to the ball."""


class Chaser:
    """Goes for the ball with a noise that decides whether it arrives in time."""

    def sample(self, obs, *, generator, mode):
        assert mode == "eval"
        gap = torch.nn.functional.pad(obs.privileged[:, GAP] / (5 * 0.035), (0, 1))
        return ActionSample((gap[:, None] + 0.7 * randn((len(obs), 5, 4), generator)).clamp(-1, 1))


def make_env(num_envs: int, cls=MujocoEnv, **settings) -> MujocoEnv:
    settings = {"task": "reach", "max_episode_steps": 12, "num_threads": 1, **settings}
    return cls(MujocoConfig(num_envs=num_envs, renderer="none", split="eval", **settings))


INITS = list(range(3, 14))


@pytest.fixture(scope="module")
def reference():
    return evaluate(make_env(1), Chaser(), INITS)


def test_every_state_is_scored_once_in_the_order_asked_for(reference):
    assert [e.init for e in reference.episodes] == INITS
    assert (
        0 < reference.successes < len(INITS)
    )  # both outcomes occur, or the comparisons below say little
    assert all(1 <= e.length <= 12 for e in reference.episodes)
    assert all(e.success or e.length == 12 for e in reference.episodes)
    assert all(e.reward == float(e.success) for e in reference.episodes)
    assert reference.faults == 0 and reference.frames == {}


@pytest.mark.parametrize("num_envs", [2, 4, 16])
def test_results_do_not_depend_on_the_number_of_envs(reference, num_envs):
    assert evaluate(make_env(num_envs), Chaser(), INITS).episodes == reference.episodes


def test_results_do_not_depend_on_the_order_or_on_what_the_env_did_before(reference):
    env = make_env(3)
    shuffled = [INITS[k] for k in (4, 0, 9, 2, 10, 7, 1, 8, 3, 6, 5)]
    assert (
        evaluate(env, Chaser(), shuffled, seed=1).episodes
        != evaluate(env, Chaser(), shuffled).episodes
    )
    by_init = {e.init: e for e in evaluate(env, Chaser(), shuffled).episodes}
    assert [by_init[i] for i in INITS] == reference.episodes


def test_filming_does_not_change_the_outcome(reference):
    filmed = evaluate(make_env(3), Chaser(), INITS, film=INITS[2:7])
    assert filmed.episodes == reference.episodes
    assert sorted(filmed.frames) == INITS[2:7]
    for episode in filmed.episodes[2:7]:
        assert len(filmed.frames[episode.init]) == episode.length + 1


def test_progress_is_told_and_may_give_the_evaluation_up():
    told = []

    def note(done, scored):
        told.append((done, scored))

    result = evaluate(make_env(2), Chaser(), INITS[:4], progress=note)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert all(len(scored) <= done for done, scored in told)
    assert told[-1] == (4, told[-1][1])
    assert sorted(e.init for e in told[-1][1]) == [e.init for e in result.episodes]

    def stop(done, scored):
        if done:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        evaluate(make_env(2), Chaser(), INITS, progress=stop)


class Breaks(MujocoEnv):
    """Explodes at the third action of the episodes from state 5, the first ``times`` times."""

    times = 1

    def _step(self, actions, active):
        for k in range(self.spec.num_envs):
            if self.times and active[k] and self.init[k] == 5 and self._elapsed[k] == 2:
                self.times, self._state[k, 15] = self.times - 1, float("nan")
        return super()._step(actions, active)


@pytest.mark.parametrize("film", [(), (5, 6)])
def test_a_broken_episode_is_run_again_from_its_start(reference, film, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes MUJOCO_LOG.TXT where it stands
    result = evaluate(make_env(3, Breaks), Chaser(), INITS, film=film)
    assert result.faults == 1 and result.episodes == reference.episodes
    for init, frames in result.frames.items():
        assert len(frames) == reference.episodes[INITS.index(init)].length + 1


def test_a_simulator_that_always_breaks_is_given_up_in_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = make_env(2, Breaks)
    env.times = 10**6
    with pytest.raises(UserError, match=r"mujoco/reach broke 5 times .* \(initial state 5\)"):
        evaluate(env, Chaser(), INITS)


def test_empty_and_repeated_lists_are_refused_in_words():
    env = make_env(2)
    with pytest.raises(UserError, match="nothing to evaluate"):
        evaluate(env, Chaser(), [])
    with pytest.raises(UserError, match="Initial state 4 is listed twice"):
        evaluate(env, Chaser(), [3, 4, 5, 4])


def test_first_inits_are_the_same_for_every_policy_and_no_more_than_there_are():
    spec = make_env(1).spec
    assert first_inits(spec, 5) == [0, 1, 2, 3, 4]
    object.__setattr__(spec, "num_init_states", 3)
    assert first_inits(spec, 5) == [0, 1, 2]


def test_an_evaluation_says_how_far_it_is_but_not_at_every_episode():
    often: list[str] = []
    seldom: list[str] = []
    long_ago = [time.monotonic() - PACE]
    evaluate(
        make_env(2), Chaser(), INITS, progress=partial(tell_progress, seldom.append, 11, long_ago)
    )
    assert len(seldom) == 1

    def always(done, scored):
        tell_progress(often.append, 11, [-PACE], done, scored)

    evaluate(make_env(2), Chaser(), INITS, progress=always)
    assert often[-1] == "11 of 11 episodes"
