"""A simulated RealSense: librealsense's own software device, into which frames are put.

Alignment, synchronisation and stamps are librealsense's; only the sensor is not real.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyrealsense2 as rs  # type: ignore[import-not-found]

WIDTH, HEIGHT = 64, 48
FOCUS = 60.0
"""Pixels."""
APART = 0.05
"""m from the depth camera to the colour camera, to the right."""


def _stream(kind: Any, uid: int, size: int, form: Any, fps: int) -> Any:
    """A video stream of the device."""
    lens = rs.intrinsics()
    lens.width, lens.height = WIDTH, HEIGHT
    lens.fx = lens.fy = FOCUS
    lens.ppx, lens.ppy = WIDTH / 2, HEIGHT / 2
    lens.model = rs.distortion.none
    lens.coeffs = [0.0] * 5
    stream = rs.video_stream()
    stream.type, stream.index, stream.uid = kind, 0, uid
    stream.width, stream.height, stream.fps = WIDTH, HEIGHT, fps
    stream.bpp, stream.fmt, stream.intrinsics = size, form, lens
    return stream


class RealSenseDevice:
    """A camera that shows noise, and a wall at ``wall`` m with a box at ``box`` m before it.

    Attributes:
        ahead: s by which its clock is ahead.
        domain: whose clock stamps its frames.
        frozen: whether it repeats its picture.
        recorder: what its sensors are opened through.
    """

    wall, box = 1.0, 0.5

    def __init__(self, units: float = 1e-3, fps: int = 30, record: Path | None = None) -> None:
        self.units = units
        self.fps = fps
        self.ahead = 0.0
        self.domain = rs.timestamp_domain.system_time
        self.frozen = False
        self.sent = 0
        self._random = np.random.default_rng(0)
        self._picture = self._noise()
        device = self._device = rs.software_device()
        device.register_info(rs.camera_info.name, "Simulated D435")
        device.register_info(rs.camera_info.serial_number, "123456")
        self._depth = device.add_sensor("Stereo Module")
        self._colour = device.add_sensor("RGB Camera")
        self._depth.add_read_only_option(rs.option.depth_units, units)
        self._depth_profile = self._depth.add_video_stream(
            _stream(rs.stream.depth, 1, 2, rs.format.z16, fps)
        )
        self._colour_profile = self._colour.add_video_stream(
            _stream(rs.stream.color, 2, 3, rs.format.rgb8, fps)
        )
        between = rs.extrinsics()
        between.rotation = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
        between.translation = [-APART, 0.0, 0.0]
        self._depth_profile.register_extrinsics_to(self._colour_profile, between)
        device.create_matcher(rs.matchers.dlr_c)
        self.frames = rs.syncer()
        self.recorder = device if record is None else rs.recorder(str(record), device)
        self._sensors = list(self.recorder.query_sensors())
        for sensor in self._sensors:
            sensor.open(sensor.get_stream_profiles())
            sensor.start(self.frames)
        self._sending = False
        self._thread: threading.Thread | None = None

    def _noise(self) -> np.ndarray:
        picture = self._random.integers(60, 100, (HEIGHT, WIDTH, 3), np.uint8)
        picture[:, WIDTH // 2 :, 0] += 100  # red on the right
        return picture

    def depth(self) -> np.ndarray:
        """(h, w) in steps of ``units``: the box in the middle; a corner is not measured."""
        metres = np.full((HEIGHT, WIDTH), self.wall)
        metres[16:32, 24:40] = self.box
        metres[:4, :4] = 0.0
        return np.rint(metres / self.units).astype(np.uint16)

    def send(self) -> None:
        """One picture with its depth."""
        self.sent += 1
        if not self.frozen:
            self._picture = self._noise()
        stamp = (time.time() + self.ahead) * 1e3
        both = (
            (self._depth, self._depth_profile, self.depth(), 2),
            (self._colour, self._colour_profile, self._picture, 3),
        )
        for sensor, profile, pixels, size in both:
            frame = rs.software_video_frame()
            frame.pixels = np.ascontiguousarray(pixels)
            frame.stride, frame.bpp = WIDTH * size, size
            frame.timestamp, frame.domain = stamp, self.domain
            frame.frame_number, frame.profile = self.sent, profile.as_video_stream_profile()
            if size == 2:
                frame.depth_units = self.units
            sensor.on_video_frame(frame)

    def start(self) -> None:
        """Sends at its rate until ``stop``."""
        self._sending = True
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        due = time.monotonic()
        while self._sending:
            self.send()
            due += 1.0 / self.fps
            time.sleep(max(0.0, due - time.monotonic()))

    def stop(self) -> None:
        """Sends no more."""
        self._sending = False
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            self._thread = None

    def close(self) -> None:
        """Closes the sensors, which ends a recording."""
        self.stop()
        for sensor in self._sensors:
            sensor.stop()
            sensor.close()
        self._sensors = []
