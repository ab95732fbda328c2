"""The settings of cameras in a robot's file, and the table of their kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from embodyrl.errors import UserError, did_you_mean
from embodyrl.ranges import Choice, Range

Pixels = Annotated[int, Range(16, 8192, also=(0,))]
Rate = Annotated[int, Range(1, 1000, also=(0,))]
Part = Annotated[str, Choice("whole", "left", "right")]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a camera that OpenCV reads is asked for.

    Attributes:
        width: pixels, of both halves where it has two; 0 leaves it to the camera.
        height: the same.
        fps: pictures per second; 0 leaves it to the camera.
        fourcc: pixel format, such as ``MJPG``, which many USB cameras need for large pictures;
            empty leaves it to the camera.
        crop: ``"left"`` or ``"right"`` takes that half of the picture: a ZED shows both its eyes
            side by side.
    """

    width: Pixels = 0
    height: Pixels = 0
    fps: Rate = 0
    fourcc: str = ""
    crop: Part = "whole"

    def __post_init__(self) -> None:
        if len(self.fourcc) not in (0, 4):
            raise UserError(f"fourcc is {self.fourcc!r}; a pixel format has four letters: MJPG.")


@dataclass(frozen=True)
class OpenCVCamera(Asked):
    """``kind: opencv``: whatever OpenCV opens; see ``Asked``.

    Attributes:
        source: a number, a device's path, or an address; a file is played once.
    """

    source: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.source:
            raise UserError("An opencv camera needs its source: a number, a path, or an address.")


@dataclass(frozen=True)
class UvcCamera(Asked):
    """``kind: uvc``: a USB camera by its name, which stays when its number changes; see ``Asked``.

    Attributes:
        name: what Linux calls it, or a part of that: ``v4l2-ctl --list-devices`` shows it.
        number: which of several cameras of that name, from 0, in the order of their device files.
    """

    name: str = ""
    number: Annotated[int, Range(0, 63)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name:
            raise UserError("A uvc camera needs its name: see v4l2-ctl --list-devices.")


@dataclass(frozen=True)
class RealSenseCamera:
    """``kind: realsense``: a RealSense by librealsense.

    Attributes:
        serial: its serial number, as ``rs-enumerate-devices -s`` shows it; empty takes the only one.
        width: pixels of colour and depth.
        height: the same.
        fps: pictures per second.
        depth: whether depth is taken too, and aligned with the colour picture.
        recording: a recording of librealsense that is played instead of a camera, over and over.
    """

    serial: str = ""
    width: Annotated[int, Range(16, 8192)] = 640
    height: Annotated[int, Range(16, 8192)] = 480
    fps: Annotated[int, Range(1, 1000)] = 30
    depth: bool = False
    recording: str = ""


CameraConfig = OpenCVCamera | UvcCamera | RealSenseCamera
KINDS: dict[str, type[CameraConfig]] = {
    "opencv": OpenCVCamera,
    "uvc": UvcCamera,
    "realsense": RealSenseCamera,
}
"""What ``kind`` may be."""


def camera_config(section: str, given: Any) -> CameraConfig:
    """The settings of one camera.

    Args:
        section: where they stand, for messages.
        given: a mapping with ``kind``; or a number, path or address, which OpenCV opens.

    Raises:
        UserError: an unknown kind or key, or a bad value.
    """
    from embodyrl.storage.config_section import build_section

    if isinstance(given, str | int) and not isinstance(given, bool):
        return OpenCVCamera(source=str(given))
    if not isinstance(given, dict):
        raise UserError(
            f"{section} is {given!r}. Give what OpenCV opens (a number, a path or an address), or a "
            "kind with its settings, such as {kind: realsense, serial: '123'}."
        )
    kind = str(given.get("kind", ""))
    if kind not in KINDS:
        raise UserError(f"{section} has no kind {kind!r}. {did_you_mean(kind, list(KINDS))}")
    # A camera's number, or its serial number, may be written without quotes.
    rest = {
        key: str(value) if key in ("source", "serial") and type(value) is int else value
        for key, value in given.items()
        if key != "kind"
    }
    try:
        return build_section(section, KINDS[kind], rest)
    except UserError as error:
        said = str(error)
        raise UserError(said if said.startswith(section) else f"{section}: {said}") from error
