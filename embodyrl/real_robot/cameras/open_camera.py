"""Opens a camera of any kind. A kind's package is imported when a camera of it is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embodyrl.real_robot.cameras import opencv, realsense
from embodyrl.real_robot.cameras.camera import Camera
from embodyrl.real_robot.cameras.config import (
    CameraConfig,
    OpenCVCamera,
    RealSenseCamera,
    UvcCamera,
)

OPENERS: dict[type, Callable[[str, Any, tuple[int, int]], Camera]] = {
    OpenCVCamera: opencv.open_opencv,
    UvcCamera: opencv.open_uvc,
    RealSenseCamera: realsense.open_realsense,
}
"""Settings -> what opens such a camera."""


def open_camera(name: str, config: CameraConfig, size: tuple[int, int]) -> Camera:
    """Opens a camera.

    Args:
        name: the policy's, for messages.
        config: its settings.
        size: (height, width) of the policy's picture.

    Raises:
        MissingDependencyError: its package is not installed.
        UserError: it cannot be opened, or does not give what it is asked for.
    """
    return OPENERS[type(config)](name, config, size)
