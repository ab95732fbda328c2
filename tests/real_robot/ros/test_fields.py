"""Messages as dicts, stamps, presets and robot files: what needs no ROS."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics, limits
from embodyrl.real_robot.control.joint_tracking import Stopper
from embodyrl.real_robot.ros import fields
from embodyrl.real_robot.ros.config import PRESETS, Topics, load_robot
from embodyrl.real_robot.ros.stamps import StampConverter


@pytest.mark.parametrize("ros", [1, 2])
def test_times_are_written_as_each_ros_writes_them(ros: int) -> None:
    for value in (0.0, 0.01, 1.9999999996, 1.7e9 + 0.123456789):
        assert fields.seconds(fields.time_fields(value, ros)) == pytest.approx(value, abs=1e-6)
    assert set(fields.time_fields(1.5, ros)) == (
        {"secs", "nsecs"} if ros == 1 else {"sec", "nanosec"}
    )


def test_joints_are_found_by_name() -> None:
    message = {"name": ["b", "x", "a"], "position": [2.0, 9.0, 1.0], "velocity": []}
    np.testing.assert_array_equal(fields.by_name(message, ("a", "b"), "position"), [1.0, 2.0])
    with pytest.raises(UserError, match="lack joint c"):
        fields.by_name(message, ("a", "c"), "position")
    with pytest.raises(UserError, match="lack a velocity of each joint"):
        fields.by_name(message, ("a", "b"), "velocity")


def test_pictures_of_every_encoding_are_the_same_picture() -> None:
    image = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    message = fields.image_fields(image, 1.0, 2)
    np.testing.assert_array_equal(fields.picture(message), image)
    for encoding, pixels in (
        ("bgr8", image[..., ::-1]),
        ("rgba8", np.dstack([image, image[..., :1]])),
        ("bgra8", np.dstack([image[..., ::-1], image[..., :1]])),
    ):
        rows = np.concatenate(
            [pixels.reshape(6, -1), np.zeros((6, 3), np.uint8)], axis=1
        )  # padded rows
        other = {**message, "encoding": encoding, "step": rows.shape[1], "data": rows.tobytes()}
        np.testing.assert_array_equal(fields.picture(other), image)
    data = io.BytesIO()
    Image.fromarray(image).save(data, "PNG")
    np.testing.assert_array_equal(fields.picture({"format": "png", "data": data.getvalue()}), image)
    for wrong in ({"encoding": "16UC1"}, {"data": b"short"}, {"height": 10**9}):
        with pytest.raises(UserError, match="picture"):
            fields.picture(message | wrong)
    with pytest.raises(UserError, match="cannot be read"):
        fields.picture({"format": "gif", "data": b"GIF89a"})


def test_the_pose_is_the_commands_hand() -> None:
    q = kinematics.HOME + 0.1
    told = fields.pose(q, "base", 2.0, 2)["pose"]
    position, rotation, _ = kinematics.forward(q)
    np.testing.assert_allclose(list(told["position"].values()), position)
    x, y, z, w = (told["orientation"][axis] for axis in "xyzw")
    angle = 2 * np.arctan2(np.linalg.norm([x, y, z]), w)
    turned = kinematics.exp_rotation(angle * np.array([x, y, z]) / np.linalg.norm([x, y, z]))
    np.testing.assert_allclose(turned, rotation, atol=1e-9)


def header(stamp: float) -> dict:
    return {"stamp": fields.time_fields(stamp, 2)}


def test_stamps_tell_what_is_fresh_how_old_it_is_and_what_is_wrong() -> None:
    stamps = StampConverter("the states", 0.5)
    assert stamps.measured(header(100.0), 5.0) == pytest.approx(5.0)
    assert stamps.measured(header(100.0), 5.1) is None  # the same again
    assert stamps.measured(header(100.2), 5.2) == pytest.approx(5.2, abs=1e-3)
    assert stamps.measured(header(100.1), 5.25) is None  # overtaken on the way
    assert stamps.measured(header(101.5), 6.5) == pytest.approx(
        6.5, abs=1e-3
    )  # a second of silence is no jump
    assert stamps.measured(header(101.6), 7.6) == pytest.approx(
        6.6, abs=1e-3
    )  # a second late: old when it comes
    assert stamps.measured(header(102.7), 7.7) == pytest.approx(
        7.7, abs=1e-3
    )  # and the next one in time
    for stamp, said in (
        (105.5, r"jumped by \+2.8 s"),
        (98.0, r"jumped by -4.7 s"),
        (0.0, "without a time stamp"),
    ):
        with pytest.raises(UserError, match=said):
            stamps.measured(header(stamp), 7.7)


def test_the_stop_after_a_command_ends_at_rest_within_limits() -> None:
    safe = limits.FR3.inside()
    motion = (
        kinematics.HOME.tolist(),
        [0.5, -1.0, 0.2, 0.0, 1.0, -0.5, 2.0],
        [3.0, -5.0, 0.0, 1.0, 9.0, 0.0, -9.0],
    )
    path = Stopper(safe).plan(motion)
    times = np.linspace(0, path.duration, 400)
    velocity = np.array([path.at_time(t)[1] for t in times.tolist()])
    assert np.abs(velocity[-1]).max() < 1e-9 and path.duration < 0.5
    assert (np.abs(np.diff(velocity, axis=0)) / (times[1] - times[0]) <= safe.ddq_max * 1.01).all()


def test_robot_files(tmp_path: Path) -> None:
    file = tmp_path / "arm.yaml"
    box = "safety: {box_low: [0.3, -0.3, 0.02], box_high: [0.7, 0.3, 0.5]"
    file.write_text(
        f"preset: serl\ntopics: {{cameras: {{front: /cam/compressed}}, wrench: /force}}\n{box}}}\n"
    )
    topics, safety = load_robot(str(file))
    assert (
        topics.cameras == {"front": "/cam/compressed"} and topics.command == PRESETS["serl"].command
    )
    assert safety.robot == "panda" and safety.box_high == (0.7, 0.3, 0.5)
    for text, said in (
        ("preset: sirl", "Did you mean 'serl'"),
        ("topic: {}", "Did you mean 'topics'"),
        ("preset: crisp", "must give the workspace"),
        (f"{box}, max_gab: 1}}", "Did you mean 'max_gap'"),
        (f"topics: {{comand: /x}}\n{box}}}", "Did you mean 'command'"),
        (f"topics: {{command_type: poze}}\n{box}}}", "Did you mean 'pose'"),
        (f"topics: {{joints: [a]}}\n{box}}}", "seven joints"),
        (f"topics: {{max_image_age: .nan}}\n{box}}}", "max_image_age is nan"),
        (f"topics: {{max_clock_jump: .inf}}\n{box}}}", "max_clock_jump is inf"),
        (f"preset: crisp\n{box}}}", "names no topics.wrench"),
        (f"topics: {{wrench: ''}}\n{box}, max_force: 20.0}}", "max_force: null"),
        ("[", "not valid YAML"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=said):
            load_robot(str(file))
    with pytest.raises(UserError, match="no file"):
        load_robot(str(tmp_path / "none.yaml"))
    assert all(isinstance(topics, Topics) for topics in PRESETS.values())
