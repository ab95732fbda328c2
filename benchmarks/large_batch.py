"""More envs at the same number of env steps: which of PPO's settings should change with them?

    python benchmarks/large_batch.py --seeds 0 1 2

A Franka reaches for a ball, from states (the learning test's task), from one imitation checkpoint.
``minibatch``: every setting stays, so a larger rollout gives more gradient steps (the recipe of
arXiv:2603.06009). ``steps``: minibatches grow with the rollout, so that their number stays;
``steps_rate``: the rate grows with their square root as well. Runs go to
``runs/bench/large_batch``; the result is ``benchmarks/large_batch.json``. Success is of the
noise-free policy on states never trained on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from shared import complete, evaluations, write

from embodyrl.config import resolve
from embodyrl.functional.intervals import bootstrap_iqm

OUT = Path("runs/bench/large_batch")
ENV = {"name": "mujoco", "task": "reach", "reward": "dense", "renderer": "none", "num_envs": 64}
POLICY = {
    "width": 64,
    "layers": 1,
    "text_layers": 0,
    "critic": "privileged",
    "critic_width": 64,
    "horizon": 4,
    "action_patch": 4,
}
BASE_ENVS, NUM_CHUNKS, MINIBATCH, RATE = 64, 10, 320, 3e-4
SCALINGS = ("minibatch", "steps", "steps_rate")


def make(name: str, env: dict, algorithm: dict, data: str = "", **run):
    """The config of one run."""
    common = {
        "name": name,
        "out": str(OUT),
        "device": "cpu",
        "threads": 1,
        "videos": 0,
        "eval_episodes": 256,
    }
    sections = {
        "env": {**ENV, **env},
        "policy": {"name": "flow_vla", "num_denoise_steps": 2, **POLICY},
        "algorithm": algorithm,
        "run": {**common, **run},
    }
    return resolve(sections | ({"data": {"path": data}} if data else {}))


def imitate() -> str:
    """The checkpoint that all runs start from: twenty demonstrations, imitated briefly."""
    demos = OUT / "demos"
    if not demos.exists():
        overrides = [f"env.{key}={value}" for key, value in ENV.items() if key != "name"]
        command = [
            sys.executable,
            "-m",
            "embodyrl.cli",
            "collect",
            "mujoco",
            *overrides,
            "--episodes",
            "20",
        ]
        subprocess.run([*command, "--out", str(demos)], check=True)
    sft = {"name": "sft", "batch_size": 64, "ema": 0.9}
    complete(make("sft", {}, sft, str(demos), iterations=3, eval_every=0))
    return str(OUT / "sft")


def improve(start: str, envs: int, scaling: str, seed: int, env_steps: int) -> Path:
    """PPO with one number of envs and one way to scale."""
    name, factor = f"{scaling}_{envs}_{seed}", envs // BASE_ENVS
    larger = 1 if scaling == "minibatch" else factor
    ppo = {
        "name": "ppo",
        "num_chunks": NUM_CHUNKS,
        "minibatch_size": MINIBATCH * larger,
        "epochs": 4,
        "critic_epochs": 4,
        "warmup_iterations": 2,
        "lr_warmup": 2,
        "lr": RATE * (factor**0.5 if scaling == "steps_rate" else 1.0),
    }
    iterations = env_steps // (envs * NUM_CHUNKS * POLICY["horizon"])
    run = {
        "seed": seed,
        "init_checkpoint": start,
        "iterations": iterations,
        "eval_every": max(1, iterations // 5),
    }
    complete(make(name, {"num_envs": envs, "seed": seed}, ppo, checkpoint_every=iterations, **run))
    return OUT / name


def main() -> None:
    """Runs what is not finished, then writes the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--env-steps", type=int, default=300_000)
    a = parser.parse_args()
    start, table = imitate(), {}
    for envs in a.num_envs:
        for scaling in SCALINGS if envs != BASE_ENVS else SCALINGS[:1]:
            folders = {seed: improve(start, envs, scaling, seed, a.env_steps) for seed in a.seeds}
            runs = {seed: evaluations(folder) for seed, folder in folders.items()}
            table[f"{envs} {scaling}"] = {
                "after": bootstrap_iqm([r[-1]["success"] for r in runs.values()]),
                "half_way": bootstrap_iqm([r[len(r) // 2]["success"] for r in runs.values()]),
                "minutes": [r[-1]["minutes"] for r in runs.values()],
                "runs": runs,
            }
            print(envs, scaling, table[f"{envs} {scaling}"]["after"], flush=True)
    settings = {
        "env_steps": a.env_steps,
        "minibatch_size": MINIBATCH,
        "lr": RATE,
        "num_chunks": NUM_CHUNKS,
    }
    write("large_batch", {"settings": settings, "table": table})


if __name__ == "__main__":
    main()
