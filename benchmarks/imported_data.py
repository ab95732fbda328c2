"""Other people's layouts: written, imported, checked, trained on, evaluated.

    python benchmarks/imported_data.py --work FOLDER --tasks pickcube pick libero

The project's own demonstrations of a task are played again and written in each published layout by
``published_layouts.py``, which shares nothing with the importers. What a user would run then follows:
``embodyrl data from-...``, ``embodyrl data verify``, ``embodyrl train``. The same training on the
demonstrations themselves is what it is compared with, from the same seed and in the same held-out
states. Writes ``benchmarks/imported_data.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import published_layouts as layouts
from published_layouts import Played
from shared import HERE, evaluations, write

from embodyrl.build import make_env
from embodyrl.config import compose, env_config
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.env import EnvConfig
from embodyrl.functional.intervals import wilson
from embodyrl.report.compare import compare
from embodyrl.training.run_folder import finished

SEED = 0


@dataclass(frozen=True)
class Layout:
    """A published layout of a task's demonstrations.

    Attributes:
        write: writes episodes into a folder.
        read: arguments of ``embodyrl data`` that import them, the path after the first; empty where
            the files are a LeRobot data set already.
        path: of the files in that folder.
        data: overrides that say what the data mean.
        loses: what the layout does not hold, in words.
    """

    write: Callable[[list[Played], Path], None]
    read: tuple[str, ...] = ()
    path: str = ""
    data: tuple[str, ...] = ()
    loses: str = ""


@dataclass(frozen=True)
class Task:
    """A task: how it is demonstrated, the preset that imitates, and its layouts."""

    title: str
    preset: str
    env: tuple[str, ...]
    collect: tuple[str, ...]
    layouts: dict[str, Layout] = field(default_factory=dict)


def maniskill_files(episodes: list[Played], folder: Path) -> None:
    """As published, without observations; ManiSkill's own command adds them."""
    layouts.write_maniskill(episodes, folder, "PickCube-v1")
    command = ["-m", "mani_skill.trajectory.replay_trajectory", "--traj-path"]
    subprocess.run(
        [sys.executable, *command, str(folder / "trajectory.h5"), "--obs-mode", "state",
         "--save-traj"],
        check=True,
    )  # fmt: skip


CUBE = "pick up the red cube and hold it at the goal"
TASKS = {
    "pickcube": Task(
        "ManiSkill PickCube-v1 from state, 32 demonstrations",
        "maniskill_pickcube_sft",
        ("maniskill", "env.task=PickCube-v1", "env.obs=state", "env.num_envs=16"),
        ("--episodes", "32", "--noise", "0.2"),
        {
            "ManiSkill HDF5": Layout(
                maniskill_files,
                ("from-hdf5", "--instruction", CUBE),
                "trajectory.state.pd_ee_delta_pos.physx_cpu.h5",
            ),
            "robomimic HDF5": Layout(
                lambda e, f: layouts.write_robomimic(e, f / "low_dim.hdf5", "PickCube-v1"),
                ("from-hdf5", "--state", "flat", "--hz", "20", "--instruction", CUBE),
                "low_dim.hdf5",
                loses="the instruction, the rate, the control mode",
            ),
            "RLDS": Layout(
                lambda e, f: layouts.write_rlds(e, f / "pick_cube/1.0.0", {}),
                ("from-rlds", "--hz", "20"),
                "pick_cube/1.0.0",
                loses="the rate, the control mode",
            ),
            "LeRobot v2.1": Layout(
                lambda e, f: layouts.write_lerobot_v21(e, f / "set", 20),
                path="set",
                loses="the control mode",
            ),
            "LeRobot v3": Layout(
                lambda e, f: layouts.write_lerobot_v3(e, f / "set", 20),
                path="set",
                loses="the control mode",
            ),
        },
    ),
    "pick": Task(
        "The quickstart's task, one 64x64 camera, 100 demonstrations",
        "mujoco_pick_sft",
        ("mujoco", "env.task=pick", "env.max_blocks=2"),
        ("--episodes", "100", "--noise", "0.15"),
        {
            "RLDS": Layout(
                lambda e, f: layouts.write_rlds(e, f / "pick/1.0.0", {"front": "front"}),
                ("from-rlds", "--hz", "25"),
                "pick/1.0.0",
                loses="the rate, the control mode; pictures are JPEG",
            ),
            "LeRobot v2.1": Layout(
                lambda e, f: layouts.write_lerobot_v21(e, f / "set", 25),
                path="set",
                loses="the control mode",
            ),
            "LeRobot v3": Layout(
                lambda e, f: layouts.write_lerobot_v3(e, f / "set", 25),
                path="set",
                loses="the control mode",
            ),
        },
    ),
    "libero": Task(
        "LIBERO-Object, three tasks, two 128x128 cameras that become 64x64, five demonstrations each",
        "libero_object_sft",
        (
            "libero",
            "env.suite=libero_object",
            "env.task_ids=[0,1,2]",
            "env.image_size=128",
            "env.num_envs=15",
        ),
        ("--episodes", "15", "--noise", "0.1"),
        {
            "LIBERO HDF5": Layout(
                layouts.write_libero,
                ("from-hdf5",),
                loses="the first six frames of every episode",
            ),
            "RLDS": Layout(
                lambda e, f: layouts.write_rlds(
                    e,
                    f / "libero_object_no_noops/1.0.0",
                    {"agentview": "image", "wrist": "wrist_image"},
                    turned=True,
                ),
                ("from-rlds", "--hz", "20"),
                "libero_object_no_noops/1.0.0",
                data=("data.profile=libero_rlds",),
                loses="the rate, the control mode; pictures are JPEG",
            ),
        },
    ),
}


