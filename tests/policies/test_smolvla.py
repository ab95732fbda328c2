"""SmolVLA: equal to LeRobot's, the contract, every algorithm, files both ways, refusals."""

import copy
import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from vla_models import (
    ALGORITHMS,
    SENTENCES,
    SPEC,
    Dot,
    demonstrations,
    gen,
    lerobot_batch,
    lerobot_from,
    observation,
    stir,
)

from embodyrl import registry
from embodyrl.algorithms.imitation import imitation_loss
from embodyrl.build import make_policy
from embodyrl.checks import check_policy
from embodyrl.cli.main import main
from embodyrl.errors import UserError
from embodyrl.functional.flow import randn, sample_training_time
from embodyrl.policies.vla.make_small import make_small_smolvla
from embodyrl.policies.vla.policy import SmolVLA, VLAConfig
from embodyrl.rollouts.collect import Player
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.storage.pretrained import explain_hub_errors

pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")
pytest.importorskip("num2words", reason="the extra vla is not installed")

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
def small(tmp_path_factory):
    """The architecture alone."""
    return make_small_smolvla(tmp_path_factory.mktemp("small"), SENTENCES, **TINY)


@pytest.fixture(scope="module")
def trained(small, tmp_path_factory):
    """A LeRobot checkpoint with weights and statistics; it plans more than is executed."""
    policy = make(small, horizon=6, random_weights=True, train="all")
    generator = gen(1)
    stir(policy, generator)
    policy.fit_inputs(*(torch.randn(200, d, generator=generator) * 0.15 + 0.1 for d in (6, 4)))
    folder = tmp_path_factory.mktemp("trained") / "checkpoint"
    policy.save_lerobot(folder)
    return folder


def make(folder, spec=SPEC, **settings) -> SmolVLA:
    settings = {"pretrained": str(folder), "execute": 4, "num_denoise_steps": 3, **settings}
    return make_policy(VLAConfig(**settings), spec, 0)


@pytest.mark.parametrize("transition", ["flow_sde", "flow_cps", "flow_noise"])
@pytest.mark.parametrize("trained_steps", ["all", "one"])
def test_promises_of_a_policy(trained, transition, trained_steps):
    check_policy(
        make(trained, transition=transition, trained_steps=trained_steps), observation(), SPEC
    )


def test_without_noise_it_is_lerobots_own(trained):
    obs, ours = observation(), make(trained, eta=0.0)
    theirs, pre, post = lerobot_from(trained)
    noise = randn((3, 6, 8), gen())
    batch = pre(lerobot_batch(obs))
    expected = post(theirs.predict_action_chunk(dict(batch), noise=noise)).clamp(-1, 1)[:, :4]
    # Bit for bit: a last bit would come back, and grow, in the frames of a whole episode.
    assert torch.equal(ours.sample(obs, generator=gen(), mode="eval").actions, expected)
    sampled = ours.sample(obs, generator=gen(), mode="train")
    torch.testing.assert_close(sampled.actions, expected, atol=1e-5, rtol=1e-5)
    first = post(theirs.select_action(dict(batch), noise=noise)).clamp(-1, 1)
    torch.testing.assert_close(sampled.actions[:, 0], first, atol=1e-5, rtol=1e-5)
    assert (
        expected.abs().max() < 1 and expected.std() > 0.05
    )  # nothing was clipped, nothing is constant


def test_the_imitation_loss_is_lerobots_own(trained):
    ours = make(trained, execute=6)
    theirs, pre, _ = lerobot_from(trained)
    obs, actions = observation(), torch.rand(3, 6, 4, generator=gen(5)) * 2 - 1
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, 2:] = False
    loss = imitation_loss(ours, obs, actions, mask, gen(7))
    generator = gen(7)
    noise = randn((3, 6, 8), generator)
    time = sample_training_time(3, generator)
    batch = pre({**lerobot_batch(obs), "action": actions, "action_is_pad": ~mask})
    expected, _ = theirs.forward(batch, noise=noise, time=time)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)


