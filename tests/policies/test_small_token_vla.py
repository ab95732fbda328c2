"""The small policy of action tokens: contract, what a token sees, imitation, PPO, GRPO and PA-RL."""

import dataclasses
import math

import pytest
import torch
from scale_runs import GRPO, PPO
from vla_models import SPEC, gen, observation, stir

from embodyrl.algorithms.grpo import GRPO as Grpo
from embodyrl.algorithms.grpo import GRPOConfig
from embodyrl.algorithms.pa_rl import PARL, PARLConfig
from embodyrl.algorithms.ppo import PPO as Ppo
from embodyrl.algorithms.ppo import PPOConfig
from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.build import make_policy
from embodyrl.checks import check_policy
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.functional.masked_diffusion import MASKED
from embodyrl.policies.small_token_vla import SmallTokenVLAConfig
from embodyrl.rollouts.batches import (
    Episode,
    EpisodeBatch,
    GroupBatch,
    RolloutBatch,
    TransitionBatch,
    Transitions,
)

MASKED_STEPS = {"decoding": "masked", "draft_steps": 3, "edit_steps": 2, "edit_tokens": 3}
DECODINGS = [{"decoding": "parallel"}, {"decoding": "autoregressive"}, MASKED_STEPS]


def make(**settings):
    small = {"horizon": 2, "bins": 8, "width": 16, "layers": 2, "heads": 2, "critic_width": 16}
    return make_policy(SmallTokenVLAConfig(**{**small, **settings}), SPEC, 0)


def stirred(**settings):
    policy = make(**settings)
    stir(policy, gen())
    return policy


@pytest.mark.parametrize("execute", [0, 1])
@pytest.mark.parametrize("decoding", DECODINGS)
def test_it_keeps_the_promises_of_a_policy(decoding, execute):
    policy = stirred(**decoding, execute=execute)
    abilities = check_policy(policy, observation(), SPEC)
    assert {"ScoresPaths", "HasValue", "Chooses", "Imitates"} <= set(abilities)
    chooses = stirred(**decoding, execute=execute, chooser_width=8, proposals=2)
    chooses.chooser.ready.fill_(True)
    check_policy(chooses, observation(), SPEC)


@pytest.mark.parametrize("decoding", DECODINGS)
def test_a_token_sees_what_its_decoding_says(decoding):
    policy = stirred(**decoding)
    context = policy.encode(observation())
    tokens = torch.zeros(3, 8, dtype=torch.long)
    other = tokens.clone()
    other[:, 3] = 5
    with torch.no_grad():
        a, b = policy.logits(context, tokens), policy.logits(context, other)
    moved = (a - b).abs().amax((0, 2)) > 1e-6
    expected = {
        "parallel": [False] * 8,
        "autoregressive": [False] * 4 + [True] * 4,
        "masked": [True] * 8,
    }[decoding["decoding"]]
    assert moved.tolist() == expected


def test_tokens_said_one_by_one_are_those_of_one_pass():
    policy = stirred(decoding="autoregressive")
    obs = observation()
    context = policy.encode(obs)
    with torch.no_grad():
        tokens = policy._draw_tokens(context, 3, gen(), "eval")
        assert torch.equal(policy.logits(context, tokens).argmax(-1), tokens)
    # The keys and values of the prompt are left as they were.
    assert context.cache.layers[0].keys.shape[2] == context.mask.shape[1]


def test_the_trace_of_a_masked_policy_is_its_draft_and_its_edits():
    policy = stirred(**MASKED_STEPS)
    sample = policy.sample(observation(), generator=gen(), mode="train")
    assert sample.trace.x.shape == (3, 6, 4, 4) and sample.logprob.shape == (3, 5)
    tokens, ranks = sample.trace.x[:, :, :2], sample.trace.x[:, :, 2:]
    assert bool((tokens[:, 0] == MASKED).all()) and bool((tokens[:, 3:] != MASKED).all())
    drawn = (ranks[:, 1:] != MASKED).sum((2, 3))
    assert drawn.tolist() == [policy.transition.counts] * 3
    # What a step does not choose stays as it was.
    changed = tokens[:, 1:] != tokens[:, :-1]
    assert not bool((changed & (ranks[:, 1:] == MASKED)).any())
    torch.testing.assert_close(
        policy.normalize_action.inverse(tokens[:, -1]).clamp(-1, 1), sample.actions
    )


