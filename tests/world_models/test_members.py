"""Which network a dream follows: an ensemble made by hand, whose every answer is known."""

import pytest
import torch
from known_members import DRIFT, HORIZON, UNIT, dreams, save, three
from torch import nn

from embodyrl import checks
from embodyrl.errors import UserError
from embodyrl.world_models.env import WorldModelConfig, WorldModelEnv
from embodyrl.world_models.members import Members, least_promising
from embodyrl.world_models.model import WorldModel


def test_the_mean_and_any_one_of_the_courses_are_sums_of_actions_and_drift() -> None:
    state = three()
    start = torch.tensor([[0.1, 0.2, 0.3], [0.0, 0.0, -1.0], [1.0, 1.0, 0.0]])
    actions = torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(0))
    count = torch.tensor([4, 1, 2])
    moved = torch.stack([actions[k, :n].sum(0) for k, n in enumerate(count.tolist())])

    def expected(drift: torch.Tensor) -> torch.Tensor:
        return start + torch.cat([moved, (count * drift)[:, None]], dim=1)

    mean, spread = state.roll(start, actions, count)
    torch.testing.assert_close(mean, expected(DRIFT.mean().expand(3)))
    # Every row has its own network, and what the others do in that row changes nothing.
    index = torch.tensor([2, 0, 1])
    one, apart = state.roll(start, actions, count, lambda courses: index)
    torch.testing.assert_close(one, expected(DRIFT[index]))
    torch.testing.assert_close(apart, spread)
    torch.testing.assert_close(spread, count * DRIFT.std(correction=0) / 3**0.5 / UNIT)
    # The courses hold every state on the way, and rest when the actions are over.
    courses = state.courses(start, actions, count)
    assert courses.shape == (3, 5, 3, 3)
    torch.testing.assert_close(courses[:, 2, 1], courses[:, 4, 1])
    torch.testing.assert_close(courses[2, 1, 0, 2], start[0, 2] + 2.0)


def test_the_worst_is_the_one_that_promises_least_and_the_instruction_decides_which() -> None:
    state = three()
    start = torch.zeros(4, 3)
    courses = state.courses(start, torch.zeros(4, 1, 2), torch.ones(4, dtype=torch.long))
    words = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.5, 9.0], [-2.0, 9.0]])
    assert least_promising(state, courses, words).tolist() == [0, 2, 0, 2]
    promised = state.promise(courses[:, -1], words.expand(3, -1, -1))
    torch.testing.assert_close(promised, torch.sigmoid(DRIFT[:, None] * words[:, 0] / UNIT))
    # It is a bound: no network promises less, nor does their mean state.
    worst, _ = state.roll(
        start,
        torch.zeros(4, 1, 2),
        torch.ones(4, dtype=torch.long),
        lambda given: least_promising(state, given, words),
    )
    mean, _ = state.roll(start, torch.zeros(4, 1, 2), torch.ones(4, dtype=torch.long))
    least = state.promise(worst, words)
    assert torch.equal(least, promised.amin(0)) and (least < state.promise(mean, words)).all()


# In the env.


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("world") / "model")


def drift_of(env: WorldModelEnv, length: int = HORIZON) -> torch.Tensor:
    """(N,) how far the last number goes per action, in one step."""
    before = env._observe().privileged[:, 0].clone()
    after = env.step(torch.zeros(env.spec.num_envs, length, 2)).obs.privileged[:, 0]
    return (after - before) / length


def test_one_stays_for_the_episode_and_a_restart_draws_anew_for_that_env_alone(folder) -> None:
    env = dreams(folder, 6, members="one")
    checks.check_env(env, horizon=HORIZON)
    env.reset(seed=3, init=[0, 0, 1, 1, 2, 2])
    drawn = env._members.drawn.clone()
    # Two pieces in one step, then another step: the same network all along.
    for _ in range(2):
        torch.testing.assert_close(drift_of(env, 2 * HORIZON), DRIFT[drawn])
    seen = set()
    for _ in range(20):
        env.reset([1, 4], init=[0, 2])
        now = env._members.drawn.clone()
        assert torch.equal(now[[0, 2, 3, 5]], drawn[[0, 2, 3, 5]])
        seen.add(tuple(now[[1, 4]].tolist()))
    torch.testing.assert_close(drift_of(env, 1)[[1, 4]], DRIFT[env._members.drawn[[1, 4]]])
    assert len(seen) > 5


