"""What a run leaves in its folder."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodyrl.config import Config
from embodyrl.functional.intervals import latest_near_best, standard_error
from embodyrl.policy import num_executed
from embodyrl.rollouts.evaluation import Evaluation
from embodyrl.rollouts.task_sampling import Record
from embodyrl.storage import checkpoint
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.paths import files_of
from embodyrl.storage.run_files import read_evaluation, read_evaluations, read_meta
from embodyrl.storage.video import write_video
from embodyrl.training.evaluate import score_tasks
from embodyrl.types import EnvSpec


@dataclass
class Position:
    """How far a run has come.

    Attributes:
        iteration: how many are done.
        env_steps: actions executed in training.
        minutes: of training, evaluations not counted.
        tasks: success of recent training episodes by task (``task_sampling.Record``).
        starts: the same by initial state, where they are drawn by it (``start_sampling``).
    """

    iteration: int = 0
    env_steps: int = 0
    minutes: float = 0.0
    tasks: Record = field(default_factory=dict)
    starts: Record = field(default_factory=dict)


def finished(folder: Path) -> bool:
    """Whether a run has come to its end, last evaluation included."""
    path = folder / "meta.json"
    return path.exists() and read_meta(path).get("finished") is not None


def complete(config: Config) -> bool:
    """Whether the run that ``config`` describes has nothing left to do; looks at its files alone."""
    run = config.run
    after = run.folder / "evals" / "after.json"
    if not finished(run.folder) or not after.exists():
        return False
    # The last evaluation must be of the newest checkpoint, and of the end that is asked for now.
    last = read_evaluation(after)
    if (run.folder / "checkpoints" / f"step_{last['iteration']:06d}") != checkpoint.latest(
        run.folder / "checkpoints"
    ):
        return False
    return (
        last["iteration"] >= run.iterations
        or 0 < run.minutes <= last.get("minutes", 0.0)
        or stalled(run.folder, run.patience)
    )


def save_evaluation(
    folder: Path, name: str, at: Position, result: Evaluation, spec: EnvSpec, policy: Any
) -> None:
    """Writes ``evals/NAME.json`` and the videos it names, at the pace of the env of ``spec``.

    ``policy`` is the config of the policy that was evaluated.
    """
    rows = []
    for episode in result.episodes:
        row = {**dataclasses.asdict(episode), "return": episode.reward, "video": None}
        row.pop("reward")
        row.pop("weight")  # of training episodes
        row.pop("instruction")  # said with a film
        if episode.init in result.frames:
            row["video"] = f"videos/{name}_{episode.init:04d}.mp4"
            row["instruction"] = result.instructions.get(episode.init, "")
            write_video(result.frames[episode.init], folder / row["video"], spec.control_hz)
        rows.append(row)
    position = {"env_steps": at.env_steps, "minutes": at.minutes, "iteration": at.iteration}
    payload = {
        **position,
        "reports_success": spec.reports_success,
        "execute": num_executed(policy),
        "horizon": policy.horizon,
        "faults": result.faults,
        "tasks": score_tasks(spec, result.episodes),
        "episodes": rows,
    }
    write_json(folder / "evals" / f"{name}.json", payload, indent=None)


def stalled(folder: Path, patience: int) -> bool:
    """Whether so many evaluations in a row have brought no new best; never with a patience of 0.

    A higher success rate is better, and among equal ones the higher mean return, which is all that
    a task without success has. Episodes with a person's actions do not count.
    """
    scores = []
    for page in read_evaluations(folder).values():
        rows = _counted(page)
        n = max(1, len(rows))
        total = sum(row["return"] or 0.0 for row in rows)
        scores.append((sum(row["success"] for row in rows) / n, total / n))
    return bool(scores) and 0 < patience <= len(scores) - 1 - scores.index(max(scores))


def best_look(folder: Path) -> int:
    """The iteration of the evaluation whose policy is kept (``intervals.latest_near_best``).

    Policies are compared by success or, where the env reports none, by return.
    """
    pages = list(read_evaluations(folder).values())
    key = "success" if pages[0].get("reports_success", True) else "return"
    scores = [[float(row[key] or 0.0) for row in _counted(page)] or [0.0] for page in pages]
    means = [sum(own) / len(own) for own in scores]
    return pages[latest_near_best(means, [standard_error(own) for own in scores])]["iteration"]


def _counted(page: dict[str, Any]) -> list[dict[str, Any]]:
    """The episodes of an evaluation that the policy played alone."""
    return [row for row in page["episodes"] if not row.get("person")]


def close(folder: Path, name: str) -> None:
    """An evaluation on the way becomes the last one; the inverse of ``reopen``."""
    os.replace(folder / "evals" / f"{name}.json", folder / "evals" / "after.json")


def reopen(folder: Path) -> None:
    """The last evaluation of a run that goes on becomes one on the way, with its videos."""
    path = folder / "evals" / "after.json"
    if not path.exists():
        return
    payload = read_evaluation(path)
    name = f"iter_{payload['iteration']:06d}"
    for row in payload["episodes"]:
        if row.get("video"):
            old = folder / row["video"]
            row["video"] = row["video"].replace("after", name, 1)
            if old.exists():  # it may have been moved just before a kill
                os.replace(old, folder / row["video"])
    write_json(folder / "evals" / f"{name}.json", payload, indent=None)
    path.unlink()


def drop_evaluations(folder: Path, last_iteration: int) -> None:
    """Deletes evaluations of later iterations than the one that a run resumes from."""
    for path in files_of(folder / "evals", "*.json"):
        if read_evaluation(path)["iteration"] > last_iteration:
            path.unlink()