def test_what_we_save_lerobot_loads_and_so_do_we(trained, tmp_path):
    policy, obs = make(trained), observation()
    with torch.no_grad():
        for p in policy.actor_parameters():
            p.mul_(1.05)
    expected = policy.sample(obs, generator=gen(), mode="eval").actions
    policy.save_lerobot(tmp_path / "out")
    theirs, pre, post = lerobot_from(tmp_path / "out")
    chunk = post(
        theirs.predict_action_chunk(pre(lerobot_batch(obs)), noise=randn((3, 6, 8), gen()))
    )
    torch.testing.assert_close(chunk.clamp(-1, 1)[:, :4], expected, atol=1e-5, rtol=1e-5)
    again = make(tmp_path / "out").sample(obs, generator=gen(), mode="eval").actions
    assert torch.equal(again, expected)
    with pytest.raises(UserError, match="not empty"):
        policy.save_lerobot(tmp_path / "out")


def test_a_checkpoint_of_a_run_holds_the_statistics_too(small, trained, tmp_path):
    policy, obs = make(trained), observation()
    checkpoint.save(
        tmp_path / "step_000001",
        {"policy": policy.state_dict()},
        {
            "spec": spec_to_json(SPEC),
            "config": {"policy": dataclasses.asdict(policy.config)},
        },
    )
    other = make(small, random_weights=True, horizon=6, transition="flow_noise", steer_width=8)
    checkpoint.load_weights(tmp_path / "step_000001", other, SPEC)
    assert policy.processors.state_dict().keys() == other.processors.state_dict().keys()
    torch.testing.assert_close(other.encode(obs).pooled, policy.encode(obs).pooled)
    x = torch.rand(2, 4, 4)
    torch.testing.assert_close(other.normalize_action(x), policy.normalize_action(x))


def test_the_prefix_is_encoded_once_however_many_steps(trained):
    policy, obs, calls = make(trained, num_denoise_steps=5), observation(), []
    vlm = policy.net.model.vlm_with_expert.get_vlm_model()
    vlm.vision_model.register_forward_hook(lambda *_: calls.append("image"))
    vlm.text_model.layers[0].input_layernorm.register_forward_hook(
        lambda *_: calls.append("prefix")
    )
    sample = policy.sample(obs, generator=gen(), mode="train")
    assert sorted(calls) == ["image", "prefix"]
    policy.evaluate(obs, sample.trace).logprob.sum().backward()
    assert sorted(calls) == ["image", "image", "prefix", "prefix"]


def test_several_steps_at_once_do_not_see_one_another(trained):
    policy, obs = make(trained), observation()
    context = policy.encode(obs)
    x, t = randn((3, 4, 6, 8), gen()), torch.rand(3, 4, generator=gen(1))
    together = policy.velocity(context, x, t)
    alone = torch.cat(
        [policy.velocity(context, x[:, k : k + 1], t[:, k : k + 1]) for k in range(4)], dim=1
    )
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


def test_kept_prefixes_are_those_that_would_be_computed(trained):
    plain, keeping, obs = make(trained), make(trained, keep_prefixes=5), observation()
    sample = plain.sample(obs, generator=gen(), mode="train")
    calls = []
    keeping.net.model.vlm_with_expert.get_vlm_model().vision_model.register_forward_hook(
        lambda *_: calls.append(1)
    )
    again = keeping.sample(obs, generator=gen(), mode="train")
    torch.testing.assert_close(again.trace.x, sample.trace.x)
    torch.testing.assert_close(keeping.value(obs), plain.value(obs))
    # Rows in another order, and with other padding, are found again; a new one is computed alone.
    for rows in ([2, 0], [1], [1, 1, 0]):
        scored, expected = (p.evaluate(obs[rows], sample.trace[rows]) for p in (keeping, plain))
        torch.testing.assert_close(scored.logprob, expected.logprob, atol=1e-4, rtol=1e-4)
    assert len(calls) == 1 and scored.logprob.requires_grad
    scored.logprob.sum().backward()
    new = dataclasses.replace(obs, proprio=obs.proprio + torch.tensor([[0.0], [1.0], [0.0]]))
    keeping.encode(new)
    assert len(calls) == 2 and len(keeping._prefixes) == 4
    assert copy.deepcopy(keeping)._prefixes is keeping._prefixes
    keeping.load_state_dict(plain.state_dict())
    assert len(keeping._prefixes) == 0
    with pytest.raises(UserError, match="Leave one of them out"):
        make(trained, keep_prefixes=5, train="all")


