"""GRPO in trees: members of a branch are one episode until they part, and each level learns by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from chaser import make_env

from embodyrl.algorithms.grpo import GRPO, GRPOConfig, collect_groups
from embodyrl.build import make_policy
from embodyrl.errors import UserError
from embodyrl.functional.tree import levels_of, numbers_within
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.rollouts.batches import EpisodeBatch, GroupBatch
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.noise_tree import NoiseTree

TINY = FlowVLAConfig(width=32, layers=1, heads=2, text_layers=0, critic_width=16)
TREE: dict[str, Any] = {"group_size": 4, "branches": (2, 2), "branch_chunks": (1,)}


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def played(
    policy: Any, branches: tuple[int, ...], starts: tuple[int, ...], num_envs: int = 8
) -> EpisodeBatch:
    """Two groups of four on MuJoCo's reach task."""
    env = make_env(num_envs, max_episode_steps=15, num_threads=1)
    player = Player(env, seed=0)
    batch = collect_groups(
        player,
        policy,
        2,
        4,
        generator=gen(3),
        between=lambda: None,
        until_success=False,
        tree=NoiseTree(branches, starts, gen(4)),
    )
    env.close()
    return batch


def by_member(batch: EpisodeBatch, what: torch.Tensor, chunk: int) -> list[torch.Tensor]:
    """A row of ``what`` for each episode: that of its chunk ``chunk``."""
    number = numbers_within(batch.episode)
    return [what[(batch.episode == e) & (number == chunk)][0] for e in range(8)]


@pytest.mark.parametrize("num_envs", [8, 3])
def test_members_are_one_episode_until_they_part(num_envs: int) -> None:
    policy = make_policy(TINY, make_env(1).spec, seed=0)
    with torch.no_grad():
        policy.expert.head.weight.add_(0.2)  # type: ignore[attr-defined]
    batch = played(policy, (2, 2), (1,), num_envs)
    noise = [by_member(batch, batch.trace.x, i) for i in range(3)]
    states = [by_member(batch, batch.obs.proprio, i) for i in range(3)]
    for first in (0, 2, 4, 6):
        # They share the first chunk and where it leads, and no later noise.
        assert torch.equal(noise[0][first][0], noise[0][first + 1][0])
        torch.testing.assert_close(noise[0][first], noise[0][first + 1])
        torch.testing.assert_close(states[1][first], states[1][first + 1], atol=1e-5, rtol=0)
        assert not torch.allclose(noise[1][first], noise[1][first + 1], atol=0.1)
        assert not torch.allclose(states[2][first], states[2][first + 1], atol=1e-4)
    # Branches and groups do not.
    for a, b in ((0, 2), (0, 4), (4, 6)):
        assert not torch.allclose(noise[0][a], noise[0][b], atol=0.1)
    # One chunk's noise is not the next one's.
    assert not torch.allclose(noise[0][0], noise[1][0], atol=0.1)


def test_other_groups_draw_other_noise_with_another_generator() -> None:
    leaf = torch.arange(4)
    chunk = torch.zeros(4, dtype=torch.long)
    draws = [
        [
            torch.randn(1, generator=g).item()
            for g in NoiseTree((2, 2), (1,), gen(s)).generators(leaf, chunk)
        ]
        for s in (0, 0, 1)
    ]
    assert draws[0] == draws[1] and draws[0] != draws[2]
    assert draws[0][0] == draws[0][1] != draws[0][2] == draws[0][3]
    # An idle env draws anything.
    assert len(NoiseTree((2, 2), (1,), gen(0)).generators(torch.tensor([-1]), chunk[:1])) == 1


def make_grpo(policy: Any, **settings: Any) -> GRPO:
    given = {"minibatch_size": 64, "epochs": 1, "lr": 1e-3, "lr_warmup": 0, "keep_min": 0.0}
    return GRPO(GRPOConfig(**{**given, "group_size": 4, **settings}), policy)  # type: ignore[arg-type]


def told(batch: EpisodeBatch, returns: list[float]) -> GroupBatch:
    """The batch, with episodes that are worth ``returns``."""
    batch = copy.deepcopy(batch)
    for episode, worth in zip(batch.episodes, returns, strict=True):
        assert episode is not None
        episode.reward = worth
    episodes = [e for e in batch.episodes if e is not None]
    return GroupBatch(batch, episodes, batch.env_steps, 1)


RETURNS = [0.0, 2.0, 3.0, 5.0, 1.0, 1.0, 1.0, 9.0]
BY_RETURN: dict[str, Any] = {"rewards": ("return",), "num_episodes": 8}


