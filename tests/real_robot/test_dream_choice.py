"""``embodyrl serve`` and ``deploy`` with a world model that chooses among what the policy proposes."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from reach_square import ReachSquare, reaches
from squares import SETTINGS

from embodyrl.build import load_config, load_policy, make_policy
from embodyrl.cli.main import main
from embodyrl.config import compose
from embodyrl.data import collect
from embodyrl.data.policy_actor import load_actor
from embodyrl.errors import UserError
from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy
from embodyrl.real_robot.policy_link.dream_options import DreamOptions
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.types import Obs
from embodyrl.world_models.config import WorldTrainConfig
from embodyrl.world_models.dream_chooser import promises
from embodyrl.world_models.found_state import find_states
from embodyrl.world_models.init import build_model, fit_linear
from embodyrl.world_models.model import WorldModel

SPEC = ReachSquare(1).spec


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """An untrained policy that plans five actions and executes two, and an untrained world model."""
    folder = tmp_path_factory.mktemp("chosen")
    preset = folder / "preset.yaml"
    preset.write_text(
        "env: {name: mujoco, task: reach, num_envs: 1}\n"
        "policy: {name: flow_vla, width: 32, heads: 2, horizon: 5, execute: 2, critic: shared}\n"
        "algorithm: {name: ppo}\n"
    )
    config = compose(str(preset), [])
    policy = make_policy(config.policy, SPEC, 0)
    meta = {"config": json.loads(json.dumps(asdict(config))), "spec": spec_to_json(SPEC)}
    run = checkpoint.save(folder / "step_000001", {"policy": policy.state_dict()}, meta)
    clips = reaches(6, 0)
    rows = torch.arange(len(clips))
    model = build_model(WorldTrainConfig(**SETTINGS | {"found": True}), clips, rows)
    clips.privileged = find_states(model, clips)
    assert model.state is not None
    fit_linear(model.state, clips, rows)
    # Fresh networks for the outcome say the same of everything.
    for net in model.state.prospects:
        torch.nn.init.normal_(net[-1].weight, std=0.5)  # pyright: ignore[reportArgumentType]
    model.save(folder / "model")
    return str(run), str(folder / "model")


def observation(**more: object) -> dict:
    picture = np.zeros((*SPEC.cameras["front"], 3), np.uint8)
    picture[4:9, 20:25] = 250
    hand = np.array([0.1, -0.2], np.float32)
    return {"images": {"front": picture}, "proprio": hand, "prompt": "go to it", **more}


def test_what_a_dream_likes_best_is_served(folders: tuple[str, str]) -> None:
    run, folder = folders
    seen = observation()
    images = {"front": torch.tensor(seen["images"]["front"])[None]}
    obs = Obs(images, torch.tensor(seen["proprio"])[None], ["go to it"])
    taken = []
    for seed in range(4):
        served = CheckpointPolicy(run, "cpu", seed=seed, dream=DreamOptions(folder, 6))
        chunk = served.infer(seen)["actions"]
        # The whole plan is sent, and the executed part of it was dreamt.
        proposals = served.policy.propose(obs, 6, torch.Generator().manual_seed(seed))
        promised = promises(WorldModel.load(folder), obs, proposals[:, :, :2])[0]
        assert proposals.shape == (1, 6, 5, 2) and len(promised.unique()) == 6
        taken.append(int(promised.argmax()))
        assert np.allclose(chunk, proposals[0, taken[-1]].numpy(), atol=1e-6)
        # One that continues what is under way is chosen, too.
        going = observation(previous=chunk, delay=1, execute=2)
        assert served.infer(going)["actions"].shape == (5, 2)
    assert len(set(taken)) > 1


def test_what_a_dream_likes_best_is_recorded(
    folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = folders
    given = {}
    monkeypatch.setattr(collect, "collect_dataset", lambda *_, **options: given.update(options))
    dream = ["--policy", run, "--dream", folder, "--proposals", "6"]
    assert main(["collect", "mujoco", *dream, "--out", str(tmp_path / "x")]) == 0
    choice = given["choice"]
    assert choice.settings == {"dream": folder, "proposals": 6, "margin": 0.0}
    obs = ReachSquare(8).reset(init=list(range(8)))
    spec = replace(SPEC, num_envs=8)
    actor = load_actor(spec, run, 0.0, 5, choice=choice)
    actor.reset(list(range(8)))
    taken = torch.stack([actor.act_on(obs) for _ in range(2)], dim=1)
    policy = load_policy(run, load_config(run).policy, spec, 5, torch.device("cpu"))
    proposals = policy.propose(obs, 6, torch.Generator().manual_seed(5))[:, :, :2]
    best = promises(WorldModel.load(folder), obs, proposals).argmax(1)
    assert len(best.unique()) > 1
    assert torch.allclose(taken, proposals[torch.arange(8), best], atol=1e-5)


def test_options_that_nothing_reads_are_refused(
    folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="--proposals is read with --dream MODEL alone"):
        DreamOptions("", 4)
    for words in (["serve", folders[0]], ["deploy", folders[0], "--out", str(tmp_path)]):
        assert main([*words, "--margin", "0.1"]) == 1
        assert "--margin is read with --dream MODEL alone" in capsys.readouterr().err
    assert main(["eval", folders[0], "--proposals", "4"]) == 1
    assert "--proposals is read with --dream MODEL alone" in capsys.readouterr().err
    out = ["--out", str(tmp_path / "recorded")]
    assert main(["collect", "mujoco", "--proposals", "4", *out]) == 1
    assert "--proposals is read with --dream MODEL alone" in capsys.readouterr().err
    with_server = ["deploy", "ws://127.0.0.1:1", "--robot", "ros2", "--dream", folders[1]]
    assert main([*with_server, "--out", str(tmp_path)]) == 1
    assert "give --dream to `embodyrl serve` there" in capsys.readouterr().err
