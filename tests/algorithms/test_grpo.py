"""GRPO: groups from one start, what is dropped and redrawn, advantages of episodes, and what is refused."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch

from embodyrl.algorithms.branching import noise_tree
from embodyrl.algorithms.grpo import GRPO, GRPOConfig
from embodyrl.build import make_policy
from embodyrl.errors import UserError
from embodyrl.functional.flow import randn
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.rollouts.batches import Episode, EpisodeBatch, GroupBatch
from embodyrl.rollouts.collect import Player, collect_episodes
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv
from embodyrl.types import ActionSample, DenoisingTrace, EnvSpec, Obs

SPEC = EnvSpec("test/arm", 8, 4, 6, "ee_delta_pos", 25.0, 20, {}, privileged_dim=5)
TINY = FlowVLAConfig(width=32, layers=1, heads=2, text_layers=0, critic_width=16)
GAP = slice(18, 21)
"""Columns of MuJoCo's privileged state with the way from the hand to the ball."""


class Chaser:
    """A noisy policy without a critic that goes for the ball: some episodes succeed and some run out of time."""

    def sample(self, obs, *, generator, mode):
        n = len(obs)
        start, noise = randn((n, 5, 4), generator), randn((n, 5, 4), generator)
        mean = torch.nn.functional.pad(obs.privileged[:, GAP] / 0.175, (0, 1))[:, None].expand(
            n, 5, 4
        )
        actions = mean + 0.5 * noise
        trace = DenoisingTrace(
            torch.stack([start, actions], dim=1), torch.ones(n, 1, dtype=torch.bool)
        )
        return ActionSample(actions.clamp(-1, 1), trace, -actions.square().sum((1, 2))[:, None])


SINGLE = {"group_size": 1, "baseline": "tracked"}


def make_env(num_envs: int, cls=MujocoEnv, **settings) -> MujocoEnv:
    settings = {"task": "reach", "max_episode_steps": 12, "num_threads": 1, **settings}
    return cls(MujocoConfig(num_envs=num_envs, renderer="none", **settings))


def make_grpo(policy=None, **settings) -> GRPO:
    settings = {
        "minibatch_size": 16,
        "epochs": 3,
        "lr": 1e-3,
        "lr_warmup": 0,
        "group_size": 4,
        **settings,
    }
    return GRPO(GRPOConfig(**settings), policy or make_policy(TINY, SPEC, seed=0))


