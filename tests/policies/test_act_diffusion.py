"""LeRobot's ACT and Diffusion Policy: equal to LeRobot's, the contract, algorithms, files, refusals."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from vla_models import (
    ALGORITHMS,
    SPEC,
    Dot,
    demonstrations,
    gen,
    lerobot_batch,
    lerobot_from,
    observation,
)

from embodyrl import registry
from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.build import load_config, load_policy, load_spec, make_env, make_policy
from embodyrl.checks import check_policy
from embodyrl.cli.main import main
from embodyrl.data.lerobot_write import write_dataset
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.recording import Recording
from embodyrl.errors import UserError
from embodyrl.functional.flow import randn
from embodyrl.policy import imitated_rows
from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.history_env import HistoryEnv
from embodyrl.sims.mujoco.config import MujocoConfig
from embodyrl.types import EnvSpec

pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")
pytest.importorskip("diffusers", reason="the extra vla is not installed")

CHUNK, RUN = 8, 4
SMALL = {
    "act": {
        "chunk_size": CHUNK,
        "n_action_steps": RUN,
        "dim_model": 16,
        "n_heads": 2,
        "dim_feedforward": 32,
        "n_encoder_layers": 1,
        "n_vae_encoder_layers": 1,
        "latent_dim": 4,
        "dropout": 0.0,
    },
    "diffusion": {
        "n_obs_steps": 1,
        "horizon": CHUNK,
        "n_action_steps": RUN,
        "down_dims": (16, 32),
        "n_groups": 4,
        "diffusion_step_embed_dim": 16,
        "spatial_softmax_num_keypoints": 4,
        "use_group_norm": True,
        "noise_scheduler_type": "DDIM",
        "num_inference_steps": 5,
        "drop_n_last_frames": 0,
    },
}
TWICE = {"n_obs_steps": 2, "horizon": CHUNK, "n_action_steps": RUN}
PAIR = dataclasses.replace(SPEC, history=2)


def write(folder, kind: str, spec: EnvSpec = SPEC, **settings):
    """A checkpoint that LeRobot's own code writes, of a small net with random weights."""
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies import get_policy_class, make_policy_config, make_pre_post_processors

    def feature(kind, *shape):
        return PolicyFeature(type=kind, shape=shape)

    inputs = {
        f"observation.images.{name}": feature(FeatureType.VISUAL, 3, *size)
        for name, size in spec.cameras.items()
    }
    inputs["observation.state"] = feature(FeatureType.STATE, spec.proprio_dim)
    config = make_policy_config(
        kind,
        **{**SMALL[kind], **settings},
        input_features=inputs,
        output_features={"action": feature(FeatureType.ACTION, spec.action_dim)},
        pretrained_backbone_weights=None,
        device="cpu",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = get_policy_class(kind)(config)
    policy.save_pretrained(folder)
    generator = gen(3)

    def stats(*shape):
        low = -0.5 - torch.rand(shape, generator=generator)
        high = 0.5 + torch.rand(shape, generator=generator)
        return {"mean": (low + high) / 2, "std": high - low, "min": low, "max": high}

    found = {key: stats(3, 1, 1) for key in inputs if "images" in key}
    found |= {"observation.state": stats(spec.proprio_dim), "action": stats(spec.action_dim)}
    for pipeline in make_pre_post_processors(config, dataset_stats=found):
        pipeline.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def act(tmp_path_factory):
    return write(tmp_path_factory.mktemp("act"), "act")


@pytest.fixture(scope="module")
def diffusion(tmp_path_factory):
    return write(tmp_path_factory.mktemp("diffusion"), "diffusion")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Sees two observations, as LeRobot's Diffusion Policy does by default."""
    return write(tmp_path_factory.mktemp("pair"), "diffusion", **TWICE)


def make(kind: str, folder, spec: EnvSpec = SPEC, **settings):
    cls = registry.load("policies", kind)
    return make_policy(cls.Config(pretrained=str(folder), **settings), spec, 0)


def two_observations():
    """Observations of which no two frames are alike."""
    earlier = dataclasses.replace(observation(), privileged=None)
    now = dataclasses.replace(
        observation(),
        images={k: v.flip(1) for k, v in earlier.images.items()},
        proprio=earlier.proprio.flip(1),
        previous=earlier,
    )
    return now


def pair_batch(pre, obs) -> dict:
    """Both observations as LeRobot's data loader gives them, (B, 2, ...)."""
    frames = [pre(lerobot_batch(frame)) for frame in obs.frames()]
    keys = [key for key in frames[0] if key.startswith("observation.")]
    return {key: torch.stack([frame[key] for frame in frames], dim=1) for key in keys}


# The same as LeRobot's.


def test_act_s_actions_are_lerobots(act):
    policy, obs = make("act", act), observation()
    theirs, pre, post = lerobot_from(act)
    batch = pre(lerobot_batch(obs))
    chunk = post(theirs.predict_action_chunk(dict(batch)))
    expected = chunk.clamp(-1, 1)[:, :RUN]
    actions = policy.sample(obs, generator=gen(), mode="eval").actions
    torch.testing.assert_close(actions, expected, atol=1e-5, rtol=1e-5)
    first = post(theirs.select_action(dict(batch))).clamp(-1, 1)
    torch.testing.assert_close(actions[:, 0], first, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.05 and (chunk[:, :RUN].abs() < 1).float().mean() > 0.7


@pytest.mark.parametrize("use_vae", [True, False])
def test_act_s_loss_is_lerobots(tmp_path, use_vae, monkeypatch):
    folder = write(tmp_path / "act", "act", use_vae=use_vae)
    policy, obs = make("act", folder), observation()
    theirs, pre, _ = lerobot_from(folder)
    actions, mask = torch.rand(3, CHUNK, 4, generator=gen(5)) * 2 - 1, torch.ones(3, CHUNK) > 0
    mask[1, 2:] = False
    noise = torch.randn(3, 4, generator=gen(6))
    monkeypatch.setattr(torch, "randn_like", lambda _: noise)
    batch = pre({**lerobot_batch(obs), "action": actions, "action_is_pad": ~mask})
    expected, parts = theirs.train().forward(batch)
    loss = policy.imitation_loss(obs, actions, mask, noise)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)
    assert ("kld_loss" in parts) == use_vae
    loss.backward()
    touched = {n for n, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("vae_encoder" in n for n in touched) == use_vae
    assert any("backbone" in n for n in touched) and any("action_head" in n for n in touched)


@pytest.mark.parametrize("clip", [True, False])
def test_diffusion_s_noise_free_actions_are_lerobots_ddim(tmp_path, clip):
    folder = write(tmp_path / "dp", "diffusion", clip_sample=clip)
    policy, obs = make("diffusion", folder), observation()
    theirs, pre, post = lerobot_from(folder)
    batch, noise = pre(lerobot_batch(obs)), randn((3, CHUNK, 4), gen())
    state = {**batch, "observation.state": batch["observation.state"][:, None]}
    expected = post(theirs.predict_action_chunk(state, noise=noise)).clamp(-1, 1)
    actions = policy.sample(obs, generator=gen(), mode="eval").actions
    torch.testing.assert_close(actions, expected, atol=1e-5, rtol=1e-5)
    first = post(theirs.select_action(dict(batch), noise=noise)).clamp(-1, 1)
    torch.testing.assert_close(actions[:, 0], first, atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.05
    # With eta 0, exploring is the same chain.
    explored = make("diffusion", folder, eta=0.0).sample(obs, generator=gen(), mode="train")
    torch.testing.assert_close(explored.actions, expected, atol=1e-5, rtol=1e-5)


def test_diffusion_s_noisy_actions_are_lerobots_ddpm(tmp_path):
    settings = {
        "noise_scheduler_type": "DDPM",
        "num_inference_steps": None,
        "n_action_steps": CHUNK,
    }
    folder = write(tmp_path / "dp", "diffusion", **settings)
    policy, obs = make("diffusion", folder, noise_min=0.0), observation()
    assert policy.config.num_denoise_steps == 100
    theirs, pre, post = lerobot_from(folder)
    batch, generator = pre(lerobot_batch(obs)), gen()
    images = batch["observation.images.front"][:, None, None]
    state = batch["observation.state"][:, None]
    condition = theirs.diffusion._prepare_global_conditioning(
        {"observation.images": images, "observation.state": state}
    )
    noise = randn((3, CHUNK, 4), generator)
    with torch.no_grad():
        end = theirs.diffusion.conditional_sample(3, condition, generator, noise)
    sample = policy.sample(obs, generator=gen(), mode="train")
    torch.testing.assert_close(sample.actions, post(end).clamp(-1, 1), atol=1e-4, rtol=1e-4)


def same_draws(monkeypatch, policy, noise, index):
    """LeRobot draws what our loss makes of ``noise``."""
    shape = (len(noise), *policy.flow_shape)
    size = shape[1] * shape[2]
    chunk = noise[:, :size].view(shape).roll(policy.past, dims=1)
    monkeypatch.setattr(torch, "randn", lambda *a, **k: chunk)
    monkeypatch.setattr(torch, "randint", lambda **k: index)


@pytest.mark.parametrize(
    ("predicts", "frames", "masked"),
    [("epsilon", 1, False), ("sample", 1, True), ("epsilon", 2, True)],
)
def test_diffusion_s_loss_is_lerobots(tmp_path, predicts, frames, masked, monkeypatch):
    settings = {"prediction_type": predicts, "do_mask_loss_for_padding": masked}
    folder = write(tmp_path / "dp", "diffusion", n_obs_steps=frames, **settings)
    policy = make("diffusion", folder, PAIR)
    obs = two_observations()
    theirs, pre, _ = lerobot_from(folder)
    given = CHUNK + 1 - frames
    actions, mask = torch.rand(3, given, 4, generator=gen(5)) * 2 - 1, torch.ones(3, given) > 0
    mask[1, 2:] = False
    noise = torch.randn(3, policy.imitation_noise, generator=gen(6))
    index = (torch.special.ndtr(noise[:, -1]) * 100).long()
    # At the start of an episode LeRobot repeats the first action.
    whole = torch.cat([actions[:, : frames - 1], actions], dim=1)
    pad = ~torch.cat([mask[:, : frames - 1], mask], dim=1)
    batch = pair_batch(pre, obs if frames == 2 else dataclasses.replace(obs, previous=None))
    batch |= {"action": pre({**lerobot_batch(obs), "action": whole})["action"]}
    same_draws(monkeypatch, policy, noise, index)
    expected, _ = theirs.forward({**batch, "action_is_pad": pad})
    monkeypatch.undo()
    loss = policy.imitation_loss(obs, actions, mask, noise)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_it_imitates_the_rows_that_lerobot_does(tmp_path, masked, monkeypatch):
    """A data set of LeRobot's, read by LeRobot and by us: the same chunks, the same loss."""
    from lerobot.datasets.factory import resolve_delta_timestamps
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.datasets.sampler import EpisodeAwareSampler

    lengths, last = (9, 12, 3), 4
    rng = np.random.default_rng(0)
    episodes = [
        Recording(
            images={"front": np.full((n, *SPEC.cameras["front"], 3), 40 * n % 256, np.uint8)},
            proprio=rng.normal(size=(n, SPEC.proprio_dim)).astype(np.float32),
            actions=rng.uniform(-1, 1, size=(n, SPEC.action_dim)).astype(np.float32),
            reward=np.zeros(n, np.float32),
            solved=np.arange(n) == n - 1,
            init=-1,
            task="go",
            instruction="go",
        )
        for n in lengths
    ]
    spec = dataclasses.replace(SPEC, privileged_dim=0)
    data = write_dataset(tmp_path / "data", episodes, spec)
    settings = {"do_mask_loss_for_padding": masked, "drop_n_last_frames": last}
    policy = make("diffusion", write(tmp_path / "dp", "diffusion", **TWICE, **settings), PAIR)
    assert imitated_rows(policy) == (1, last)
    theirs, pre, _ = lerobot_from(tmp_path / "dp")
    whole = LeRobotDataset("local/rows", root=data)
    times = resolve_delta_timestamps(theirs.config, whole.meta)
    rows = LeRobotDataset("local/rows", root=data, delta_timestamps=times, video_backend="pyav")
    demos = load_demonstrations(data, policy.config.horizon, spec=PAIR)
    # Both begin chunks at the same frames, and at each of these the chunk is the same.
    places = whole.meta.episodes
    sampler = EpisodeAwareSampler(
        places["dataset_from_index"], places["dataset_to_index"], drop_n_last_frames=last
    )
    drawn = demos.draw(500, gen(), without_last=last)
    assert set(drawn.tolist()) == set(sampler.indices) == {*range(5), *range(9, 17)}
    frames = torch.tensor(sampler.indices)
    obs, actions, mask = demos.batch(frames, before=policy.past)
    items = torch.utils.data.default_collate([rows[i] for i in frames.tolist()])
    assert torch.equal(actions, items["action"])
    assert torch.equal(mask, ~items["action_is_pad"])
    assert not mask[0, 0] and mask[1, 0] and not mask[4, -1]
    # With the same noise and times the losses are the same.
    noise = torch.randn(len(frames), policy.imitation_noise, generator=gen(6))
    index = (torch.special.ndtr(noise[:, -1]) * 100).long()
    same_draws(monkeypatch, policy, noise, index)
    expected, _ = theirs.forward(pre(items))
    monkeypatch.undo()
    loss = policy.imitation_loss(obs, actions, mask, noise)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-4)
    # So does fine-tuning.
    sft = SFT(SFTConfig(steps_per_iteration=1, batch_size=4, shift=0), policy)
    seen = []
    monkeypatch.setattr(type(policy), "imitation_loss", lambda p, *a: seen.append(a) or loss)
    monkeypatch.setattr(sft.microbatches, "backward", lambda rows, of: (of(rows)[0].detach(), {}))
    sft.update(demos, progress=0.0, generator=gen())
    ((_, chunks, _, _),) = seen
    assert chunks.shape == (4, *policy.flow_shape)


def test_episodes_shorter_than_what_is_left_out_are_refused(tmp_path):
    policy = make("diffusion", write(tmp_path / "dp", "diffusion", drop_n_last_frames=7))
    with pytest.raises(UserError, match="No episode is longer than 7 frames"):
        SFT(SFTConfig(), policy).update(demonstrations(CHUNK), progress=0.0, generator=gen())


def test_of_two_observations_it_acts_as_lerobot_does(pair):
    policy, obs = make("diffusion", pair, PAIR), two_observations()
    theirs, pre, post = lerobot_from(pair)
    noise = randn((3, CHUNK, 4), gen())
    # Our state begins with the present action, LeRobot's with the one before it.
    ordered = noise.roll(1, dims=1)
    for frame in obs.frames():
        batch = pre(lerobot_batch(frame))
        theirs._queues["action"].clear()
        chosen = theirs.select_action(dict(batch), noise=ordered)
    actions = policy.sample(obs, generator=gen(), mode="eval").actions
    torch.testing.assert_close(actions[:, 0], post(chosen).clamp(-1, 1), atol=1e-5, rtol=1e-5)
    rest = torch.stack(list(theirs._queues["action"]), dim=1)
    torch.testing.assert_close(actions[:, 1:], post(rest).clamp(-1, 1), atol=1e-5, rtol=1e-5)
    # What was seen before matters.
    alone = policy.sample(
        dataclasses.replace(obs, previous=None).at_start(2), generator=gen(), mode="eval"
    )
    assert (alone.actions - actions).abs().max() > 1e-3


# The contract.


@pytest.mark.parametrize(
    "settings",
    [
        {"trained_steps": "all"},
        {"trained_steps": "one", "critic": "privileged"},
        {"execute": CHUNK, "steer_width": 8},
        {"num_denoise_steps": 3, "noise_min": 0.0, "chooser_width": 8},
    ],
)
def test_promises_of_diffusion(diffusion, settings):
    found = check_policy(make("diffusion", diffusion, **settings), observation(), SPEC)
    assert "HasFlow" not in found and {"ScoresPaths", "Steerable", "Imitates"} <= set(found)


def test_promises_of_diffusion_with_two_observations(pair):
    policy = make("diffusion", pair, PAIR)
    assert (policy.config.horizon, policy.flow_shape) == (CHUNK - 1, (CHUNK, 4))
    check_policy(policy, two_observations(), PAIR)


def test_promises_of_act(act):
    found = check_policy(make("act", act, chooser_width=8), observation(), SPEC)
    assert set(found) == {"Chooses", "Imitates"}


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_what_was_not_executed_has_no_loss(tmp_path, kind):
    masked = {"do_mask_loss_for_padding": True} if kind == "diffusion" else {}
    policy = make(kind, write(tmp_path / "checkpoint", kind, **masked))
    obs, noise = observation(), torch.randn(3, policy.imitation_noise, generator=gen())
    actions, mask = torch.rand(3, RUN, 4, generator=gen(1)), torch.ones(3, RUN) > 0
    before = policy.imitation_loss(obs, actions, mask, noise)
    # Beyond the end of an episode it does not matter what the actions are.
    mask[:, 2:] = False
    part = policy.imitation_loss(obs, actions, mask, noise)
    assert torch.isfinite(before) and not torch.isclose(before, part)
    gradient = torch.autograd.grad(part, policy.actor_parameters(), allow_unused=True)
    assert any(g is not None and g.any() for g in gradient)


def test_the_gradient_of_a_path_reaches_the_net(diffusion):
    policy, obs = make("diffusion", diffusion), observation()
    sample = policy.sample(obs, generator=gen(), mode="train")
    scored = policy.evaluate(obs, sample.trace)
    torch.testing.assert_close(scored.logprob, sample.logprob, atol=1e-3, rtol=1e-4)
    (scored.logprob.sum() + scored.value.sum()).backward()
    touched = {n for n, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    assert any("unet" in n for n in touched) and any("rgb_encoder" in n for n in touched)


# Algorithms.


def dots(horizon, history=1):
    found = demonstrations(horizon)
    found.history = history
    return found


DOT = EnvSpec("test/dot", 4, 2, 3, "point", 10.0, 4, {"eye": (16, 16)}, privileged_dim=2)
TRAINS = [
    ("act", "sft", {}, 1),
    ("act", "pa_rl", {"chooser_width": 8, "proposals": 3}, 1),
    *(
        ("diffusion", name, {"num_denoise_steps": 3, **settings}, frames)
        for frames in (1, 2)
        for name, settings in (
            ("sft", {}),
            ("ppo", {}),
            ("grpo", {}),
            ("dsrl", {"steer_width": 8}),
            ("pa_rl", {"chooser_width": 8, "proposals": 3}),
        )
    ),
]


@pytest.mark.parametrize(("kind", "name", "settings", "frames"), TRAINS)
def test_algorithms_train_it(tmp_path, kind, name, settings, frames):
    env = Dot() if frames == 1 else HistoryEnv(Dot(), frames)
    more = {"n_obs_steps": frames} if kind == "diffusion" else {}
    folder = write(tmp_path / "checkpoint", kind, DOT, n_action_steps=2, **more)
    policy = make(kind, folder, env.spec, **settings)
    cls = registry.load("algorithms", name)
    algorithm = cls(cls.Config(**ALGORITHMS[name]), policy)
    before = {k: v.clone() for k, v in algorithm.result.named_parameters()}
    if name == "sft":
        batch = dots(policy.config.horizon, frames)
    else:
        batch = Player(env).collect(algorithm, 0, generator=gen())
    if name == "grpo":
        for i, episode in enumerate(batch.kept.episodes):  # nothing is learned where all are alike
            episode.success = i % 4 == 0
    row = algorithm.update(batch, progress=0.0, generator=gen())
    assert all(np.isfinite(v) for v in row.values()), row
    moved = {
        k.split(".")[0]
        for k, v in algorithm.result.named_parameters()
        if not torch.equal(v, before[k])
    }
    assert ("steer" if name == "dsrl" else "lerobot") in moved, row
    algorithm.load_state_dict(algorithm.state_dict())


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("act", "ppo", "needs a policy with the ability ScoresPaths"),
        ("act", "dsrl", "needs a policy with the ability"),
        ("diffusion", "nft", "needs a policy with the ability HasFlow"),
        ("diffusion", "sac_flow", "needs a policy with the ability HasFlow"),
    ],
)
def test_algorithms_that_need_more_refuse_it(act, diffusion, kind, name, words):
    policy = make(kind, {"act": act, "diffusion": diffusion}[kind])
    cls = registry.load("algorithms", name)
    with pytest.raises(UserError, match=words):
        cls(cls.Config(), policy)


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_imitation_learns(tmp_path, kind):
    """Where the dot is, proprioception says; after imitation so do the actions."""
    policy = make(kind, write(tmp_path / "small", kind, DOT), DOT, random_weights=True)
    # The encoder of pictures is most of the net, and not needed here.
    pictures = policy.net.rgb_encoder if kind == "diffusion" else policy.net.backbone
    pictures.requires_grad_(False)
    cls = registry.load("algorithms", "sft")
    settings = {"steps_per_iteration": 120, "batch_size": 32, "lr": 3e-3, "ema": 0.9, "shift": 0}
    sft = cls(cls.Config(**settings), policy)
    demos = dots(CHUNK)
    demos.proprio[:, :2] = demos.actions
    for progress in (0.0, 0.5):
        sft.update(demos, progress=progress, generator=gen())
    obs, place, _ = demos.batch(torch.arange(16))
    actions = sft.result.sample(obs, generator=gen(), mode="eval").actions
    gap = (actions - place[:, : actions.shape[1]]).norm(dim=2)[:, 0].mean()
    assert gap < 0.6 * place.norm(dim=2).mean(), gap


# Files.


@pytest.mark.parametrize("kind", ["act", "diffusion"])
def test_what_we_save_lerobot_loads_and_so_do_we(act, diffusion, tmp_path, kind):
    policy, obs = make(kind, {"act": act, "diffusion": diffusion}[kind]), observation()
    with torch.no_grad():
        for p in policy.actor_parameters():
            p.mul_(1.02)
    expected = policy.sample(obs, generator=gen(), mode="eval").actions
    policy.save_lerobot(tmp_path / "out")
    theirs, pre, post = lerobot_from(tmp_path / "out")
    noise = {"noise": randn((3, CHUNK, 4), gen())} if kind == "diffusion" else {}
    chosen = post(theirs.select_action(pre(lerobot_batch(obs)), **noise)).clamp(-1, 1)
    torch.testing.assert_close(chosen, expected[:, 0], atol=1e-5, rtol=1e-5)
    again = make(kind, tmp_path / "out").sample(obs, generator=gen(), mode="eval").actions
    assert torch.equal(again, expected)


def test_a_ddpm_checkpoint_is_exported_as_the_ddim_that_was_evaluated(tmp_path):
    folder = write(
        tmp_path / "in", "diffusion", noise_scheduler_type="DDPM", num_inference_steps=None
    )
    make("diffusion", folder, num_denoise_steps=4).save_lerobot(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (saved["noise_scheduler_type"], saved["num_inference_steps"]) == ("DDIM", 4)


# What does not fit.


def test_what_does_not_fit_is_refused_in_words(act, diffusion, pair, tmp_path):
    wide = dataclasses.replace(SPEC, action_dim=5)
    big = dataclasses.replace(SPEC, cameras={"front": (32, 32)})
    ensemble = write(tmp_path / "ensemble", "act", n_action_steps=1, temporal_ensemble_coeff=0.01)
    plain = write(tmp_path / "plain", "act", use_vae=False)
    many = dataclasses.replace(SPEC, cameras={"front": (24, 32), "wrist": (24, 32)})
    cameras = write(tmp_path / "cameras", "act", many)
    refusals = (
        (lambda: make("act", ""), "needs policy.pretrained: a LeRobot checkpoint"),
        (lambda: make("act", diffusion), "of diffusion, not of act. Use policy.name=diffusion"),
        (lambda: make("act", act, wide), "was trained on 4 action dims, and test/arm has 5"),
        (lambda: make("diffusion", diffusion, big), "pictures of 24 x 32 pixels .* has 32 x 32"),
        (lambda: make("diffusion", pair), "sees 2 observations at once .* Set env.history=2"),
        (lambda: make("act", cameras), "sees observation.images.wrist, which no camera"),
        (lambda: make("act", act, horizon=5), "To execute 5 of them, set policy.execute=5"),
        (lambda: make("act", act, execute=9), "plans 8 actions. Execute at most that many"),
        (lambda: make("act", ensemble), "averages the chunks of several observations"),
        (lambda: make("act", plain, chooser_width=8), "a chooser has nothing to choose from"),
        (
            lambda: make("diffusion", diffusion, num_denoise_steps=101),
            "was trained with 100 times",
        ),
        (
            lambda: make("diffusion", diffusion, random_weights=True, horizon=6),
            "must be a multiple of 4",
        ),
        (lambda: make("diffusion", diffusion, eta=0.0, noise_min=0.2), "noise_min"),
    )
    for attempt, words in refusals:
        with pytest.raises(UserError, match=words):
            attempt()


def test_a_checkpoint_of_other_inputs_is_refused(act, tmp_path):
    config = json.loads((act / "config.json").read_text())
    config["input_features"]["observation.environment_state"] = {"type": "ENV", "shape": [3]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((act / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"inputs observation\.environment_state; the envs here"):
        make("act", tmp_path)


# The whole way, by the commands.


@pytest.mark.parametrize(("kind", "frames"), [("act", 1), ("diffusion", 2)])
def test_load_imitate_evaluate_export_and_load_again(tmp_path, kind, frames):
    env = ["env.task=reach", "env.image_size=32", "env.num_threads=1"]
    data = str(tmp_path / "data")
    assert main(["collect", "mujoco", *env, "--episodes", "3", "--out", data]) == 0
    built = make_env(MujocoConfig(task="reach", image_size=32, num_envs=1, num_threads=1))
    spec = built.spec
    built.close()
    more = {"n_obs_steps": frames} if kind == "diffusion" else {}
    folder = write(tmp_path / "theirs", kind, spec, **more)
    preset = tmp_path / "preset.yaml"
    preset.write_text(
        json.dumps(
            {
                "env": {"name": "mujoco", "task": "reach", "image_size": 32, "num_envs": 2},
                "policy": {"name": kind, "pretrained": str(folder)},
                "algorithm": {"name": "sft", "steps_per_iteration": 2, "batch_size": 4},
                "data": {"path": data},
                "run": {"iterations": 1, "eval_episodes": 2, "videos": 0, "threads": 1},
            }
        )
    )
    out = [f"run.out={tmp_path}", "env.num_threads=1", f"env.history={frames}", "run.device=cpu"]
    assert main(["train", str(preset), "run.name=first", *out, "run.eval_before=false"]) == 0
    run = str(tmp_path / "first")
    assert main(["eval", run, "--episodes", "2"]) == 0
    exported = tmp_path / "exported"
    assert main(["export", run, str(exported)]) == 0
    # The run, and what it exported, act alike and otherwise than what it began with.
    spec = load_spec(run)
    obs = observation(dataclasses.replace(spec, num_envs=3)).at_start(frames)
    policies = [
        load_policy(run, load_config(run).policy, spec, 0),
        make(kind, exported, spec),
        make(kind, folder, spec),
    ]
    trained, again, before = (p.sample(obs, generator=gen(), mode="eval").actions for p in policies)
    torch.testing.assert_close(again, trained, atol=1e-6, rtol=1e-5)
    assert (before - trained).abs().max() > 1e-3
    words = [f"policy.pretrained={exported}", "run.name=second"]
    assert main(["train", str(preset), *words, *out]) == 0
    # A robot's client sends the present observation alone.
    if frames > 1:
        with pytest.raises(UserError, match="sees 2 observations at once, and a robot sends"):
            CheckpointPolicy(run)
        return
    one = {
        "images": {name: x[0].numpy() for name, x in obs.images.items()},
        "proprio": obs.proprio[0].numpy(),
    }
    # A client gets the whole plan, and is told how much of it is executed.
    server = CheckpointPolicy(run)
    served = server.infer(one)["actions"]
    facts = server.metadata
    assert (len(served), facts["horizon"], facts["execute"]) == (8, 8, trained.shape[1])
    np.testing.assert_allclose(served[: facts["execute"]], trained[0].numpy(), atol=1e-5)


def test_the_memory_of_ppo_on_a_chain_is_estimated(tmp_path, capsys):
    env = MujocoConfig(task="reach", image_size=32, num_envs=1, num_threads=1)
    built = make_env(env)
    folder = write(tmp_path / "theirs", "diffusion", built.spec, n_obs_steps=2)
    built.close()
    words = ["policy.name=diffusion", f"policy.pretrained={folder}", "env.history=2"]
    words += ["env.task=reach", "env.image_size=32", "run.init_checkpoint=", f"run.out={tmp_path}"]
    assert main(["train", "mujoco_pick_ppo", *words, "--dry-run", "--memory"]) == 0
    assert "activations of a gradient step" in capsys.readouterr().out
