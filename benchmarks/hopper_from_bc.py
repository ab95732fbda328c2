"""Flow PPO from behaviour cloning on Hopper, as ReinFlow does it: 1,432 to 3,206 in 80 M env steps (arXiv:2505.22094).

    python benchmarks/hopper_from_bc.py --seeds 0 1 2

ReinFlow clones D4RL's hopper-medium-v2, which no package ships, so a half-trained SAC makes the
like here: it stops at the first evaluation above ``MEDIUM``, and its noisy rollouts are the data.
Then flow matching on chunks of four, then PPO with Flow-Noise. Runs go to ``runs/bench/hopper`` and
can be interrupted and resumed; the result is ``benchmarks/hopper_from_bc.json`` and
``docs/images/hopper_from_bc.png``.
Returns are of the noise-free policy on resets never trained on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from figures import draw_json
from shared import HERE, complete, evaluations, write

from embodyrl.config import resolve
from embodyrl.functional.intervals import bootstrap_iqm
from embodyrl.training.run_folder import finished

OUT = Path("runs/bench/hopper")
MEDIUM, PUBLISHED = 1400.0, {"before": 1432, "after": 3206, "env_steps": 80_000_000}
ENV = {"name": "gymnasium", "id": "Hopper-v5"}
GAUSSIAN = {
    "name": "flow_mlp",
    "velocity": "gaussian",
    "num_denoise_steps": 1,
    "transition": "flow_noise",
    "width": 128,
}
FLOW = {
    "name": "flow_mlp",
    "velocity": "plain",
    "horizon": 4,
    "num_denoise_steps": 4,
    "transition": "flow_noise",
    "squash": False,
    "noise_min": 0.2,  # of the whole path: ReinFlow's .10 to .24 of a step, times sqrt(K)
    "noise_max": 0.48,
}


def make(
    name: str,
    seed: int,
    policy: dict,
    algorithm: dict,
    env: dict | None = None,
    data: str = "",
    **run: Any,
):
    """The config of one run."""
    common = {
        "name": name,
        "out": str(OUT),
        "seed": seed,
        "device": "cpu",
        "threads": 1,
        "videos": 0,
    }
    sections = {
        "env": {**ENV, "seed": 1000 * seed, **(env or {})},
        "policy": policy,
        "algorithm": algorithm,
        "run": {**common, "eval_episodes": 16, "keep_checkpoints": 1, **run},
    }
    return resolve(sections | ({"data": {"path": data, "keep": "all"}} if data else {}))


def demonstrate() -> str:
    """The medium data set: a SAC that stops at ``MEDIUM``, and its rollouts."""
    iterations, algorithm = (
        0,
        {
            "name": "sac_flow",
            "num_chunks": 16,
            "capacity": 200_000,
            "utd": 0.5,
            "critic_width": 128,
        },
    )
    while not (rows := evaluations(OUT / "medium")) or max(r["return"] for r in rows) < MEDIUM:
        iterations = max(iterations, rows[-1]["iteration"] if rows else 0) + 125  # 8,000 env steps
        every = {"eval_every": 125, "checkpoint_every": 125}
        complete(
            make("medium", 0, GAUSSIAN, algorithm, {"num_envs": 4}, iterations=iterations, **every)
        )
    path = OUT / "demos"
    if not path.exists():
        command = [
            sys.executable,
            "-m",
            "embodyrl.cli",
            "collect",
            "gymnasium",
            "env.id=Hopper-v5",
            "env.num_envs=8",
        ]
        options = ["--policy", str(OUT / "medium"), "--keep-failures", "--episodes", "200"]
        subprocess.run([*command, *options, "--out", str(path)], check=True)
    return str(path)


def improve(seed: int, demos: str, iterations: int) -> None:
    """Behaviour cloning and PPO with one seed."""
    sft = {"name": "sft", "lr": 1e-3, "steps_per_iteration": 500}
    complete(
        make(f"bc_{seed}", seed, FLOW, sft, {"num_envs": 16}, demos, iterations=10, eval_every=0)
    )
    ppo = {
        "name": "ppo",
        # a rollout starts new episodes: a shorter one would see their beginnings alone
        "num_chunks": 250,
        "minibatch_size": 400,
        "epochs": 5,
        "critic_epochs": 10,
        "lr": 1e-4,
        "lr_end": 0.1,
        "gamma": 0.9975,  # per action; ReinFlow discounts chunks of four by .99
        "gae_lambda": 0.95,
        "entropy_coef": 0.01,
    }
    start = {"init_checkpoint": str(OUT / f"bc_{seed}"), "checkpoint_every": 20, "eval_every": 20}
    complete(make(f"ppo_{seed}", seed, FLOW, ppo, {"num_envs": 8}, iterations=iterations, **start))


def summarise(seeds: list[int]) -> None:
    """JSON and figure of the seeds that are finished."""
    curves = {
        seed: evaluations(OUT / f"ppo_{seed}") for seed in seeds if finished(OUT / f"ppo_{seed}")
    }
    if not curves:
        return
    reached = [
        next((r["env_steps"] for r in c if r["return"] >= PUBLISHED["after"]), None)
        for c in curves.values()
    ]
    result = {
        "published": PUBLISHED,
        "before": bootstrap_iqm([c[0]["return"] for c in curves.values()]),
        "after": bootstrap_iqm([c[-1]["return"] for c in curves.values()]),
        "env_steps_to_published_return": reached,
        "medium_sac": evaluations(OUT / "medium"),
        "curves": curves,
    }
    write("hopper_from_bc", result)
    print(json.dumps({k: result[k] for k in ("before", "after", "env_steps_to_published_return")}))
    draw_json(HERE / "hopper_from_bc.json", "hopper")


def main() -> None:
    """Runs what is not finished, then writes JSON and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=400, help="of PPO, 8,000 env steps each")
    a = parser.parse_args()
    demos = demonstrate()
    for seed in a.seeds:
        improve(seed, demos, a.iterations)
        summarise(a.seeds)


if __name__ == "__main__":
    main()
