"""Policies that think before they act: thoughts are a part of the decision that RL optimises."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.distributions import Normal

from embodyrl.algorithms.clipped_actor import ClippedActor
from embodyrl.algorithms.fpo import FPO, FPOConfig
from embodyrl.algorithms.imitation import context_loss, drawn_imitation, imitation_loss
from embodyrl.algorithms.nft import NFT, NFTConfig
from embodyrl.algorithms.ppo import PPOConfig
from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.build import make_policy
from embodyrl.checks import check_policy
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.distributed.wire import from_bytes, to_bytes
from embodyrl.errors import UserError
from embodyrl.policies.exported.onnx_graph import NoiseFree, example_inputs
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.policies.thinker import STD_MAX, STD_MIN, Thinker
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.types import DenoisingTrace, EnvSpec, Obs

SPEC = EnvSpec("test/arm", 6, 2, 3, "ee_delta_pos", 25.0, 20, {})
SMALL = FlowVLAConfig(
    width=16, layers=1, heads=2, text_layers=0, critic_width=8, horizon=2, action_patch=1
)
CONFIGS = {
    "sde": {},
    "one": {"trained_steps": "one"},
    "noise": {"transition": "flow_noise"},
    "cps": {"transition": "flow_cps"},
    "rest": {"execute": 1},
}


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seen(count: int = 6, seed: int = 0) -> Obs:
    return Obs({}, torch.randn(count, 3, generator=gen(seed)), ["push"] * count)


def make(thoughts: int = 3, moved: bool = True, **settings: Any) -> Any:
    """A policy; ``moved``: with weights that all matter."""
    width = {"thought_width": 4} if thoughts else {}
    config = dataclasses.replace(SMALL, thoughts=thoughts, **width, **settings)
    policy: Any = make_policy(config, SPEC, seed=0)
    generator = gen(1)
    with torch.no_grad():
        for parameter in policy.parameters() if moved else ():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        if moved and thoughts:  # how often it stops depends on what it sees, and is not extreme
            policy.thinker.net[-1].bias[-1].zero_()
            policy.thinker.net[-1].weight[-1].mul_(0.2)
    return policy


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("thoughts", [1, 3])
def test_promises_of_a_policy(name: str, thoughts: int) -> None:
    check_policy(make(thoughts, **CONFIGS[name]), seen(), SPEC, tolerance=1e-4)


def test_without_thoughts_nothing_is_different() -> None:
    """The same weights, draws and numbers, and no part that thinks."""
    policy = make(0)
    assert policy.thinker is None and policy.imitation_noise == 0
    sample = policy.sample(seen(), generator=gen(), mode="train")
    assert sample.trace.thoughts is None and sample.trace.thought_count is None
    assert sample.logprob.shape == (6, policy.transition.num_steps)
    assert not any("thinker" in key for key in policy.state_dict())


def test_a_fresh_mind_changes_no_action_and_has_each_number_of_thoughts_as_often() -> None:
    plain = make(0, moved=False)
    policy = make(3, moved=False)
    missing = policy.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing and all(key.startswith("thinker.") for key in missing)
    acts = [p.sample(seen(), generator=gen(3), mode="eval").actions for p in (plain, policy)]
    assert torch.equal(*acts)
    many = seen(1).proprio.expand(4000, 3)
    count = policy.sample(
        Obs({}, many, ["push"] * 4000), generator=gen(), mode="train"
    ).trace.thought_count
    share = torch.bincount(count, minlength=4) / 4000
    torch.testing.assert_close(share, torch.full((4,), 0.25), atol=0.03, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_log_probability_is_that_of_thoughts_stops_and_steps(name: str) -> None:
    """Of what was sampled, computed again with another implementation, row by row."""
    policy = make(**CONFIGS[name])
    obs = seen()
    sample = policy.sample(obs, generator=gen(5), mode="train")
    trace = sample.trace
    steps = policy.transition.num_steps
    thinker: Thinker = policy.thinker
    context = policy.look(obs)
    assert len(set(trace.thought_count.tolist())) > 1
    for n in range(len(obs)):
        z = torch.zeros(4)
        expected = []
        count = int(trace.thought_count[n])
        for j in range(count + (count < 3)):
            out = thinker.net(torch.cat([context.pooled[n], z]))
            stop = torch.sigmoid(out[-1] + thinker.stop[j])
            if j == count:
                expected.append(stop.log())
                break
            low, high = math.log(STD_MIN), math.log(STD_MAX)
            std = (low + (high - low) * (1 + torch.tanh(out[4:8])) / 2).exp()
            drawn = trace.thoughts[n, j]
            density = Normal(z + out[:4], std).log_prob(drawn).sum()
            expected.append((1 - stop).log() + density)
            z = drawn
        torch.testing.assert_close(sample.logprob[n, steps : steps + len(expected)],
                                   torch.stack(expected).detach(), atol=1e-4, rtol=1e-4)  # fmt: skip
        assert not sample.logprob[n, steps + len(expected) :].any()
        assert not trace.thoughts[n, count:].any()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ratio", ["joint", "per_step", "per_dim"])
def test_the_first_ratio_is_one(name: str, ratio: str) -> None:
    policy = make(**CONFIGS[name])
    sample = policy.sample(seen(), generator=gen(2), mode="train")
    config = PPOConfig(ratio=ratio, minibatch_size=6)
    actor = ClippedActor(config, policy)
    new = policy.evaluate(seen(), sample.trace)
    old, now = (actor._decision_logprob(x, sample.trace) for x in (sample.logprob, new.logprob))
    torch.testing.assert_close((now - old).exp(), torch.ones(6), atol=1e-5, rtol=0)


def test_the_score_has_the_gradient_of_finite_differences() -> None:
    """Of all that is had in the decision: the flow, the thoughts and the stopping."""
    policy = make(transition="flow_noise")
    trace = policy.sample(seen(), generator=gen(2), mode="train").trace

    def score() -> torch.Tensor:
        return policy.evaluate(seen(), trace).logprob.double().sum()

    policy.zero_grad()
    score().backward()
    parts = {
        "thought": policy.thinker.net[0].weight,
        "stop": policy.thinker.stop,
        "told": policy.thinker.told.weight,
        "head": policy.expert.head.weight,
    }
    for name, parameter in parts.items():
        # Along its own gradient, where the difference is largest.
        step = parameter.grad / parameter.grad.norm()
        slope = float((parameter.grad * step).sum())
        kept = parameter.detach().clone()
        scores = []
        for size in (1e-3, -1e-3):
            with torch.no_grad():
                parameter.copy_(kept + size * step)
                scores.append(float(score()))
        parameter.data.copy_(kept)
        assert slope == pytest.approx((scores[0] - scores[1]) / 2e-3, rel=2e-2), name


def test_thoughts_that_paid_become_likelier() -> None:
    """A bandit whose reward is one number of the thought: only thinking can earn it."""
    policy = make(2, moved=False)
    with torch.no_grad():
        policy.expert.head.weight.zero_()
    obs = Obs({}, torch.zeros(256, 3), ["push"] * 256)
    config = PPOConfig(minibatch_size=128, epochs=2, lr=3e-3, lr_warmup=0, clip_range=0.2)
    actor = ClippedActor(config, policy)
    earned = []
    stats: dict[str, float] = {}
    for i in range(25):
        trace_of = policy.sample(obs, generator=gen(i), mode="train")
        trace = trace_of.trace
        worth = policy.thinker.last(trace.thoughts, trace.thought_count)[:, 0]
        earned.append(float(worth.mean()))
        advantage = (worth - worth.mean()) / worth.std()
        rows = torch.arange(256)
        stats = actor.update(
            obs, trace, trace_of.logprob, advantage, rows, progress=0.0, generator=gen(i)
        )
    assert earned[-1] > earned[0] + 0.5
    # Thoughts are worth having, so it has more of them than the one of a fresh mind.
    assert stats["thoughts"] > 1.2
    # And without noise it does the same.
    last, count = policy.thinker.settled(policy.look(obs[:1]).seen)
    assert float(last[0, 0].detach()) > 0.5 and int(count) == 2


def test_stopping_that_paid_becomes_likelier() -> None:
    policy = make(2, moved=False)
    obs = Obs({}, torch.zeros(256, 3), ["push"] * 256)
    actor = ClippedActor(PPOConfig(minibatch_size=128, epochs=2, lr=3e-3, lr_warmup=0), policy)
    stats: dict[str, float] = {}
    for i in range(20):
        sample = policy.sample(obs, generator=gen(i), mode="train")
        worth = -sample.trace.thought_count.float()
        advantage = (worth - worth.mean()) / worth.std().clamp_min(1e-3)
        stats = actor.update(
            obs, sample.trace, sample.logprob, advantage, torch.arange(256),
            progress=0.0, generator=gen(i),
        )  # fmt: skip
    assert stats["thoughts"] < 0.5
    assert int(policy.thinker.settled(policy.look(obs[:1]).seen)[1]) == 0


def test_the_value_depends_on_nothing_that_was_drawn() -> None:
    policy = make()
    with torch.no_grad():
        for parameter in policy.critic.parameters():
            parameter.normal_(generator=gen(1))
    values = [policy.sample(seen(), generator=gen(i), mode="train").value for i in range(2)]
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(values[0], policy.value(seen()))


def test_without_noise_it_thinks_the_means_and_stops_above_one_half() -> None:
    policy = make()
    thinker: Any = policy.thinker
    summary = 2 * torch.randn(40, 16, generator=gen(7))
    with torch.no_grad():
        thinker.net[-1].weight[-1].normal_(generator=gen(2))
        last, count = thinker.settled(summary)
        for n in range(40):
            z, thoughts = torch.zeros(4), 0
            for j in range(3):
                out = thinker.net(torch.cat([summary[n], z]))
                if torch.sigmoid(out[-1] + thinker.stop[j]) > 0.5:
                    break
                z, thoughts = z + out[:4], thoughts + 1
            torch.testing.assert_close(last[n], z, atol=1e-5, rtol=1e-5)
            assert int(count[n]) == thoughts
    assert len(set(count.tolist())) > 1


def test_imitation_is_the_mean_over_the_number_of_thoughts() -> None:
    policy = make(thought_cost=0.0)
    obs = seen()
    noisy, target = (torch.randn(6, 2, 2, generator=gen(i)) for i in range(2))
    t = torch.rand(6, generator=gen(2))
    mask = torch.rand(6, 2, generator=gen(3)) > 0.3
    target[~mask] = math.nan
    noise = torch.randn(6, policy.imitation_noise, generator=gen(4))
    context = policy.encode(obs)
    found = context_loss(policy)(context, noisy, t, target, mask, noise)
    ends, chance, _ = policy.thinker.every_end(context.seen, noise)
    assert ends.shape == (6, 4, 4)
    torch.testing.assert_close(chance.sum(1), torch.ones(6))
    expected = torch.zeros(())
    for j in range(4):
        after = policy.after_thought(context, ends[:, j])
        velocity = policy.velocity(after, noisy[:, None], t[:, None])[:, 0]
        error = torch.where(mask[..., None], velocity - target, 0.0).square()
        expected = expected + (chance[:, j, None, None] * error).sum() / (2 * mask.sum())
    torch.testing.assert_close(found, expected)
    # The cost is added with its weight.
    dear = make(thought_cost=0.5)
    cost = dear.thinker.every_end(context.seen, noise)[2]
    weighted = (cost * mask.sum(1)).sum() / mask.sum()
    more = context_loss(dear)(dear.encode(obs), noisy, t, target, mask, noise)
    torch.testing.assert_close(more, expected + 0.5 * weighted)
    # It trains the thoughts, the stopping and what acts on them.
    more.backward()
    for parameter in dear.thinker.parameters():
        assert parameter.grad.abs().sum() > 0


def test_imitation_draws_alike_and_may_be_taken_in_pieces() -> None:
    policy = make()
    actions = torch.randn(6, 2, 2, generator=gen(1)).clamp(-1, 1)
    mask = torch.ones(6, 2, dtype=torch.bool)
    mask[4:, 1] = False
    loss, given, mask, noise = drawn_imitation(policy, actions, mask, gen(3))
    obs = seen()
    whole = loss(obs, *given, mask, *noise)
    parts = torch.zeros(())
    for rows in (torch.arange(2), torch.arange(2, 6)):
        own = loss(obs[rows], *(x[rows] for x in given), mask[rows], *(x[rows] for x in noise))
        parts = parts + own * mask[rows].sum() / mask.sum()
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(imitation_loss(policy, obs, actions, mask, gen(3)), whole)


def demonstrations() -> Demonstrations:
    proprio = torch.rand(600, 3, generator=gen()) * 2 - 1
    actions = torch.stack([proprio[:, 0] * proprio[:, 1], proprio[:, 2].abs() - 0.5], dim=1)
    return Demonstrations(
        horizon=2,
        images={},
        proprio=proprio,
        actions=actions,
        episode=torch.arange(600) // 2,
        instruction=torch.zeros(600, dtype=torch.long),
        sentences=["push"],
    )


def test_imitation_learns_and_the_noise_stays_in_its_range() -> None:
    policy = make(2, moved=False)
    sft = SFT(SFTConfig(steps_per_iteration=60, batch_size=32, lr=5e-3, ema=0.9), policy)
    losses = [
        sft.update(demonstrations(), progress=i / 3, generator=gen(i))["loss"] for i in range(3)
    ]
    assert losses[-1] < 0.85 * losses[0]
    summary = sft.result.look(seen(50)).seen
    _, log_std, _ = sft.result.thinker.choices(summary, torch.zeros(50, 1, 4))
    assert (log_std.exp() >= STD_MIN).all() and (log_std.exp() <= STD_MAX).all()


def test_what_scores_no_path_is_refused() -> None:
    pairs: Any = ((FPO, FPOConfig()), (NFT, NFTConfig()))
    for algorithm, config in pairs:
        with pytest.raises(UserError, match=r"policy\.thoughts=3"):
            algorithm(config, make())


def test_settings_that_nothing_reads_or_that_do_not_go_together() -> None:
    with pytest.raises(UserError, match=r"policy\.thought_width"):
        dataclasses.replace(SMALL, thought_width=8)
    with pytest.raises(UserError, match=r"policy\.thought_cost"):
        dataclasses.replace(SMALL, thought_cost=0.5)
    with pytest.raises(UserError, match=r"policy\.shortcut_steps are both set"):
        dataclasses.replace(SMALL, thoughts=2, shortcut_steps=4)


def saved(policy: Any, folder: Any) -> Any:
    meta = {"spec": spec_to_json(SPEC), "config": {"policy": dataclasses.asdict(policy.config)}}
    checkpoint.save(folder, {"policy": policy.state_dict()}, meta)
    return folder


def test_a_checkpoint_brings_thoughts_back_and_may_have_none(tmp_path: Any) -> None:
    policy, fresh = make(), make(moved=False)
    checkpoint.load_weights(saved(policy, tmp_path / "thinks"), fresh, SPEC)
    act = [p.sample(seen(), generator=gen(3), mode="train") for p in (policy, fresh)]
    assert torch.equal(act[0].actions, act[1].actions)
    assert torch.equal(act[0].logprob, act[1].logprob)
    # One that acts without thoughts can learn to think.
    plain = make(0)
    checkpoint.load_weights(saved(plain, tmp_path / "plain"), fresh := make(moved=False), SPEC)
    act = [p.sample(seen(), generator=gen(3), mode="eval") for p in (plain, fresh)]
    assert torch.equal(act[0].actions, act[1].actions)
    # Weights that were trained with thoughts do not act without, or with another number.
    for other in (make(0), make(2)):
        with pytest.raises(UserError, match=r"policy\.thoughts was 3"):
            checkpoint.load_weights(tmp_path / "thinks", other, SPEC)


def test_a_trace_with_thoughts_crosses_between_machines() -> None:
    trace = make().sample(seen(), generator=gen(3), mode="train").trace
    back = from_bytes(to_bytes(trace))
    assert isinstance(back, DenoisingTrace)
    for name in ("x", "stochastic", "thoughts", "thought_count"):
        assert torch.equal(getattr(back, name), getattr(trace, name))
    both = DenoisingTrace.cat([trace[:2], trace[2:]])
    assert both.thoughts is not None and torch.equal(both.thoughts, trace.thoughts)


def test_the_exported_graph_thinks_as_the_policy_does() -> None:
    policy = make()
    graph = NoiseFree(policy)
    inputs = example_inputs(graph)
    program = torch.export.export(graph, tuple(inputs))
    torch.testing.assert_close(program.module()(*inputs), graph(*inputs))
