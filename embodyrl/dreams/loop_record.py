"""``loop.json``: what a loop has cost so far, and what the real env said about its policies."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.data.lerobot_read import open_dataset
from embodyrl.functional.intervals import wilson
from embodyrl.rollouts.evaluation import Evaluation
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.plain_data import ANYTHING, COUNT, NUMBER, TEXT, read_json
from embodyrl.storage.run_files import read_evaluations

SCORE = {"checkpoint": TEXT, "solved": COUNT, "episodes": COUNT}
LOOP = {
    "minutes": {...: NUMBER},
    "rounds?": {...: [SCORE | {"steps": COUNT}]},
    "before?": SCORE | {"interval": [NUMBER]},
    "after?": SCORE | {"interval": [NUMBER]},
    "best?": TEXT,
    "real_steps?": ANYTHING,
    "eval_steps?": ANYTHING,
}
"""Structure of ``loop.json``."""


@dataclass(frozen=True)
class RealEvaluation:
    """One evaluation in the real env during a loop.

    Attributes:
        checkpoint: of the policy.
        solved: episodes.
        episodes: in all.
        steps: that they took in the real env.
    """

    checkpoint: str
    solved: int
    episodes: int
    steps: int


def real_evaluations(run: Path, policy: str) -> list[RealEvaluation]:
    """The evaluations of a run in order; that at iteration 0 is of the ``policy`` it began with."""
    evaluations = []
    for found in read_evaluations(run).values():
        checkpoint = policy
        if found["iteration"]:
            checkpoint = str(run / "checkpoints" / f"step_{found['iteration']:06d}")
        episodes = found["episodes"]
        solved = sum(e["success"] for e in episodes)
        steps = sum(e["length"] for e in episodes)
        evaluations.append(RealEvaluation(checkpoint, solved, len(episodes), steps))
    return evaluations


def best_evaluation(evaluations: Sequence[RealEvaluation], before: int) -> RealEvaluation | None:
    """The evaluation whose policy is kept; None if none solved more than ``before``.

    It is the latest one within one standard error of the best (Breiman et al. 1984, section
    3.4.3). So few episodes do not tell these apart, and the best of many evaluations owes more to
    luck than the latest one.
    """
    better = [e for e in evaluations if e.solved > before]
    if not better:
        return None
    best = max(better, key=lambda e: e.solved)
    error = math.sqrt(best.solved * (1 - best.solved / best.episodes))
    return [e for e in better if e.solved >= best.solved - error][-1]


class LoopRecord:
    """The file ``loop.json`` in a loop's folder, written after every change.

    Attributes:
        content: what the file holds.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "loop.json"
        self.content: dict[str, Any] = {"minutes": {}}
        if self._path.exists():
            self.content = read_json(
                self._path, LOOP, "Bring back a copy of it, or give another out=FOLDER."
            )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the minutes that a stage takes, also if it is interrupted."""
        began = time.monotonic()
        try:
            yield
        finally:
            minutes = self.content["minutes"]
            minutes[name] = minutes.get(name, 0.0) + (time.monotonic() - began) / 60
            self._write()

    def add_round(self, name: str, evaluations: list[RealEvaluation], data: list[str]) -> None:
        """Notes a round's evaluations, and the real steps up to now.

        Args:
            name: of the round.
            evaluations: in the real env.
            data: all data sets so far.
        """
        rounds = self.content.setdefault("rounds", {})
        rounds[name] = [dataclasses.asdict(e) for e in evaluations]
        frames = [len(open_dataset(path).columns["episode_index"]) for path in data]
        self.content["real_steps"] = sum(frames)
        self.content["eval_steps"] = sum(e["steps"] for some in rounds.values() for e in some)
        self._write()

    def has_score(self, when: str, checkpoint: str) -> bool:
        """Whether the policy ``when`` (``before`` or ``after``) has been scored already."""
        return self.content.get(when, {}).get("checkpoint") == checkpoint

    def add_score(self, when: str, checkpoint: str, result: Evaluation) -> None:
        """Notes how a policy does on held-out initial states."""
        solved = result.successes
        count = len(result.episodes)
        self.content[when] = {
            "checkpoint": checkpoint,
            "solved": solved,
            "episodes": count,
            "interval": wilson(solved, count),
        }
        self._write()

    def finish(self, best: str) -> dict[str, Any]:
        """Notes the best checkpoint and returns the content."""
        self.content["best"] = best
        self._write()
        return self.content

    def _write(self) -> None:
        write_json(self._path, self.content)
