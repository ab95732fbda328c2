"""PA-RL: what is chosen, what the critics aim at, what is imitated, and what it refuses."""

import copy
import dataclasses
from typing import Any, cast

import pytest
import torch

from embodyrl.algorithms.optim import Means
from embodyrl.algorithms.pa_rl import PARL, PARLConfig
from embodyrl.build import make_policy
from embodyrl.errors import UserError
from embodyrl.policies.chooser import Chooser, ChooserConfig
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.rollouts.batches import TransitionBatch, Transitions
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/arm", 4, 2, 3, "torque", 25.0, 20, {}, privileged_dim=3)
H = 3
SMALL: dict[str, Any] = {
    "warmup_chunks": 8,
    "critic_warmup": 2,
    "mc_steps": 0,
    "batch_size": 10,
    "actor_batch_size": 6,
    "capacity": 64,
    "critic_utd": 0.5,
    "actor_utd": 0.25,
}


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def make_small(policy=None, **settings):
    config: dict[str, Any] = {
        "width": 8,
        "layers": 1,
        "num_denoise_steps": 2,
        "horizon": H,
        "chooser_width": 8,
    }
    torch.manual_seed(0)
    made = make_policy(FlowMLPConfig(**config | (policy or {})), SPEC, 0)
    return PARL(PARLConfig(**SMALL | settings), cast(Any, made))


def played(episode, done=(), solved=(), seed=0):
    """One chunk of each of these episodes; ``done`` and ``solved`` name those that end."""
    generator = gen(seed)
    n = len(episode)
    obs = [Obs({}, torch.randn(n, 3, generator=generator), ["go"] * n) for _ in range(2)]
    over = torch.tensor([e in done for e in episode])
    success = torch.tensor([e in solved for e in episode])
    return Transitions(
        obs[0],
        torch.rand(n, H, 2, generator=generator) * 2 - 1,
        torch.rand(n, H, generator=generator),
        torch.ones(n, H, dtype=torch.bool),
        over & success,
        over & ~success,
        obs[1],
        episode=torch.tensor(episode),
        success=success,
    )


def update(algorithm, chunks, seed=0):
    return algorithm.update(TransitionBatch(chunks), progress=0.0, generator=gen(seed))


def test_the_chooser_takes_the_proposal_of_the_largest_mean_value():
    torch.manual_seed(0)
    chooser = Chooser(SPEC, H, ChooserConfig(chooser_width=16))
    obs = Obs({}, torch.randn(5, 3), ["go"] * 5)
    proposals = torch.rand(5, 4, H, 2) * 2 - 1
    seen = chooser.encoder(obs)
    by_hand = torch.stack([chooser.critics(seen, proposals[:, i]).mean(0) for i in range(4)], dim=1)
    torch.testing.assert_close(chooser.values_of(seen, proposals), by_hand)
    best = chooser.best(obs, proposals)
    for row in range(5):
        assert torch.equal(best[row], proposals[row, by_hand[row].argmax()])


class Near(torch.nn.Module):
    """Two critics of equal worth: minus half the squared distance to a chunk."""

    def __init__(self, wanted):
        super().__init__()
        self.wanted = wanted

    def forward(self, features, choice):
        value = -0.5 * (choice - self.wanted).square().flatten(1).sum(1)
        return torch.stack([value, value])


def test_the_ascent_is_that_of_a_quadratic_and_stays_in_the_range_of_actions():
    config = ChooserConfig(chooser_width=8, ascent_rate=0.25, ascent_steps=3)
    chooser = Chooser(SPEC, H, config)
    proposals = torch.rand(4, 3, H, 2, generator=gen()) - 0.5
    chooser.critics = Near(torch.full((H, 2), 0.5))
    features = torch.zeros(4, chooser.encoder.dim)
    start = chooser.choose(features, proposals)
    # Each step goes a quarter of the way that is left.
    torch.testing.assert_close(chooser.best_of(features, proposals), 0.5 - 0.75**3 * (0.5 - start))
    chooser.critics = Near(torch.full((H, 2), 5.0))
    assert chooser.best_of(features, proposals).amax() == 1.0
    # Steps that are too long and lower the value are not taken.
    longer = Chooser(SPEC, H, dataclasses.replace(config, ascent_rate=3.0))
    longer.critics = Near(torch.full((H, 2), 0.1))
    start = longer.choose(features, proposals)
    after = longer.best_of(features, proposals)
    value = longer.critics(features, after)[0] - longer.critics(features, start)[0]
    assert (value >= 0).all()


