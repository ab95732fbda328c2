"""Writes played episodes as others publish theirs, for ``imported_data.py``.

Nothing here is shared with the importers of ``embodyrl.data.importers``. Each writer follows the
tool that made the published files:

    layout        tool
    LIBERO        LIBERO's scripts/create_dataset.py
    robomimic     robomimic's scripts/dataset_states_to_obs.py, convert_d4rl.py for other envs
    ManiSkill     mani_skill.utils.wrappers.record.RecordEpisode itself
    RLDS          TensorFlow Datasets; for LIBERO moojink's rlds_dataset_builder
    LeRobot v2.1  the format's own description; v3 is written by LeRobotDataset itself
"""

from __future__ import annotations

import io
import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

LIBERO_SKIPPED = 5
"""LIBERO's tool leaves out the first observations, "because the force sensor is not stable"."""


@dataclass
class Played:
    """An episode of T actions.

    Attributes:
        images: camera -> (T + 1, h, w, 3) uint8, upright.
        proprio: (T + 1, P) float32.
        actions: (T, A) float32.
        solved: (T,) bool, after that action.
        init: the initial state's number.
        instruction: what the policy is told.
    """

    images: dict[str, np.ndarray]
    proprio: np.ndarray
    actions: np.ndarray
    solved: np.ndarray
    init: int
    instruction: str

    def __len__(self) -> int:
        return len(self.actions)


# HDF5.


def write_libero(episodes: Sequence[Played], folder: Path) -> None:
    """A file for each task.

    An observation stands beside the action that led to it, from the sixth action on. Pictures begin
    with the lowest row. ``joint_states`` and ``states`` are left out: the episodes lack them.
    """
    by_task: dict[str, list[Played]] = {}
    for episode in episodes:
        by_task.setdefault(episode.instruction, []).append(episode)
    controller = {"type": "OSC_POSE", "control_delta": True}
    for sentence, of_task in by_task.items():
        name = sentence.replace(" ", "_")
        bddl = f"libero/libero/bddl_files/libero_object/{name}.bddl"
        # LIBERO's tool asks for shaped rewards, and stores 1 at the last step.
        options = {
            "robots": ["Panda"], "controller_configs": controller, "control_freq": 20,
            "reward_shaping": True, "bddl_file_name": bddl,
        }  # fmt: skip
        with h5py.File(folder / f"{name}_demo.hdf5", "w") as file:
            data = file.create_group("data")
            data.attrs["env_name"] = "Libero_Floor_Manipulation"
            data.attrs["bddl_file_name"] = bddl
            data.attrs["macros_image_convention"] = "opengl"
            data.attrs["problem_info"] = json.dumps(
                {"problem_name": "libero_floor_manipulation", "language_instruction": sentence}
            )
            data.attrs["env_args"] = json.dumps(
                {"type": 1, "env_name": "Libero_Floor_Manipulation", "env_kwargs": options}
            )
            for number, episode in enumerate(of_task):
                _libero_demo(data.create_group(f"demo_{number}"), episode)
            data.attrs["num_demos"] = len(of_task)


def _libero_demo(demo: h5py.Group, episode: Played) -> None:
    seen = slice(LIBERO_SKIPPED + 1, None)
    pose = episode.proprio[seen]
    obs = demo.create_group("obs")
    obs["ee_states"], obs["ee_pos"], obs["ee_ori"] = pose[:, :6], pose[:, :3], pose[:, 3:6]
    obs["gripper_states"] = pose[:, 6:]
    obs["agentview_rgb"] = episode.images["agentview"][seen, ::-1]
    obs["eye_in_hand_rgb"] = episode.images["wrist"][seen, ::-1]
    actions = episode.actions[LIBERO_SKIPPED:]
    last = (np.arange(len(actions)) == len(actions) - 1).astype(np.uint8)
    demo["actions"], demo["rewards"], demo["dones"] = actions.astype(np.float64), last, last
    demo.attrs["num_samples"] = len(actions)