def test_over_episodes_every_network_has_its_share_and_a_seed_draws_the_same(folder) -> None:
    env = dreams(folder, 240, members="one")
    found = []
    for seed in (0, 240, 0):
        env.reset(seed=seed)
        found.append(env._members.drawn.clone())
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    # 480 draws: 160 of each, with a standard deviation of 10.
    count = torch.cat(found[:2]).bincount(minlength=3)
    assert count.sum() == 480 and ((count - 160).abs() < 40).all()
    # Without a seed it is the config's that decides.
    fresh = [dreams(folder, 8, members="one", seed=s) for s in (5, 5, 6)]
    for env in fresh:
        env.reset(init=list(range(8)))
    draws = [env._members.drawn.tolist() for env in fresh]
    assert draws[0] == draws[1] != draws[2]


def test_a_dream_that_goes_on_from_a_real_env_draws_too(folder) -> None:
    env = dreams(folder, 8, members="one")
    obs = env.reset(seed=0)
    drawn = []
    for _ in range(6):
        env.dream_from(obs)
        drawn.append(tuple(env._members.drawn.tolist()))
    assert len(set(drawn)) > 3
    torch.testing.assert_close(drift_of(env), DRIFT[env._members.drawn])


def test_the_mean_draws_nothing_and_the_worst_is_chosen_after_every_chunk(folder) -> None:
    env = dreams(folder)
    env.reset(seed=0)
    torch.testing.assert_close(drift_of(env), DRIFT.mean().expand(4))
    again = dreams(folder, members="one")
    again.reset(seed=0)
    # The initial states are those of the mean: a network is drawn after them.
    assert torch.equal(again._seeds, env._seeds)
    env = dreams(folder, members="worst")
    env.reset(seed=0)
    words = env._dream.words.clone()
    words[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    env._dream.words = words
    torch.testing.assert_close(drift_of(env), DRIFT[[0, 2, 0, 2]])
    # Another instruction from here on, and another network is the worst.
    env._dream.words = words * torch.tensor([-1.0, 1.0, 1.0, -1.0])[:, None]
    torch.testing.assert_close(drift_of(env), DRIFT[[2, 2, 0, 0]])


def test_doubt_fails_cuts_or_is_ignored(tmp_path) -> None:
    # Every chunk of these networks is above the limit.
    folder = save(tmp_path / "model", max_spread=1e-3)
    for doubt in ("fails", "cut", "ignored"):
        env = dreams(folder, doubt=doubt)
        env.reset(seed=0)
        step = env.step(torch.zeros(4, HORIZON, 2))
        assert (step.log["doubt"] == (doubt != "ignored")).all()
        assert (step.terminated == (doubt == "fails")).all()
        assert (step.truncated == (doubt == "cut")).all()
        assert step.valid.all() and not step.fault.any() and not step.success.any()


def test_what_a_model_cannot_choose_among_is_refused_in_words(folder, tmp_path) -> None:
    single = save(tmp_path / "single", state_members=1)
    for members in ("one", "worst"):
        with pytest.raises(UserError, match="by one network, so there is nothing to choose"):
            WorldModelEnv(WorldModelConfig(model=single, num_envs=2, members=members))
    pictures = WorldModel.load(folder)
    pictures.state = None
    with pytest.raises(UserError, match="by no networks"):
        Members("one", pictures, 2)
    older = WorldModel.load(folder)
    older.state.prospects = nn.ModuleList()
    Members("one", older, 2)
    with pytest.raises(UserError, match="trained by an older version"):
        Members("worst", older, 2)
    with pytest.raises(UserError, match="nothing casts doubt on a dream here"):
        WorldModelEnv(WorldModelConfig(model=folder, num_envs=2, doubt="cut"))
    with pytest.raises(UserError, match=r"env\.doubt=ignored takes no notice"):
        WorldModelConfig(model=folder, follow=True, doubt="ignored")
