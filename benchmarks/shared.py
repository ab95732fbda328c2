"""What the benchmarks of training have in common."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from embodyrl.config import Config
from embodyrl.storage.provenance import git_commit, hardware, versions
from embodyrl.training.run_folder import finished
from embodyrl.training.runner import train

HERE = Path(__file__).resolve().parent


def complete(config: Config) -> None:
    """Trains, or goes on; an interruption ends the whole benchmark, not this run alone."""
    if not finished(train(config)):
        raise SystemExit("Interrupted; the same command goes on.")


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """What a run's evaluations found, in order: successes are a count, success is their share, return is the mean."""
    rows = []
    for path in (folder / "evals").glob("*.json"):
        data = json.loads(path.read_text())
        rows.append(
            {key: data[key] for key in ("iteration", "env_steps", "minutes")}
            | {
                "episodes": len(data["episodes"]),
                "successes": sum(e["success"] for e in data["episodes"]),
                "success": statistics.mean(e["success"] for e in data["episodes"]),
                "return": statistics.mean(e["return"] for e in data["episodes"]),
            }
        )
    return sorted(rows, key=lambda row: row["iteration"])


def scored(run: Path, path: Path, *given: str) -> list[float]:
    """Successes, episodes and interval of ``embodyrl eval``; from ``path``, where it was scored before."""
    if not path.exists():
        command = [sys.executable, "-m", "embodyrl.cli", "eval", str(run), *given, "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        path.write_text(done.stdout)
    found = json.loads(path.read_text())
    return [found["successes"], found["episodes"], *found["interval"]]


def gathered(
    name: str, settings: dict[str, Any], folders: dict[str, Path]
) -> dict[str, dict[str, Any]]:
    """Evaluations and commit of every run that is finished, by its key, after those that the JSON has from elsewhere.

    So seeds may be run on other machines or days; the JSON's runs are left out if their settings
    were others.
    """
    path = HERE / f"{name}.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    runs = dict(earlier.get("runs", {})) if earlier.get("settings") == settings else {}
    for key, folder in folders.items():
        if finished(folder):
            commit = json.loads((folder / "meta.json").read_text())["commit"]
            runs[key] = {"commit": commit, "evaluations": evaluations(folder)}
    return runs


def write(name: str, result: dict[str, Any], where: Path = HERE) -> None:
    """``NAME.json`` in ``benchmarks``, or elsewhere, with what it was measured on."""
    about = {"commit": git_commit(), "versions": versions(), "hardware": hardware()}
    (where / f"{name}.json").write_text(json.dumps(result | about, indent=1))
