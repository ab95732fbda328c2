"""``improve.json``: what each round did, what it cost, and which policy is served."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodyrl.functional.comparison import mcnemar
from embodyrl.functional.intervals import format_rate
from embodyrl.improve.play import Row
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.plain_data import ANYTHING, NUMBER, TEXT, read_json

STRUCTURE = {
    "rounds": {...: {"seconds": {...: NUMBER}, ...: ANYTHING}},
    "best": TEXT,
}
"""Structure of ``improve.json``."""


def helped_figures(rows: Sequence[Row]) -> dict[str, Any]:
    """What the helped episodes of a round came to.

    Args:
        rows: of the episodes that came to an end.

    Returns:
        ``episodes``; ``alone``, those that the policy solved without help; ``solved`` in all;
        ``asked``, before which a person had to make the scene ready because a reset had failed;
        ``interventions``; ``rewinds``; ``person_seconds``; and ``robot_seconds``, by the arm's
        clock.
    """
    return {
        "episodes": len(rows),
        "alone": sum(row["solved"] and not row["help"]["times"] for row in rows),
        "solved": sum(row["solved"] for row in rows),
        "asked": sum(row["asked"] for row in rows),
        "interventions": sum(row["help"]["times"] for row in rows),
        "rewinds": sum(row["help"]["rewinds"] for row in rows),
        "person_seconds": round(sum(row["help"]["seconds"] for row in rows), 2),
        "robot_seconds": round(sum(row["duration"] for row in rows), 2),
    }


def look_figures(before: Sequence[Row], after: Sequence[Row]) -> dict[str, Any]:
    """Two policies at the same initial states, and which is served next.

    The later one is served unless it solved fewer: it has learned from more.

    Args:
        before: of the policy that was served.
        after: of the one that has learned since.
    """
    # In pairs: only states at which both came to an end.
    old = {row["init"]: bool(row["solved"]) for row in before}
    new = {row["init"]: bool(row["solved"]) for row in after}
    both = sorted(old.keys() & new.keys())
    lost = sum(old[init] and not new[init] for init in both)
    won = sum(new[init] and not old[init] for init in both)
    rows = [*before, *after]
    return {
        "episodes": len(both),
        "before": sum(old[init] for init in both),
        "after": sum(new[init] for init in both),
        "lost": lost,
        "won": won,
        "p": round(mcnemar(lost, won), 4),
        "keeps": won >= lost,
        "robot_seconds": round(sum(row["duration"] for row in rows), 2),
    }


class Record:
    """The file ``improve.json`` in a folder, written after every change.

    Args:
        folder: of the rounds.
        policy: that they began with.

    Attributes:
        content: what the file holds.
    """

    def __init__(self, folder: Path, policy: str) -> None:
        self._path = folder / "improve.json"
        self.content: dict[str, Any] = {"rounds": {}, "best": policy}
        if self._path.exists():
            remedy = "Bring back a copy of it, or give another --out."
            self.content = read_json(self._path, STRUCTURE, remedy)

    def round(self, name: str) -> dict[str, Any]:
        """What a round has come to so far."""
        return self.content["rounds"].setdefault(name, {"seconds": {}})

    @contextmanager
    def stage(self, name: str, what: str) -> Iterator[None]:
        """Adds the seconds that a stage of a round takes, also if it is interrupted."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = self.round(name)["seconds"]
            seconds[what] = round(seconds.get(what, 0.0) + time.monotonic() - began, 2)
            self.write()

    def add(self, name: str, **figures: Any) -> None:
        """Notes what a stage of a round came to."""
        self.round(name).update(figures)
        self.write()

    def serve(self, policy: str) -> None:
        """Notes which policy is served from here on."""
        self.content["best"] = policy
        self.write()

    def write(self) -> None:
        """Writes the file."""
        write_json(self._path, self.content)


def rounds_table(content: Mapping[str, Any]) -> list[str]:
    """One line for each round that is over, below a heading."""
    heading = (
        f"{'round':>5}  {'alone, before':<20}  {'alone, after':<20}  {'helped':>6}  {'times':>5}  "
        f"{'rewinds':>7}  {'person s':>8}  {'robot min':>9}  {'cycle min':>9}  "
        f"{'gate':<11}  served"
    )
    lines = [heading]
    for name, found in content["rounds"].items():
        if "look" not in found:
            continue
        # The arm works in both stages; a person is asked for in one.
        helped, look = found["helped"], found["look"]
        newer = look["keeps"] and found["learned"] != found["policy"]
        n = look["episodes"]
        robot = (helped["robot_seconds"] + look["robot_seconds"]) / 60
        lines.append(
            f"{name.removeprefix('round_'):>5}  {format_rate(look['before'], n):<20}  "
            f"{format_rate(look['after'], n):<20}  {helped['episodes']:>6}  "
            f"{helped['interventions']:>5}  {helped['rewinds']:>7}  "
            f"{helped['person_seconds']:>8.0f}  {robot:>9.1f}  "
            f"{sum(found['seconds'].values()) / 60:>9.1f}  "
            f"{found.get('gate', {}).get('says', '-'):<11}  "
            f"{'the new one' if newer else 'as before'}"
        )
    return lines