def test_an_editor_raises_the_value_within_its_bound():
    scale = 0.1
    policy = {"edit_scale": scale, "proposals": 3, "chooser_width": 8}
    algorithm = make_small(policy, critic_warmup=0, actor_utd=0.0, critic_lr=1e-2, lr=1e-2)
    chooser = algorithm.chooser
    obs = Obs({}, torch.randn(16, 3), ["go"] * 16)
    proposals = torch.rand(16, 3, H, 2, generator=gen()) * 1.6 - 0.8
    features = chooser.encoder(obs)
    # Before it is trained nothing is edited.
    assert torch.equal(chooser.editor(features, proposals[:, 0]), proposals[:, 0]) and torch.equal(
        chooser.best_of(features, proposals), chooser.choose(features, proposals)
    )
    # With critics that want what is far away, each action goes the whole way.
    chooser.critics = Near(torch.full((H, 2), 9.0))
    chooser.critics.weight = torch.nn.Parameter(torch.zeros(()))
    rows = algorithm.buffer.add(played(list(range(8))))
    reference = played(list(range(8)), seed=1).choice
    algorithm.buffer.data["features"][rows] = features[:8]
    algorithm.buffer.data["reference"][rows] = reference
    for _ in range(60):
        algorithm.edits.step(rows, gen(), Means())
    edited = chooser.editor(features[:8], reference)
    wanted = (reference + scale).clamp(-1, 1)
    torch.testing.assert_close(edited, wanted, atol=0.01, rtol=0)
    best = chooser.best_of(features, proposals)
    change = (best[:, None] - proposals).abs().flatten(2).amax(2).amin(1)
    assert (change <= scale + 1e-6).all() and (change > 0).any()


def test_without_steps_of_the_actor_the_policy_is_frozen():
    algorithm = make_small({"edit_scale": 0.1}, critic_warmup=0, critic_utd=1.0, actor_utd=0.0)
    before = copy.deepcopy(algorithm.policy.state_dict())
    update(algorithm, played(list(range(8))))
    row = update(algorithm, played(list(range(8, 16)), done={8, 9}, solved={8}))
    assert row["gradient_steps"] > 0 and row["actor_steps"] == 0
    moved = [n for n, v in algorithm.policy.state_dict().items() if not torch.equal(v, before[n])]
    assert any(name.startswith("chooser.editor.") for name in moved)
    assert all(name.startswith("chooser.") for name in moved)


def test_proposals_are_what_the_policy_does_with_each_noise():
    policy = make_small().policy
    alone = make_policy(dataclasses.replace(policy.config, proposals=1), SPEC, 0)
    alone.load_state_dict(policy.state_dict())
    obs = Obs({}, torch.randn(4, 3), ["go"] * 4)
    # Draws of the noise follow each other, so the same generator gives the same chunks one by one.
    generator = gen(3)
    one_by_one = [alone.sample(obs, generator=generator, mode="eval").actions for _ in range(5)]
    torch.testing.assert_close(policy.propose(obs, 5, gen(3)), torch.stack(one_by_one, dim=1))
    # The policy with a chooser that has learned is the best of them.
    policy.chooser.ready.fill_(True)
    best = policy.chooser.best(obs, policy.propose(obs, 8, gen(4)))
    assert torch.equal(policy.sample(obs, generator=gen(4), mode="eval").actions, best)


def test_an_episode_is_solved_or_not_as_a_whole_however_it_is_interleaved():
    algorithm = make_small(warmup_chunks=1000, capacity=1000)
    update(algorithm, played([1, 2, 3]))
    update(algorithm, played([1, 2, 3], done={2}, solved={2}))
    update(algorithm, played([1, 4, 3], done={1, 3}, solved={3}))
    solved = algorithm.buffer.data["solved"][:9].tolist()
    assert solved == [False, True, True] * 2 + [False, False, True]


def test_overwritten_chunks_are_not_marked_by_an_episode_that_they_no_longer_belong_to():
    algorithm = make_small(warmup_chunks=1000, capacity=4)
    update(algorithm, played([1, 2]))
    update(algorithm, played([3, 4], done={3, 4}))
    update(algorithm, played([5, 6], done={5, 6}))
    # Episode 1 had its first chunk where episode 5's is now.
    update(algorithm, played([1, 2], done={1}, solved={1}))
    assert algorithm.buffer.data["solved"].tolist() == [False, False, True, False]


