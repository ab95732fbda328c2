"""FQL: what the critics aim at, what holds the head, what is drawn, what goes on, what is refused."""

import copy
import dataclasses
from typing import Any, cast

import pytest
import torch
from point_reach import PointReach

from embodyrl.algorithms.fql import FQL, FQLConfig
from embodyrl.algorithms.imitation import imitation_loss
from embodyrl.algorithms.optim import Means
from embodyrl.build import make_policy
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.rollouts.batches import TransitionBatch, Transitions
from embodyrl.rollouts.collect import Player
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/arm", 4, 2, 3, "torque", 25.0, 20, {}, privileged_dim=3)
H = 3
SMALL: dict[str, Any] = {"batch_size": 10, "critic_width": 8, "capacity": 64, "warmup_chunks": 8}
SMALL |= {"offline_steps": 4, "steps_per_iteration": 2}


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def make_small(policy=None, **settings):
    config: dict[str, Any] = {"width": 8, "layers": 1, "num_denoise_steps": 2, "horizon": H}
    config |= {"one_step_width": 8, "velocity": "plain", "squash": False}
    torch.manual_seed(0)
    made = make_policy(FlowMLPConfig(**config | (policy or {})), SPEC, 0)
    return FQL(FQLConfig(**SMALL | settings), cast(Any, made))


def recorded(episodes=6, length=5, seed=0):
    """Episodes of which every other one is solved."""
    generator = gen(seed)
    number = torch.arange(episodes).repeat_interleave(length)
    count = len(number)
    return Demonstrations(
        H,
        {},
        100.0 + torch.randn(count, 3, generator=generator),
        torch.rand(count, 2, generator=generator) * 2 - 1,
        number,
        torch.zeros(count, dtype=torch.long),
        ["go"],
        number % 2 == 0,
    )


def played(count=8, seed=0, terminated=()):
    generator = gen(seed)
    obs = [Obs({}, torch.randn(count, 3, generator=generator), ["go"] * count) for _ in range(2)]
    valid = torch.ones(count, H, dtype=torch.bool)
    valid[0, 2] = False  # an episode that ended after two actions
    over = torch.tensor([k in terminated for k in range(count)])
    return Transitions(
        obs[0],
        torch.rand(count, H, 2, generator=generator) * 2 - 1,
        torch.rand(count, H, generator=generator),
        valid,
        over,
        torch.zeros(count, dtype=torch.bool),
        obs[1],
    )


def update(algorithm, chunks=None, seed=0):
    if chunks is None:
        chunks = algorithm.buffer.rows(torch.empty(0, dtype=torch.long))
    return algorithm.update(TransitionBatch(chunks), progress=0.0, generator=gen(seed))


# The losses, against closed forms.


