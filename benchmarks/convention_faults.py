"""Convention faults injected into a good data set, and what the check says of each.

    python benchmarks/convention_faults.py --work FOLDER

It collects six episodes, makes a copy with each fault, and holds every copy against the env, once
with the recorded initial states and once without. What the check names, it also translates where
there is a translation; the copy is then held against the env again. Writes
``benchmarks/convention_faults.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embodyrl.config import env_config
from embodyrl.data.collect import collect_dataset
from embodyrl.data.env_check import check_with_env, findings_in_words
from embodyrl.env import EnvConfig
from embodyrl.errors import UserError

EPISODES = 6
ENV = ("mujoco", ["env.task=pick", "env.cameras=[front,wrist]", "env.num_envs=6"])
KEYS = {camera: f"observation.images.{camera}" for camera in ("front", "wrist", "image", "image2")}

Rows = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(actions, states) of all frames -> what stands in their place."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        named: the field that the check must name: of ``Finding``, or ``"rate"``, ``"names"``.
        inject: changes a data set in place.
    """

    named: str
    inject: Callable[[Path], None]


def edit(folder: Path, change: Callable[[pa.Table], pa.Table], what: str = "data") -> None:
    """Replaces every table of a data set by ``change(table)``."""
    for path in sorted((folder / what).rglob("*.parquet")):
        pq.write_table(change(pq.read_table(path)), path)


def put(table: pa.Table, name: str, values: Any) -> pa.Table:
    """The table with other values in a column."""
    place = table.column_names.index(name)
    return table.set_column(place, name, pa.array(values, table.schema.field(name).type))


def change_rows(column: str, change: Rows) -> Callable[[Path], None]:
    """A fault of actions or states."""

    def inject(folder: Path) -> None:
        def apply(table: pa.Table) -> pa.Table:
            actions, states = (
                np.array(table[name].to_pylist()) for name in ("action", "observation.state")
            )
            return put(table, column, change(actions, states).astype("f4").tolist())

        edit(folder, apply)

    return inject


def change_pictures(
    change: Callable[[np.ndarray], np.ndarray], rate: int = 0
) -> Callable[[Path], None]:
    """A fault of pictures: every video is encoded anew."""

    def inject(folder: Path) -> None:
        import av

        for path in sorted((folder / "videos").rglob("*.mp4")):
            with av.open(str(path)) as video:
                hz = rate or int(video.streams.video[0].average_rate or 1)
                frames = [f.to_ndarray(format="rgb24") for f in video.decode(video=0)]
            with av.open(str(path), "w") as video:
                stream = video.add_stream("libx264", rate=hz, options={"crf": "12"})
                stream.height, stream.width = change(frames[0]).shape[:2]
                stream.pix_fmt = "yuv444p"
                for frame in frames:
                    picture = np.ascontiguousarray(change(frame))
                    shown = av.VideoFrame.from_ndarray(picture, format="rgb24")
                    video.mux(stream.encode(shown))
                video.mux(stream.encode())

    return inject


def rename_cameras(names: dict[str, str]) -> Callable[[Path], None]:
    """Other names of the cameras, or the same ones exchanged."""

    def inject(folder: Path) -> None:
        keys = {KEYS[old]: KEYS[new] for old, new in names.items()}

        def renamed(text: str) -> str:
            # By way of names that none of them has.
            for old in keys:
                text = text.replace(old, f"<{old[-5:]}>")
            for old, new in keys.items():
                text = text.replace(f"<{old[-5:]}>", new)
            return text

        for path in (folder / "meta/info.json", folder / "meta/stats.json"):
            path.write_text(renamed(path.read_text()))
        edit(
            folder,
            lambda t: t.rename_columns([renamed(c) for c in t.column_names]),
            "meta/episodes",
        )
        for old in keys:
            os.rename(folder / "videos" / old, folder / "videos" / f"<{old[-5:]}>")
        for old, new in keys.items():
            os.rename(folder / "videos" / f"<{old[-5:]}>", folder / "videos" / new)

    return inject


def slower(folder: Path, hz: int = 10) -> None:
    """The same frames, as if they had been recorded at ``hz``."""
    path = folder / "meta/info.json"
    info = json.loads(path.read_text())
    factor = info["fps"] / hz
    path.write_text(json.dumps(info | {"fps": hz}))
    edit(folder, lambda t: put(t, "timestamp", np.array(t["frame_index"]) / hz))

    def scaled(table: pa.Table) -> pa.Table:
        for name in table.column_names:
            if name.endswith("_timestamp"):
                table = put(table, name, np.array(table[name]) * factor)
        return table

    edit(folder, scaled, "meta/episodes")
    change_pictures(lambda frame: frame, hz)(folder)


def gripper(closed: float, opened: float) -> Rows:
    """The gripper's action where ``closed`` closes and ``opened`` opens it."""

    def change(actions: np.ndarray, states: np.ndarray) -> np.ndarray:
        share = (actions[:, -1:] + 1) / 2
        return np.column_stack([actions[:, :-1], closed + share * (opened - closed)])

    return change


