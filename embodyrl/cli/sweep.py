"""``embodyrl sweep``: the runs of all combinations of some settings, one after the other or on Ray.

A run is the command ``embodyrl train`` in a process of its own. So a run that fails, or dies, ends
no other one, and the same command goes on with what is left.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError
from embodyrl.interrupt import INTERRUPTED

HELP = """examples:
  embodyrl sweep mujoco_pick_ppo run.seed=0,1,2
      three seeds, in runs/mujoco_pick_ppo_sweep/seed-0 ...
  embodyrl sweep mujoco_pick_ppo algorithm.lr=1e-4,3e-4 run.seed=0,1,2 env.num_envs=32
      six runs: every learning rate with every seed
  embodyrl sweep mujoco_pick_ppo run.seed=0,1,2 --launcher ray --ray-address auto --worker-gpus 1
      side by side on a Ray cluster, each run with a GPU
A list in brackets is one value: 'env.cameras=[front,wrist],[front]' are two.
The same command goes on: runs that are finished stay, others continue. The exit status is 1 if a run
failed.
"""
MOST = 1000
"""Runs of a sweep; more are most likely a mistake."""


@dataclass(frozen=True)
class Planned:
    """One run of a sweep.

    Attributes:
        name: of its folder; says the values that it does not share with all others.
        overrides: of the preset.
    """

    name: str
    overrides: tuple[str, ...]


def add_sweep_verb(verb: Any) -> None:
    """Adds ``embodyrl sweep`` to the parser."""
    text = "Trains with every combination of some settings, and compares the runs."
    sub = verb("sweep", _run, text, HELP, torch="yes")
    sub.add_argument("preset", help="a preset's name, or a YAML file")
    text = "settings; several values of one are separated by commas"
    sub.add_argument("overrides", nargs="*", metavar="key.sub=value,value", help=text)
    text = "folder of the runs (default: runs/PRESET_sweep)"
    sub.add_argument("--out", default="", metavar="FOLDER", help=text)
    sub.add_argument("--list", action="store_true", help="print the runs, and start none")
    text = "ray: runs side by side, on this machine or a cluster, in a folder that all machines see"
    sub.add_argument("--launcher", choices=["ray"], help=text)
    text = "ray: address of a running cluster, or auto (default: start one for this sweep)"
    sub.add_argument("--ray-address", default="", metavar="ADDRESS", help=text)
    text = "ray: CPU cores per run (default: %(default)s)"
    sub.add_argument("--worker-cpus", type=float, default=1.0, metavar="N", help=text)
    text = "ray: GPUs per run (default: %(default)s)"
    sub.add_argument("--worker-gpus", type=float, default=0.0, metavar="N", help=text)


def plan(overrides: Sequence[str]) -> list[Planned]:
    """The runs that overrides mean, the last key changing fastest.

    Raises:
        UserError: no key has several values, one has a value twice, or there are too many runs.
    """
    # The values of each key.
    values: dict[str, list[str]] = {}
    for item in overrides:
        key, sign, text = item.partition("=")
        if not sign:
            raise UserError(f"{item!r} is not an override: write key.sub=value,value.")
        if key in values:
            raise UserError(f"{key} is given twice: write {key}=value,value once.")
        if key in ("run.name", "run.out"):
            raise UserError(f"A sweep names its runs itself: leave {key} out, and give --out.")
        values[key] = split_values(text)
        if len(set(values[key])) < len(values[key]):
            raise UserError(f"{item!r} names a value twice.")
    varied = [key for key, given in values.items() if len(given) > 1]
    if not varied:
        raise UserError(
            "There is nothing to sweep: give a key several values, for example run.seed=0,1,2."
        )
    # A run for each combination, named by the values that differ.
    short = short_names(varied)
    runs = []
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        name = "_".join(f"{short[key]}-{_slug(chosen[key])}" for key in varied)
        runs.append(Planned(name, tuple(f"{key}={value}" for key, value in chosen.items())))
    if len(runs) > MOST:
        raise UserError(f"These are {len(runs)} runs; a sweep has at most {MOST}.")
    names = [run.name for run in runs]
    if len(set(names)) < len(names):  # values that differ in signs that a folder cannot have
        runs = [Planned(f"{i:03d}_{run.name}", run.overrides) for i, run in enumerate(runs)]
    return runs


def split_values(text: str) -> list[str]:
    """The values of ``a,b``: at commas outside of brackets, braces and quotes."""
    values = [""]
    depth = 0
    quote = ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "[{(":
            depth += 1
        elif sign in "]})":
            depth -= 1
        elif sign == "," and depth == 0:
            values.append("")
            continue
        values[-1] += sign
    return values


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or the whole key where two would have the same."""
    last = {key: key.rpartition(".")[2] for key in keys}
    ends = list(last.values())
    return {key: end if ends.count(end) == 1 else key for key, end in last.items()}


