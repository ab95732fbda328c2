"""HDF5 files of robomimic, LIBERO and ManiSkill, as their own tools write them.

    layout      an episode                              the rate and what an action means
    robomimic   data/demo_0: actions (T, A), rewards,   env_args of data: control_freq, controller
                obs/NAME (T, ...)
    LIBERO      the same, obs/agentview_rgb,            env_args; problem_info: the instruction
                obs/ee_pos, obs/ee_ori, ...
    ManiSkill   traj_0: actions (T, A), success,        the .json beside it
                obs (T+1, D), or obs/agent, obs/extra
                and obs/sensor_data/CAMERA/rgb

What they mean differs, and is brought to what this project's envs mean:

- LIBERO's tool wrote each observation after its action: it belongs to the next action.
- LIBERO's pictures are OpenGL's, with the lowest row first (``macros_image_convention``).
- Actions stay as they are, the sign of the gripper too: this project's LIBERO and ManiSkill envs
  take those of their simulators. What robosuite's controllers clip is clipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data.importers.hdf5_parts import (
    Episodes,
    array_of,
    as_executed,
    concatenated,
    controller_of,
    each_episode,
    first_obs,
    in_order,
    is_colour,
    json_of,
    leaves_of,
    longest,
    recording_of,
    require_keys,
    say_aside,
    text_of,
)
from embodyrl.data.importers.write import (
    Facts,
    Say,
    UnusableEpisodeError,
    rate_of,
    write_imported,
)
from embodyrl.data.recording import Recording
from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.storage.paths import files_of, require_readable
from embodyrl.storage.plain_data import first_line

ENDINGS = (".hdf5", ".h5")
LIBERO_STATE = ("ee_pos", "ee_ori", "gripper_states")
ROBOMIMIC_STATE = ("eef_pos", "eef_quat", "gripper_qpos")
LIBERO_CAMERAS = {"agentview_rgb": "agentview", "eye_in_hand_rgb": "wrist"}
MANISKILL_HZ = 20.0
"""ManiSkill's ``control_freq`` where an env does not change it."""


def import_hdf5(
    path: str | Path,
    out: str | Path,
    *,
    instruction: str = "",
    hz: float = 0.0,
    state: Sequence[str] = (),
    say: Say = print,
) -> dict[str, Any]:
    """Writes a LeRobotDataset of HDF5 files of one layout.

    Args:
        path: a file, or a folder of files such as a suite of LIBERO.
        out: the data set's folder.
        instruction: what the policy is told, where the files do not say it.
        hz: actions per second, where the files do not say it.
        state: keys of the observation that make the state; by default the end effector's position
            and rotation and the gripper, or for ManiSkill all that is no picture.
        say: is told what is left out, and what was brought to another convention.

    Returns:
        See ``write_imported``.

    Raises:
        UserError: no such file, another layout, or something that it does not say.
    """
    if not str(out):
        raise UserError("Say where the data set goes: --out FOLDER.")
    path = Path(path)
    files = (
        [path] if path.is_file() else sorted(f for e in ENDINGS for f in files_of(path, f"*{e}"))
    )
    if not files:
        raise UserError(f"There are no HDF5 files (*.hdf5, *.h5) in {path}.")
    # All files are opened first, so that what is wrong with one is said before anything is written.
    opened = [_open(file) for file in files]
    try:
        readers = [_reader(file, source) for file, source in zip(files, opened, strict=True)]
        if len(set(readers)) > 1:
            raise UserError(
                f"The files in {path} have different layouts. Import one layout at a time."
            )
        options = {"instruction": instruction, "hz": hz, "state": tuple(state), "say": say}
        parts = [
            readers[0](file, source, **options) for file, source in zip(files, opened, strict=True)
        ]
        # One data set has one rate and one kind of action.
        facts = parts[0][0]
        for file, (other, _) in zip(files, parts, strict=True):
            if _control(other) != _control(facts):
                raise UserError(
                    f"{file} has {_control(other)}, and {files[0]} {_control(facts)}: they make no "
                    "one data set. Import each on its own."
                )
            facts.max_episode_steps = max(facts.max_episode_steps, other.max_episode_steps)
        return write_imported(out, (e for _, episodes in parts for e in episodes), facts, say)
    finally:
        for source in opened:
            source.close()


