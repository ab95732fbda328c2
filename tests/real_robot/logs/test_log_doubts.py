"""Episodes with one defect each, through logs and data set, are named with index, time and reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from embodyrl.cli.main import main
from embodyrl.data.verify import verify_dataset
from embodyrl.real_robot.logs.mcap_log import RunLog

PERIOD = 0.16
FRAMES = 120
FACTS = {
    "env": "mujoco/reach", "action_dim": 4, "proprio_dim": 7, "control_mode": "ee_delta_pos",
    "control_hz": 25.0, "max_episode_steps": 40, "cameras": {"front": [16, 16]},
}  # fmt: skip


@dataclass
class Film:
    """What an episode is made of, before a defect."""

    stamps: np.ndarray
    proprio: np.ndarray
    pictures: np.ndarray
    unseen: set[int] = field(default_factory=set)
    events: list[tuple[float, str]] = field(default_factory=list)
    reason: str = "solved"
    ended_by: str = "person"


def film(seed: int) -> Film:
    """A hand that goes round, and a gripper that closes in the middle."""
    rng = np.random.default_rng(seed)
    turn = np.linspace(0, 2 * np.pi, FRAMES)
    hand = np.stack([0.5 + 0.1 * np.cos(turn), 0.1 * np.sin(turn), 0.2 + 0.05 * np.sin(turn)], -1)
    width = np.where(np.arange(FRAMES) < 60, 0.08, 0.04)[:, None]
    proprio = np.concatenate([hand, hand, width], -1) + 1e-4 * rng.standard_normal((FRAMES, 7))
    pictures = rng.integers(0, 255, (FRAMES, 16, 16, 3), dtype=np.uint8)
    return Film(PERIOD * np.arange(FRAMES), proprio.astype(np.float32), pictures)


def stall(f: Film) -> None:
    p = f.proprio
    f.proprio = np.concatenate([p[:20], np.repeat(p[20:21], 55, axis=0), p[20:65]])


def jump(f: Film) -> None:
    f.proprio[50:, 1] += 0.12


def drop(f: Film) -> None:
    f.stamps[40:] += PERIOD


def miss(f: Film) -> None:
    f.unseen.add(30)


def pause(f: Film) -> None:
    f.stamps[40:] += 30.0
    f.events = [(f.stamps[39] + 0.1, "human -> hold: a person said hold")]


def stop(f: Film) -> None:
    f.stamps[70:] += 5.0
    f.events = [(f.stamps[69] + 0.1, "human -> fault: force of 40 N at the hand")]


def repeat(f: Film) -> None:
    f.pictures[80:95] = f.pictures[80]


def time_up(f: Film) -> None:
    f.reason = "the time is up"


def policy_used_its_time(f: Film) -> None:
    f.reason, f.ended_by = "the time is up", "policy"


def cut(f: Film) -> None:
    f.stamps, f.proprio, f.pictures = f.stamps[:12], f.proprio[:12], f.pictures[:12]


DEFECTS: list[tuple[Callable[[Film], None] | None, list[tuple[str, int, str]]]] = [
    (None, []),
    (stall, [("stall", 20, "nothing moves for 2.2 s")]),
    (jump, [("jump", 50, "the state jumps by")]),
    (drop, [("dropped", 40, "0.32 s between two actions, not 0.16")]),
    (miss, [("dropped", 30, "no fresh picture came")]),
    (pause, []),
    (stop, [("stopped", 69, "force of 40 N")]),
    (repeat, [("repeated", 80, "camera front shows the same picture 15 times")]),
    (time_up, [("label", FRAMES - 1, "the time is up")]),
    (cut, [("short", 0, "it has 12 frames; half of the episodes have 120 or more")]),
    (None, []),
    (policy_used_its_time, []),
]


def write(path: Path, f: Film) -> None:
    log = RunLog(path, {"policy": FACTS, "teleop": "page", "init": 0}, 0.0)
    events = list(f.events)
    for k, stamp in enumerate(f.stamps):
        while events and events[0][0] < stamp:
            log.event(events[0][0], "mode", events.pop(0)[1])
        seen = {"proprio": f.proprio[k], "images": {"front": f.pictures[k]}, "prompt": "go round"}
        action = np.array([0, 0, 0, 1], np.float32)
        log.action(stamp, action, True, None if k in f.unseen else seen)
    solved = f.reason == "solved"
    ending = {"solved": solved, "reason": f.reason, "ended_by": f.ended_by}
    log.put("/episode", f.stamps[-1], ending)
    log.close()


def test_each_defect_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (defect, _) in enumerate(DEFECTS):
        made = film(number)
        if defect is not None:
            defect(made)
        write(tmp_path / "logs" / f"episode_{number:04d}.mcap", made)
    data = tmp_path / "data"
    words = ["data", "from-logs", str(tmp_path / "logs"), "--keep-failures", "--out", str(data)]
    assert main(words) == 0
    said = capsys.readouterr().out
    doubts = json.loads((data / "meta" / "doubtful.json").read_text())
    found = {(d["episode"], d["kind"], d["frame"]): d for d in doubts}
    expected = {
        (number, kind, frame): words
        for number, (_, kinds) in enumerate(DEFECTS)
        for kind, frame, words in kinds
    }
    assert found.keys() == expected.keys(), doubts
    for key, words_ in expected.items():
        assert words_ in found[key]["why"]
        assert found[key]["seconds"] == pytest.approx(key[2] / 25.0)
        assert f"look at episode {key[0]}, {key[2] / 25.0:.1f} s: {found[key]['why']}" in said
    # The check of any data set names what states alone show.
    verdict = verify_dataset(data)
    assert verdict.faults == []
    looked = [note for note in verdict.notes if note.startswith("Look at episode")]
    assert [note.split()[3].strip(",") for note in looked] == ["1", "2", "9"], looked
    # No policy acted, so nobody intervened.
    features = json.loads((data / "meta" / "info.json").read_text())["features"]
    assert "intervention" not in features
