"""RealSense by librealsense itself, with a simulated device (``make test-robot`` has it)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.real_robot.cameras.camera import CameraPicture, SourceCamera
from embodyrl.real_robot.cameras.config import RealSenseCamera, camera_config
from embodyrl.real_robot.cameras.open_camera import open_camera
from embodyrl.real_robot.cameras.realsense import RealSenseSource, librealsense
from embodyrl.real_robot.control.device_checks import camera_report, watch_devices

try:
    librealsense()
    HERE = True
except MissingDependencyError:
    HERE = False
pytestmark = pytest.mark.robot
needs_sdk = pytest.mark.skipif(not HERE, reason="no pyrealsense2 here; make test-robot has it")
SIZE = (24, 24)


@pytest.fixture
def device() -> Iterator:
    from realsense_device import RealSenseDevice

    device = RealSenseDevice()
    device.start()
    yield device
    device.close()


@pytest.fixture
def camera(device) -> Iterator[SourceCamera]:
    source = RealSenseSource(device.frames, lambda: None, depth=True)
    camera = SourceCamera("wrist", source, SIZE, device.fps, noisy=True)
    yield camera
    camera.close()


def first(camera) -> CameraPicture:
    end = time.monotonic() + 30.0
    while camera.newest is None:
        assert time.monotonic() < end
        time.sleep(0.005)
    return camera.newest


def report(camera, least_hz: float = 1.0) -> str:
    return camera_report(camera, watch_devices({"wrist": camera}, None)[0]["wrist"], 0.5, least_hz)


@needs_sdk
def test_colour_and_aligned_depth(device, camera) -> None:
    picture = first(camera)
    assert picture.image.shape == (*SIZE, 3) and picture.depth is not None
    assert picture.image[:, 18, 0].min() > 140 > 120 > picture.image[:, 4, 0].max()
    # 64x48 is cut to 48x48 and halved. The box at .5 m is moved to where the colour camera sees it,
    # by focus x apart / distance = 6 pixels to the left; the wall by 3.
    depth = picture.depth
    assert depth.shape == SIZE and depth.dtype == np.uint16
    columns = np.flatnonzero(depth[12] == 500)
    assert abs(columns.mean() - (32 - 6 - 8) / 2 + 0.5) <= 1.0, depth[12]
    assert set(np.unique(depth)) <= {0, 500, 1000} and (depth == 1000).mean() > 0.5


@needs_sdk
def test_stamps_are_those_of_the_camera_where_its_clock_is_ours(device, camera) -> None:
    import pyrealsense2 as rs  # type: ignore[import-not-found]

    first(camera)
    device.ahead = -0.2  # exposed .2 s before it arrives
    time.sleep(0.3)
    assert 0.15 < time.monotonic() - camera.newest.stamp < 0.4
    device.domain = rs.timestamp_domain.hardware_clock  # of no use here
    device.ahead = 5000.0
    time.sleep(0.3)
    assert abs(time.monotonic() - camera.newest.stamp) < 0.15


@needs_sdk
def test_pre_flight(device, camera) -> None:
    found = report(camera)
    assert "pictures/s" in found and "% of the pixels" in found
    assert 20 <= int(found.split()[0]) <= 31
    device.frozen = True
    time.sleep(0.2)
    with pytest.raises(UserError, match="repeats its picture to the last bit"):
        report(camera)
    device.frozen = False
    device.ahead = 0.3
    time.sleep(0.2)
    with pytest.raises(UserError, match=r"stamped \d+ ms in the future"):
        report(camera)
    device.ahead = -1.0
    time.sleep(0.2)
    with pytest.raises(UserError, match=r"gets 1\d+ ms old"):
        report(camera)
    device.ahead = 0.0
    device.fps = 10
    time.sleep(0.3)
    with pytest.raises(UserError, match="of the 30 that it was asked for"):
        report(camera)
    device.stop()
    with pytest.raises(UserError, match="No new picture"):
        report(camera)


@needs_sdk
def test_steps_of_a_tenth_of_a_millimetre(tmp_path: Path) -> None:
    from realsense_device import RealSenseDevice

    device = RealSenseDevice(units=1e-4)
    device.wall = 6.0
    device.start()
    camera = SourceCamera(
        "w", RealSenseSource(device.frames, lambda: None, depth=True), SIZE, 30, True
    )
    depth = first(camera).depth
    assert depth is not None and {500, 6000} <= set(np.unique(depth)) <= {0, 500, 6000}
    camera.close()
    device.close()


@needs_sdk
def test_a_recording_goes_through_the_pipeline(tmp_path: Path) -> None:
    from realsense_device import HEIGHT, WIDTH, RealSenseDevice

    file = tmp_path / "table.db3"
    device = RealSenseDevice(record=file)
    device.start()
    time.sleep(1.2)
    device.close()
    del device
    given = {"kind": "realsense", "recording": str(file), "depth": True}
    given |= {"width": WIDTH, "height": HEIGHT}
    camera = open_camera("wrist", camera_config("c", given), SIZE)
    try:
        picture = first(camera)
        assert picture.depth is not None and 500 in picture.depth and 1000 in picture.depth
        end = time.monotonic() + 4.0  # longer than the recording
        stamps: set[float] = set()
        while time.monotonic() < end:
            assert camera.newest is not None
            stamps.add(camera.newest.stamp)
            time.sleep(0.005)
        assert len(stamps) > 60 and time.monotonic() - max(stamps) < 0.5
    finally:
        camera.close()
    wrong = camera_config("c", given | {"width": 128})
    with pytest.raises(UserError, match="colour and depth of 128x48 at 30"):
        open_camera("wrist", wrong, SIZE)


@needs_sdk
def test_a_camera_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"Camera wrist: the RealSense 99 .*Connected: none"):
        open_camera("wrist", RealSenseCamera(serial="99"), SIZE)
    with pytest.raises(UserError, match="there is no recording /none"):
        open_camera("wrist", RealSenseCamera(recording="/none"), SIZE)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyrealsense2", None)
    with pytest.raises(
        MissingDependencyError, match=r"pip install 'embodyrl\[realsense\]'.*libusb"
    ):
        open_camera("wrist", RealSenseCamera(), SIZE)