def _control(facts: Facts) -> str:
    words = [
        facts.conventions.actions,
        facts.control_mode,
        "actions at",
        f"{facts.control_hz:g} Hz",
    ]
    return " ".join(word for word in words if word)


def _open(file: Path) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise MissingDependencyError(
            "Reading HDF5 files needs h5py, which is not installed here: pip install "
            "'embodyrl[data]'."
        ) from error
    require_readable(file)
    try:
        return h5py.File(file, "r")
    except OSError as error:
        raise UserError(f"{file} is no HDF5 file, or damaged ({first_line(error)}).") from error


def _reader(file: Path, source: Any) -> Callable[..., tuple[Facts, Episodes]]:
    """The function that reads a file's layout."""
    if "data" in source and any(name.startswith("demo") for name in source["data"]):
        return _libero if "problem_info" in source["data"].attrs else _robomimic
    if any(name.startswith("traj_") for name in source):
        return _maniskill
    raise UserError(
        f"{file} has no known layout: robomimic's and LIBERO's have data/demo_0, ManiSkill's traj_0. "
        f"It holds {', '.join(list(source)[:8]) or 'nothing'}."
    )


def _robomimic(
    file: Path, source: Any, *, instruction: str, hz: float, state: tuple[str, ...], say: Say
) -> tuple[Facts, Episodes]:
    data = source["data"]
    args = json_of(data.attrs.get("env_args", "{}"), f"env_args of {file}")
    options = args.get("env_kwargs") or {}
    names = in_order(data)
    obs = first_obs(data, names, file)
    # By default the state is that of all robots' hands.
    if not state:
        robots = sorted({key.split("_")[0] for key in obs if key.startswith("robot")})
        state = tuple(f"{robot}_{part}" for robot in robots for part in ROBOMIMIC_STATE)
    require_keys(obs, state, file)
    cameras = {key: re.sub("_(image|rgb)$", "", key) for key in obs if is_colour(obs[key])}
    say_aside(file, obs, state, cameras, say)
    control_mode, conventions = controller_of(options)
    facts = Facts(
        name=f"robomimic/{args.get('env_name', file.stem)}",
        control_mode=control_mode,
        conventions=conventions,
        control_hz=rate_of(options.get("control_freq"), hz, str(file)),
        max_episode_steps=longest(data, names),
    )
    # Shaped rewards do not say whether the task is solved.
    shaped = bool(options.get("reward_shaping"))
    if shaped:
        say(f"{file} has shaped rewards, which do not say success: every episode counts as solved.")
    executed = as_executed(file, data, names, options, say)

    def read(name: str) -> Recording:
        demo = data[name]
        return recording_of(
            images={camera: array_of(demo, f"obs/{key}") for key, camera in cameras.items()},
            proprio=concatenated(demo, [f"obs/{key}" for key in state]),
            actions=executed(array_of(demo, "actions")),
            reward=array_of(demo, "rewards"),
            solved=None if shaped else array_of(demo, "rewards") > 0,
            task=args.get("env_name", file.stem),
            instruction=instruction,
        )

    return facts, each_episode(file, names, read)


