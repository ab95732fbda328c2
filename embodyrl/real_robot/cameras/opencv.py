"""Cameras that OpenCV reads: by number, path, address, or by the name of a USB camera."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.real_robot.cameras.camera import Camera, CameraPicture, SourceCamera
from embodyrl.real_robot.cameras.config import Asked, OpenCVCamera, UvcCamera

V4L = Path("/sys/class/video4linux")
"""Where Linux lists video devices: ``videoN/name`` and ``videoN/index``."""
DEV = Path("/dev")
"""Where their files are."""


class OpenCVSource:
    """See ``Source``.

    Args:
        name: the policy's, for messages.
        config: of the camera.

    Raises:
        MissingDependencyError: there is no OpenCV.
        UserError: it cannot be opened, or does not give what it is asked for.
    """

    def __init__(self, name: str, config: OpenCVCamera) -> None:
        try:
            import cv2
        except ImportError as error:
            raise MissingDependencyError(
                "Cameras need OpenCV, which is not installed. Install it with: pip install "
                "opencv-python-headless"
            ) from error
        source = config.source
        self._crop = config.crop
        self._capture = cv2.VideoCapture(int(source) if source.isdigit() else source)
        if not self._capture.isOpened():
            raise UserError(
                f"Camera {name} cannot be opened at {source}. Is it there, and not in use "
                "elsewhere?"
            )
        try:
            self._ask(cv2, name, config)
        except BaseException:
            self._capture.release()
            raise

    def _ask(self, cv2: Any, name: str, config: OpenCVCamera) -> None:
        """Asks for a format, which must be set before the size, and a size before the rate."""
        # 1. Ask.
        asked: dict[str, tuple[int, float]] = {}
        if config.fourcc:
            code = float(cv2.VideoWriter.fourcc(*config.fourcc))
            asked["fourcc"] = (cv2.CAP_PROP_FOURCC, code)
        for key, prop in (
            ("width", cv2.CAP_PROP_FRAME_WIDTH),
            ("height", cv2.CAP_PROP_FRAME_HEIGHT),
            ("fps", cv2.CAP_PROP_FPS),
        ):
            if value := getattr(config, key):
                asked[key] = (prop, float(value))
        for prop, value in asked.values():
            self._capture.set(prop, value)
        # 2. A driver takes the nearest that it can do, and does not say so.
        for key, (prop, value) in asked.items():
            got = self._capture.get(prop)
            # Rates are measured, a format is a code of four letters.
            if abs(got - value) > (0.0 if key == "fourcc" else 0.01 * value):
                said = _letters(int(got)) if key == "fourcc" else f"{got:g}"
                raise UserError(
                    f"Camera {name} was asked for {key} {getattr(config, key)}, and gives {said}. "
                    "v4l2-ctl --list-formats-ext shows what it can do."
                )

    def read(self) -> CameraPicture | None:
        """See ``Source``."""
        there, image = self._capture.read()
        if not there:
            return None
        came = time.monotonic()
        half = image.shape[1] // 2
        columns = {"whole": slice(None), "left": slice(half), "right": slice(half, 2 * half)}
        # OpenCV gives BGR.
        rgb = image[:, columns[self._crop], ::-1]
        return CameraPicture(came, np.ascontiguousarray(rgb, np.uint8))

    def close(self) -> None:
        """See ``Source``."""
        self._capture.release()


def open_opencv(name: str, config: OpenCVCamera, size: tuple[int, int]) -> Camera:
    """Opens what OpenCV opens; see ``open_camera``."""
    # The pictures of a file may be drawn ones.
    noisy = not Path(config.source).is_file()
    return SourceCamera(name, OpenCVSource(name, config), size, config.fps, noisy)


def open_uvc(
    name: str, config: UvcCamera, size: tuple[int, int], root: Path = V4L, dev: Path = DEV
) -> Camera:
    """Opens a USB camera by its name.

    Args:
        name: the policy's, for messages.
        config: of the camera.
        size: (height, width) of the policy's picture.
        root: where Linux lists video devices.
        dev: where their files are.

    Raises:
        MissingDependencyError: there is no OpenCV.
        UserError: no such camera, or it cannot be opened.
    """
    found = find_uvc(config.name, root)
    if config.number >= len(found):
        there = sorted({_name_of(folder) for folder in root.glob("video*")} - {""})
        here = ", ".join(repr(each) for each in there) or "none"
        many = f"only {len(found)}" if found else "no"
        raise UserError(
            f"Camera {name}: there is {many} USB camera named {config.name!r} (number "
            f"{config.number}). Linux knows these: {here}."
        )
    options = {f.name: getattr(config, f.name) for f in fields(Asked)}
    source = str(dev / found[config.number])
    return open_opencv(name, OpenCVCamera(source=source, **options), size)


def find_uvc(name: str, root: Path = V4L) -> list[str]:
    """Names of the device files of the cameras with a name, in the order of their numbers.

    A camera has several device files, and the first (``index`` 0) gives its pictures.

    Args:
        name: the whole name, or a part of it.
        root: where Linux lists video devices.
    """
    folders = sorted(root.glob("video*"), key=lambda f: int(f.name.removeprefix("video") or 0))
    found = []
    for folder in folders:
        index = folder / "index"
        first = not index.is_file() or index.read_text().strip() == "0"
        if first and name in _name_of(folder):
            found.append(folder.name)
    return found


def _name_of(folder: Path) -> str:
    """What Linux calls the video device of a folder; empty if it is gone."""
    try:
        return (folder / "name").read_text().strip()
    except OSError:
        return ""


def _letters(code: int) -> str:
    """A FourCC as text."""
    return code.to_bytes(4, "little", signed=False).decode("latin-1") if code > 0 else "none"
