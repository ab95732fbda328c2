"""Run folders with real evaluations: the scripted expert with much noise, then with less.

And one of a short training in an env that reports no success.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from embodyrl.config import resolve
from embodyrl.data.record import record_episodes
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv
from embodyrl.sims.mujoco.experts import ScriptedExpert
from embodyrl.storage.loggers import MetricsWriter
from embodyrl.storage.video import write_video
from embodyrl.training.runner import train

CONFIG = """
env: {name: mujoco, task: "pick,push", split: train, cameras: [front]}
policy: {name: flow_vla, horizon: 5}
algorithm: {name: ppo, lr: 0.0001, gamma: 0.99}
run: {name: NAME, seed: SEED, eval_split: eval}
"""


def make_run(folder: Path, env: MujocoEnv, seed: int, noises: dict[str, tuple[int, float]]) -> Path:
    (folder / "evals").mkdir(parents=True)
    for name, (iteration, noise) in noises.items():
        rows = []
        for r in record_episodes(
            env, ScriptedExpert(env, noise=noise, seed=seed), 16, keep="all", noise=noise
        ):
            video = f"videos/{name}_{r.init:04d}.mp4" if r.init < 6 else None
            if video:
                write_video(r.images["front"], folder / video, env.spec.control_hz)
            rows.append(
                {
                    "init": r.init,
                    "task": r.task,
                    "success": r.success,
                    "length": len(r),
                    "video": video,
                    "instruction": "go <there>",
                }
                | {"return": float(r.reward.sum())}
            )
        text = {
            "env_steps": 1000 * iteration,
            "minutes": 0.1 * iteration,
            "iteration": iteration,
            "episodes": rows,
        }
        (folder / "evals" / f"{name}.json").write_text(json.dumps(text))
    with MetricsWriter(folder) as metrics:
        for i in range(1, 11):
            metrics.write(
                {
                    "iteration": i,
                    "env_steps": 1000 * i,
                    "minutes": 0.1 * i,
                    "train_success": i / 20 if i % 3 else float("nan"),
                }
                | {
                    "train_episodes": 20,
                    "task_success/pick": i / 10,
                    "task_episodes/pick": 10,
                    "policy_loss": -0.01 * i,
                    "value_loss": 1 / i,
                    "approx_kl": 0.01,
                }
                | {"explained_variance": i / 12, "env_steps_per_second": 3000.0 + i, "entropy": 1.0}
            )
    text = CONFIG.replace("NAME", folder.name).replace("SEED", str(seed))
    (folder / "config.yaml").write_text(text)
    meta = {
        "command": f"embodyrl train demo run.seed={seed}",
        "seed": seed,
        "commit": "0123456789ab",
    }
    meta |= {
        "versions": {"python": "3.12", "torch": "2.11"},
        "hardware": {"cpu": "a <b>CPU</b>", "cores": 2, "gpu": None},
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> list[Path]:
    env = MujocoEnv(MujocoConfig(num_envs=8, task="pick,push", split="eval", cameras=("front",)))
    root = tmp_path_factory.mktemp("runs")
    noises = {"before": (0, 1.6), "iter_000005": (5, 1.2), "after": (10, 0.6)}
    made = [make_run(root / f"seed{seed}", env, seed, noises) for seed in (0, 1)]
    env.close()
    return made


@pytest.fixture(scope="session")
def rising(runs, tmp_path_factory) -> list[Path]:
    """Two seeds with evaluations as of a known curve: .2 to .9, half of it after 2,000 steps."""
    rng = np.random.default_rng(0)
    made = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("rising") / f"seed{seed}"
        shutil.copytree(runs[seed], folder)
        shutil.rmtree(folder / "evals")
        (folder / "evals").mkdir()
        for iteration in range(0, 13, 2):
            rate = 0.2 + 0.7 * iteration**2 / (iteration**2 + 2**2)
            rows = [
                {"init": i, "task": "pick", "success": bool(solved), "length": 9}
                | {"return": float(solved), "video": None}
                for i, solved in enumerate(rng.random(400) < rate)
            ]
            text = {"env_steps": 1000 * iteration, "minutes": 0.1 * iteration}
            text |= {"iteration": iteration, "episodes": rows}
            (folder / "evals" / f"iter_{iteration:06d}.json").write_text(json.dumps(text))
        made.append(folder)
    return made


PENDULUM = {
    "env": {"name": "gymnasium", "id": "Pendulum-v1", "num_envs": 2, "max_episode_steps": 10},
    "policy": {
        "name": "flow_mlp", "width": 16, "layers": 1, "critic_width": 8, "num_denoise_steps": 2,
    },
    "algorithm": {
        "name": "sac_flow", "num_chunks": 10, "capacity": 64, "warmup_chunks": 20, "batch_size": 16,
        "critic_width": 16,
    },
    "run": {
        "name": "pendulum", "iterations": 4, "eval_every": 2, "eval_episodes": 6, "device": "cpu",
        "threads": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def pendulum(tmp_path_factory) -> Path:
    return train(
        resolve(PENDULUM, [f"run.out={tmp_path_factory.mktemp('runs')}", "run.checkpoint_every=2"])
    )
