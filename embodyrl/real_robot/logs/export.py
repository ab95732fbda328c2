"""Recorded logs of a robot as a LeRobotDataset: ``embodyrl data from-logs``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data.lerobot_write import DatasetWriter, require_free
from embodyrl.data.recording import Recording
from embodyrl.errors import UserError
from embodyrl.real_robot.env.config import FACTS
from embodyrl.real_robot.logs.mcap_log import CAMERA, picture, read
from embodyrl.types import EnvSpec


def export_logs(
    folder: str | Path, out: str | Path, *, keep_failures: bool = False
) -> dict[str, int]:
    """Writes one data set of all recorded episodes of one kind of policy.

    A frame is what would have been seen before an action, the action that was carried out, and
    whether a person took it (``intervention``). The rate is the one that the policy was trained at,
    however slowly the robot went.

    Args:
        folder: of ``episode_*.mcap``, from ``deploy --record`` or ``env.record=true``.
        out: the data set's folder.
        keep_failures: keep the episodes that were not solved too, with ``success`` False.

    Returns:
        ``episodes``, ``frames``, ``human_frames`` that were written, and ``left_out`` episodes.

    Raises:
        UserError: no logs, logs without pictures, of different policies, or ``out`` exists.
    """
    if not str(out):
        raise UserError("Say where the data set goes: --out FOLDER.")
    require_free(out)
    files = sorted(Path(folder).glob("*.mcap"))
    if not files:
        raise UserError(f"There are no logs (*.mcap) in {folder}.")
    facts: dict[str, Any] | None = None
    writer: DatasetWriter | None = None
    written = {"episodes": 0, "frames": 0, "human_frames": 0, "left_out": 0}
    try:
        for file in files:
            messages = read(file)
            own = messages["/run"][0]["settings"].get("policy", {})
            if facts is not None and any(own.get(k) != facts.get(k) for k in ("cameras", *FACTS)):
                raise UserError(
                    f"{file} is of another policy than {files[0]}: they make no one data set."
                )
            recording = recorded(messages, file)
            if recording is None or not (recording.success or keep_failures):
                written["left_out"] += 1
                continue
            if writer is None:
                facts = own
                writer = DatasetWriter(out, _spec(own), human=True)
            writer.add(recording)
            assert recording.human is not None
            written["episodes"] += 1
            written["frames"] += len(recording)
            written["human_frames"] += int(recording.human.sum())
    except BaseException as error:
        if writer is not None:
            writer.__exit__(type(error), error, None)
        raise
    if writer is None:
        raise UserError(
            f"None of the {len(files)} episodes in {folder} was solved. Keep them all: "
            "--keep-failures."
        )
    writer.__exit__(None, None, None)
    return written


def recorded(messages: dict[str, list[dict[str, Any]]], file: Path) -> Recording | None:
    """The episode of a log; None if no action was taken in it.

    Raises:
        UserError: it was not recorded.
    """
    if not messages["/action"]:
        return None
    # An action before which no fresh picture was to be had says nothing that can be learned.
    actions = [m for m in messages["/action"] if "proprio" in m]
    settings = messages["/run"][0]["settings"]
    if not actions:
        raise UserError(
            f"{file} does not hold what the policy saw. Record it: deploy --record, or "
            "env.record=true."
        )
    cameras = {t.removeprefix(CAMERA): m for t, m in messages.items() if t.startswith(CAMERA)}
    solved = bool(messages["/episode"] and messages["/episode"][-1]["solved"])
    last = np.arange(len(actions)) == len(actions) - 1
    return Recording(
        images={name: np.stack([picture(m) for m in found]) for name, found in cameras.items()},
        proprio=np.array([m["proprio"] for m in actions], np.float32),
        actions=np.array([m["action"] for m in actions], np.float32),
        reward=(last & solved).astype(np.float32),
        solved=last & solved,
        init=int(settings.get("init", 0)),
        task=str(settings.get("policy", {}).get("env", "")),
        instruction=str(actions[0]["prompt"]),
        human=np.array([m["human"] for m in actions]),
    )


def _spec(facts: dict[str, Any]) -> EnvSpec:
    cameras = {name: (int(size[0]), int(size[1])) for name, size in facts["cameras"].items()}
    return EnvSpec(
        name=str(facts["env"]), num_envs=1, cameras=cameras, **{name: facts[name] for name in FACTS}
    )