def test_parallel_proposals_follow_the_distribution_of_its_samples():
    policy = stirred(decoding="parallel")
    obs = observation()[:1]
    proposals = policy.propose(obs, 600, gen())[0, :, 0, 0]
    with torch.no_grad():
        zeros = torch.zeros(1, 8, dtype=torch.long)
        probability = policy.logits(policy.encode(obs), zeros)[0, 0].softmax(-1)
    middles = policy.normalize_action.inverse(torch.arange(8.0)[:, None].expand(8, 4))[:, 0]
    seen = (proposals[:, None] - middles).abs().argmin(1)
    share = torch.nn.functional.one_hot(seen, 8).float().mean(0)
    assert float((share - probability).abs().max()) < 0.08  # four standard errors


def pictures(n: int) -> Demonstrations:
    """Solved episodes of two frames; the picture says what to do, and where the arm is later."""
    g = gen()
    high = torch.rand(n, generator=g) < 0.5
    picture = torch.zeros(n, 24, 32, 3, dtype=torch.uint8)
    picture[high, 4:12, 4:12] = 255
    picture[~high, 12:20, 20:28] = 255
    picture = picture.repeat_interleave(2, 0)
    high = high.repeat_interleave(2)
    sign = torch.where(high, 1.0, -1.0)
    proprio = torch.zeros(2 * n, 6)
    proprio[1::2, 0] = sign[1::2]
    actions = sign[:, None].expand(-1, 4) * 0.5
    sentence = torch.zeros(2 * n, dtype=torch.long)
    episode = torch.arange(n).repeat_interleave(2)
    return Demonstrations(
        2, {"front": picture.numpy()}, proprio, actions, episode, sentence, ["go"]
    )


@pytest.mark.parametrize("decoding", DECODINGS)
def test_imitation_learns_what_the_picture_says_with_hindsight_beside_it(decoding):
    policy = make(**decoding, smoothing=0.5)
    demos = pictures(32)
    config = SFTConfig(
        steps_per_iteration=30, batch_size=32, lr=3e-3, warmup=0.0, shift=0, ema=0.5,
        hindsight_coef=0.3, microbatch_size=20,
    )  # fmt: skip
    sft = SFT(config, policy)
    rows = [sft.update(demos, progress=0.0, generator=gen(seed)) for seed in range(3)]
    assert rows[-1]["loss"] < 0.75 * rows[0]["loss"]
    assert rows[-1]["hindsight_loss"] < rows[0]["hindsight_loss"]
    obs, actions, _ = demos.batch(torch.arange(0, 64, 2))
    done = sft.result.sample(obs, generator=gen(), mode="eval").actions
    assert float((done - actions).abs().mean()) < 0.1


def test_smoothing_spreads_the_target_over_the_bins_beside_it():
    sharp, smooth = make(smoothing=0.0), make(smoothing=1.0)
    logits = torch.zeros(1, 1, 8)
    logits[0, 0, 3] = 4.0
    for token in (3, 5):
        plain = sharp._token_loss(logits, torch.tensor([[token]]))
        torch.testing.assert_close(plain, -logits.log_softmax(-1)[..., token])
    weight = (-0.5 * (torch.arange(8.0) - 5) ** 2).exp()
    expected = -(weight / weight.sum() * logits[0, 0].log_softmax(-1)).sum()
    loss = smooth._token_loss(logits, torch.tensor([[5]]))[0, 0]
    torch.testing.assert_close(loss, expected)


def test_what_is_not_shown_of_a_plan_is_masked_and_not_asked_for():
    policy = stirred(**MASKED_STEPS)
    obs = observation()
    noise = torch.randn(3, policy.imitation_noise, generator=gen())
    one = torch.full((3, 1, 4), 0.3)
    short = policy.imitation_loss(obs, one, torch.ones(3, 1, dtype=torch.bool), noise)
    rest = torch.cat([one, torch.full((3, 1, 4), -0.9)], dim=1)
    whole = torch.tensor([[True, False]] * 3)
    torch.testing.assert_close(policy.imitation_loss(obs, rest, whole, noise), short)


