"""What a run leaves in its folder besides checkpoints and metrics, and whether it may go on there."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from embodyrl.config import Config, read_preset, to_yaml
from embodyrl.errors import UserError
from embodyrl.evaluate import Evaluation
from embodyrl.report.video import write_video


@dataclass
class Position:
    """How far a run has come: iterations and env steps done, and minutes of training (evaluations not counted)."""

    iteration: int = 0
    env_steps: int = 0
    minutes: float = 0.0


def finished(folder: Path) -> bool:
    """Whether a run has come to its end, last evaluation included."""
    path = folder / "meta.json"
    return path.exists() and json.loads(path.read_text())["finished"] is not None


def run_checkpoints(config: Config) -> Path:
    """The folder of a run's own checkpoints."""
    return Path(config.run.out) / config.run.name / "checkpoints"


def check_folder(folder: Path, config: Config) -> None:
    """Refuses a folder that holds a run with another config; that it was moved is no difference."""
    path = folder / "config.yaml"
    if not path.exists():
        return
    old = read_preset(str(path))
    moved = dataclasses.replace(config.run, out=old.run.out, name=old.run.name)
    before, now = path.read_text().splitlines(), to_yaml(dataclasses.replace(config, run=moved)).splitlines()
    if before != now:
        changed = [line.strip() for line in now if line not in before] or ["fewer keys"]
        raise UserError(
            f"{folder} holds a run with another config (now: {'; '.join(changed[:4])}). Give this run its own "
            f"run.name=..., or delete {folder} to start over."
        )


def save_evaluation(folder: Path, name: str, at: Position, result: Evaluation, fps: float) -> None:
    """Writes ``evals/NAME.json`` and the videos it names, which play at ``fps`` actions per second."""
    rows = []
    for episode in result.episodes:
        row = {**dataclasses.asdict(episode), "return": episode.reward, "video": None}
        row.pop("reward")
        if episode.init in result.frames:
            row["video"] = f"videos/{name}_{episode.init:04d}.mp4"
            write_video(result.frames[episode.init], folder / row["video"], fps)
        rows.append(row)
    path = folder / "evals" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    payload = {"env_steps": at.env_steps, "minutes": at.minutes, "iteration": at.iteration, "episodes": rows}
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(payload))
    os.replace(unfinished, path)


def drop_evaluations(folder: Path, last_iteration: int) -> None:
    """Deletes evaluations of later iterations than the one that a run resumes from; it makes them again."""
    for path in (folder / "evals").glob("*.json"):
        if json.loads(path.read_text())["iteration"] > last_iteration:
            path.unlink()
