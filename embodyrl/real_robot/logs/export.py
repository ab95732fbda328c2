"""``embodyrl data from-logs``: makes a LeRobotDataset of a robot's recorded logs."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data.doubts import Doubt, motion_doubts
from embodyrl.data.lerobot_write import DatasetWriter, require_free
from embodyrl.data.recording import Recording
from embodyrl.errors import UserError
from embodyrl.real_robot.control.episode import cut_short
from embodyrl.real_robot.logs.log_doubts import log_doubts
from embodyrl.real_robot.logs.mcap_log import CAMERA, DEPTH, logged_picture, read
from embodyrl.real_robot.logs.split_turns import split_turns
from embodyrl.real_robot.policy_link.metadata import FACTS, camera_sizes
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.env_spec import conventions_from_json, spec_from_json
from embodyrl.storage.paths import files_of
from embodyrl.types import EnvSpec

DOUBTFUL = "meta/doubtful.json"
"""File of a data set with the episodes that a person should look at."""


def export_logs(
    folder: str | Path,
    out: str | Path,
    *,
    keep_failures: bool = False,
    most: int | None = None,
    turns: bool = False,
    resets: bool = False,
) -> dict[str, Any]:
    """Writes one data set of all recorded episodes in a folder.

    A frame holds what the policy would see before an action, the action that was carried out, and
    whether a person took it (``intervention``), and whether it went back (``recovery``). The frame
    rate is the control rate of training, however slowly the robot moved. Where no policy acted, as
    in ``embodyrl record``, there is nothing to intervene in, and the data are those of ``embodyrl
    collect``.

    Args:
        folder: of ``*.mcap`` files, from ``record``, ``deploy --record`` or ``env.record=true``.
        out: the data set's folder.
        keep_failures: also keep the episodes that were not solved, with ``success`` False. Those of
            a policy that a fault or the stop cut short are no failures, and are left out.
        most: number of episodes to keep, the first ones; None for all.
        turns: make an episode of each turn of the policy and of the person (``split_turns``).
        resets: take the logs of resets (``resets.scene_reset``), and leave out all others; else the
            other way round.

    Returns:
        Numbers of ``episodes``, ``solved`` ones among them, ``frames``, ``human_frames`` and
        ``recovery_frames`` that were written, and of episodes that were ``left_out``, of which
        ``cut_short`` were ended by a fault or the stop; and ``doubts``, what a person should look at
        (``Doubt`` as plain data), which the data set keeps in ``meta/doubtful.json``.

    Raises:
        UserError: no logs, logs without observations or of different policies, or ``out`` exists.
    """
    if not str(out):
        raise UserError("Say where the data set goes: --out FOLDER.")
    require_free(out)
    files = files_of(Path(folder), "*.mcap")
    if not files:
        raise UserError(f"There are no logs (*.mcap) in {folder}.")
    # What the first episode that is kept says about its policy; the others must agree.
    facts: dict[str, Any] | None = None
    teleoperated = False  # whether no policy acted in them
    writer: DatasetWriter | None = None
    others = 0  # logs of another kind than was asked for
    doubts: list[Doubt] = []
    states: dict[int, np.ndarray] = {}  # of each episode
    numbers = ("episodes", "solved", "frames", "human_frames", "recovery_frames")
    numbers += ("left_out", "cut_short")
    written = dict.fromkeys(numbers, 0)
    try:
        for file in files:
            if written["episodes"] == most:
                break
            messages = read(file)
            settings = messages["/run"][0]["settings"]
            # What brings the scene back is no data of the task.
            if ("reset" in settings) != resets:
                others += 1
                written["left_out"] += 1
                continue
            own = settings.get("policy", {})
            if facts is not None and (
                any(own.get(k) != facts.get(k) for k in ("cameras", *FACTS))
                or teleoperated != ("teleop" in settings)
            ):
                raise UserError(
                    f"{file} is of another policy than {files[0]}: they make no one data set. Put "
                    "the logs of each policy into a folder of its own."
                )
            # Keep the episodes that were solved, or all.
            recording = recorded(messages, file)
            parts = [] if recording is None else [recording]
            ending = messages["/episode"][-1] if messages["/episode"] else None
            # Turns know by themselves what says something of the policy.
            if not turns and "teleop" not in settings and cut_short(ending):
                parts = []
                written["cut_short"] += 1
            if turns and recording is not None:
                parts = split_turns(recording, str((ending or {}).get("ended_by", "")))
            parts = [part for part in parts if part.success or keep_failures]
            if not parts:
                written["left_out"] += 1
                continue
            if writer is None:
                facts = own
                teleoperated = "teleop" in settings
                writer = DatasetWriter(
                    out,
                    _spec(settings),
                    split=settings.get("split", "train"),
                    config=settings.get("env_config"),
                    human=not teleoperated,
                    depth=list(parts[0].depth),
                )
            # A log's doubts are about whole episodes.
            if not turns:
                doubts += log_doubts(written["episodes"], messages, own["control_hz"])
            for part in parts:
                assert part.human is not None and part.recovery is not None
                states[written["episodes"]] = part.proprio
                written["episodes"] += 1
                written["solved"] += part.success
                written["frames"] += len(part)
                written["human_frames"] += int(part.human.sum())
                written["recovery_frames"] += int(part.recovery.sum())
                writer.add(replace(part, human=None) if teleoperated else part)
    except BaseException as error:
        if writer is not None:
            writer.__exit__(type(error), error, None)
        raise
    if facts is None and others == len(files):
        raise UserError(
            f"The {len(files)} logs in {folder} are all of "
            f"{'episodes: leave out --resets.' if resets else 'resets: give --resets to take them.'}"
        )
    if writer is None:
        cut = f", and {written['cut_short']} were cut short by a fault or the stop, which says nothing"
        why = cut if written["cut_short"] else ""
        remedy = "" if keep_failures else " Keep those that failed: --keep-failures."
        raise UserError(f"None of the {len(files)} episodes in {folder} was solved{why}.{remedy}")
    # What a person should look at is a file of the data set.
    assert facts is not None
    doubts += motion_doubts(states, facts["control_hz"])
    doubts.sort(key=lambda doubt: (doubt.episode, doubt.frame))
    write_json(writer.partial / DOUBTFUL, [asdict(doubt) for doubt in doubts])
    writer.__exit__(None, None, None)
    return {**written, "doubts": [asdict(doubt) for doubt in doubts]}


def recorded(messages: dict[str, list[dict[str, Any]]], file: Path) -> Recording | None:
    """The episode of a log; None if no action was taken in it.

    Args:
        messages: of ``mcap_log.read``.
        file: for the message.

    Raises:
        UserError: the log has no observations, or its messages do not fit each other.
    """
    if not messages["/action"]:
        return None
    try:
        return _recorded(messages, file)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is no whole recording ({type(error).__name__}: {error}). Take it out of the "
            "folder."
        ) from error


def _recorded(messages: dict[str, list[dict[str, Any]]], file: Path) -> Recording:
    # An action without an observation, because no fresh image came, teaches nothing.
    actions = [m for m in messages["/action"] if "proprio" in m]
    settings = messages["/run"][0]["settings"]
    if not actions:
        raise UserError(
            "it does not hold what the policy saw. Record it: deploy --record, or env.record=true."
        )
    # The reward comes with the last action, if the episode was solved.
    cameras = {t.removeprefix(CAMERA): m for t, m in messages.items() if t.startswith(CAMERA)}
    solved = bool(messages["/episode"] and messages["/episode"][-1]["solved"])
    depths = {t.removeprefix(DEPTH): m for t, m in messages.items() if t.startswith(DEPTH)}
    for what, of in (("images", cameras), ("depth maps", depths)):
        for name, found in of.items():
            if len(found) != len(actions):
                raise UserError(
                    f"there are {len(found)} {what} of camera {name} for {len(actions)} actions"
                )
    proprio, taken = (np.array([m[k] for m in actions], np.float32) for k in ("proprio", "action"))
    if not (np.isfinite(proprio).all() and np.isfinite(taken).all()):
        raise UserError("its proprio or its actions are not finite")
    last = np.arange(len(actions)) == len(actions) - 1
    return Recording(
        images={
            name: np.stack([logged_picture(m) for m in found]) for name, found in cameras.items()
        },
        depth={name: np.stack([m["depth"] for m in found]) for name, found in depths.items()},
        proprio=proprio,
        actions=taken,
        reward=(last & solved).astype(np.float32),
        solved=last & solved,
        init=int(settings.get("init", 0)),
        task=str(settings.get("policy", {}).get("env", "")),
        instruction=str(actions[0]["prompt"]),
        human=np.array([m["human"] for m in actions]),
        recovery=np.array([m["recovery"] for m in actions]),
    )


def _spec(settings: dict[str, Any]) -> EnvSpec:
    """The spec of the environment that the data are for.

    A recording session notes it; of a policy's run it follows from the policy's metadata.
    """
    if "spec" in settings:
        return spec_from_json(settings["spec"])
    facts = settings.get("policy", {})
    given = {name: facts[name] for name in FACTS}
    return EnvSpec(
        name=str(facts["env"]),
        num_envs=1,
        cameras=camera_sizes(facts),
        conventions=conventions_from_json(facts.get("conventions", {})),
        **given,
    )
