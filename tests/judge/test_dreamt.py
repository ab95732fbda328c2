"""Policies that dream from where recorded episodes began."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from squares import NEVER, SETTINGS, SPEC, T, hardly_trained, squares

from embodyrl.build import make_policy
from embodyrl.config import resolve
from embodyrl.data.lerobot_write import write_dataset
from embodyrl.data.recording import Recording
from embodyrl.judge import dreamt
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.reflectors.calibration import Calibration
from embodyrl.world_models.train import WorldTrainConfig


def untaught(folder: Path) -> str:
    """A checkpoint of a policy for the square."""
    config = resolve(
        {
            "env": {"name": "mujoco"},
            "policy": {"name": "flow_vla", "horizon": 3, "action_patch": 3},
            "algorithm": {"name": "sft"},
        }
    )
    policy: Any = make_policy(config.policy, SPEC, 0)
    meta = {"config": json.loads(json.dumps(asdict(config))), "spec": spec_to_json(SPEC)}
    states = {"policy": policy.state_dict()}
    return str(checkpoint.save(folder / "step_000001", states, meta))


def write(folder: Path, episodes: int, seed: int) -> tuple[str, torch.Tensor]:
    """Recorded squares; and where they began."""
    clips = squares(episodes, seed)
    found = []
    for k in range(episodes):
        rows = slice(k * T, (k + 1) * T)
        solved = clips.solved[rows].numpy()
        images = {"front": clips.images["front"][rows]}
        seen, did = clips.proprio[rows].numpy(), clips.actions[rows].numpy()
        reward = solved.astype("float32")
        found.append(Recording(images, seen, did, reward, solved, k, "t", clips.sentences[0]))
    return str(write_dataset(folder, found, SPEC)), clips.proprio[::T]


def test_policies_dream_from_recorded_beginnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: squares(60, 0)))
    settings: Any = {k: v for k, v in SETTINGS.items() if k != "state_steps"} | {"state": False}
    model = hardly_trained(WorldTrainConfig(**settings, out=str(tmp_path / "run")))
    one, first = write(tmp_path / "one", 4, 5)
    two, second = write(tmp_path / "two", 4, 6)
    monkeypatch.setattr(dreamt, "AT_ONCE", 2)
    env = dreamt.open_dream(model, 5, "cpu")
    assert env.spec.num_envs == 2
    # Each data set has its share, and each episode begins at its first observation.
    beginnings = dreamt.first_observations([one, two], env.spec, 5)
    assert torch.allclose(beginnings.proprio, torch.cat([first[:3], second[:2]]))
    # The last of three batches is filled up, and what fills it does not count.
    run = untaught(tmp_path)
    env.model.calibration = NEVER
    assert dreamt.dreamt_successes(run, env, beginnings).tolist() == [False] * 5
    env.model.calibration = Calibration(bias=50.0, threshold=0.5)
    assert dreamt.dreamt_successes(run, env, beginnings).tolist() == [True] * 5