def make_batch(policy, episodes: list[Episode], seed: int = 0) -> GroupBatch:
    """Episodes of 1 + i % 3 chunks each."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.tensor([i for i in range(len(episodes)) for _ in range(1 + i % 3)])
    proprio, privileged = (torch.randn(len(number), d, generator=generator) for d in (6, 5))
    obs = Obs({}, proprio, ["push"] * len(number), privileged)
    sample = policy.sample(obs, generator=generator, mode="train")
    kept = EpisodeBatch(obs, sample.trace, sample.logprob, number, list(episodes), 100)
    return GroupBatch(kept, episodes, 100, 1)


def outcome(success: float, reward: float = 0.0, length: int = 10) -> Episode:
    return Episode(0, "push", bool(success), reward, length)


def update(grpo: GRPO, batch: GroupBatch) -> dict[str, float]:
    return grpo.update(batch, progress=0.0, generator=torch.Generator().manual_seed(0))


# Episodes


def test_every_initial_state_is_played_once_as_a_whole_episode():
    inits = [7, 7, 7, 7, 9, 9, 9, 9, 3, 3, 3, 3]
    batch = collect_episodes(
        make_env(4), Chaser(), inits, generator=torch.Generator().manual_seed(0)
    )
    assert [e.init for e in batch.episodes] == inits
    assert {e.success for e in batch.episodes} == {True, False}
    assert all(e.success or e.length == 12 for e in batch.episodes)
    chunks = torch.bincount(batch.episode, minlength=12)
    assert chunks.tolist() == [math.ceil(e.length / 5) for e in batch.episodes]
    assert batch.env_steps == sum(e.length for e in batch.episodes)
    assert len(batch.obs) == len(batch.trace.x) == len(batch.logprob) == len(batch.episode)
    # A group starts from one state, and goes different ways from there.
    first = [batch.obs.proprio[(batch.episode == i).nonzero()[0, 0]] for i in range(4)]
    assert all(torch.equal(first[0], x) for x in first)
    assert len({e.reward for e in batch.episodes[:4]} | {e.length for e in batch.episodes[:4]}) > 1


def test_a_rollout_of_episodes_is_a_function_of_inits_and_generator_whatever_came_before():
    env, inits = make_env(3), [5, 5, 5, 6, 6, 6]

    def run(seed):
        return collect_episodes(env, Chaser(), inits, generator=torch.Generator().manual_seed(seed))

    a, other, b = run(0), run(1), run(0)
    assert (
        torch.equal(a.trace.x, b.trace.x)
        and a.episodes == b.episodes
        and torch.equal(a.episode, b.episode)
    )
    assert not torch.equal(a.trace.x[:3], other.trace.x[:3])


def test_success_ends_an_episode_also_where_the_env_would_go_on():
    env = make_env(4, terminate_on_success=False, max_episode_steps=20)
    options = {"generator": torch.Generator().manual_seed(0)}
    stopped = collect_episodes(env, Chaser(), [1] * 8, **options)
    assert any(e.success and e.length < 20 for e in stopped.episodes)
    whole = collect_episodes(env, Chaser(), [1] * 8, until_success=False, **options)
    assert all(e.length == 20 for e in whole.episodes)


class Breaks(MujocoEnv):
    """Its env 1 explodes at the third action of its first episode."""

    broken = False

    def _step(self, actions, active):
        if not self.broken and self._elapsed[1] == 2:
            self.broken, self._state[1, 15] = True, float("nan")
        return super()._step(actions, active)


def test_a_broken_simulation_costs_its_group(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes MUJOCO_LOG.TXT where it stands
    env = make_env(4, Breaks)
    grpo = make_grpo(Tracing(Chaser()), num_episodes=8, keep_min=0.0, keep_max=1.0, max_rounds=1)
    batch = grpo.collect(player(env, range(100)), generator=torch.Generator().manual_seed(0))
    assert [e.init for e in batch.kept.episodes] == [1, 1, 1, 1]
    assert [e.init for e in batch.episodes] == [0, 0, 0, 1, 1, 1, 1]


class Tracing(torch.nn.Module):
    """Gives a policy what GRPO asks for, without training it."""

    config, spec, transition = TINY, SPEC, make_policy(TINY, SPEC, seed=0).transition

    def __init__(self, policy):
        super().__init__()
        self.sample = policy.sample
        self.evaluate = getattr(policy, "evaluate", None)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def actor_parameters(self):
        return [self.weight]

    def fit_inputs(self, proprio, actions):
        pass


def player(env, inits):
    """Plays from those initial states."""
    made = Player(env)
    made.states = iter(inits)
    return made


def test_dynamic_sampling_drops_groups_that_say_nothing_and_draws_new_ones():
    env, policy = make_env(8), Tracing(Chaser())
    grpo = make_grpo(policy, num_episodes=16, keep_min=0.5, keep_max=0.8, max_rounds=9)
    batch = grpo.collect(player(env, range(1000)), generator=torch.Generator().manual_seed(0))
    groups = [batch.kept.episodes[i : i + 4] for i in range(0, len(batch.kept.episodes), 4)]
    assert len(groups) >= 4 and batch.rounds > 1
    assert all(len({e.init for e in group}) == 1 for group in groups)
    assert all(0.5 <= sum(e.success for e in group) / 4 <= 0.8 for group in groups)
    assert len(batch.episodes) > len(batch.kept.episodes) and batch.env_steps == sum(
        e.length for e in batch.episodes
    )
    # Chunks and episodes still belong together.
    chunks = torch.bincount(batch.kept.episode, minlength=len(batch.kept.episodes))
    assert chunks.tolist() == [math.ceil(e.length / 5) for e in batch.kept.episodes]
    # It gives up where nothing is worth keeping, and learns nothing from nothing.
    grpo = make_grpo(policy, num_episodes=8, keep_min=0.6, keep_max=0.7, max_rounds=2)
    batch = grpo.collect(player(env, range(1000)), generator=torch.Generator().manual_seed(0))
    assert batch.rounds == 2 and not batch.kept.episodes and len(batch.episodes) == 16
    assert update(grpo, batch) == {"groups": 0.0, "group_rounds": 2.0}


@pytest.mark.parametrize("how", ["as_needed", "ahead"])
def test_envs_go_on_with_the_next_group_and_the_first_good_ones_are_kept(how):
    env, policy = make_env(8), Tracing(Chaser())
    # In a tree the noise of an episode depends on its number alone, so all can be played beforehand.
    tree = {"branches": (4,), "num_episodes": 16, "max_rounds": 4}
    options = {"keep_min": 0.5, "keep_max": 0.8, **tree}
    every = GRPOConfig(group_size=4, **tree | {"num_episodes": 64})
    inits = [i for i in range(16) for _ in range(4)]
    noise = noise_tree(every, torch.Generator().manual_seed(0))
    whole = collect_episodes(env, Chaser(), inits, generator=torch.Generator(), tree=noise)
    grpo = make_grpo(policy, draw_groups=how, **options)
    good = [g for g in range(16) if grpo._is_informative(whole.episodes[4 * g : 4 * g + 4])][:4]
    assert len(good) == 4 and good != [0, 1, 2, 3]
    batch = grpo.collect(player(env, range(1000)), generator=torch.Generator().manual_seed(0))
    assert batch.kept.episodes == whole.select([4 * g + i for g in good for i in range(4)]).episodes
    chunks = torch.bincount(batch.kept.episode, minlength=16)
    assert chunks.tolist() == [math.ceil(e.length / 5) for e in batch.kept.episodes]
    # Success is counted over the groups up to the last that is kept.
    assert {e.init for e in batch.episodes} == set(range(good[-1] + 1))
    assert len(batch.episodes) <= 4 * (good[-1] + 1) and batch.rounds >= 2


@pytest.mark.parametrize("replay", [0, 8])
def test_a_group_is_hopeless_where_no_outcome_of_the_rest_would_keep_it(replay):
    for low, high in ((0.1, 0.9), (0.5, 0.5), (0.3, 1.0), (0.25, 0.75)):
        grpo = make_grpo(keep_min=low, keep_max=high, replay_successes=replay)
        for n in range(4):
            for ended in itertools.product([0, 1], repeat=n):
                rests = list(itertools.product([0, 1], repeat=4 - n))
                groups = [[outcome(x) for x in ended + rest] for rest in rests]
                useless = not any(
                    grpo._is_informative(g) or (replay and grpo._all_failed(g)) for g in groups
                )
                assert grpo._is_hopeless([outcome(x) for x in ended]) == useless, (low, high, ended)
    assert grpo._is_hopeless([None])
    by_return = make_grpo(rewards=("return",))
    assert not by_return._is_hopeless([outcome(0), outcome(0), outcome(0)])


def test_failed_groups_are_kept_for_replay_when_groups_are_drawn_at_once():
    class Waits(Chaser):
        def sample(self, obs, *, generator, mode):
            sample = super().sample(obs, generator=generator, mode=mode)
            return dataclasses.replace(sample, actions=torch.zeros_like(sample.actions))

    grpo = make_grpo(
        Tracing(Waits()), num_episodes=8, max_rounds=2, replay_successes=8, draw_groups="ahead"
    )
    batch = grpo.collect(player(make_env(8), range(9)), generator=torch.Generator())
    assert not batch.kept.episodes and len(batch.failed.episodes) == 16 and batch.rounds == 2


def test_where_the_return_alone_counts_groups_are_kept_whose_returns_differ():
    env = make_env(8)
    grpo = make_grpo(Tracing(Chaser()), num_episodes=16, rewards=("return",), max_rounds=1)
    # In an env without success every rate is 0, which would drop every group.
    episodes = [outcome(0.0, reward) for reward in (1.0, 2.0, 2.0, 2.0)]
    assert grpo._is_informative(episodes)
    assert not grpo._is_informative(episodes[1:])
    batch = grpo.collect(player(env, range(100)), generator=torch.Generator().manual_seed(0))
    groups = [batch.kept.episodes[i : i + 4] for i in range(0, len(batch.kept.episodes), 4)]
    assert groups and all(len({e.reward for e in group}) > 1 for group in groups)


# Updates


@pytest.mark.parametrize("baseline", ["mean", "median", "leave_one_out"])
def test_episodes_better_than_their_group_become_likelier_and_the_others_less(baseline):
    grpo = make_grpo(baseline=baseline)
    episodes = [outcome(i % 2) for i in range(16)]
    batch = make_batch(grpo.policy, episodes)
    stats = update(grpo, batch)
    with torch.no_grad():
        moved = (
            grpo.policy.evaluate(batch.kept.obs, batch.kept.trace).logprob - batch.kept.logprob
        ).sum(1)
    won = torch.tensor([e.success for e in episodes])[batch.kept.episode]
    assert moved[won].mean() > 0.01 and moved[~won].mean() < -0.01
    assert stats["groups"] == 4 and stats["actor_epochs"] == 3


def test_8_the_first_pass_has_ratio_one_and_clips_nothing():
    grpo = make_grpo(epochs=1, minibatch_size=1000)
    stats = update(grpo, make_batch(grpo.policy, [outcome(i % 2) for i in range(16)]))
    assert (
        abs(stats["ratio"] - 1) < 1e-4
        and abs(stats["approx_kl"]) < 1e-6
        and stats["clip_fraction"] == 0
    )


def test_14_equal_outcomes_teach_nothing():
    grpo = make_grpo()
    before = copy.deepcopy(grpo.policy.state_dict())
    update(
        grpo, make_batch(grpo.policy, [outcome(i // 4 % 2) for i in range(16)])
    )  # whole groups alike
    assert all(torch.equal(before[k], v) for k, v in grpo.policy.state_dict().items())


def test_advantages_by_hand():
    episodes = [outcome(1, 3.0, 5), outcome(0, 1.0, 9), outcome(0, 1.0, 9), outcome(0, 1.0, 9)]
    plus, minus = 0.75 / 0.5, -0.25 / 0.5  # one success of four: standard deviation 1/2
    assert make_grpo()._advantages(episodes).tolist() == pytest.approx(
        [plus, minus, minus, minus], rel=1e-5
    )
    rloo = make_grpo(baseline="leave_one_out", normalize=False)
    assert rloo._advantages(episodes).tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    returns = make_grpo(rewards=("return",), reward_weights=(1.0,), normalize=False)
    assert returns._advantages(episodes).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])
    both = make_grpo(rewards=("success", "length"), reward_weights=(1.0, -0.5), normalize=False)
    assert both._advantages(episodes).tolist() == pytest.approx([2.25, -0.75, -0.75, -0.75])


def test_per_reward_normalisation_keeps_a_small_reward_from_drowning():
    """GDPO: returns in the hundreds hide who succeeded, unless each reward is normalised on its own."""
    episodes = [outcome(1, 500.0), outcome(0, 510.0), outcome(1, 700.0), outcome(0, 690.0)]
    settings = {"rewards": ("success", "return"), "reward_weights": (1.0, 1.0)}
    summed, apart = (
        make_grpo(**settings, per_reward=p)._advantages(episodes) for p in (False, True)
    )
    assert summed[0] < summed[1] and apart[0] > apart[1]
    assert float(apart.mean()) == pytest.approx(0, abs=1e-6) and float(
        apart.std(correction=0)
    ) == pytest.approx(1)


def test_every_episode_counts_the_same_however_long():
    """The loss at ratio 1 is minus the mean of A over what counts the same: episodes, or chunks."""
    advantage = torch.tensor([1.5, -0.5, -0.5, -0.5])
    chunks = torch.tensor([1, 2, 3, 1])  # of ``make_batch``
    expected = {"episode": -advantage.mean(), "chunk": -(advantage * chunks).sum() / chunks.sum()}
    for weighting, loss in expected.items():
        grpo = make_grpo(weighting=weighting, epochs=1, minibatch_size=1000)
        stats = update(grpo, make_batch(grpo.policy, [outcome(i == 0) for i in range(4)]))
        assert stats["policy_loss"] == pytest.approx(float(loss), abs=1e-4)


SEEN = set()


class Reads(GRPOConfig):
    """A config that remembers which of its settings were looked at."""

    def __getattribute__(self, name):
        SEEN.add(name)
        return super().__getattribute__(name)


def test_every_setting_is_read():
    acted = {"behaviour_cap": 2.0, "behaviour_filter": "mask"}
    kept = {"num_episodes": 8, "keep_min": 0.0, "keep_max": 1.0}
    config = make_grpo(Tracing(Chaser()), **kept, **acted).config
    reads = Reads(**vars(config))
    SEEN.clear()
    GRPO(reads, Tracing(Chaser())).collect(
        player(make_env(8), range(9)), generator=torch.Generator()
    )
    grpo = GRPO(reads, make_policy(TINY, SPEC, seed=0))
    update(grpo, make_batch(grpo.policy, [outcome(i % 2) for i in range(16)]))
    # What a tree adds is read where there is one.
    tree = Reads(**vars(config) | {"branches": (2, 2), "branch_chunks": (1,)})
    grpo = GRPO(tree, make_policy(TINY, SPEC, seed=0))
    update(grpo, make_batch(grpo.policy, [outcome(i % 2) for i in range(16)]))
    assert {f.name for f in dataclasses.fields(GRPOConfig)} - SEEN == set()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"group_size": 5, "num_episodes": 64},
            "group_size 5 does not divide algorithm.num_episodes 64",
        ),
        (
            {"keep_min": 0.9, "keep_max": 0.1},
            "keep_min is 0.9; it must not be above algorithm.keep_max",
        ),
        ({"rewards": ("success", "return")}, "has 2 names and algorithm.reward_weights 1"),
        ({"per_reward": True}, "algorithm.rewards has only one"),
        ({"group_size": 1}, "no group to be compared with. Set algorithm.baseline=tracked"),
        ({"baseline": "tracked"}, "compares single episodes .*group_size is 8. Set it to 1"),
        (SINGLE | {"rewards": ("return",)}, "tracked follows success, but .*return"),
        (SINGLE | {"keep_min": 0.2}, "keep_min is 0.2, but baseline=tracked has no groups"),
        (SINGLE | {"draw_groups": "ahead"}, "draw_groups is .*baseline=tracked has no groups"),
        (SINGLE | {"replay_successes": 8}, "replay_successes is 8, but baseline=tracked"),
        (SINGLE | {"branches": (1,)}, "branches is .*baseline=tracked has no groups"),
        ({"max_rounds": 1, "draw_groups": "ahead"}, "draw_groups is .*max_rounds=1 replaces no"),
        (
            {
                "per_reward": True,
                "rewards": ("success", "return"),
                "reward_weights": (1.0, 1.0),
                "normalize": False,
            },
            "algorithm.normalize is False, but per_reward=true",
        ),
    ],
)
def test_wrong_settings_are_refused_in_words(settings, words):
    with pytest.raises(UserError, match=words):
        GRPOConfig(**settings)


def test_more_envs_than_episodes_are_refused_in_words():
    with pytest.raises(UserError, match=r"num_episodes 4 cannot keep env.num_envs=8 busy"):
        make_grpo(Tracing(Chaser()), num_episodes=4).collect(
            player(make_env(8), range(9)), generator=torch.Generator()
        )
    with pytest.raises(UserError, match="2 episodes cannot keep 3 envs busy"):
        collect_episodes(make_env(3), Chaser(), [1, 2], generator=torch.Generator())