def advantages_of(algorithm: GRPO, batch: GroupBatch) -> tuple[torch.Tensor, dict[str, float]]:
    """What the actor is given."""
    seen: list[torch.Tensor] = []
    real = algorithm.actor.update

    def update(obs: Any, trace: Any, logprob: Any, advantage: Any, rows: Any, **rest: Any) -> Any:
        seen.append(advantage)
        return real(obs, trace, logprob, advantage, rows, **rest)

    algorithm.actor.update = update  # type: ignore[method-assign]
    stats = algorithm.update(batch, progress=0.0, generator=gen(0))
    return seen[0], stats


def test_each_chunk_has_the_advantage_of_its_level() -> None:
    policy = make_policy(TINY, make_env(1).spec, seed=0)
    batch = told(played(policy, (2, 2), (1,)), RETURNS)
    found, stats = advantages_of(make_grpo(policy, **TREE, **BY_RETURN, normalize=False), batch)
    number = numbers_within(batch.kept.episode)
    level = levels_of(number, (1,))
    roots = torch.tensor([-1.5, -1.5, 1.5, 1.5, -2.0, -2.0, 2.0, 2.0])
    lasts = torch.tensor([-1.0, 1.0, -1.0, 1.0, 0.0, 0.0, -4.0, 4.0])
    expected = torch.where(level == 0, roots[batch.kept.episode], lasts[batch.kept.episode])
    torch.testing.assert_close(found, expected)
    assert set(number[level == 0].tolist()) == {0} and number.max() == 2
    # They parted in one state, to rounding.
    assert 0 <= stats["branch_gap"] < 1e-5


def test_states_that_were_not_shared_are_seen_in_the_gap() -> None:
    policy = make_policy(TINY, make_env(1).spec, seed=0)
    batch = told(played(policy, (4,), ()), RETURNS)
    _, stats = advantages_of(make_grpo(policy, **TREE, **BY_RETURN), batch)
    assert stats["branch_gap"] > 1e-3


@pytest.mark.parametrize(
    "tree", [{"branches": (4,)}, {"branches": (4, 1), "branch_chunks": (1,)}], ids=str
)
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_one_branch_at_all_levels_but_the_root_is_grpo(tree: dict, baseline: str) -> None:
    after = []
    policy = make_policy(TINY, make_env(1).spec, seed=0)
    batch = played(policy, (4,), ())
    for settings in ({}, tree):
        one = make_policy(TINY, make_env(1).spec, seed=0)
        algorithm = make_grpo(one, baseline=baseline, **BY_RETURN, **settings)
        stats = algorithm.update(told(batch, RETURNS), progress=0.0, generator=gen(0))
        after.append((torch.cat([p.flatten() for p in one.parameters()]), stats))
    (flat, stats), (found, with_gap) = after
    torch.testing.assert_close(found, flat, atol=1e-6, rtol=1e-5)
    # Over levels that are the same twice the sample's deviation is another.
    for name in set(stats) - {"advantage_std"}:
        value = stats[name]
        assert with_gap[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_grpo_plays_its_groups_as_trees() -> None:
    env = make_env(8, max_episode_steps=15)
    flow = make_policy(TINY, env.spec, seed=0)
    algorithm = make_grpo(flow, **TREE, num_episodes=8, keep_max=1.0, max_rounds=1)
    batch = Player(env, seed=0).collect(algorithm, 0, generator=gen(0))
    kept = batch.kept
    assert len(kept.episodes) == 8
    first = by_member(kept, kept.trace.x, 0)
    torch.testing.assert_close(first[0], first[1])
    assert not torch.allclose(first[0], first[2], atol=0.1)
    # The first pass has ratio 1: the noise of a tree is the policy's own.
    stats = algorithm.update(batch, progress=0.0, generator=gen(1))
    assert stats["ratio"] == pytest.approx(1.0, abs=1e-4)
    env.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"branches": (2, 2)}, "name one chunk fewer"),
        ({"branches": (2, 3), "branch_chunks": (1,)}, "makes 6 episodes"),
        ({"branches": (1, 4), "branch_chunks": (1,)}, "2 or more"),
        ({"branches": (2, 2), "branch_chunks": (1, 1)}, "must rise"),
        ({"branch_chunks": (1,)}, r"algorithm\.branches is empty"),
        ({**TREE, "baseline": "median"}, "Take mean or leave_one_out"),
        ({**TREE, "replay_successes": 8}, r"algorithm\.replay_successes is 8"),
        (
            {**TREE, "rewards": ("success", "length"), "reward_weights": (1.0, -0.1)}
            | {"per_reward": True},
            r"algorithm\.per_reward is True",
        ),
    ],
)
def test_wrong_settings_are_refused_in_words(settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        GRPOConfig(**{"group_size": 4, **settings})
