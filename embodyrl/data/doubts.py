"""Episodes that a person should look at: their numbers are sound, and may not show the task.

What belongs to one episode is held against the whole data set, so no unit of a state needs to be
known. A doubt is no fault: nothing is left out because of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

STALL = 2.0
"""s without motion that are worth a look, in the time of the data set."""
STILL = 0.02
"""Share of a number's range in the data set within which it stands still."""
JUMP = 0.25
"""Share of a number's range in the data set that it does not pass from one frame to the next."""
RARE = 4.0
"""How much larger a jump is than nearly all changes of that number in its episode."""
SHORT = 0.25
"""Share of the median length below which an episode is short."""
FEWEST = 3
"""Frames below which an episode is short, whatever the others are."""


@dataclass(frozen=True)
class Doubt:
    """Why a person should look at an episode.

    Attributes:
        episode: its index in the data set.
        frame: its frame.
        seconds: of that frame, in the time of the data set.
        kind: ``"stall"``, ``"jump"``, ``"short"``, ``"dropped"``, ``"repeated"``, ``"stopped"`` or
            ``"label"``.
        why: a sentence.
    """

    episode: int
    frame: int
    seconds: float
    kind: str
    why: str


def motion_doubts(states: Mapping[int, NDArray[np.floating]], fps: float) -> list[Doubt]:
    """What the states of a data set say about its episodes.

    Args:
        states: index of an episode -> its states (T, P).
        fps: frames per second.
    """
    if not states:
        return []
    # The range of each number, and the usual length.
    rows = np.concatenate([np.asarray(s, np.float64) for s in states.values()])
    spread = np.ptp(rows, axis=0)
    moving = spread > 0.0
    median = float(np.median([len(s) for s in states.values()]))
    found = []
    # Every number as a share of its range in the data set; those that never change are left out.
    shares = {n: np.asarray(s, np.float64)[:, moving] / spread[moving] for n, s in states.items()}
    far = {number: _far(here) for number, here in shares.items()}
    # What happens in most episodes is how the robot works, such as a gripper that snaps shut.
    usual = sum(each.any(axis=0) for each in far.values()) > max(1, len(states) // 2)
    for number, here in shares.items():
        if len(here) < max(FEWEST, SHORT * median):
            why = f"it has {len(here)} frames; half of the episodes have {median:g} or more"
            found.append(Doubt(number, 0, 0.0, "short", why))
        found += _stalls(number, here, fps)
        jumps = far[number] & ~usual
        for frame in np.flatnonzero(jumps.any(axis=1)).tolist():
            change = np.abs(here[frame + 1] - here[frame])[jumps[frame]]
            why = f"the state jumps by {change.max():.0%} of its range from one frame to the next"
            found.append(Doubt(number, frame + 1, (frame + 1) / fps, "jump", why))
    return sorted(found, key=lambda doubt: (doubt.episode, doubt.frame))


def _stalls(number: int, shares: NDArray[np.float64], fps: float) -> list[Doubt]:
    """Stretches of at least ``STALL`` s in which nothing moves."""
    found = []
    least = max(2, round(STALL * fps))
    begin = 0
    while begin + least <= len(shares):
        low = shares[begin].copy()
        high = low.copy()
        end = begin
        # As far as every number stays within its small range.
        while end < len(shares):
            np.minimum(low, shares[end], out=low)
            np.maximum(high, shares[end], out=high)
            if shares.shape[1] and float((high - low).max()) > STILL:
                break
            end += 1
        # Long enough: go on behind it. Otherwise look from the next frame on.
        if end - begin >= least:
            at = begin / fps
            why = f"nothing moves for {(end - begin) / fps:.1f} s"
            found.append(Doubt(number, begin, at, "stall", why))
            begin = end
        else:
            begin += 1
    return found


def _far(shares: NDArray[np.float64]) -> NDArray[np.bool_]:
    """(T - 1, P) changes between two frames that are far larger than the others of the episode."""
    change = np.abs(np.diff(shares, axis=0))
    if len(shares) < 2 + FEWEST:
        return np.zeros(change.shape, bool)
    # The 98th percentile: a gripper that takes two frames to close is usual, one jump is not.
    usual = np.quantile(change, 0.98, axis=0, method="lower")
    return (change > JUMP) & (change > RARE * usual)


def print_doubts(doubts: Sequence[Mapping[str, Any]]) -> None:
    """Prints doubts, each as plain data, for a person."""
    for doubt in doubts:
        print(f"  look at episode {doubt['episode']}, {doubt['seconds']:.1f} s: {doubt['why']}")