def test_checkpointing_changes_nothing_but_memory(trained):
    obs, gradients = observation(), []
    for checkpointing in (False, True):
        policy = make(trained, checkpointing=checkpointing, train="language")
        sample = policy.sample(obs, generator=gen(), mode="train")
        policy.evaluate(obs, sample.trace).logprob.sum().backward()
        gradients.append({n: p.grad for n, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("train", ["expert", "language"])
def test_bfloat16_stores_what_is_frozen_and_trains_in_float32(trained, train):
    policy, exact, obs = (
        *(make(trained, precision=p, train=train) for p in ("bfloat16", "float32")),
        observation(),
    )
    types = {p.requires_grad: set() for p in policy.net.parameters()}
    for p in policy.net.parameters():
        types[p.requires_grad].add(p.dtype)
    assert types[True] == {torch.float32} and torch.bfloat16 in types[False]
    sample = policy.sample(obs, generator=gen(), mode="train")
    assert sample.logprob.dtype == sample.actions.dtype == torch.float32
    scored = policy.evaluate(obs, sample.trace)
    assert (scored.logprob - sample.logprob).abs().max() < 0.5
    scored.logprob.sum().backward()
    a, b = (p.sample(obs, generator=gen(), mode="eval").actions for p in (policy, exact))
    assert (a - b).abs().max() < 0.05


@pytest.mark.parametrize("train", ["expert", "language"])
def test_adapters_are_trained_and_merged_for_lerobot(trained, tmp_path, train):
    policy, obs = make(trained, lora_rank=2, train=train), observation()
    names = {n for n, p in policy.net.named_parameters() if p.requires_grad}
    assert any("lm_expert" in n and "lora_A" in n for n in names) and any(
        "action_out_proj" in n for n in names
    )
    assert any("text_model" in n for n in names) == (train == "language")
    assert all(
        "lora_" in n or "_proj" in n.split(".")[2] or "mlp" in n.split(".")[2] for n in names
    )
    plain = make(trained).sample(obs, generator=gen(), mode="eval").actions
    torch.testing.assert_close(
        policy.sample(obs, generator=gen(), mode="eval").actions, plain
    )  # they start at nothing
    sample = policy.sample(obs, generator=gen(), mode="train")
    policy.evaluate(obs, sample.trace).logprob.sum().backward()
    with torch.no_grad():
        for p in policy.actor_parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=gen(3)))
    expected = policy.sample(obs, generator=gen(), mode="eval").actions
    assert (expected - plain).abs().max() > 0.01
    policy.save_lerobot(tmp_path / "out")
    again = make(tmp_path / "out").sample(obs, generator=gen(), mode="eval").actions
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(policy.sample(obs, generator=gen(), mode="eval").actions, expected)