@pytest.mark.parametrize("decoding", DECODINGS)
def test_ppo_and_grpo_make_good_tokens_likelier(decoding):
    steps = {"epochs": 16, "lr": 1e-2, "lr_warmup": 0, "clip_range": 0.5, "clip_range_high": 1.0}
    for kind in ("ppo", "grpo"):
        policy = make(**decoding)
        obs = observation()[torch.arange(96) % 3]
        sample = policy.sample(obs, generator=gen(5), mode="train")
        reward = (sample.actions[:, 0, 0] > 0).float()
        if kind == "ppo":
            settings = {**PPO, "warmup_iterations": 0, **steps}
            algorithm = Ppo(PPOConfig(**{**settings, "minibatch_size": 96}), policy)
            done = torch.ones(1, 96, dtype=torch.bool)
            per_action = torch.stack([reward, torch.zeros(96)], dim=1)[None]
            batch = RolloutBatch(
                obs, sample.trace, sample.logprob, sample.value[None], sample.value[None],
                per_action, torch.ones(1, 96, 2, dtype=torch.bool), done, ~done,
            )  # fmt: skip
        else:
            settings = {**GRPO, "rewards": ("success",), "num_episodes": 96, "group_size": 32}
            settings |= steps | {"minibatch_size": 96}
            algorithm = Grpo(GRPOConfig(**settings), policy)
            episodes = [Episode(0, "t", bool(r), float(r), 2) for r in reward]
            kept = EpisodeBatch(obs, sample.trace, sample.logprob, torch.arange(96), episodes, 192)
            batch = GroupBatch(kept, episodes, 192, 1)
        row = algorithm.update(batch, progress=0.0, generator=gen())
        assert row["actor_epochs"] == 16
        # The same random numbers.
        again = policy.sample(obs, generator=gen(5), mode="train").actions[:, 0, 0] > 0
        assert float(again.float().mean()) > float(reward.mean()) + 0.05


@pytest.mark.parametrize("decoding", DECODINGS)
def test_pa_rl_trains_it_off_policy(decoding):
    policy = stirred(**decoding, chooser_width=8, proposals=3, execute=1)
    before = {name: value.clone() for name, value in policy.named_parameters()}
    config = PARLConfig(
        warmup_chunks=3, critic_warmup=1, mc_steps=1, batch_size=3, actor_batch_size=3, capacity=8,
        critic_utd=1.0, actor_utd=1.0, hindsight_steps=2,
    )  # fmt: skip
    algorithm = PARL(config, policy)
    obs = observation()
    chunks = Transitions(
        obs,
        algorithm.act(obs, gen())[0],
        torch.rand(3, 1, generator=gen()),
        torch.ones(3, 1, dtype=torch.bool),
        torch.tensor([True, False, False]),
        torch.tensor([False, True, False]),
        observation(),
        episode=torch.arange(3),
        success=torch.tensor([True, False, False]),
    )
    row = algorithm.update(TransitionBatch(chunks), progress=0.0, generator=gen())
    assert row["actor_steps"] == 3 and all(math.isfinite(value) for value in row.values())
    moved = {k for k, v in policy.named_parameters() if not torch.equal(v, before[k])}
    assert "head.weight" in moved and any(name.startswith("chooser.") for name in moved)
    assert policy.chooses


def test_it_acts_from_state_alone_too():
    spec = dataclasses.replace(SPEC, cameras={})
    policy = make_policy(SmallTokenVLAConfig(width=16, heads=2, layers=1), spec, 0)
    obs = dataclasses.replace(observation(), images={})
    check_policy(policy, obs, spec)


def test_settings_that_nothing_reads_are_refused():
    with pytest.raises(UserError, match=r"draft_steps.*decoding=autoregressive"):
        make(decoding="autoregressive", draft_steps=2)
    with pytest.raises(UserError, match=r"edit_tokens.*edit_steps=0"):
        make(decoding="masked", draft_steps=2, edit_tokens=2)
    with pytest.raises(UserError, match=r"8 tokens.*9 steps"):
        make(decoding="masked", draft_steps=9)
    with pytest.raises(UserError, match=r"policy\.width 18 is not a multiple"):
        make(width=18, heads=4)
