"""A VLA with actions as tokens: contract, exact likelihoods, imitation, PPO and GRPO."""

import dataclasses
import math

import pytest
import torch
from scale_runs import GRPO, PPO
from vla_models import SENTENCES, SPEC, gen, observation, stir

from embodyrl.algorithms.grpo import GRPO as Grpo
from embodyrl.algorithms.grpo import GRPOConfig
from embodyrl.algorithms.nft import NFT, NFTConfig
from embodyrl.algorithms.pa_rl import PARL, PARLConfig
from embodyrl.algorithms.ppo import PPO as Ppo
from embodyrl.algorithms.ppo import PPOConfig
from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.build import make_policy
from embodyrl.checks import check_policy
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.policies.vla.action_bins import ActionBins
from embodyrl.policies.vla.make_small import make_small_smolvla
from embodyrl.policies.vla.tokens import TokenVLAConfig
from embodyrl.rollouts.batches import (
    Episode,
    EpisodeBatch,
    GroupBatch,
    RolloutBatch,
    TransitionBatch,
    Transitions,
)

pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")
TINY = {
    "width": 16,
    "layers": 2,
    "heads": 2,
    "vision_layers": 1,
    "image_size": 16,
    "patch_size": 4,
    "max_dim": 8,
}


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    return make_small_smolvla(tmp_path_factory.mktemp("small"), SENTENCES, **TINY) / "vlm"


def make(vlm, **settings):
    config = TokenVLAConfig(
        vlm=str(vlm), random_weights=True, horizon=2, bins=8, critic_width=16, **settings
    )
    return make_policy(config, SPEC, 0)


def test_a_loss_that_its_imitation_does_not_read_is_refused(vlm):
    with pytest.raises(UserError, match=r"hindsight_coef.*imitation loss of its own"):
        SFT(SFTConfig(hindsight_coef=1.0), make(vlm))


@pytest.mark.parametrize("decoding", ["parallel", "autoregressive"])
def test_it_keeps_the_promises_of_a_policy(vlm, decoding):
    policy = make(vlm, decoding=decoding)
    stir(policy, gen())
    check_policy(policy, observation(), SPEC)
    chooses = make(vlm, decoding=decoding, chooser_width=8, proposals=2)
    stir(chooses, gen())
    chooses.chooser.ready.fill_(True)
    check_policy(chooses, observation(), SPEC)
    sample = policy.sample(observation(), generator=gen(), mode="train")
    words = sample.trace.x[:, 1]
    assert torch.equal(words, words.round()) and words.min() >= 0 and words.max() <= 7
    torch.testing.assert_close(policy.normalize_action.inverse(words).clamp(-1, 1), sample.actions)


@pytest.mark.parametrize("decoding", ["parallel", "autoregressive"])
def test_a_word_depends_on_those_before_it_only_where_it_is_said_after_them(vlm, decoding):
    policy = make(vlm, decoding=decoding)
    stir(policy, gen())
    context = policy.encode(observation())
    words = torch.zeros(3, 8, dtype=torch.long)
    other = words.clone()
    other[:, 3] = 5
    with torch.no_grad():
        a, b = policy.logits(context, words), policy.logits(context, other)
    torch.testing.assert_close(a[:, :4], b[:, :4])
    assert torch.allclose(a[:, 4:], b[:, 4:], atol=1e-6) == (decoding == "parallel")


@pytest.mark.parametrize("decoding", ["parallel", "autoregressive"])
def test_what_is_planned_and_not_executed_is_not_drawn(vlm, decoding):
    whole = make(vlm, decoding=decoding)
    stir(whole, gen())
    part = make(vlm, decoding=decoding, execute=1)
    part.load_state_dict(whole.state_dict())
    check_policy(part, observation(), SPEC)
    obs = observation()
    planned = whole.sample(obs, generator=gen(), mode="eval").actions
    executed = part.sample(obs, generator=gen(), mode="eval").actions
    torch.testing.assert_close(executed, planned[:, :1])
    # Its probability is that of the first action's words, whatever would be said after them.
    sample = part.sample(obs, generator=gen(), mode="train")
    words = torch.nn.functional.pad(sample.trace.x[:, 1].flatten(1).long(), (0, 4), value=3)
    with torch.no_grad():
        logits = whole.logits(whole.encode(obs), words).log_softmax(-1)
    first = logits.gather(-1, words[..., None])[:, :4, 0].sum(1, keepdim=True)
    torch.testing.assert_close(sample.logprob, first)
    torch.testing.assert_close(part.evaluate(obs, sample.trace).logprob, first)
    # Imitation learns the whole plan.
    mask = torch.ones(len(obs), 2, dtype=torch.bool)
    torch.testing.assert_close(
        part.imitation_loss(obs, planned, mask), whole.imitation_loss(obs, planned, mask)
    )
    with pytest.raises(UserError, match=r"policy\.execute is 3, but a chunk has 2 actions"):
        make(vlm, decoding=decoding, execute=3)


