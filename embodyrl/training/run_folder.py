"""What a run leaves in its folder, and whether another may go on there."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.config import Config, to_dict
from embodyrl.errors import UserError
from embodyrl.rollouts.evaluation import Evaluation
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.plain_data import ANYTHING, check, read_yaml
from embodyrl.storage.run_files import read_evaluation, read_evaluations, read_meta
from embodyrl.storage.video import write_video
from embodyrl.types import EnvSpec


@dataclass
class Position:
    """How far a run has come. Minutes are those of training, evaluations not counted."""

    iteration: int = 0
    env_steps: int = 0
    minutes: float = 0.0


def finished(folder: Path) -> bool:
    """Whether a run has come to its end, last evaluation included."""
    path = folder / "meta.json"
    return path.exists() and read_meta(path).get("finished") is not None


# What an existing run may change; the first two may only rise.
CHANGEABLE = (
    "iterations", "minutes", "eval_every", "patience", "checkpoint_every", "keep_checkpoints",
    "loggers", "compile",
)  # fmt: skip


def check_folder(folder: Path, config: Config, say: Callable[[str], None] = print) -> None:
    """Refuses a folder that holds a run with another config.

    Its place, and what is ``CHANGEABLE``, may differ.

    Args:
        folder: of the run; it need not exist.
        config: that the run is to go on with.
        say: is told, in a sentence, what a longer run means.

    Raises:
        UserError: naming what differs.
    """
    path = folder / "config.yaml"
    if not path.exists():
        return
    plain = Config(**{f.name: type(getattr(config, f.name))() for f in dataclasses.fields(config)})
    defaults, new = (_flat(json.loads(json.dumps(to_dict(c)))) for c in (plain, config))
    saved = read_yaml(path)
    check(saved, {...: {...: ANYTHING}}, path, f"Delete {folder} to start over, or bring it back.")
    old = defaults | _flat(saved)  # what an older version did not write was as it is by default
    before = old.get("run.iterations")
    now = new["run.iterations"]
    free = {f"run.{key}" for key in CHANGEABLE} - set(_lowered(old, new)) | {"run.out", "run.name"}
    differs = [
        key
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in free
    ]
    if differs:
        listed = "; ".join(
            f"{key} was {old.get(key, 'not there')}, now {new.get(key, 'gone')}"
            for key in differs[:4]
        )
        raise UserError(
            f"{folder} holds a run with another config ({listed}). Give this run its own "
            f"run.name=..., or delete {folder} to start over. An existing run can only be made "
            "longer (run.iterations, run.minutes), and take other values of "
            f"{', '.join(CHANGEABLE[2:])}."
        )
    if before != now:
        say(
            f"{folder} goes on to {now} iterations instead of {before}. What follows the share of "
            "the run that is done, such as a falling learning rate, now follows the share of "
            f"{now}; so this is not quite a run that was to have {now} from its start."
        )


def _flat(tree: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """``section.key`` -> value."""
    return {
        f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()
    }


def _lowered(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """The limits that would be tightened; 0 minutes are no limit."""
    if new["run.iterations"] < old.get("run.iterations", 0):
        yield "run.iterations"
    if (new["run.minutes"] or math.inf) < (old.get("run.minutes") or math.inf):
        yield "run.minutes"


def save_evaluation(
    folder: Path, name: str, at: Position, result: Evaluation, spec: EnvSpec
) -> None:
    """Writes ``evals/NAME.json`` and the videos it names, at the pace of the env of ``spec``."""
    rows = []
    for episode in result.episodes:
        row = {**dataclasses.asdict(episode), "return": episode.reward, "video": None}
        row.pop("reward")
        if episode.init in result.frames:
            row["video"] = f"videos/{name}_{episode.init:04d}.mp4"
            row["instruction"] = result.instructions.get(episode.init, "")
            write_video(result.frames[episode.init], folder / row["video"], spec.control_hz)
        rows.append(row)
    position = {"env_steps": at.env_steps, "minutes": at.minutes, "iteration": at.iteration}
    payload = {**position, "reports_success": spec.reports_success, "episodes": rows}
    write_json(folder / "evals" / f"{name}.json", payload, indent=None)


def stalled(folder: Path, patience: int) -> bool:
    """Whether so many evaluations in a row have brought no new best; never with a patience of 0.

    More successes are better, and among as many the higher mean return, which is all that a task
    without success has.
    """
    scores = []
    for page in read_evaluations(folder).values():
        rows = page["episodes"]
        total = sum(row["return"] or 0.0 for row in rows)
        scores.append((sum(row["success"] for row in rows), total / max(1, len(rows))))
    return bool(scores) and 0 < patience <= len(scores) - 1 - scores.index(max(scores))


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
    for path in (folder / "evals").glob("*.json"):
        if read_evaluation(path)["iteration"] > last_iteration:
            path.unlink()
