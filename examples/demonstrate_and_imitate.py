"""Let a scripted expert demonstrate a task, store it as a LeRobot data set, and imitate it.

You learn: how a config is made of overrides, how a data set is collected, and how ``train`` runs
supervised fine-tuning (sft): flow matching on chunks of demonstrated actions. The policy is tiny
and reads the simulator's state, not pictures, so that this is a matter of seconds.

Costs: 50 s. Writes: runs/examples/demos (the data set) and runs/examples/imitation (the run).
Prints: the success on held-out initial states. Needs: pip install 'embodyrl[data]'.
Options: --quick trains for a shorter time, which is worse.
"""

import json
import sys
from pathlib import Path

from embodyrl.config import compose
from embodyrl.data.collect import collect_dataset
from embodyrl.functional.intervals import format_rate
from embodyrl.training.runner import train

OUT = Path("runs/examples")
QUICK = "--quick" in sys.argv

# Push a block onto a square. Without a camera the state of the simulator is what the policy sees.
ENV = ["env.task=push", "env.cameras=[]", "env.renderer=none", "env.num_envs=16"]
POLICY = ["policy.name=flow_mlp", "policy.horizon=5", "policy.width=128", "policy.squash=false"]


def main() -> None:
    # A preset and what differs from it. Every key is checked, and a mistyped one is refused.
    config = compose(
        "mujoco_pick_sft",
        [
            *ENV,
            *POLICY,
            f"data.path={OUT / 'demos'}",
            f"run.out={OUT}",
            "run.name=imitation",
            "run.eval_episodes=64",
            f"run.iterations={3 if QUICK else 12}",
            "run.threads=1",
            "algorithm.steps_per_iteration=80",
            "algorithm.batch_size=64",
        ],
    )

    # Noise on the expert's actions shows how to come back to its path.
    if not (OUT / "demos").exists():
        episodes = 10 if QUICK else 30
        stats = collect_dataset(config.env, OUT / "demos", num_episodes=episodes, noise=0.2)
        print(f"The expert solved {stats.solved} of {stats.tried} episodes.")

    # The run's folder holds config, metrics, checkpoints and evaluations.
    run = train(config)
    episodes = json.loads((run / "evals" / "after.json").read_text())["episodes"]
    solved = sum(episode["success"] for episode in episodes)
    print(f"The imitation solves {format_rate(solved, len(episodes))} of new initial states.")


if __name__ == "__main__":
    main()
