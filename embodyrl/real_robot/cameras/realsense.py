"""RealSense cameras by librealsense: colour, and depth that is aligned with it."""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.real_robot.cameras.camera import Camera, CameraPicture, Depth, SourceCamera
from embodyrl.real_robot.cameras.config import RealSenseCamera

WAIT = 1000
"""ms to wait for the next picture."""
LARGEST = np.iinfo(np.uint16).max


def librealsense() -> Any:
    """The module ``pyrealsense2``.

    Raises:
        MissingDependencyError: it is not installed, or lacks libusb.
    """
    try:
        import pyrealsense2
    except ImportError as error:
        raise MissingDependencyError(
            f"A RealSense needs pyrealsense2 and libusb ({error}). Install them: pip install "
            "'embodyrl[realsense]' and apt-get install libusb-1.0-0"
        ) from error
    return pyrealsense2


class RealSenseSource:
    """See ``Source``.

    Args:
        frames: a started ``pyrealsense2.pipeline``, or a ``syncer``.
        stop: ends them.
        depth: whether depth is taken.
        own_clock: whether the stamps are of another time than now, as in a recording.
    """

    def __init__(
        self, frames: Any, stop: Callable[[], object], depth: bool, own_clock: bool = False
    ) -> None:
        self._rs = librealsense()
        self._frames = frames
        self._stop = stop
        self._own_clock = own_clock
        # Depth is moved to where the colour camera sees it.
        self._align = self._rs.align(self._rs.stream.color) if depth else None

    def read(self) -> CameraPicture | None:
        """See ``Source``."""
        try:
            frames = self._frames.wait_for_frames(WAIT)
        except RuntimeError:  # none came in time, or the camera is gone
            return None
        came = time.monotonic()
        if self._align is not None:
            frames = self._align.process(frames)
        colour = frames.get_color_frame()
        if not colour:
            return None
        depth = None
        if self._align is not None:
            measured = frames.get_depth_frame()
            if not measured:
                return None
            depth = _millimetres(np.asanyarray(measured.get_data()), measured.get_units())
        # The frame's memory is librealsense's, which uses it again.
        image = np.array(colour.get_data(), np.uint8)
        return CameraPicture(self._taken(colour, came), image, depth)

    def _taken(self, frame: Any, came: float) -> float:
        """When a frame was taken (s, monotonic).

        librealsense stamps by this computer's clock, or by the camera's clock converted to it. A
        stamp of the camera's clock alone says nothing here; then it is when the frame came.
        """
        domains = self._rs.timestamp_domain
        ours = (domains.system_time, domains.global_time)
        if self._own_clock or frame.get_frame_timestamp_domain() not in ours:
            return came
        return time.monotonic() - (time.time() - frame.get_timestamp() / 1e3)

    def close(self) -> None:
        """See ``Source``."""
        self._stop()


def open_realsense(name: str, config: RealSenseCamera, size: tuple[int, int]) -> Camera:
    """Opens a RealSense, or a recording of one; see ``open_camera``."""
    rs = librealsense()
    wanted = rs.config()
    # 1. Which one.
    if config.recording:
        if not Path(config.recording).is_file():
            raise UserError(f"Camera {name}: there is no recording {config.recording}.")
        wanted.enable_device_from_file(config.recording, repeat_playback=True)
    elif config.serial:
        wanted.enable_device(config.serial)
    # 2. What it shall give.
    shape = (config.width, config.height)
    wanted.enable_stream(rs.stream.color, *shape, rs.format.rgb8, config.fps)
    if config.depth:
        wanted.enable_stream(rs.stream.depth, *shape, rs.format.z16, config.fps)
    pipeline = rs.pipeline()
    try:
        pipeline.start(wanted)
    except RuntimeError as error:
        asked = f"{config.width}x{config.height} at {config.fps}"
        raise UserError(
            f"Camera {name}: the RealSense {config.recording or config.serial} does not give colour"
            f"{' and depth' if config.depth else ''} of {asked} pictures/s ({error}). Connected: "
            f"{_connected(rs) or 'none'}."
        ) from error
    source = RealSenseSource(pipeline, pipeline.stop, config.depth, bool(config.recording))
    return SourceCamera(name, source, size, config.fps, not config.recording, config.depth)


def _connected(rs: Any) -> str:
    """The cameras that are connected, with their serial numbers."""
    info = rs.camera_info
    return ", ".join(
        f"{device.get_info(info.name)} {device.get_info(info.serial_number)}"
        for device in rs.context().query_devices()
        if device.supports(info.name) and device.supports(info.serial_number)
    )


def _millimetres(raw: np.ndarray, units: float) -> Depth:
    """A depth map in mm, from one in steps of ``units`` m."""
    if abs(units - 1e-3) < 1e-9:
        return np.array(raw, np.uint16)
    # What is too far away for 16 bits was not measured.
    scaled = np.rint(raw * (units * 1e3))
    return np.where(scaled > LARGEST, 0, scaled).astype(np.uint16)