@pytest.mark.parametrize("train", ["expert", "language", "all"])
def test_what_is_trained(trained, train):
    policy, obs = make(trained, train=train, transition="flow_noise"), observation()
    sample = policy.sample(obs, generator=gen(), mode="train")
    scored = policy.evaluate(obs, sample.trace)
    scored.value.sum().backward()
    assert (
        all(p.grad is None for p in policy.net.parameters())
        and policy.critic[-1].bias.grad is not None
    )
    (scored.logprob.sum() + scored.entropy.sum()).backward()
    touched = {
        n for n, p in policy.net.named_parameters() if p.grad is not None and p.grad.abs().max() > 0
    }
    assert any("lm_expert" in n for n in touched) and any("state_proj" in n for n in touched)
    assert any("text_model" in n for n in touched) == (train != "expert")
    assert any("vision_model" in n for n in touched) == (train == "all")
    assert policy.noise.weight.grad.abs().max() > 0
    actor = {id(p) for p in policy.actor_parameters()}
    assert {id(p) for n, p in policy.net.named_parameters() if n in touched} <= actor
    assert not actor & {id(p) for p in policy.critic.parameters()}
    assert not policy.train().training


def test_copies_share_what_is_frozen(trained):
    policy = make(trained)
    twin = copy.deepcopy(policy).requires_grad_(False)
    theirs = dict(twin.named_parameters())
    shared = {n for n, p in policy.named_parameters() if p is theirs[n]}
    frozen = {n for n, p in policy.named_parameters() if not p.requires_grad}
    assert shared == frozen and frozen and len(shared) < len(theirs)
    third = copy.deepcopy(twin)
    assert {n for n, p in third.named_parameters() if p is theirs[n]} == frozen
    with torch.no_grad():
        for p in policy.actor_parameters():
            p.zero_()
    obs = observation()
    a, b = (p.sample(obs, generator=gen(), mode="eval").actions for p in (policy, twin))
    assert not torch.allclose(a, b)


def test_normalisation_has_its_inverse_and_density(trained):
    policy = make(trained)
    x = torch.rand(2, 4, 4, generator=gen()) * 2 - 1
    normalised = policy.normalize_action(x)
    torch.testing.assert_close(policy.normalize_action.inverse(normalised), x, atol=1e-5, rtol=1e-5)
    jacobian = torch.autograd.functional.jacobian(
        policy.normalize_action.inverse, normalised[:1]
    ).reshape(16, 16)
    torch.testing.assert_close(
        policy.normalize_action.log_det(normalised)[0], jacobian.slogdet()[1], atol=1e-4, rtol=0
    )
    # A dim that never varied in the data does not blow up what differs from it.
    policy.processors.fit(torch.ones(50, 6), torch.zeros(50, 4))
    assert policy.normalize_action(x).abs().max() <= 20.1


