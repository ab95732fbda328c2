"""Exported policies act as their checkpoints do, in a process without PyTorch, and refuse what does not fit."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodyrl.build import make_env, make_policy
from embodyrl.cli.main import main
from embodyrl.config import compose
from embodyrl.errors import UserError
from embodyrl.policies.exported.actor import ExportedActor
from embodyrl.policies.exported.runner import PolicyFile, PolicyFileError
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.policies.small_token_vla import SmallTokenVLAConfig
from embodyrl.real_robot.commands.deploy import deploy_checkpoint
from embodyrl.real_robot.commands.serve import serve_checkpoint
from embodyrl.real_robot.policy_link.connect_policy import serve_here
from embodyrl.real_robot.policy_link.file_policy import FilePolicy
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.training.export_file import export_file
from embodyrl.types import EnvSpec, Obs

BLIND = EnvSpec("test/arm", 3, 4, 9, "ee_delta_pos", 25.0, 20, {})
SEEING = dataclasses.replace(BLIND, cameras={"front": (64, 64), "wrist": (32, 48)})
MLP = {"width": 16, "horizon": 3, "critic_width": 8}
VLA = {"width": 32, "layers": 1, "heads": 2, "critic_width": 8, "vision_width": 4}
SENTENCES = ["pick up the red block", "push", ""]
ALONE = """
import sys, json
sys.modules["torch"] = sys.modules["embodyrl"] = None    # importing either raises
sys.path.insert(0, sys.argv[1])
import numpy as np
from policy_runner import PolicyFile
policy, seen = PolicyFile(sys.argv[2]), np.load(sys.argv[3])
images = {name: seen[name] for name in policy.facts["cameras"]}
print(json.dumps([
    policy.act(seen["proprio"][i], {k: x[i] for k, x in images.items()}, sentence, seen["noise"][i]).tolist()
    for i, sentence in enumerate(json.loads(sys.argv[4]))
]))
assert not [name for name, module in sys.modules.items() if module and name.split(".")[0] in ("torch", "embodyrl")]
"""


def saved(folder: Path, config: Any, spec: EnvSpec, seed: int = 1) -> tuple[Path, Any]:
    """A checkpoint whose weights all matter and whose parts have all learned, and its policy."""
    policy: Any = make_policy(config, spec, seed=0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    policy.fit_inputs(
        3 * torch.randn(50, spec.proprio_dim, generator=generator) + 1,
        0.3 * torch.randn(50, spec.action_dim, generator=generator) + 0.2,
    )
    for part in (policy.chooser, policy.one_step):
        if part is not None:
            part.ready.fill_(True)
    section = {"name": config.name, **dataclasses.asdict(config)}
    meta = {
        "config": {
            "env": {"name": "mujoco"},
            "policy": section,
            "algorithm": {"name": "sft"},
            "run": {"name": "exported"},
        },
        "spec": spec_to_json(spec),
    }
    return checkpoint.save(folder / "step_000001", {"policy": policy.state_dict()}, meta), policy


def observation(spec: EnvSpec) -> Obs:
    generator = torch.Generator().manual_seed(3)
    n = spec.num_envs
    images = {
        name: torch.randint(0, 256, (n, *size, 3), generator=generator, dtype=torch.uint8)
        for name, size in spec.cameras.items()
    }
    proprio = 3 * torch.randn(n, spec.proprio_dim, generator=generator)
    return Obs(images, proprio, SENTENCES[:n])


def wanted(policy: Any, obs: Obs) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise, and what the policy itself makes of it."""
    shape = (len(obs), policy.noise_count, *policy.flow_shape)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    return noise, policy.eval().noise_free(obs, noise)


def acts_without_torch(file: Path, obs: Obs, noise: torch.Tensor) -> np.ndarray:
    seen = file.with_name("seen.npz")
    np.savez(
        seen, noise=noise, proprio=obs.proprio, **{k: x.numpy() for k, x in obs.images.items()}
    )
    command = [sys.executable, "-c", ALONE, file.parent, file, seen, json.dumps(obs.instruction)]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return np.array(json.loads(done.stdout))