def _slug(value: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", value).strip("-.")[:60] or "none"


def _run(a: argparse.Namespace) -> int:
    from embodyrl.config import compose
    from embodyrl.report import build_report
    from embodyrl.training.resume_check import check_folder
    from embodyrl.training.run_folder import complete

    runs = plan(a.overrides)
    out = Path(a.out or f"runs/{Path(a.preset).stem}_sweep")
    # A mistake in any of them is said before the first one starts.
    full = {r.name: [*r.overrides, f"run.out={out}", f"run.name={r.name}"] for r in runs}
    configs = {name: compose(a.preset, overrides) for name, overrides in full.items()}
    if a.list:
        print("\n".join(f"{out / r.name}  {' '.join(r.overrides)}" for r in runs))
        return 0
    # What is finished stays. A folder that holds another run is told before the first one starts.
    for config in configs.values():
        check_folder(config.run.folder, config, lambda text: None)
    left = [name for name, config in configs.items() if not complete(config)]
    if done := len(runs) - len(left):
        print(f"{done} of {len(runs)} runs are done already.", flush=True)
    # The others start, each in a process of its own.
    commands = {
        name: [sys.executable, "-m", "embodyrl.cli", "train", a.preset, *full[name]]
        for name in left
    }
    if a.launcher == "ray":
        from embodyrl.distributed.ray_commands import run_commands

        where = {"address": a.ray_address, "cpus": a.worker_cpus, "gpus": a.worker_gpus}
        failed = run_commands(commands, out, **where)
    else:
        failed = one_by_one(commands)
    if INTERRUPTED in failed.values():
        print("Stopped; the same command goes on from there.")
        return INTERRUPTED
    # The table and the report.
    print(sweep_table(out, [r.name for r in runs], failed))
    folders = [out / r.name for r in runs if (out / r.name / "config.yaml").is_file()]
    if folders:
        print(f"Wrote {build_report(folders, out / 'report.html')}")
    return 1 if failed else 0


def one_by_one(commands: dict[str, list[str]]) -> dict[str, int]:
    """Runs commands one after the other; returns the exit status of those that failed.

    It ends early where a person interrupts.
    """
    failed = {}
    for number, (name, command) in enumerate(commands.items(), start=1):
        print(f"[{number}/{len(commands)}] {name}", flush=True)
        status = _wait_for(command)
        if status:
            failed[name] = status
            print(f"{name} failed with exit status {status}.", flush=True)
        if status == INTERRUPTED:
            break
    return failed


def _wait_for(command: list[str]) -> int:
    """The exit status of a command. Ctrl-C goes to it too, and it saves before it ends."""
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue


def sweep_table(out: Path, names: Sequence[str], failed: dict[str, int]) -> str:
    """A line for each run: its name and its last score; failed ones are marked."""
    from embodyrl.report.read import read_run

    width = max(map(len, names))
    lines = []
    for name in names:
        try:
            run: dict[str, Any] = read_run(out / name)
        except UserError:
            run = {"evals": [], "reports_success": True}
        score = (
            describe_score(run["evals"][-1], run["reports_success"]) if run["evals"] else "no score"
        )
        note = f"   FAILED (exit status {failed[name]})" if name in failed else ""
        lines.append(f"{name:<{width}}  {score}{note}")
    if failed:
        lines.append(
            f"{len(failed)} of {len(names)} runs failed. The same command tries them again."
        )
    return "\n".join(lines)


def describe_score(evaluation: dict[str, Any], reports_success: bool) -> str:
    """The score of an evaluation as ``report.read`` gives it, with its 95% interval."""
    value, low, high = (evaluation[key] for key in ("value", "lo", "hi"))
    if any(x is None for x in (value, low, high)):
        return "no score"
    if reports_success:
        return (
            f"{value:.0%} [{low:.0%}, {high:.0%}] ({evaluation['k']}/{evaluation['n']}), "
            f"evaluation {evaluation['name']}"
        )
    return f"return {value:.3g} [{low:.3g}, {high:.3g}], evaluation {evaluation['name']}"
