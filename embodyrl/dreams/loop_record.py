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
from embodyrl.functional.intervals import format_rate, latest_near_best, wilson
from embodyrl.rollouts.evaluation import Evaluation
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.loggers import read_metrics
from embodyrl.storage.plain_data import ANYTHING, COUNT, FLAG, NUMBER, TEXT, read_json
from embodyrl.storage.run_files import read_evaluations

SCORE = {"checkpoint": TEXT, "solved": COUNT, "episodes": COUNT}
LOOP = {
    "minutes": {...: NUMBER},
    "rounds?": {...: [SCORE | {"steps": COUNT}]},
    "gates?": {...: {"passes": FLAG, "verdict": TEXT, "real_steps": COUNT, ...: ANYTHING}},
    "chosen?": {...: SCORE | {"interval": [NUMBER], "model": TEXT}},
    "dreamt?": {...: {"success": NUMBER, "episodes": COUNT}},
    "before?": SCORE | {"interval": [NUMBER]},
    "after?": SCORE | {"interval": [NUMBER]},
    "after_choice?": SCORE | {"interval": [NUMBER]},
    "best?": TEXT,
    "real_steps?": ANYTHING,
    "eval_steps?": ANYTHING,
    "gate_steps?": ANYTHING,
}
"""Structure of ``loop.json``."""


RECENT = 5
"""Updates whose dreams count as a round's newest ones."""


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

    It is the latest one within one standard error of the best (``intervals.latest_near_best``).
    """
    better = [e for e in evaluations if e.solved > before]
    if not better:
        return None
    errors = [math.sqrt(e.solved * (1 - e.solved / e.episodes)) for e in better]
    return better[latest_near_best([e.solved for e in better], errors)]


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

    def gate(self, name: str) -> dict[str, Any] | None:
        """What the gate of a round found, if it has been measured."""
        return self.content.get("gates", {}).get(name)

    def add_gate(self, name: str, found: dict[str, Any]) -> None:
        """Notes what the gate of a round found (``dreams.gate``)."""
        gates = self.content.setdefault("gates", {})
        gates[name] = found
        self.content["gate_steps"] = sum(gate["real_steps"] for gate in gates.values())
        self._write()

    def add_chosen(self, name: str, policy: str, model: str, counts: tuple[int, int]) -> None:
        """Notes a round's real episodes in which a dream chose.

        Args:
            name: of the round.
            policy: that proposed.
            model: that chose; empty where the policy acted alone.
            counts: solved and failed episodes.
        """
        solved, failed = counts
        self.content.setdefault("chosen", {})[name] = {
            "checkpoint": policy,
            "model": model,
            "solved": solved,
            "episodes": solved + failed,
            "interval": wilson(solved, solved + failed),
        }
        self._write()

    def add_dreamt(self, name: str, run: Path) -> None:
        """Notes what share of a round's newest dreams was solved, in the dream.

        Args:
            name: of the round.
            run: the run that was trained in dreams; of its metrics the last ``RECENT`` rows count.
        """
        # The newest dreams alone: the policy has changed since the first ones.
        rows = [
            row
            for row in read_metrics(run / "metrics.jsonl")
            if row.get("train_success") is not None
        ]
        rows = rows[-RECENT:]
        episodes = sum(int(row["train_episodes"]) for row in rows)
        if not episodes:
            return
        solved = sum(row["train_success"] * row["train_episodes"] for row in rows)
        self.content.setdefault("dreamt", {})[name] = {
            "success": solved / episodes,
            "episodes": episodes,
        }
        self._write()

    def has_score(self, when: str, checkpoint: str) -> bool:
        """Whether the policy ``when`` has been scored already."""
        return self.content.get(when, {}).get("checkpoint") == checkpoint

    def add_score(self, when: str, checkpoint: str, result: Evaluation) -> None:
        """Notes how a policy does on held-out initial states.

        Args:
            when: ``before`` or ``after`` the loop; ``after_choice`` with the last model's choice.
            checkpoint: of the policy.
            result: of its evaluation.
        """
        solved = result.successes
        count = len(result.episodes)
        self.content[when] = {
            "checkpoint": checkpoint,
            "solved": solved,
            "episodes": count,
            "interval": wilson(solved, count),
        }
        self._write()

    def round_text(self, name: str) -> str:
        """What the real env, and the dream, said of a round."""
        looks = self.content["rounds"][name]
        rates = ", ".join(format_rate(e["solved"], e["episodes"]) for e in looks)
        text = f"Round {name.removeprefix('round_')}: the policy really {rates or 'not asked'}"
        if chosen := self.content.get("chosen", {}).get(name):
            rate = format_rate(chosen["solved"], chosen["episodes"])
            text += (
                f"; the dream's choice really {rate}" if chosen["model"] else f"; recorded {rate}"
            )
        if dreamt := self.content.get("dreamt", {}).get(name):
            text += f"; its newest dreams {dreamt['success']:.0%}"
        return text

    def finish(self, best: str) -> dict[str, Any]:
        """Notes the best checkpoint and returns the content."""
        self.content["best"] = best
        self._write()
        return self.content

    def _write(self) -> None:
        write_json(self._path, self.content)