def test_returns_of_episodes_that_are_over_are_discounted_sums():
    algorithm = make_small(warmup_chunks=1000, capacity=5)
    first, second = played([1, 2], seed=1), played([1, 2], done={1}, seed=2)
    update(algorithm, played([8, 9]))  # pushed out, so that the order of rows is not that of time
    update(algorithm, first)
    update(algorithm, second)
    data = algorithm.buffer.data
    rewards = torch.cat([first.reward[0], second.reward[0]])
    by_hand = [float(sum(0.99**i * r for i, r in enumerate(rewards[k:]))) for k in (0, 3)]
    rows = (data["episode"] == 1).nonzero().flatten().tolist()
    found = {round(float(data["return"][r]), 4) for r in rows}
    assert found == {round(x, 4) for x in by_hand}
    assert data["over"].sum() == 2


def test_critics_fit_the_returns_first_and_need_an_episode_that_ended():
    algorithm = make_small(critic_warmup=1, mc_steps=1, critic_utd=0.1)
    row = update(algorithm, played(list(range(8)), done={3}))
    assert row["td_target"] == pytest.approx(
        float(sum(0.99**i * played(list(range(8))).reward[3, i] for i in range(H))), rel=1e-5
    )
    with pytest.raises(UserError, match=r"algorithm\.mc_steps=0"):
        update(make_small(critic_warmup=1, mc_steps=1), played(list(range(8))))


@pytest.mark.parametrize(("bootstrap", "how"), [(False, "mean"), (True, "mean"), (True, "least")])
def test_critics_aim_at_reward_plus_the_discounted_value_of_what_was_chosen(bootstrap, how):
    algorithm = make_small(
        critic_warmup=0,
        capacity=8,
        tau=1.0,
        critic_lr=1e-2,
        bootstrap_timeouts=bootstrap,
        target_critics=how,
    )
    chunks = played(list(range(8)), done=set(range(6)), solved={0, 2, 4})
    update(algorithm, chunks)
    # With gamma = .99 and whole chunks, row by row.
    seen = {}
    algorithm.chooser.critics.forward = lambda features, choice: seen.setdefault(
        "q", torch.zeros(2, len(choice), requires_grad=True)
    )
    rows = torch.randint(8, (10,), generator=gen(7))
    stored = algorithm.buffer.rows(rows)
    features = algorithm.chooser.encoder(stored.next_obs)
    each = algorithm.target(features, algorithm.buffer.data["next_choice"][rows])
    value = each.mean(0) if how == "mean" else torch.minimum(each[0], each[1])
    discounted = sum(0.99**i * stored.reward[:, i] for i in range(H))
    # Three episodes are solved, three ran out of time, and two go on.
    assert stored.terminated.any() and stored.truncated.any()
    over = stored.terminated if bootstrap else stored.terminated | stored.truncated
    wanted = discounted + 0.99**H * value * ~over
    stats = Means()
    algorithm._update_critics(gen(7), stats)
    assert stats.means()["td_target"] == pytest.approx(float(wanted.mean()), rel=1e-5)
    # The gradient of the summed mean square at q = 0.
    torch.testing.assert_close(seen["q"].grad[0], -2 * wanted.detach() / 10)


def test_it_learns_to_do_what_the_critics_prefer():
    """A bandit: the reward is the first action's first dim, so chosen chunks have more of it."""
    algorithm = make_small(
        warmup_chunks=32,
        critic_warmup=150,
        batch_size=64,
        actor_batch_size=32,
        capacity=4096,
        critic_utd=1.0,
        actor_utd=1.0,
        lr=3e-3,
        critic_lr=3e-3,
        success_coef=0.0,
        policy={"width": 32, "chooser_width": 32},
    )
    obs = Obs({}, torch.randn(256, 3, generator=gen(5)), ["go"] * 256)

    def mean_action():
        return float(algorithm.policy.propose(obs, 4, gen(9))[..., 0, 0].mean())

    before = mean_action()
    for i in range(25):
        chunks = played(list(range(32 * i, 32 * i + 32)), seed=i)
        choice = algorithm.act(chunks.obs, gen(100 + i))[0]
        reward = torch.zeros(32, H)
        reward[:, 0] = choice[:, 0, 0]
        done = torch.ones(32, dtype=torch.bool)
        chunks = dataclasses.replace(chunks, choice=choice, reward=reward, terminated=done)
        update(algorithm, chunks, seed=i)
    assert mean_action() > before + 0.2