MLPS = {
    "gated": {},
    "plain": {"velocity": "plain", "squash": False, "start_noise": 0.4},
    "gaussian": {"velocity": "gaussian", "num_denoise_steps": 1},
    "one step": {"one_step_width": 8, "squash": False},
    "part of the plan": {"execute": 2},
    "shortcut": {"shortcut_steps": 4, "num_denoise_steps": 2},
}


@pytest.mark.parametrize("settings", MLPS.values(), ids=list(MLPS))
def test_arrays_act_as_the_policy_without_torch(settings: dict, tmp_path: Path) -> None:
    path, policy = saved(tmp_path, FlowMLPConfig(**{**MLP, **settings}), BLIND)
    file = tmp_path / "out" / "policy.npz"
    assert main(["export", str(path), "--to", str(file)]) == 0
    obs = observation(BLIND)
    noise, actions = wanted(policy, obs)
    assert actions.std() > 0.05
    np.testing.assert_allclose(acts_without_torch(file, obs, noise), actions, atol=1e-5)


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
@pytest.mark.parametrize("settings", MLPS.values(), ids=list(MLPS))
def test_c_acts_as_the_policy(settings: dict, tmp_path: Path) -> None:
    path, policy = saved(tmp_path, FlowMLPConfig(**{**MLP, **settings}), BLIND)
    file = tmp_path / "policy.c"
    assert export_file(str(path), file) == [file]
    obs = observation(BLIND)
    noise, actions = wanted(policy, obs)
    # A program that reads proprioception and noise as text, and says the actions.
    given = [*obs.proprio[0].tolist(), *noise[0].flatten().tolist()]
    size, acts = noise[0].numel(), actions[0].numel()
    (tmp_path / "main.c").write_text(
        f'#include <stdio.h>\n#include "policy.c"\nint main(void) {{ float in[9 + {size}], out[{acts}];\n'
        f'for (int i = 0; i < 9 + {size}; i++) if (scanf("%f", in + i) != 1) return 1;\n'
        f'policy_act(in, in + 9, out); for (int i = 0; i < {acts}; i++) printf("%.9g\\n", out[i]); }}\n'
    )
    build = ["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-O2", "main.c", "-o", "act", "-lm"]
    subprocess.run(build, cwd=tmp_path, check=True)
    text = " ".join(map(repr, given))
    said = subprocess.run(
        [tmp_path / "act"], input=text, capture_output=True, text=True, check=True
    )
    found = np.array(said.stdout.split(), float).reshape(actions[0].shape)
    np.testing.assert_allclose(found, actions[0], atol=1e-5)


ONNX = {
    "mlp": (FlowMLPConfig(**MLP), BLIND),
    "pixels": (FlowVLAConfig(**VLA, context_layers=1), SEEING),
    "chooser": (FlowVLAConfig(**VLA, chooser_width=16, edit_scale=0.3, proposals=3), SEEING),
    "shared chooser": (FlowMLPConfig(**MLP, chooser_width=8, chooser_sees="shared"), BLIND),
    "one step": (FlowVLAConfig(**VLA, one_step_width=16), SEEING),
    "shortcut": (FlowVLAConfig(**VLA, shortcut_steps=4, num_denoise_steps=1), SEEING),
    "noise policy": (FlowVLAConfig(**VLA, steer_width=8, horizon=10, execute=3), BLIND),
}