def _libero(
    file: Path, source: Any, *, instruction: str, hz: float, state: tuple[str, ...], say: Say
) -> tuple[Facts, Episodes]:
    data = source["data"]
    args = json_of(data.attrs.get("env_args", "{}"), f"env_args of {file}")
    problem = json_of(data.attrs["problem_info"], f"problem_info of {file}")
    options = args.get("env_kwargs") or {}
    names = in_order(data)
    obs = first_obs(data, names, file)
    state = state or LIBERO_STATE
    require_keys(obs, state, file)
    cameras = {key: LIBERO_CAMERAS.get(key, key) for key in obs if is_colour(obs[key])}
    say_aside(file, obs, state, cameras, say)
    # The instruction is a text, or a list of its parts.
    told = problem.get("language_instruction", "")
    told = "".join(told) if isinstance(told, list) else str(told)
    # The task's file stands in the folder of its suite.
    suite = Path(str(data.attrs.get("bddl_file_name", ""))).parent.name
    control_mode, conventions = controller_of(options)
    facts = Facts(
        name=f"libero/{suite}" if suite.startswith("libero_") else "libero",
        control_mode=control_mode or "osc_pose",
        conventions=conventions,
        control_hz=rate_of(options.get("control_freq"), hz, str(file)),
        max_episode_steps=longest(data, names),
    )
    executed = as_executed(file, data, names, options, say)
    # OpenGL's first row is the lowest.
    turned = text_of(data.attrs.get("macros_image_convention", "opengl")) == "opengl"
    say(
        f"{file.name}: each observation is paired with the action after it, as LIBERO recorded it "
        f"after its own{'; pictures are turned over, top row first' if turned else ''}."
    )

    def read(name: str) -> Recording:
        demo = data[name]
        images = {camera: array_of(demo, f"obs/{key}") for key, camera in cameras.items()}
        proprio = concatenated(demo, [f"obs/{key}" for key in state])
        actions, reward = executed(array_of(demo, "actions")), array_of(demo, "rewards")
        for what, values in {**images, "state": proprio, "rewards": reward}.items():
            if len(values) != len(actions):
                raise UnusableEpisodeError(
                    f"{what} has {len(values)} rows for {len(actions)} actions"
                )
        # The observation after action t goes with action t + 1.
        return recording_of(
            images={
                camera: frames[:-1, ::-1] if turned else frames[:-1]
                for camera, frames in images.items()
            },
            proprio=proprio[:-1],
            actions=actions[1:],
            reward=reward[1:],
            solved=reward[1:] > 0,
            task=file.stem.removesuffix("_demo"),
            instruction=told.strip().strip('"') or instruction,
        )

    return facts, each_episode(file, names, read)


def _maniskill(
    file: Path, source: Any, *, instruction: str, hz: float, state: tuple[str, ...], say: Say
) -> tuple[Facts, Episodes]:
    beside = file.with_suffix(".json")
    if not beside.is_file():
        raise UserError(f"{beside} is missing: it says what the actions of {file.name} mean.")
    require_readable(beside)
    about = json_of(beside.read_text(encoding="utf-8"), str(beside))
    env = about.get("env_info") or {}
    options = env.get("env_kwargs") or {}
    names = in_order(source)
    if "obs" not in source[names[0]]:
        raise UserError(
            f"{file} holds no observations. Add them: python -m "
            "mani_skill.trajectory.replay_trajectory --traj-path FILE --obs-mode rgb --save-traj"
        )
    # Pictures, and numbers.
    leaves = dict(leaves_of(source[names[0]]["obs"]))
    pictures = [key for key in leaves if re.fullmatch("sensor_data/[^/]+/.*", key)]
    cameras = {key: key.split("/")[1] for key in pictures if key.endswith("/rgb")}
    # What the robot and the task say, in ManiSkill's own order.
    flat = [key for key in leaves if not key.startswith(("sensor_data/", "sensor_param/"))]
    state = state or tuple(flat)
    require_keys(leaves, state, file)
    say_aside(file, leaves, state, cameras, say)
    if not instruction:
        raise UserError(f"{file} holds no instruction. Give one: --instruction 'push the cube'.")
    # An env that changes the rate says so.
    rate = (options.get("sim_config") or {}).get("control_freq", MANISKILL_HZ)
    facts = Facts(
        name=f"maniskill/{env.get('env_id', file.stem)}",
        control_mode=str(options.get("control_mode") or ""),
        control_hz=rate_of(rate, hz, str(beside)),
        max_episode_steps=longest(source, names),
    )

    def read(name: str) -> Recording:
        trajectory = source[name]
        observed = trajectory["obs"]
        if "success" not in trajectory:
            raise UnusableEpisodeError("it does not say whether the task was solved")
        actions = trajectory["actions"]
        if not hasattr(actions, "shape"):
            raise UnusableEpisodeError("it has the actions of several robots")
        success = np.asarray(trajectory["success"][()], bool)
        # The last observation has no action.
        images = {camera: array_of(observed, key)[:-1] for key, camera in cameras.items()}
        # In state mode the observation is one array.
        whole = state == ("",)
        proprio = np.asarray(observed[()]) if whole else concatenated(observed, list(state))
        return recording_of(
            images=images,
            proprio=proprio[:-1],
            actions=np.asarray(actions[()]),
            reward=success.astype(np.float32),
            solved=success,
            task=str(env.get("env_id", "")),
            instruction=instruction,
        )

    return facts, each_episode(file, names, read)
