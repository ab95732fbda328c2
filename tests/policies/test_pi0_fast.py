"""pi0-FAST, built small: equal to LeRobot's own, exact probabilities, training, files, refusals."""

import copy
import dataclasses
import json
import math
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from fast_models import CHUNK, architecture, chunks, make, published, tokenizers
from scale_runs import GRPO, PPO
from vla_models import SPEC, gen, lerobot_batch, lerobot_from, observation, shrink

from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.checks import check_policy
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.policies.vla.fast_tokenizer import FastTokenizer
from embodyrl.policies.vla.token_base import NO_TOKEN
from embodyrl.types import Obs

pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")
pytest.importorskip("num2words", reason="the extra vla is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:pi0_fast drew tokens that stand for no actions")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """LeRobot builds its network small; the code of FAST folders goes to a folder of its own."""
    import transformers.dynamic_module_utils as modules

    with pytest.MonkeyPatch.context() as patch:
        shrink("pi0_fast", patch)
        patch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture(scope="module")
def untrained(small, tmp_path_factory):
    return published(tmp_path_factory.mktemp("pi0_fast"))


def demonstrations(count=128):
    """A white picture means one way, a black one the other; how far is drawn."""
    way = torch.arange(count) % 2
    images = way.mul(255).to(torch.uint8)[:, None, None, None].expand(count, 24, 32, 3)
    actions = (way * 0.6 - 0.3)[:, None] + 0.1 * torch.randn(count, 4, generator=gen(4))
    zeros = torch.zeros(count, dtype=torch.long)
    proprio = torch.randn(count, 6, generator=gen(3)) * 0.15
    return Demonstrations(
        CHUNK, {"front": images.numpy()}, proprio, actions, torch.arange(count), zeros, ["go"]
    )


@pytest.fixture(scope="module")
def imitator(untrained):
    """It imitates well enough that most chunks are said to their end."""
    config = SFTConfig(
        steps_per_iteration=100, batch_size=16, lr=1e-2, warmup=0.0, shift=0, ema=0.5
    )
    sft = SFT(config, make(untrained, train="all"))
    sft.update(demonstrations(), progress=0.0, generator=gen())
    return sft.result


@pytest.fixture(scope="module")
def trained(imitator, tmp_path_factory):
    return imitator.save_lerobot(tmp_path_factory.mktemp("imitator") / "out")


def seen(count=6):
    obs = demonstrations().batch(torch.arange(count))[0]
    return Obs(obs.images, obs.proprio, obs.instruction, torch.zeros(count, 5))


def prepared(theirs, pre, obs):
    """What LeRobot's network takes: pictures, tokens and their masks."""
    batch = pre(lerobot_batch(obs))
    words = (batch["observation.language.tokens"], batch["observation.language.attention_mask"])
    return (*theirs._preprocess_images(batch), *words)


def tokens_of(sample):
    return sample.trace.x[:, 1].flatten(1).long()


# The FAST tokenizer.


def test_fast_tokens_are_those_of_the_closed_form(tmp_path):
    folder = tokenizers(tmp_path)["action_tokenizer_name"]
    fast = FastTokenizer(tmp_path / "fast", CHUNK, 4)
    said = json.loads((tmp_path / "fast" / "processor_config.json").read_text())
    plans = chunks(50, seed=4)
    # The DCT-II as a matrix: row k is a cosine of k half waves over the chunk.
    k, t = np.arange(CHUNK)[:, None], np.arange(CHUNK)
    basis = np.cos(np.pi * k * (2 * t + 1) / (2 * CHUNK)) * np.sqrt(2 / CHUNK)
    basis[0] /= np.sqrt(2)
    numbers = np.round(np.einsum("kt,bta->bka", basis, plans) * said["scale"])
    from tokenizers import Tokenizer

    bpe = Tokenizer.from_file(folder + "/bpe_tokenizer/tokenizer.json")
    for plan, number, ids in zip(plans, numbers, fast(plans), strict=True):
        text = "".join(chr(int(n) - said["min_token"]) for n in number.flatten())
        assert ids == bpe.encode(text).ids and len(ids) <= CHUNK * 4
        expected = basis.T @ (number / said["scale"])
        np.testing.assert_allclose(fast.decode(np.array(ids)), expected, atol=1e-12)
        # Half a step of every coefficient is what rounding may cost.
        assert np.abs(expected - plan).max() <= 0.5 / said["scale"] * np.abs(basis).sum(0).max()
    assert min(map(len, fast(plans))) < CHUNK * 4  # that pairs are merged


