"""Depth of a robot's cameras: into the log and the data set, and not to the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodyrl.data.lerobot_read import open_dataset
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.errors import UserError
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import VirtualInference
from embodyrl.real_robot.control.preflight import robot_checks
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.control.ticker import drive
from embodyrl.real_robot.logs.export import export_logs
from embodyrl.real_robot.logs.mcap_log import RunLog, read
from embodyrl.real_robot.record.episode_logs import episode_bytes
from embodyrl.real_robot.ros import fields
from embodyrl.real_robot.twin.mujoco_twin import BOX, MujocoTwin
from embodyrl.sims.mujoco.env import MujocoConfig
from embodyrl.storage.env_spec import spec_to_json

H, HZ = 8, 25.0
SAFETY = SafetyConfig(BOX["box_low"], BOX["box_high"], robot="panda", max_force=None)


class DepthTwin(MujocoTwin):
    """The twin, with a depth map: a ramp that tells which observation it belongs to."""

    given = 0

    def observe(self, decoder: DeltaDecoder) -> dict[str, Any]:
        ramp = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32) + 300 + 8 * self.given
        ramp[:4] = 0
        self.given += 1
        return {**super().observe(decoder), "depth": {"front": ramp.astype(np.uint16)}}


def recorded(folder: Path, twin: MujocoTwin) -> None:
    """An episode with its log, of a policy that looks at all that it is shown."""
    asked: list[set[str]] = []

    def infer(seen: dict[str, Any]) -> dict[str, Any]:
        asked.append(set(seen))
        return {"actions": np.tile(np.array([0.1, 0.35, 0.2, 1.0], np.float32), (H, 1))}

    twin.begin(0)
    space = SPACES["mujoco", "ee_delta_pos"]
    executor = Executor(ExecutorConfig(H, 4, HZ, "naive"), VirtualInference(infer, lambda _: 0.05))
    facts = {"cameras": {"front": [32, 32]}, "control_hz": HZ, "control_mode": "ee_delta_pos"}
    settings = {
        "init": 0,
        "policy": facts,
        "spec": spec_to_json(replace(twin.spec, privileged_dim=0)),
    }
    log = RunLog(folder / "episode_0000.mcap", settings, twin.now(), "panda")
    decoder = DeltaDecoder(space, HZ, **BOX)
    drive(twin, twin, SafetyFilter(SAFETY), executor, decoder, log, seconds=1.0, record=True)
    log.close()
    assert asked and not any("depth" in keys for keys in asked)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    twin = DepthTwin(MujocoConfig(task="reach", image_size=32, renderer="opengl"))
    recorded(folder, twin)
    # The policy's server refuses keys that it does not know.
    twin.begin(0)
    metadata = {
        "env": "mujoco", "control_mode": "ee_delta_pos", "cameras": {"front": [32, 32]},
        "proprio_dim": 7,
    }  # fmt: skip
    checks = robot_checks(twin, metadata, SAFETY, HZ, HZ)
    assert all(c.ok for c in checks), checks
    twin.close()
    return folder


def test_each_depth_map_is_logged_with_its_picture(logs: Path) -> None:
    found = read(logs / "episode_0000.mcap")
    depths = [m["depth"] for m in found["/depth/front"]]
    assert len(depths) == len(found["/camera/front"]) == len(found["/action"]) > 20
    assert depths[0].dtype == np.uint16 and (depths[0][:4] == 0).all()
    assert (np.diff([int(d[4, 0]) for d in depths]) >= 8).all()


def test_rosbags_reads_it_as_the_types_of_jazzy(logs: Path) -> None:
    pytest.importorskip("rosbags", reason="make setup installs it")
    from rosbags.highlevel import AnyReader
    from rosbags.typesys import Stores, get_typestore

    jazzy = get_typestore(Stores.ROS2_JAZZY)
    with AnyReader([logs / "episode_0000.mcap"]) as reader:
        [connection] = [c for c in reader.connections if c.topic == "/depth/front"]
        assert connection.msgtype == "sensor_msgs/msg/Image"
        mine = reader.typestore.fielddefs[connection.msgtype]
        assert mine == jazzy.fielddefs[connection.msgtype]
        _, _, data = next(reader.messages([connection]))
        image = jazzy.deserialize_cdr(data, connection.msgtype)
    assert (image.encoding, image.height, image.width, image.step) == ("16UC1", 32, 32, 64)
    first = read(logs / "episode_0000.mcap")["/depth/front"][0]["depth"]
    np.testing.assert_array_equal(image.data.view("<u2").reshape(32, 32), first)


def test_lerobot_reads_it_from_the_data_set(logs: Path, tmp_path: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    written = export_logs(logs, tmp_path / "data", keep_failures=True)
    depths = [m["depth"] for m in read(logs / "episode_0000.mcap")["/depth/front"]]
    data = LeRobotDataset("local/data", root=tmp_path / "data", video_backend="pyav")
    assert data.meta.depth_keys == ["observation.images.front_depth"]
    for k in (0, 7, written["frames"] - 1):
        read_back = data[k]["observation.images.front_depth"].numpy().reshape(32, 32)
        # 12 bits from 1 cm to 10 m; what was not measured comes back as the nearest, 1 cm.
        np.testing.assert_allclose(read_back[4:], depths[k][4:], atol=2.0)
        assert (read_back[:4] == 10.0).all()
    # Here nothing reads it: it is no camera of a policy.
    assert list(open_dataset(tmp_path / "data").cameras) == ["observation.images.front"]
    demos = load_demonstrations(tmp_path / "data", 4, keep="all")
    assert list(demos.images) == ["front"]


def test_episodes_with_and_without_depth_are_not_mixed(logs: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "a.mcap").write_bytes((logs / "episode_0000.mcap").read_bytes())
    twin = MujocoTwin(MujocoConfig(task="reach", image_size=32, renderer="opengl"))
    recorded(tmp_path / "plain", twin)
    twin.close()
    (tmp_path / "plain" / "episode_0000.mcap").rename(mixed / "b.mcap")
    with pytest.raises(UserError, match=r"depth of the cameras \[\], not \['front'\]"):
        export_logs(mixed, tmp_path / "out", keep_failures=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"encoding": "32FC1"}, "not 16UC1"),
        ({"height": 33}, "has 2048 bytes"),
        ({"width": "x"}, "width"),
    ],
)
def test_what_is_no_depth_map_is_refused(change: dict[str, Any], told: str) -> None:
    message = fields.depth_fields(np.zeros((32, 32), np.uint16), 0.0)
    assert fields.depth_map(message).shape == (32, 32)
    with pytest.raises(UserError, match=told):
        fields.depth_map({**message, **change})


def test_depth_counts_for_the_room_on_the_disk() -> None:
    sizes = {"front": (32, 32), "wrist": (16, 16)}
    plain = episode_bytes(sizes, 10.0, 1.0, 0.01)
    assert episode_bytes(sizes, 10.0, 1.0, 0.01, ["wrist"]) - plain == 10 * 2 * 16 * 16
