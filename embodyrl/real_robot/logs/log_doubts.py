"""What the log of one episode says about its quality, and its data set could not."""

from __future__ import annotations

from typing import Any

import numpy as np

from embodyrl.data.doubts import Doubt
from embodyrl.real_robot.control.episode import EndedBy
from embodyrl.real_robot.control.joint_space import CONTROL_MODE
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.logs.mcap_log import CAMERA

LATE = 1.6
"""Time between two actions, in those of the episode's median, from which one is missing."""
FROZEN = 3
"""Pictures that must be the same in a row before a camera is doubted."""
MOVED = 0.02
"""m that the hand moves meanwhile, or a motor, as a share of half its range."""


def log_doubts(episode: int, messages: dict[str, list[dict[str, Any]]], fps: float) -> list[Doubt]:
    """What is doubtful in an episode.

    Args:
        episode: its index in the data set.
        messages: of ``mcap_log.read``.
        fps: frames per second of the data set.
    """
    seen = [m for m in messages["/action"] if "proprio" in m]
    return [
        *_dropped(episode, messages, fps),
        *_repeated(episode, messages, seen, fps),
        *_stopped(episode, messages, seen, fps),
        *_unlabelled(episode, messages, seen, fps),
    ]


def _dropped(episode: int, messages: dict[str, Any], fps: float) -> list[Doubt]:
    """Frames that are missing: actions that came late, or of which no picture was taken."""
    actions = messages["/action"]
    stamps = np.array([m["stamp"] for m in actions])
    changes = [m["stamp"] for m in messages["/event"] if m["kind"] == "mode"]
    usual = float(np.median(np.diff(stamps))) if len(stamps) > 2 else 0.0
    found = []
    frame = 0
    # Frames are counted as the data set has them: without those that were not seen.
    for before, (k, action) in zip([None, *actions], enumerate(actions), strict=False):
        gap = stamps[k] - stamps[k - 1] if k else 0.0
        # A pause is no gap: the mode changed in it.
        paused = before is not None and any(
            before["stamp"] <= s <= action["stamp"] for s in changes
        )
        if "proprio" not in action:
            why = "a frame is missing: no fresh picture came"
        elif usual and gap > LATE * usual and not paused:
            why = f"a frame is missing: {gap:.2f} s between two actions, not {usual:.2f}"
        else:
            why = ""
        if why:
            found.append(Doubt(episode, frame, frame / fps, "dropped", why))
        frame += "proprio" in action
    return found


def _repeated(
    episode: int, messages: dict[str, Any], seen: list[dict[str, Any]], fps: float
) -> list[Doubt]:
    """Cameras that show the same picture while the hand moves."""
    found = []
    # Of an arm that is told positions of motors: their places, as shares of half a range.
    motors = _settings(messages).get("control_mode") == CONTROL_MODE
    hand = np.array([m["proprio"] if motors else m["proprio"][:3] for m in seen])
    for topic in (t for t in messages if t.startswith(CAMERA)):
        pictures = [m["data"] for m in messages[topic]]
        begin = 0
        for k in range(1, len(pictures) + 1):
            # A run of equal pictures ends with another one, or with the episode.
            if k < len(pictures) and pictures[k] == pictures[begin]:
                continue
            way = float(np.ptp(hand[begin:k], axis=0).max()) if k <= len(hand) else 0.0
            if k - begin >= FROZEN and way > MOVED:
                name = topic.removeprefix(CAMERA)
                moved = f"a motor moves by {way / 2:.0%} of its range"
                moved = moved if motors else f"the hand moves by {way * 100:.0f} cm"
                why = f"camera {name} shows the same picture {k - begin} times, while {moved}"
                found.append(Doubt(episode, begin, begin / fps, "repeated", why))
            begin = k
    return found


def _settings(messages: dict[str, Any]) -> dict[str, Any]:
    """What the log says about the policy, or the data."""
    runs = messages.get("/run", [])
    return runs[0]["settings"].get("policy", {}) if runs else {}


def _stopped(
    episode: int, messages: dict[str, Any], seen: list[dict[str, Any]], fps: float
) -> list[Doubt]:
    """Faults, stops and lost links between the first and the last frame."""
    found = []
    stamps = [m["stamp"] for m in seen]
    for event in messages["/event"]:
        change = event["text"].partition(":")[0]
        bad = change.endswith((f"-> {Mode.FAULT}", f"-> {Mode.ESTOP}")) or "stale" in event["text"]
        if event["kind"] == "mode" and bad and stamps and stamps[0] < event["stamp"]:
            frame = int(np.searchsorted(stamps, event["stamp"])) - 1
            found.append(
                Doubt(episode, frame, frame / fps, "stopped", f"the arm stopped: {event['text']}")
            )
    return found


def _unlabelled(
    episode: int, messages: dict[str, Any], seen: list[dict[str, Any]], fps: float
) -> list[Doubt]:
    """An episode of which nobody has said how it went."""
    ending = messages["/episode"][-1] if messages["/episode"] else {"reason": "its log has no end"}
    reason = ending["reason"]
    # A policy that used up its time has failed, and needs nobody who says so.
    if ending.get("ended_by") == EndedBy.POLICY:
        return []
    if reason not in ("the time is up", "its log has no end", ""):
        return []
    last = len(seen) - 1
    why = f"its label is missing: {reason or 'nobody gave one'}, so it counts as a failure"
    return [Doubt(episode, last, last / fps, "label", why)]
