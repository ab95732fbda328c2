"""Every algorithm on one device, from pixels: seconds of a rollout and of its update.

Part of ``gpu_all.py`` (``--only algorithms``). The task and the networks are the quickstart's; every
algorithm starts from one imitation policy and plays as many chunks. An algorithm that fails says so
in its row.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.cli.main import main as cli
from embodyrl.config import compose
from embodyrl.storage.loggers import read_metrics
from embodyrl.training.runner import train

TASK = ("mujoco", "env.task=pick", "env.max_blocks=2")
SIMPLE = ("ppo", "grpo", "nft")
BUFFER = ("algorithm.num_chunks=8", "algorithm.capacity=4000", "algorithm.warmup_chunks=256")
SEEING = "algorithm.hindsight_steps=50"
FROM_DEMOS = {
    "sac_flow": (*BUFFER, SEEING),
    "dsrl": (*BUFFER, SEEING),
    "fpo": (SEEING,),
    "pa_rl": (*BUFFER, SEEING, "algorithm.critic_warmup=100", "algorithm.mc_steps=50"),
}
FOUND = ("policy.critic=found", SEEING)


@dataclass(frozen=True)
class AlgorithmSize:
    """How much is measured."""

    num_envs: int
    imitation: int  # iterations of it
    iterations: int  # of every other algorithm
    demos: int


ALGORITHM_SIZES = {"cuda": AlgorithmSize(64, 12, 3, 64), "cpu": AlgorithmSize(32, 1, 1, 32)}


def algorithms(size: AlgorithmSize, device: str, out: str, settings: tuple[str, ...] = ()) -> Any:
    """Imitation, then a row for each algorithm that starts from it.

    Args:
        size: how much.
        device: of policy and env.
        out: folder of data and runs.
        settings: further overrides, of the env.
    """
    demos = Path(out) / "demos"
    env = [f"env.num_envs={size.num_envs}", f"env.device={device}", *settings]
    command = ["collect", *TASK, *env, "--episodes", str(size.demos), "--out", str(demos)]
    if status := cli([*command, "--noise", "0.15"]):
        raise RuntimeError(f"no demonstrations: exit status {status}")
    common = [
        *(f"run.out={out}", f"run.device={device}", *env),
        *("run.eval_before=false", "run.eval_every=0", "run.eval_episodes=64", "run.videos=0"),
    ]
    shown = [f"data.path={demos}"]
    imitation = [*common, *shown, f"run.iterations={size.imitation}"]
    rows = {"sft": _row("mujoco_pick_sft", "sft", imitation)}
    start = [
        *(*common, f"run.iterations={size.iterations}"),
        f"run.init_checkpoint={Path(out) / 'sft'}",
    ]
    for name in SIMPLE:
        rows[name] = _row(f"mujoco_pick_{name}", name, start)
    for name, smaller in FROM_DEMOS.items():
        rows[name] = _row(f"mujoco_pick_{name}", name, [*start, *smaller, *shown])
    rows["ppo_found"] = _row("mujoco_pick_ppo", "ppo_found", [*start, *shown, *FOUND])
    return rows


def _row(preset: str, name: str, overrides: list[str]) -> dict[str, Any]:
    """The last iteration of a run, or why there is none."""
    began = time.perf_counter()
    try:
        folder = train(compose(preset, [*overrides, f"run.name={name}"]), command="benchmark")
        last = read_metrics(folder / "metrics.jsonl")[-1]
    except Exception as error:  # the other algorithms are still worth having
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    keys = ("iteration", "env_steps", "env_steps_per_second", "rollout_seconds", "minutes")
    return {"seconds": time.perf_counter() - began, **{k: last.get(k) for k in keys}}
