"""A simulated arm as a third-party plug-in of LeRobot's, its file, and its leader."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PLUGIN = Path(__file__).parent / "lerobot_robot_sim_so"
JOINTS = {
    "shoulder_pan": [-110, 110],
    "shoulder_lift": [-100, 100],
    "elbow_flex": [-95, 95],
    "wrist_flex": [-95, 95],
    "wrist_roll": [-160, 160],
    "gripper": [0, 100],
}


def install_plugin(site: Path) -> None:
    """Installs the plug-in into a folder of packages, as pip would."""
    site.mkdir(parents=True, exist_ok=True)
    (site / PLUGIN.name).symlink_to(PLUGIN)
    info = site / f"{PLUGIN.name}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN.name}\nVersion: 0.1\n")


def environment(site: Path, home: Path) -> dict[str, str]:
    """Environment of a process that has the plug-in, and neither a display nor a hub."""
    ours = str(Path(__file__).parents[2])
    paths = [str(site), ours, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}


class SimArm:
    """The arm's file, and the files by which a test moves the leader and breaks the arm.

    Args:
        folder: of the files.
        safety: keys of the section ``safety`` beside ``joints``.
    """

    def __init__(self, folder: Path, **safety: Any) -> None:
        self.leader = folder / "leader.json"
        self.faults = folder / "faults.json"
        self.file = folder / "arm.yaml"
        self.pose: dict[str, float] = {}
        self.stand()
        self.fault()
        sections = {
            "lerobot": {"type": "sim_so", "faults": str(self.faults)},
            "teleoperator": {"state": str(self.leader)},
            "safety": {"joints": JOINTS, "home": dict.fromkeys(JOINTS, 0.0), **safety},
        }
        self.write(sections)

    def write(self, sections: Mapping[str, Any]) -> None:
        """Writes the arm's file; JSON is YAML."""
        self.file.write_text(json.dumps(sections))

    def stand(self, **pose: float) -> None:
        """Puts the leader there; other motors stay."""
        self.pose |= pose
        _replace(self.leader, {"pose": self.pose})

    def fault(self, **fault: Any) -> None:
        """Breaks the arm so, or mends it."""
        _replace(self.faults, fault)


def _replace(file: Path, content: Any) -> None:
    """Writes a file whole or not at all."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(content))
    new.rename(file)


@contextmanager
def swinging(arm: SimArm, motor: str, low: float, high: float, speed: float) -> Iterator[None]:
    """Moves one motor of the leader to and fro, in units per second."""
    stop = threading.Event()

    def work() -> None:
        at, step = arm.pose.get(motor, 0.0), speed * 0.02
        while not stop.wait(0.02):
            at += step
            if not low < at < high:
                step = -step
            arm.stand(**{motor: min(max(at, low), high)})

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        time.sleep(0.05)