def command(*arguments: str, check: bool = True) -> dict[str, Any]:
    """What ``embodyrl ... --json`` prints."""
    found = subprocess.run(
        [sys.executable, "-m", "embodyrl.cli", *arguments, "--json"],
        check=check, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return json.loads(found.stdout)


def play(config: EnvConfig, path: Path) -> list[Played]:
    """The episodes of a data set, played again in their env."""
    demos = load_demonstrations(path, 1, keep="all", pictures=False)
    env = make_env(config)
    episodes = []
    begin = 0
    try:
        for end in demos.end.unique().tolist():
            obs = env.reset([0], init=[int(demos.init[begin])])
            seen, solved = [obs], []
            for action in demos.actions[begin:end]:
                step = env.step(action[None, None])
                seen.append(step.obs)
                solved.append(bool(step.success[0]))
            episodes.append(
                Played(
                    {c: np.stack([o.images[c][0].numpy() for o in seen]) for c in obs.images},
                    np.stack([o.proprio[0].numpy() for o in seen]),
                    demos.actions[begin:end].numpy(),
                    np.array(solved),
                    int(demos.init[begin]),
                    obs.instruction[0],
                )
            )
            begin = end
    finally:
        env.close()
    return episodes


def train(task: Task, data: Path, name: str, out: Path, extra: tuple[str, ...]) -> Path:
    """Trains the preset, unless that is done; returns the run."""
    run = out / name.replace(" ", "_").replace(".", "")
    if not finished(run):
        settings = (f"run.out={out}", f"run.name={run.name}", f"run.seed={SEED}", "run.threads=1")
        arguments = ["train", task.preset, *settings, f"data.path={data}", *extra]
        subprocess.run([sys.executable, "-m", "embodyrl.cli", *arguments], check=True)
    return run


def same_episodes(ours: Demonstrations, theirs: Demonstrations) -> np.ndarray:
    """For each frame of theirs the frame of ours.

    Layouts may order episodes anew and leave out their first frames: an episode is known by how it ends.
    """
    ends = ours.end.unique()
    rows = []
    begin = 0
    for end in theirs.end.unique().tolist():
        last = theirs.proprio[end - 1]
        same = ends[(ours.proprio[ends - 1] - last).abs().amax(1).argmin()]
        rows.append(np.arange(int(same) - (end - begin), int(same)))
        begin = end
    return np.concatenate(rows)


def differences(data: Path, direct: Path, task: Task, options: tuple[str, ...]) -> dict[str, Any]:
    """How far what training reads differs from what it reads of the demonstrations."""
    config = compose(task.preset, [f"data.path={data}", *options])
    env = make_env(config.env)
    spec = env.spec
    env.close()
    chosen = {"profile": config.data.profile, "cameras": config.data.cameras}
    theirs = load_demonstrations(data, 1, spec=spec, **chosen)
    ours = load_demonstrations(direct, 1, spec=spec)
    rows = same_episodes(ours, theirs)
    pictures = [
        np.abs(theirs.images[c].astype(int) - ours.images[c][rows].astype(int)).mean()
        for c in ours.images
    ]
    return {
        "frames": len(theirs),
        "frames of the demonstrations": len(ours),
        "same order": bool((np.diff(rows) > 0).all()),
        "largest difference of a state": float((theirs.proprio - ours.proprio[rows]).abs().max()),
        "largest difference of an action": float((theirs.actions - ours.actions[rows]).abs().max()),
        "mean difference of a picture, of 255": float(np.mean(pictures)) if pictures else None,
    }


def score(run: Path) -> list[float]:
    """Successes, episodes, and the interval of a run's last evaluation."""
    last = evaluations(run)[-1]
    return [last["successes"], last["episodes"], *wilson(last["successes"], last["episodes"])]


def read_layout(
    name: str, layout: Layout, task: Task, work: Path, episodes: Callable[[], list[Played]]
) -> tuple[Path, dict[str, Any]]:
    """Writes, imports and verifies one layout: the data set, and what came of it."""
    folder = work / name.replace(" ", "_").replace(".", "")
    files = folder / "files"
    if not files.exists():
        files.mkdir(parents=True)
        layout.write(episodes(), files)
    data = files / layout.path
    imported = None
    if layout.read:
        data = folder / "set"
        if not data.exists():
            verb, *options = layout.read
            place = str(files / layout.path)
            imported = command("data", verb, place, "--out", str(data), *options)
            (folder / "imported.json").write_text(json.dumps(imported))
        imported = json.loads((folder / "imported.json").read_text())
    picture = ("--picture", str(folder / "beside_env.png"))
    words = (str(data), task.env[0], *task.env[1:], *layout.data)
    verdict = command("data", "verify", *words, *picture, check=False)
    return data, {
        "import": " ".join(layout.read) or None,
        "says of the data": list(layout.data),
        "imported": imported,
        "verify": {key: verdict[key] for key in ("faults", "notes", "differs")},
        "loses": layout.loses,
        **differences(data, work / "direct", task, layout.data),
    }


def trained_on(run: Path, direct: Path) -> dict[str, Any]:
    """How a run ended, beside the run on the demonstrations themselves."""
    versus = compare([str(direct), str(run)])["pairs"][0]
    return {
        "success": score(run),
        "commit": json.loads((run / "meta.json").read_text())["commit"],
        "difference": versus["difference"],
        "interval of the difference": versus["interval"],
    }


def run_task(name: str, work: Path, training: bool) -> Iterator[dict[str, Any]]:
    """The demonstrations themselves, then all layouts; after each step, what is known so far."""
    task = TASKS[name]
    work.mkdir(parents=True, exist_ok=True)
    direct = work / "direct"
    if not direct.exists():
        words = ("collect", *task.env, *task.collect, "--seed", str(SEED), "--out", str(direct))
        subprocess.run([sys.executable, "-m", "embodyrl.cli", *words], check=True)
    config = env_config(task.env[0], [*task.env[1:], "env.num_envs=1"])
    # Played once, when the first layout is written.
    episodes = cache(lambda: play(config, direct))
    found: dict[str, Any] = {"title": task.title, "direct": None, "layouts": {}}
    sets = {}
    for label, layout in task.layouts.items():
        sets[label], found["layouts"][label] = read_layout(label, layout, task, work, episodes)
        print(name, "|", label, "|", json.dumps(found["layouts"][label]), flush=True)
        yield found
    if not training:
        return
    first = train(task, direct, "direct", work / "runs", ())
    found["direct"] = score(first)
    for label, layout in task.layouts.items():
        run = train(task, sets[label], label, work / "runs", layout.data)
        found["layouts"][label] |= trained_on(run, first)
        print(name, "|", label, "|", json.dumps(found["layouts"][label]), flush=True)
        yield found


def main() -> None:
    """Runs tasks, and keeps those that the JSON has from earlier."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for data sets and runs")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    text = "write, import, verify and compare the arrays alone"
    parser.add_argument("--without-training", action="store_true", help=text)
    given = parser.parse_args()
    path = HERE / "imported_data.json"
    tasks = json.loads(path.read_text())["tasks"] if path.exists() else {}
    for name in given.tasks:
        for found in run_task(name, given.work / name, not given.without_training):
            tasks[name] = found
            write("imported_data", {"seed": SEED, "tasks": tasks})


if __name__ == "__main__":
    main()
