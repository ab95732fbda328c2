"""Memory of the simulators: per env, and whether it grows over thousands of episodes.

    python benchmarks/memory.py                    all, 10,000 episodes each; writes benchmarks/memory.json
    python benchmarks/memory.py --envs mujoco --episodes 1000 --out /tmp/memory.json

Each number of envs is a process of its own. Episodes last one chunk, so that what is counted are
resets. Memory is the process tree's anonymous memory, what its allocators took: libraries' pages
are shared with whatever else runs. The JSON is written after every env.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from embodyrl.build import make_env
from embodyrl.config import env_config
from embodyrl.storage.provenance import git_commit, hardware, versions

# Overrides, a small and a larger number of envs.
ENVS = {
    "mujoco": (["env.task=pick", "env.max_episode_steps=2", "env.num_threads=1"], 16, 512),
    "mujoco_state": (
        ["env.name=mujoco", "env.renderer=none", "env.max_episode_steps=2", "env.num_threads=1"],
        16,
        512,
    ),
    "libero_state": (
        [
            *(
                "env.name=libero",
                "env.suite=libero_object",
                "env.task_ids=[0]",
                "env.cameras=[]",
                "env.split=eval",
            ),
            *("env.settle_steps=0", "env.max_episode_steps=1", "env.num_threads=1"),
        ],
        4,
        32,
    ),
    "maniskill": (["env.task=PickCube-v1"], 4, 32),
}


def memory_mib() -> float:
    """Anonymous memory of this process and those below it."""
    me, total = psutil.Process(), 0
    for process in (me, *me.children(recursive=True)):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
    return round(total / 1024, 1)


def one(name: str, num_envs: int, episodes: int) -> dict[str, Any]:
    """Plays ``episodes`` in ``num_envs`` envs; memory before, and after every tenth of them."""
    overrides = ENVS[name][0]
    registered = next((o.split("=")[1] for o in overrides if o.startswith("env.name=")), name)
    config = env_config(registered, [*overrides, f"env.num_envs={num_envs}"])
    before = memory_mib()
    env = make_env(config)
    actions = torch.zeros(num_envs, min(2, env.spec.max_episode_steps), env.spec.action_dim)
    env.reset()
    env.step(actions)
    built, samples, done, began = memory_mib(), [], 0, time.perf_counter()
    for share in range(1, 11):
        while done < episodes * share / 10:
            env.reset()
            env.step(actions)
            done += num_envs
        samples.append(memory_mib())
    seconds = round(time.perf_counter() - began, 1)
    env.close()
    return {
        "num_envs": num_envs, "episodes": done, "seconds": seconds, "before_mib": before, "built_mib": built,
        "every_tenth_mib": samples, "grown_mib": round(samples[-1] - samples[0], 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--envs", nargs="+", choices=sorted(ENVS), default=list(ENVS))
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument(
        "--one", nargs=3, metavar=("NAME", "NUM_ENVS", "EPISODES"), help="what each process runs"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one[0], int(args.one[1]), int(args.one[2]))))
        return
    rows: dict[str, Any] = {}
    about = {"commit": git_commit(), "versions": versions(), "hardware": hardware()}
    for name in args.envs:
        _, few, many = ENVS[name]
        parts = []
        for num_envs, episodes in (
            (few, 10 * few),
            (many, args.episodes),
        ):  # of few, the memory at the start is enough
            command = [sys.executable, __file__, "--one", name, str(num_envs), str(episodes)]
            parts.append(
                json.loads(
                    subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[
                        -1
                    ]
                )
            )
        small, large = parts
        each = (large["built_mib"] - small["built_mib"]) / (many - few)
        rows[name] = {"mib_per_env": round(each, 3), "few": small, "many": large}
        print(name, json.dumps(rows[name]), flush=True)
        args.out.write_text(json.dumps({"envs": rows} | about, indent=1) + "\n")


if __name__ == "__main__":
    main()