@pytest.mark.parametrize("execute", [0, 1])
@pytest.mark.parametrize("decoding", ["parallel", "autoregressive"])
def test_pa_rl_trains_it(vlm, decoding, execute):
    policy = make(vlm, decoding=decoding, chooser_width=8, proposals=3, execute=execute)
    stir(policy, gen())
    before = {name: value.clone() for name, value in policy.named_parameters()}
    config = PARLConfig(
        warmup_chunks=3, critic_warmup=1, mc_steps=1, batch_size=3, actor_batch_size=3, capacity=8,
        critic_utd=1.0, actor_utd=1.0, hindsight_steps=2,
    )  # fmt: skip
    algorithm = PARL(config, policy)
    obs = observation()
    n = len(obs)
    chunks = Transitions(
        obs,
        algorithm.act(obs, gen())[0],
        torch.rand(n, execute or 2, generator=gen()),
        torch.ones(n, execute or 2, dtype=torch.bool),
        torch.tensor([True, False, False]),
        torch.tensor([False, True, False]),
        observation(),
        episode=torch.arange(n),
        success=torch.tensor([True, False, False]),
    )
    row = algorithm.update(TransitionBatch(chunks), progress=0.0, generator=gen())
    assert row["actor_steps"] == 3 and all(math.isfinite(value) for value in row.values())
    moved = {k for k, v in policy.named_parameters() if not torch.equal(v, before[k])}
    assert "head.weight" in moved and any(name.startswith("chooser.") for name in moved)
    assert policy.chooses


def test_a_draft_that_is_edited_is_scored_and_learned_from(vlm):
    policy = make(vlm, decoding="masked", draft_steps=3, edit_steps=1, edit_tokens=2, execute=1)
    stir(policy, gen())
    check_policy(policy, observation(), SPEC)
    sample = policy.sample(observation(), generator=gen(), mode="train")
    assert sample.logprob.shape == (3, 4) and sample.trace.x.shape == (3, 5, 4, 4)
    # A token sees those on both sides of it, although the language model is causal.
    context = policy.encode(observation())
    words = torch.zeros(3, 8, dtype=torch.long)
    other = words.clone()
    other[:, 3] = -1
    with torch.no_grad():
        moved = (policy.logits(context, words) - policy.logits(context, other)).abs().amax((0, 2))
    assert bool((moved > 1e-6).all())


def test_sampled_words_have_the_frequencies_that_their_probabilities_say(vlm):
    policy = make(vlm)
    stir(policy, gen())
    obs = observation()[torch.zeros(500, dtype=torch.long)]
    words = policy.sample(obs, generator=gen(3), mode="train").trace.x[:, 1].flatten(1).long()
    with torch.no_grad():
        probabilities = policy.logits(policy.encode(obs[:1]), words[:1]).softmax(-1)[0]
    seen = torch.nn.functional.one_hot(words, 8).float().mean(0)
    assert (seen - probabilities).abs().max() < 0.09  # four standard errors of a share


def test_bins_are_the_data_s_and_their_middles_come_back():
    bins = ActionBins(2, 10)
    bins.fit(torch.stack([torch.linspace(-0.5, 0.3, 1001), torch.zeros(1001)], dim=1))
    numbers = torch.arange(10.0)[:, None].expand(10, 2)
    assert torch.equal(bins(bins.inverse(numbers)), numbers)
    assert bins.low[0] == pytest.approx(-0.492, abs=1e-3) and bins.high[1] == pytest.approx(0.05)
    assert bins(torch.tensor([[5.0, -5.0]])).tolist() == [[9.0, 0.0]]