def write_robomimic(episodes: Sequence[Played], file: Path, env_name: str) -> None:
    """One file, of an env that is not robosuite's: the state is ``obs/flat``."""
    with h5py.File(file, "w") as out:
        data = out.create_group("data")
        env = {"env_name": env_name, "type": 2, "env_version": "1.0", "env_kwargs": {}}
        data.attrs["env_args"] = json.dumps(env, indent=4)
        data.attrs["total"] = sum(map(len, episodes))
        for number, episode in enumerate(episodes):
            demo = data.create_group(f"demo_{number}")
            for group, rows in (("obs", slice(None, -1)), ("next_obs", slice(1, None))):
                demo[f"{group}/flat"] = episode.proprio[rows]
                for camera, frames in episode.images.items():
                    demo[f"{group}/{camera}_image"] = frames[rows]
            demo["actions"] = episode.actions
            demo["rewards"] = episode.solved.astype(np.float64)
            demo["dones"] = (np.arange(len(episode)) == len(episode) - 1).astype(np.int64)
            demo.attrs["num_samples"] = len(episode)
        out["mask/train"] = np.array([f"demo_{n}".encode() for n in range(len(episodes))])


def write_maniskill(episodes: Sequence[Played], folder: Path, task: str) -> None:
    """ManiSkill's recorder, while its own env plays the actions. As published: no observations.

    ``python -m mani_skill.trajectory.replay_trajectory`` adds them.
    """
    import gymnasium
    import mani_skill.envs  # noqa: F401  registers the envs
    from mani_skill.utils.wrappers.record import RecordEpisode

    inner = gymnasium.make(
        task, obs_mode="none", control_mode="pd_ee_delta_pos", sim_backend="physx_cpu"
    )
    env = RecordEpisode(
        inner, str(folder), trajectory_name="trajectory", save_video=False, source_type="expert"
    )
    try:
        for episode in episodes:
            # Even seeds are those of the split "train".
            env.reset(seed=2 * episode.init, options={"reconfigure": True})
            for action in episode.actions:
                env.step(action)
    finally:
        env.close()


# RLDS: TFRecord files of tf.train.Example.


@cache
def example_class() -> Any:
    """tf.train.Example, described as in TensorFlow's example.proto and feature.proto."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = {
        "BytesList": field.TYPE_BYTES,
        "FloatList": field.TYPE_FLOAT,
        "Int64List": field.TYPE_INT64,
    }
    for name, kind in kinds.items():
        message = file.message_type.add(name=name)
        message.field.add(name="value", number=1, type=kind, label=field.LABEL_REPEATED)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(kinds, start=1):
        feature.field.add(
            name=name.lower(), number=number, type=field.TYPE_MESSAGE, type_name=f".t.{name}",
            label=field.LABEL_OPTIONAL, oneof_index=0,
        )  # fmt: skip
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(
        name="value", number=2, type=field.TYPE_MESSAGE, type_name=".t.Feature",
        label=field.LABEL_OPTIONAL,
    )  # fmt: skip
    features.field.add(
        name="feature", number=1, type=field.TYPE_MESSAGE, label=field.LABEL_REPEATED,
        type_name=".t.Features.FeatureEntry",
    )  # fmt: skip
    example = file.message_type.add(name="Example")
    example.field.add(
        name="features", number=1, type=field.TYPE_MESSAGE, type_name=".t.Features",
        label=field.LABEL_OPTIONAL,
    )  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


def encoded(values: dict[str, Any]) -> bytes:
    """An example, as protobuf's own library writes it."""
    message = example_class()()
    for key, value in values.items():
        feature = message.features.feature[key]
        if isinstance(value, list):
            feature.byteslist.value.extend(value)
        elif value.dtype.kind == "f":
            feature.floatlist.value.extend(value.reshape(-1).tolist())
        else:
            feature.int64list.value.extend(value.reshape(-1).tolist())
    return message.SerializeToString()


@cache
def _crc_table() -> list[int]:
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ 0x82F63B78 if n & 1 else n >> 1
        table.append(n)
    return table


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli)."""
    table, crc = _crc_table(), 2**32 - 1
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 2**32 - 1


def masked(data: bytes) -> bytes:
    """TFRecord's checksum of some bytes."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def write_records(file: Path, examples: Sequence[dict[str, Any]]) -> None:
    """A TFRecord file."""
    with file.open("wb") as stream:
        for example in examples:
            data = encoded(example)
            length = struct.pack("<Q", len(data))
            stream.write(length + masked(length) + data + masked(data))