def test_fast_tokens_are_those_of_its_code_in_the_published_layout(small, tmp_path):
    from transformers import AutoProcessor

    theirs = AutoProcessor.from_pretrained(
        tokenizers(tmp_path)["action_tokenizer_name"], trust_remote_code=True
    )
    fast = FastTokenizer(tmp_path / "fast", CHUNK, 4)
    plans = torch.from_numpy(chunks(200, seed=5)).float() * 2
    ids = fast(plans)
    assert ids == theirs(plans)
    ours = np.stack([fast.decode(np.array(row)) for row in ids])
    np.testing.assert_array_equal(ours, theirs.decode(ids, time_horizon=CHUNK, action_dim=4))


def test_files_may_lie_in_the_folder_itself(tmp_path):
    """As in physical-intelligence/fast."""
    tokenizers(tmp_path)
    plans, fast = chunks(9), tmp_path / "fast"
    ids = FastTokenizer(fast, CHUNK, 4)(plans)
    for file in (fast / "bpe_tokenizer").iterdir():
        file.rename(fast / file.name)
    (fast / "bpe_tokenizer").rmdir()
    assert FastTokenizer(fast, CHUNK, 4)(plans) == ids


def test_coefficients_that_it_cannot_write_are_told(tmp_path):
    tokenizers(tmp_path)
    fast = FastTokenizer(tmp_path / "fast", CHUNK, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(chunks(20) * 3)
    with pytest.warns(UserWarning, match="cannot write some chunks"):
        fast(np.full((1, CHUNK, 4), 1e5))


# Equal to LeRobot's own.


@pytest.mark.parametrize("which", ["untrained", "trained"])
def test_its_tokens_and_actions_are_lerobots_own(which, request):
    folder, obs = request.getfixturevalue(which), seen()
    if which == "untrained":  # what a random network says begins with anything
        folder = changed(folder, folder.parent / "lax", validate_action_token_prefix=False)
    ours, (theirs, pre, post) = make(folder), lerobot_from(folder)
    said = theirs.model.sample_actions_fast_kv_cache(
        *prepared(theirs, pre, obs), max_decoding_steps=24, temperature=0.0
    )
    tokens = ours._draw_tokens(ours.encode(obs), len(obs), gen(), "eval")
    drawn = tokens != NO_TOKEN
    assert torch.equal(tokens[drawn], said[drawn])
    actions = ours.sample(obs, generator=gen(), mode="eval").actions
    expected = post(theirs.predict_action_chunk(pre(lerobot_batch(obs))))
    torch.testing.assert_close(actions, expected.clamp(-1, 1), atol=1e-6, rtol=0)
    if which == "trained":
        # Each says its actions to the end, and they are those of its picture.
        last = tokens.gather(1, drawn.sum(1, keepdim=True) - 1)
        assert (last == ours.end).all() and not drawn[:, -1].any()
        wanted = demonstrations().batch(torch.arange(6))[1].mean((1, 2))
        assert (actions.mean((1, 2)) - wanted).abs().max() < 0.2  # the ways are 0.6 apart


def test_its_probabilities_are_those_that_lerobot_draws_from(trained, monkeypatch):
    ours, obs = make(trained, temperature=1.6), seen()
    sample = ours.sample(obs, generator=gen(7), mode="train")
    tokens = tokens_of(sample)
    drawn = tokens != NO_TOKEN
    assert len(set(drawn.sum(1).tolist())) > 1  # chunks of several lengths
    theirs, pre, _ = lerobot_from(trained)
    seen_there = []

    def forced(probabilities, num_samples):
        place = len(seen_there)
        seen_there.append(probabilities)
        return tokens[:, place : place + 1].clamp_min(0)

    monkeypatch.setattr(torch, "multinomial", forced)
    theirs.model.sample_actions_fast_kv_cache(
        *prepared(theirs, pre, obs), max_decoding_steps=24, temperature=1.6
    )
    log_probs = torch.stack(seen_there, dim=1).log()
    expected = (log_probs.gather(-1, tokens.clamp_min(0)[..., None])[..., 0] * drawn).sum(1)
    torch.testing.assert_close(sample.logprob[:, 0], expected, rtol=1e-4, atol=1e-4)
    entropy = (-(log_probs.exp() * log_probs).sum(-1) * drawn).sum(1) / drawn.sum(1)
    scored = ours.evaluate(obs, sample.trace)
    torch.testing.assert_close(scored.entropy, entropy, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scored.logprob, sample.logprob, rtol=1e-5, atol=1e-5)


def test_the_imitation_loss_is_lerobots_own(trained):
    ours, obs = make(trained, temperature=0.7), observation()
    theirs, pre, _ = lerobot_from(trained)
    actions = torch.rand(3, CHUNK, 4, generator=gen(5)) - 0.5
    batch = pre({**lerobot_batch(obs), "action": actions})
    expected, _ = theirs.forward(batch)
    every = torch.ones(3, CHUNK, dtype=torch.bool)
    torch.testing.assert_close(ours.imitation_loss(obs, actions, every), expected)
    # Behind the start of text stand the same tokens.
    tokens = ours.words.encode(ours.normalize_action(actions))
    theirs_said = batch["action.tokens"][:, 1 : tokens.shape[1] + 1]
    assert torch.equal(tokens[tokens != NO_TOKEN], theirs_said[tokens != NO_TOKEN])
    assert (batch["action.token_mask"].sum(1) == (tokens != NO_TOKEN).sum(1) + 1).all()
    # A row of which nothing counts is left out.
    none = every.clone()
    none[2] = False
    rest = ours.imitation_loss(obs[:2], actions[:2], every[:2])
    torch.testing.assert_close(ours.imitation_loss(obs, actions, none), rest)
    with pytest.raises(UserError, match="imitates plans of 4 actions, and was given 2"):
        ours.imitation_loss(obs, actions[:, :2], every[:, :2])


def test_tokens_beyond_the_most_are_left_out_as_in_lerobot(trained):
    folder = changed(trained, trained.parent / "short", max_action_tokens=9)
    pipeline = json.loads((folder / "policy_preprocessor.json").read_text())
    (step,) = (s for s in pipeline["steps"] if "action_tokenizer" in s["registry_name"])
    step["config"]["max_action_tokens"] = 9
    (folder / "policy_preprocessor.json").write_text(json.dumps(pipeline))
    obs, actions = observation(), torch.rand(3, CHUNK, 4, generator=gen(5)) - 0.5
    theirs, pre, _ = lerobot_from(folder)
    expected, _ = theirs.forward(pre({**lerobot_batch(obs), "action": actions}))
    loss = make(folder).imitation_loss(obs, actions, torch.ones(3, CHUNK, dtype=torch.bool))
    torch.testing.assert_close(loss, expected)


def odd_chunks(words):
    """Chunks that no demonstration would say: what -> tokens."""
    first, prefix, end = words._first, words._prefix, words.end
    good = [first - i for i in words._fast(chunks(1, seed=8))[0]]
    byte = words._fast._tokenizer.token_to_id
    return {
        "nothing": [*prefix, end],
        "no end": [*prefix, *good],
        "too short": [*prefix, *good[:2], end],
        "too long": [*prefix, *good, *good, end],
        "prefix twice": [*prefix, *good[:3], *prefix, *good[3:], end],
        "words beyond the tokenizer": [*prefix, *good[:3], 5, 400, *good[3:], end],
        "tokens of image regions": [*prefix, *good, first + 3, end],
        "half a character": [*prefix, first - byte("\u00c3"), *good, end],
        "more behind the end": [*prefix, *good, end, *good],
    }


def test_odd_chunks_have_lerobots_outcome(trained):
    ours, (theirs, _, post) = make(trained), lerobot_from(trained)
    for what, said in odd_chunks(ours.words).items():
        row = torch.tensor([said])
        expected = post(theirs.detokenize_actions(row, action_horizon=CHUNK, action_dim=4))
        torch.testing.assert_close(
            ours.actions_of(row), expected.clamp(-1, 1), atol=1e-6, rtol=0, msg=what
        )
    # Without its beginning LeRobot stops. Here it is a plan of zeros, as what is no FAST token.
    row = torch.tensor([[7, 8, ours.end]])
    with pytest.raises(AssertionError, match="does not start with"):
        theirs.detokenize_actions(row, action_horizon=CHUNK, action_dim=4)
    with pytest.warns(UserWarning, match="stand for no actions"):
        actions = ours.actions_of(row)
    zeros = ours.normalize_action.inverse(torch.zeros(1, CHUNK, 4))
    torch.testing.assert_close(actions, zeros)


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}])
def test_what_we_save_lerobot_loads(trained, tmp_path, settings):
    policy, obs = make(trained, **settings), seen()
    with torch.no_grad():
        for p in policy.actor_parameters():
            p.add_(0.003 * torch.randn(p.shape, generator=gen(9)))
    expected = policy.sample(obs, generator=gen(), mode="eval").actions
    policy.save_lerobot(tmp_path / "out")
    theirs, pre, post = lerobot_from(tmp_path / "out")
    found = post(theirs.predict_action_chunk(pre(lerobot_batch(obs))))
    torch.testing.assert_close(found.clamp(-1, 1), expected, atol=1e-6, rtol=0)
    again = make(tmp_path / "out").sample(obs, generator=gen(), mode="eval").actions
    torch.testing.assert_close(again, expected, atol=1e-6, rtol=0)


