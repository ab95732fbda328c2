"""Cameras that OpenCV reads, from real files; and what the pre-flight check says of them."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.real_robot.cameras.camera import Camera, CameraPicture, SourceCamera, fit_depth
from embodyrl.real_robot.cameras.config import (
    OpenCVCamera,
    RealSenseCamera,
    UvcCamera,
    camera_config,
)
from embodyrl.real_robot.cameras.open_camera import open_camera
from embodyrl.real_robot.cameras.opencv import find_uvc, open_uvc
from embodyrl.real_robot.control.device_checks import camera_report, watch_devices
from embodyrl.real_robot.control.preflight import robot_checks
from embodyrl.real_robot.control.robot import HasDevices
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.libfranka.config import load_arm
from embodyrl.real_robot.libfranka.robot import LibfrankaRobot
from embodyrl.real_robot.ros.robot import RosRobot
from embodyrl.real_robot.ros.topic_camera import TopicCamera
from embodyrl.real_robot.twin.mujoco_twin import BOX, MujocoTwin
from embodyrl.sims.mujoco.env import MujocoConfig


def film(file: Path, left: tuple[int, int, int], right: tuple[int, int, int]) -> str:
    """A film of two colours (BGR) side by side, 128 pixels wide, 25 pictures/s."""
    import cv2

    video = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"MJPG"), 25.0, (128, 48))
    picture = np.empty((48, 128, 3), np.uint8)
    picture[:, :64], picture[:, 64:] = left, right
    for _ in range(5):
        video.write(picture)
    video.release()
    return str(file)


def first(camera: Camera) -> np.ndarray:
    end = time.monotonic() + 30.0
    while camera.newest is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return camera.newest.image


RED, BLUE = (0, 0, 200), (200, 0, 0)


def test_the_newest_picture_has_the_policys_size_and_colours(tmp_path: Path) -> None:
    file = film(tmp_path / "front.avi", RED, RED)
    camera = open_camera("front", camera_config("c", file), (32, 32))
    try:
        image = first(camera)
        assert image.shape == (32, 32, 3) and image[16, 16, 0] > 150 > 50 > image[16, 16, 2]
        time.sleep(0.5)  # the file ended: no picture is newer
        assert camera.newest is not None and time.monotonic() - camera.newest.stamp > 0.2
        assert not camera.noisy
    finally:
        camera.close()


@pytest.mark.parametrize(("crop", "channel"), [("left", 0), ("right", 2)])
def test_half_of_a_picture_that_two_eyes_share(tmp_path: Path, crop: str, channel: int) -> None:
    file = film(tmp_path / "zed.avi", RED, BLUE)
    given = {"kind": "opencv", "source": file, "crop": crop, "width": 128, "fps": 25}
    camera = open_camera("zed", camera_config("c", given), (48, 64))
    try:
        image = first(camera)
        assert image.shape == (48, 64, 3) and image[:, 8:56, channel].min() > 150
        assert image[:, 8:56, 2 - channel].max() < 50 and camera.fps == 25
    finally:
        camera.close()


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("width", 640, "asked for width 640, and gives 128"),
        ("fps", 60, "asked for fps 60, and gives 25"),
        ("fourcc", "YUYV", "asked for fourcc YUYV, and gives MJPG"),
        ("fourcc", "NJPG", "asked for fourcc NJPG, and gives MJPG"),
    ],
)
def test_what_a_camera_cannot_do_is_said(tmp_path: Path, key: str, value: Any, told: str) -> None:
    file = film(tmp_path / "a.avi", RED, BLUE)
    with pytest.raises(UserError, match=told):
        open_camera("a", camera_config("c", {"kind": "opencv", "source": file, key: value}), (8, 8))
    with pytest.raises(UserError, match="Camera front cannot be opened"):
        open_camera("front", OpenCVCamera(str(tmp_path / "none.avi")), (32, 32))


def device(root: Path, number: int, name: str, index: int = 0) -> None:
    folder = root / f"video{number}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "index").write_text(f"{index}\n")


def test_a_usb_camera_by_its_name(tmp_path: Path) -> None:
    root, dev = tmp_path / "sys", tmp_path / "dev"
    device(root, 10, "HD Pro Webcam C920: HD Pro Webc")
    device(root, 11, "HD Pro Webcam C920: HD Pro Webc", 1)  # of its metadata
    device(root, 2, "HD Pro Webcam C920: HD Pro Webc")
    device(root, 0, "Integrated Camera")
    assert find_uvc("HD Pro Webcam C920", root) == ["video2", "video10"]
    assert find_uvc("Integrated", root) == ["video0"] and find_uvc("ZED", root) == []
    # What is opened is the device's file, here a film.
    dev.mkdir()
    Path(film(tmp_path / "a.avi", RED, RED)).rename(dev / "video10")
    config = camera_config("c", {"kind": "uvc", "name": "C920", "number": 1})
    assert isinstance(config, UvcCamera)
    camera = open_uvc("side", config, (32, 32), root, dev)
    assert first(camera)[16, 16, 0] > 150
    camera.close()
    with pytest.raises(UserError, match=r"no USB camera named 'ZED'.*'HD Pro.*'Integrated Camera'"):
        open_uvc("side", UvcCamera("ZED"), (32, 32), root, dev)
    with pytest.raises(UserError, match="only 2 USB camera named 'C920'"):
        open_uvc("side", UvcCamera("C920", 2), (32, 32), root, dev)
    with pytest.raises(UserError, match="Linux knows these: none"):
        open_uvc("side", UvcCamera("C920"), (32, 32), tmp_path / "nothing", dev)


def test_without_opencv_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(MissingDependencyError, match="pip install opencv-python-headless"):
        open_camera("front", OpenCVCamera("0"), (32, 32))


def test_kinds_of_a_robots_file(tmp_path: Path) -> None:
    file = tmp_path / "arm.yaml"
    file.write_text(
        "libfranka:\n  cameras:\n    front: /dev/video0\n    side: 2\n"
        "    wrist: {kind: realsense, serial: 123622270472, depth: true, fps: 60}\n"
        "    top: {kind: uvc, name: ZED 2i, crop: left, width: 1344, height: 376, fourcc: MJPG}\n"
        "safety: {box_low: [0.3, -0.3, 0.0], box_high: [0.7, 0.3, 0.5]}\n"
    )
    assert load_arm(str(file))[0].cameras == {
        "front": OpenCVCamera("/dev/video0"),
        "side": OpenCVCamera("2"),
        "wrist": RealSenseCamera("123622270472", fps=60, depth=True),
        "top": UvcCamera("ZED 2i", crop="left", width=1344, height=376, fourcc="MJPG"),
    }


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kind": "realsens"}, "c has no kind 'realsens'. Did you mean 'realsense'"),
        ({"source": 0}, "c has no kind ''"),
        ({"kind": "opencv"}, "c: An opencv camera needs its source"),
        ({"kind": "uvc"}, "c: A uvc camera needs its name"),
        ({"kind": "uvc", "name": "a", "crop": "top"}, "crop"),
        ({"kind": "uvc", "name": "a", "depth": True}, "c has no key 'depth'"),
        ({"kind": "realsense", "fps": 0}, "fps"),
        ({"kind": "opencv", "source": 0, "fourcc": "MJPEG"}, "four letters"),
        (True, "c is True"),
        ([1], "c is .1."),
    ],
)
def test_wrong_settings_are_named(given: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        camera_config("c", given)


def test_depth_is_cut_as_the_picture_and_never_averaged() -> None:
    depth = np.full((48, 64), 1000, np.uint16)
    depth[:, 20:44] = 500
    depth[:, 8:12] = 0  # the left edge of what is kept
    small = fit_depth(depth, (24, 24))
    assert small.shape == (24, 24) and set(np.unique(small)) == {0, 500, 1000}
    assert (small[:, :2] == 0).all() and (small[:, 6:18] == 500).all() and small[0, 2] == 1000
    np.testing.assert_array_equal(fit_depth(depth, (48, 64)), depth)


@dataclass
class Drawn:
    """A source that draws what a sensor could give."""

    hz: float = 50.0
    delay: float = 0.01
    level: int = 128
    fails: str = ""
    frozen: bool = False
    depth: int | None = None
    jumps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._image = self._draw()

    def _draw(self) -> np.ndarray:
        return self._random.integers(0, self.level, (24, 24, 3)).astype(np.uint8)

    def read(self) -> CameraPicture | None:
        if self.fails:
            raise RuntimeError(self.fails)
        time.sleep(1.0 / self.hz)
        if not self.frozen:
            self._image = self._draw()
        delay = self.jumps.pop() if self.jumps else self.delay
        depth = None if self.depth is None else np.full((24, 24), self.depth, np.uint16)
        return CameraPicture(time.monotonic() - delay, self._image.copy(), depth)

    def close(self) -> None:
        return


def reported(source: Drawn, fps: float = 0.0, noisy: bool = True, least: float = 10.0) -> str:
    camera = SourceCamera("front", source, (24, 24), fps, noisy)
    try:
        seen, _ = watch_devices({"front": camera}, None)
        return camera_report(camera, seen["front"], 0.3, least)
    finally:
        camera.close()


def test_pre_flight_says_rate_age_and_jitter() -> None:
    assert reported(Drawn(depth=500)).endswith("depth of 100% of the pixels")
    # Slow enough for a busy machine.
    found = reported(Drawn(hz=20.0), fps=20.0)
    rate, age = int(found.split()[0]), int(found.split()[2])
    assert 16 <= rate <= 21 and 10 <= age <= 40 and "jitter" in found


@pytest.mark.parametrize(
    ("source", "options", "told"),
    [
        (Drawn(hz=12.0), {"fps": 30.0}, "1. pictures/s came, of the 30 that it was asked for"),
        (Drawn(hz=8.0), {"least": 20.0}, "pictures/s came, and 20 are needed"),
        (Drawn(hz=2.5), {"least": 1.0}, r"ms old before the next one comes.*300 .max_image_age"),
        (Drawn(delay=0.5), {}, "max_image_age"),
        (Drawn(delay=-0.2), {}, r"stamped \d{3} ms in the future"),
        (Drawn(jumps=[-0.01, 0.1] * 200), {}, "go backwards"),
        (Drawn(frozen=True), {}, "repeats its picture to the last bit"),
        (Drawn(depth=0), {}, "Its depth is empty"),
        (Drawn(level=12), {}, "Its picture is black"),
        (Drawn(fails="VIDIOC_DQBUF"), {}, "No new picture came within 1 s .RuntimeError: VIDIOC"),
    ],
)
def test_pre_flight_refuses_in_words(source: Drawn, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        reported(source, **options)


def test_a_drawn_picture_may_repeat() -> None:
    assert "pictures/s" in reported(Drawn(frozen=True), noisy=False)


class WatchedTwin(MujocoTwin):
    """The twin, with a camera and a gripper that are watched as those of a real arm."""

    camera: Camera

    def cameras(self) -> dict[str, Camera]:
        return {"front": self.camera}

    def max_image_age(self) -> float:
        return 0.3

    def gripper(self) -> None:
        return None


def test_the_table_has_a_line_for_each_camera_and_ends_at_one_that_fails() -> None:
    twin = WatchedTwin(MujocoConfig(task="reach", image_size=32, renderer="opengl"))
    twin.begin(0)
    metadata = {
        "env": "mujoco", "control_mode": "ee_delta_pos", "cameras": {"front": [32, 32]},
        "proprio_dim": 7,
    }  # fmt: skip
    safety = SafetyConfig(BOX["box_low"], BOX["box_high"], robot="panda", max_force=None)
    found = {}
    for source, looks in ((Drawn(), 10.0), (Drawn(hz=12.0), 30.0)):
        twin.camera = SourceCamera("front", source, (24, 24), 0.0, True)
        checks = robot_checks(twin, metadata, safety, 30.0, looks)
        found = {check.name: check.ok for check in checks}
        assert found["camera front"] == (looks == 10.0), checks
        assert ("cameras and proprio" in found) == (looks == 10.0)
        twin.camera.close()
    twin.close()


def test_topics_and_libfranka_are_watched_and_simulated_time_is_not() -> None:
    assert issubclass(RosRobot, HasDevices) and issubclass(LibfrankaRobot, HasDevices)
    assert not issubclass(MujocoTwin, HasDevices)
    images: dict[str, tuple[float, np.ndarray]] = {}
    camera: Camera = TopicCamera("front", images)
    assert camera.newest is None
    images["front"] = (1.0, np.zeros((4, 4, 3), np.uint8))
    first = camera.newest
    assert first is not None and first.stamp == 1.0 and camera.newest is first
    images["front"] = (1.5, np.zeros((4, 4, 3), np.uint8))  # equal, but another picture
    assert camera.newest is not None and camera.newest is not first
