"""From a checkpoint in the layout of the hub's LIBERO checkpoints to PPO on LIBERO, with one command."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from vla_models import gen, lerobot_from, public_libero

from embodyrl.build import load_policy, load_spec, make_policy
from embodyrl.cli.main import main
from embodyrl.config import compose, to_dict
from embodyrl.errors import UserError
from embodyrl.policies.vla.make_small import make_small_smolvla
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import ORIGIN_FILE, spec_to_json
from embodyrl.storage.pretrained import recognise
from embodyrl.training.export import export, remark
from embodyrl.types import Conventions, EnvSpec, Obs

pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")
pytest.importorskip("num2words", reason="the extra vla is not installed")

TINY = {"width": 16, "heads": 2, "vision_layers": 1, "image_size": 16, "patch_size": 4}
PRESET = "libero_object_vla_ppo"
SENTENCE = "pick up the alphabet soup and place it in the basket"
KEYS = ("observation.images.image", "observation.images.image2")


def write(folder, name="smolvla", keys=KEYS):
    """A config.json with what is recognised."""
    folder.mkdir(exist_ok=True)
    features = {key: {"type": "VISUAL", "shape": [3, 256, 256]} for key in keys}
    (folder / "config.json").write_text(json.dumps({"type": name, "input_features": features}))
    return folder


@pytest.mark.parametrize("name", ["smolvla", "pi0", "pi05", "pi0_fast"])
def test_policy_cameras_and_profile_are_recognised(name, tmp_path):
    config = compose(PRESET, [f"policy.pretrained={write(tmp_path, name)}"])
    assert (config.policy.name, config.policy.cameras) == (name, ("image", "image2"))
    assert (config.env.profile, config.policy.execute) == ("libero_lerobot", 0)


def test_the_order_of_the_cameras_is_that_of_the_env(tmp_path):
    start = [
        f"policy.pretrained={write(tmp_path, keys=[*KEYS, 'observation.images.empty_camera_0'])}"
    ]
    assert compose(PRESET, [*start, "env.cameras=[wrist]"]).policy.cameras == ("image2",)
    assert compose(PRESET, [*start, "env.cameras=[wrist,agentview]"]).policy.cameras == (
        "image2",
        "image",
    )


def test_cameras_that_the_pre_processor_renames_are_recognised(tmp_path):
    """As in lerobot/pi0fast-libero: fine-tuned from a checkpoint of other cameras."""
    theirs = [f"observation.images.{name}" for name in ("base_0_rgb", "left_wrist_0_rgb")]
    folder = write(tmp_path, "pi0_fast", keys=[*theirs, "observation.images.empty_camera_0"])
    start = f"policy.pretrained={folder}"
    assert compose(PRESET, [start]).env.profile == ""
    step = {
        "registry_name": "rename_observations_processor",
        "config": {"rename_map": dict(zip(KEYS, theirs, strict=True))},
    }
    (folder / "policy_preprocessor.json").write_text(json.dumps({"name": "pre", "steps": [step]}))
    config = compose(PRESET, [start])
    assert config.policy.cameras == ("base_0_rgb", "left_wrist_0_rgb")
    assert config.env.profile == "libero_lerobot"
    # What it is renamed to must be one of the policy's cameras.
    step["config"]["rename_map"] = dict.fromkeys(KEYS, "observation.images.other")
    (folder / "policy_preprocessor.json").write_text(json.dumps({"name": "pre", "steps": [step]}))
    assert compose(PRESET, [start]).env.profile == ""


def test_a_preset_s_keys_that_the_policy_does_not_have_are_left_out(tmp_path):
    start = f"policy.pretrained={write(tmp_path, 'pi0_fast')}"
    config = compose(PRESET, [start])
    assert config.policy.precision == "bfloat16" and not hasattr(config.policy, "num_denoise_steps")
    with pytest.raises(UserError, match="policy has no key 'num_denoise_steps'"):
        compose(PRESET, [start, "policy.num_denoise_steps=3"])
    # A key that no policy has is none of the preset's, but a slip.
    slip = tmp_path / "slip.yaml"
    slip.write_text(f"base: {PRESET}\npolicy: {{precison: float32}}\n")
    with pytest.raises(UserError, match="policy has no key 'precison'"):
        compose(str(slip), [start])


def test_what_the_user_says_stays(tmp_path):
    start = f"policy.pretrained={write(tmp_path, 'pi0')}"
    config = compose(PRESET, [start, "env.profile=", "policy.cameras=[image2,image]"])
    assert (config.env.profile, config.policy.cameras) == ("", ("image2", "image"))
    assert compose(PRESET, [start, "policy.name=smolvla"]).policy.name == "smolvla"
    # Of an architecture alone, cameras and pictures are those of the env.
    config = compose(PRESET, [start, "policy.random_weights=true"])
    assert (config.policy.name, config.env.profile, config.policy.cameras) == ("pi0", "", ())


def test_other_checkpoints_are_left_alone(tmp_path):
    cameras = ("observation.images.camera1", "observation.images.camera2")
    config = compose(PRESET, [f"policy.pretrained={write(tmp_path, keys=cameras)}"])
    assert (config.env.profile, config.policy.cameras) == ("", ())
    assert recognise(write(tmp_path, "act"), ("agentview", "wrist")).policy == ""
    assert recognise(write(tmp_path), ()).profile == ""
    with pytest.raises(UserError, match="there is no such folder"):
        compose(PRESET, [f"policy.pretrained={tmp_path / 'nowhere'}"])


@pytest.mark.parametrize(
    ("orientation", "profile"), [("upright", ""), ("mirrored", "libero_lerobot")]
)
def test_an_export_says_itself_what_its_pictures_are(orientation, profile, tmp_path):
    spec = EnvSpec("libero", 1, 7, 8, "osc_pose", 20.0, 9, {}, conventions=Conventions(orientation))
    (write(tmp_path) / ORIGIN_FILE).write_text(json.dumps({"spec": spec_to_json(spec)}))
    assert recognise(tmp_path, ("agentview", "wrist")).profile == profile


def test_an_export_turns_the_pictures_of_a_family(tmp_path):
    small = make_small_smolvla(tmp_path / "small", [SENTENCE], **TINY)
    conventions = Conventions("upright", "rgb", gripper=(1.0, -1.0))
    cameras = dict.fromkeys(("agentview", "wrist"), (16, 16))
    upright = EnvSpec("libero", 2, 7, 8, "osc_pose", 20.0, 9, cameras, conventions=conventions)
    config = compose(
        PRESET, [f"policy.pretrained={small}", "policy.random_weights=true", "policy.execute=3"]
    )
    policy = make_policy(config.policy, upright, 0)
    policy.fit_inputs(torch.randn(99, 8, generator=gen(1)), torch.randn(99, 7, generator=gen(2)))
    meta = {"spec": spec_to_json(upright), "config": to_dict(config)}
    run = str(tmp_path / "step_000001")
    checkpoint.save(tmp_path / "step_000001", {"policy": policy.state_dict()}, meta)
    assert "are upright, and those of libero_lerobot are mirrored" in remark(
        export(run, tmp_path / "plain")
    )
    out = export(run, tmp_path / "out", "libero_lerobot")
    assert recognise(out, tuple(cameras)).cameras == ("image", "image2") and not remark(out)
    # Read again, it sees the family's mirrored pictures as the policy saw upright ones.
    mirrored = replace(upright, conventions=replace(conventions, orientation="mirrored"))
    start = compose(PRESET, [f"policy.pretrained={out}"])
    assert (start.env.profile, start.policy.execute) == ("libero_lerobot", 0)
    again = make_policy(start.policy, mirrored, 0)
    images = {
        name: torch.randint(0, 256, (2, 16, 16, 3), generator=gen(k), dtype=torch.uint8)
        for k, name in enumerate(cameras)
    }
    obs = Obs(images, torch.randn(2, 8, generator=gen(5)), [SENTENCE] * 2)
    seen = replace(obs, images={name: image.flip(2) for name, image in images.items()})
    actions, turned, not_turned = (
        p.sample(o, generator=gen(6), mode="eval").actions
        for p, o in ((policy, obs), (again, seen), (again, obs))
    )
    torch.testing.assert_close(turned, actions, atol=0.05, rtol=0)  # in bfloat16
    assert again.config.execute == 3 and not torch.equal(not_turned, turned)
    for profile, words in (
        ("libero_openvla", "have no name for the camera 'agentview'"),
        ("libero_lerobo", "Did you mean 'libero_lerobot'"),
    ):
        with pytest.raises(UserError, match=words):
            export(run, tmp_path / "other", profile)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["smolvla", "pi0", "pi05", "pi0_fast"])
def test_one_command_trains_it_on_libero(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip("robosuite")
    folder = public_libero(name, tmp_path / "public", monkeypatch, [SENTENCE])
    # As on the hub: saved on another machine, with the switches of its training.
    config = json.loads((folder / "config.json").read_text())
    said = {"device": "cuda", "n_action_steps": 5, "gradient_checkpointing": True}
    said = {key: value for key, value in said.items() if key in config}
    (folder / "config.json").write_text(json.dumps({**config, **said}))
    command = ["train", PRESET, f"policy.pretrained={folder}", f"run.out={tmp_path / 'runs'}"]
    command += [
        "env.task_ids=[0]",
        "env.num_envs=2",
        "env.max_episode_steps=10",
        "env.image_size=64",
    ]
    command += [
        "algorithm.num_chunks=2",
        "algorithm.minibatch_size=2",
        "algorithm.warmup_iterations=0",
        "run.eval_episodes=2",
    ]
    command += ["run.device=cpu", "run.videos=0", "run.checkpoint_every=1"]
    assert main([*command, "run.iterations=1"]) == 0
    assert f"shown to {folder} as env.profile=libero_lerobot" in capsys.readouterr().err
    run = tmp_path / "runs" / PRESET
    for which in ("before", "after"):
        score = json.loads((run / "evals" / f"{which}.json").read_text())
        planned = 10 if name == "pi0_fast" else 50
        assert (score["execute"], score["horizon"], len(score["episodes"])) == (5, planned, 2)
    spec = load_spec(str(run))
    assert (spec.conventions.orientation, set(spec.cameras)) == ("mirrored", {"agentview", "wrist"})
    # The same command goes on, and what it wrote is a checkpoint of the same layout.
    assert main([*command, "run.iterations=2"]) == 0
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert recognise(tmp_path / "out", tuple(spec.cameras)) == recognise(
        folder, tuple(spec.cameras)
    )
    theirs, _, _ = lerobot_from(tmp_path / "out")
    assert theirs.config.n_action_steps == 5 and list(theirs.config.image_features) == list(KEYS)
    policy = load_policy(str(run), compose(str(run / "config.yaml")).policy, spec, 0)
    assert policy.processors.keys == dict(zip(("agentview", "wrist"), KEYS, strict=True))
    shutil.rmtree(run)
