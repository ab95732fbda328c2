"""What trajectories that a policy guides add to offline RL (Policy-Guided Diffusion, arXiv:2404.06356).

    python benchmarks/trajectories.py --seeds 0 1 2

The quickstart's pick task, from states. Each seed has recorded episodes of a noisy expert, failures
included. FQL learns from them offline; its policy guides a trajectory model of the same episodes; and
FQL learns again from nothing, as many steps, from recorded episodes and synthetic ones:

    recorded    the first policy itself
    guided      with synthetic trajectories that the first policy guides
    like them   with synthetic trajectories without guidance

All are scored on 256 held-out initial states. Everything is kept in ``runs/bench/trajectories/SEED``,
so an interrupted benchmark goes on. The result is ``benchmarks/trajectories.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from shared import HERE, write

from embodyrl.functional.intervals import bootstrap_iqm

OUT = Path("runs/bench/trajectories")
ENV = {"name": "mujoco", "task": "pick", "max_blocks": 2, "cameras": [], "renderer": "none"}
PRESET = {
    "env": {**ENV, "num_envs": 16},
    "policy": {"name": "flow_mlp", "horizon": 5, "num_denoise_steps": 4, "velocity": "plain",
               "squash": False, "one_step_width": 256},
    "algorithm": {"name": "fql", "offline_steps": 4000, "steps_per_iteration": 200, "alpha": 1.0,
                  "normalize_q": True},
    "data": {"keep": "all"},
    "run": {"iterations": 20, "eval_every": 0, "eval_episodes": 256, "videos": 0, "threads": 1,
            "eval_before": False},
}  # fmt: skip
SIZE = ("--width", "96", "--layers", "2")
"""Of the trajectory model."""
ARMS = {"recorded": None, "guided": 1.0, "like them": 0.0}
"""Guidance of what is added; None adds nothing."""


def embodyrl(*words: str) -> str:
    """The output of a command; its failure ends the benchmark."""
    command = [sys.executable, "-m", "embodyrl.cli", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def learn(folder: Path, name: str, more: list[Path]) -> Path:
    """FQL on the recorded episodes and ``more``; the run's folder."""
    run = folder / name
    if not (run / "done").exists():
        given = [f"data.more=[{','.join(map(str, more))}]"] if more else []
        where = (f"run.out={folder}", f"run.name={name}", f"run.seed={folder.name}")
        embodyrl("train", str(folder / "preset.yaml"), *where, *given)
        (run / "done").touch()
    return run


def score(run: Path) -> dict[str, int]:
    """Solved and played episodes of a run's last policy, on held-out states."""
    found = json.loads(embodyrl("eval", str(run), "--episodes", "256", "--json"))
    return {"solved": found["successes"], "episodes": found["episodes"]}


def search(seed: int, recorded: int, drawn: int, steps: int) -> dict[str, Any]:
    """One seed, or what is left of it."""
    folder = OUT / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "recorded"
    began = time.monotonic()
    if not data.exists():
        env = ("mujoco", "env.task=pick", "env.max_blocks=2", "env.cameras=[]", "env.renderer=none")
        how = ("--noise", "0.7", "--keep-failures", "--episodes", str(recorded))
        embodyrl("collect", *env, "env.num_envs=16", *how, "--seed", str(seed), "--out", str(data))
    preset = PRESET | {"data": {**PRESET["data"], "path": str(data)}}
    (folder / "preset.yaml").write_text("# FQL, offline.\n" + yaml.safe_dump(preset))
    # The policy that guides, and the model that it guides.
    first = learn(folder, "first", [])
    model = folder / "pieces"
    words = ("world", "trajectories")
    if not model.exists():
        embodyrl(*words, "train", str(data), *SIZE, "--steps", str(steps), "--out", str(model))
    arms: dict[str, Any] = {}
    for name, guidance in ARMS.items():
        arms[name] = {}
        more: list[Path] = []
        if guidance is not None:
            more = [folder / f"drawn_{guidance:g}"]
            guide = ("--policy", str(first)) if guidance else ()
            if not more[0].exists():
                how = ("--guidance", str(guidance), "--episodes", str(drawn), "--seed", str(seed))
                embodyrl(*words, "write", str(model), *guide, *how, "--out", str(more[0]))
            note = json.loads((more[0] / "meta" / "embodyrl.json").read_text())["synthetic"]
            arms[name] = {k: note[k] for k in ("rows", "distance") if k in note}
        run = learn(folder, name.replace(" ", "_"), more) if more else first
        arms[name] |= score(run)
        print(seed, name, arms[name], flush=True)
    return {"seed": seed, "minutes": (time.monotonic() - began) / 60, "arms": arms}


def main() -> None:
    """Runs all seeds, and writes the JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recorded", type=int, default=60, help="episodes")
    parser.add_argument("--drawn", type=int, default=250, help="synthetic trajectories")
    parser.add_argument("--steps", type=int, default=1500, help="of the trajectory model")
    a = parser.parse_args()
    path = HERE / "trajectories.json"
    known = (
        {row["seed"]: row for row in json.loads(path.read_text())["seeds"]} if path.exists() else {}
    )
    for seed in a.seeds:
        known[seed] = search(seed, a.recorded, a.drawn, a.steps)
        rows = [known[k] for k in sorted(known)]
        rates = {
            name: [row["arms"][name]["solved"] / row["arms"][name]["episodes"] for row in rows]
            for name in ARMS
        }
        iqm = {name: bootstrap_iqm(values) for name, values in rates.items()}
        write("trajectories", {"seeds": rows, "rates": rates, "iqm": iqm})
        print(seed, {name: f"{values[-1]:.0%}" for name, values in rates.items()}, flush=True)


if __name__ == "__main__":
    main()
