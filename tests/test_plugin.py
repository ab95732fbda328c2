"""A package from outside: its env, policy, algorithm and presets do all that our own do."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from scale_runs import assert_same, states

from embodyrl import registry
from embodyrl.build import make_env, make_policy
from embodyrl.checks import check_algorithm, check_env, check_policy
from embodyrl.cli.main import main
from embodyrl.config import Config, compose, to_yaml
from embodyrl.training.runner import train
from embodyrl.training.setup import Envs, build_algorithm

ROOT = Path(__file__).parents[1]
PRESETS = ("reach2d_reinforce", "reach2d_ppo")
QUICK = ("run.iterations=4", "run.eval_every=0", "run.eval_episodes=16", "run.checkpoint_every=2")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The example package, installed into a folder of its own."""
    source = shutil.copytree(ROOT / "examples" / "plugin", tmp_path_factory.mktemp("s") / "plugin")
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--target", str(target), str(source)]
    subprocess.run(command, check=True, timeout=200)
    return target


@pytest.fixture(autouse=True)
def found(installed, monkeypatch):
    """The package is on the path of this process and of those that it starts."""
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), str(ROOT)]))


def make(out: Path, preset: str = PRESETS[0], *overrides: str) -> Config:
    return compose(preset, [f"run.out={out}", "run.name=run", "run.device=cpu", *QUICK, *overrides])


def test_it_is_listed_with_its_summaries(capsys):
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {
        kind: {row["name"]: row.get("summary") for row in found[kind]}
        for kind in found
        if found[kind]
    }
    assert rows["envs"]["reach2d"] == "A point that moves to a goal in a plane."
    assert rows["policies"]["gaussian_mlp"].startswith("GaussianMLP: a Gaussian around")
    assert rows["algorithms"]["reinforce"].startswith("Reinforce: each episode's return")
    assert rows["presets"]["reach2d_ppo"] == "The same by embodyrl's own PPO."


def test_it_keeps_the_contracts(tmp_path):
    config = make(tmp_path)
    env = make_env(config.env)
    check_env(env)
    policy = make_policy(config.policy, env.spec, 0)
    abilities = check_policy(policy, env.reset(seed=0), env.spec)
    assert abilities == ["ScoresPaths", "HasValue", "Imitates"]
    cpu = torch.device("cpu")
    for preset in PRESETS:
        config = make(tmp_path, preset)
        build = partial(build_algorithm, config, Envs(config), cpu)
        check_algorithm(build, env, iterations=5)


@pytest.mark.parametrize("preset", PRESETS)
def test_it_learns(tmp_path, preset, capsys):
    overrides = ("run.iterations=40", "run.eval_episodes=64", "run.checkpoint_every=40")
    folder = train(make(tmp_path, preset, *overrides))
    scores = {
        path.stem: json.loads(path.read_text())["episodes"]
        for path in (folder / "evals").glob("*.json")
    }
    before, after = (sum(e["success"] for e in scores[name]) for name in ("before", "after"))
    assert before < 20 and after > 50, (before, after)
    # It is evaluated and exported as a policy of ours is.
    assert main(["eval", str(folder), "--episodes", "16", "--json"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(said)["successes"] >= 12
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["type"] == "gaussian_mlp"


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path):
    whole = train(make(tmp_path / "a"))
    shutil.copytree(whole, tmp_path / "b" / "run")
    shutil.rmtree(tmp_path / "b" / "run" / "checkpoints" / "step_000004")
    assert_same(train(make(tmp_path / "b")), whole)


@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'embodyrl[scale]'")
def test_ray_workers_give_the_bits_of_one_process(tmp_path):
    from embodyrl.distributed.ray_pool import ray_rollouts

    ray, local = (make(tmp_path / where, PRESETS[0], "run.workers=2") for where in ("ray", "local"))
    assert_same(train(ray, rollouts=lambda: ray_rollouts(ray, cpus=0.5)), train(local))


@pytest.mark.timeout(600)
def test_two_processes_of_torchrun_give_what_one_does(tmp_path):
    config = make(tmp_path / "two")
    (tmp_path / "preset.yaml").write_text(to_yaml(config))
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [*start, "-m", "embodyrl.cli", "train", str(tmp_path / "preset.yaml")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    alone = train(make(tmp_path / "one", PRESETS[0], "run.workers=2"))
    mine, other = states(tmp_path / "two" / "run"), states(alone)
    for key, value in mine.items():
        torch.testing.assert_close(value, other[key], atol=1e-5, rtol=1e-5)


def test_built_in_names_cannot_be_taken_over():
    assert registry.names("envs")["mujoco"].startswith("embodyrl.")
    assert "reach2d_ppo" in registry.preset_names()