PARTS = {"dsrl": {"steer_width": 8}, "pa_rl": {"chooser_width": 8, "proposals": 3}}
"""Settings of the policy that an algorithm needs."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_it_unchanged(small, name):
    env, generator = Dot(), gen()
    settings = {
        "random_weights": True,
        "horizon": 3,
        "execute": 2,
        "train": "all",
    }
    policy = make(small, env.spec, **settings, **PARTS.get(name, {}))
    cls = registry.load("algorithms", name)
    algorithm = cls(cls.Config(**ALGORITHMS[name]), policy)
    before = {k: v.clone() for k, v in algorithm.result.named_parameters()}
    if name == "sft":
        batch = demonstrations(3)
    else:
        batch = Player(env).collect(algorithm, 0, generator=generator)
    if name in ("grpo", "nft"):
        for i, episode in enumerate(batch.kept.episodes):  # NFT learns nothing where all are alike
            episode.success = i % 4 == 0
    row = algorithm.update(batch, progress=0.0, generator=generator)
    assert all(np.isfinite(v) for k, v in row.items()), row
    moved = {
        k.split(".")[0]
        for k, v in algorithm.result.named_parameters()
        if not torch.equal(v, before[k])
    }
    assert ("steer" if name == "dsrl" else "net") in moved, row
    algorithm.load_state_dict(algorithm.state_dict())


def test_a_small_actor_learns_beside_the_frozen_vla_from_its_mean_token(small):
    """RLT: what is kept of an observation is what the language model says of it."""
    env, generator = Dot(), gen()
    settings = {"random_weights": True, "horizon": 3, "execute": 2, "keep_prefixes": 64}
    edits = {"edit_scale": 2.0, "edit_only": True, "chooser_sees": "shared"}
    policy = make(small, env.spec, **settings, **edits, **PARTS["pa_rl"])
    frozen = {"actor_utd": 0.0, "edit_bc_coef": 1.0, "edit_dropout": 0.5}
    train = {k: v for k, v in ALGORITHMS["pa_rl"].items() if k != "hindsight_steps"}
    cls = registry.load("algorithms", "pa_rl")
    algorithm = cls(cls.Config(**train | frozen), policy)
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    player = Player(env)
    for iteration in range(3):
        batch = player.collect(algorithm, iteration, generator=generator)
        row = algorithm.update(batch, progress=0.0, generator=generator)
    assert row["gradient_steps"] > 1 and row["edit"] > 0 and row["actor_steps"] == 0
    moved = {n for n, p in policy.named_parameters() if not torch.equal(p, before[n])}
    assert {n for n in moved if n.startswith("chooser.editor.")}
    assert all(n.startswith("chooser.") for n in moved)
    # The buffer holds the mean token, the state beside it, and proprioception.
    obs = batch.chunks.obs
    raw = torch.cat([policy.features(policy.encode(obs)), obs.proprio], dim=-1)
    kept = algorithm.buffer.data["features"]
    assert kept.shape[1] == policy.features_dim + env.spec.proprio_dim
    wanted = policy.chooser.encoder.normalize(raw)
    assert all((kept - w).abs().amax(1).amin() < 1e-4 for w in wanted)
    # What is executed is edited, and goes into a checkpoint as any chooser.
    check_policy(policy, obs[:3], env.spec)
    acted = policy.sample(obs, generator=gen(5), mode="eval").actions
    proposals = policy.propose(obs, 3, gen(5))
    assert not any(torch.allclose(acted, proposals[:, i]) for i in range(3))
    torch.testing.assert_close(acted, policy.chooser.best(obs, proposals))


def test_refusals(small, trained, tmp_path):
    def refused(match, folder=trained, **settings):
        with pytest.raises(UserError, match=match):
            make(folder, **settings)

    refused("needs policy.pretrained", "")
    refused("no such folder", tmp_path / "nothing")
    refused("cannot be reached", "someone/some_policy")
    refused(r"policy\.execute is 9, but a chunk has 6", execute=9)
    refused(r"plans 6 actions\. To execute 5 of them, set policy\.execute=5", horizon=5)
    refused("policy.cameras", cameras=("top",))
    refused("Did you mean 'expert'", train="expret")
    refused("no model.safetensors", small)
    refused("no camera", spec=dataclasses.replace(SPEC, cameras={}))
    refused(
        "the cameras of test/arm|cameras of test/arm are side",
        spec=dataclasses.replace(SPEC, cameras={"side": (8, 8)}),
    )
    refused("at most 8", spec=dataclasses.replace(SPEC, action_dim=9))
    refused("some/vlm.*cannot be reached", vlm="some/vlm")
    with pytest.raises(UserError, match=r"policy\.name=smolvla"):
        make_policy(registry.load("policies", "pi0").Config(pretrained=str(trained)), SPEC, 0)

    broken = shutil.copytree(trained, tmp_path / "broken")
    (broken / "policy_preprocessor.json").unlink()
    refused("no policy_preprocessor.json", broken)
    config = json.loads((trained / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "chunk_sise": 3}))
    refused("chunk_sise", broken)
    (broken / "config.json").write_text(json.dumps({**config, "max_action_dim": 12}))
    refused("do not fit its config.json", broken)
    (broken / "config.json").unlink()
    refused("no config.json", broken)
    refused(
        "use_relative_actions|adapt_to_pi_aloha",
        _changed(trained, tmp_path / "aloha", adapt_to_pi_aloha=True),
    )
    # Statistics of other dims: imitation first.
    policy = make(trained, dataclasses.replace(SPEC, proprio_dim=7))
    with pytest.raises(UserError, match="Fine-tune it on demonstrations"):
        policy.sample(
            observation(dataclasses.replace(SPEC, proprio_dim=7)), generator=gen(), mode="eval"
        )
    policy.fit_inputs(torch.randn(9, 7), torch.randn(9, 4))
    policy.sample(
        observation(dataclasses.replace(SPEC, proprio_dim=7)), generator=gen(), mode="eval"
    )


def _changed(folder, to, **keys):
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **keys}))
    return to


def test_a_gated_model_is_told_apart(monkeypatch):
    from huggingface_hub.errors import GatedRepoError

    class Response:
        headers, status_code, request = {}, 403, None

    with (
        pytest.raises(UserError, match="accept its licence"),
        explain_hub_errors("google/some-model"),
    ):
        try:
            raise GatedRepoError("gated", response=Response())
        except GatedRepoError as error:
            raise OSError("You are trying to access a gated repo.") from error


def test_nothing_heavy_is_imported_before_it_is_built():
    code = """
