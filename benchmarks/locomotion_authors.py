"""The authors' own SAC-Flow (JAX, github.com/Elessar123/SAC-FLOW) on the envs of locomotion.py, at the same width.

    python benchmarks/locomotion_authors.py --repo SAC-FLOW --python VENV/bin/python      # 2 envs, one seed

``VENV`` needs jax, flax 0.10, optax, gymnasium[mujoco] 0.29, numpy below 2, torch, tyro,
tensorboard. In their Flow-G file only the widths change (1,024 and 512 would take days on a CPU).
Its other settings are theirs: CrossQ with batch renormalisation, one gradient step per env step
(ours: one per two), the policy every third. They log the returns of training alone, so this
compares those, of the episodes that ended in the last tenth of the steps, with our own of
``locomotion.py``'s runs. The result is ``benchmarks/locomotion_authors.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import time
from pathlib import Path

from locomotion import ENVS, OUT, VARIANTS
from shared import HERE, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

THEIRS = "from_scratch_code/SAC_flow_gru_jax.py"
LAST = 0.9


def narrowed(source: str, width: int) -> str:
    """Their file with hidden layers of ``width``."""
    wide = r"nn\.Dense\((1024|512)\)|hidden_dim=512"
    if len(re.findall(wide, source)) != 5:
        raise SystemExit(
            f"{THEIRS} has changed since this was written: its hidden layers are elsewhere."
        )
    return re.sub(
        wide, lambda m: f"hidden_dim={width}" if "hidden" in m[0] else f"nn.Dense({width})", source
    )


def run(repo: Path, python: str, env: str, seed: int, steps: int, width: int, batch: int) -> float:
    """One run of theirs; its minutes."""
    folder = (OUT / f"authors_{env}_{seed}").resolve()
    shutil.rmtree(folder, ignore_errors=True)  # theirs cannot go on where it was interrupted
    folder.mkdir(parents=True)
    (folder / "run.py").write_text(narrowed((repo / THEIRS).read_text(), width))
    sizes = [
        "--total-timesteps",
        str(steps),
        "--batch-size",
        str(batch),
        "--learning-starts",
        "5000",
    ]
    command = [python, "run.py", "--env-id", env.replace("-v5", "-v4"), "--seed", str(seed), *sizes]
    threads = {
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "JAX_PLATFORMS": "cpu",
    }
    began = time.monotonic()
    environment = {**os.environ, **threads, "PYTHONPATH": str(repo.resolve())}
    subprocess.run(
        [*command, "--no-track", "--no-save-model"], cwd=folder, env=environment, check=True
    )
    return (time.monotonic() - began) / 60


def theirs(env: str, seed: int, steps: int) -> float:
    """Mean return of the episodes that ended in the last tenth of ``steps``."""
    (events,) = (OUT / f"authors_{env}_{seed}").glob("runs/*")
    log = EventAccumulator(str(events)).Reload()
    return statistics.mean(
        e.value for e in log.Scalars("charts/episodic_return") if e.step > LAST * steps
    )


def ours(folder: Path, steps: int) -> float:
    """The same of a run of ours."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    late = [
        r for r in rows if LAST * steps < r.get("env_steps", 0) <= steps and r.get("train_episodes")
    ]
    return sum(r["train_return"] * r["train_episodes"] for r in late) / sum(
        r["train_episodes"] for r in late
    )


def main() -> None:
    """Runs theirs, then compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repo", type=Path, required=True, help="a checkout of theirs")
    parser.add_argument(
        "--python", required=True, help="an interpreter that has what theirs imports"
    )
    parser.add_argument("--envs", nargs="+", default=list(ENVS), choices=ENVS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256)
    a = parser.parse_args()
    path = HERE / "locomotion_authors.json"
    result = json.loads(path.read_text())["train_return"] if path.exists() else {}
    for env in a.envs:
        minutes = run(a.repo, a.python, env, a.seed, a.steps, a.width, a.batch)
        runs = {v: OUT / f"{v}_{env}_{a.seed}" for v in VARIANTS}
        result[env] = {
            "authors": theirs(env, a.seed, a.steps),
            "authors_minutes": minutes,
            **{
                variant: ours(folder, a.steps)
                for variant, folder in runs.items()
                if folder.exists()
            },
        }
        settings = {"steps": a.steps, "width": a.width, "batch": a.batch, "seed": a.seed}
        write("locomotion_authors", {"settings": settings, "train_return": result})
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