# Its promises, and training.


def test_it_keeps_the_promises_of_a_policy(untrained, trained):
    check_policy(make(untrained), observation(), SPEC)
    check_policy(make(trained, temperature=1.6), seen(3), SPEC)
    part = make(trained, execute=2)
    check_policy(part, seen(3), SPEC)
    # It plans as before, and executes the first half.
    whole = make(trained).sample(seen(), generator=gen(), mode="eval").actions
    half = part.sample(seen(), generator=gen(), mode="eval").actions
    assert torch.equal(half, whole[:, :2])
    chooses = make(trained, chooser_width=8, proposals=2, temperature=1.3)
    chooses.chooser.ready.fill_(True)
    check_policy(chooses, seen(3), SPEC)


def test_the_end_counts_and_nothing_behind_it(trained):
    policy, obs = make(trained, temperature=1.6), seen()
    sample = policy.sample(obs, generator=gen(7), mode="train")
    tokens = tokens_of(sample)
    lengths = (tokens != NO_TOKEN).sum(1)
    for row in range(len(obs)):
        said = tokens[row, : lengths[row]]
        assert policy.end not in said[:-1]
        assert said[-1] == policy.end or lengths[row] == policy.num_places
        with torch.no_grad():
            logits = policy.logits(policy.encode(obs[row : row + 1]), said[None])
        each = logits.log_softmax(-1)[0].gather(-1, said[:, None])[:, 0]
        torch.testing.assert_close(each.sum(), sample.logprob[row, 0], rtol=1e-4, atol=1e-4)
        assert each[-1] < -1e-4 or said[-1] != policy.end  # the end's own probability is in it


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_ppo_and_grpo_make_good_actions_likelier(trained, kind):
    from embodyrl.algorithms.grpo import GRPO as Grpo
    from embodyrl.algorithms.grpo import GRPOConfig
    from embodyrl.algorithms.ppo import PPO as Ppo
    from embodyrl.algorithms.ppo import PPOConfig
    from embodyrl.rollouts.batches import Episode, EpisodeBatch, GroupBatch, RolloutBatch

    policy = make(trained)
    obs = seen(2)[torch.arange(32) % 2]
    sample = policy.sample(obs, generator=gen(5), mode="train")
    good = sample.actions[:, 0, 0] > sample.actions[:, 0, 0].median()
    reward = good.float()
    settings = {"epochs": 4, "lr": 1e-3, "lr_warmup": 0}
    if kind == "ppo":
        settings = {**PPO, **settings, "warmup_iterations": 0, "minibatch_size": 32}
        algorithm = Ppo(PPOConfig(**settings), policy)
        done = torch.ones(1, 32, dtype=torch.bool)
        valid = torch.ones(1, 32, CHUNK, dtype=torch.bool)
        per_action = torch.nn.functional.pad(reward[None, :, None], (0, CHUNK - 1))
        batch = RolloutBatch(
            obs, sample.trace, sample.logprob, sample.value[None], sample.value[None],
            per_action, valid, done, ~done,
        )  # fmt: skip
    else:
        groups = {"rewards": ("success",), "num_episodes": 32, "group_size": 16}
        algorithm = Grpo(GRPOConfig(**{**GRPO, **groups, **settings}), policy)
        episodes = [Episode(0, "t", bool(r), float(r), 1) for r in reward]
        kept = EpisodeBatch(obs, sample.trace, sample.logprob, torch.arange(32), episodes, 32)
        batch = GroupBatch(kept, episodes, 32, 1)
    row = algorithm.update(batch, progress=0.0, generator=gen())
    with torch.no_grad():
        change = (policy.evaluate(obs, sample.trace).logprob - sample.logprob)[:, 0]
    assert change[good].mean() > change[~good].mean() + 0.05
    assert row["ratio"] > 0


