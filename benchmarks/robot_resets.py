"""What a reset is worth: a person who arranges every scene, a scripted return, a reset policy, practice.

    python benchmarks/robot_resets.py --forward runs/long_pick --backward runs/long_put_back --minutes 20 \
        --seeds 0 1 2 --out benchmarks/robot_resets.json

A policy that picks up a block works on the simulated arm behind its safety filter, for so many minutes
of simulated time. A row is one run:

    person      a person arranges the scene before every episode, ``--arrange`` s each time
    scripted    the hand lets go of what it holds somewhere over the table, and goes home
    policy      ``--backward`` puts the block back, until the simulator says so or the bound is reached
    practice    the policy of ``--both`` plays both tasks in turn; needs it

Where a reset fails a person is asked, and arranges in ``--arrange`` s, too; so they are after
``--ask-after`` failed episodes in a row. All times are those of the simulated clock: the arm's motion, its
resets and the waits for the person; how fast this machine computes does not count. ``successes`` are
solved episodes; in practice of both tasks, so ``forward`` says how many picked up. Nothing is learned
meanwhile. Draws nothing.

Policies that see states, made in minutes (and the same for ``put_back``):

    embodyrl collect mujoco env.task=pick env.cameras=[] env.renderer=none --episodes 100 --out data/states_pick
    embodyrl train benchmarks/robot_states.yaml run.name=long_pick data.path=data/states_pick
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from embodyrl.functional.intervals import wilson
from embodyrl.real_robot.env.robot_env import RobotConfig, RobotEnv
from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy
from embodyrl.storage.provenance import git_commit, hardware, versions

SCRIPT = """spread: [0.08, 0.12, 0.0]
waypoints:
  - {position: [0.48, 0.0, 0.15], fingers: closed}
  - {position: [0.48, 0.0, 0.03], fingers: closed}
  - {position: [0.48, 0.0, 0.03], fingers: open, seconds: 1.0}
  - {position: [0.48, 0.0, 0.15], fingers: open}
"""
VARIANTS = ("person", "scripted", "policy", "practice")
HOME = (0.44, 0.0, 0.17)
"""Where the episodes of the embedded tasks begin."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forward", required=True, help="run of the task pick")
    parser.add_argument("--backward", required=True, help="run of the task put_back")
    parser.add_argument("--both", default="", help="run of both tasks, for practice")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS[:3]))
    parser.add_argument("--minutes", type=float, default=20.0, help="of simulated time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arrange", type=float, default=15.0, help="s of a person, a scene")
    parser.add_argument("--reset-seconds", type=float, default=15.0)
    parser.add_argument("--reset-tries", type=int, default=2)
    parser.add_argument("--ask-after", type=int, default=5)
    parser.add_argument("--speed", type=float, default=0.5)
    parser.add_argument("--script", type=Path, default=Path("runs/bench/robot_resets.yaml"))
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    if "practice" in a.variants and not a.both:
        parser.error("practice plays both tasks: give --both RUN")
    load = os.getloadavg()[0]
    a.script.parent.mkdir(parents=True, exist_ok=True)
    a.script.write_text(SCRIPT)
    rows = []
    for seed in a.seeds:
        for variant in a.variants:
            rows.append({"variant": variant, "seed": seed, **run(a, variant, seed)})
            print(json.dumps(rows[-1]), flush=True)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items() if k != "out"}
    result = {"settings": settings, "rows": rows, "load": [load, os.getloadavg()[0]]}
    result |= {"commit": git_commit(), "hardware": hardware(), "versions": versions()}
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + "\n")


def settings_of_variant(a: argparse.Namespace, variant: str) -> dict[str, Any]:
    """The env's settings of a variant."""
    if variant == "person":
        return {}
    given = {"reset_tries": a.reset_tries, "ask_after": a.ask_after}
    given |= {"reset_seconds": a.reset_seconds}
    if variant == "practice":
        return given | {"practice": True}
    return given | {"reset": str(a.script if variant == "scripted" else a.backward)}


def run(a: argparse.Namespace, variant: str, seed: int) -> dict[str, Any]:
    """One run of so many minutes."""
    env = RobotEnv(
        RobotConfig(
            cameras=(), renderer="none", speed=a.speed, seed=seed, home=HOME,
            max_episode_steps=60 if variant == "practice" else 40,
            **settings_of_variant(a, variant),
        )
    )  # fmt: skip
    path = a.both if variant == "practice" else a.forward
    policy = CheckpointPolicy(path, "cpu", seed)
    execute = policy.metadata["execute"]
    moved = waited = 0.0
    arranged = episodes = solved = forward = 0
    while moved + waited + env.between.state.counts.seconds < 60 * a.minutes:
        env.reset(init=[seed * 10_000 + episodes])
        # Whoever arranges, the simulator or a person, takes a person's time on a real arm.
        if variant == "person" or not episodes or env.between.state.asked:
            arranged += 1
            waited += a.arrange
        driver = env._driver
        assert driver is not None
        began = driver.clock.now()
        while True:
            chunk = policy.infer(env.look())["actions"][:execute]
            step = env.step(torch.from_numpy(chunk)[None])
            if bool(step.done) or bool(step.fault):
                break
        moved += driver.clock.now() - began
        episodes += 1
        solved += bool(step.success)
        forward += bool(step.success) and not env.between.state.back
    counts = env.between.summary()
    env.close()
    hours = (moved + waited + counts["seconds"]) / 3600
    return {
        "episodes": episodes,
        "successes": solved,
        "forward": forward,
        "interval": wilson(solved, episodes),
        "hours": round(hours, 4),
        "successes_an_hour": round(solved / hours, 1),
        "arranged": arranged,
        "person_seconds": round(waited, 1),
        "person_seconds_a_success": round(waited / solved, 2) if solved else None,
        "moved_seconds": round(moved, 1),
        "resets": counts,
    }


if __name__ == "__main__":
    main()