@pytest.mark.parametrize(("config", "spec"), ONNX.values(), ids=list(ONNX))
def test_onnx_acts_as_the_policy_without_torch(config: Any, spec: EnvSpec, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    path, policy = saved(tmp_path, config, spec)
    file = tmp_path / "policy.onnx"
    assert export_file(str(path), file) == [file, tmp_path / "policy_runner.py"]
    obs = observation(spec)
    noise, actions = wanted(policy, obs)
    assert actions.std() > 0.05
    np.testing.assert_allclose(acts_without_torch(file, obs, noise), actions, atol=1e-5)


def test_a_file_says_what_its_numbers_mean(tmp_path: Path) -> None:
    path, policy = saved(tmp_path, FlowMLPConfig(**MLP, squash=False), BLIND)
    export_file(str(path), tmp_path / "policy.npz")
    facts = PolicyFile(tmp_path / "policy.npz").facts
    assert facts["name"] == "test/arm" and facts["control_mode"] == "ee_delta_pos"
    assert facts["control_hz"] == 25 and facts["horizon"] == 3 and facts["noise"] == [1, 3, 4]
    mean = torch.tensor(facts["normalisation"]["proprio"]["mean"])
    torch.testing.assert_close(mean, policy.normalize_proprio.mean)
    torch.testing.assert_close(
        torch.tensor(facts["normalisation"]["actions"]["std"]), policy.normalize_action.std
    )


def test_what_does_not_fit_is_refused_in_words(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, FlowMLPConfig(**MLP), BLIND)
    file = tmp_path / "policy.npz"
    export_file(str(path), file)
    policy = PolicyFile(file)
    with pytest.raises(PolicyFileError, match=r"proprio has the shape \(4,\); it must be \(9,\)"):
        policy.act(np.zeros(4))
    with pytest.raises(PolicyFileError, match="not finite"):
        policy.act(np.full(9, np.nan))
    with pytest.raises(PolicyFileError, match=r"noise has the shape \(2,\)"):
        policy.act(np.zeros(9), noise=np.zeros(2))
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(PolicyFileError, match="holds no facts"):
        PolicyFile(tmp_path / "other.npz")
    (tmp_path / "broken.npz").write_bytes(b"nothing")
    with pytest.raises(PolicyFileError, match="cannot be read"):
        PolicyFile(tmp_path / "broken.npz")
    # Half of a copy, and one with a damaged place in it.
    whole = bytearray((tmp_path / "policy.npz").read_bytes())
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    whole[200] ^= 255
    (tmp_path / "damaged.npz").write_bytes(whole)
    for name in ("half.npz", "damaged.npz"):
        with pytest.raises(PolicyFileError, match=r"cannot be read as \.npz.*copy it again"):
            PolicyFile(tmp_path / name)
    with pytest.raises(PolicyFileError, match="There is no file"):
        PolicyFile(tmp_path / "none.npz")


def test_policies_that_cannot_be_written_are_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = saved(tmp_path / "a", FlowMLPConfig(**MLP, chooser_width=8), BLIND)
    with pytest.raises(UserError, match="acts with a chooser"):
        export_file(str(path), tmp_path / "policy.npz")
    path, _ = saved(tmp_path / "b", FlowVLAConfig(**VLA), BLIND)
    with pytest.raises(UserError, match="Only a flow_mlp"):
        export_file(str(path), tmp_path / "policy.c")
    with pytest.raises(UserError, match=r"must be \.onnx, \.npz or \.c"):
        export_file(str(path), tmp_path / "policy.pt")
    config = FlowMLPConfig(**MLP, chooser_width=8, ascent_rate=0.1)
    path, _ = saved(tmp_path / "c", config, BLIND)
    with pytest.raises(UserError, match="by gradients of its critics"):
        export_file(str(path), tmp_path / "policy.onnx")
    # What is said to do instead can be done.
    config = SmallTokenVLAConfig(width=32, layers=1, heads=2, critic_width=8)
    path, _ = saved(tmp_path / "d", config, SEEING)
    with pytest.raises(UserError, match="Run the checkpoint itself"):
        export_file(str(path), tmp_path / "policy.onnx")
    assert main(["export", str(path)]) == 1
    assert "Give either a folder, for LeRobot, or --to FILE" in capsys.readouterr().err


def test_a_server_answers_from_the_file_and_refuses_to_continue_a_chunk(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, FlowMLPConfig(**MLP), BLIND)
    file = tmp_path / "policy.npz"
    export_file(str(path), file)
    proprio = observation(BLIND).proprio[0].numpy()
    with serve_here(FilePolicy(str(file), seed=5)) as client:
        assert client.metadata["horizon"] == 3 and client.metadata["control_hz"] == 25
        found = client.infer({"proprio": proprio, "prompt": "", "images": {}})["actions"]
        again = {"previous": found, "delay": 1, "execute": 2}
        with pytest.raises(UserError, match="cannot continue its previous chunk"):
            client.infer({"proprio": proprio, "prompt": "", "images": {}, **again})
    np.testing.assert_array_equal(found, PolicyFile(file, seed=5).act(proprio))
    with pytest.raises(UserError, match=r"policy\.start_noise=0 cannot be applied"):
        serve_checkpoint(
            str(file), "127.0.0.1", 0, "", "cpu", 0, overrides=["policy.start_noise=0"]
        )
    for given, words in (
        ({"robot": "ros2"}, "--mode rtc continues"),
        ({"mode": "sync"}, "is an exported file"),
        ({"robot": "ros2", "mode": "sync", "detectors": ["d"]}, "--detector needs its checkpoint"),
    ):
        with pytest.raises(UserError, match=words):
            deploy_checkpoint(str(file), **given)


def test_with_the_same_seed_the_file_takes_the_checkpoints_actions(tmp_path: Path) -> None:
    path, policy = saved(tmp_path, FlowMLPConfig(**MLP, execute=2), BLIND)
    export_file(str(path), tmp_path / "policy.npz")
    actor = ExportedActor(str(tmp_path / "policy.npz"), BLIND)
    obs = observation(BLIND)

    def seeds() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(k) for k in range(3)]

    own = policy.eval().sample(obs, generator=seeds(), mode="eval").actions
    found = actor.sample(obs, generator=seeds(), mode="eval").actions
    torch.testing.assert_close(found, own, atol=1e-5, rtol=0)
    assert actor.config.horizon == 3 and actor.config.execute == 2
    with pytest.raises(UserError, match="noise-free"):
        actor.sample(obs, generator=seeds(), mode="train")
    with pytest.raises(UserError, match="action_dim"):
        ExportedActor(str(tmp_path / "policy.npz"), dataclasses.replace(BLIND, action_dim=5))


