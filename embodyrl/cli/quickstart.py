"""``embodyrl quickstart``: the whole way to a trained policy in one command.

Demonstrations, supervised fine-tuning, reinforcement learning, report.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from embodyrl.config import compose
from embodyrl.data.collect import collect_dataset
from embodyrl.functional.intervals import format_rate
from embodyrl.report import build_report
from embodyrl.sims.mujoco.warm_up import warm_up
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.loggers import read_metrics
from embodyrl.storage.paths import require_writable
from embodyrl.storage.run_files import read_evaluation
from embodyrl.training.run_folder import finished
from embodyrl.training.runner import train

DEMONSTRATIONS = 100
EXPERT_NOISE = 0.15
HINDSIGHT = 0.3
"""Weight of the loss by which imitation learns where things are in pictures."""


def quickstart(out: str, seed: int, command: str = "") -> dict[str, Any]:
    """Runs all stages, or continues where an interrupted run stopped.

    Args:
        out: folder for all results; a stage whose result is there is not run again.
        seed: of demonstrations, initial weights and noise.
        command: the command line, which is written into the runs' ``meta.json``.

    Returns:
        Successes and episodes before and after reinforcement learning, minutes of each stage, and
        the path of the report; empty if it was interrupted.
    """
    console = Console()
    folder = Path(out)
    require_writable(folder, "--out FOLDER")
    began = time.monotonic()
    console.print(
        "[bold]embodyrl quickstart[/bold]: a Franka learns to pick up the block that a sentence "
        f"names, from camera images.\nAll results are written to {folder}. Ctrl-C stops it at any "
        "point; the same command then continues from there.\n"
    )
    common = [f"run.out={folder}", f"run.seed={seed}", f"env.seed={seed}"]
    demos = folder / "demos"
    seeing = f"algorithm.hindsight_coef={HINDSIGHT}"
    sft = compose("mujoco_pick_sft", [*common, "run.name=sft", f"data.path={demos}", seeing])

    console.rule("1/3  A scripted expert demonstrates")
    warm_up(sft.env)  # compiles the renderer's kernels
    if demos.exists():
        console.print(f"{demos} is there already.")
    else:
        config = dataclasses.replace(sft.env, seed=seed)
        collect_dataset(config, demos, num_episodes=DEMONSTRATIONS, noise=EXPERT_NOISE, seed=seed)

    console.rule("2/3  Imitation: flow matching on the demonstrations")
    if not finished(train(sft, command=command)):
        return {}

    console.rule("3/3  Reinforcement learning: PA-RL, from what a real robot sees too")
    start = [f"run.init_checkpoint={folder / 'sft'}", f"data.path={demos}"]
    run = train(compose("mujoco_pick_pa_rl", [*common, "run.name=rl", *start]), command=command)
    if not finished(run):
        return {}

    report = build_report([run, folder / "sft"], folder / "report.html")
    result = summary(folder, report, (time.monotonic() - began) / 60)
    show(console, result)
    write_json(folder / "result.json", result)
    return result


def summary(folder: Path, report: Path, minutes: float) -> dict[str, Any]:
    """The result of ``quickstart``, read from the files that the runs wrote."""

    def successes(evaluation: str) -> dict[str, int]:
        path = folder / "rl" / "evals" / f"{evaluation}.json"
        episodes = read_evaluation(path)["episodes"]
        return {"successes": sum(e["success"] for e in episodes), "episodes": len(episodes)}

    def last_metrics(run: str) -> dict[str, Any]:
        return read_metrics(folder / run / "metrics.jsonl")[-1]

    return {
        "before": successes("before"),
        "after": successes("after"),
        "env_steps": last_metrics("rl")["env_steps"],
        "minutes_sft": last_metrics("sft")["minutes"],
        "minutes_rl": last_metrics("rl")["minutes"],
        "minutes_this_command": minutes,
        "report": str(report),
    }


def show(console: Console, result: dict[str, Any]) -> None:
    """Prints success before and after as a table, and what to try next."""
    table = Table(title="Success on initial states never trained on, with 95% intervals")
    table.add_column("policy")
    table.add_column("success")
    table.add_column("training")
    before = result["before"]
    after = result["after"]
    table.add_row(
        "imitation",
        format_rate(before["successes"], before["episodes"]),
        f"{result['minutes_sft']:.1f} min",
    )
    table.add_row(
        "imitation + RL",
        format_rate(after["successes"], after["episodes"]),
        f"{result['minutes_rl']:.1f} min more, {result['env_steps']:,} env steps",
    )
    console.print(table)
    folder = Path(result["report"]).parent
    console.print(
        f"\nThis took {result['minutes_this_command']:.1f} minutes. Open the report, which has "
        f"videos from before and after:\n  {result['report']}\n\nWhat to try next:\n"
        f"  embodyrl eval {folder}/rl env.split=ood_camera\n"
        "      does the policy still succeed if the camera has moved?\n"
        f"  embodyrl train mujoco_pick_ppo run.init_checkpoint={folder}/rl run.name=more\n"
        "      continue the training, with PPO\n"
        "  embodyrl list tasks\n"
        "      other tasks and simulators",
        highlight=False,
        soft_wrap=True,  # so that commands can be copied
    )