@pytest.mark.parametrize("how", ["mean", "least"])
def test_critics_aim_at_the_rewards_of_a_chunk_and_the_value_of_what_the_head_does_next(how):
    algorithm = make_small(tau=0.5, gamma=0.9, target_critics=how)
    # The target critics are others than the critics.
    with torch.no_grad():
        for p in algorithm.target.parameters():
            p.add_(0.1)
    before = copy.deepcopy(algorithm.target)
    critics = copy.deepcopy(algorithm.critics)
    chunks = played(terminated={1, 2})
    noise = torch.randn(8, H, 2, generator=gen(5))
    stats = Means()
    algorithm._update_critics(chunks, gen(5), stats)
    # Row by row: two actions of the first chunk count, three of the others.
    policy = algorithm.policy
    seen = policy.normalize_proprio(chunks.next_obs.proprio)
    next_choice = policy.one_step_actions(seen, noise).clamp(-1, 1)
    each = before(seen, next_choice).detach()
    value = each.mean(0) if how == "mean" else torch.minimum(each[0], each[1])
    wanted = []
    for k in range(8):
        steps = 2 if k == 0 else 3
        target = sum(0.9**i * float(chunks.reward[k, i]) for i in range(steps))
        target += 0.0 if k in (1, 2) else 0.9**steps * float(value[k])
        wanted.append(target)
    wanted = torch.tensor(wanted)
    means = stats.means()
    assert means["td_target"] == pytest.approx(float(wanted.mean()), rel=1e-5)
    q = critics(policy.normalize_proprio(chunks.obs.proprio), chunks.choice)
    loss = (q - wanted).square().mean(1).sum()
    assert means["critic_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    # The target critics go half of the way to the new critics.
    ways = zip(
        before.parameters(),
        algorithm.target.parameters(),
        algorithm.critics.parameters(),
        strict=True,
    )
    for old, new, towards in ways:
        torch.testing.assert_close(new, 0.5 * (old + towards))


@pytest.mark.parametrize("normalize", [False, True])
def test_the_head_is_held_by_the_flow_from_the_same_noise_and_moves_nothing_else(normalize):
    algorithm = make_small(alpha=2.0, normalize_q=normalize, lr=1e-2)
    policy = algorithm.policy
    obs = played().obs
    head = copy.deepcopy(policy.one_step)
    others = {k: v.clone() for k, v in policy.state_dict().items() if "one_step" not in k}
    critics = copy.deepcopy(algorithm.critics.state_dict())
    noise = torch.randn(8, H, 2, generator=gen(5))
    target = policy.decode(policy.encode(obs), noise)
    seen = policy.normalize_proprio(obs.proprio)
    action = policy.normalize_action.inverse(head(seen, noise))
    q = algorithm.critics(seen, action.clamp(-1, 1)).mean(0)
    scale = q.abs().mean().detach() if normalize else 1.0
    loss = 2.0 * (action - target).square().mean() - (q / scale).mean()
    gradient = torch.autograd.grad(loss, list(head.parameters()))
    stats = Means()
    algorithm._update_head(obs, gen(5), stats)
    assert stats.means()["head_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for p, wanted in zip(policy.one_step.parameters(), gradient, strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-4, atol=1e-7)
    for name, value in others.items():
        assert torch.equal(policy.state_dict()[name], value)
    for name, value in critics.items():
        assert torch.equal(algorithm.critics.state_dict()[name], value)
    assert all(p.grad is None for p in policy.actor_parameters())
    assert all(p.grad is None for p in algorithm.critics.parameters())


def test_the_flow_imitates_what_was_played_and_moves_nothing_else():
    algorithm = make_small(lr=1e-2)
    policy = algorithm.policy
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    chunks = played()
    loss = imitation_loss(policy, chunks.obs, chunks.choice, chunks.valid, gen(5))
    parameters = policy.actor_parameters()
    gradient = torch.autograd.grad(loss, parameters)
    stats = Means()
    algorithm._update_flow(chunks, gen(5), stats)
    assert stats.means()["flow_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for p, wanted in zip(parameters, gradient, strict=True):
        torch.testing.assert_close(p.grad, wanted)
    moved = [n for n, v in policy.state_dict().items() if not torch.equal(v, before[n])]
    assert moved and all(name.startswith("net.") for name in moved)


def test_a_large_alpha_makes_the_head_the_flow_and_a_small_one_lets_it_follow_the_value():
    distance = {}
    for alpha in (0.01, 1000.0):
        algorithm = make_small(alpha=alpha, lr=3e-3, policy={"one_step_width": 64})
        obs = played(64).obs
        stats = Means()
        for i in range(300):
            algorithm._update_head(obs, gen(i), stats)
        distance[alpha] = float(stats.values["head_distance"][-1])
        gained = float(stats.values["q_head"][-1]) - float(stats.values["q_head"][0])
        assert gained > 0 or alpha == 1000.0
    assert distance[1000.0] < 0.05 < 0.3 < distance[0.01]


# Acting.


def test_the_head_acts_once_it_has_learned_and_the_flow_before():
    algorithm = make_small()
    policy = algorithm.policy
    obs = played().obs
    noise = torch.randn(8, H, 2, generator=gen(3))
    flow = policy.decode(policy.encode(obs), noise)
    assert torch.equal(policy.sample(obs, generator=gen(3), mode="eval").actions, flow)
    assert not policy.acts_in_one_step
    algorithm._update_head(obs, gen(), Means())
    head = policy.one_step_actions(policy.normalize_proprio(obs.proprio), noise).clamp(-1, 1)
    for mode in ("train", "eval"):
        assert torch.equal(policy.sample(obs, generator=gen(3), mode=mode).actions, head)
    assert torch.equal(algorithm.act(obs, gen(3))[0], head)
    # What is beyond the range of actions is clamped.
    with torch.no_grad():
        policy.one_step.net[-1].bias.add_(50.0)
    assert torch.equal(
        policy.sample(obs, generator=gen(3), mode="eval").actions, torch.ones(8, H, 2)
    )
    with torch.no_grad():
        policy.one_step.net[-1].bias.sub_(50.0)
    # It is in the checkpoint, and the start noise of evaluation is the head's too.
    again = make_policy(dataclasses.replace(policy.config, start_noise=0.0), SPEC, 1)
    again.load_state_dict(policy.state_dict())
    seen = policy.normalize_proprio(obs.proprio)
    still = policy.one_step_actions(seen, torch.zeros_like(noise)).clamp(-1, 1)
    assert torch.equal(again.sample(obs, generator=gen(3), mode="eval").actions, still)


# The data.


def test_offline_it_plays_nothing_and_takes_its_steps_then_it_plays():
    algorithm = make_small(offline_steps=3, steps_per_iteration=2)
    algorithm.add_demos(recorded())
    batch = algorithm.collect(Player(PointReach(4)), generator=gen())
    assert len(batch.chunks) == 0 and batch.env_steps == 0
    assert [update(algorithm, batch.chunks)["gradient_steps"] for _ in range(2)] == [2, 3]
    assert not algorithm.offline and len(algorithm.buffer) == 0
    # Its replicas elsewhere know that it plays now.
    other = make_small(offline_steps=3)
    other.load_acting_state(algorithm.acting_state())
    assert not other.offline
    assert update(algorithm, played(6))["gradient_steps"] == 3  # still warming up
    assert update(algorithm, played(4))["gradient_steps"] == 7  # one for each of these chunks


def test_all_episodes_of_the_data_set_are_read_and_kept():
    algorithm = make_small(capacity=8)
    algorithm.add_demos(recorded(6, 5))
    # Solved episodes have a chunk at each of 5 frames; failed ones where one can be bootstrapped.
    assert len(algorithm.prior) == 3 * 5 + 3 * 2
    solved = algorithm.prior.data["terminated"][: len(algorithm.prior)]
    assert int(solved.sum()) == 3 * 3
    assert float(algorithm.prior.data["reward"].sum()) == 3 * 3
    before = {name: value.clone() for name, value in algorithm.prior.data.items()}
    algorithm.gradient_steps = 4
    for i in range(3):
        update(algorithm, played(8, i))
    assert all(torch.equal(before[name], value) for name, value in algorithm.prior.data.items())
    # A policy from nothing has taken its units from them.
    assert float(algorithm.policy.normalize_proprio.mean[0]) > 90.0
    # One that has some keeps them.
    near = recorded()
    near.proprio = near.proprio - 100.0
    algorithm.add_demos(near)
    assert float(algorithm.policy.normalize_proprio.mean[0]) > 90.0


@pytest.mark.parametrize(("fraction", "share"), [(0.0, 21 / 29), (0.3, 0.3), (0.5, 0.5)])
def test_batches_hold_as_much_of_the_data_set_as_is_asked_for(fraction, share):
    algorithm = make_small(demo_fraction=fraction, batch_size=1000)
    algorithm.add_demos(recorded())
    given = len(algorithm.prior)
    assert given == 21
    batch = algorithm._batch(gen())
    assert (batch.obs.proprio[:, 0] > 50).all()  # offline there is nothing else
    algorithm.buffer.add(played(8))
    batch = algorithm._batch(gen(1))
    assert len(batch) == 1000
    found = float((batch.obs.proprio[:, 0] > 50).float().mean())
    assert found == pytest.approx(share, abs=1e-6 if fraction else 0.05)
    # Without a data set all is its own.
    alone = make_small(offline_steps=0)
    alone.buffer.add(played(8))
    assert (alone._batch(gen()).obs.proprio[:, 0] < 50).all()


# Resuming.


@pytest.mark.parametrize("save_replay", [True, False])
def test_a_resumed_run_goes_on_bit_for_bit(save_replay):
    first = make_small(save_replay=save_replay, utd=0.3)
    first.add_demos(recorded())
    for i in range(2):
        update(first, seed=i)
    update(first, played(9))
    second = make_small(save_replay=save_replay, utd=0.3)
    second.add_demos(recorded())
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.gradient_steps == 4 + 2 and not second.offline
    assert second.pending_steps == pytest.approx(0.7)
    if not save_replay:
        assert len(second.buffer) == 0
        return
    assert update(first, played(9, 1), 7) == update(second, played(9, 1), 7)
    for a, b in zip(first.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    other = make_small()
    other.add_demos(recorded(4))
    with pytest.raises(UserError, match=r"has 14 chunks now and had 21 when this run began"):
        other.load_state_dict(first.state_dict())


# Refusals.


def test_what_cannot_be_is_refused_in_words():
    with pytest.raises(UserError, match=r"Set policy\.one_step_width"):
        make_small({"one_step_width": 0})
    with pytest.raises(UserError, match=r"policy\.one_step_width and policy\.chooser_width"):
        make_small({"chooser_width": 8})
    with pytest.raises(UserError, match=r"policy\.one_step_width and policy\.steer_width"):
        make_small({"steer_width": 8})
    with pytest.raises(UserError, match=r"algorithm\.alpha"):
        make_small(alpha=0.0)
    with pytest.raises(UserError, match=r"algorithm\.demo_fraction"):
        make_small(demo_fraction=1.0)


def test_it_asks_for_a_data_set_where_it_needs_one():
    assert make_small().wants_demos and make_small(offline_steps=0, demo_fraction=0.5).wants_demos
    assert not make_small(offline_steps=0).wants_demos and make_small(offline_steps=0).takes_demos