REACH = """
env: {name: mujoco, task: reach, renderer: none, num_envs: 4}
policy: {name: flow_mlp, width: 16, horizon: 4}
algorithm: {name: sac_flow}
"""


def test_a_file_is_scored_in_the_env_of_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "preset.yaml").write_text(REACH)
    config = compose(str(tmp_path / "preset.yaml"), [])
    env = make_env(config.env)
    policy = make_policy(config.policy, env.spec, 0)
    meta = {
        "config": json.loads(json.dumps(dataclasses.asdict(config))),
        "spec": spec_to_json(env.spec),
    }
    env.close()
    path = str(checkpoint.save(tmp_path / "step_000001", {"policy": policy.state_dict()}, meta))
    file = str(tmp_path / "policy.npz")
    export_file(path, file)
    capsys.readouterr()
    results = []
    for more in ([], ["--policy", file]):
        assert main(["eval", path, "--episodes", "4", "--json", *more]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[1].pop("exported") == file
    assert results[0] == results[1] and results[1]["execute"] == 4
    # Another run's env is named, and the file that acted.
    other = ["eval", path, "--episodes", "1", "--policy", file, "run.name=another"]
    assert main(other) == 0
    said = capsys.readouterr()
    assert f"by {file}:" in said.out and ", not another" in said.err
    assert main(["eval", path, "--policy", file, "policy.start_noise=0"]) == 1
    assert "policy.start_noise=0 is not read" in capsys.readouterr().err