def write_rlds(
    episodes: Sequence[Played], folder: Path, cameras: dict[str, str], *, turned: bool = False
) -> None:
    """Two shards.

    Args:
        episodes: to write.
        folder: of the version, such as ``pick/1.0.0``.
        cameras: camera -> name in the data set.
        turned: pictures are mirrored, as LIBERO's are after OpenGL's are turned by 180 degrees.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = folder.parent.name
    half = (len(episodes) + 1) // 2
    for shard, part in enumerate((episodes[:half], episodes[half:])):
        file = folder / f"{name}-train.tfrecord-{shard:05d}-of-00002"
        write_records(file, [_rlds_episode(e, cameras, turned) for e in part])
    (folder / "dataset_info.json").write_text(json.dumps({"name": name, "version": "1.0.0"}))


def _rlds_episode(episode: Played, cameras: dict[str, str], turned: bool) -> dict[str, Any]:
    steps = len(episode)
    last = np.arange(steps) == steps - 1
    columns = slice(None, None, -1 if turned else 1)
    pictures = {
        f"steps/observation/{name}": [
            _encoded_picture(frame[:, columns]) for frame in episode.images[camera][:-1]
        ]
        for camera, name in cameras.items()
    }
    return {
        "steps/action": episode.actions,
        "steps/observation/state": episode.proprio[:-1],
        **pictures,
        "steps/language_instruction": [episode.instruction.encode()] * steps,
        "steps/reward": (last & episode.solved.any()).astype(np.float32),
        "steps/discount": np.ones(steps, np.float32),
        "steps/is_first": (np.arange(steps) == 0).astype(np.int64),
        "steps/is_last": last.astype(np.int64),
        "steps/is_terminal": last.astype(np.int64),
        "episode_metadata/file_path": [b"demo.hdf5"],
    }


def _encoded_picture(frame: np.ndarray) -> bytes:
    out = io.BytesIO()
    # As the published builders choose.
    Image.fromarray(frame).save(out, "JPEG", quality=95)
    return out.getvalue()


# LeRobot.


def features_of(episode: Played) -> dict[str, Any]:
    """LeRobot's description of the columns."""
    features: dict[str, Any] = {}
    for key, dims in (("observation.state", episode.proprio), ("action", episode.actions)):
        names = [f"{key.split('.')[-1]}_{n}" for n in range(dims.shape[1])]
        features[key] = {"dtype": "float32", "shape": (dims.shape[1],), "names": names}
    for camera, frames in episode.images.items():
        features[f"observation.images.{camera}"] = {
            "dtype": "video", "shape": frames.shape[1:], "names": ["height", "width", "channels"],
        }  # fmt: skip
    features["next.success"] = {"dtype": "bool", "shape": (1,), "names": None}
    return features


def write_lerobot_v3(episodes: Sequence[Played], folder: Path, hz: int) -> None:
    """By LeRobot's own ``LeRobotDataset``."""
    from lerobot.configs import RGBEncoderConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    data = LeRobotDataset.create(
        "local/played",
        fps=hz,
        features=features_of(episodes[0]),
        root=folder,
        # The default, SVT-AV1, changes how the process is scheduled.
        rgb_encoder=RGBEncoderConfig(vcodec="h264", crf=23),
    )
    for episode in episodes:
        for t in range(len(episode)):
            frame = {f"observation.images.{c}": f[t] for c, f in episode.images.items()}
            frame |= {"observation.state": episode.proprio[t], "action": episode.actions[t]}
            solved = np.array([episode.solved[t]])
            data.add_frame({**frame, "next.success": solved, "task": episode.instruction})
        data.save_episode()
    data.finalize()


