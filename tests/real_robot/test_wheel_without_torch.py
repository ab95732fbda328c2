"""The robot's own wheel, in an environment without PyTorch, drives an arm by a served policy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from ros_arm import PATIENT

from embodyrl.build import make_policy
from embodyrl.config import compose
from embodyrl.real_robot.logs.mcap_log import read
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.training.export_file import export_file

ROOT = Path(__file__).parents[2]
PRESET = (
    "env: {name: mujoco, task: reach, image_size: 32, num_envs: 1}\n"
    "policy: {name: flow_vla, width: 32, heads: 2}\nalgorithm: {name: ppo}\n"
)


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=600, env=clean
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    source = ROOT / "packages" / "embodyrl-robot"
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    assert built.returncode == 0, built.stderr
    [wheel] = folder.glob("*.whl")
    return wheel


def test_the_wheel_holds_the_projects_own_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if ".dist-info/" not in name]
        assert all(packed.read(name) == (ROOT / name).read_bytes() for name in names)
        said = packed.read(
            next(name for name in packed.namelist() if name.endswith("METADATA"))
        ).decode()
    assert {
        "embodyrl/real_robot/control/safety.py",
        "embodyrl/real_robot/operator/page.html",
        "embodyrl/policies/exported/runner.py",
    } <= set(names)
    assert "torch" not in said and "embodyrl/training/runner.py" not in names


@contextmanager
def speaking(*command: str | Path) -> Iterator[str]:
    """A process of this environment; gives the address that its first lines say."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "embodyrl.cli", *map(str, command)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"ws://(\S+?)[. ]*( |$)", line):
                yield f"ws://{found[1]}"
                return
        raise AssertionError(f"{command} said no address")
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel and what it asks for, and no PyTorch."""
    folder = tmp_path_factory.mktemp("environment")
    bare = folder / "bare"
    venv.create(bare, with_pip=False, symlinks=True)
    what = f"embodyrl-robot[onnx] @ {wheel.as_uri()}"
    done = run(sys.executable, "-m", "pip", "--python", bare, "install", "-q", what, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert run(bare / "bin/python", "-c", "import torch", cwd=folder).returncode == 1
    return bare


def checkpoint_of(preset: str, tmp_path: Path) -> Path:
    """A checkpoint with fresh weights, for the twin of its env."""
    (tmp_path / "preset.yaml").write_text(preset)
    config = compose(str(tmp_path / "preset.yaml"), [])
    env = MujocoTwin(config.env)  # type: ignore[arg-type]
    policy = make_policy(config.policy, env.spec, 0)
    meta = {
        "config": json.loads(json.dumps(asdict(config))),
        "spec": spec_to_json(env.spec),
    }
    env.close()
    (tmp_path / "twin.yaml").write_text(json.dumps({"preset": "twin", "safety": asdict(PATIENT)}))
    return checkpoint.save(tmp_path / "step_000001", {"policy": policy.state_dict()}, meta)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_torch_it_drives_the_twin_by_a_served_policy(bare: Path, tmp_path: Path) -> None:
    saved = checkpoint_of(PRESET, tmp_path)
    (tmp_path / "token").write_text("a" * 32)
    options = (
        "--robot",
        "rosbridge",
        "--robot-file",
        "twin.yaml",
        "--token-file",
        "token",
        "--mode",
        "sync",
    )
    with (
        speaking("serve", saved, "--port", "0", "--token-file", tmp_path / "token") as policy_at,
        speaking("twin", saved, "--transport", "rosbridge", "--port", "0") as arm_at,
    ):
        done = run(
            bare / "bin/embodyrl-robot", policy_at, *options, "--address", arm_at, cwd=tmp_path
        )
    check_driven(done, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_torch_it_drives_the_twin_by_an_exported_file(bare: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    saved = checkpoint_of(PRESET, tmp_path)
    file = export_file(str(saved), tmp_path / "policy.onnx")[0]
    options = ("--robot", "rosbridge", "--robot-file", "twin.yaml", "--mode", "sync")
    with speaking("twin", saved, "--transport", "rosbridge", "--port", "0") as arm_at:
        done = run(bare / "bin/embodyrl-robot", file, *options, "--address", arm_at, cwd=tmp_path)
    check_driven(done, tmp_path)


def check_driven(done: subprocess.CompletedProcess[str], tmp_path: Path) -> None:
    """The arm was driven within its limits, and all of it is in the log."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mujoco/reach on rosbridge" in done.stdout
    result = json.loads((tmp_path / "runs/deploy/result.json").read_text())["results"][0]
    assert result["taken"] >= 5 and max(result["peak"].values()) <= 1.0
    assert len(read(tmp_path / "runs/deploy/episode_0000.mcap")["/action"]) == result["taken"]