def absolute(actions: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Positions of the hand in place of changes."""
    return np.column_stack([np.clip(states[:, :3], -1, 1), actions[:, 3:]])


def targets(actions: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Where the hand is to go, in metres, in place of changes."""
    return np.column_stack([states[:, 3:6] + 0.035 * actions[:, :3], actions[:, 3:]])


FAULTS = {
    "pictures turned by 180 degrees": Fault(
        "orientation", change_pictures(lambda f: f[::-1, ::-1])
    ),
    "pictures upside down": Fault("orientation", change_pictures(lambda f: f[::-1])),
    "pictures mirrored": Fault("orientation", change_pictures(lambda f: f[:, ::-1])),
    "red and blue exchanged": Fault("channels", change_pictures(lambda f: f[..., ::-1])),
    "cameras exchanged": Fault("cameras", rename_cameras({"front": "wrist", "wrist": "front"})),
    "cameras of other names": Fault("names", rename_cameras({"front": "image", "wrist": "image2"})),
    "another rate": Fault("rate", slower),
    "gripper in 0 to 1": Fault("gripper", change_rows("action", gripper(0.0, 1.0))),
    "gripper in 1 to 0": Fault("gripper", change_rows("action", gripper(1.0, 0.0))),
    "gripper the other way round": Fault("gripper", change_rows("action", gripper(1.0, -1.0))),
    "absolute targets": Fault("actions", change_rows("action", targets)),
    "absolute positions": Fault("actions", change_rows("action", absolute)),
    "one axis of the wrong sign": Fault("scale", change_rows("action", lambda a, s: a * [-1, 1, 1, 1])),
    "actions one frame late": Fault(
        "lag", change_rows("action", lambda a, s: np.concatenate([a[:1], a[:-1]]))
    ),
    "actions of half the size": Fault(
        "scale", change_rows("action", lambda a, s: a * [0.5, 0.5, 0.5, 1])
    ),
    "actions in metres": Fault(
        "scale", change_rows("action", lambda a, s: a * [0.035, 0.035, 0.035, 1])
    ),
    "axes exchanged": Fault("actions", change_rows("action", lambda a, s: a[:, [1, 0, 2, 3]])),
    "state in millimetres": Fault(
        "state", change_rows("observation.state", lambda a, s: 1000 * s)
    ),
    "state in another order": Fault(
        "state", change_rows("observation.state", lambda a, s: np.roll(s, 1, axis=1))
    ),
}  # fmt: skip


def make_good(folder: Path, episodes: int = EPISODES) -> None:
    """Collects the good data set, unless it is there."""
    if not folder.exists():
        collect_dataset(env_config(*ENV), folder, num_episodes=episodes)


def faulty_copy(good: Path, to: Path, fault: Fault | None, *, inits: bool = True) -> Path:
    """A copy that does not say where it comes from, with a fault.

    Args:
        good: the data set.
        to: the copy.
        fault: None for none.
        inits: whether it keeps the numbers of initial states, which others' data sets lack.
    """
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(good, to)
    (to / "meta/embodyrl.json").unlink(missing_ok=True)
    if not inits:
        edit(to, lambda t: put(t, "init", [-1] * len(t)))
    if fault is not None:
        fault.inject(to)
    return to


def checked(folder: Path, env: EnvConfig, options: dict[str, Any]) -> dict[str, Any]:
    """What is named, what the sentences say, and what translates it."""
    try:
        check = check_with_env(folder, env, options)
    except UserError as error:
        return {"named": ["names"], "says": [str(error)], "fix": {}}
    rows = list(findings_in_words(check, check.conventions, {}, folder.name))
    named = [found.field for found, _, _ in rows]
    says = [text for _, text, _ in rows]
    if check.rate_differs and "rate" not in options:
        named.append("rate")
        says.append(check.rate_differs)
    fix: dict[str, Any] = {}
    for found, _, _ in rows:
        fix |= found.fix
    return {"named": named, "says": says, "fix": fix}


def remedy(fault: Fault, found: dict[str, Any]) -> dict[str, Any]:
    """The options that the sentences advise; empty where they advise none."""
    if fault.named == "names":
        return {"cameras": {"front": "image", "wrist": "image2"}}
    if fault.named == "cameras":
        return {"cameras": {"front": "wrist", "wrist": "front"}}
    if fault.named == "rate":
        return {"rate": "resample"}
    return {"convention": found["fix"]} if found["fix"] else {}


def main() -> None:
    """Runs all faults, with and without initial states."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for the data sets")
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    make_good(work / "good")
    env = env_config(*ENV)
    rows: dict[str, Any] = {}
    for inits in (True, False):
        kind = "initial states known" if inits else "initial states not known"
        clean = faulty_copy(work / "good", work / "copy", None, inits=inits)
        rows[kind] = {"none": checked(clean, env, {})}
        for name, fault in FAULTS.items():
            copy = faulty_copy(work / "good", work / "copy", fault, inits=inits)
            found = checked(copy, env, {})
            options = remedy(fault, found)
            after = checked(copy, env, options)["named"] if options else None
            rows[kind][name] = found | {
                "silent": not found["named"],
                "as what it is": fault.named in found["named"],
                "translated by": options,
                "named after that": after,
            }
            print(kind, "|", name, "|", found["named"], "|", options, "|", after, flush=True)
    silent = {
        kind: [n for n, row in found.items() if row.get("silent")] for kind, found in rows.items()
    }
    from benchmarks import shared

    shared.write("convention_faults", {"episodes": EPISODES, "silent": silent, "faults": rows})


if __name__ == "__main__":
    main()