def test_pa_rl_trains_it(trained):
    from embodyrl.algorithms.pa_rl import PARL, PARLConfig
    from embodyrl.rollouts.batches import TransitionBatch, Transitions

    policy = make(trained, chooser_width=8, proposals=3, temperature=1.0)
    before = {name: value.clone() for name, value in policy.named_parameters()}
    config = PARLConfig(
        warmup_chunks=8, critic_warmup=1, mc_steps=1, batch_size=8, actor_batch_size=8, capacity=8,
        critic_utd=1.0, actor_utd=1.0, hindsight_steps=2,
    )  # fmt: skip
    algorithm, obs = PARL(config, policy), seen(8)
    some = torch.arange(8) % 3 == 0
    batch = Transitions(
        obs,
        algorithm.act(obs, gen())[0],
        torch.rand(8, CHUNK, generator=gen()),
        torch.ones(8, CHUNK, dtype=torch.bool),
        some,
        some.roll(1),
        seen(8),
        episode=torch.arange(8),
        success=some,
    )
    row = algorithm.update(TransitionBatch(batch), progress=0.0, generator=gen())
    assert row["actor_steps"] == 8 and all(math.isfinite(value) for value in row.values())
    moved = {k for k, v in policy.named_parameters() if not torch.equal(v, before[k])}
    assert any("lm_head" in k for k in moved) and any(k.startswith("chooser.") for k in moved)
    with pytest.raises(UserError, match=r"chooser_width needs policy\.execute=4"):
        make(trained, chooser_width=8, execute=2)