def test_own_successes_are_imitated_and_failures_are_not(monkeypatch):
    algorithm = make_small(actor_utd=0.5, success_coef=0.5)
    imitated = []
    loss = algorithm.actor._imitation
    monkeypatch.setattr(
        algorithm.actor, "_imitation", lambda parts, g: imitated.append(parts) or loss(parts, g)
    )
    row = update(algorithm, played(list(range(8)), done=set(range(8))))
    # Each step has two halves.
    assert row["actor_steps"] == 4 and [len(parts) for parts in imitated] == [1] * 8
    chunks = played(list(range(10, 18)), done=set(range(10, 18)), solved={11})
    update(algorithm, chunks)
    states = algorithm.config.actor_batch_size
    assert len(imitated) == 2 * 8
    assert sum(len(chosen) for (_, chosen, _), _ in imitated[8:]) == 4 * states
    assert sum(len(own) for _, (_, own, _) in imitated[8:]) == 4 * states // 2
    for _, (obs, own, valid) in imitated[8:]:
        assert len(own) == len(valid)
        assert torch.equal(own, chunks.choice[1].expand_as(own))
        assert torch.equal(obs.proprio, chunks.obs.proprio[1].expand_as(obs.proprio))


def test_what_follows_a_chunk_is_the_next_one_of_its_episode():
    """Seen and chosen once; where nothing follows, or a chunk is missing, it is seen by itself."""
    algorithm = make_small(critic_warmup=0)
    update(algorithm, played(list(range(8))))
    first, second = played([1, 2, 3]), played([1, 2, 3], seed=1)
    second = dataclasses.replace(
        second,
        obs=Obs({}, first.next_obs.proprio.clone(), second.obs.instruction),
    )
    second.obs.proprio[2] += 1.0  # one is missing in between
    rows = algorithm.buffer.add(Transitions.cat([first, second]))
    data = algorithm.buffer.data
    data["episode"][rows] = torch.tensor([1, 2, 3, 1, 2, 3])
    algorithm.buffer.see(rows)
    algorithm._note_choices(rows, gen())
    before, after = algorithm.buffer.next_ones(rows)
    assert before.tolist() == rows[:2].tolist() and after.tolist() == rows[3:5].tolist()
    assert torch.equal(data["next_choice"][rows[:2]], second.choice[:2])
    assert not torch.equal(data["next_choice"][rows[2]], second.choice[2])
    encode = algorithm.chooser.encoder
    chunks = algorithm.buffer.rows(rows)
    torch.testing.assert_close(data["features"][rows], encode(chunks.obs))
    torch.testing.assert_close(data["next_features"][rows], encode(chunks.next_obs))


@pytest.mark.parametrize("save_replay", [True, False])
def test_a_resumed_run_goes_on_bit_for_bit(save_replay):
    first = make_small(save_replay=save_replay)
    update(first, played(list(range(16)), done={3, 4}, solved={3}))
    second = make_small(save_replay=save_replay)
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    if not save_replay:
        assert len(second.buffer) == 0 and second.critic_steps == first.critic_steps
        return
    chunks = played(list(range(20, 28)), done={21}, seed=2)
    assert update(first, chunks) == update(second, chunks)
    for a, b in zip(first.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_cannot_choose_is_refused_in_words():
    with pytest.raises(UserError, match=r"policy\.chooser_width"):
        make_small({"chooser_width": 0})
    with pytest.raises(UserError, match="nothing to choose from"):
        make_small({"proposals": 1})
    with pytest.raises(UserError, match="of which they are the first ones"):
        make_small(critic_warmup=10, mc_steps=11)
    with pytest.raises(UserError, match="has no pictures"):
        make_small(shift=4)
    gaussian = make_small({"velocity": "gaussian", "num_denoise_steps": 1}, critic_warmup=0)
    with pytest.raises(UserError, match="the same chunk each time"):
        update(gaussian, played(list(range(8))))
        update(gaussian, played(list(range(8))))


def test_the_policy_proposes_by_the_average_of_the_weights_that_are_trained():
    moved = {}
    for ema in (0.0, 0.75):
        algorithm = make_small(actor_utd=0.125, ema=ema)
        start = [p.detach().clone() for p in algorithm.policy.actor_parameters()]
        row = update(algorithm, played(list(range(8)), done=set(range(8))))
        assert row["actor_steps"] == 1
        ends = [p.detach() for p in algorithm.policy.actor_parameters()]
        moved[ema] = [b - a for a, b in zip(start, ends, strict=True)]
    # Proposals before the first step are of the same weights, so the step is the same.
    assert any(bool(step.any()) for step in moved[0.0])
    for whole, share in zip(moved[0.0], moved[0.75], strict=True):
        torch.testing.assert_close(share, 0.25 * whole)


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_change_nothing_but_rounding(threads):
    """Proposals and imitation are computed in halves, whatever there is to compute them."""
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            algorithm = make_small(actor_utd=0.5)
            update(algorithm, played(list(range(8)), done=set(range(8))))
            found.append([p.detach().clone() for p in algorithm.policy.parameters()])
    finally:
        torch.set_num_threads(before)
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-4, atol=1e-5)