def write_lerobot_v21(episodes: Sequence[Played], folder: Path, hz: int) -> None:
    """One table and one video of each camera for each episode; lines of JSON for the rest."""
    (folder / "meta").mkdir(parents=True)
    sentences = list(dict.fromkeys(e.instruction for e in episodes))
    lines: dict[str, list[Any]] = {
        "tasks": [{"task_index": i, "task": s} for i, s in enumerate(sentences)],
        "episodes": [],
        "episodes_stats": [],
    }
    begun = 0
    for number, episode in enumerate(episodes):
        steps, frame = len(episode), np.arange(len(episode))
        columns = {
            "observation.state": episode.proprio[:-1], "action": episode.actions,
            "next.success": episode.solved[:, None], "timestamp": (frame / hz).astype(np.float32),
            "frame_index": frame, "episode_index": np.full(steps, number), "index": begun + frame,
            "task_index": np.full(steps, sentences.index(episode.instruction)),
        }  # fmt: skip
        table = pa.table({k: pa.array(list(v) if v.ndim > 1 else v) for k, v in columns.items()})
        file = folder / f"data/chunk-000/episode_{number:06d}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, file)
        for camera, frames in episode.images.items():
            video = f"videos/chunk-000/observation.images.{camera}/episode_{number:06d}.mp4"
            _write_video(folder / video, frames[:-1], hz)
        about = {"episode_index": number, "tasks": [episode.instruction], "length": steps}
        lines["episodes"].append(about)
        stats = {
            k: {
                "min": v.min(0).tolist(), "max": v.max(0).tolist(), "mean": v.mean(0).tolist(),
                "std": v.std(0).tolist(), "count": [steps],
            }
            for k, v in columns.items() if k in ("observation.state", "action")
        }  # fmt: skip
        lines["episodes_stats"].append({"episode_index": number, "stats": stats})
        begun += steps
    for name, rows in lines.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "meta" / f"{name}.jsonl").write_text(text)
    plain = {key: {"dtype": "int64", "shape": (1,), "names": None} for key in (
        "frame_index", "episode_index", "index", "task_index")}  # fmt: skip
    plain["timestamp"] = {"dtype": "float32", "shape": (1,), "names": None}
    info = {
        "codebase_version": "v2.1", "robot_type": "panda", "fps": hz, "chunks_size": 1000,
        "total_episodes": len(episodes), "total_frames": begun, "total_tasks": len(sentences),
        "total_videos": len(episodes) * len(episodes[0].images), "total_chunks": 1,
        "splits": {"train": f"0:{len(episodes)}"},
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        "features": features_of(episodes[0]) | plain,
    }  # fmt: skip
    (folder / "meta" / "info.json").write_text(json.dumps(info))


def _write_video(path: Path, frames: np.ndarray, hz: int) -> None:
    """H.264, which LeRobot offers; its default, SVT-AV1, changes how the process is scheduled."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as video:
        stream = video.add_stream("libx264", rate=hz, options={"crf": "23", "g": "2"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            video.mux(stream.encode(picture))
        video.mux(stream.encode())


# Real files.


def robosuite_demonstrations() -> Path:
    """Human demonstrations of Lift that robosuite's package ships: states and actions."""
    from importlib.util import find_spec

    spec = find_spec("robosuite")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "models/assets/demonstrations/lift/demo.hdf5"


def add_observations(file: Path, out: Path) -> None:
    """What robomimic's convert_robosuite.py and dataset_states_to_obs.py make of the file.

    MuJoCo puts the recorded model into each recorded state. Lift is solved where the cube is 4 cm
    above the table.
    """
    import mujoco

    assets = file.parents[2]
    with h5py.File(file) as source, h5py.File(out, "w") as target:
        about = source["data"].attrs
        options = json.loads(about["env_info"]) | {"control_freq": 20, "reward_shaping": False}
        data = target.create_group("data")
        meta = {"env_name": options.pop("env_name"), "env_version": "1.4.0", "type": 1}
        data.attrs["env_args"] = json.dumps(meta | {"env_kwargs": options}, indent=4)
        for key, recorded in source["data"].items():
            # The files of the model lie elsewhere than where it was recorded.
            xml = re.sub(r'"[^"]*/models/assets/', f'"{assets}/', recorded.attrs["model_file"])
            model = mujoco.MjModel.from_xml_string(xml)
            state = mujoco.MjData(model)
            rows: dict[str, list[np.ndarray]] = {}
            heights = []
            for row in recorded["states"][()]:
                # Time, positions, velocities.
                state.qpos[:] = row[1 : 1 + model.nq]
                state.qvel[:] = row[1 + model.nq :]
                mujoco.mj_forward(model, state)
                seen = {
                    "robot0_eef_pos": state.site("gripper0_grip_site").xpos.copy(),
                    # robosuite's order is x, y, z, w.
                    "robot0_eef_quat": np.roll(state.body("robot0_right_hand").xquat, -1),
                    "robot0_gripper_qpos": np.concatenate(
                        [state.joint(f"gripper0_finger_joint{n}").qpos for n in (1, 2)]
                    ),
                }
                for name, values in seen.items():
                    rows.setdefault(name, []).append(values)
                heights.append(state.body("cube_main").xpos[2])
            demo = data.create_group(key)
            for name, values in rows.items():
                demo[f"obs/{name}"] = np.stack(values)
            demo["actions"], demo["states"] = recorded["actions"][()], recorded["states"][()]
            # The reward of an action is that of the state after it; after the last the cube is up.
            above = (np.array([*heights[1:], heights[-1]]) > 0.84).astype(np.float64)
            demo["rewards"] = above
            demo["dones"] = (np.arange(len(above)) == len(above) - 1).astype(np.int64)
            demo.attrs["num_samples"] = len(above)