@pytest.mark.parametrize(
    ("settings", "frozen"),
    [({}, "vision_tower"), ({"train": "all"}, "nothing"), ({"lora_rank": 2}, "")],
)
def test_what_is_trained_and_shared(trained, settings, frozen):
    policy, obs = make(trained, precision="bfloat16", **settings), observation()
    for name, p in policy.net.named_parameters():
        assert p.requires_grad == ("lora_" in name if not frozen else frozen not in name), name
        assert p.dtype == torch.float32 or not p.requires_grad
    actions, mask = torch.zeros(3, CHUNK, 4), torch.ones(3, CHUNK, dtype=torch.bool)
    loss = policy.imitation_loss(obs, actions, mask)
    loss.backward()
    missing = [n for n, p in policy.net.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing
    other = copy.deepcopy(policy)
    for a, b in zip(policy.net.parameters(), other.net.parameters(), strict=True):
        assert (a is b) == (not a.requires_grad)
    # Close to what float32 says, and sampled likewise.
    near = make(trained, **settings).imitation_loss(obs, actions, mask)
    assert float(loss.detach()) == pytest.approx(float(near.detach()), rel=0.05)
    sample = policy.sample(seen(), generator=gen(), mode="train")
    scored = policy.evaluate(seen(), sample.trace)
    assert (scored.logprob - sample.logprob).abs().max() < 0.5


# Files.


def changed(folder, to, **keys):
    shutil.copytree(folder, to, dirs_exist_ok=True)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **keys}))
    return to


