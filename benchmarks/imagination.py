"""A policy trained inside a learned world model alone, from nothing, and what the real simulator says of it.

    python benchmarks/imagination.py --seeds 0 1 2

Each seed: demonstrations and imitation (as in the quickstart), episodes of that policy and of a noisy expert, a world
model of them, its measures on episodes of its own, PPO in the dream, and the real evaluations along the way. Runs go
to ``runs/imagination/SEED`` and can be interrupted and resumed; the result is ``benchmarks/imagination.json`` and
``.png``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from embodyrl.data.lerobot_read import open_dataset
from embodyrl.provenance import git_commit, hardware, versions
from embodyrl.stats import bootstrap_iqm, wilson

HERE = Path(__file__).parent
ENV = ("env.max_blocks=2", "--keep-failures", "--past-success", "5")


def embodyrl(folder: Path, stage: str, *arguments: str) -> None:
    """Runs a command; its minutes are added to the stage's, also over interruptions."""
    path = folder / "minutes.json"
    minutes = json.loads(path.read_text()) if path.exists() else {}
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "embodyrl.cli", *arguments], check=True)
    path.write_text(json.dumps(minutes | {stage: minutes.get(stage, 0.0) + (time.monotonic() - began) / 60}))


def collect(folder: Path, name: str, *arguments: str) -> Path:
    """A data set, unless it is there."""
    if not (folder / name).exists():
        embodyrl(folder, "data", "collect", "mujoco", "env.task=pick", *arguments, "--out", str(folder / name))
    return folder / name


def run(seed: int, overrides: list[str]) -> dict:
    """One seed, or what is left of it."""
    folder = Path("runs/imagination") / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    sft, model = folder / "sft", folder / "world" / "model"
    demos = collect(folder, "demos", "env.max_blocks=2", "--episodes", "100", "--noise", "0.15", "--seed", str(seed))
    common = [f"run.out={folder}", f"run.seed={seed}"]
    embodyrl(
        folder,
        "imitation",
        "train",
        "mujoco_pick_sft",
        *common,
        "run.name=sft",
        f"data.path={demos}",
        f"env.seed={seed}",
    )
    tried = ("--policy", str(sft), "--derail", "0.4")
    data = [
        collect(folder, "tried", *ENV, *tried, "--episodes", "1000", "--seed", str(100 + seed)),
        collect(folder, "shown", *ENV, "--noise", "0.5", "--episodes", "400", "--seed", str(200 + seed)),
    ]
    held_out = collect(folder, "held_out", *ENV, *tried, "--episodes", "200", "--seed", str(300 + seed))
    paths = ",".join(str(path) for path in data)
    embodyrl(folder, "world", "world", "train", f"data=[{paths}]", f"out={folder / 'world'}", f"seed={seed}")
    dream = ["run.name=dream", f"run.init_checkpoint={sft}", f"env.model={model}", *overrides]
    embodyrl(folder, "dream", "train", "mujoco_pick_dream_ppo", *common, *dream)
    policies = sorted(str(p) for p in (folder / "dream" / "checkpoints").glob("step_*"))
    policies = [str(sft), *(policies[i] for i in np.linspace(0, len(policies) - 1, min(5, len(policies))).astype(int))]
    measured = folder / "world_eval.json"
    if not measured.exists():
        command = ["world", "eval", str(model), "--data", str(held_out), "--json", "--policies", *policies]
        done = subprocess.run(
            [sys.executable, "-m", "embodyrl.cli", *command], check=True, capture_output=True, text=True
        )
        measured.write_text(done.stdout.splitlines()[-1])
    evals = [json.loads(p.read_text()) for p in (folder / "dream" / "evals").glob("*.json")]
    curve = sorted(
        (e["iteration"], e["env_steps"], e["minutes"], sum(x["success"] for x in e["episodes"]), len(e["episodes"]))
        for e in evals
    )
    return {
        "seed": seed,
        "real_steps": sum(len(open_dataset(path).columns["index"]) for path in data),
        "minutes": json.loads((folder / "minutes.json").read_text()),
        "before": [*curve[0][3:], *wilson(*curve[0][3:])],
        "after": [*curve[-1][3:], *wilson(*curve[-1][3:])],
        "curve": curve,
        "world": json.loads(measured.read_text()),
    }


def plot(seeds: list[dict], path: Path) -> None:
    """Real success over imagined steps, pictures by depth, and policies in the dream against the real env."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4))
    for result in seeds:
        _, steps, _, solved, count = (np.array(x) for x in zip(*result["curve"], strict=True))
        axes[0].plot(steps / 1000, 100 * solved / count, marker="o", markersize=3, label=f"seed {result['seed']}")
        depth = result["world"]["by_depth"]
        axes[1].plot([d["steps"] for d in depth], [d["psnr"] for d in depth], label=f"seed {result['seed']}")
        axes[1].plot([d["steps"] for d in depth], [d["psnr_still"] for d in depth], color="grey", linewidth=0.8)
        rows = result["world"]["as_evaluator"]["policies"]
        axes[2].scatter([100 * r["imagined"] for r in rows], [100 * r["real"] for r in rows], s=16)
    axes[0].set(xlabel="imagined env steps (thousands)", ylabel="real success (%)", ylim=(0, 100))
    axes[1].set(xlabel="steps into the dream", ylabel="PSNR (dB); grey: a still picture")
    axes[2].plot([0, 100], [0, 100], color="grey", linewidth=0.8)
    axes[2].set(xlabel="success in the dream (%)", ylabel="real success (%)", xlim=(0, 100), ylim=(0, 100))
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Runs all seeds, then writes JSON and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="for PPO in the dream, e.g. run.iterations=100")
    arguments = parser.parse_args()
    seeds = []
    for seed in arguments.seeds:
        seeds.append(run(seed, arguments.overrides))
        rates = {when: [s[when][0] / s[when][1] for s in seeds] for when in ("before", "after")}
        result = {
            "title": "Trained in a dream alone: pick up the named block, pixels",
            "iqm": {w: bootstrap_iqm(x) for w, x in rates.items()},
            "seeds": seeds,
            "commit": git_commit(),
            "versions": versions(),
            "hardware": hardware(),
        }
        (HERE / "imagination.json").write_text(json.dumps(result, indent=1))
        plot(seeds, HERE / "imagination.png")
        print(json.dumps({"iqm": result["iqm"]}), flush=True)


if __name__ == "__main__":
    main()
