"""A served policy moves along what training changed, and refuses what cannot be mixed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from embodyrl.build import make_policy
from embodyrl.cli.main import main
from embodyrl.errors import UserError
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.policies.guidance import GuidedPolicy
from embodyrl.real_robot.commands.deploy import deploy_checkpoint
from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy
from embodyrl.real_robot.policy_link.dream_options import DreamOptions
from embodyrl.real_robot.policy_link.guidance_options import GuidanceOptions
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/arm", 1, 4, 9, "ee_delta_pos", 25.0, 20, {})
CONFIG = FlowMLPConfig(width=16, horizon=4, execute=2, critic_width=8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two checkpoints with the same units: before and after training."""
    folder = tmp_path_factory.mktemp("runs")
    paths = {}
    for seed, name in enumerate(("before", "after")):
        policy = make_policy(CONFIG, SPEC, 0)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        meta = {
            "config": {
                "env": {"name": "mujoco"},
                "policy": dataclasses.asdict(CONFIG),
                "algorithm": {"name": "sft"},
                "run": {"name": name},
            },
            "spec": spec_to_json(SPEC),
        }
        state = {"policy": policy.state_dict()}
        paths[name] = str(checkpoint.save(folder / name / "step_000001", state, meta))
    return paths


def observed() -> dict:
    proprio = np.random.default_rng(0).standard_normal(9).astype(np.float32)
    return {"proprio": proprio, "images": {}, "prompt": ""}


def served(saved: dict[str, str], guidance: GuidanceOptions, name: str = "after") -> np.ndarray:
    policy = CheckpointPolicy(saved[name], "cpu", seed=3, guidance=guidance)
    return policy.infer(observed())["actions"]


def test_weights_of_zero_and_one_are_the_two_policies(saved: dict[str, str]) -> None:
    none = GuidanceOptions()
    before, after = served(saved, none, "before"), served(saved, none)
    assert np.abs(before - after).max() > 0.01 and after.shape == (4, 4)
    for weight, wanted in ((0.0, before), (1.0, after)):
        found = served(saved, GuidanceOptions(saved["before"], weight))
        np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_more_than_one_goes_further(saved: dict[str, str]) -> None:
    found = served(saved, GuidanceOptions(saved["before"], 1.7))
    plain = [CheckpointPolicy(saved[name], "cpu", seed=3).policy for name in ("after", "before")]
    guided = GuidedPolicy(plain[0], plain[1], 1.7)
    obs = Obs({}, torch.tensor(observed()["proprio"])[None], [""])
    generator = torch.Generator().manual_seed(3)
    wanted = guided.sample(obs, generator=generator, mode="eval").actions[0]
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-6)


def test_what_cannot_be_mixed_is_refused(
    saved: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    guidance = GuidanceOptions(saved["before"], 1.5)
    policy = CheckpointPolicy(saved["after"], "cpu", guidance=guidance)
    previous = {"previous": np.zeros((4, 4), np.float32), "delay": 1, "execute": 2}
    with pytest.raises(UserError, match="cannot continue its previous chunk"):
        policy.infer(observed() | previous)
    with pytest.raises(UserError, match="--dream chooses among proposals of one policy"):
        CheckpointPolicy(saved["after"], "cpu", dream=DreamOptions("model"), guidance=guidance)
    with pytest.raises(UserError, match="--mode rtc continues the chunk of one"):
        deploy_checkpoint(saved["after"], guidance=guidance)
    with pytest.raises(UserError, match="give --base to `embodyrl serve` there"):
        deploy_checkpoint("ws://127.0.0.1:1", robot="ros2", guidance=guidance, mode="sync")
    assert main(["serve", saved["after"], "--guidance", "2"]) == 1
    assert "name its checkpoint with --base" in capsys.readouterr().err