def test_no_code_of_a_tokenizer_is_run(trained, tmp_path):
    words = tokenizers(tmp_path / "words")
    code = "raise SystemExit('this was run')"
    (tmp_path / "words" / "fast" / "processing_action_tokenizer.py").write_text(code)
    vlm = tmp_path / "words" / "vlm"
    said = json.loads((vlm / "tokenizer_config.json").read_text())
    said["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    (vlm / "tokenizer_config.json").write_text(json.dumps(said))
    (vlm / "evil.py").write_text(code)
    make(changed(trained, tmp_path / "copy", **words))


def test_pipelines_of_lerobot_are_read(trained, tmp_path):
    """LeRobot 0.6.1 saves neither PaliGemma's tokenizer nor fast_skip_tokens with its step."""
    folder = changed(trained, tmp_path / "copy")
    file = folder / "policy_preprocessor.json"
    pipeline = json.loads(file.read_text())
    (step,) = (s for s in pipeline["steps"] if "action_tokenizer" in s["registry_name"])
    assert step["config"].pop("paligemma_tokenizer_name") and step["config"]["trust_remote_code"]
    assert step["config"].pop("fast_skip_tokens") == 128
    file.write_text(json.dumps(pipeline))
    again = make(folder).sample(seen(), generator=gen(), mode="eval").actions
    assert torch.equal(again, make(trained).sample(seen(), generator=gen(), mode="eval").actions)


def test_what_does_not_fit_is_refused(trained, tmp_path):
    def refused(match, **settings):
        with pytest.raises(UserError, match=match):
            make(**{"folder": trained, **settings})

    words = tokenizers(tmp_path / "words")
    fast = tmp_path / "words" / "fast"
    bpe = fast / "bpe_tokenizer"
    refused(r"needs policy\.pretrained", folder="")
    refused(r"policy\.action_tokenizer is .*no such folder", action_tokenizer=str(tmp_path / "no"))
    refused("cannot be used|is not on this machine", vlm=str(tmp_path / "words"))
    refused("no adapters on the image encoder", lora_rank=2, train="all")
    refused(r"policy\.horizon is 7, but .* plans 4", horizon=7)
    refused(r"policy\.execute is 5, but a chunk has 4", execute=5)
    wrong_size = changed(trained, tmp_path / "size", image_resolution=[32, 32])
    refused("image encoder sees 28 x 28", folder=wrong_size)
    refused(
        "use_relative_actions", folder=changed(trained, tmp_path / "r", use_relative_actions=True)
    )

    said = json.loads((fast / "processor_config.json").read_text())

    def with_fast(**keys):
        (fast / "processor_config.json").write_text(json.dumps({**said, **keys}))
        return {"action_tokenizer": str(fast)}

    make(trained, **with_fast(time_horizon=4, action_dim=4))
    refused("made for 10 actions in a chunk", **with_fast(time_horizon=10))
    refused("made for 7 dims of an action", **with_fast(action_dim=7))
    refused("scale 0", **with_fast(scale=0))
    refused("malformed", **with_fast(min_token="x"))
    with_fast()
    config = json.loads((bpe / "tokenizer_config.json").read_text())
    config["clean_up_tokenization_spaces"] = True
    (bpe / "tokenizer_config.json").write_text(json.dumps(config))
    refused("clean_up_tokenization_spaces", action_tokenizer=str(fast))
    (bpe / "tokenizer_config.json").unlink()
    (bpe / "tokenizer.json").write_text("{}")
    refused(r"tokenizer\.json is damaged", action_tokenizer=str(fast))
    (bpe / "tokenizer.json").unlink()
    refused(r"holds no tokenizer\.json.*policy\.action_tokenizer", action_tokenizer=str(fast))

    # Vocabularies: a tokenizer too small for FAST's ids, one with more tokens than the network.
    from embodyrl.policies.vla.make_small_fast import make_paligemma_tokenizer

    small = make_paligemma_tokenizer(tmp_path / "small", ["go"], size=440)
    refused("has 440 tokens.*needs 320", vlm=str(small))
    large = make_paligemma_tokenizer(tmp_path / "large", ["go"], size=3000)
    refused("The network has 1024 tokens", vlm=str(large))
    other = architecture(tmp_path / "other")
    refused("holds no model.safetensors", folder=other)
    from embodyrl.policies.vla.make_small import make_small_smolvla

    smol = make_small_smolvla(tmp_path / "smol", ["go"], width=16, heads=2)
    refused("does not write 'Action: '", vlm=str(smol / "vlm"))
    refused("is a checkpoint of smolvla, not of pi0_fast", folder=smol)
    assert words["action_tokenizer_name"] == str(fast)


def test_statistics_of_other_dims_ask_for_imitation(trained):
    spec = dataclasses.replace(SPEC, proprio_dim=7)
    policy, obs = make(trained, spec), observation(spec)
    with pytest.raises(UserError, match="Fine-tune it on demonstrations"):
        policy.sample(obs, generator=gen(), mode="eval")
    policy.fit_inputs(torch.randn(9, 7), torch.randn(9, 4))
    policy.sample(obs, generator=gen(), mode="eval")


def test_nothing_heavy_is_imported_before_it_is_built():
    code = (
        "import sys, embodyrl.policies.vla.pi0_fast as m; m.Pi0FastConfig();"
        "print([m for m in ('transformers', 'peft', 'tokenizers', 'lerobot', 'scipy') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_memory_is_estimated_without_weights(trained, tmp_path):
    from embodyrl.config import compose
    from embodyrl.training.memory_estimate import estimate

    def needs(folder):
        command = [f"policy.pretrained={folder}", "policy.critic_width=8"]
        config = compose("libero_object_vla_ppo", [*command, "algorithm.minibatch_size=2"])
        return estimate(config, SPEC)

    def activations(folder):
        return next(n.bytes for n in needs(folder) if n.what.startswith("activations"))

    whole = sum(p.numel() for p in make(trained).parameters())
    assert f"weights: {whole:,} parameters" in needs(trained)[0].what
    # It is that of all places that a chunk may have, with logits over the whole vocabulary.
    fewer = changed(trained, tmp_path / "fewer", max_decoding_steps=8)
    assert activations(trained) - activations(fewer) > 2 * 2 * (24 - 8) * 1024 * 4
