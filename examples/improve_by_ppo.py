"""Take the policy that ``demonstrate_and_imitate.py`` trained, and improve it by PPO.

You learn: how a run starts from a checkpoint, how a preset and overrides make its config, and where
its figures are. An interrupted run (Ctrl-C) goes on when the script is started again.

Costs: 110 s. Needs: demonstrate_and_imitate.py. Writes: runs/examples/ppo. Prints: the return of
the rollouts, and the success on held-out initial states before and after.
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
    overrides = [
        # The env that the policy was trained in, with a reward for progress too.
        "env.task=push",
        "env.cameras=[]",
        "env.renderer=none",
        "env.reward=dense",
        # The policy's size comes from the checkpoint.
        f"run.init_checkpoint={OUT / 'imitation'}",
        "policy.name=flow_mlp",
        # Few iterations: larger steps than the preset's, and a short warm-up.
        "algorithm.num_chunks=20",  # two episodes of 50 actions, in chunks of 5
        "algorithm.minibatch_size=320",
        "algorithm.ratio=per_step",
        "algorithm.lr=3e-4",
        "algorithm.lr_warmup=3",
        "algorithm.warmup_iterations=2",  # the critic learns alone
        f"run.out={OUT}",
        "run.name=ppo",
        f"run.iterations={2 if QUICK else 30}",
        "run.eval_every=0",  # before and after alone
        f"run.eval_episodes={32 if QUICK else 128}",
        "run.threads=1",
    ]
    run = train(compose("mujoco_pick_ppo", overrides))

    # One row of figures for each iteration.
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows[::5]:
        print(f"iteration {row['iteration']:2}: return {row['train_return']:.2f}", end=", ")
        print(f"explained variance {row['explained_variance']:.2f}")

    for name in ("before", "after"):
        episodes = json.loads((run / "evals" / f"{name}.json").read_text())["episodes"]
        solved = sum(episode["success"] for episode in episodes)
        print(f"{name:6} {format_rate(solved, len(episodes))}")


if __name__ == "__main__":
    main()
