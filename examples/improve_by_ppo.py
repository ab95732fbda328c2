"""Take the policy that ``demonstrate_and_imitate.py`` trained, and improve it by PPO.

You learn: how a run starts from a checkpoint, how a preset and overrides make its config, and where
its figures are. An interrupted run (Ctrl-C) goes on when the script is started again.

Costs: 90 s. Needs: demonstrate_and_imitate.py. Writes: runs/examples/ppo. Prints: the success of
the rollouts, and on held-out initial states before and after.
Options: --quick trains for a shorter time.
"""

import json
import sys
from pathlib import Path

from embodyrl.config import compose
from embodyrl.functional.intervals import format_rate
from embodyrl.training.runner import train

OUT = Path("runs/examples")
QUICK = "--quick" in sys.argv


def main() -> None:
    # The policy's size comes from the checkpoint; the env must be the one that it was trained in.
    overrides = [
        "env.task=push",
        "env.cameras=[]",
        "env.renderer=none",
        "env.num_envs=32",
        "algorithm.num_chunks=10",  # a whole episode of 50 actions, in chunks of 5
        "algorithm.lr=5e-4",
        f"run.init_checkpoint={OUT / 'imitation'}",
        f"run.out={OUT}",
        "run.name=ppo",
        f"run.iterations={3 if QUICK else 30}",
        "run.eval_every=0",  # before and after alone
        "run.eval_episodes=64",
        "run.threads=1",
    ]
    run = train(compose("mujoco_pick_ppo", overrides))

    # One row of figures for each iteration.
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        print(f"iteration {row['iteration']:2}: success {row['train_success']:.2f}", end="  ")
        print(f"explained variance {row['explained_variance']:.2f}")

    for name in ("before", "after"):
        episodes = json.loads((run / "evals" / f"{name}.json").read_text())["episodes"]
        solved = sum(episode["success"] for episode in episodes)
        print(f"{name:6} {format_rate(solved, len(episodes))}")


if __name__ == "__main__":
    main()