@pytest.mark.parametrize("decoding", ["parallel", "autoregressive"])
def test_imitation_learns_which_chunk_goes_with_which_state(vlm, decoding):
    policy, g = make(vlm, decoding=decoding), gen()
    proprio = torch.randn(64, 6, generator=g).sign()
    actions = proprio[:, :4] * 0.5
    picture = torch.zeros(64, 24, 32, 3, dtype=torch.uint8).numpy()
    sentence = torch.zeros(64, dtype=torch.long)
    demos = Demonstrations(
        2, {"front": picture}, proprio, actions, torch.arange(64), sentence, ["go"]
    )
    config = SFTConfig(
        steps_per_iteration=250,
        batch_size=32,
        lr=3e-3,
        warmup=0.0,
        shift=0,
        ema=0.5,
        microbatch_size=20,
    )
    before = float(policy.imitation_loss(*demos.batch(torch.arange(64))))
    sft = SFT(config, policy)
    sft.update(demos, progress=0.0, generator=g)
    after = float(sft.result.imitation_loss(*demos.batch(torch.arange(64))))
    assert (
        before == pytest.approx(2.08, abs=0.01) and after < 0.5
    )  # log 8; blind to the state log 2


def test_imitation_beside_rl_is_its_own_and_there_is_no_distance_to_a_reference(vlm):
    policy = make(vlm)
    picture = torch.zeros(8, 24, 32, 3, dtype=torch.uint8).numpy()
    zeros = torch.zeros(8, dtype=torch.long)
    actions = torch.rand(8, 4, generator=gen()) - 0.5
    proprio = torch.randn(8, 6, generator=gen(1))
    demos = Demonstrations(2, {"front": picture}, proprio, actions, torch.arange(8), zeros, ["go"])
    for cls, config in ((Ppo, PPOConfig), (Grpo, GRPOConfig)):
        algorithm = cls(config(bc_coef=0.5), policy)
        algorithm.add_demos(demos)
        rows, share = algorithm.actor.anchors.imitation(6, gen(2))
        own = policy.imitation_loss(*demos.batch(demos.draw(6, gen(2))))
        torch.testing.assert_close(share(rows)[0], 0.5 * own)
        with pytest.raises(UserError, match="no flow whose velocities"):
            cls(config(reference_coef=1.0), policy)


def rollout(policy, good) -> tuple:
    """One decision each in 48 observations; those whose first word is high are good."""
    obs = observation()[torch.arange(48) % 3]
    sample = policy.sample(obs, generator=gen(5), mode="train")
    return obs, sample, good(sample.trace.x[:, 1, 0, 0])


def chance(policy, obs, sample) -> float:
    """Of a high first word."""
    words = sample.trace.x[:, 1].flatten(1).long()
    return float(policy.logits(policy.encode(obs), words)[:, 0].softmax(-1)[:, 4:].sum(-1).mean())


def test_ppo_and_grpo_make_good_words_likelier(vlm):
    for kind in ("ppo", "grpo"):
        policy = make(vlm)
        obs, sample, reward = rollout(policy, lambda word: (word >= 4).float())
        if kind == "ppo":
            settings = {
                **PPO,
                "warmup_iterations": 0,
                "epochs": 4,
                "lr": 3e-3,
                "lr_warmup": 0,
                "minibatch_size": 48,
            }
            algorithm, done = (
                Ppo(PPOConfig(**settings), policy),
                torch.ones(1, 48, dtype=torch.bool),
            )
            per_action = torch.stack([reward, torch.zeros(48)], dim=1)[None]
            batch = RolloutBatch(
                obs, sample.trace, sample.logprob, sample.value[None], sample.value[None],
                per_action, torch.ones(1, 48, 2, dtype=torch.bool), done, ~done,
            )  # fmt: skip
        else:
            settings = {
                **GRPO,
                "rewards": ("success",),
                "num_episodes": 48,
                "group_size": 16,
                "epochs": 4,
                "lr": 3e-3,
            }
            algorithm = Grpo(GRPOConfig(**{**settings, "lr_warmup": 0}), policy)
            episodes = [Episode(0, "t", bool(r), float(r), 2) for r in reward]
            kept = EpisodeBatch(obs, sample.trace, sample.logprob, torch.arange(48), episodes, 96)
            batch = GroupBatch(kept, episodes, 96, 1)
        with torch.no_grad():
            before = chance(policy, obs, sample)
        row = algorithm.update(batch, progress=0.0, generator=gen())
        with torch.no_grad():
            assert chance(policy, obs, sample) > before + 0.03
        assert row["ratio"] > 0 and row["actor_epochs"] == 4


def test_what_it_cannot_do_is_refused(vlm):
    with pytest.raises(UserError, match=r"nft needs a policy with the ability HasFlow.*velocity"):
        NFT(NFTConfig(), make(vlm))
    with pytest.raises(UserError, match="Did you mean 'parallel'"):
        make_policy(TokenVLAConfig(decoding="paralel"), SPEC, 0)
    with pytest.raises(UserError, match=r"policy\.vlm"):
        make_policy(TokenVLAConfig(), dataclasses.replace(SPEC), 0)
