"""Learning from recorded episodes for an env that must not be built, such as a robot's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from embodyrl.build import load_config, load_policy
from embodyrl.config import Config, resolve
from embodyrl.data.lerobot_write import write_dataset
from embodyrl.data.recording import Recording
from embodyrl.errors import UserError
from embodyrl.real_robot.env.config import RobotConfig, robot_spec
from embodyrl.training.run_folder import finished
from embodyrl.training.runner import train
from embodyrl.types import EnvSpec


def recording(spec: EnvSpec, seed: int) -> Recording:
    """Ten random actions of which the last solves the task."""
    rng = np.random.default_rng(seed)
    last = np.arange(10) == 9
    return Recording(
        images={}, proprio=rng.normal(3.0, 2.0, (10, spec.proprio_dim)).astype(np.float32),
        actions=rng.uniform(-1, 1, (10, spec.action_dim)).astype(np.float32),
        reward=last.astype(np.float32), solved=last, init=seed, task="t", instruction="go",
    )  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, EnvSpec]:
    """A run for an arm behind ROS, which is nowhere; building that env would fail."""
    folder = tmp_path_factory.mktemp("learn")
    env = {"name": "robot", "robot": "ros2", "cameras": [], "renderer": "none"}
    spec = robot_spec(RobotConfig(robot="ros2", cameras=(), renderer="none"), 7)
    write_dataset(folder / "data", [recording(spec, k) for k in range(3)], spec)
    run = {"out": str(folder), "name": "run", "iterations": 3, "threads": 1, "eval_every": 1}
    config = resolve(
        {
            "env": env, "policy": {"name": "flow_mlp", "width": 16, "horizon": 5},
            "algorithm": {"name": "sft", "batch_size": 8, "steps_per_iteration": 2},
            "run": run, "data": {"path": str(folder / "data")},
        }
    )  # fmt: skip
    return config, spec


def test_it_learns_and_evaluates_nothing(prepared: tuple[Config, EnvSpec]) -> None:
    config, spec = prepared
    folder = train(config, spec=spec)
    assert finished(folder) and not list((folder / "evals").glob("*"))
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step_000003"]
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    # The same call has nothing left to do; a longer run goes on.
    assert train(config, spec=spec) == folder
    assert (folder / "metrics.jsonl").read_text().splitlines() == rows
    train(replace(config, run=replace(config.run, iterations=4)), spec=spec)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == len(rows) + 1


def test_who_plays_is_refused(prepared: tuple[Config, EnvSpec], tmp_path: Path) -> None:
    _, spec = prepared
    plays = resolve(
        {
            "env": {"name": "robot", "robot": "ros2", "cameras": [], "renderer": "none"},
            "policy": {"name": "flow_mlp", "horizon": 5}, "algorithm": {"name": "ppo"},
            "run": {"out": str(tmp_path)},
        }
    )  # fmt: skip
    with pytest.raises(UserError, match="ppo plays while it learns"):
        train(plays, spec=spec)


def test_the_normalisation_of_the_checkpoint_is_kept_if_wanted(
    prepared: tuple[Config, EnvSpec], tmp_path: Path
) -> None:
    config, spec = prepared
    means = {}
    for fit in (True, False):
        algorithm = replace(config.algorithm, fit_inputs=fit)
        run = replace(config.run, out=str(tmp_path), name=str(fit), iterations=1)
        folder = str(train(replace(config, algorithm=algorithm, run=run), spec=spec))
        policy = load_policy(folder, load_config(folder).policy, spec, 0)
        means[fit] = policy.normalize_proprio.mean  # type: ignore[attr-defined]
    assert float(means[True].abs().min()) > 1.0 and float(means[False].abs().max()) == 0.0
