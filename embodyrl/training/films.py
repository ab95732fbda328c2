"""The videos of ``embodyrl eval --video``: one file per filmed episode."""

from __future__ import annotations

import re
from pathlib import Path

from embodyrl.errors import UserError
from embodyrl.rollouts.batches import Episode
from embodyrl.rollouts.evaluation import Evaluation
from embodyrl.storage.video import write_video
from embodyrl.types import EnvSpec


def inits_to_film(spec: EnvSpec, inits: list[int], count: int) -> list[int]:
    """The first ``count`` initial states.

    Raises:
        UserError: the env has no camera, or nothing would be filmed.
    """
    if not spec.cameras:
        raise UserError(
            f"--video films what the policy's cameras see, and {spec.name} has none here. Leave "
            "--video out, or choose an env with cameras."
        )
    if count < 1:
        raise UserError(
            "run.videos is 0, so --video would film nothing. Give run.videos=8, for example."
        )
    return inits[:count]


def write_films(result: Evaluation, spec: EnvSpec, folder: Path) -> dict[int, str]:
    """Writes the frames of an evaluation as videos, at the pace of the env.

    Returns:
        Initial state -> path of its video.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for episode in result.episodes:
        if episode.init in result.frames:
            path = folder / film_name(episode, spec.reports_success)
            write_video(result.frames[episode.init], path, spec.control_hz)
            paths[episode.init] = str(path)
    return paths


def film_name(episode: Episode, reports_success: bool) -> str:
    """``0003_pick_success.mp4``: initial state, task and outcome."""
    task = re.sub(r"[^\w]+", "-", episode.task).strip("-")[:60] or "episode"
    score = "success" if episode.success else "failure"
    outcome = score if reports_success else f"return-{episode.reward:.3g}"
    return f"{episode.init:04d}_{task}_{outcome}.mp4"