import sys
from embodyrl import registry
for name in ("smolvla", "pi0", "pi05"):
    registry.load("policies", name).Config()
print(sorted({"lerobot", "transformers", "peft", "huggingface_hub"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_from_nothing_by_imitation_and_ppo_to_lerobot(tmp_path):
    """The command line trains the architecture on the pick task, and LeRobot runs the result."""
    small = make_small_smolvla(
        tmp_path / "small", ["pick up the red block", "pick up the blue block"], width=32, heads=2
    )
    demos, env = (
        str(tmp_path / "demos"),
        ["env.num_envs=8", "env.image_size=32", "env.max_blocks=2"],
    )
    policy = [
        "policy.name=smolvla",
        f"policy.pretrained={small}",
        "policy.random_weights=true",
        "policy.train=all",
    ]
    run = [
        f"run.out={tmp_path}",
        "run.iterations=2",
        "run.eval_episodes=8",
        "run.videos=0",
        "run.eval_before=false",
    ]
    assert (
        main(["collect", "mujoco", "env.task=pick", *env, "--episodes", "8", "--out", demos]) == 0
    )
    chunk = ["policy.horizon=5", "policy.execute=3", "policy.num_denoise_steps=3"]
    sft = [
        "algorithm.steps_per_iteration=20",
        "algorithm.batch_size=16",
        "run.name=sft",
        f"data.path={demos}",
    ]
    assert main(["train", "mujoco_pick_sft", *env, *policy, *chunk, *run, *sft]) == 0
    ppo = [
        "algorithm.num_chunks=2",
        "algorithm.minibatch_size=8",
        "algorithm.warmup_iterations=1",
        "run.name=ppo",
    ]
    start = ["policy.name=smolvla", f"run.init_checkpoint={tmp_path / 'sft'}"]
    assert main(["train", "mujoco_pick_ppo", *env, *start, *run, *ppo]) == 0
    rows = {
        n: [json.loads(x) for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines()]
        for n in ("sft", "ppo")
    }
    assert rows["sft"][1]["loss"] < rows["sft"][0]["loss"]
    assert rows["ppo"][1]["actor_epochs"] == 3 and abs(rows["ppo"][1]["ratio"] - 1) < 0.5
    assert main(["export", str(tmp_path / "ppo"), str(tmp_path / "lerobot")]) == 0
    theirs, pre, post = lerobot_from(tmp_path / "lerobot")
    spec = dataclasses.replace(SPEC, cameras={"front": (32, 32)}, proprio_dim=7)
    action = post(theirs.select_action(pre(lerobot_batch(observation(spec)))))
    assert action.shape == (3, 4) and torch.isfinite(action).all()
