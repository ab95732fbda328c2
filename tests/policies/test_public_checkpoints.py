"""From a checkpoint in the layout of the hub's LIBERO checkpoints to PPO on LIBERO, with one command."""

import json
import shutil

import pytest
from vla_models import lerobot_from, public_libero

from embodyrl.build import load_policy, load_spec
from embodyrl.cli.main import main
from embodyrl.config import compose
from embodyrl.errors import UserError
from embodyrl.storage.env_spec import ORIGIN_FILE, spec_to_json
from embodyrl.storage.pretrained import recognise
from embodyrl.types import Conventions, EnvSpec

pytest.importorskip("lerobot.policies", reason="the extra vla is not installed")
pytest.importorskip("num2words", reason="the extra vla is not installed")

PRESET = "libero_object_vla_ppo"
SENTENCE = "pick up the alphabet soup and place it in the basket"
KEYS = ("observation.images.image", "observation.images.image2")


def write(folder, name="smolvla", keys=KEYS):
    """A config.json with what is recognised."""
    folder.mkdir(exist_ok=True)
    features = {key: {"type": "VISUAL", "shape": [3, 256, 256]} for key in keys}
    (folder / "config.json").write_text(json.dumps({"type": name, "input_features": features}))
    return folder


@pytest.mark.parametrize("name", ["smolvla", "pi0", "pi05"])
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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["smolvla", "pi0", "pi05"])
def test_one_command_trains_it_on_libero(name, tmp_path, monkeypatch):
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
    run = tmp_path / "runs" / PRESET
    for which in ("before", "after"):
        score = json.loads((run / "evals" / f"{which}.json").read_text())
        assert (score["execute"], score["horizon"], len(score["episodes"])) == (5, 50, 2)
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
